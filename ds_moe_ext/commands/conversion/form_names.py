# SPDX-License-Identifier: Apache-2.0
"""What Hugging Face and DeepSpeed call the weights of one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ds_moe_ext.commands.conversion.model import AnyPart
from ds_moe_ext.commands.conversion.tables import Table

MASTER = "/master"
"""Ends the name of an expert's weight in the folder of experts: as the optimizer steps it."""


@dataclass(frozen=True)
class HuggingFaceNames:
    """Names in safetensors files.

    Attributes:
        files: as ``save_pretrained`` writes.
        others: that are read too.
        is_spare: of names that no part has: copies, and what the model's class does not read.
    """

    files: Table
    others: tuple[Table, ...]
    is_spare: Callable[[str], bool]


@dataclass(frozen=True)
class DeepSpeedNames:
    """Names of modules in DeepSpeed's own file; experts in ours, by number.

    Attributes:
        module: all but experts.
        experts: in the folder of experts.
        layers: modules that are replaced, in model order.
        slot: what a slot's first weight is called when an engine starts, by ``{layer}`` of these
            and ``{slot}``.
        zeros: parts that it does not have, for they are zero there; by each, the part whose type
            they take.
    """

    module: Table
    experts: Table
    layers: tuple[str, ...]
    slot: str
    zeros: Mapping[AnyPart, AnyPart] = field(default_factory=dict)

    @property
    def both(self) -> Table:
        """Of the module and of experts."""
        return self.module + self.experts
