# SPDX-License-Identifier: Apache-2.0
"""What a host's MoE layer is: the record ``Found``; what has taken its place, ``Adopted``; how its
weights are stored, ``Stored``; and by which facts it routes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ds_moe_ext.moe.expert import ExpertFunction
from ds_moe_ext.moe.gate import Gate, RunRows
from ds_moe_ext.moe.layer import RoutedExperts
from ds_moe_ext.moe.sharding import Along, Shard
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.report.units import counted
from ds_moe_ext.strategies.settings import BLOCK, Settings

# Of each weight of an expert its name, shape, type and whether it is trained.
ExpertShape = tuple[tuple[str, tuple[int, ...], str, bool], ...]

# Whether a layer of this dotted name is to be replaced, if it can be.
Wanted = Callable[[str], object]


def any_name(name: str) -> bool:
    """All layers are wanted."""
    return True


RoutedOf = Callable[[ExpertFunction], RoutedExperts]


@dataclass(frozen=True, eq=False)
class Slot:
    """Where one expert's weights lie on the rank that owns it; which expert's they are may
    change."""

    parameters: tuple[nn.Parameter, ...]  # in the order of the weights' names
    module: nn.Module | None = None  # that has them, where an expert is a module
    # the model's parameters that ``parameters`` are views into, see ``Hosted``
    stacks: tuple[nn.Parameter, ...] = ()
    number: int = 0  # of the slot in these


def weights_of(slots: Iterable[Slot]) -> tuple[Tensor, ...]:
    """Weights of the first slot's expert in name order, then of the second's, and so on."""
    return tuple(parameter for slot in slots for parameter in slot.parameters)


class Hosted(Protocol):
    """The module in the place of a replaced one."""

    routed: RoutedExperts
    run: RunRows
    weight_names: tuple[str, ...]
    shard: Shard

    @property
    def stacks(self) -> tuple[nn.Parameter, ...]:
        """The model's parameters where each is a weight of all slots, ``[S, ...]``; else none."""
        ...

    @property
    def training(self) -> bool: ...

    def slots(self) -> list[Slot]: ...

    def hold(self, slots: Sequence[Slot]) -> None:
        """Take these slots in place of the present ones."""
        ...

    def weights(self) -> tuple[Tensor, ...]:
        """As ``weights_of`` gives them."""
        ...


@dataclass(frozen=True, eq=False)
class Adopted:
    """One replaced layer."""

    hosted: Hosted  # what has taken its place
    # each new parameter, and those of the model that it was made from
    sources: Mapping[nn.Parameter, tuple[nn.Parameter, ...]]
    discarded: tuple[nn.Parameter, ...]  # parameters that have left the model


@dataclass(frozen=True, eq=False)
class Found:
    """One MoE layer of a model that can be replaced."""

    name: str  # dotted name of the module
    kind: str  # for the table a person reads
    num_experts: int  # experts ``E`` of the layer
    # names, shapes and types of one expert's weights; where they are equal, experts of two layers
    # could change places
    expert: ExpertShape
    # EP ranks over which the model was built already; 1 if every rank has all experts
    num_ep_ranks: int
    may_drop: bool  # its gate marks dropped choices with -1
    # how each weight of an expert is split into a number of parts; raises ValueError where that
    # cannot be
    split: Callable[[int], tuple[Along, ...]]
    # replace it: called with the experts that this rank owns, int64 ``[S]``, the part of them
    # that it has, and a function that makes the layer's program from its expert function
    adopt: Callable[[Tensor, Shard, RoutedOf], Adopted]
    # layers of one number run one after the other in a pass, those of two at different times
    stack: int = 0
    # how the host keeps each weight of all experts, where these are one module of its
    stored: tuple[Stored, ...] = ()
    # of an expert's weights, the last ones, those that experts do not compute with, but that change
    # others before, as adapters do
    num_factors: int = 0
    routing: Facts = field(default_factory=dict)  # what the host's router says of itself

    @property
    def computed(self) -> ExpertShape:
        """Of ``expert`` the weights that experts compute with."""
        return self.expert[: len(self.expert) - self.num_factors]


def shape_of(weights: Iterable[tuple[str, Tensor, bool]]) -> ExpertShape:
    """From name, weight and whether it is trained."""
    return tuple((name, tuple(w.shape), str(w.dtype), trained) for name, w, trained in weights)


def keep_marks(new: nn.Parameter, old: nn.Parameter) -> None:
    """Give a parameter all attributes of the one that it stands for: optimizers look at some."""
    vars(new).update(vars(old))


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one at a dotted name, and wherever else that one stands."""
    old = model.get_submodule(name)
    for parent in [*model.modules()]:
        for attribute in [key for key, child in parent._modules.items() if child is old]:
            setattr(parent, attribute, module)


# Where an expert's weight lies in a parameter, as an index of it; None: it is all of it.
Place = int | slice | tuple[slice, ...] | None


class Stored(Protocol):
    """Where a weight of all experts is in the host's module, and what it is called there.

    ``InOne`` and ``OneEach`` are there; a class of one's own needs these methods. ``module`` is the
    experts module that was registered, names are from it.
    """

    def first(self, module: nn.Module) -> Tensor:
        """The first expert's weight, ``[F, ...]``, apart from any graph."""
        return self.whole(module)[0]

    def whole(self, module: nn.Module) -> Tensor:
        """The weight of all experts, ``[E, F, ...]``, apart from any graph."""
        ...

    def of(self, module: nn.Module, expert: int) -> nn.Parameter:
        """The parameter that has it of one expert, maybe with that of others."""
        ...

    def place(self, module: nn.Module, expert: int) -> Place:
        """Where the expert's lies in that parameter."""
        ...

    def exported(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the host's state, from the weight of all experts ``[E, F, ...]``."""
        ...


@dataclass(frozen=True)
class InOne(Stored):
    """In one parameter, with the experts as first dim: ``[E, F, ...]``, or ``[E + U, F, ...]``.

    Attributes:
        name: of the parameter, dotted where it is of a module within.
        num_experts: ``E``, that have a weight; None: as many as it has. Needed with the next two.
        num_unused: ``U``, more of them behind these, which nothing computes with: zeros in a state.
        is_flat: experts lie one below the other without a dim of their own: ``[E * F, ...]``.

    Raises:
        ValueError: the number of experts is not given where the parameter does not say it.
    """

    name: str
    num_experts: int | None = None
    num_unused: int = 0
    is_flat: bool = False

    def __post_init__(self) -> None:
        if self.num_experts is None and (self.num_unused or self.is_flat):
            raise ValueError(
                f"InOne({self.name!r}) needs num_experts: with num_unused or is_flat the shape "
                "of the parameter does not show the number of experts"
            )

    def whole(self, module: nn.Module) -> Tensor:
        weight = module.get_parameter(self.name).detach()
        if self.is_flat and self.num_experts:
            weight = weight.unflatten(0, (self.num_experts, -1))
        return weight[: self.num_experts]

    def of(self, module: nn.Module, expert: int) -> nn.Parameter:
        return module.get_parameter(self.name)

    def place(self, module: nn.Module, expert: int) -> Place:
        if not self.is_flat:
            return expert
        size = self.first(module).shape[0]
        return slice(expert * size, (expert + 1) * size)

    def exported(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        if self.num_unused:
            whole = torch.cat([whole, whole.new_zeros(self.num_unused, *whole.shape[1:])])
        yield self.name, whole.flatten(0, 1) if self.is_flat else whole


@dataclass(frozen=True)
class Interleaved(Stored):
    """In the columns of one matrix, in turns: column ``q * E + e`` of ``[F, Q * E]`` is column
    ``q`` of expert ``e``."""

    name: str  # as of ``InOne``
    num_experts: int  # ``E``

    def whole(self, module: nn.Module) -> Tensor:
        weight = module.get_parameter(self.name).detach()
        return weight.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)

    def of(self, module: nn.Module, expert: int) -> nn.Parameter:
        return module.get_parameter(self.name)

    def place(self, module: nn.Module, expert: int) -> Place:
        return slice(None), slice(expert, None, self.num_experts)

    def exported(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield self.name, whole.permute(1, 2, 0).flatten(1)


@dataclass(frozen=True)
class OneEach(Stored):
    """One parameter for each expert, ``[F, ...]``, all of one shape and type.

    Attributes:
        names: of the parameters, in the order of the experts' numbers; dotted where they are of
            modules within, as ``"0.up.weight"``.
    """

    names: tuple[str, ...]

    def first(self, module: nn.Module) -> Tensor:
        return self.of(module, 0).detach()

    def whole(self, module: nn.Module) -> Tensor:
        return torch.stack([module.get_parameter(name).detach() for name in self.names])

    def of(self, module: nn.Module, expert: int) -> nn.Parameter:
        return module.get_parameter(self.names[expert])

    def place(self, module: nn.Module, expert: int) -> Place:
        return None

    def exported(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield from zip(self.names, whole)


# Values by the names that users know them by: attributes of a host, keys of the block.
Facts = Mapping[str, Any]

TOP_K = "top_k"
# What hosts call the number of choices of a token, and blocks of a host the module that chooses.
TOP_KS = (TOP_K, "k", "num_experts_per_tok", "moe_router_topk")
ROUTERS = ("gate", "router")
# Attributes by which routers of the hosts, their blocks and configurations say how they route.
NAMES = (
    *TOP_KS,
    # transformers: scoring, groups of experts, noise, capacity.
    *("norm_topk_prob", "moe_normalize_expert_weights", "scoring_func", "scoring_function"),
    *("routed_scaling_factor", "router_scaling_factor", "zero_expert_num"),
    *("topk_method", "topk_group", "n_group", "n_groups", "num_group"),
    *("jitter_noise", "input_jitter_noise", "router_jitter_noise", "moe_jitter_eps"),
    "expert_capacity",
    # deepspeed.moe.
    *("capacity_factor", "eval_capacity_factor", "min_capacity", "drop_tokens", "use_rts"),
    *("noisy_gate_policy", "top2_2nd_expert_sampling"),
    # Megatron-core.
    *("moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_limited_devices"),
    *("moe_router_enable_expert_bias", "moe_router_force_load_balancing"),
    *("moe_router_load_balancing_type", "moe_input_jitter_eps"),
    *("moe_expert_capacity_factor", "moe_token_drop_policy"),
)


def stated(*things: object) -> Facts:
    """What objects of a host say, the later ones where several do."""
    found = {name: getattr(each, name) for each in things for name in NAMES if hasattr(each, name)}
    return {name: value for name, value in found.items() if _is_plain(value)}


def facts_of(host: Facts, gate: Gate | None, settings: Settings, strategy: Strategy) -> Facts:
    """How a layer routes."""
    if gate is not None:
        host = {
            name if name == TOP_K else f"{BLOCK}.gate.{name}": value
            for name, value in vars(gate).items()
            if _is_plain(value)
        }
    return {
        **host,
        f"{BLOCK}.gate": None if gate is None else type(gate).__qualname__,
        f"{BLOCK}.capacity_factor": settings.capacity_factor,
        "static_capacity": strategy.static_capacity,
    }


def _is_plain(value: object) -> bool:
    """Whether JSON gives it back as it is."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def differences(saved: Mapping[str, Facts], own: Mapping[str, Facts]) -> str:
    """Of the facts of each layer, by its name, that a checkpoint and the model here both know, for
    a person; empty if there are none."""
    layers: dict[str, list[str]] = {}
    for layer, facts in own.items():
        theirs = saved.get(layer, {})
        for name in facts.keys() & theirs.keys():
            if facts[name] != theirs[name]:
                text = f"{name} was {theirs[name]!r} and is {facts[name]!r}"
                layers.setdefault(text, []).append(layer)
    lines = []
    for text, names in sorted(layers.items()):
        more = f" and {counted(len(names) - 1, 'more layer')}" if names[1:] else ""
        lines.append(f"{text} in {names[0]}{more}")
    return "; ".join(lines)
