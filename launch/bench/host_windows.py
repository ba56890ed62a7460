# SPDX-License-Identifier: Apache-2.0
"""What a GPU would stand still for: the host's way from a wait to the exchange that follows it.

While the host waits for counts the device does all that was issued before; from there on it has
nothing to do until the next exchange is called, or what else the host calls on the way. Counted and
timed without a GPU, of any contender: its waits are known by their places.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from host_counts import COLLECTIVES, FETCHES, Place
from torch import Tensor

from ds_moe_ext.core import comm


@dataclass
class Windows:
    """From the end of a wait to the next call of a communicator; of waits without such a call
    between them the last counts.

    Attributes:
        waits: file and function of each.
        seconds: of each window.
        since_s: when the present one began; None where none is open.
    """

    waits: Collection[str]
    seconds: list[float] = field(default_factory=list)
    since_s: float | None = None
    _known: dict[CodeType, bool] = field(default_factory=dict)

    def after(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """A method or function for which the host may wait."""

        def fetched(*args: Any, **named: Any) -> Any:
            is_wait = self._is_wait(name)
            out = stock(*args, **named)
            if is_wait:
                self.since_s = time.perf_counter()
            return out

        return fetched

    def before(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """A method that calls a communicator."""

        def called(*args: Any, **named: Any) -> Any:
            if self.since_s is not None:
                self.seconds.append(time.perf_counter() - self.since_s)
                self.since_s = None
            return stock(*args, **named)

        return called

    def _is_wait(self, name: str) -> bool:
        caller = sys._getframe(2)
        if caller.f_code not in self._known:
            place = Place.of_caller(name, caller)
            self._known[caller.f_code] = f"{place.file} {place.function}" in self.waits
        return self._known[caller.f_code]


@contextmanager
def windows(waits: Collection[str]) -> Iterator[Windows]:
    """Watch, inside the block.

    Args:
        waits: file and function of each, as of ``Counts.waits_in_passes``.
    """
    found = Windows(waits)
    with ExitStack() as changed:

        def change(owner: Any, name: str, around: Callable[..., Any], *told: str) -> None:
            if hasattr(owner, name):
                new = around(*told, getattr(owner, name))
                changed.enter_context(mock.patch.object(owner, name, new))

        for name in FETCHES:
            change(Tensor, name, found.after, name)
            change(torch, name, found.after, name)
        for name in COLLECTIVES:
            change(dist.ProcessGroup, name, found.before)
        change(comm.Pairs, "post", found.before)
        yield found
