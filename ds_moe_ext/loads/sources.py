# SPDX-License-Identifier: Apache-2.0
"""Loads by a name or from a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from ds_moe_ext.loads.count_tables import read_table, write_table
from ds_moe_ext.loads.loads import Loads
from ds_moe_ext.loads.redivision import redivided
from ds_moe_ext.loads.routing_traces import read_traces, write_traces
from ds_moe_ext.loads.run_reports import read_report
from ds_moe_ext.loads.sizes import Sizes
from ds_moe_ext.loads.workloads import WORKLOADS, workload_rows
from ds_moe_ext.loads.zipf import TRAINED, Zipf, zipf_rows
from ds_moe_ext.strict import nearest_and_all

DISTRIBUTIONS = {"zipf": Zipf(1.2), "trained": TRAINED}
NAMES = (*WORKLOADS, *DISTRIBUTIONS)
"""Of generators."""

SYNONYMS = {"uniform": "balanced", "even": "balanced", "skewed": "zipf"}
"""Words that errors understand: a person may know loads by these."""

WRITERS: dict[str, Callable[[Path, Loads], None]] = {".npz": write_table, ".jsonl": write_traces}


def read_loads(
    given: str,
    *,
    ranks: int | None = None,
    experts: int | None = None,
    layers: int | None = None,
    tokens: int | None = None,
    top_k: int | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> Loads:
    """Loads of a generator, or of a file that is divided anew for another grid.

    Args:
        given: a generator's name with its parameters, as ``hot_rank``, ``zipf:1.4`` or
            ``zipf:1.4,drift=0.1,seed=3``; or the path of a table (``.npz``), of routing traces of
            Megatron (``.jsonl``, or a folder of them) or of a run's report (``.json``).
        ranks: senders; None: as many as the file has, or what ``Sizes`` says. So for all that
            follow.
        experts: of each layer; a file has its own.
        layers: of a file the first so many; where it has fewer, they begin again.
        tokens: of a rank in a step, in the mean.
        top_k: choices a token. A table may not know it, and is told so; one that does has its own.
        steps: of a file the first so many.
        seed: of a generator whose name has none.

    Raises:
        ValueError: no such name or file, or sizes that it cannot have.
    """
    name, _, parameters = given.partition(":")
    if name in NAMES:
        sizes = {
            "ranks": ranks,
            "experts": experts,
            "layers": layers,
            "tokens": tokens,
            "top_k": top_k,
            "steps": steps,
        }
        said = {key: value for key, value in sizes.items() if value is not None}
        return _generated(given, name, parameters, Sizes(**said), seed)
    loads = _read(given, experts)
    if top_k is not None and loads.top_k is None:
        loads = dataclasses.replace(loads, top_k=top_k)
    for what, wanted, has in (
        ("experts", experts, loads.rows_ILCE.shape[-1]),
        ("top_k", top_k, loads.top_k),
    ):
        if wanted is not None and wanted != has:
            raise ValueError(
                f"{what} is {wanted}, but {given} has {has}, which cannot be changed; leave it "
                f"out, or name a generator: {', '.join(NAMES)}"
            )
    return redivided(loads, ranks=ranks, tokens=tokens, layers=layers, steps=steps)


def check_ending(path: Path) -> None:
    """Whether loads can be written to a file of this name.

    Raises:
        ValueError: it has another ending.
    """
    if path.suffix not in WRITERS:
        raise ValueError(f"{path} ends on {path.suffix!r}; let it end on {' or '.join(WRITERS)}")


def write_loads(path: Path, loads: Loads) -> None:
    """Write a table (``.npz``), or a routing trace as Megatron does (``.jsonl``).

    Raises:
        ValueError: another ending, or choices that a trace needs are not known.
    """
    check_ending(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    WRITERS[path.suffix](path, loads)


def _generated(given: str, name: str, parameters: str, sizes: Sizes, seed: int) -> Loads:
    known = _parameters(given, name, parameters)
    seed = int(known.pop("seed", seed))
    if seed < 0:
        raise ValueError(f"the seed is {seed}; give 0 or more")
    if name in WORKLOADS:
        rows_ILCE = workload_rows(WORKLOADS[name], sizes, seed)
    else:
        zipf = dataclasses.replace(DISTRIBUTIONS[name], **known)
        rows_ILCE = zipf_rows(sizes, seed, zipf)
    return Loads(rows_ILCE, np.arange(sizes.steps), given, sizes.top_k)


def _parameters(given: str, name: str, text: str) -> dict[str, float]:
    """Those after the colon: ``KEY=VALUE``, parted by commas; the first may be a value alone."""
    fields = [field.name for field in dataclasses.fields(Zipf)] if name in DISTRIBUTIONS else []
    keys = [*fields, "seed"]
    known: dict[str, float] = {}
    for index, part in enumerate(text.split(",") if text else ()):
        key, equals, value = part.rpartition("=")
        key = key if equals or index else keys[0]
        if key not in keys or key in known:
            raise ValueError(
                f"{given!r} says {part!r}; after {name}: give {', '.join(keys)}, each once, as "
                "KEY=VALUE, parted by commas"
            )
        try:
            known[key] = int(value) if key not in fields else float(value)
        except ValueError as error:
            raise ValueError(f"{given!r} says {part!r}; give {key} a number") from error
    return known


def _read(given: str, experts: int | None) -> Loads:
    readers: dict[str, Callable[[Path], Loads]] = {
        ".npz": read_table,
        ".json": read_report,
        ".jsonl": partial(read_traces, num_experts=experts),
    }
    path = Path(given)
    is_folder = path.is_dir()
    if not is_folder and path.suffix not in readers:
        raise ValueError(
            f"{given!r} is neither the name of loads nor ends on {', '.join(readers)}; "
            f"{nearest_and_all(given.partition(':')[0], NAMES, SYNONYMS)}"
        )
    if not (is_folder or path.is_file()):
        raise ValueError(f"{given!r} is no file that is there; give the path of one")
    return readers[".jsonl" if is_folder else path.suffix](path)
