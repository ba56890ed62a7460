# SPDX-License-Identifier: Apache-2.0
"""A model whose forward is a whole step of zebra parallelism, in the place of the user's.

Attention ranks run the model itself, piece by piece, and expert ranks serve experts: ``Stack`` does
the tasks of ``schedule/stripes.py``, forward and backward of all layers and stripes in one pass,
with a gradient of the loss that is known before. On both sides ``forward`` is one node of autograd:
backward has been done when it returns, and what autograd brings later only scales what was found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.core.comm import connect, gather_objects
from ds_moe_ext.core.layout import Roles, group_among
from ds_moe_ext.hosts.attachment.block_hooks import block_of
from ds_moe_ext.hosts.attachment.host_layer import Hosted
from ds_moe_ext.hosts.attachment.modules import Compilable, eager, stepped_into
from ds_moe_ext.hosts.attachment.replacement import AttachedLayer, Blueprint
from ds_moe_ext.hosts.zebra.batches import BatchExchange, Call, Outcome
from ds_moe_ext.hosts.zebra.role_exchange import (
    GradientSums,
    StripeAttention,
    StripeCombine,
    StripeDispatch,
    StripeExpert,
    StripeFree,
    StripeGather,
    StripeHead,
    StripeJoin,
)
from ds_moe_ext.hosts.zebra.stripe_pass import AddGrad, Here, RandomNumbers, Stripe, StripePass
from ds_moe_ext.moe.gate import RunRows, capacity_of, drop_over_capacity
from ds_moe_ext.moe.layer import RoutedExperts
from ds_moe_ext.report import record
from ds_moe_ext.schedule import stripes as tasks
from ds_moe_ext.schedule import task as ops
from ds_moe_ext.schedule.executor import ScheduleStreams, streams_for
from ds_moe_ext.schedule.orders import WEIGHTS
from ds_moe_ext.schedule.program import Pass, in_backward, ran_before
from ds_moe_ext.schedule.stages import Binding, LayerStages, Saved, Stage
from ds_moe_ext.schedule.step import LOSS
from ds_moe_ext.schedule.task import Op, Schedule, Stream, Value


@dataclass(frozen=True)
class Gradients:
    """What a host does with them."""

    device: torch.device  # where this rank computes them
    factor: float  # it wants this rank's multiplied by
    scale: Callable[[], float]  # of losses, before backward, as float16 wants it


@dataclass(frozen=True, eq=False)
class Role:
    """What has become of a rank."""

    left: tuple[nn.Parameter, ...]  # weights that left its model: an expert rank keeps experts only
    both_sides: BothSides  # shows an attention rank what an expert rank does


def stripe(
    model: nn.Module,
    blueprint: Blueprint,
    layers: Sequence[AttachedLayer],
    gradients: Gradients,
    here: Here,
    *,
    striped: type[StripedModel],
    batch_size: int = 1,
) -> Role:
    """Make a model's forward a striped step. Collective.

    Args:
        model: whose layers have been replaced; it is changed in place.
        blueprint: what was asked for.
        layers: in the order in which the model calls them.
        gradients: what the host does with them.
        here: where the layers, made to pause, find out whose model runs.
        striped: what its forward becomes.
        batch_size: neighbouring ranks that share a batch, or its sequences.
    """
    strategy = blueprint.strategy
    roles, num_stripes = strategy.roles, strategy.striping.num_stripes
    assert roles is not None, "else nobody asks"
    if num_stripes is None:
        raise ValueError(
            f"{type(strategy).__qualname__} gives ranks roles, but no number of stripes; let its "
            "striping say num_stripes, or settled, which knows the micro-batch"
        )
    stack = stack_of(blueprint, layers, gradients.device, here)
    layout = layers[0].routed.layer_context.layout
    batches = BatchExchange(
        layout.group("ep", tasks.A2E),
        group_among(layout.lists_along("ep"), backend="gloo"),
        place=layout.index("ep"),
        roles=roles,
        num_stripes=num_stripes,
        device=gradients.device,
        batch_size=batch_size,
    )
    forward = Compilable(model.forward)
    called = striped(model, forward, stack, batches, gradients, blueprint.settings.debug)
    left: tuple[nn.Parameter, ...] = ()
    blocks = blocks_of(model, layers)
    if stack.is_attention:
        for block in blocks:
            cut_at(block, here)
    else:
        left = keep_parameters(model, (p for layer in layers for p in layer.parameters))

    step = eager(called.__call__)

    @functools.wraps(model.forward)
    def whole_step(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    model.forward = whole_step
    if striped is StripedModel:  # a stage compiles its layers
        model.compile = forward.compile  # type: ignore[method-assign]
    return Role(left, BothSides(batches.control, batches.place, roles))


@dataclass(frozen=True, eq=False)
class StripedModel:
    """What is called in the place of the model's forward. Collective over the ZP group."""

    model: nn.Module
    forward: Callable[..., Any]  # the model's own
    stack: Stack
    batches: BatchExchange
    gradients: Gradients
    checks: bool  # compare what all ranks issued, after every pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_graded, is_training = torch.is_grad_enabled(), self.model.training
        mode = f"{'train' if is_training else 'eval'}{'' if is_graded else ', no gradients'}"
        shared = self.batches.share(args, kwargs, mode)
        sums = GradientSums()
        add_grad = sums.add if is_graded else None
        scale = self.gradients.scale() if is_graded else 1.0
        stripes = [self._stripe(calls, add_grad, scale) for calls in shared.calls if calls]
        control = self.batches.control if self.checks else None
        self.stack.run(len(shared.calls), stripes, add_grad, counts=is_training, control=control)
        outcomes = [
            [stripe_pass.output for stripe_pass in stripe.stripe_passes] for stripe in stripes
        ]
        returned = self.batches.return_scalars(shared, outcomes)
        loss = returned.loss
        if is_graded:
            sums.reach(self.model.parameters())
            # Not those that found no gradient: autograd would run ZeRO's hooks for them too.
            wanted = [p for p in self.model.parameters() if p.requires_grad and sums.has(p)]
            loss.requires_grad_()  # though all weights of this rank may be frozen
            loss = _HandOver.apply(sums, self.gradients.factor / scale, loss, *wanted)
        return returned.output(loss, lambda scalar: _Guarded.apply(scalar.requires_grad_()))

    def _stripe(self, calls: Sequence[Call], add_grad: AddGrad | None, scale: float) -> Stripe:
        roles, stack = self.stack.roles, self.stack
        share = len(roles.attention_ep_ranks) / roles.size

        def outcome(call: Call) -> Outcome:
            return Outcome.of(self.forward(*call.args, **call.kwargs))

        stripe_passes = [
            StripePass(functools.partial(outcome, call), add_grad, stack.threads, stack.here)
            for call in calls
        ]
        return Stripe(stripe_passes, [scale * share * call.weight for call in calls])


class _HandOver(torch.autograd.Function):
    """The loss of a step; its backward gives the gradients that the step has found, in proportion
    to that of the loss, and forgets them."""

    @staticmethod
    def forward(
        ctx: Any, sums: GradientSums, factor: float, loss: Tensor, *wanted: Tensor
    ) -> Tensor:
        ctx.found = sums, factor, wanted
        return loss.detach().clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.found is None:
            raise RuntimeError(ran_before("the loss of a striped step"))
        (sums, factor, wanted), ctx.found = ctx.found, None
        factor = grad.double() * factor
        return None, None, None, *(sums.take(parameter, factor) for parameter in wanted)


class _Guarded(torch.autograd.Function):
    """A scalar that is not the loss: backward of the model has been done without it."""

    @staticmethod
    def forward(ctx: Any, scalar: Tensor) -> Tensor:
        return scalar.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError(
            "backward ran through a scalar of the model's output which is not its loss; under "
            "strategy zebra the loss alone has a gradient: let the model add up its losses"
        )


def keep_parameters(model: nn.Module, kept: Iterable[nn.Parameter]) -> tuple[nn.Parameter, ...]:
    """Drop all weights but these; those that were dropped."""
    kept_ids = set(map(id, kept))
    left = tuple(p for p in model.parameters() if id(p) not in kept_ids)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in kept_ids:
                module._parameters[name] = None
    return left


# The model on attention ranks.


def blocks_of(model: nn.Module, layers: Iterable[AttachedLayer]) -> list[nn.Module]:
    """The block of each layer. Raises ValueError where two layers have one."""
    blocks: dict[str, str] = {}
    for layer in layers:
        name = block_of(model, layer.name)
        if name in blocks:
            raise ValueError(
                f"{name} has two MoE layers, {blocks[name]} and {layer.name}; strategy zebra takes "
                "one a block: leave one out with ds_moe_ext.moe_layer_pattern"
            )
        blocks[name] = layer.name
    return [model.get_submodule(name) for name in blocks]


def cut_at(block: nn.Module, here: Here) -> None:
    """Cut the graph of autograd where a block begins and ends."""
    original = block.forward
    enter, leave = eager(StripePass.enter), eager(StripePass.leave)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        stripe_pass = here.stripe_pass
        if stripe_pass is None or in_backward():
            return original(*args, **kwargs)
        args, kwargs = enter(stripe_pass, (args, kwargs))
        return leave(stripe_pass, original(*args, **kwargs))

    block.forward = stepped_into(forward)


@dataclass(frozen=True, eq=False)
class Pausing:
    """Makes the model pause where it calls experts: they are on other ranks."""

    here: Here  # whose model it is
    capacity_factor: float | None  # rows that an expert takes of a piece, over the mean

    def __call__(self, layer: int, hosted: Hosted) -> RunRows:
        """In the place of a layer's experts."""
        num_experts = hosted.routed.layer_context.plan.owner.num_experts

        def paused(
            x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor, weights: tuple[Tensor, ...]
        ) -> Tensor:
            stripe_pass = self.here.stripe_pass
            if stripe_pass is None:
                raise RuntimeError(
                    f"the experts of MoE layer {layer} were called outside of its forward; under "
                    "strategy zebra call the model itself, on all ranks together"
                )
            if self.capacity_factor is not None:
                capacity = capacity_of(expert_TK.numel(), num_experts, self.capacity_factor)
                expert_TK = drop_over_capacity(expert_TK, num_experts, capacity)
            ask = functools.partial(stripe_pass.experts, layer)
            given = expert_TK, score_TK
            (y_TD,) = hosted.routed.shown(lambda *rows: (ask(*rows),), x_TD, *given)
            return y_TD

        return paused


# A step on one rank.


class _Numbers(NamedTuple):
    """Of layers of each kind, as ``striped_step`` takes them."""

    offloaded: frozenset[int]
    copied: frozenset[int]
    revised: frozenset[int]
    freed: frozenset[int]
    once: bool


class Half(Enum):
    """What of a step is done."""

    BOTH = "forward and backward"
    FORWARD = "forward"
    BACKWARD = "backward"


@lru_cache(maxsize=64)
def _schedule_of(
    num_layers: int, num_stripes: int, numbers: _Numbers, side: Stream, half: Half
) -> Schedule:
    """The part of one side."""
    own = tasks.part_of(tasks.striped_step(num_layers, num_stripes, **numbers._asdict()), side)
    if half is Half.BOTH:
        return own
    first, later = tasks.halves(own)
    return first if half is Half.FORWARD else later


@dataclass(frozen=True, eq=False)
class Ahead:
    """A step whose backward is still to come."""

    stripes: Sequence[Stripe]  # of this rank; none on an expert rank
    later: Binding  # its backward
    written: Mapping[Value, Any]  # by forward
    saved: list[Saved]  # by its tasks


def _threads() -> ThreadPoolExecutor:
    """For as many coroutines as there are pieces."""
    num = torch.get_num_threads()
    name = "ds_moe_ext_stripe"
    return ThreadPoolExecutor(1024, name, initializer=torch.set_num_threads, initargs=(num,))


@dataclass(frozen=True, eq=False)
class Stack:
    """The layers of a model on one rank, and what runs them."""

    layers: Sequence[RoutedExperts]  # in the order in which the model calls them
    weights: Callable[[int], tuple[Tensor, ...]]  # of each layer's experts here, at present
    roles: Roles  # of the ranks of a group
    device: torch.device
    streams: ScheduleStreams  # where its tasks run
    recomputes: bool = False  # experts compute again in backward what lies between their rows
    here: Here = field(default_factory=Here)  # where the model finds out what it computes
    threads: ThreadPoolExecutor = field(default_factory=_threads)  # for the model

    @property
    def is_attention(self) -> bool:
        """Whether this rank runs the model."""
        return self.roles.is_attention(self.layers[0].layer_context.layout.rank)

    def run(
        self,
        num_stripes: int,
        stripes: Sequence[Stripe],
        add_grad: AddGrad | None,
        *,
        counts: bool,
        control: dist.ProcessGroup | None = None,
    ) -> Schedule:
        """A step, or where nothing has a gradient its forward; what was done. Collective over the
        ZP group.

        Args:
            num_stripes: of every attention rank.
            stripes: this rank's; none on an expert rank.
            add_grad: takes the gradients of this rank's parameters; None for forward alone.
            counts: the rows count for the report.
            control: over which ranks compare what they have issued; None: they do not.
        """
        half = Half.FORWARD if add_grad is None else Half.BOTH
        numbers = self._numbers(turns_around=True)
        schedule = _schedule_of(len(self.layers), num_stripes, numbers, self._side, half)
        layers_stages = self._layers_stages(stripes, add_grad, counts=counts)
        self._begin(schedule, layers_stages, stripes, is_graded=add_grad is not None)
        if control is not None:
            check_orders(schedule, control)
        return schedule

    def ahead(
        self, num_stripes: int, stripes: Sequence[Stripe], add_grad: AddGrad, *, counts: bool
    ) -> Ahead:
        """Forward of a step whose backward comes later, as in a stage of a pipeline. Collective
        over the ZP group. Arguments as of ``run``."""
        numbers = self._numbers(turns_around=False)
        first, later = (
            _schedule_of(len(self.layers), num_stripes, numbers, self._side, half)
            for half in (Half.FORWARD, Half.BACKWARD)
        )
        layers_stages = self._layers_stages(stripes, add_grad, counts=counts)
        written, saved = self._begin(first, layers_stages, stripes, is_graded=True)
        binding = Binding.of(later, lambda task: layers_stages[task.layer], adjoint_of=first)
        return Ahead(stripes, binding, dict(zip(first.outputs, written)), saved)

    def back(self, ahead: Ahead) -> None:
        """Backward of a step, from the gradients that its stripes have by now for seeds. Collective
        over the ZP group."""
        seeds = {n: tuple(stripe.seeds) for n, stripe in enumerate(ahead.stripes)}
        given = (
            seeds.get(value.chunk_range.start)
            if value.kind == LOSS and value.chunk_range is not None
            else ahead.written.get(value)
            for value in ahead.later.schedule.inputs
        )
        with torch.no_grad():
            Pass(ahead.later, self.streams, saved=ahead.saved)(given)

    @property
    def _side(self) -> Stream:
        return tasks.ATTENTION_SIDE if self.is_attention else tasks.EXPERT_SIDE

    def _begin(
        self,
        schedule: Schedule,
        layers_stages: Sequence[LayerStages],
        stripes: Sequence[Stripe],
        *,
        is_graded: bool,
    ) -> tuple[tuple[Any, ...], list[Saved]]:
        """Run a schedule that begins with forward: what it wrote, and what its tasks saved."""
        try:
            given = (self._given(value, is_graded=is_graded) for value in schedule.inputs)
            binding = Binding.of(schedule, lambda task: layers_stages[task.layer])
            one_pass = Pass(binding, self.streams, keeps=is_graded)
            # Ranks of both roles draw one number of theirs.
            with RandomNumbers().own(), torch.no_grad():
                return one_pass(given), one_pass.saved
        finally:
            for stripe in stripes:
                for stripe_pass in stripe.stripe_passes:
                    stripe_pass.abandon()

    def _layers_stages(
        self, stripes: Sequence[Stripe], add_grad: AddGrad | None, *, counts: bool
    ) -> list[LayerStages]:
        """Who does the tasks of each layer, and of the end."""
        layers_stages = [
            self._layer_stages(layer, stripes, add_grad, counts=counts) for layer in self.layers
        ]
        head = {tasks.HEAD: StripeHead(len(layers_stages), stripes)}
        return [*layers_stages, LayerStages(head, layers_stages[-1].observers, "the end")]

    def _numbers(self, *, turns_around: bool) -> _Numbers:
        """Where backward comes at once, the last two layers keep their replicas: so many are in
        memory at a time."""
        plans, ep_ranks = (
            [layer.layer_context.plan for layer in self.layers],
            list(self.roles.attention_ep_ranks),
        )
        revised = [plan.revise for plan in plans]
        # The rows of a stripe may ask for replicas.
        offloaded = [
            plan.target.holds_EC[:, ep_ranks].any()
            or (plan.revise and any(map(plan.may_copy_to, ep_ranks)))
            for plan in plans
        ]
        copied = [plan.has_replicas for plan in plans]
        last = len(plans) - 2 if turns_around else len(plans)
        freed = [
            plan.has_replicas and plan.rematerialize and layer < last
            for layer, plan in enumerate(plans)
        ]
        once = self.layers[0].layer_context.sends_once

        def numbers(flags: Iterable[Any]) -> frozenset[int]:
            return frozenset(layer for layer, has in enumerate(flags) if has)

        kinds = numbers(offloaded), numbers(copied), numbers(revised), numbers(freed)
        return _Numbers(*kinds, once)

    def _layer_stages(
        self,
        layer: RoutedExperts,
        stripes: Sequence[Stripe],
        add_grad: AddGrad | None,
        *,
        counts: bool,
    ) -> LayerStages:
        """Who does the tasks of a layer: its own stages, stripe by stripe."""
        is_graded = add_grad is not None
        own = layer.stages_between_sides(self.device, counts=counts, is_graded=is_graded)
        order, dispatch, expert, combine = (
            own.stages[op] for op in (ops.ORDER, ops.DISPATCH, ops.EXPERT, ops.COMBINE)
        )
        has_replicas, once = layer.layer_context.plan.has_replicas, layer.layer_context.sends_once
        serve_expert = StripeExpert(expert, add_grad, self.recomputes, has_replicas)
        stages: dict[Op, Stage] = {
            tasks.ATTENTION: StripeAttention(layer.layer_context.layer, stripes),
            tasks.DISPATCH: StripeDispatch(
                order, dispatch, self.device, is_graded, layer.rows_are_like, once
            ),
            tasks.EXPERT: serve_expert,
            tasks.OFFLOADED: serve_expert,
            tasks.COMBINE: StripeCombine(combine, once),
        }
        if has_replicas:
            assert layer.replicas is not None, "its strategy uses what they travel by"
            gather, join = (
                StripeGather(layer.replicas, add_grad),
                StripeJoin(layer.replicas, add_grad),
            )
            stages |= {
                ops.GATHER: gather,
                tasks.REVISE: gather,
                tasks.FREE: StripeFree(layer.replicas),
                tasks.JOIN: join,
                tasks.OFFLOADED_JOIN: join,
            }
        return replace(own, stages=stages)

    def _given(self, value: Value, *, is_graded: bool) -> tuple[Tensor, ...] | None:
        """What a pass begins with: weights of experts; the model has its own."""
        if value.kind not in (WEIGHTS, tasks.OFFLOADED_WEIGHTS):
            return None
        with torch.set_grad_enabled(is_graded):  # of adapters
            weights = self.weights(value.layer)
        return weights if is_graded else tuple(weight.detach() for weight in weights)


def stack_of(
    blueprint: Blueprint, layers: Sequence[AttachedLayer], device: torch.device, here: Here
) -> Stack:
    """The layers, and what runs them. Collective: it connects the ranks of a ZP group."""
    strategy = blueprint.strategy
    assert strategy.roles is not None, "else nobody asks"
    layout = layers[0].routed.layer_context.layout
    for stream in (tasks.A2E, tasks.E2A):
        connect(layout.group("ep", stream), device)
    hosted = [layer.hosted for layer in layers]
    return Stack(
        layers=[layer.routed for layer in layers],
        weights=lambda layer: hosted[layer].weights(),
        roles=strategy.roles,
        device=device,
        streams=streams_for(device, overlaps=True),
        recomputes=strategy.striping.recomputes,
        here=here,
    )


def check_orders(issued: Schedule, control: dist.ProcessGroup) -> None:
    """Collective. Raises RuntimeError on all ranks where they issued collectives in other orders,
    by which they would wait for each other in vain sooner or later."""
    lines = (f"{stream.name}: {issued.in_stream(stream)}" for stream in tasks.SHARED)
    gathered = gather_objects("; ".join(lines), control)
    if len(set(gathered)) > 1:
        raise RuntimeError(
            "ranks of a ZP group issued collectives in different orders: "
            + " | ".join(f"place {place} {text}" for place, text in enumerate(gathered))
        )


@dataclass(frozen=True, eq=False)
class BothSides:
    """Adds what the first expert rank of a ZP group computes to what another rank saw of a step."""

    control: dist.ProcessGroup  # the ranks of the group, over gloo
    place: int  # of this rank there
    roles: Roles

    def __call__(self, traced_tasks: Sequence[record.TracedTask]) -> list[record.TracedTask]:
        """The same and the expert rank's, on this rank's clock: the first exchange ended at one
        moment for both. In the order in which they began; the rank's own know where those are now
        that they waited for. Collective."""
        sender = self.roles.expert_ep_ranks[0]
        own = list(traced_tasks)
        theirs = gather_objects(own if self.place == sender else [], self.control)[sender]
        if self.place == sender:
            return own
        later_s = _first_end_s(own) - _first_end_s(theirs)
        moved = (
            replace(
                traced_task,
                start_s=traced_task.start_s + later_s,
                end_s=traced_task.end_s + later_s,
                bound_by=None,
            )
            for traced_task in theirs
            if traced_task.stream == tasks.EXPERT_SIDE.name
        )
        both = [*own, *moved]
        order = sorted(range(len(both)), key=lambda old: both[old].start_s)
        new = {old: place for place, old in enumerate(order)}
        return [
            traced_task
            if traced_task.bound_by is None
            else replace(traced_task, bound_by=new[traced_task.bound_by])
            for traced_task in (both[old] for old in order)
        ]


def _first_end_s(traced_tasks: Sequence[record.TracedTask]) -> float:
    """When the first exchange of the step had ended."""
    return min(
        (
            traced_task.end_s
            for traced_task in traced_tasks
            if traced_task.name == tasks.DISPATCH.name
        ),
        default=0.0,
    )
