# SPDX-License-Identifier: Apache-2.0
"""What the host computes between two MoE layers, timed: there copies and gradients are hidden."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_moe_ext.moe.observation import TasksSeen, tell
from ds_moe_ext.schedule.executor import Lanes, Mark, lanes_for
from ds_moe_ext.schedule.task import ATTENTION, Span, Task, Value
from ds_moe_ext.schedule.wires import EXPERT_IDS, SCORES, X, Y


class Windows:
    """The windows of one layer: before it in forward, and behind it in backward.

    Args:
        layer: its number.
        observers: told of them.
    """

    def __init__(self, layer: int, observers: Sequence[TasksSeen]) -> None:
        self._layer, self._observers = layer, observers
        self._ahead: Mark | None = None  # when the block began, in forward
        self._behind: Mark | None = None  # when the layer's backward ended

    def block_begins(self, block_input: Tensor | None) -> None:
        """Call it before the layer's block computes.

        Args:
            block_input: what it computes from: its gradient ends the block's backward.
        """
        if block_input is None or not self._is_watched:
            return
        lanes = _lanes_of(block_input.device)
        self._ahead = lanes.mark()
        if block_input.requires_grad and torch.is_grad_enabled():
            block_input.register_hook(lambda grad: self._end_behind(lanes))

    def layer_begins(self, x: Tensor) -> None:
        """Call it with the layer's input."""
        if self._ahead is None:
            return
        lanes = _lanes_of(x.device)
        self._saw(self._ahead, lanes)
        self._ahead = None
        self._behind = None  # of an earlier pass, whose block ended with the layer
        if x.requires_grad and torch.is_grad_enabled():
            x.register_hook(lambda grad: self._begin_behind(lanes))

    @property
    def _is_watched(self) -> bool:
        """Whether it may be: what the pass is the layer alone is told."""
        return any(observer.is_wanted for observer in self._observers)

    def _begin_behind(self, lanes: Lanes) -> None:
        self._behind = lanes.mark()

    def _end_behind(self, lanes: Lanes) -> None:
        if self._behind is not None:
            self._saw(self._behind, lanes, adjoint_of=(0,))
            self._behind = None

    def _saw(self, start: Mark, lanes: Lanes, adjoint_of: tuple[int, ...] = ()) -> None:
        whole = Span(0, 1)
        reads: tuple[Value, ...] = (Value(Y, self._layer - 1, whole),)
        writes = tuple(Value(kind, self._layer, whole) for kind in (X, EXPERT_IDS, SCORES))
        if adjoint_of:
            reads, writes = writes, reads
        task = Task(ATTENTION, self._layer, whole, reads, writes, adjoint_of)
        tell(self._observers, task, start, lanes)


def _lanes_of(device: torch.device) -> Lanes:
    return lanes_for(device, overlaps=True)
