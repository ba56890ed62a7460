# SPDX-License-Identifier: Apache-2.0
"""Loads by a name or from a file, and for another grid than they are of.

``read_loads`` asks a generator (``load_models``) or one of the ``READERS``: of our tables
(``.npz``), of Megatron-core's routing traces (``--moe-routing-trace-path``: JSONL, a line for each
step, layer and rank, with the experts of every token) or of the ``report.json`` that a run left;
``redivided`` then gives them other ranks, tokens, layers or steps. Files of ``configs/loads`` are
found by their names; each is the part of a ``report.json`` that is read, and says where its counts
come from. ``write_loads`` writes the first two. Shape letters: I steps, L layers, C or R senders
(ranks), E experts.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds_moe_ext.files.documents import file_of, names_of, parsed, read_document
from ds_moe_ext.planning.load_models import TRAINED, WORKLOADS, Zipf, workload_rows, zipf_rows
from ds_moe_ext.planning.loads import MOST_ROWS, Loads, Sizes, check_size
from ds_moe_ext.strict import at_least, fields_of, nearest_and_all, read_record

FILES = "router_trace_rank*.jsonl"
"""As Megatron names them, one a rank, in a folder."""
MOST_LINE_BYTES = 2**28
MOST_EXPERTS = 2**16
DECODER, STAGE = "decoder", "pre_dispatch"

DISTRIBUTIONS = {"zipf": Zipf(1.2), "trained": TRAINED}
NAMES = (*WORKLOADS, *DISTRIBUTIONS)
"""Of generators."""
SYNONYMS = {"uniform": "balanced", "even": "balanced", "skewed": "zipf"}
"""Words that errors understand: a person may know loads by these."""

OURS = "rows_ILCE", "steps_I"
OTHERS = "counts_IRLE", "iteration_I"


def write_table(path: Path, loads: Loads) -> None:
    """Write ``rows_ILCE``, ``steps_I`` and ``top_k``, 0 if that is not known."""
    with path.open("wb") as file:
        np.savez_compressed(
            file, rows_ILCE=loads.rows_ILCE, steps_I=loads.steps_I, top_k=loads.top_k or 0
        )


def read_table(path: Path) -> Loads:
    """Read what ``write_table`` wrote, or ``counts_IRLE`` and ``iteration_I``."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
            rows, steps = OTHERS if OTHERS[0] in names else OURS
            wanted = [name for name in (rows, steps, "top_k") if name in names]
            if wanted[:2] != [rows, steps]:
                raise ValueError(f"it holds {sorted(names)}, but needs {rows} and {steps}")
            tables = {name: _array(archive, name) for name in wanted}
    except (OSError, EOFError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"{path} is no table of loads ({error}); name an .npz file that has rows_ILCE, counts "
            "by step, layer, sender and expert, and steps_I"
        ) from error
    rows_ILCE = tables[rows]
    if rows == OTHERS[0]:
        rows_ILCE = rows_ILCE.swapaxes(1, 2)
    top_k = int(tables.get("top_k", 0)) or None
    return Loads(rows_ILCE, tables[steps], str(path), top_k)


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """One of numbers, whose size is looked at before there is memory for it."""
    with archive.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"{name} is of version {version} of numpy's format, not (1, 0)")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        dims = {"rows_ILCE": 4, "counts_IRLE": 4, "top_k": 0}.get(name, 1)
        if len(shape) != dims or dtype.kind not in "iu":
            raise ValueError(
                f"{name} is {dtype} of shape {list(shape)}, not whole numbers of {dims} dims"
            )
        check_size(shape, name)
    with archive.open(f"{name}.npy") as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array


@dataclass(frozen=True, kw_only=True)
class Line:
    """What is read of a line; what else it has is left."""

    step: int  # its number
    layer: int  # within its block
    rank: int  # that sent
    top_indices: list[Any]  # experts of each token, ``[T][K]``
    block: str = DECODER  # "decoder", or "mtp" of those that predict more tokens
    mtp_idx: int = -1  # which of the latter


KEYS = {field.name for field in fields_of(Line)}


def write_traces(path: Path, loads: Loads) -> None:
    """Write loads of all ranks into one file, for tokens that have these counts."""
    if loads.top_k is None:
        raise ValueError(
            f"{path} shall have the experts of every token, but choices a token of {loads.source} "
            "are not known; give top_k, or write .npz"
        )
    with path.open("w", encoding="utf-8") as file:
        for step, rows_LCE in zip(loads.steps_I.tolist(), loads.rows_ILCE):
            for layer, rows_CE in enumerate(rows_LCE):
                for rank, rows_E in enumerate(rows_CE):
                    # Rows in the order of experts, dealt to tokens in turn: all different.
                    experts_N = np.repeat(np.arange(len(rows_E)), rows_E)
                    experts_TK = np.sort(experts_N.reshape(loads.top_k, -1).T, axis=1)
                    line = {
                        "step": step,
                        "stage": STAGE,
                        "block": DECODER,
                        "layer": layer,
                        "rank": rank,
                        "num_tokens": len(experts_TK),
                        "topk": loads.top_k,
                        "top_indices": experts_TK.tolist(),
                    }
                    file.write(json.dumps(line) + "\n")


def read_traces(path: Path, num_experts: int | None = None) -> Loads:
    """Read a file, or all of a folder; lines of one step, layer and rank are added."""
    files = sorted(filter(Path.is_file, path.glob(FILES))) if path.is_dir() else [path]
    counts: dict[tuple[Any, ...], np.ndarray] = {}  # by layer, step and rank
    top_k = 0
    for file in files:
        for where, line in _lines(file):
            rows_E, choices = _counted(line, where, num_experts)
            top_k = top_k or choices
            if choices != top_k:
                raise ValueError(
                    f"{where} has {choices} choices a token, but others {top_k}; keep the lines of "
                    "layers with the same number"
                )
            key = (
                (line.block != DECODER, line.block, line.mtp_idx, line.layer),
                line.step,
                line.rank,
            )
            short, long = sorted((counts.get(key, rows_E[:0]), rows_E), key=len)
            counts[key] = long.copy()
            counts[key][: len(short)] += short
    if not counts:
        raise ValueError(
            f"{path} has no lines of a routing trace; name a file, or a folder of {FILES}"
        )
    return _table(path, counts, top_k, num_experts)


def _lines(path: Path) -> Iterator[tuple[str, Line]]:
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                text = file.readline(MOST_LINE_BYTES + 1)
                if not text:
                    return
                if text.strip():
                    where = f"{path}:{number}"
                    yield where, _line(text, where)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); name a routing trace"
        ) from error


def _line(text: bytes, where: str) -> Line:
    try:
        if len(text) > MOST_LINE_BYTES:
            raise ValueError(f"it is longer than {MOST_LINE_BYTES} bytes")
        values = parsed(text.decode())
    except ValueError as error:
        raise ValueError(
            f"{where} cannot be read as JSON ({error}); name a routing trace, a record a line"
        ) from error
    if isinstance(values, dict):
        values = {key: value for key, value in values.items() if key in KEYS}
    return read_record(Line, values, where)


def _counted(line: Line, where: str, num_experts: int | None) -> tuple[np.ndarray, int]:
    """Rows of each expert, and choices a token."""
    try:
        experts_TK = np.asarray(line.top_indices)
    except ValueError as error:
        raise ValueError(
            f"{where}: tokens have unlike numbers of experts; give all as many"
        ) from error
    if experts_TK.ndim != 2 or experts_TK.dtype != np.int64 or not experts_TK.size:
        raise ValueError(
            f"{where}: top_indices has shape {list(experts_TK.shape)} of {experts_TK.dtype}; "
            "give a list of experts for each token"
        )
    least, most = int(experts_TK.min()), int(experts_TK.max())
    if least < 0 or most >= (num_experts or MOST_EXPERTS):
        raise ValueError(
            f"{where}: experts go from {least} to {most}; give 0 to "
            f"{(num_experts or MOST_EXPERTS) - 1}"
        )
    experts_TK = np.sort(experts_TK, axis=1)
    if (experts_TK[:, 1:] == experts_TK[:, :-1]).any():
        raise ValueError(f"{where}: a token has an expert twice; its choices must be different")
    return np.bincount(experts_TK.ravel()), experts_TK.shape[1]


def _table(
    path: Path, counts: dict[tuple[Any, ...], np.ndarray], top_k: int, num_experts: int | None
) -> Loads:
    layers, steps = (sorted({key[part] for key in counts}) for part in (0, 1))
    ranks = {layer: sorted({key[2] for key in counts if key[0] == layer}) for layer in layers}
    num_ranks = len(ranks[layers[0]])
    for layer in layers:  # pipeline stages have layers, and ranks, of their own
        if len(ranks[layer]) != num_ranks:
            raise ValueError(
                f"{path}: layer {layer[3]} is traced on {len(ranks[layer])} ranks, but others on "
                f"{num_ranks}; name the traces of all ranks"
            )
    found = max(map(len, counts.values()))
    shape = len(steps), len(layers), num_ranks, num_experts or found
    check_size(shape, str(path))
    rows_ILCE = np.zeros(shape, dtype=np.int64)
    for index, layer in enumerate(layers):
        for step, rows_CE in zip(steps, rows_ILCE[:, index]):
            for rank, rows_E in zip(ranks[layer], rows_CE):
                if (layer, step, rank) not in counts:
                    raise ValueError(
                        f"{path} has no line of step {step}, layer {layer[3]}, rank {rank}; trace "
                        "all ranks in the same steps, or remove that step's lines"
                    )
                seen_E = counts[layer, step, rank]
                rows_E[: len(seen_E)] = seen_E
    return Loads(rows_ILCE, np.asarray(steps), str(path), top_k)


def redivided(
    loads: Loads,
    *,
    ranks: int | None = None,
    tokens: int | None = None,
    layers: int | None = None,
    steps: int | None = None,
) -> Loads:
    """The same loads on another grid; what is None stays.

    Other ranks alone keep every expert's rows: the senders stand in a line that is cut into equal
    pieces, by whole tokens; some senders are joined, some divided. Other tokens multiply each
    sender's rows and round them to whole ones, largest remainder first, the lower index among
    equals: no sender's rows of an expert are off by one or more. A single step is repeated: its
    loads stand for those of all, and a planner that goes by earlier steps forecasts them exactly.
    """
    for name, value in (("ranks", ranks), ("tokens", tokens), ("layers", layers), ("steps", steps)):
        at_least(name, value, 1)
    rows_ILCE, steps_I = loads.rows_ILCE, loads.steps_I
    num_steps, num_layers, num_senders, num_experts = rows_ILCE.shape
    if steps is not None and steps > num_steps == 1:
        check_size((steps, *rows_ILCE.shape[1:]), loads.source)
        rows_ILCE, steps_I = rows_ILCE.repeat(steps, axis=0), steps_I[0] + np.arange(steps)
        num_steps = steps
    if steps is not None and steps > num_steps:
        raise ValueError(
            f"steps is {steps}, but {loads.source} has {num_steps}; give that many or fewer"
        )
    if steps is not None:
        rows_ILCE, steps_I = rows_ILCE[-steps:], steps_I[-steps:]
    if layers is not None:
        check_size((len(steps_I), layers, num_senders, num_experts), loads.source)
        rows_ILCE = rows_ILCE[:, np.arange(layers) % num_layers]
    top_k = loads.top_k or 1
    if ranks is not None and ranks != num_senders:
        check_size((*rows_ILCE.shape[:2], ranks, num_experts), loads.source)
        rows_ILCE = _cut_anew(rows_ILCE, ranks, top_k)
    if tokens is not None:
        rows_ILCE = _with_tokens(rows_ILCE, tokens, top_k)
    return dataclasses.replace(loads, rows_ILCE=rows_ILCE, steps_I=steps_I)


def _cut_anew(rows_ILCE: np.ndarray, ranks: int, top_k: int) -> np.ndarray:
    num_senders = rows_ILCE.shape[2]
    rows_ILDE = np.zeros((*rows_ILCE.shape[:2], ranks, rows_ILCE.shape[3]), dtype=np.int64)
    for sender in range(num_senders):
        # In pieces of which a sender had ``ranks`` and shall have ``num_senders``.
        first = -(-sender * ranks // num_senders) * num_senders  # where one to come begins inside
        between = range(first, (sender + 1) * ranks, num_senders)
        cuts = sorted({sender * ranks, (sender + 1) * ranks, *between})
        targets = [cut // num_senders for cut in cuts[:-1]]
        pieces = np.array(cuts) - sender * ranks
        parts_ILPE = _parts(rows_ILCE[:, :, sender], pieces, ranks, top_k)
        rows_ILDE[:, :, targets] += parts_ILPE
    return rows_ILDE


def _parts(rows_ILE: np.ndarray, pieces: np.ndarray, whole: int, top_k: int) -> np.ndarray:
    """Rows ``[I, L, P, E]`` of a sender's parts, each of whole tokens.

    In the order of experts the sender's rows are dealt to its tokens in turn. Each token gets
    ``top_k`` different experts, as none has more rows than there are tokens; each part gets tokens
    evenly from among them, and so its part of every expert's rows, to one or two.
    """
    if len(pieces) == 2:
        return rows_ILE[:, :, None]
    shape = rows_ILE.shape
    rows_NE = rows_ILE.reshape(-1, shape[2])
    tokens_N = rows_NE.sum(axis=1) // top_k
    parts_NPE = np.zeros((len(rows_NE), len(pieces) - 1, shape[2]), dtype=np.int64)
    for tokens in np.unique(tokens_N):
        is_such_N = tokens_N == tokens
        parts_NPE[is_such_N] = _dealt(rows_NE[is_such_N], np.diff(tokens * pieces // whole))
    return parts_NPE.reshape(*shape[:2], -1, shape[2])


def _dealt(rows_NE: np.ndarray, tokens_P: np.ndarray) -> np.ndarray:
    """Rows ``[N, P, E]`` of parts that have so many tokens."""
    num_parts, num_tokens = len(tokens_P), int(tokens_P.sum())
    part_T = np.repeat(np.arange(num_parts), tokens_P)
    number_T = np.arange(num_tokens) - np.repeat(tokens_P.cumsum() - tokens_P, tokens_P)
    order_T = np.argsort((number_T + 0.5) / tokens_P[part_T], kind="stable")
    before_TP = np.zeros((num_tokens + 1, num_parts), dtype=np.int64)
    before_TP[1:] = (part_T[order_T][:, None] == np.arange(num_parts)).cumsum(axis=0)
    ends_NE = rows_NE.cumsum(axis=1)
    ends_NE1 = np.concatenate([np.zeros_like(ends_NE[:, :1]), ends_NE], axis=1)
    rounds_NE1, token_NE1 = np.divmod(ends_NE1, max(num_tokens, 1))
    until_NE1P = rounds_NE1[:, :, None] * tokens_P + before_TP[token_NE1]
    dealt_NPE: np.ndarray = np.diff(until_NE1P, axis=1).swapaxes(1, 2)
    return dealt_NPE


def _with_tokens(rows_ILCE: np.ndarray, tokens: int, top_k: int) -> np.ndarray:
    had_ILC = rows_ILCE.sum(axis=-1) // top_k
    all_IL = np.full(rows_ILCE.shape[:2], tokens * rows_ILCE.shape[2])
    if not had_ILC.sum(axis=-1).all():
        raise ValueError(
            f"tokens is {tokens}, but in some layer and step nobody has any, which no number "
            "multiplies; leave tokens out"
        )
    if int(all_IL.max()) * top_k > MOST_ROWS:
        raise ValueError(
            f"tokens is {tokens}, on {rows_ILCE.shape[2]} ranks with {top_k} choices each too many "
            f"rows to count; give {MOST_ROWS // (rows_ILCE.shape[2] * top_k)} at most"
        )
    return _apportioned(rows_ILCE, top_k * _apportioned(had_ILC, all_IL))


def _apportioned(weights_N: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Whole numbers ``[..., N]`` in proportion to weights, with a given sum ``[...]``: the largest
    remainders are rounded up, the first among equals."""
    sums = np.maximum(weights_N.sum(axis=-1, keepdims=True), 1)
    parts_N, over_N = np.divmod(weights_N * whole[..., None], sums)
    left = np.where(weights_N.any(axis=-1), whole - parts_N.sum(axis=-1), 0)
    order_N = np.argsort(-over_N, axis=-1, kind="stable")
    is_up_N = np.arange(weights_N.shape[-1]) < left[..., None]
    up_N = np.zeros_like(parts_N)
    np.put_along_axis(up_N, order_N, is_up_N.astype(np.int64), axis=-1)
    apportioned: np.ndarray = parts_N + up_N
    return apportioned


def read_report(path: Path) -> Loads:
    """Loads of the steps that a run's report has."""
    try:
        document = read_document(path)
        steps_I, num_ep_ranks = document["steps_I"], document["num_cells"]
        top_ks = [layer["top_k"] for layer in document["layers"]]
        if not (steps_I and top_ks and isinstance(num_ep_ranks, int) and num_ep_ranks > 0):
            raise ValueError("it has no steps, layers or EP ranks")
        rows_ILE = np.asarray(document["rows_ILE"])
        if rows_ILE.ndim != 3:
            raise ValueError(f"its rows_ILE have {rows_ILE.ndim} dims, not 3")
        check_size((*rows_ILE.shape[:2], num_ep_ranks, rows_ILE.shape[2]), "rows_ILE")
        loads = Loads(rows_ILE[:, :, None], np.asarray(steps_I), str(path))
        loads = dataclasses.replace(loads, top_k=_top_k(rows_ILE, num_ep_ranks, top_ks))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no report.json of a run with loads ({error}); name that of a finished run"
        ) from error
    return redivided(loads, ranks=num_ep_ranks)


def _top_k(rows_ILE: np.ndarray, num_ep_ranks: int, top_ks: list[Any]) -> int | None:
    """That of all layers, where the rows are those of whole tokens: not where some were dropped."""
    top_k: Any = top_ks[0]
    if not isinstance(top_k, int) or top_k < 1 or any(other != top_k for other in top_ks):
        return None
    rows_IL = rows_ILE.sum(axis=2)
    are_whole = not (rows_IL % (top_k * num_ep_ranks)).any()
    return top_k if are_whole and (rows_ILE.max(axis=2) * top_k <= rows_IL).all() else None


READERS: dict[str, Callable[[Path, int | None], Loads]] = {
    ".npz": lambda path, experts: read_table(path),
    ".json": lambda path, experts: read_report(path),
    ".jsonl": read_traces,
}
"""By ending: loads of a file, of layers that have so many experts, where that is known."""
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
            ``zipf:1.4,drift=0.1,seed=3``; a name of ``configs/loads``; or the path of a table
            (``.npz``), of routing traces of Megatron (``.jsonl``, or a folder of them) or of a
            run's report (``.json``).
        ranks: senders; None: as many as the file has, or what ``Sizes`` says. So for all that
            follow.
        experts: of each layer; a file has its own.
        layers: of a file the first so many; where it has fewer, they begin again.
        tokens: of a rank in a step, in the mean.
        top_k: choices a token. A table may not know it, and is given it; one that does has its
            own.
        steps: of a file the last so many; one that has a single step has it so often.
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
        stated = Sizes(**{key: value for key, value in sizes.items() if value is not None})
        known = _parameters(given, name, parameters)
        seed = int(known.pop("seed", seed))
        if seed < 0:
            raise ValueError(f"the seed is {seed}; give 0 or more")
        if name in WORKLOADS:
            rows_ILCE = workload_rows(WORKLOADS[name], stated, seed)
        else:
            rows_ILCE = zipf_rows(stated, seed, dataclasses.replace(DISTRIBUTIONS[name], **known))
        return Loads(rows_ILCE, np.arange(stated.steps), given, stated.top_k)
    path = file_of("loads", given)
    is_folder = path.is_dir()
    if not is_folder and path.suffix not in READERS:
        raise ValueError(
            f"{given!r} is neither the name of loads nor ends on {', '.join(READERS)}; "
            f"{nearest_and_all(name, (*NAMES, *names_of('loads')), SYNONYMS)}"
        )
    if not (is_folder or path.is_file()):
        raise ValueError(f"{given!r} is no file that is there; give the path of one")
    loads = READERS[".jsonl" if is_folder else path.suffix](path, experts)
    loads = dataclasses.replace(loads, source=given)
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
    """Refuse a file whose ending says nothing that loads are written as."""
    if path.suffix not in WRITERS:
        raise ValueError(f"{path} ends on {path.suffix!r}; let it end on {' or '.join(WRITERS)}")


def write_loads(path: Path, loads: Loads) -> None:
    """Write a table (``.npz``), or a routing trace as Megatron does (``.jsonl``)."""
    check_ending(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    WRITERS[path.suffix](path, loads)


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
