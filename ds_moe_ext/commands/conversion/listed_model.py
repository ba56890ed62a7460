# SPDX-License-Identifier: Apache-2.0
"""A model that is a list of its weights, for families that only Hugging Face and DeepSpeed have.

All weights but the experts' have one name in both forms, and one piece is one weight; ``Model`` is
for families of which Megatron joins, cuts and renames parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_moe_ext.commands.conversion.form_names import MASTER, DeepSpeedNames, HuggingFaceNames
from ds_moe_ext.commands.conversion.model import (
    AnyModel,
    AnyPart,
    Family,
    Model,
    Scope,
    Shape,
    Weight,
    Where,
)
from ds_moe_ext.commands.conversion.tables import Row, Table


@dataclass(frozen=True, eq=False)
class ListedModel:
    """Its weights, and what two forms call them.

    Attributes:
        family: that it is of.
        architecture: its class in transformers.
        num_layers: of all kinds.
        num_experts: of each layer that has them.
        shapes: of its weights.
        huggingface: names in safetensors files.
        deepspeed: names of modules, and of experts by number.
        unlike_megatron: what Megatron-core has no counterpart of.
    """

    family: Family
    architecture: str
    num_layers: int
    num_experts: int
    shapes: Mapping[AnyPart, Shape]
    huggingface: HuggingFaceNames
    deepspeed: DeepSpeedNames
    unlike_megatron: str

    @property
    def num_moe_layers(self) -> int:
        """How many layers have experts."""
        return len(self.deepspeed.layers)

    @property
    def num_groups(self) -> int:
        """No form joins its attention by group."""
        return 1

    def places(self, scope: Scope) -> Iterator[Where]:
        """Each of its weights is there once."""
        assert scope is Scope.ONCE
        yield Where(None, None)


def decoder_of(model: AnyModel) -> Model:
    """The same, as Megatron has it too.

    Raises:
        ValueError: it has not.
    """
    if isinstance(model, ListedModel):
        raise ValueError(
            f"a {model.family.value} model is converted between deepspeed and huggingface only: "
            f"Megatron-core has no {model.unlike_megatron}; choose these two forms"
        )
    assert isinstance(model, Model)
    return model


def pieces_of(name: str, number: int) -> tuple[Weight, ...]:
    """A piece for each expert: what a weight of all of them is made of."""
    return tuple(Weight(f"{name}.{expert}") for expert in range(number))


def same_names(dense: Iterable[str]) -> Table:
    """Weights that are called so in both forms."""
    return tuple(Row(name, (Weight(name),)) for name in dense)


def numbered(name: str, *joined: Sequence[Weight]) -> Table:
    """A weight in the folder of experts.

    Args:
        name: as a run calls it: that of the module that is replaced, and the weight's.
        joined: pieces of all experts, of which each expert's are joined in this order.
    """
    return tuple(
        Row(f"{name}.{expert}{MASTER}", pieces) for expert, pieces in enumerate(zip(*joined))
    )
