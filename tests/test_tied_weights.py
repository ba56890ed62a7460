# SPDX-License-Identifier: Apache-2.0
"""Experts whose weights are tied are refused; modules that stand at several places are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_moe_ext import ExpertsDescription, FeedForwardExperts, register_experts
from ds_moe_ext.hosts.attachment.experts import find_registered
from ds_moe_ext.hosts.attachment.host_layer import Found, OneEach, any_name
from ds_moe_ext.hosts.attachment.modules import check_not_tied
from tests.hosts import jobs


class OneModuleEach(nn.Module):
    """Two experts of a weight each."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])

    def forward(self, x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor) -> Tensor:
        raise NotImplementedError


@register_experts(OneModuleEach)
def _describe(_: OneModuleEach) -> ExpertsDescription:
    names = OneEach(tuple(f"experts.{number}.weight" for number in range(2)))
    return ExpertsDescription(2, ("weight",), FeedForwardExperts(torch.relu), (names,))


def found(model: nn.Module) -> list[Found]:
    layers = list(find_registered(model, any_name))
    check_not_tied(model, layers)
    return layers


def toy() -> Any:
    return jobs.model_of(jobs.Job("toy"))


def between_layers() -> Any:
    model = toy()
    model.blocks[2].experts.up_EFD = model.blocks[0].experts.up_EFD
    return model


def to_another_module() -> Any:
    model = toy()
    model.mirror = nn.ParameterList([model.blocks[1].experts.down_EDF])
    return model


def to_the_model() -> Any:
    model = toy()
    model.mirrored = model.blocks[1].experts.down_EDF
    return model


def between_experts() -> Any:
    model = nn.Sequential(OneModuleEach())
    model[0].experts[1].weight = model[0].experts[0].weight  # type: ignore[union-attr, index]
    return model


@pytest.mark.parametrize(
    ("tie", "expected"),
    [
        (between_layers, "of experts of blocks.0.experts is tied to one of blocks.2.experts;"),
        (to_another_module, "of experts of blocks.1.experts is tied to one of mirror;"),
        (to_the_model, "of experts of blocks.1.experts is tied to one of the model;"),
        (between_experts, "a weight of expert 1 of 0 is tied to one of another expert"),
    ],
)
def test_tied_weights_are_refused(tie: Callable[[], Any], expected: str) -> None:
    with pytest.raises(ValueError, match="share the whole experts module") as raised:
        found(tie())
    assert expected in str(raised.value)


def test_a_module_at_several_places_is_found_once() -> None:
    model = toy()
    model.blocks[2].experts = model.blocks[0].experts
    assert len(found(model)) == 2
    model.blocks[1] = model.blocks[0]
    assert len(found(model)) == 1
