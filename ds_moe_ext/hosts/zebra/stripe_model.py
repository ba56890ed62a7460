# SPDX-License-Identifier: Apache-2.0
"""A model whose forward is a whole step of zebra parallelism, in the place of the user's.

Attention ranks run the model itself, piece by piece, and expert ranks serve experts. On both,
``forward`` is one node of autograd: backward has been done when it returns, with a gradient of the
loss that is known before, and what autograd brings later only scales what was found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_moe_ext.core.comm import connect
from ds_moe_ext.core.layout import group_among
from ds_moe_ext.hosts.attachment.block_hooks import block_of
from ds_moe_ext.hosts.attachment.host_layer import Hosted
from ds_moe_ext.hosts.attachment.modules import Compilable, eager, stepped_into
from ds_moe_ext.hosts.attachment.replacement import AttachedLayer, Blueprint
from ds_moe_ext.hosts.zebra.batches import BatchExchange
from ds_moe_ext.hosts.zebra.both_sides import BothSides
from ds_moe_ext.hosts.zebra.call_arguments import Call
from ds_moe_ext.hosts.zebra.outcomes import Outcome
from ds_moe_ext.hosts.zebra.passage import Here, Passage
from ds_moe_ext.hosts.zebra.serving import GradientSums
from ds_moe_ext.hosts.zebra.stack import Stack
from ds_moe_ext.hosts.zebra.stripe import Stripe
from ds_moe_ext.moe.gate import RunRows, capacity_of, drop_over_capacity
from ds_moe_ext.schedule.executor import InlineLanes, lanes_for
from ds_moe_ext.schedule.orders import WEIGHTS
from ds_moe_ext.schedule.program import Program, in_backward
from ds_moe_ext.schedule.stages import Crew, Saved, Uncut
from ds_moe_ext.schedule.step import LOSS
from ds_moe_ext.schedule.stripes import A2E, E2A
from ds_moe_ext.schedule.task import COMPUTE, Kind, Op, Schedule, Span, Task, Value

Scale = Callable[[], float]
"""What losses are multiplied with before backward, as float16 wants it."""


@dataclass(frozen=True)
class Gradients:
    """What a host does with them.

    Attributes:
        device: where this rank computes them.
        factor: it wants this rank's multiplied by.
        scale: of losses.
    """

    device: torch.device
    factor: float
    scale: Scale


@dataclass(frozen=True, eq=False)
class StripedModel:
    """What is called in the place of the model's forward. Collective over the ZP group.

    Attributes:
        model: the user's.
        forward: its own forward.
        stack: its layers.
        batches: brings those of expert ranks to attention ranks.
        gradients: what the host does with them.
        checks: compare what all ranks issued, after every pass.
    """

    model: nn.Module
    forward: Callable[..., Any]
    stack: Stack
    batches: BatchExchange
    gradients: Gradients
    checks: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_graded, is_training = torch.is_grad_enabled(), self.model.training
        mode = f"{'train' if is_training else 'eval'}{'' if is_graded else ', no gradients'}"
        shared = self.batches.share(args, kwargs, mode)
        sums = GradientSums() if is_graded else None
        scale = self.gradients.scale() if is_graded else 1.0
        stripes = [self._stripe(calls, sums, scale) for calls in shared.calls if calls]
        control = self.batches.control if self.checks else None
        self.stack.run(len(shared.calls), stripes, sums, counts=is_training, control=control)
        outcomes = [[passage.output for passage in stripe.passages] for stripe in stripes]
        returned = self.batches.return_scalars(shared, outcomes)
        loss = returned.loss
        if sums is not None:
            # Not those that found no gradient: autograd would run ZeRO's hooks for them too.
            wanted = [p for p in self.model.parameters() if p.requires_grad and sums.has(p)]
            loss.requires_grad_()  # though all weights of this rank may be frozen
            loss = handed_over(loss, wanted, HandOver(sums, self.gradients.factor / scale))
        return returned.output(loss, _guarded)

    def _stripe(self, calls: Sequence[Call], sums: GradientSums | None, scale: float) -> Stripe:
        roles, stack = self.stack.roles, self.stack
        share = len(roles.attention_cells) / roles.size
        passages = [
            Passage(
                functools.partial(self._outcome, call),
                None if sums is None else sums.add,
                stack.threads,
                stack.here,
            )
            for call in calls
        ]
        return Stripe(passages, [scale * share * call.weight for call in calls])

    def _outcome(self, call: Call) -> Outcome:
        return Outcome.of(self.forward(*call.args, **call.kwargs))


HAND_OVER = Op("hand_over", COMPUTE)
HANDED_OVER = Kind("handed_over")  # a loss, behind which are the gradients of its step


@dataclass(frozen=True, eq=False)
class HandOver(Uncut):
    """Gives the gradients that a step has found, in proportion to that of its loss.

    Attributes:
        sums: of the step.
        factor: they are multiplied by.
    """

    sums: GradientSums
    factor: float

    def forward(
        self, span: Span, loss: Tensor, parameters: tuple[Tensor, ...]
    ) -> tuple[tuple[Any, ...], Saved]:
        return (loss.detach().clone(),), (parameters,)

    def backward(self, span: Span, saved: Saved, grad: Tensor) -> tuple[Any, ...]:
        factor = grad.double() * self.factor
        return None, tuple(self.sums.take(parameter, factor) for parameter in saved[0])


@functools.cache
def _handing_over() -> tuple[Schedule, Schedule]:
    span = Span(0, 1)
    given = (Value(LOSS, 0, span), Value(WEIGHTS, 0))
    handed = (Value(HANDED_OVER, 0, span),)
    forward = Schedule((Task(HAND_OVER, 0, span, given, handed),), given, handed)
    return forward, forward.reversed()


def handed_over(loss: Tensor, parameters: Sequence[Tensor], stage: HandOver) -> Tensor:
    """The loss as one node of autograd, whose backward gives what its step has found."""
    crew = Crew({HAND_OVER: stage}, name="the loss of a striped step")
    program = Program(*_handing_over(), crew, InlineLanes())
    (handed,) = program(loss, tuple(parameters))
    return handed


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


def _guarded(scalar: Tensor) -> Tensor:
    guarded: Tensor = _Guarded.apply(scalar.requires_grad_())
    return guarded


@dataclass(frozen=True, eq=False)
class Role:
    """What has become of a rank.

    Attributes:
        left: weights that left its model, for an expert rank keeps experts only.
        both_sides: shows an attention rank what an expert rank does.
    """

    left: tuple[nn.Parameter, ...]
    both_sides: BothSides


def stripe(
    model: nn.Module,
    blueprint: Blueprint,
    layers: Sequence[AttachedLayer],
    gradients: Gradients,
    here: Here,
) -> Role:
    """Make a model's forward a striped step. Collective.

    Args:
        model: whose layers have been replaced; it is changed in place.
        blueprint: what was asked for.
        layers: in the order in which the model calls them.
        gradients: what the host does with them.
        here: where the layers, made to pause, find out whose model runs.
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
    layout = layers[0].routed.site.layout
    batches = BatchExchange(
        layout.group("ep", A2E),
        group_among(blueprint.grid.along("ep"), backend="gloo"),
        place=layout.index("ep"),
        roles=roles,
        num_stripes=num_stripes,
        device=gradients.device,
    )
    forward = Compilable(model.forward)
    striped = StripedModel(model, forward, stack, batches, gradients, blueprint.settings.debug)
    left: tuple[nn.Parameter, ...] = ()
    blocks = blocks_of(model, layers)
    if stack.is_attention:
        for block in blocks:
            cut_at(block, here)
    else:
        left = keep_parameters(model, (p for layer in layers for p in layer.parameters))

    step = eager(striped.__call__)

    @functools.wraps(model.forward)
    def whole_step(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    model.forward = whole_step
    model.compile = forward.compile  # type: ignore[method-assign]
    return Role(left, BothSides(batches.control, batches.place, roles))


def stack_of(
    blueprint: Blueprint, layers: Sequence[AttachedLayer], device: torch.device, here: Here
) -> Stack:
    """The layers, and what runs them. Collective: it connects the ranks of a ZP group."""
    strategy = blueprint.strategy
    assert strategy.roles is not None, "else nobody asks"
    layout = layers[0].routed.site.layout
    for lane in (A2E, E2A):
        connect(layout.group("ep", lane), device)
    hosted = [layer.hosted for layer in layers]
    return Stack(
        layers=[layer.routed for layer in layers],
        weights=lambda layer: hosted[layer].weights(),
        roles=strategy.roles,
        device=device,
        lanes=lanes_for(device, overlaps=True),
        recomputes=strategy.striping.recomputes,
        here=here,
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
    """The block of each layer.

    Raises:
        ValueError: two layers have one.
    """
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
    enter, leave = eager(Passage.enter), eager(Passage.leave)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        passage = here.passage
        if passage is None or in_backward():
            return original(*args, **kwargs)
        args, kwargs = enter(passage, (args, kwargs))
        return leave(passage, original(*args, **kwargs))

    block.forward = stepped_into(forward)


@dataclass(frozen=True, eq=False)
class Pausing:
    """Makes the model pause where it calls experts: they are on other ranks.

    Attributes:
        here: whose model it is.
        capacity_factor: rows that an expert takes of a piece, over the mean; None for all.
    """

    here: Here
    capacity_factor: float | None

    def __call__(self, layer: int, hosted: Hosted) -> RunRows:
        """In the place of a layer's experts."""
        num_experts = hosted.routed.site.plan.home.num_experts

        def paused(
            x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor, weights: tuple[Tensor, ...]
        ) -> Tensor:
            passage = self.here.passage
            if passage is None:
                raise RuntimeError(
                    f"the experts of MoE layer {layer} were called outside of its forward; under "
                    "strategy zebra call the model itself, on all ranks together"
                )
            if self.capacity_factor is not None:
                capacity = capacity_of(expert_TK.numel(), num_experts, self.capacity_factor)
                expert_TK = drop_over_capacity(expert_TK, num_experts, capacity)
            ask = functools.partial(passage.experts, layer)
            given = expert_TK, score_TK
            (y_TD,) = hosted.routed.shown(lambda *rows: (ask(*rows),), x_TD, *given)
            return y_TD

        return paused
