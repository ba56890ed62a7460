# SPDX-License-Identifier: Apache-2.0
"""Gradients of an expert's replicas, summed in bfloat16 and in float32.

Shape letters: D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.core.comm import Arrived, sparse_reduce_scatter
from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.transfer import TransferSize, part_of, star_of
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.gate import SoftmaxTopK
from ds_moe_ext.moe.layer import MoELayer
from ds_moe_ext.moe.replica_memory import LayerCoordinates
from ds_moe_ext.planning.strategy import Job, Strategy
from ds_moe_ext.schedule.executor import Steps
from ds_moe_ext.strategies.settings import read_settings
from tests.ranks import pool_of
from tests.strategies_for_tests import Copied

D, F, RANKS = 16, 24, 8
HOT = 0  # copied to all


@dataclass(frozen=True, kw_only=True)
class Summed(Copied):
    """Copies whose gradients are summed as a test asks for."""

    sums_replicas_in_float32: bool = False


@dataclass
class Sums:
    """Takes down what a reduction is given and brings to the owner of the hot expert."""

    given: tuple[Tensor, ...] = ()
    came: tuple[Tensor, ...] = ()

    def __call__(
        self, part: Any, grads: Mapping[int, Sequence[Tensor]], group: Any, **how: Any
    ) -> Steps[Arrived]:
        if part.ep_rank:  # at the owner what is given is not read
            self.given = tuple(grad.clone() for grad in grads[HOT])
        arrived = yield from sparse_reduce_scatter(part, grads, group, **how)
        # Cloned: its owner adds its own to them.
        self.came = tuple(total.clone() for total in arrived.grads.get(HOT, ()))
        return arrived


def _layer(rank: int, dtype: torch.dtype, *, in_float32: bool) -> MoELayer:
    owner = Placement.block(RANKS, RANKS)
    holds_EC = owner.holds_EC.copy()
    holds_EC[HOT] = True
    strategy = Summed(target=Placement(holds_EC), sums_replicas_in_float32=in_float32)
    layout = ParallelLayout.build(Grid(RANKS, RANKS), strategy.uses(), ranks_per_node=4)
    (plan,) = strategy.plan(Job.at_start([owner], layout.node_C))
    generator = torch.Generator().manual_seed(7)
    gate_ED = torch.randn(RANKS, D, generator=generator).to(dtype)
    drawn = (torch.randn(2 * F, D, generator=generator), torch.randn(D, F, generator=generator))
    layer = MoELayer(
        nn.ParameterList([gate_ED]),
        nn.ParameterList(nn.Parameter((weight * 0.3).to(dtype)) for weight in drawn),
        gate=SoftmaxTopK(top_k=2),
        function=FeedForwardExperts(silu_gated),
        strategy=strategy,
        plan=plan,
        layout=layout,
    )
    layer.routed.allow_replicas(
        tuple(weight.detach().requires_grad_() for weight in layer.expert_weights)
    )
    return layer


def _trained(
    rank: int, world_size: int, dtype: torch.dtype, in_float32: bool
) -> tuple[Sums, list[Tensor], str]:
    """What was summed, the gradients of the experts here, and the plan as text."""
    layer, sums = _layer(rank, dtype, in_float32=in_float32), Sums()
    generator = torch.Generator().manual_seed(100 + rank)
    x, grad = torch.randn(2, 64, D, generator=generator).to(dtype)
    with mock.patch("ds_moe_ext.moe.replicas.sparse_reduce_scatter", sums):
        torch.sum(layer(x.requires_grad_()).y * grad).backward()
    grads = [weight.grad for weight in layer.expert_weights if weight.grad is not None]
    return sums, grads, layer.routed.describe()


def _errors(dtype: torch.dtype, *, in_float32: bool) -> list[float]:
    """Of the sums that came to the owner against those in float64, weight by weight; relative."""
    found = [sums for sums, _, _ in pool_of(RANKS).run(_trained, dtype, in_float32)]
    errors = []
    for number, came in enumerate(found[HOT].came):
        assert came.dtype == dtype
        exact = sum(sums.given[number].double() for sums in found[1:])
        errors.append(float((came - exact).norm() / exact.norm()))
    return errors


def test_sums_of_bfloat16_are_closer_in_float32() -> None:
    ours, others = (_errors(torch.bfloat16, in_float32=way) for way in (True, False))
    assert len(ours) == 2
    assert all(0.0 < mine < theirs for mine, theirs in zip(ours, others)), (ours, others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_other_types_stay_as_they_are(dtype: torch.dtype) -> None:
    """Bit by bit."""
    ours, others = (pool_of(RANKS).run(_trained, dtype, way) for way in (True, False))
    for (_, mine, _), (_, theirs, _) in zip(ours, others):
        assert all(map(torch.equal, mine, theirs))


def test_ranks_compare_how_they_sum() -> None:
    results = {
        way: {text for _, _, text in pool_of(RANKS).run(_trained, torch.bfloat16, way)}
        for way in (True, False)
    }
    assert [len(texts) for texts in results.values()] == [1, 1]
    assert results[True] != results[False]


def _most_segments(rank: int, world_size: int, in_float32: bool) -> int:
    with mock.patch(
        "ds_moe_ext.moe.layer.LayerCoordinates",
        partial(LayerCoordinates, transfer_size=TransferSize(start_bytes=1)),
    ):
        replicas = _layer(rank, torch.bfloat16, in_float32=in_float32).routed.replicas
    assert replicas is not None
    rounds = replicas.transfers.whole.rounds
    return max(move.segment.of for each in rounds for move in (*each.sends, *each.receives))


def test_experts_travel_whole_where_sums_are_in_float32() -> None:
    """Along a chain each rank adds two numbers and rounds, which would gain nothing."""
    assert set(pool_of(RANKS).run(_most_segments, True)) == {1}
    assert set(pool_of(RANKS).run(_most_segments, False)) == {16}


def test_sums_in_float32_go_along_trees_where_broadcasts_copy() -> None:
    """The owner does not receive the gradients of all ranks at once."""
    owner, everywhere = Placement.block(4, 4), Placement(np.ones((4, 4), dtype=bool))
    node_C, group = np.zeros(4, dtype=np.int64), cast(dist.ProcessGroup, None)
    grid = owner, everywhere, node_C
    for ep_rank in range(4):
        in_float32, plain = (
            LayerCoordinates(0, ep_rank, node_C, group, way, broadcasts=True).part(
                owner, everywhere
            )
            for way in (True, False)
        )
        assert in_float32 == part_of(*grid, ep_rank)
        assert plain == star_of(*grid, ep_rank)
        assert in_float32.everywhere == plain.everywhere


# The key.


def strategy_of(**block: Any) -> Strategy:
    _, strategy = read_settings({"ds_moe_ext": {"enabled": True, **block}})
    assert strategy is not None
    return strategy


@pytest.mark.parametrize("name", ["fssdp", "prophet"])
def test_strategies_that_copy_have_a_key(name: str) -> None:
    asked = {name: {"sum_replicas_in_float32": True}}
    assert not strategy_of(strategy=name).sums_replicas_in_float32
    assert strategy_of(strategy=name, **asked).sums_replicas_in_float32
    assert strategy_of(strategy="esp", balance=name, **asked).sums_replicas_in_float32
    assert not strategy_of(strategy="esp", **asked).sums_replicas_in_float32


@pytest.mark.parametrize("name", ["ep", "esp", "zebra"])
def test_others_have_none(name: str) -> None:
    with pytest.raises(ValueError, match=f"ds_moe_ext.{name} has no key 'sum_replicas_in_float32'"):
        strategy_of(strategy=name, **{name: {"sum_replicas_in_float32": True}})
    with pytest.raises(ValueError, match="it goes into the block ds_moe_ext"):
        strategy_of(strategy=name, sum_replicas_in_float32=True)
