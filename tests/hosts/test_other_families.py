# SPDX-License-Identifier: Apache-2.0
"""Families that keep or call experts otherwise: DBRX, LongCat-Flash, Switch Transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_moe_ext.hosts import huggingface
from ds_moe_ext.hosts.attachment.host_layer import any_name
from ds_moe_ext.testing import relative_error
from tests.hosts import families
from tests.hosts.families import tokens_of
from tests.hosts.jobs import Job, Result, float64_everywhere, train
from tests.hosts.replaced import replace_experts
from tests.hosts.zebra_runs import zebra
from tests.marks import slow
from tests.ranks import pool_of


def first_gradients(rank: int, world_size: int, family: str) -> dict[str, float]:
    """Relative errors of a rank's output and gradients; of experts those of all ranks' tokens."""
    from ds_moe_ext import full_state_dict

    with float64_everywhere():
        stock, ours = (families.build(family, torch.float64) for _ in range(2))
        if family == "longcat_flash":
            for name, weight in stock.named_parameters():
                if name.endswith("gate_up_proj"):
                    weight.data[8:] = 0  # which nothing reads
        layers = replace_experts(ours)
        state = full_state_dict(ours)
        assert state.keys() == stock.state_dict().keys()
        assert all(torch.equal(state[name], kept) for name, kept in stock.state_dict().items())
        got = ours(input_ids=tokens_of(rank), labels=tokens_of(rank))
        got.loss.backward()
        for other in (rank, *(each for each in range(world_size) if each != rank)):
            expected = stock(input_ids=tokens_of(other), labels=tokens_of(other))
            expected.loss.backward()
            if other == rank:
                own = {n: p.grad.clone() for n, p in stock.named_parameters() if p.grad is not None}
                errors = {
                    "loss": relative_error(got.loss, expected.loss),
                    "logits": relative_error(got.logits, expected.logits),
                }
        for name, parameter in ours.named_parameters():
            if name in own and ".experts." not in name:
                errors[name] = relative_error(parameter.grad, own[name])
        for layer in layers:
            whole = stock.get_submodule(layer.name)
            owner = layer.routed.layer_context.plan.owner.experts_of(
                layer.routed.layer_context.layout.index("ep")
            )
            for expert, slot in zip(owner.tolist(), layer.hosted.slots(), strict=True):
                for stored, p in zip(layer.hosted.stored, slot.parameters, strict=True):
                    grad = stored.of(whole, expert).grad
                    grad = torch.zeros_like(stored.of(whole, expert)) if grad is None else grad
                    place = stored.place(whole, expert)
                    grad = grad if place is None else grad[place]
                    if not grad.any():  # stock gives experts without tokens none
                        assert not p.grad.any()
                    else:
                        errors[f"{layer.name} {expert}"] = relative_error(p.grad, grad)
    assert len(errors) > 20
    return errors


@pytest.mark.parametrize("family", families.OTHERS)
def test_first_gradients_equal_stock(family: str) -> None:
    for errors in pool_of(2).run(first_gradients, family):
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] <= 1e-12, (worst, errors[worst])


@pytest.mark.parametrize("family", families.OTHERS)
def test_experts_can_be_split(family: str) -> None:
    found = next(iter(huggingface.find(families.build(family), any_name)))
    up, *_, down = found.split(2)
    assert up.dim == 0
    assert down.dim == (0 if family == "dbrx" else 1)


def test_dropout_within_experts_follows_their_mode() -> None:
    """Switch Transformers' have it between their two matrices."""
    model = families.build("switch_transformers")
    experts = next(m for n, m in model.named_modules() if n.endswith(".experts"))
    for each in experts.children():
        each.dropout.p = 0.5
    assert all(pool_of(1).run(drops_in_training_only, model))


def drops_in_training_only(rank: int, world_size: int, model: nn.Module) -> bool:
    layer, *_ = replace_experts(model)
    experts = layer.hosted
    one_hot = torch.nn.functional.one_hot(torch.arange(8), num_classes=8)[:, None]
    given = torch.randn(8, 32), one_hot, torch.ones(8, 1)
    trained = [experts(*given) for _ in range(2)]
    model.eval()
    evaluated = [experts(*given) for _ in range(2)]
    return torch.equal(*evaluated) and not torch.equal(*trained)


def test_a_class_of_the_hub_that_is_called_otherwise_is_refused() -> None:
    """As the first DBRX's."""

    class DbrxExperts(nn.Module):
        def forward(self, x: Any, weights: Any, top_weights: Any, top_experts: Any) -> None: ...

    DbrxExperts.__module__ = "transformers_modules.of_the_hub"
    model = nn.ModuleDict({"experts": DbrxExperts()})
    with pytest.raises(ValueError, match=r"called as experts\(x, weights, .*moe_layer_pattern"):
        list(huggingface.find(model, any_name))


def run(world_size: int, **keys: Any) -> Result:
    result: Result = pool_of(world_size).run(train, Job(**keys))[0]
    return result


def equal(got: Result, expected: Result, tolerance: float) -> None:
    assert len(got.losses) == len(expected.losses)
    for mine, theirs in zip(got.losses, expected.losses):
        assert abs(mine - theirs) <= tolerance * abs(theirs)
    assert got.state.keys() == expected.state.keys()


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        slow("dbrx", "ep"),
        slow("dbrx", "fssdp"),
        slow("switch_transformers", "fssdp"),
        slow("switch_transformers", "ep"),
        slow("longcat_flash", "ep"),
        slow("longcat_flash", "fssdp"),
    ],
)
def test_curve_equals_stock(family: str, strategy: str) -> None:
    """In float64; one rank without us, and two with."""
    keys: dict[str, Any] = {"family": family, "dtype": "float64", "stage": 0, "steps": 4}
    stock = run(1, block=False, **keys)
    equal(run(2, strategy=strategy, **keys), stock, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("family", families.OTHERS)
@pytest.mark.parametrize("keys", [{"strategy": "prophet"}, {"strategy": "esp", "etp_size": 2}])
def test_curve_of_other_strategies_equals_stock(family: str, keys: dict[str, Any]) -> None:
    both: dict[str, Any] = {"family": family, "dtype": "float64", "stage": 0, "steps": 3}
    equal(run(2, **keys, **both), run(1, block=False, **both), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("family", families.OTHERS)
def test_curve_of_roles_equals_stock(family: str) -> None:
    job = Job(family=family, stage=1, steps=3)
    stock: Result = pool_of(1).run(train, replace(job, block=False))[0]
    ours: Result = pool_of(2).run(train, zebra(job))[0]
    equal(ours, stock, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("family", families.OTHERS)
def test_saves_and_resumes_under_another_strategy(family: str, stage: int, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"family": family, "stage": stage, "folder": str(tmp_path)}
    whole = run(2, strategy="ep", steps=4, save_at=2, **keys)
    rest = run(2, strategy="fssdp", steps=4, resume=True, **keys)
    for mine, theirs in zip(rest.losses, whole.losses[2:], strict=True):
        assert abs(mine - theirs) <= 1e-4 * abs(theirs)
    stock = run(1, block=False, family=family, stage=1, steps=4)
    for mine, theirs in zip(whole.losses, stock.losses, strict=True):
        assert abs(mine - theirs) <= 1e-3 * abs(theirs)
