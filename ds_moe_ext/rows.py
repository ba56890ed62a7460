# SPDX-License-Identifier: Apache-2.0
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


def block_index(starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> Tensor:
    """The same as ``ranges``, int64, made on the device: the host sends two numbers a block."""
    ends_N = lengths.cumsum()
    num_rows = int(ends_N[-1]) if ends_N.size else 0
    length_N = lengths.ravel()
    shift_N = starts.ravel() - ends_N + length_N
    shift, length = on_device(np.concatenate((shift_N, length_N)), device).view(2, -1)
    index = shift.repeat_interleave(length, output_size=num_rows)
    index += torch.arange(num_rows, device=device)
    return index


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array there; the host does not wait."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    # From pageable memory the host would wait for what its lane still has to do.
    return host.pin_memory().to(device, non_blocking=True)
