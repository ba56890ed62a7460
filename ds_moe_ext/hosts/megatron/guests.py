# SPDX-License-Identifier: Apache-2.0
"""Megatron's own MoE layer as it is, with guests: replicas of experts in slots of their own.

A strategy that only says where experts compute (``ep``, ``fssdp``, ``prophet``) changes nothing in
the body of a layer. A plan with replicas gives every EP rank ``m`` more expert slots, the guests.
The slots of all ranks are the layer's *virtual experts*. In one pass:

1. ``dispatch_preprocess`` of the layer's token dispatcher is given the router's map and
   probabilities of virtual experts (``Places.mapped``): each sender divides its tokens of an expert
   over the slots that hold it by fixed parts, which are known before the router has run.
2. The dispatcher (all-to-all, all-gather, DeepEP, HybridEP) moves tokens to slots.
3. While the module of experts runs, it has the guests' slots, with weights that were prefetched
   from their owners as the layer's block began (``moe/replicas.py``).
4. In backward, gradients of guests add up in buffers of their own over the micro-batches of a step.
   Behind the last one they go to their owners, which add them to ``main_grad`` before Megatron
   reduces it: bucket groups with weights of such owners wait for that (``Owners``).

Guests are no parameters: optimizers, checkpoints, DDP buffers, gradient norms and parameter counts
do not see them. Where a plan has no replica, all runs as without us.

Shape letters: T tokens, E experts, V virtual experts, S slots of an EP rank, X experts with several
holders, H holders of one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext.core.share import PlannedParts
from ds_moe_ext.hosts.attachment.host_layer import Slot
from ds_moe_ext.hosts.megatron.layers import Form, MegatronExperts
from ds_moe_ext.hosts.megatron.refusals import PREPROCESS, graphed
from ds_moe_ext.moe.layer import RoutedExperts, by_ep_rank
from ds_moe_ext.moe.observation import notify
from ds_moe_ext.moe.replica_memory import Weights
from ds_moe_ext.moe.replicas import Prefetch, left_behind
from ds_moe_ext.moe.sharding import Shard
from ds_moe_ext.moe.slot_rows import SlotRows
from ds_moe_ext.planning.exchange_costs import Way
from ds_moe_ext.planning.layer_pipelines import NOWHERE
from ds_moe_ext.planning.strategy import Destination, Job, Overlay, Plan, Strategy
from ds_moe_ext.schedule.executor import Mark, ScheduleStreams, streams_for
from ds_moe_ext.schedule.task import COMBINE, DISPATCH, EXPERT, ChunkRange, Op, Task
from ds_moe_ext.schedule.watch import WATCH, Waiting
from ds_moe_ext.strict import NOT_A_KEY


@dataclass(frozen=True, kw_only=True)
class ByHost(Overlay):
    """Where experts compute by another strategy, and nothing else: the host runs the layer."""

    placing: Strategy = field(metadata=NOT_A_KEY)

    @classmethod
    def of(cls, placing: Any) -> ByHost:
        """Over a strategy; one that adds replicas once counts are known (``repair``) does not."""
        adds = getattr(placing, "repair", 0) is None  # a number is refused, see ``refusals.WITHIN``
        return cls(placing=replace(placing, repair=0) if adds else placing)

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(map(_placed, self.placing.plan(job)))


def _placed(plan: Plan) -> Plan:
    """Of a plan what the host's own layer goes by."""
    following = plan.successor
    return replace(
        plan,
        forward_degree=1,
        backward_degree=1,
        rematerialize=False,
        revise=None,
        carried=None,
        successor=None if following is None else partial(_successor, following, plan),
        reductions=NOWHERE,
        way=Way.DIRECT,
        sends_once=False,
    )


def _successor(following: Callable[[np.ndarray], Plan], before: Plan, rows_CE: np.ndarray) -> Plan:
    """Parts stay as long as replicas do, for parts of other loads would be new tables."""
    plan = following(rows_CE)
    if plan.target is before.target:
        plan = replace(plan, share=before.share, predicted_CE=before.predicted_CE)
    return _placed(plan)


# Where tokens go: the router's choices of experts, rewritten to choices of virtual experts.


@dataclass(frozen=True, eq=False)
class Places:
    """Slots of all EP ranks by one plan, as one of them sends to them."""

    num_slots: int  # S, of each EP rank
    num_virtual: int  # V: slots of all
    guests: tuple[int, ...]  # experts in this rank's guest slots, in their order
    num_owners: int  # slots before the guests'
    destination: Destination
    virtual_E: Tensor  # the slot of each expert that takes all that this rank sends; int64
    copied_X: Tensor  # experts whose tokens this rank divides, int64
    virtual_XH: Tensor  # their slots, int64
    until_XH: Tensor  # as of ``PlannedParts``, float64

    @classmethod
    def of(cls, plan: Plan, rank: int, device: torch.device) -> Places:
        """Those of a plan with replicas, for the sender ``rank``, an EP rank."""
        owner, target = plan.owner, plan.target
        parts = PlannedParts.of(target, plan.share, plan.predicted_CE)
        num_ranks, num_owners = owner.num_ep_ranks, owner.num_slots
        guests = [np.flatnonzero(c) for c in (target.holds_EC & ~owner.holds_EC).T]
        num_slots = num_owners + max(map(len, guests))
        virtual_EC = np.full(target.holds_EC.shape, -1, dtype=np.int64)
        for number, own in enumerate(guests):
            first = number * num_slots
            at_owner = owner.experts_of(number)
            virtual_EC[at_owner, number] = first + np.arange(len(at_owner))
            virtual_EC[own, number] = first + num_owners + np.arange(len(own))
        # Most senders give all tokens of an expert to one holder: these are mapped as columns.
        until_XH = parts.until_CXH[rank]
        first_X = (until_XH <= 0).sum(axis=1)
        takes_all_X = np.take_along_axis(until_XH, first_X[:, None], axis=1)[:, 0] >= 1
        virtual_E = virtual_EC.max(axis=1)
        taker_X = np.take_along_axis(parts.holder_XH, first_X[:, None], axis=1)[:, 0]
        virtual_E[parts.copied_X] = virtual_EC[parts.copied_X, taker_X]
        split = ~takes_all_X
        copied_X, holder_XH = parts.copied_X[split], parts.holder_XH[split]

        def there(table: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(table)).to(device, non_blocking=True)

        return cls(
            num_slots,
            num_slots * num_ranks,
            tuple(guests[rank].tolist()),
            num_owners,
            Destination(target, parts),
            there(virtual_E),
            there(copied_X),
            there(virtual_EC[copied_X[:, None], holder_XH]),
            there(until_XH[split]),
        )

    def mapped(self, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """A router's map and probabilities ``[T, E]`` as those of virtual experts, ``[T, V]``. The
        host does not wait for the device."""
        num_tokens = len(routing_map)
        map_TV = routing_map.new_zeros(num_tokens, self.num_virtual)
        probs_TV = probs.new_zeros(num_tokens, self.num_virtual)
        if not len(self.copied_X):
            columns = self.virtual_E
            return (
                map_TV.index_copy_(1, columns, routing_map),
                probs_TV.index_copy(1, columns, probs),
            )
        chosen_TX = routing_map[:, self.copied_X]
        rank_TX = chosen_TX.cumsum(0)  # from 1, of each token among those for its expert
        num_X1 = rank_TX[-1:].sum(0)[:, None]  # none where there are no tokens
        end_XH = torch.floor(self.until_XH * num_X1 + 0.5).long()
        holder_TX = (rank_TX[..., None] > end_XH[:, :-1]).sum(-1)
        virtual_TX = self.virtual_XH.T.gather(0, holder_TX)
        column_TE = self.virtual_E.expand(num_tokens, -1).index_copy(1, self.copied_X, virtual_TX)
        return (
            map_TV.scatter_(1, column_TE, routing_map),
            probs_TV.scatter(1, column_TE, probs),
        )


# How a dispatcher is given more slots.


class Slots:
    """Those of a token dispatcher: as many as Megatron built it with, or others for a while.

    Its sizes are those of this layer alone; the configuration, which layers share, stays.
    """

    def __init__(self, dispatcher: Any, rank: int, num_ranks: int) -> None:
        self._dispatcher, self._rank, self._num_ranks = dispatcher, rank, num_ranks
        self._stock = {name: vars(dispatcher)[name] for name in SIZED if name in vars(dispatcher)}
        self._manager: Any = getattr(dispatcher, "_comm_manager", None)
        self._of_manager: dict[str, Any] = {}
        if self._manager is not None:
            self._of_manager = {name: vars(self._manager)[name] for name in SIZED_MANAGER}
        self._num_slots = self._num_stock = int(dispatcher.num_local_experts)

    def resize(self, num_slots: int | None) -> None:
        """Let an EP rank have so many slots; None for Megatron's own number."""
        num_slots = num_slots or self._num_stock
        if num_slots == self._num_slots:
            return
        self._num_slots = num_slots
        vars(self._dispatcher).update(self._stock)
        if self._manager is not None:
            vars(self._manager).update(self._of_manager)
        if num_slots == self._num_stock:
            return
        num_virtual, first = num_slots * self._num_ranks, self._rank * num_slots
        sizes: dict[str, Any] = {
            "num_local_experts": num_slots,
            "local_expert_indices": list(range(first, first + num_slots)),
            "num_experts": num_virtual,
        }
        if "sort_input_by_local_experts" in self._stock:
            stock = self._stock["sort_input_by_local_experts"]
            tensor_ranks = len(stock) // (self._num_stock * self._num_ranks)
            chunks = torch.arange(num_virtual * tensor_ranks, device=stock.device)
            sizes |= {
                "sort_input_by_local_experts": chunks.view(-1, num_slots).T.ravel(),
                "restore_output_by_local_experts": chunks.view(num_slots, -1).T.ravel(),
            }
        vars(self._dispatcher).update((name, sizes[name]) for name in self._stock)
        for name in self._of_manager:
            size = self._of_manager[name] // self._num_stock * num_slots
            setattr(self._manager, name, size)


SIZED = (
    "num_local_experts",
    "local_expert_indices",
    "num_experts",
    "sort_input_by_local_experts",
    "restore_output_by_local_experts",
)
"""What dispatchers make of the number of experts when they are built."""
SIZED_MANAGER = ("num_local_experts", "num_experts")
"""And what the communication managers of the flex dispatcher do."""


# One layer.


@dataclass(eq=False)
class _Pass:
    """Of one micro-batch through the experts."""

    prefetch: Prefetch
    weights: list[Weights]  # of all slots behind those of this rank's own experts
    is_last: bool = False  # of a step, in backward


class GuestExperts(MegatronExperts):
    """One layer of Megatron's that runs as it is, and its guests; a ``host_layer.Hosted``.

    Args:
        layer: a ``MoELayer``; its dispatcher's and its experts' calls are watched from now on.
        form: how its experts are kept.
        shard: the part of each that this rank has.
        routed: what is known of the layer; its program never runs.
    """

    def __init__(self, layer: Any, form: Form, shard: Shard, routed: RoutedExperts) -> None:
        super().__init__(layer.experts, form, shard, routed)
        routed.is_hosts = True
        routed.rows.gather = partial(by_ep_rank, routed.layer_context.layout)
        self._config = getattr(layer.router, "config", layer.config)
        self._dispatcher = layer.token_dispatcher
        self._rank = routed.layer_context.layout.index("ep")
        self._slots = Slots(
            self._dispatcher, self._rank, routed.layer_context.plan.owner.num_ep_ranks
        )
        self._plan: Plan | None = None  # that these are of:
        self._places: Places | None = None  # none where all is as Megatron built it
        self._first_owner = routed.layer_context.plan.owner
        self._sums: dict[int, Weights] = {}  # gradients of guests so far, by expert
        # Weights of guests in a step, by expert: those that came, and what computes with them.
        self._leaves: dict[int, tuple[Weights, Weights]] = {}
        self._sums_of = -1  # the step that they are of
        self._delayed: deque[_Pass] = deque()  # whose weights' gradients are made later
        self._returning: Prefetch | None = None  # gradients of a step on their way
        self._is_open = False  # a step's are still to come
        self._has_some = False  # a pass of the step has left some
        # Each lets Megatron know that a gradient of an expert owned here is complete, then.
        self._waiting: list[Callable[[], object]] = []
        self._own_slots: list[Slot] = []  # none: to be looked up
        self.on_hold: Callable[[], None] = lambda: None
        self._ticket = torch.zeros(0, requires_grad=True, device=self._device)
        stock = self._dispatcher
        # What waits for other ranks can be broken off when one of them has failed.
        all_ranks, ranks = stock.tp_ep_group, stock.ep_group
        if "input_splits" not in vars(stock):  # one exchange over all
            ranks = all_ranks
        self._stock_preprocess = partial(self._waiting_for, all_ranks, stock.dispatch_preprocess)
        if PREPROCESS not in graphed(self._config):  # else nothing is copied, and nothing counted
            stock.dispatch_preprocess = self._dispatch_preprocess
        for op, name in ((DISPATCH, "token_dispatch"), (COMBINE, "token_combine")):
            run = partial(self._waiting_for, ranks, getattr(stock, name))
            setattr(stock, name, partial(self._timed, op, run))
        self._stock_postprocess = stock.combine_postprocess
        stock.combine_postprocess = self._combine_postprocess

    def slots(self) -> list[Slot]:
        if not self._own_slots:  # asked for several times a pass
            self._own_slots = super().slots()
        return self._own_slots

    def hold(self, slots: Sequence[Slot]) -> None:
        super().hold(slots)
        self._own_slots = []
        self.on_hold()

    @property
    def _device(self) -> torch.device:
        return next(iter(self.experts.parameters())).device

    def _waiting_for(self, group: Any, run: Callable[..., Any], *given: Any, **named: Any) -> Any:
        WATCH.at(lambda: self.routed.name)
        with Waiting(group):
            return run(*given, **named)

    # Forward.

    def _dispatch_preprocess(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        routed, is_training = self.routed, self.training
        routed.rows.begin(is_training=is_training)
        self.passes.begins(is_training=is_training)
        routed.rows_are_like(hidden.view(-1, hidden.shape[-1]))
        routed.windows.layer_begins(hidden)
        routed.rows.saw_scores(probs)
        places = self._of_plan(routed.layer_context.plan)
        if routed.rows.counts:
            self._count(routing_map, probs)
        if places is None:
            self._slots.resize(None)
            return self._stock_preprocess(hidden, routing_map, probs)
        self._slots.resize(places.num_slots)
        if is_training and torch.is_grad_enabled() and self._is_trained:
            self._is_open = True
            hidden = edge(hidden, self._ticket, self.arrive_at_owner)
        map_TV, probs_TV = places.mapped(routing_map, probs)
        return self._stock_preprocess(hidden, map_TV, probs_TV)

    def _of_plan(self, plan: Plan) -> Places | None:
        before, self._plan = self._plan, plan
        if before is None or plan.target is not before.target or plan.share is not before.share:
            is_stock = plan.target.is_single and plan.owner.is_like(self._first_owner)
            self._places = None if is_stock else Places.of(plan, self._rank, self._device)
        return self._places

    def _count(self, routing_map: Tensor, probs: Tensor) -> None:
        config, rows = self._config, self.routed.rows
        if config.moe_pad_expert_input_to_capacity:
            routing_map = routing_map & (probs != 0)  # without the rows that only fill up
        end_E = routing_map.sum(0).cumsum(0).int()
        plan, places = self.routed.layer_context.plan, self._places
        destination = plan.destination if places is None else places.destination
        num_rows = len(routing_map) * config.moe_router_topk
        rows(SlotRows.ending(end_E, num_rows), config.moe_router_topk, destination)
        rows.sent()

    def __call__(self, stock: Callable[..., Any], x: Tensor, *given: Any) -> Any:
        """The forward of the experts' module, ``stock``, on what the dispatcher gives."""
        if self._places is None:
            return self._timed(EXPERT, stock, x, *given)
        found = self._begun()
        if self._is_open and torch.is_grad_enabled():
            x = edge(x, self._ticket, partial(self._computed_back, found))
        with self._with(found):
            return self._timed(EXPERT, stock, x, *given)

    def _begun(self) -> _Pass:
        """The pass that comes to the experts, with its guests, which are waited for."""
        replicas, places = self.routed.replicas, self._places
        assert replicas is not None and places is not None
        prefetch, replicas.coming = replicas.coming, None
        if prefetch is None:
            prefetch = replicas.begin(self.weights(), is_training=self.training)
        held = prefetch.gathered()
        own = self.slots()
        learns = torch.is_grad_enabled() and self.training and self._is_trained
        like = own[0].parameters if own else replicas.like
        sums = self._sums_now(places) if learns else {}
        if not learns:
            weights = [tuple(weight.detach() for weight in held[e]) for e in places.guests]
        else:
            for e in places.guests:
                if e not in self._leaves or self._leaves[e][0] is not held[e]:
                    self._leaves[e] = held[e], self._leaves_of(held[e], sums[e], like)
            weights = [self._leaves[e][1] for e in places.guests]  # micro-batches have the same
        # Slots that this rank has and no expert: no token comes.
        empty = tuple(weight.detach() for weight in like)
        gap = [empty] * (places.num_owners - len(own))
        rest = [empty] * (places.num_slots - places.num_owners - len(weights))
        return _Pass(prefetch, [*gap, *weights, *rest])

    @property
    def _is_trained(self) -> bool:
        return self.routed.replicas is not None and self.routed.replicas.is_trained

    def _sums_now(self, places: Places) -> dict[int, Weights]:
        """Where gradients of this step's guests add up, by expert; zeros as it begins."""
        step = self.passes.schedules.steps
        if self._sums_of != step or self._sums.keys() != set(places.guests):
            assert self.routed.replicas is not None
            like = self.routed.replicas.like
            own = self.slots()
            dtypes = [_sum_dtype(w) for w in (own[0].parameters if own else like)]
            self._sums = {
                e: tuple(w.new_zeros(w.shape, dtype=d) for w, d in zip(like, dtypes))
                for e in places.guests
            }
            self._sums_of, self._leaves = step, {}
        return self._sums

    def _leaves_of(self, held: Weights, sums: Weights, like: Sequence[Tensor]) -> Weights:
        """A guest's weights as Megatron's modules take parameters: leaves, with a ``main_grad``."""
        leaves = tuple(weight.detach() for weight in held)
        replicas = self.routed.replicas
        assert replicas is not None
        for leaf, total, own, any_own in zip(leaves, sums, like, replicas.like):
            if any_own.requires_grad or replicas.some_are_trained:  # here or on another rank
                leaf.requires_grad_(True)
                marks = {key: value for key, value in vars(own).items() if key not in OF_OWNER}
                vars(leaf).update(marks, main_grad=total)
                leaf.register_post_accumulate_grad_hook(_add_up)
        return leaves

    @contextmanager
    def _with(self, found: _Pass) -> Iterator[None]:
        with self.form.extended(self.experts, self.weight_names, found.weights):
            yield

    def _combine_postprocess(self, output: Tensor) -> Tensor:
        output = self._stock_postprocess(output)
        self.passes.watch(output)
        return output

    # Backward.

    def _computed_back(self, found: _Pass) -> None:
        """The experts' gradients have been made, or all but those of weights."""
        assert self.routed.replicas is not None
        found.is_last, self._has_some = self.routed.replicas.is_last_pass(), True
        if getattr(self._config, "delay_wgrad_compute", False):
            self._delayed.append(found)
        else:
            self._done(found)

    def backward_dw(self, stock: Callable[[], None]) -> None:
        """Megatron's own ``stock`` makes the gradients of weights that were put off."""
        if not self._delayed:
            stock()
            return
        found = self._delayed.popleft()
        with self._with(found):
            stock()
        for leaf in (leaf for weights in found.weights for leaf in weights):
            kept, leaf.grad = leaf.grad, None
            if kept is not None and hasattr(leaf, "main_grad"):  # not of an empty slot
                leaf.main_grad.add_(kept)
        self._done(found)

    def _done(self, found: _Pass) -> None:
        """Behind the last pass of a step gradients of guests go to the owner."""
        replicas, prefetch = self.routed.replicas, found.prefetch
        assert replicas is not None
        if not found.is_last:
            return
        sums, self._sums = self._sums, {}
        if not sums and self._places is not None and self._places.guests:
            raise RuntimeError(
                f"{self.routed.name}: gradients of replicas were sent to their owners before the "
                "backward pass of another micro-batch; a pipeline schedule must come from "
                "megatron.core.pipeline_parallel.get_forward_backward_func, or use strategy 'ep'"
            )
        self._sums_of, self._leaves = -1, {}
        prefetch.send_back(
            {
                expert: tuple(s.to(w.dtype) for s, w in zip(own, replicas.like))
                for expert, own in sums.items()
            }
        )
        self._returning = prefetch

    def arrive_at_owner(self) -> None:
        """Add what has come to the gradients of the experts owned here, which are complete then.
        Nothing where no step's gradients are on their way."""
        prefetch, self._returning = self._returning, None
        if prefetch is None:
            return
        for expert, totals in prefetch.sums().items():
            slot = self.slots()[prefetch.replicas.transfers.slots[expert]]
            for parameter, total in zip(slot.parameters, totals):
                if parameter.requires_grad:
                    parameter.main_grad.add_(total)  # type: ignore[attr-defined]
        self._has_some = False
        self._release()

    def _release(self) -> None:
        self._is_open = False
        waiting, self._waiting = self._waiting, []
        for ready in waiting:
            ready()

    def holds_back(self, ready: Callable[[], object]) -> bool:
        """Whether ``ready``, which notifies Megatron that a gradient at the owner is complete, is
        put off until those of guests have come."""
        if self._is_open:
            self._waiting.append(ready)
        return self._is_open

    def end_step(self) -> None:
        """Megatron is about to finish the gradients of a step. Raises RuntimeError where those of
        guests are still here."""
        self.arrive_at_owner()
        if self._has_some:
            raise RuntimeError(f"{left_behind(self.routed.name, self._sums)}, or use strategy 'ep'")
        self._release()  # of a layer whose pass never came back

    # Times, where somebody wants to know them.

    def _timed(self, op: Op, run: Callable[..., Any], x: Tensor, *given: Any, **named: Any) -> Any:
        """What ``run`` makes of rows, timed in both directions; the first tensor of it is rows."""
        routed = self.routed
        observers = (routed.tasks, routed.meter)
        if not any(each.is_on for each in observers):
            return run(x, *given, **named)
        streams = streams_for(x.device, overlaps=True)
        task = Task(op, routed.layer_context.layer, ChunkRange(0, 1), (), ())
        behind = _Behind(task, streams, observers)
        is_graded = torch.is_grad_enabled() and x.requires_grad
        start = streams.mark()
        made = run(edge(x, None, behind.end) if is_graded else x, *given, **named)
        notify(observers, task, start, streams)
        if not is_graded:
            return made
        if isinstance(made, tuple):
            return edge(made[0], None, behind.begin), *made[1:]
        return edge(made, None, behind.begin)


@dataclass(eq=False)
class _Behind:
    """Times a task's adjoint."""

    task: Task
    streams: ScheduleStreams
    observers: tuple[Any, ...]
    start: Mark | None = None

    def begin(self) -> None:
        self.start = self.streams.mark()

    def end(self) -> None:
        if self.start is not None:
            notify(self.observers, replace(self.task, adjoint_of=(0,)), self.start, self.streams)


OF_OWNER = ("main_grad", "grad_added_to_main_grad", "grad")
"""What a parameter of Megatron's has for itself."""


def _sum_dtype(weight: Tensor) -> torch.dtype:
    """Of a gradient's sum over micro-batches: as Megatron's DDP keeps it; 32 bits at least where
    this rank has none to look at."""
    kept = getattr(weight, "main_grad", None)
    return torch.promote_types(weight.dtype, torch.float32) if kept is None else kept.dtype


def _add_up(leaf: Tensor) -> None:
    """As the hook of Megatron's DDP, for a guest. Fused kernels add up themselves and give none;
    where gradients are put off, what is there now is nothing yet."""
    of_megatron: Any = leaf
    if leaf.grad is not None and not getattr(leaf, "skip_backward_post_hook", False):
        of_megatron.main_grad.add_(leaf.grad)
        leaf.grad = None


class _Edge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ticket: Tensor | None, behind: Callable[[], None]) -> Tensor:
        ctx.behind = behind
        return x.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.behind()
        return grad, None, None


def edge(x: Tensor, ticket: Tensor | None, behind: Callable[[], None]) -> Tensor:
    """The same tensor; ``behind`` is called when backward has come to it. With a ticket, an empty
    tensor that wants a gradient, backward comes whatever ``x`` wants."""
    same: Tensor = _Edge.apply(x, ticket, behind)
    return same


# Megatron's bucket groups wait for gradients of guests.


class Owners:
    """Layers whose experts lie in a DDP chunk's bucket groups; these are reduced when gradients of
    guests are in them. A weight's layer is another when experts have moved."""

    def __init__(self, chunk: Any, layers: Sequence[GuestExperts]) -> None:
        self._layers, self._group_of = layers, chunk.param_to_bucket_group
        self._layer_of: dict[Any, GuestExperts] = {}  # of a parameter; empty: not known
        self._layers_of: dict[int, list[GuestExperts]] = {}  # of a group, by its id
        for layer in layers:
            layer.on_hold = self._layer_of.clear
        self._look()
        for group in {id(g): g for p in self._layer_of if (g := self._group_of.get(p))}.values():
            self._wrap(group)

    def _look(self) -> None:
        if self._layer_of:
            return
        self._layers_of.clear()
        for layer in self._layers:
            for parameter in (p for slot in layer.slots() for p in slot.parameters):
                self._layer_of[parameter] = layer
                own = self._layers_of.setdefault(id(self._group_of.get(parameter)), [])
                if layer not in own:
                    own.append(layer)

    def _wrap(self, group: Any) -> None:
        stock_ready = group.register_grad_ready

        def register_grad_ready(parameter: Any, *args: Any, **kwargs: Any) -> None:
            self._look()
            ready = partial(stock_ready, parameter, *args, **kwargs)
            layer = self._layer_of.get(parameter)
            if not (group.is_last_microbatch and layer is not None and layer.holds_back(ready)):
                ready()

        def behind_guests(
            stock: Callable[..., Any],
            wait: Callable[[GuestExperts], None],
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            self._look()
            for layer in self._layers_of.get(id(group), ()):
                wait(layer)
            return stock(*args, **kwargs)

        group.register_grad_ready = register_grad_ready
        for name, wait in (
            ("start_grad_sync", GuestExperts.arrive_at_owner),
            ("finish_grad_sync", GuestExperts.end_step),
        ):
            setattr(group, name, partial(behind_guests, getattr(group, name), wait))
