# SPDX-License-Identifier: Apache-2.0
"""Experts that move to new owners under Megatron-core take all with them, and come to the owner by
name.

Routing is skewed, so that owners become uneven; all is computed in float64 but where a run says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hosts.megatron_jobs import Training, megatron, merged
from tests.hosts.megatron_toy import MegatronRun
from tests.marks import slow
from tests.ranks import pool_of

RUN = MegatronRun(
    dtype="float64",
    ep=2,
    num_experts=8,
    aux_coefficient=0.0,
    optimizer="distributed",
    num_microbatches=2,
    steps=7,
)


def fssdp(**keys: Any) -> dict[str, Any]:
    """The block of a run whose experts move every other step; nothing is copied but hot ones."""
    replicas = {"overlap_degree": 1, "replicas_per_rank": 1}
    settings = {"reshard_interval": 2, "resharding": "paper", **replicas, **keys}
    return {
        "enabled": True,
        "strategy": "fssdp",
        "fssdp": settings,
        "report": {"enabled": False},
        "debug": True,
    }


@dataclass(frozen=True)
class Moved:
    """What a rank has found."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    owners: list[list[list[int]]]
    weights: dict[str, Tensor]
    states: dict[str, Tensor]


def skew(training: Training) -> None:
    """Most rows choose the first experts of a layer."""
    for chunk in training.chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith("router.weight"):
                parameter.data[:3] *= 4
    training.optimizer.reload_model_params()


def experts_of(training: Training) -> Iterator[Any]:
    for chunk in training.chunks:
        for name, module in chunk.named_modules():
            if name.endswith("mlp.experts"):
                yield module


def owners_of(training: Training) -> list[list[int]]:
    owners = [experts.hosted.routed.layer_context.plan.owner for experts in experts_of(training)]
    return [owner.owner_E.tolist() for owner in owners]


def states_of(training: Training) -> dict[str, Tensor]:
    """What Adam keeps of each piece of the model that is whole on this rank, by name."""
    from ds_moe_ext.hosts.megatron.checkpoint import OptimizerStates
    from tests.hosts.megatron_weights import pieces

    states = OptimizerStates(training.optimizer)
    found = {}
    for piece in pieces(training.chunks, training.run.swiglu, training.run.num_experts):
        kept = states.of(piece.parameter)
        if kept.stop - kept.start == piece.parameter.numel():
            named = {**kept.tensors, **{k: torch.tensor(float(v)) for k, v in kept.scalars.items()}}
            found.update({f"{piece.name} {name}": value.clone() for name, value in named.items()})
    return found


def go_to_owner(training: Training) -> None:
    """As a checkpoint does."""
    for chunk in training.chunks:
        chunk.state_dict()


def run_moved(
    rank: int, world_size: int, run: MegatronRun, settings: dict[str, Any] | None
) -> Moved:
    losses, norms, owners = [], [], []
    with megatron(run, settings):
        training = Training(run)
        skew(training)
        for step in range(run.steps):
            losses.append(training.compute(step))
            norms.append(training.update() or 0.0)
            owners += [] if settings is None else [owners_of(training)]
        go_to_owner(training)
        weights, states = training.weights(), states_of(training)
    return Moved(tuple(losses), tuple(norms), owners, weights, states)


@cache
def moved(world_size: int, run: MegatronRun, is_stock: bool) -> list[Moved]:
    return pool_of(world_size).run(run_moved, run, None if is_stock else fssdp())


def assert_as_stock(world_size: int, run: MegatronRun, **tolerance: float) -> list[Moved]:
    ours, stock = (moved(world_size, run, is_stock) for is_stock in (False, True))
    close: dict[str, Any] = tolerance or {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(ours[0].losses, stock[0].losses, **close)
    torch.testing.assert_close(ours[0].norms, stock[0].norms, **close)
    for kind in ("weights", "states"):
        found, expected = (merged([vars(one)[kind] for one in all_]) for all_ in (ours, stock))
        torch.testing.assert_close(found, expected, **close)
    return ours


def has_moved(found: list[Moved]) -> bool:
    """Whether experts were elsewhere than Megatron put them, and unevenly at that."""
    return any(
        len({owners.count(ep_rank) for ep_rank in owners}) > 1
        for after_step in found[0].owners
        for owners in after_step
    )


@pytest.mark.parametrize("optimizer", [slow("ddp"), "distributed"])
def test_moved_experts_train_as_those_that_stay(optimizer: Any) -> None:
    run = replace(RUN, optimizer=optimizer)
    assert has_moved(assert_as_stock(2, run))


def run_watched_gradients(rank: int, world_size: int) -> list[float]:
    """Differences to gradients by name, when experts come to the owner before the optimizer's
    step."""
    run = replace(RUN, steps=2)
    with megatron(run, None):
        stock = Training(run)
        skew(stock)
        for step in range(run.steps):
            stock.compute(step)
            stock.update()
        stock.compute(run.steps)
        expected = stock.gradients()
    with megatron(run, fssdp()):
        training = Training(run)
        skew(training)
        for step in range(run.steps):
            training.compute(step)
            training.update()
        assert owners_of(training) != [[0] * 4 + [1] * 4] * 2
        training.compute(run.steps)
        go_to_owner(training)
        found = training.gradients()
    return [float((found[name] - expected[name]).abs().max()) for name in expected]


@pytest.mark.slow  # or moved experts would not train alike above
def test_gradients_arrive_at_their_owner_too() -> None:
    assert max(max(errors) for errors in pool_of(2).run(run_watched_gradients)) < 1e-12


def run_hooks(rank: int, world_size: int) -> bool:
    """Whether Megatron's hooks can be taken off and put on while experts are elsewhere."""
    run = replace(RUN, steps=2, overlap_grad_reduce=True, overlap_param_gather=True)
    with megatron(run, fssdp()):
        training = Training(run)
        skew(training)
        for step in range(run.steps):
            training.compute(step)
            training.update()
        is_away = owners_of(training) != [[0] * 4 + [1] * 4] * 2
        for chunk in training.chunks:
            chunk.disable_forward_pre_hook()
            chunk.enable_forward_pre_hook()
        training.compute(run.steps)
    return is_away


def test_megatrons_hooks_find_their_modules() -> None:
    assert all(pool_of(2).run(run_hooks))


OTHER_RUNS = {
    "grouped": (2, {"experts": "te_grouped", "bias": True}),
    "overlaps": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "recompute": (2, {"recompute": "full"}),
    "four ranks": (4, {"ep": 4}),
    "pipeline": (4, {"pp": 2, "num_layers": 4, "num_microbatches": 4}),
    "interleaved": (4, {"pp": 2, "vpp": 2, "num_layers": 8, "num_microbatches": 4}),
    "sharded": (4, {"etp": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_RUNS)
def test_in_every_layout(name: str) -> None:
    world_size, keys = OTHER_RUNS[name]
    run = replace(RUN, steps=20, **keys)
    found = assert_as_stock(world_size, run, rtol=1e-7, atol=1e-10)
    assert has_moved(found)


def contents(training: Training) -> dict[str, Tensor]:
    """All that this rank has of its experts, by layer and number, wherever they lie."""
    from ds_moe_ext.hosts.megatron.checkpoint import OptimizerStates

    states, found = OptimizerStates(training.optimizer), {}
    for layer, experts in enumerate(experts_of(training)):
        layer_context = experts.hosted.routed.layer_context
        numbers = layer_context.plan.owner.experts_of(layer_context.layout.index("ep")).tolist()
        for number, slot in zip(numbers, experts.hosted.slots(), strict=True):
            for weight, parameter in enumerate(slot.parameters):
                kept = states.of(parameter).tensors
                for name, tensor in {**kept, "weight": parameter.detach().view(-1)}.items():
                    found[f"{layer} {number} {weight} {name}"] = tensor.clone()
    return found


def run_owner(
    rank: int, world_size: int, run: MegatronRun
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Contents when experts are away and when they are owner; what was then of another slot."""
    with megatron(run, fssdp()):
        training = Training(run)
        first = [p for experts in experts_of(training) for p in experts.parameters()]
        skew(training)
        for step in range(run.steps - 1):
            training.compute(step)
            training.update()
        before = contents(training)
        go_to_owner(training)
        after = contents(training)
        now = [p for experts in experts_of(training) for p in experts.parameters()]
    return before, after, [str(tuple(p.shape)) for p, q in zip(first, now) if p is not q]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["ddp", "distributed"])
def test_nothing_is_lost_on_the_way(optimizer: Any) -> None:
    """With bfloat16, under which weight, main parameter and states are three types of things."""
    found = pool_of(2).run(run_owner, replace(RUN, dtype="bfloat16", optimizer=optimizer))
    before, after = (merged([one[index] for one in found]) for index in (0, 1))
    assert found[0][0].keys() != found[0][1].keys()  # they had been away
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert not any(others for *_, others in found)
    halves = {name: tensor for name, tensor in after.items() if name.endswith("weight")}
    for name, tensor in halves.items():
        main = after[name.replace("weight", "master")]
        assert main.dtype == torch.float32 and torch.equal(main.bfloat16(), tensor)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["ddp", "distributed"])
def test_moved_experts_train_in_bfloat16(optimizer: Any) -> None:
    run = replace(RUN, dtype="bfloat16", optimizer=optimizer, steps=20)
    ours, stock = (moved(2, run, is_stock) for is_stock in (False, True))
    torch.testing.assert_close(ours[0].losses, stock[0].losses, rtol=2e-2, atol=0)
    assert has_moved(ours)
