"""Rows in blocks, one block behind the other: indices that bring them into another order."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """Where each block begins, blocks stored one behind the other in C order."""
    flat = lengths.ravel()
    starts: np.ndarray = (flat.cumsum() - flat).reshape(lengths.shape)
    return starts


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``start, start + 1, ...`` for each block, one behind the other, int64."""
    shift = np.repeat(starts - starts_of(lengths), lengths)
    indices: np.ndarray = shift + np.arange(shift.size)
    return indices


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array there; the host does not wait."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    # From pageable memory the host would wait for what its lane still has to do.
    return host.pin_memory().to(device, non_blocking=True)
