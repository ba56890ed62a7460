# SPDX-License-Identifier: Apache-2.0
"""Real text as bytes, and windows of it that any number of ranks draw without talking.

Without a path the text is the running interpreter's standard library: some 30 MB of sources and
documentation that every machine already has. Shape letters: B windows in a micro-batch, T
positions of a window, W windows of the text.
"""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

VOCABULARY_SIZE = 256
SUFFIXES = (".py", ".txt", ".rst", ".md")
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages"})
HELD_OUT_FRACTION = 1 / 20


@dataclass(frozen=True, eq=False)
class Text:
    """Bytes to train on and bytes to evaluate on, both uint8."""

    training: np.ndarray
    held_out: np.ndarray
    source: str  # what errors and summaries call it


class Batch(NamedTuple):
    """Windows and, for each position, the byte that follows it: both int64 ``[B, T]``."""

    input_ids: Tensor
    labels: Tensor


def read_text(path: Path | None) -> Text:
    """Read a file (memory-mapped), a folder (its text files, joined), or the standard library.

    The last twentieth is held out.

    Args:
        path: None means the standard library's `*.py`, `*.txt` and `*.rst` files.

    Raises:
        ValueError: nothing is there, or it holds no text.
    """
    if path is None:
        return _split(_read_folder(Path(sysconfig.get_path("stdlib"))), "the standard library")
    if path.is_file() and path.stat().st_size > 0:
        return _split(np.memmap(path, dtype=np.uint8, mode="r"), str(path))
    if path.is_file():
        raise ValueError(f"--data {path} is an empty file; name one that holds text")
    if path.is_dir():
        return _split(_read_folder(path), str(path))
    raise ValueError(
        f"--data {path} does not exist; name a file or a folder of text, "
        "or leave --data out to train on the standard library"
    )


def _split(text: np.ndarray, source: str) -> Text:
    num_training = len(text) - int(len(text) * HELD_OUT_FRACTION)
    return Text(text[:num_training], text[num_training:], source)


def _read_folder(folder: Path) -> np.ndarray:
    parts = [np.fromfile(file, dtype=np.uint8) for file in _text_files(folder)]
    if sum(len(part) for part in parts) == 0:
        raise ValueError(
            f"--data {folder} holds no text: no file in it ends in {' '.join(SUFFIXES)}, "
            "or all are empty; name a file, or a folder with such files"
        )
    return np.concatenate(parts)


def _text_files(folder: Path) -> Sequence[Path]:
    names = [
        path.relative_to(folder)
        for suffix in SUFFIXES
        for path in folder.rglob(f"*{suffix}")
        if path.is_file() and EXCLUDED_FOLDERS.isdisjoint(path.relative_to(folder).parts)
    ]
    # By checksum of the name, the same on every machine: the held-out end is a fair sample.
    names.sort(key=lambda name: (zlib.crc32(name.as_posix().encode()), name.as_posix()))
    return [folder / name for name in names]


@dataclass(frozen=True, eq=False)
class WindowSampler:
    """Which windows each rank sees at each micro-step.

    The text is cut into W windows of T bytes; every epoch visits them in another random order.
    Ranks and micro-steps of a step take neighbours in that order, so within an epoch no window is
    seen twice, whatever the number of ranks, and a resumed run sees what it would have seen.
    """

    text: np.ndarray  # uint8
    source: str
    sequence_length: int
    micro_batch_size: int
    num_micro_steps: int
    num_ranks: int
    seed: int

    def __post_init__(self) -> None:
        if self._num_windows < self._windows_per_step:
            raise ValueError(
                f"{self.source} holds {self._num_windows} windows of {self.sequence_length} bytes "
                f"({len(self.text)} bytes), and one step takes {self._windows_per_step} "
                f"({self.num_ranks} ranks x {self.num_micro_steps} micro-steps x "
                f"{self.micro_batch_size}); give --data more text, or lower --sequence_length "
                "or the batch size"
            )

    @property
    def _num_windows(self) -> int:
        # The last window needs one byte more, its last label.
        return max(0, len(self.text) - 1) // self.sequence_length

    @property
    def _windows_per_step(self) -> int:
        return self.num_ranks * self.num_micro_steps * self.micro_batch_size

    def batch(self, step: int, micro_step: int, rank: int) -> Batch:
        """Give one rank's windows of one micro-step. Pure.

        Args:
            step: optimizer steps before this one.
            micro_step: 0 to `num_micro_steps` - 1.
            rank: 0 to `num_ranks` - 1.
        """
        steps_per_epoch = self._num_windows // self._windows_per_step
        epoch, step_of_epoch = divmod(step, steps_per_epoch)
        place = (step_of_epoch * self.num_micro_steps + micro_step) * self.num_ranks + rank
        first = place * self.micro_batch_size
        order_W = _shuffled(self.seed, epoch, self._num_windows)
        starts_B = order_W[first : first + self.micro_batch_size] * self.sequence_length
        length = self.sequence_length + 1
        windows = np.stack([self.text[start : start + length] for start in starts_B])
        windows_BT = torch.from_numpy(windows.astype(np.int64))
        return Batch(
            input_ids=windows_BT[:, :-1].contiguous(), labels=windows_BT[:, 1:].contiguous()
        )


@lru_cache(maxsize=4)
def _shuffled(seed: int, epoch: int, num_windows: int) -> np.ndarray:
    order_W = np.random.default_rng((seed, epoch)).permutation(num_windows)
    order_W.flags.writeable = False
    return order_W
