"""What a host adapter finds in a model, and what it leaves behind when it has adopted it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ds_moe_ext.moe.expert import ExpertFunction
from ds_moe_ext.moe.layer import RoutedExperts

RoutedOf = Callable[[ExpertFunction], RoutedExperts]


@dataclass(frozen=True, eq=False)
class Adopted:
    """One replaced layer.

    Attributes:
        routed: its program.
        sources: each new parameter, and those of the model that it was made from.
        discarded: parameters that have left the model.
    """

    routed: RoutedExperts
    sources: Mapping[nn.Parameter, tuple[nn.Parameter, ...]]
    discarded: tuple[nn.Parameter, ...]


@dataclass(frozen=True, eq=False)
class Found:
    """One MoE layer of a model that can be replaced.

    Attributes:
        name: dotted name of the module.
        kind: for the table a person reads.
        num_experts: experts ``E`` of the layer.
        num_cells: cells over which the model was built already; 1 if every rank has all experts.
        may_drop: its gate marks dropped choices with -1.
        adopt: replace it: called with the experts that this rank is home to, int64 ``[S]``, and a
            function that makes the layer's program from its expert function.
    """

    name: str
    kind: str
    num_experts: int
    num_cells: int
    may_drop: bool
    adopt: Callable[[Tensor, RoutedOf], Adopted]


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one at a dotted name, and wherever else that one stands."""
    old = model.get_submodule(name)
    for parent in [*model.modules()]:
        for attribute in [key for key, child in parent._modules.items() if child is old]:
            setattr(parent, attribute, module)
