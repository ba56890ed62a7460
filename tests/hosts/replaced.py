# SPDX-License-Identifier: Apache-2.0
"""Models with replaced experts, without a host's engine around them."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment import replacement
from ds_moe_ext.hosts.attachment.replacement import AttachedLayer
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.settings import Settings


def replace_experts(model: nn.Module, **settings: Any) -> list[AttachedLayer]:
    """Replace the experts of a model by the block with these keys. Collective."""
    from ds_moe_ext.hosts.deepspeed.startup import FINDERS

    given = Settings(enabled=True, **settings)
    blueprint = replacement.draw(given, ExpertParallel(), model, FINDERS, dist.get_world_size())
    return [layer for layer, _ in replacement.build(blueprint)]


def stacked(by_slot: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by parameter name; those of a layer's slots as one, slot first, by the weight's."""
    slots: dict[str, list[Tensor]] = {}
    whole = {}
    for name, tensor in by_slot.items():
        weight = re.fullmatch(r"(.*experts\.\w+)\.\d+", name)
        if weight:
            slots.setdefault(weight[1], []).append(tensor)
        else:
            whole[name] = tensor
    return whole | {name: torch.stack(tensors) for name, tensors in slots.items()}
