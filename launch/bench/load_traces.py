"""Traces of loads: files of them, and synthetic ones.

Shape letters: I steps, L layers, C senders, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np


def write_loads(path: Path, rows_ILCE: np.ndarray, steps_I: Iterable[int]) -> None:
    """Write a load trace: ``rows_ILCE`` and ``steps_I`` in one compressed ``.npz``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, rows_ILCE=rows_ILCE, steps_I=np.asarray(list(steps_I)))


def read_loads(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a load trace: rows int64 ``[I, L, C, E]`` and steps ``[I]``.

    Raises:
        ValueError: the file is no load trace.
    """
    with np.load(path) as file:
        if "rows_ILCE" not in file or file["rows_ILCE"].ndim != 4:
            raise ValueError(
                f"{path} holds {sorted(file)}, but a load trace needs rows_ILCE of 4 dims; write "
                "one with write_loads of launch/bench/load_traces.py"
            )
        return file["rows_ILCE"].astype(np.int64), file["steps_I"]


def read_trace(path: Path) -> list[np.ndarray]:
    """Rows ``[I, L, C, E]`` of each run of evenly spaced steps."""
    with np.load(path) as file:
        is_other = "counts_IRLE" in file
        if is_other:
            rows_ILCE = file["counts_IRLE"].transpose(0, 2, 1, 3).astype(np.int64)
            steps_I = file["iteration_I"]
    if not is_other:
        rows_ILCE, steps_I = read_loads(path)
    gaps = np.diff(steps_I)
    return np.split(rows_ILCE, np.flatnonzero(gaps > np.median(gaps)) + 1)


def zipf_loads(
    shape: tuple[int, int, int, int], *, rows: int, skew: float, seed: int = 0
) -> np.ndarray:
    """Synthetic loads, int64 ``[I, L, C, E]``: the first steps of ``zipf_steps``, which takes the
    same arguments.

    Args:
        shape: ``(I, L, C, E)``.
    """
    loads = np.empty(shape, dtype=np.int64)
    for step_LCE, rows_LCE in zip(loads, zipf_steps(shape[1:], rows=rows, skew=skew, seed=seed)):
        step_LCE[:] = rows_LCE
    return loads


def zipf_steps(
    shape: tuple[int, int, int], *, rows: int, skew: float, seed: int = 0
) -> Iterator[np.ndarray]:
    """Loads of one step after another without end, int64 ``[L, C, E]``: Zipf shares of experts in
    an order of each layer's own, which drifts a little from step to step.

    Args:
        shape: ``(L, C, E)``.
        rows: rows of each sender in each step and layer.
        skew: exponent; 0 is uniform.
        seed: of the generator.
    """
    num_layers, num_senders, num_experts = shape
    random = np.random.default_rng(seed)
    log_share_LE = np.stack(
        [-skew * np.log1p(random.permutation(num_experts)) for _ in range(num_layers)]
    )
    while True:
        share_LE = np.exp(log_share_LE)
        share_LE /= share_LE.sum(axis=1, keepdims=True)
        yield np.stack(
            [random.multinomial(rows, share_E, size=num_senders) for share_E in share_LE]
        )
        log_share_LE = log_share_LE + 0.05 * random.standard_normal(log_share_LE.shape)
