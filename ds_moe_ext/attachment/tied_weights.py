# SPDX-License-Identifier: Apache-2.0
"""Weights of experts that are tied, which they would not be any more as parameters of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from ds_moe_ext.attachment.dynamo import named_modules
from ds_moe_ext.attachment.stored_weights import Stored

_WHY = (
    "ds_moe_ext makes each expert parameters of its own, which would be trained apart; give each "
    "weights of its own, share the whole experts module, or leave this layer out with "
    "ds_moe_ext.moe_layer_pattern"
)


def check_not_tied(
    model: nn.Module, name: str, module: nn.Module, stored: Sequence[Stored], num_experts: int
) -> None:
    """A module that stands at several places of a model is replaced at all of them, but of a weight
    that two modules have each would get one of its own.

    Args:
        model: that has the layer.
        name: of the layer.
        module: its experts.
        stored: how it keeps each of their weights.
        num_experts: of the layer.

    Raises:
        ValueError: a weight of an expert is another's too, or that of a module elsewhere.
    """
    used: dict[int, list[str]] = {}  # of a parameter, which of its places are an expert's
    for each in stored:
        for expert in range(num_experts):
            place = str(each.place(module, expert))
            places = used.setdefault(id(each.of(module, expert)), [])
            if place in places:
                raise ValueError(
                    f"a weight of expert {expert} of {name} is tied to one of another expert of "
                    f"it, or to another weight of its own; {_WHY}"
                )
            places.append(place)
    inside = {id(inner) for inner in module.modules()}
    for outside in _modules(model):
        for parameter in outside._parameters.values():
            if id(parameter) in used and id(outside) not in inside:
                told = next(other for other, each in named_modules(model) if each is outside)
                raise ValueError(
                    f"a weight of experts of {name} is tied to one of {told or 'the model'}; {_WHY}"
                )


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """As ``model.modules()`` gives them, in any order, and much faster: it is walked for each
    layer."""
    waiting: list[nn.Module | None] = [model]
    seen: set[int] = set()
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            waiting.extend(module._modules.values())
            yield module
