"""Loads of experts: a moving window that predicts the next step. Pure.

Shape letters: I steps, L layers, C senders, E experts.
"""

from __future__ import annotations

from collections import deque

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
