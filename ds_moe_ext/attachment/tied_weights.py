# SPDX-License-Identifier: Apache-2.0
"""Weights of experts that are tied, which they would not be any more as parameters of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from ds_moe_ext.attachment.dynamo import named_modules
from ds_moe_ext.attachment.host_layer import Found

_WHY = (
    "ds_moe_ext makes each expert parameters of its own, which would be trained apart; give each "
    "weights of its own, share the whole experts module, or leave this layer out with "
    "ds_moe_ext.moe_layer_pattern"
)


def check_not_tied(model: nn.Module, found: Sequence[Found]) -> None:
    """A module that stands at several places of a model is replaced at all of them, but of a weight
    that two modules have each would get one of its own.

    Args:
        model: that has the layers.
        found: the layers; one that does not say how it keeps its weights is not looked at.

    Raises:
        ValueError: a weight of an expert is another's too, or that of a module elsewhere.
    """
    owners: dict[int, list[nn.Module]] = {}  # of a parameter
    for module in model.modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append(module)
    for layer in found:
        experts = model.get_submodule(layer.name)
        inside = {id(inner) for inner in experts.modules()}
        for weight in _weights(layer, experts):
            outside = next((each for each in owners[weight] if id(each) not in inside), None)
            if outside is not None:
                told = next(other for other, each in named_modules(model) if each is outside)
                raise ValueError(
                    f"a weight of experts of {layer.name} is tied to one of {told or 'the model'}; "
                    f"{_WHY}"
                )


def _weights(layer: Found, experts: nn.Module) -> Iterable[int]:
    """The ids of the parameters that have a layer's weights, of which no two are one."""
    used: dict[int, list[str]] = {}  # of a parameter, which of its places are an expert's
    for each in layer.stored:
        for expert in range(layer.num_experts):
            place = str(each.place(experts, expert))
            places = used.setdefault(id(each.of(experts, expert)), [])
            if place in places:
                raise ValueError(
                    f"a weight of expert {expert} of {layer.name} is tied to one of another expert "
                    f"of it, or to another weight of its own; {_WHY}"
                )
            places.append(place)
    return used
