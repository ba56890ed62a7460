# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's modules of experts: where the weights of each lie, and what they compute.

Their class is swapped for a subclass whose forward is ours, so that parameters, names, state dicts
and isinstance stay as they are. Shape letters: T tokens, E experts, S slots, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import experts as moe_experts
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.host_layer import ExpertShape, Slot, shape_of, weights_of
from ds_moe_ext.hosts.megatron.activations import activation_of
from ds_moe_ext.hosts.megatron.choices import Choices
from ds_moe_ext.hosts.steps.host import Passes, Schedules
from ds_moe_ext.moe.feed_forward import FeedForwardExperts
from ds_moe_ext.moe.gate import RunRows
from ds_moe_ext.moe.layer import RoutedExperts
from ds_moe_ext.moe.sharding import Along, Shard

Ready = Callable[[], None]
"""Waits for weights that the host is still gathering."""


class Form(ABC):
    """How a class of Megatron's keeps its experts."""

    @abstractmethod
    def slots(self, experts: Any, names: Sequence[str]) -> list[Slot]:
        """This rank's experts; ``names`` are of Megatron's parameters, see ``weight_names``."""

    @abstractmethod
    def hold(self, experts: Any, slots: Sequence[Slot], names: Sequence[str]) -> None:
        """Take these slots in place of the present ones."""


class Sequential(Form):
    """``SequentialMLP``: a module each."""

    def slots(self, experts: Any, names: Sequence[str]) -> list[Slot]:
        return [
            Slot(tuple(expert.get_parameter(name) for name in names), expert)
            for expert in experts.local_experts
        ]

    def hold(self, experts: Any, slots: Sequence[Slot], names: Sequence[str]) -> None:
        held = experts.local_experts  # the same list: Megatron keeps hooks by module
        del held[:]
        held.extend(slot.module for slot in slots if slot.module is not None)
        experts.num_local_experts = len(slots)


class Grouped(Form):
    """``TEGroupedMLP``: the two linear modules have a parameter each for every expert."""

    def slots(self, experts: Any, names: Sequence[str]) -> list[Slot]:
        return [
            Slot(tuple(experts.get_parameter(f"{name}{slot}") for name in names))
            for slot in range(experts.num_local_experts)
        ]

    def hold(self, experts: Any, slots: Sequence[Slot], names: Sequence[str]) -> None:
        for number, name in enumerate(names):
            path, _, key = name.rpartition(".")
            linear = experts.get_submodule(path)
            for slot in range(experts.num_local_experts):
                delattr(linear, f"{key}{slot}")
            for slot, held in enumerate(slots):
                linear.register_parameter(f"{key}{slot}", held.parameters[number])
        experts.num_local_experts = len(slots)


class Nowhere(Form):
    """Experts that are on other ranks; see ``sides.Elsewhere``."""

    def slots(self, experts: Any, names: Sequence[str]) -> list[Slot]:
        return []

    def hold(self, experts: Any, slots: Sequence[Slot], names: Sequence[str]) -> None:
        assert not slots, "attention ranks have no experts under Megatron"


FORMS: dict[str, Form] = {"SequentialMLP": Sequential(), "TEGroupedMLP": Grouped()}
"""By the name of Megatron's own class, for not every version has all."""

COMPUTES = ("forward", "bias_act_func")
"""Methods of Megatron's classes whose work is done by our program."""


def form_of(name: str, experts: nn.Module) -> Form:
    """How these experts are kept: as the class of Megatron's that they are of keeps them.

    Raises:
        ValueError: not in a way that is known, or they compute otherwise.
    """
    stock = next((cls for cls in type(experts).__mro__ if _is_stock(cls)), None)
    kind = f"{type(experts).__module__}.{type(experts).__qualname__}"
    if stock is None:
        raise ValueError(
            f"the experts of {name} are a {kind}, which ds_moe_ext does not know; it knows "
            f"{' and '.join(FORMS)} of Megatron-core: leave --moe-use-legacy-grouped-gemm and "
            "specs of your own out, or the layer with ds_moe_ext.moe_layer_pattern"
        )
    own = _overridden(experts, stock)
    if not own and "local_experts" in experts._modules:
        alone = (
            _overridden(expert, MLP) for expert in experts.get_submodule("local_experts").children()
        )
        own = next(filter(None, alone), "")
    if own:
        raise ValueError(
            f"the experts of {name} are a {kind} with a {own}, which ds_moe_ext would not run; use "
            f"Megatron's {stock.__name__}, or leave the layer out with "
            "ds_moe_ext.moe_layer_pattern"
        )
    return FORMS[stock.__name__]


def _is_stock(cls: type) -> bool:
    return getattr(moe_experts, cls.__name__, None) is cls and cls.__name__ in FORMS


def _overridden(module: nn.Module, stock: type) -> str:
    """What a module computes by other means than Megatron's class; empty if nothing."""
    if not isinstance(module, stock):
        return f"{type(module).__qualname__} in the place of an {stock.__name__}"
    below = takewhile(lambda cls: cls is not stock, type(module).__mro__)
    for holder in (module, *(cls for cls in below if cls is not RunsHosted)):
        for method in COMPUTES:
            if method in vars(holder):
                return f"{method} of its own"
    return ""


def weight_names(config: Any) -> tuple[str, ...]:
    """Of the parameters of one expert, as it takes them."""
    parts = ("weight", "bias") if config.add_bias_linear else ("weight",)
    return tuple(f"{linear}.{part}" for linear in ("linear_fc1", "linear_fc2") for part in parts)


def shape_of_one(name: str, experts: Any) -> ExpertShape:
    """What an expert of a layer is like.

    Raises:
        ValueError: these are of a class that is not known, or their linear modules are not
            Megatron's.
    """
    form, names = form_of(name, experts), weight_names(experts.config)
    try:
        slots = [slot.parameters for slot in form.slots(experts, names)]
    except AttributeError as error:
        raise ValueError(
            f"experts of {name} lack {' or '.join(names)} ({error}): their linear modules are "
            "wrapped or changed, as adapters (LoRA) do; leave experts out of what is wrapped, or "
            "the layer with ds_moe_ext.moe_layer_pattern"
        ) from error
    trained = [any(p.requires_grad for p in column) for column in zip(*slots)]
    return shape_of(zip(names, slots[0], trained))


def ways_of(config: Any) -> tuple[Along, ...]:
    """How Megatron's expert tensor parallelism splits each of them: the hidden width, of gate and
    of up where there are both."""
    into = Along(0, 2 if config.gated_linear_unit else 1)
    if not config.add_bias_linear:
        return into, Along(1)
    return into, into, Along(1), Along(0, adds=True)


def function_of(experts: Any) -> FeedForwardExperts:
    """What they compute, without the scores: those are applied to what comes out."""
    config = experts.config
    return FeedForwardExperts(activation_of(experts, config), has_bias=bool(config.add_bias_linear))


class HostedExperts:
    """One layer's experts on this rank, run by a strategy.

    Args:
        experts: Megatron's module.
        form: how it keeps them.
        shard: the part of every expert that this rank has.
        routed: the program of the layer.
        choices: reads what its router chose.

    Attributes:
        ready: called before the weights are read.
        passes: counts passes.
        named: called before parameters are told of by their names.
    """

    def __init__(
        self, experts: Any, form: Form, shard: Shard, routed: RoutedExperts, choices: Choices
    ) -> None:
        self.choices = choices
        self.experts, self.form, self.shard = experts, form, shard
        self.weight_names = weight_names(experts.config)
        self.routed = routed
        self.run: RunRows = routed
        self.ready: Ready = lambda: None
        self.named: Callable[[], None] = lambda: None
        self.passes = Passes(Schedules())

    @property
    def training(self) -> bool:
        return bool(self.experts.training)

    stacks = ()  # parameters are Megatron's

    def slots(self) -> list[Slot]:
        """This rank's experts."""
        return self.form.slots(self.experts, self.weight_names)

    def hold(self, slots: Sequence[Slot]) -> None:
        """Take these slots in place of the present ones."""
        self.form.hold(self.experts, slots, self.weight_names)

    def weights(self) -> tuple[Tensor, ...]:
        """Weights of the first slot's expert in name order, then of the second's, and so on."""
        self.ready()
        return weights_of(self.slots())

    def __call__(self, x_TD: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
        """``[T, D]`` to ``[T, D]``, by Megatron's map and probabilities, ``[T, E]``.

        Collective over the cells.
        """
        self.routed.rows.begin(is_training=self.training)
        self.passes.begins(is_training=self.training)
        expert_TK, score_TK = self.choices(routing_map, probs)
        self.routed.rows.saw_scores(score_TK)
        if self.choices.config.moe_apply_probs_on_input:  # of the only choice
            x_TD = (score_TK * x_TD).to(x_TD.dtype)
            score_TK = torch.ones_like(score_TK)
        y_TD = self.run(x_TD, expert_TK, score_TK, self.weights())
        self.passes.watch(y_TD)
        return y_TD


class RunsHosted:
    """Put before a class of Megatron's: its forward runs the layer's program. What is told of the
    parameters stays Megatron's own."""

    hosted: HostedExperts

    def forward(self, x_TD: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """In the place of rows of this rank's experts, as our dispatcher hands it over, all."""
        return self.hosted(x_TD, routing_map, probs), None

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's own, for experts that are where it put them."""
        self.hosted.named()
        return super().sharded_state_dict(*args, **kwargs)  # type: ignore[misc]


@cache  # not one class for every instance
def _hosted_class(cls: type) -> type:
    """The class that instances get; its name stays, for those who look at it."""
    return type(cls.__name__, (RunsHosted, cls), {"__module__": cls.__module__})


def swap_class(hosted: HostedExperts) -> None:
    """Let Megatron's module run the program from now on."""
    cls: type = type(hosted.experts)
    hosted.experts.__class__ = _hosted_class(cls)
    hosted.experts.hosted = hosted
