# SPDX-License-Identifier: Apache-2.0
"""What the host reduces beside MoE layers is reckoned alike by all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_moe_ext.hosts.steps.pipeline_costs import DenseGradients, _forward
from ds_moe_ext.moe.expert import ModuleExperts
from tests.hosts import toy

HEAD = toy.VOCABULARY * toy.D


def dense_gradients(owners: set[int]) -> tuple[DenseGradients, list[int]]:
    """As a rank sees them that has experts of these layers alone, and dense elements by block."""
    model = toy.build("toy, uneven layers")
    layers: list[Any] = []
    for number, block in enumerate(model.blocks):
        if number not in owners:
            block.experts = nn.Module()
        own = tuple(block.experts.parameters())
        layers.append(SimpleNamespace(name=f"blocks.{number}.experts", parameters=own))
    experts = {parameter for layer in layers for parameter in layer.parameters}
    dense = [sum(p.numel() for p in b.parameters() if p not in experts) for b in model.blocks]
    return DenseGradients.of(model, layers, torch.float32, None), dense


@pytest.mark.parametrize("owners", [{0, 1, 2, 3}, {1, 2, 3}, {0, 3}, {1}])
def test_ranks_without_experts_of_a_layer(owners: set[int]) -> None:
    gradients, (first, *others) = dense_gradients(owners)
    assert gradients.elements_L == (HEAD + first, *others)  # the embedding is as large as the head
    assert gradients.head_elements == HEAD


def test_what_is_tied_or_frozen_counts_once_or_not_at_all() -> None:
    model = toy.build("toy, frozen experts")
    model.head.weight = model.embedding.weight
    model.blocks[1].norm.requires_grad_(False)
    experts = [SimpleNamespace(name=f"blocks.{n}.experts", parameters=()) for n in range(3)]
    layers: Any = experts
    gradients = DenseGradients.of(model, layers, torch.float32, None)
    block = 4 * toy.D + 3 * toy.D * toy.D + 8 * toy.D
    assert gradients.elements_L == (HEAD + block, block - 2 * toy.D, block)
    assert gradients.head_elements == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_timed_on_rows_of_autocast(dtype: torch.dtype) -> None:
    """What comes before has made narrow rows, and weights are float32: so they train."""
    expert = nn.Linear(toy.D, toy.D)
    weights = (*expert.parameters(),)
    function = ModuleExperts(expert, ("weight", "bias"))
    layer: Any = SimpleNamespace(
        hosted=SimpleNamespace(slots=lambda: [weights], weights=lambda: weights),
        routed=SimpleNamespace(row_width=toy.D, row_dtype=dtype, function=function),
    )
    computed: Any = _forward(layer, torch.device("cpu"), 5)
    assert computed.shape == (5, toy.D) and computed.dtype == dtype
