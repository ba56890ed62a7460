# SPDX-License-Identifier: Apache-2.0
"""A user's optimizer, and its groups by the parts that DeepSpeed steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ds_moe_ext.hosts.deepspeed import parameter_groups


class Counting(torch.optim.SGD):
    """Counts its steps in each group, as fused optimizers do."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


def weight(*, is_expert: bool = False, is_trained: bool = True) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2), requires_grad=is_trained)
    parameter.grad = torch.ones(2) if is_trained else None
    if is_expert:
        parameter.allreduce, parameter.group_name = False, "ep_size_2"  # type: ignore[attr-defined]
    return parameter


def parted(*groups: dict[str, Any]) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = Counting(groups, lr=0.1)
    engine = SimpleNamespace(has_moe_layers=False)
    with parameter_groups.parted(engine, optimizer) as result:
        assert engine.has_moe_layers == any(part.get("moe") for part in result.param_groups)
    return optimizer, result


def test_experts_have_parts_of_their_own_and_what_is_frozen_none() -> None:
    dense, expert, other = weight(), weight(is_expert=True), weight(is_expert=True)
    _, result = parted(
        {"params": [dense, expert], "lr": 1.0},
        {"params": [weight(is_trained=False), weight(is_expert=True, is_trained=False)]},
        {"params": [other], "lr": 2.0},
    )
    assert isinstance(result, Counting)
    assert [part["params"] for part in result.param_groups] == [[dense], [expert], [other]]
    assert [part["lr"] for part in result.param_groups] == [1.0, 1.0, 2.0]
    assert [part["moe"] for part in result.param_groups] == [False, True, True]


def test_what_is_written_reaches_the_other_side() -> None:
    optimizer, result = parted({"params": [weight(), weight(is_expert=True)]})
    optimizer.param_groups[0]["lr"] = 0.5
    assert [part["lr"] for part in result.param_groups] == [0.5, 0.5]
    result.param_groups[1].update(lr=0.25)
    assert optimizer.param_groups[0]["lr"] == 0.25
    optimizer.load_state_dict(optimizer.state_dict())  # which makes new groups
    optimizer.param_groups[0]["lr"] = 0.75
    assert [part["lr"] for part in result.param_groups] == [0.75, 0.75]


def test_weights_of_parts_are_those_of_the_group() -> None:
    """ZeRO puts its flat ones in their place."""
    optimizer, result = parted({"params": [weight(), weight(is_expert=True)]})
    flat = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for part, each in zip(result.param_groups, flat, strict=True):
        part["params"] = [each]
    assert optimizer.param_groups[0]["params"] == flat
    assert "name" not in optimizer.param_groups[0] and "moe" not in optimizer.param_groups[0]


def test_parts_are_stepped_one_by_one_and_counted_apart() -> None:
    dense, expert = weight(), weight(is_expert=True)
    optimizer, result = parted({"params": [dense, expert]})
    users, parts = optimizer.param_groups, result.param_groups
    for number, stepped in enumerate((dense, expert)):
        result.param_groups = [parts[number]]
        result.step()
        assert float(stepped[0]) != 1 and optimizer.param_groups is users
    result.param_groups = parts
    assert [part["step"] for part in result.param_groups] == [1, 1]
    assert users[0]["step"] == 1
