# SPDX-License-Identifier: Apache-2.0
"""States of torch's generators of random numbers: the host's, and that of the device in use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RandomState:
    """Attributes:
    host: of the CPU.
    device: of the current CUDA device; None without one.
    """

    host: Tensor
    device: Tensor | None

    @classmethod
    def now(cls) -> RandomState:
        """As it is."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if _devices() else None)

    @contextmanager
    def again(self) -> Iterator[None]:
        """It is torch's inside the block; what was there before is so again behind it."""
        with forked():
            torch.set_rng_state(self.host)
            if self.device is not None:
                torch.cuda.set_rng_state(self.device)
            yield


@contextmanager
def forked() -> Iterator[None]:
    """What is drawn inside the block changes nothing behind it."""
    with torch.random.fork_rng(_devices()):
        yield


def _devices() -> list[int]:
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.cuda.current_device()] if has_cuda else []
