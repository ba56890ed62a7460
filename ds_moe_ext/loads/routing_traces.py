# SPDX-License-Identifier: Apache-2.0
"""Routing traces of Megatron-core (``--moe-routing-trace-path``): JSONL, a line for each step,
layer and rank, with the experts of every token.

Shape letters: I steps, L layers, C senders (ranks), E experts, T tokens, K choices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds_moe_ext.files.documents import parsed
from ds_moe_ext.loads.loads import Loads, check_size
from ds_moe_ext.strict import fields_of, read_record

FILES = "router_trace_rank*.jsonl"
"""As Megatron names them, one a rank, in a folder."""

MOST_LINE_BYTES = 2**28
MOST_EXPERTS = 2**16
DECODER, STAGE = "decoder", "pre_dispatch"


@dataclass(frozen=True, kw_only=True)
class Line:
    """What is read of a line; what else it has is left.

    Attributes:
        step: its number.
        layer: within its block.
        rank: that sent.
        top_indices: experts of each token, ``[T][K]``.
        block: "decoder", or "mtp" of those that predict more tokens.
        mtp_idx: which of the latter.
    """

    step: int
    layer: int
    rank: int
    top_indices: list[Any]
    block: str = DECODER
    mtp_idx: int = -1


KEYS = {field.name for field in fields_of(Line)}


def write_traces(path: Path, loads: Loads) -> None:
    """Write loads of all ranks into one file, for tokens that have these counts.

    Raises:
        ValueError: choices a token are not known.
    """
    if loads.top_k is None:
        raise ValueError(
            f"{path} shall have the experts of every token, but choices a token of {loads.source} "
            "are not known; give top_k, or write .npz"
        )
    with path.open("w", encoding="utf-8") as file:
        for step, rows_LCE in zip(loads.steps_I.tolist(), loads.rows_ILCE):
            for layer, rows_CE in enumerate(rows_LCE):
                for rank, rows_E in enumerate(rows_CE):
                    experts_TK = _tokens_of(rows_E, loads.top_k)
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


def _tokens_of(rows_E: np.ndarray, top_k: int) -> np.ndarray:
    """Different experts ``[T, K]`` of tokens: rows in the order of experts, dealt in turn."""
    experts_N = np.repeat(np.arange(len(rows_E)), rows_E)
    return np.sort(experts_N.reshape(top_k, -1).T, axis=1)


def read_traces(path: Path, num_experts: int | None = None) -> Loads:
    """Read a file, or all of a folder; lines of one step, layer and rank are added.

    Args:
        path: of a file, or of a folder with files of every rank.
        num_experts: ``E``; None: as many as the highest that is chosen tells.

    Raises:
        ValueError: a line is wrong, or one is missing.
    """
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
            counts[key] = _added(counts.get(key), rows_E)
    if not counts:
        raise ValueError(
            f"{path} has no lines of a routing trace; name a file, or a folder of {FILES}"
        )
    return _table(path, counts, top_k, num_experts)


def _lines(path: Path) -> Iterator[tuple[str, Line]]:
    try:
        with path.open("rb") as file:
            number = 0
            while text := file.readline(MOST_LINE_BYTES + 1):
                number += 1
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


def _added(rows: np.ndarray | None, more: np.ndarray) -> np.ndarray:
    if rows is None:
        return more
    short, long = sorted((rows, more), key=len)
    added = long.copy()
    added[: len(short)] += short
    return added


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
