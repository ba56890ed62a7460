"""Rows between attention ranks and expert ranks, stripe by stripe. See ``schedule/stripes.py``.

Shape letters: T tokens, N rows sent, R rows received, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.comm import all_gather_counts, counts_on_host
from ds_moe_ext.moe.dispatch import Combine, Dispatch
from ds_moe_ext.moe.order import Order, rows_of_experts
from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.rows import on_device
from ds_moe_ext.schedule.executor import OnDevice
from ds_moe_ext.schedule.task import Cut, Span, Task
from ds_moe_ext.zebra.passage import Question

STRIPE = Span(0, 1)  # of a stripe all tokens travel at once
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Met(OnDevice):
    """What the ranks know of a stripe once they have met.

    Attributes:
        route: of its rows.
        nothing: no rows, of the width and type that travel, ``[0, D]``.
    """

    route: LayerRoute
    nothing: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.route.tensors(), self.nothing)


@dataclass(frozen=True, eq=False)
class DispatchWork:
    """Rows to the experts; before, all ranks learn how many. Reads a ``Question`` or nothing.

    Attributes:
        orders: of each layer.
        dispatch: both ways.
        group: the ranks, in the communicator of this lane.
        device: of the rows.
    """

    orders: Sequence[Order]
    dispatch: Dispatch
    group: dist.ProcessGroup
    device: torch.device

    def forward(self, task: Task, question: Question | None) -> tuple[tuple[Any, ...], Any]:
        met, x_TD = self._meet(task, question)
        (arrived_RD,), _ = self.dispatch.forward(STRIPE, x_TD, met.route)
        return (arrived_RD, met), None

    def backward(self, task: Task, saved: Any, grad_RD: Tensor | None, met: Met) -> tuple[Any, ...]:
        own_RD = met.nothing if grad_RD is None else grad_RD
        return self.dispatch.backward(STRIPE, (met.route,), own_RD)

    def _meet(self, task: Task, question: Question | None) -> tuple[Met, Tensor]:
        """With the counts goes what the rows are like: the other side has not seen any."""
        order = self.orders[task.layer]
        if question is None:
            expert_TK = torch.zeros(0, 1, dtype=torch.int64, device=self.device)
            like = [0, 0, 0]
        else:
            expert_TK = question.expert_TK
            x_TD = question.x_TD
            like = [x_TD.shape[1], DTYPES.index(x_TD.dtype) + 1, expert_TK.shape[1]]
        cut = Cut.equal(expert_TK.shape[0], 1)
        key_N, rows_FE = rows_of_experts(expert_TK, cut, order.destination.target.num_experts)
        told = on_device(np.array([like], dtype=np.int64), self.device)
        known = all_gather_counts(torch.cat([rows_FE, told], dim=1), self.group)
        gathered = counts_on_host(known, self.group).numpy()
        rows_CPFE, told_C = gathered[:, None, :, :-3], gathered[:, 0, -3:]
        width, dtype, top_k = told_C.max(axis=0).tolist()
        route = order.routed(key_N, rows_CPFE, cut, top_k)
        nothing = torch.empty(0, width, dtype=DTYPES[dtype - 1], device=self.device)
        return Met(route, nothing), nothing if question is None else question.x_TD


@dataclass(frozen=True, eq=False)
class CombineWork:
    """Rows of experts back to their tokens."""

    combine: Combine

    def forward(self, task: Task, *reads: Any) -> tuple[tuple[Any, ...], Any]:
        *computed, met = reads
        own_RD = next((rows for rows in computed if rows is not None), met.nothing)
        (returned_ND,), _ = self.combine.forward(STRIPE, own_RD, met.route)
        return ((returned_ND, met),), None

    def backward(self, task: Task, saved: Any, grad_ND: Tensor | None, met: Met) -> tuple[Any, ...]:
        own_ND = met.nothing if grad_ND is None else grad_ND
        (grad_RD,) = self.combine.backward(STRIPE, (met.route,), own_ND)
        return (grad_RD,) * len(task.writes)
