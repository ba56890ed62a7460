"""Loads of experts: a moving window that predicts the next step, and files of them. Pure.

Shape letters: I steps, L layers, C senders, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path

import numpy as np


class LoadWindow:
    """The rows of the last steps, of all layers; their mean predicts the next step.

    Routing moves slowly: between steps ten apart the shares of a real run's experts differ by 0.03
    in total variation, on average (HECATE and Pro-Prophet both build on it).

    Args:
        num_steps: steps that are remembered.
    """

    def __init__(self, num_steps: int) -> None:
        if num_steps < 1:
            raise ValueError(f"a window of {num_steps} steps remembers nothing; give 1 or more")
        self._steps: deque[np.ndarray] = deque(maxlen=num_steps)

    def push(self, rows_LCE: np.ndarray) -> None:
        """Remember one step, int64 ``[L, C, E]``; the oldest is forgotten."""
        if self._steps and self._steps[-1].shape != rows_LCE.shape:
            raise ValueError(
                f"a step of shape {rows_LCE.shape} does not fit the window's "
                f"{self._steps[-1].shape}; start a new window when layers or ranks change"
            )
        self._steps.append(rows_LCE)

    def __len__(self) -> int:
        return len(self._steps)

    def steps(self) -> np.ndarray:
        """The remembered steps, the oldest first, int64 ``[I, L, C, E]``; all 0 long if none."""
        return np.stack(self._steps) if self._steps else np.zeros((0, 0, 0, 0), dtype=np.int64)

    def predicted(self) -> np.ndarray:
        """Mean rows of the remembered steps, float ``[L, C, E]``.

        Raises:
            ValueError: nothing was pushed yet.
        """
        if not self._steps:
            raise ValueError("the window is empty; push a step before asking for a prediction")
        mean: np.ndarray = np.mean(self._steps, axis=0)
        return mean


def balance_L(cell_rows_LC: np.ndarray) -> np.ndarray:
    """Rows of the busiest cell over the mean, ``[..., L]`` from ``[..., L, C]``; 1 is perfect, and
    where nothing was routed."""
    mean_L = cell_rows_LC.mean(axis=-1)
    return np.where(mean_L > 0, cell_rows_LC.max(axis=-1) / np.maximum(mean_L, 1e-12), 1.0)


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
                "one with ds_moe_ext.load.write_loads"
            )
        return file["rows_ILCE"].astype(np.int64), file["steps_I"]


def zipf_loads(
    shape: tuple[int, int, int, int], *, rows: int, skew: float, seed: int = 0
) -> np.ndarray:
    """Synthetic loads, int64 ``[I, L, C, E]``: Zipf shares of experts in an order of each layer's
    own, which drifts a little from step to step.

    Args:
        shape: ``(I, L, C, E)``.
        rows: rows of each sender in each step and layer.
        skew: exponent; 0 is uniform.
        seed: of the generator.
    """
    num_steps, num_layers, num_senders, num_experts = shape
    random = np.random.default_rng(seed)
    log_share_LE = np.stack(
        [-skew * np.log1p(random.permutation(num_experts)) for _ in range(num_layers)]
    )
    loads = np.empty(shape, dtype=np.int64)
    for step in range(num_steps):
        share_LE = np.exp(log_share_LE)
        share_LE /= share_LE.sum(axis=1, keepdims=True)
        for layer in range(num_layers):
            loads[step, layer] = random.multinomial(rows, share_LE[layer], size=num_senders)
        log_share_LE = log_share_LE + 0.05 * random.standard_normal(log_share_LE.shape)
    return loads
