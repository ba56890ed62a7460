# SPDX-License-Identifier: Apache-2.0
"""What a host adapter finds in a model, and what it leaves behind when it has adopted it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from ds_moe_ext.attachment.routing_facts import Facts
from ds_moe_ext.attachment.stored_weights import Stored
from ds_moe_ext.moe.expert import ExpertFunction
from ds_moe_ext.moe.gate import RunRows
from ds_moe_ext.moe.layer import RoutedExperts
from ds_moe_ext.moe.sharding import Along, Shard

ExpertShape = tuple[tuple[str, tuple[int, ...], str, bool], ...]
"""Of each weight of an expert its name, shape, type and whether it is trained."""

Wanted = Callable[[str], object]
"""Whether a layer of this dotted name is to be replaced, if it can be."""


def any_name(name: str) -> bool:
    """All layers are wanted."""
    return True


RoutedOf = Callable[[ExpertFunction], RoutedExperts]


@dataclass(frozen=True, eq=False)
class Slot:
    """Where one expert's weights lie on their home rank; which expert's they are may change.

    Attributes:
        parameters: in the order of the weights' names.
        module: that has them, where an expert is a module.
        stacks: the model's parameters that ``parameters`` are views into, see ``Hosted``.
        number: of the slot in these.
    """

    parameters: tuple[nn.Parameter, ...]
    module: nn.Module | None = None
    stacks: tuple[nn.Parameter, ...] = ()
    number: int = 0


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

    def slots(self) -> list[Slot]:
        """This rank's experts."""
        ...

    def hold(self, slots: Sequence[Slot]) -> None:
        """Take these slots in place of the present ones."""
        ...

    def weights(self) -> tuple[Tensor, ...]:
        """As ``weights_of`` gives them."""
        ...


@dataclass(frozen=True, eq=False)
class Adopted:
    """One replaced layer.

    Attributes:
        hosted: what has taken its place.
        sources: each new parameter, and those of the model that it was made from.
        discarded: parameters that have left the model.
    """

    hosted: Hosted
    sources: Mapping[nn.Parameter, tuple[nn.Parameter, ...]]
    discarded: tuple[nn.Parameter, ...]


@dataclass(frozen=True, eq=False)
class Found:
    """One MoE layer of a model that can be replaced.

    Attributes:
        name: dotted name of the module.
        kind: for the table a person reads.
        num_experts: experts ``E`` of the layer.
        expert: names, shapes and types of one expert's weights; where they are equal, experts of
            two layers could change places.
        num_cells: cells over which the model was built already; 1 if every rank has all experts.
        may_drop: its gate marks dropped choices with -1.
        split: how each weight of an expert is split into a number of parts; raises ValueError
            where that cannot be.
        adopt: replace it: called with the experts that this rank is home to, int64 ``[S]``, the
            part of them that it has, and a function that makes the layer's program from its expert
            function.
        stack: layers of one number run one after the other in a pass, those of two at different
            times.
        stored: how the host keeps each weight of all experts, where these are one module of its.
        num_factors: of an expert's weights, the last ones, those that experts do not compute with,
            but that change others before, as adapters do.
        routing: what the host's router says of itself.
    """

    name: str
    kind: str
    num_experts: int
    expert: ExpertShape
    num_cells: int
    may_drop: bool
    split: Callable[[int], tuple[Along, ...]]
    adopt: Callable[[Tensor, Shard, RoutedOf], Adopted]
    stack: int = 0
    stored: tuple[Stored, ...] = ()
    num_factors: int = 0
    routing: Facts = field(default_factory=dict)

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
