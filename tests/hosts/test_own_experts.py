# SPDX-License-Identifier: Apache-2.0
"""Experts that a user describes, by the examples of the page: replaced, exported, as stock."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_moe_ext import InOne, register_experts
from ds_moe_ext.testing import relative_error
from tests.hosts.replaced import replace_experts
from tests.ranks import pool_of

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"
E, F, D, TOKENS = 4, 6, 8, 20


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64) * 0.3)


class _Called(nn.Module):
    """By the contract; ``of`` gives one expert's weights, ``[F, D]`` and ``[D, F]``."""

    num_experts = E

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def forward(self, hidden: Tensor, expert_ids: Tensor, scores: Tensor) -> Tensor:
        y_TD = torch.zeros_like(hidden)
        for expert in range(E):
            (up_FD, down_DF), (token, choice) = self.of(expert), torch.where(expert_ids == expert)
            out = torch.relu(hidden[token] @ up_FD.T) @ down_DF.T * scores[token, choice, None]
            y_TD = y_TD.index_add(0, token, out)
        return y_TD


class MyExperts(_Called):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = drawn(E, F, D), drawn(E, D, F)

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        return self.up[expert], self.down[expert]


class ListedExperts(_Called):
    def __init__(self) -> None:
        super().__init__()
        for expert in range(E):
            up, down = nn.Linear(D, F, bias=False), nn.Linear(F, D, bias=False)
            self.add_module(str(expert), nn.ModuleDict({"up": up, "down": down}).double())

    def __len__(self) -> int:
        return E

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        own: Any = self.get_submodule(str(expert))
        return own["up"].weight, own["down"].weight


class FlatExperts(_Called):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = drawn(E * F, D), drawn(E + 1, D, F)
        self.down.data[E] = 0

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        return self.up[expert * F : (expert + 1) * F], self.down[expert]


CLASSES: dict[str, type[_Called]] = {
    cls.__name__: cls for cls in (MyExperts, ListedExperts, FlatExperts)
}


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, E, bias=False).double(), experts

    def forward(self, x_TD: Tensor) -> Tensor:
        scores, ids = self.router(x_TD).softmax(-1).topk(2)
        made: Tensor = self.experts(x_TD, ids, scores)
        return x_TD + made


def register_as_the_page_says() -> None:
    _, _, behind = PAGE.read_text(encoding="utf-8").partition("### Experts of your own\n")
    section, _, _ = behind.partition("\n## ")
    names = {**CLASSES, "torch": torch}
    for example in re.findall(r"```python\n(.*?)```", section, re.S):
        exec(example, names)


def compared(rank: int, world_size: int, kind: str) -> dict[str, float]:
    """Errors of a rank's output and of its experts' gradients, which are of all ranks' tokens."""
    from ds_moe_ext import full_state_dict

    register_as_the_page_says()
    torch.manual_seed(0)
    stock = Block(CLASSES[kind]())
    ours = Block(CLASSES[kind]())
    ours.load_state_dict(stock.state_dict())
    (layer,) = replace_experts(ours)
    state = full_state_dict(ours)
    assert state.keys() == stock.state_dict().keys()
    assert all(torch.equal(state[name], kept) for name, kept in stock.state_dict().items())
    draws = torch.Generator().manual_seed(3)
    x_WTD = torch.randn(world_size, TOKENS, D, generator=draws, dtype=torch.float64)
    y_TD = ours(x_WTD[rank])
    y_TD.square().sum().backward()
    errors = {"output": relative_error(y_TD, stock(x_WTD[rank]))}
    for x_TD in x_WTD:
        stock(x_TD).square().sum().backward()
    held = layer.routed.layer_context.plan.owner.experts_of(rank).tolist()
    for expert, slot in zip(held, layer.hosted.slots(), strict=True):
        for stored, own in zip(layer.hosted.stored, slot.parameters, strict=True):
            grad = stored.of(stock.experts, expert).grad
            place = stored.place(stock.experts, expert)
            expected = grad if place is None else grad[place]
            errors[f"{stored} {expert}"] = relative_error(own.grad, expected)
    return errors


@pytest.mark.parametrize("kind", CLASSES)
def test_the_pages_examples_equal_stock(kind: str) -> None:
    for errors in pool_of(2).run(compared, kind):
        assert len(errors) == 1 + 2 * E // 2
        assert max(errors.values()) <= 1e-12, errors


def test_what_a_shape_does_not_tell_has_to_be_reported() -> None:
    with pytest.raises(ValueError, match=r"InOne\('up'\) needs num_experts"):
        InOne("up", is_flat=True)
    with pytest.raises(ValueError, match="needs num_experts"):
        InOne("down", num_unused=1)


def test_what_is_no_class_of_experts_is_reported() -> None:
    anything: Any = register_experts
    for given in (3, _Called(), int):
        with pytest.raises(ValueError, match=r"was given .*, which is not a module class; give"):
            anything(given)
    with pytest.raises(
        ValueError, match=r"register_experts\(_Called\) was put on 3, .* put it above"
    ):
        anything(_Called)(3)
