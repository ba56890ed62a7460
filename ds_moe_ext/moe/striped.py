"""A whole step of zebra parallelism on one rank: the tasks of ``schedule/stripes.py``, done.

Forward and backward of all layers and stripes are one pass, with the gradient of the loss known
before. Shape letters: T tokens, K choices, E experts, N rows sent, R rows received, D model width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from ds_moe_ext.comm import all_gather_counts
from ds_moe_ext.moe.dispatch import Combine, Dispatch, Wire
from ds_moe_ext.moe.expert import Expert
from ds_moe_ext.moe.layer import RoutedExperts
from ds_moe_ext.moe.observe import TasksSeen
from ds_moe_ext.moe.order import LayerRoute, Order, Route, Seat, rows_of_experts
from ds_moe_ext.moe.passage import Answer, Here, Passage, Question
from ds_moe_ext.roles import Roles
from ds_moe_ext.rows import on_device
from ds_moe_ext.schedule.execute import Lanes, OnDevice, execute
from ds_moe_ext.schedule.stripes import (
    A2E,
    ATTENTION,
    ATTENTION_SIDE,
    E2A,
    EXPERT_SIDE,
    HEAD,
    OFFLOADED,
    part_of,
    picked,
    striped_step,
)
from ds_moe_ext.schedule.stripes import COMBINE as COMBINE_STRIPE
from ds_moe_ext.schedule.stripes import DISPATCH as DISPATCH_STRIPE
from ds_moe_ext.schedule.stripes import EXPERT as EXPERT_STRIPE
from ds_moe_ext.schedule.task import Cut, Lane, Op, Schedule, Span, Task, Value
from ds_moe_ext.strategies.base import Destination

STRIPE = Span(0, 1)  # of a stripe all tokens travel at once
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Work(Protocol):
    """What is done in the tasks of an op."""

    def forward(self, task: Task, *reads: Any) -> tuple[tuple[Any, ...], Any]:
        """What the task writes, and what its adjoint will need."""
        ...

    def backward(self, task: Task, saved: Any, *grads: Any) -> tuple[Any, ...]:
        """What the adjoint writes; ``grads`` are None where this rank has none of them."""
        ...


def run(
    schedule: Schedule, works: Mapping[Op, Work], lanes: Lanes, seen: Sequence[TasksSeen]
) -> Issued:
    """Do the tasks of a schedule that has forward and backward in one.

    Args:
        seen: told of the tasks of each layer, the last of what follows the layers too.

    Returns:
        What was issued between the sides, in either direction.
    """
    table: dict[Value, Any] = dict.fromkeys(schedule.written)
    unread = dict(schedule.num_readers)
    saved: list[Any] = [None] * len(schedule.tasks)
    errors: list[BaseException] = []
    issued: Issued = {A2E: [], E2A: []}
    lock = threading.Lock()  # lanes run at once

    def do(position: int) -> None:
        task = schedule.tasks[position]
        if errors:
            raise errors[0]
        try:
            work(position, task)
        except BaseException as error:
            errors.append(error)
            raise

    def work(position: int, task: Task) -> None:
        observer = seen[min(task.layer, len(seen) - 1)]
        start = lanes.mark() if observer.is_on else None
        reads = [table[value] for value in task.reads]
        lanes.keep(reads)
        if task.adjoint_of:
            (place,) = task.adjoint_of
            lanes.keep((saved[place],))
            written = works[task.op].backward(task, saved[place], *reads)
            saved[place] = None
        else:
            written, saved[position] = works[task.op].forward(task, *reads)
        table.update(zip(task.writes, written))
        if task.lane in issued:
            issued[task.lane].append(task)
        with lock:
            for value in task.reads:
                unread[value] -= 1
                if not unread[value]:
                    table[value] = None
        if observer.is_on:
            observer.saw(task, start, lanes.mark(), lanes)

    execute(schedule, do, lanes)
    return issued


Issued = dict[Lane, list[Task]]
"""Collectives of a pass by the lane that they went through, in their order."""


@cache
def schedule_of(
    num_layers: int, num_stripes: int, offloaded: frozenset[int], side: Lane, is_graded: bool
) -> Schedule:
    """The part of one side; without its backward where there is none."""
    own = part_of(striped_step(num_layers, num_stripes, offloaded=offloaded), side)
    if is_graded:
        return own
    return picked(own, [i for i, task in enumerate(own.tasks) if not task.adjoint_of])


@dataclass(eq=False)
class GradientSums:
    """Gradients of parameters, summed over the stripes in their order."""

    _sums: dict[int, Tensor] = field(default_factory=dict)
    _own: set[int] = field(default_factory=set)  # whose sum is a buffer of ours

    def add(self, parameter: Tensor, grad: Tensor) -> None:
        """One more."""
        key = id(parameter)
        if key not in self._sums:
            self._sums[key] = grad
        elif key in self._own:
            self._sums[key] += grad
        else:
            self._sums[key] = self._sums[key] + grad
            self._own.add(key)

    def take(self, parameter: Tensor, factor: Tensor) -> Tensor | None:
        """The sum times a scalar; None where there is none. It is forgotten."""
        total = self._sums.pop(id(parameter), None)
        return None if total is None else total.mul_(factor.to(total.dtype))


# What is done.


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
        gathered = all_gather_counts(torch.cat([rows_FE, told], dim=1), self.group).cpu().numpy()
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


@dataclass(frozen=True, eq=False)
class _Drawn:
    """States of the generators of random numbers before something was computed."""

    host: Tensor
    devices: list[int]
    states: list[Tensor]

    @classmethod
    def of(cls, rows: Tensor) -> _Drawn:
        devices, states = get_device_states(rows)
        return cls(torch.get_rng_state(), devices, states)

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same numbers are drawn once more, inside the block."""
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.host)
            set_device_states(self.devices, self.states)
            yield


@dataclass(frozen=True, eq=False)
class ExpertWork:
    """Rows through the experts of this rank.

    Attributes:
        layers: with their experts' functions.
        weights: of each layer's experts here, at present.
        sums: takes their gradients; None where there are none.
        recomputes: forward keeps its rows alone, and backward computes the rest again.
    """

    experts: Sequence[Expert]
    weights: Callable[[int], tuple[Tensor, ...]]
    sums: GradientSums | None
    recomputes: bool = False

    def forward(
        self, task: Task, arrived_RD: Tensor, met: Met, _: Any
    ) -> tuple[tuple[Any, ...], Any]:
        weights = self.weights(task.layer)
        is_graded = self.sums is not None
        if not is_graded or self.recomputes:
            frozen = tuple(weight.detach() for weight in weights)
            expert = self.experts[task.layer]
            state = _Drawn.of(arrived_RD) if is_graded else None
            (computed_RD,), _ = expert.forward(STRIPE, arrived_RD.detach(), met.route, frozen)
            return (computed_RD,), (arrived_RD, met, state)
        (computed_RD,), saved = self._run(task, arrived_RD, met, weights)
        return (computed_RD,), saved

    def backward(self, task: Task, saved: Any, grad_RD: Tensor) -> tuple[Any, ...]:
        weights = self.weights(task.layer)
        if self.recomputes:
            arrived_RD, met, state = saved
            with state.again():
                _, saved = self._run(task, arrived_RD, met, weights)
        grad_rows_RD, grads = self.experts[task.layer].backward(STRIPE, saved, grad_RD)
        assert self.sums is not None
        for weight, grad in zip(weights, grads):
            if grad is not None:
                self.sums.add(weight, grad)
        return grad_rows_RD, None

    def _run(
        self, task: Task, arrived_RD: Tensor, met: Met, weights: tuple[Tensor, ...]
    ) -> tuple[tuple[Any, ...], Any]:
        rows_RD = arrived_RD.detach().requires_grad_()
        return self.experts[task.layer].forward(STRIPE, rows_RD, met.route, weights)


@dataclass(eq=False)
class Stripe:
    """The pieces that travel together.

    Attributes:
        passages: one a piece.
        seeds: gradient of the loss of each.
    """

    passages: Sequence[Passage]
    seeds: Sequence[float]
    _lengths: dict[int, list[int]] = field(default_factory=dict)  # tokens of the pieces, by layer
    _rows: dict[int, list[Tensor]] = field(default_factory=dict)  # which of them are whose

    def forward(self, layer: int, returned: tuple[Tensor, Met] | None) -> Question | None:
        """On to the experts of a layer; or to the end, behind the last one."""
        answers = self._answers(layer - 1, returned)
        asked = [passage.forward(answer) for passage, answer in zip(self.passages, answers)]
        questions = [question for question in asked if question is not None]
        if not questions:
            return None
        wrong = [question.layer for question in questions if question.layer != layer]
        if wrong or len(questions) < len(asked):
            raise RuntimeError(
                f"the model called the experts of MoE layer {wrong or 'none'} where layer {layer} "
                "was to come; under strategy zebra every forward calls every layer once, in the "
                "order in which the model has them; leave a layer out with moe_layer_pattern"
            )
        self._lengths[layer] = [question.x_TD.shape[0] for question in questions]
        if len(questions) == 1:
            return questions[0]
        x_TD = torch.cat([question.x_TD for question in questions])
        return Question(layer, x_TD, torch.cat([question.expert_TK for question in questions]))

    def turn(self, layer: int) -> Tensor:
        """Backward from the losses to what the last layer's experts returned."""
        pairs = zip(self.passages, self.seeds)
        return self._joined(layer, [passage.turn(seed) for passage, seed in pairs])

    def backward(self, layer: int, grad_TD: Tensor) -> Tensor | None:
        """Backward of a layer's block, and on to what the experts before it returned."""
        parts = grad_TD.split(self._lengths[layer])
        found = [passage.backward(layer, grad) for passage, grad in zip(self.passages, parts)]
        grads = [grad for grad in found if grad is not None]
        return self._joined(layer - 1, grads) if grads else None

    def _answers(self, layer: int, returned: tuple[Tensor, Met] | None) -> Sequence[Answer | None]:
        if returned is None:
            return [None] * len(self.passages)
        returned_ND, met = returned
        route = met.route.on(STRIPE)
        lengths = self._lengths[layer]
        if len(lengths) == 1:
            return [Answer(returned_ND, route)]
        stops = np.cumsum(lengths).tolist()
        routes, self._rows[layer] = [], []
        for stop, length in zip(stops, lengths):
            own, rows = _within(route, stop - length, stop)
            routes.append(own)
            self._rows[layer].append(rows)
        return [
            Answer(returned_ND.index_select(0, rows), own)
            for rows, own in zip(self._rows[layer], routes)
        ]

    def _joined(self, layer: int, grads: Sequence[Tensor]) -> Tensor:
        """Gradients of rows in the order in which those of all pieces returned."""
        if len(grads) == 1:
            return grads[0]
        together = torch.cat(list(grads))
        return torch.empty_like(together).index_copy_(0, torch.cat(self._rows[layer]), together)


def _within(route: Route, start: int, stop: int) -> tuple[Route, Tensor]:
    """The route of some tokens alone, and which rows are theirs. Waits for the device."""
    rows = torch.nonzero((route.token_N >= start) & (route.token_N < stop)).flatten()
    own = replace(
        route,
        choice_N=route.choice_N[rows] - start * route.top_k,
        token_N=route.token_N[rows] - start,
        num_tokens=stop - start,
    )
    return own, rows


@dataclass(frozen=True, eq=False)
class AttentionWork:
    """All that the model computes between two layers' experts."""

    stripes: Sequence[Stripe]

    def forward(self, task: Task, *reads: Any) -> tuple[tuple[Any, ...], Any]:
        returned = reads[1] if task.layer else None
        return (None, self.stripes[task.span.start].forward(task.layer, returned)), None

    def backward(self, task: Task, saved: Any, _: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        grad_ND = self.stripes[task.span.start].backward(task.layer, grad_TD)
        return (None, grad_ND, None) if task.layer else (None,)


@dataclass(frozen=True, eq=False)
class HeadWork:
    """What follows the last layer's experts, and the loss."""

    stripes: Sequence[Stripe]

    def forward(self, task: Task, _: Any, returned: Any, *rest: Any) -> tuple[tuple[Any, ...], Any]:
        self.stripes[task.span.start].forward(task.layer, returned)
        return (None,), None

    def backward(self, task: Task, saved: Any, *grads: Any) -> tuple[Any, ...]:
        return None, self.stripes[task.span.start].turn(task.layer - 1), None


def _threads() -> ThreadPoolExecutor:
    """For as many coroutines as there are pieces."""
    return ThreadPoolExecutor(
        1024,
        "ds_moe_ext_stripe",
        initializer=torch.set_num_threads,
        initargs=(torch.get_num_threads(),),
    )


@dataclass(frozen=True, eq=False)
class Stack:
    """The layers of a model on one rank, and what runs them.

    Attributes:
        layers: in the order in which the model calls them.
        weights: of each layer's experts here, at present.
        roles: of the ranks of a group.
        device: where it computes.
        lanes: where its tasks run.
        recomputes: experts compute again in backward what lies between their rows.
        here: where the model finds out what it computes.
        threads: for the model.
    """

    layers: Sequence[RoutedExperts]
    weights: Callable[[int], tuple[Tensor, ...]]
    roles: Roles
    device: torch.device
    lanes: Lanes
    recomputes: bool = False
    here: Here = field(default_factory=Here)
    threads: ThreadPoolExecutor = field(default_factory=_threads)

    @property
    def is_attention(self) -> bool:
        """Whether this rank runs the model."""
        return self.roles.is_attention(self.layers[0].site.layout.rank)

    def run(
        self,
        num_stripes: int,
        stripes: Sequence[Stripe],
        sums: GradientSums | None,
        *,
        counts: bool,
    ) -> Issued:
        """A step, or where nothing has a gradient its forward. Collective over the ZP group.

        Args:
            num_stripes: of every attention rank.
            stripes: this rank's; none on an expert rank.
            sums: takes the gradients of this rank's parameters; None for forward alone.
            counts: the rows count for the report.

        Returns:
            What was issued between the sides: the same on all ranks.
        """
        side = ATTENTION_SIDE if self.is_attention else EXPERT_SIDE
        schedule = schedule_of(
            len(self.layers), num_stripes, self._offloaded, side, sums is not None
        )
        layout = self.layers[0].site.layout
        a2e, e2a = (Wire.between(layout, lane, self.device) for lane in (A2E, E2A))
        group = layout.group("ep", A2E)
        orders = [self._order(layer, counts) for layer in self.layers]
        experts = [Expert(layer.function) for layer in self.layers]
        expert_work = ExpertWork(experts, self.weights, sums, self.recomputes)
        works: dict[Op, Work] = {
            DISPATCH_STRIPE: DispatchWork(orders, Dispatch(a2e, e2a), group, self.device),
            COMBINE_STRIPE: CombineWork(Combine(e2a, a2e)),
            EXPERT_STRIPE: expert_work,
            OFFLOADED: expert_work,
            ATTENTION: AttentionWork(stripes),
            HEAD: HeadWork(stripes),
        }
        seen = [layer.tasks for layer in self.layers]
        try:
            return run(schedule, works, self.lanes, seen)
        finally:
            for stripe in stripes:
                for passage in stripe.passages:
                    passage.abandon()

    @property
    def _offloaded(self) -> frozenset[int]:
        """Layers some of whose experts attention ranks hold."""
        cells = list(self.roles.attention_cells)
        homes = (layer.site.plan.home for layer in self.layers)
        return frozenset(n for n, home in enumerate(homes) if home.holds_EC[:, cells].any())

    def _order(self, layer: RoutedExperts, counts: bool) -> Order:
        plan, layout = layer.site.plan, layer.site.layout
        return Order(
            destination=Destination(plan.target, plan.share),
            seat=Seat(layout.index("ep")),
            group=None,
            capacity_factor=None,
            gate_may_drop=True,
            on_rows=layer.rows.add if counts else _uncounted,
        )


def _uncounted(*rows: Any) -> None:
    return None
