# SPDX-License-Identifier: Apache-2.0
"""Turns of ranks that run unlike numbers of passes: who has nothing to run serves the others.

A rank takes part in every exchange of a layer, also where it has no rows. Inside a block of
``ds_moe_ext.joined`` the ranks agree before each layer which one comes next, and those that wanted
another one, or are done, run it without rows. So every rank runs the same layers in the same order,
whatever its own passes are. Nothing has gradients there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.core.comm import max_in_place
from ds_moe_ext.schedule.watch import WATCH

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NONE = -1  # of layers: a rank is done


class BatchSignature(NamedTuple):
    """What rows are like, for those who have none of them."""

    width: int = 0  # elements of a row
    dtype: int = 0  # their type, by its place in ``DTYPES``
    top_k: int = 0  # choices a token
    casts: int = 0  # 1 where autocast is on
    cast_dtype: int = 0  # to which type

    @classmethod
    def of(cls, x_TD: Tensor, top_k: int) -> BatchSignature:
        kind = x_TD.device.type
        casts = torch.is_autocast_enabled(kind)
        cast = DTYPES.index(torch.get_autocast_dtype(kind)) if casts else 0
        return cls(x_TD.shape[-1], DTYPES.index(x_TD.dtype), top_k, int(casts), cast)

    def __str__(self) -> str:
        return f"{DTYPES[self.dtype]} of {self.width} elements and {self.top_k} choices"

    def nothing(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        x_TD = torch.empty(0, self.width, dtype=DTYPES[self.dtype], device=device)
        expert_TK = torch.empty(0, self.top_k, dtype=torch.int64, device=device)
        return x_TD, expert_TK, x_TD.new_empty(0, self.top_k)

    def autocast(self, device: torch.device) -> torch.autocast:
        dtype = DTYPES[self.cast_dtype] if self.casts else None
        return torch.autocast(device.type, dtype, bool(self.casts))


Serve = Callable[["JoinedPasses"], None]
"""Runs a layer without rows; it asks ``agree_on_rows`` what they would be like."""


@dataclass(eq=False)
class JoinedPasses:
    """A grid's ranks, which agree on each layer that they run."""

    group: dist.ProcessGroup  # these ranks, over gloo
    serve: Sequence[Serve]  # of each layer
    depth: int = 0  # blocks that this rank is in
    _agreed: int = NONE  # the layer that all run now
    _signature: list[BatchSignature] = field(default_factory=list)  # of its rows, once agreed on

    @property
    def is_open(self) -> bool:
        return self.depth > 0

    def comes_to(self, layer: int) -> None:
        """Run what others run until it is this layer's turn."""
        if self._agreed == layer:
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a pass with gradients ran in a block 'with ds_moe_ext.joined(engine)', which is "
                "for evaluation and generation; train outside of it"
            )
        while self._begins(layer) != layer:
            self._serve()

    def agree_on_rows(self, own: BatchSignature | None) -> BatchSignature:
        """What the rows of the layer are like, of those who have some; asked once by each rank.

        Args:
            own: None where this rank has none.
        """
        if not self._signature:
            reported = torch.tensor(own or BatchSignature(), dtype=torch.int64)
            self._signature.append(BatchSignature(*max_in_place(reported, self.group).tolist()))
        return self._signature[0]

    def ends(self) -> None:
        self._agreed = NONE
        self._signature.clear()

    def serve_until_all_are_done(self) -> None:
        """Run what others run, until none runs any."""
        while self._begins(NONE) != NONE:
            self._serve()

    def _begins(self, layer: int) -> int:
        """The layer that comes next, of those that ranks want."""
        WATCH.at(_waits)
        # Over gloo, from host memory: on NCCL the question would queue behind rows that wait for
        # the very ranks that have not answered yet.
        self._agreed = int(max_in_place(torch.tensor(layer), self.group))
        return self._agreed

    def _serve(self) -> None:
        self.serve[self._agreed](self)


def _waits() -> str:
    return "a block of ds_moe_ext.joined, or generate"


# Whether a device waits for its host, for a person.


MOST = 0.5  # of the passes, in which a device may be idle without a word


@dataclass
class HostLag:
    """How often a device had done all that was issued, when the host came to ask it for a layer's
    counts of rows: nothing is issued ahead of it then."""

    num_passes: int = 0  # of layers, in forward
    num_idle: int = 0  # of these, those in which it had

    def add(self, is_idle: bool) -> None:
        self.num_passes += 1
        self.num_idle += is_idle

    @classmethod
    def of_all(cls, lags: Iterable[HostLag]) -> HostLag:
        passes, idle = zip(*((lag.num_passes, lag.num_idle) for lag in lags))
        return cls(sum(passes), sum(idle))

    def __str__(self) -> str:
        """A line; empty where no device waits."""
        if self.num_idle <= MOST * self.num_passes:
            return ""
        share = self.num_idle / self.num_passes
        return (
            f"in {share:.0%} of the layers' passes this rank's device had done all that its "
            "host had issued: the device waits for the host, whose time does not depend on "
            "the number of tokens; use more tokens per micro-batch, fewer or no chunks, or a "
            "strategy without replicas"
        )
