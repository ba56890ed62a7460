# SPDX-License-Identifier: Apache-2.0
"""Layers with replicas of experts against the dense reference: float64, 1e-12.

Shape letters: W ranks, T tokens, E experts, D model width, F expert width, C EP ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.row_levels import RowLevels, WholePrices
from ds_moe_ext.core.share import SWEEPS, LevelShare, LocalElseOwner, NearestReplica
from ds_moe_ext.core.transfer import SMALL, TransferSize
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.gate import SoftmaxTopK
from ds_moe_ext.moe.layer import MoELayer
from ds_moe_ext.moe.replica_memory import LayerCoordinates, Transfers
from ds_moe_ext.moe.replicas import Replicas, in_order
from ds_moe_ext.planning.priced_plans import Repair
from ds_moe_ext.planning.prophet_planner import Split
from ds_moe_ext.planning.strategy import Carried, Destination, Job, Plan
from ds_moe_ext.testing import dense_experts, relative_error
from tests.marks import slow
from tests.ranks import pool_of
from tests.strategies_for_tests import Copied

D, F, TOP_K = 8, 12, 2


@dataclass(frozen=True)
class Case:
    """Who holds what, by seed, and how a pass goes."""

    num_experts: int = 6
    replicas: float = 0.4  # share of (expert, EP rank) pairs beside the owners that hold a copy
    even: bool = True  # owners
    hot: float = 0.0
    degrees: tuple[int, int] = (1, 1)
    rematerialize: bool = False
    revised: bool = False  # more replicas once the rows are known
    repaired: bool = False  # those that a priced share lacks, if it was planned for other rows
    ranks_per_node: int = 2
    num_micro_batches: int = 2
    num_tokens: int = 14
    num_layers: int = 1
    starts_early: bool = False  # all layers' replicas are launched before the first layer runs
    reaches_x: bool = True  # what goes in has a gradient
    is_trained: bool = True  # experts are
    holders: tuple[tuple[int, tuple[int, ...]], ...] = ()  # of some experts, in place of chance
    goes_to_owner: bool = False  # what has no copy at its sender
    follows: bool = False  # a step by other replicas
    transfer_size: TransferSize = SMALL  # sizes from which on replicas travel in segments
    seed: int = 0

    def owner(self, layer: int, num_ep_ranks: int) -> Placement:
        rng = np.random.default_rng([self.seed, layer])
        owner_E = np.arange(self.num_experts) * num_ep_ranks // self.num_experts
        return Placement.owned_by(
            owner_E if self.even else rng.integers(num_ep_ranks, size=self.num_experts),
            num_ep_ranks,
        )

    def target(self, layer: int, num_ep_ranks: int) -> Placement:
        rng = np.random.default_rng([self.seed + 1, layer])
        held_EC = rng.random((self.num_experts, num_ep_ranks)) < self.replicas
        for expert, ep_ranks in self.holders:
            held_EC[expert, list(ep_ranks)] = True
        return Placement(self.owner(layer, num_ep_ranks).holds_EC | held_EC)


def revised(held: Placement, rows_CE: np.ndarray, node_C: np.ndarray) -> Destination:
    """The busiest expert everywhere."""
    holds_EC = held.holds_EC.copy()
    holds_EC[rows_CE.sum(axis=0).argmax()] = True
    target = Placement(holds_EC)
    return Destination(target, NearestReplica(target, node_C))


def repair_of(owner: Placement, target: Placement, node_C: np.ndarray, seed: int) -> Repair:
    """Of a share that was planned for rows which never come; replicas cost nothing."""
    levels = RowLevels(target, node_C, WholePrices.of(np.ones(target.num_ep_ranks), 0.1, 0.2))
    planned_CE = np.random.default_rng(seed).integers(0, 9, target.holds_EC.T.shape)
    share = LevelShare.planned(levels, planned_CE, sweeps=SWEEPS)
    levels_of = partial(RowLevels, node_C=node_C, prices=levels.prices)
    return Repair(owner=owner, share=share, levels_of=levels_of, copy_price=0, num_slots=2)


def repaired(repair: Repair, rows_CE: np.ndarray) -> Destination:
    return Destination(*repair(rows_CE))


def weights_of(case: Case, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(case.num_experts + 100 * layer)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gate_ED = rand(case.num_experts, D)
    gate_ED[0, -1] += case.hot  # the last input is always one
    return gate_ED, rand(case.num_experts, 2 * F, D) * 0.3, rand(case.num_experts, D, F) * 0.3


def tokens_of(case: Case, rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + rank + 1000 * number)
    shape = (2, case.num_tokens + rank, D)
    x, grad = torch.randn(*shape, generator=generator, dtype=torch.float64)
    x[:, -1] = 1.0
    return x, grad


def dense(case: Case, world_size: int) -> dict[str, list[Tensor]]:
    """Outputs and gradients of x by rank and micro-batch; gradients of weights by layer."""
    layers = [weights_of(case, layer) for layer in range(case.num_layers)]
    for gate_ED, *experts in layers:
        gate_ED.requires_grad_()
        for weight in experts:
            weight.requires_grad_(case.is_trained)
    results: dict[str, list[Tensor]] = {"y": [], "x": []}
    for rank in range(world_size):
        for number in range(case.num_micro_batches):
            x, grad = tokens_of(case, rank, number)
            y = x.requires_grad_(case.reaches_x)
            for gate_ED, *experts in layers:
                choice = SoftmaxTopK(top_k=TOP_K)(y, (gate_ED,))
                y = y + dense_experts(y, choice.expert_TK, choice.score_TK, *experts)
            torch.sum(y * grad).backward()
            results["y"].append(y.detach())
            results["x"].append(_grad_of(x))
    results["weights"] = [_grad_of(weight) for weights in layers for weight in weights]
    return results


def _grad_of(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def layer_of(
    case: Case, number: int, layout: ParallelLayout, strategy: Copied
) -> tuple[MoELayer, np.ndarray]:
    """A layer on this rank, and the experts at their owners here."""
    num_ep_ranks = layout.grid.num_ep_ranks
    target = case.target(number, num_ep_ranks)
    strategy = replace(strategy, target=target)
    if case.revised:
        strategy = replace(strategy, revise=partial(revised, target, node_C=layout.node_C))
    owner = case.owner(number, num_ep_ranks)
    if case.repaired:
        repair = repair_of(owner, target, layout.node_C, case.seed)
        strategy = replace(strategy, revise=partial(repaired, repair))
    (plan,) = strategy.plan(Job.at_start([owner], layout.node_C))
    mine = owner.experts_of(layout.index("ep"))
    gate_ED, up, down = weights_of(case, number)
    own = (weight[expert] for expert in mine for weight in (up, down))
    layer = MoELayer(
        nn.ParameterList([gate_ED]),
        nn.ParameterList(nn.Parameter(weight, requires_grad=case.is_trained) for weight in own),
        gate=SoftmaxTopK(top_k=TOP_K),
        function=FeedForwardExperts(silu_gated),
        strategy=strategy,
        plan=plan,
        layout=layout,
        layer=number,
    )
    like = (up[0].clone(), down[0].clone())
    with mock.patch(
        "ds_moe_ext.moe.layer.LayerCoordinates",
        partial(LayerCoordinates, transfer_size=case.transfer_size),
    ):
        layer.routed.allow_replicas(
            tuple(weight.requires_grad_(case.is_trained) for weight in like)
        )
    return layer, mine


def layers_of(case: Case, world_size: int) -> list[tuple[MoELayer, np.ndarray]]:
    strategy = Copied(
        forward=case.degrees[0],
        backward=case.degrees[1],
        rematerialize=case.rematerialize,
        goes_to_owner=case.goes_to_owner,
    )
    layout = ParallelLayout.build(
        Grid(world_size, world_size), strategy.uses(), case.ranks_per_node
    )
    layers = [layer_of(case, number, layout, strategy) for number in range(case.num_layers)]
    plans = [layer.routed.layer_context.plan for layer, _ in layers]
    for (layer, _), plan, following in zip(layers, plans, (*plans[1:], None)):
        layer.routed.take(plan, following)
    in_order(replicas_of(layer) for layer, _ in layers)
    return layers


def replicas_of(layer: MoELayer) -> Replicas:
    assert layer.routed.replicas is not None
    return layer.routed.replicas


def forward(case: Case, layers: Sequence[MoELayer], x: Tensor) -> Tensor:
    if case.starts_early:
        for layer in layers:
            layer.routed.begin(tuple(layer.expert_weights), is_training=layer.training)
            layer.routed.launch()
    for layer in layers:
        x = x + layer(x).y
    return x


def take_another_step(case: Case, layers: Sequence[MoELayer], rank: int) -> None:
    """One by other replicas, of which nothing may be left but the programs."""
    plans = [layer.routed.layer_context.plan for layer in layers]
    other = replace(case, seed=case.seed + 50)
    others = []
    for number, plan in enumerate(plans):
        target = other.target(number, plan.owner.num_ep_ranks)
        share = NearestReplica(target, layers[number].routed.layer_context.layout.node_C)
        others.append(replace(plan, target=target, share=share))
    for layer, plan, following in zip(layers, others, (*others[1:], None)):
        layer.routed.take(plan, following)
    x, grad = tokens_of(case, rank, 0)
    torch.sum(forward(case, layers, x.requires_grad_(case.reaches_x)) * grad).backward()
    before = [layer.routed.program(x.device) for layer in layers]
    for layer, plan, following in zip(layers, plans, (*plans[1:], None)):
        layer.routed.after_step()
        layer.zero_grad()
        layer.routed.take(plan, following)
    assert [layer.routed.program(x.device) for layer in layers] == before


def run(rank: int, world_size: int, case: Case) -> list[Tensor]:
    """Outputs, gradients of x, then of each layer its gradients and the experts at their owners
    here."""
    pairs = layers_of(case, world_size)
    layers = [layer for layer, _ in pairs]
    if case.follows:
        take_another_step(case, layers, rank)
    results, inputs = [], []
    for number in range(case.num_micro_batches):
        for layer in layers:
            replicas_of(layer).is_last_pass = lambda now=number: now == case.num_micro_batches - 1
        x, grad = tokens_of(case, rank, number)
        y = forward(case, layers, x.requires_grad_(case.reaches_x))
        torch.sum(y * grad).backward()
        results.append(y.detach())
        inputs.append(_grad_of(x))
    for layer in layers:
        layer.routed.after_step()
    with torch.no_grad():
        again = forward(case, layers, tokens_of(case, rank, case.num_micro_batches - 1)[0])
    assert relative_error(again, results[-1]) <= 1e-13
    return [*results, *inputs, *(part for pair in pairs for part in gradients_of(*pair))]


def gradients_of(layer: MoELayer, mine: np.ndarray) -> list[Tensor]:
    slots = [_grad_of(parameter) for parameter in layer.expert_weights]
    up = torch.stack(slots[::2]) if slots else torch.zeros(0, 2 * F, D, dtype=torch.float64)
    down = torch.stack(slots[1::2]) if slots else torch.zeros(0, D, F, dtype=torch.float64)
    return [_grad_of(layer.gate_weights[0]), up, down, torch.from_numpy(mine)]


def check(case: Case, world_size: int) -> None:
    reference = dense(case, world_size)
    ranks = pool_of(world_size).run(run, case)
    count = case.num_micro_batches
    errors = {}
    sums = [torch.zeros_like(weight) for weight in reference["weights"]]
    for rank, results in enumerate(ranks):
        for number in range(count):
            for name, ours in (("y", results[number]), ("x", results[count + number])):
                theirs = reference[name][rank * count + number]
                errors[f"{name} {number} of rank {rank}"] = relative_error(ours, theirs)
        for layer in range(case.num_layers):
            gate_grad, up, down, mine = results[2 * count + 4 * layer :][:4]
            sums[3 * layer] += gate_grad
            sums[3 * layer + 1].index_add_(0, mine, up)
            sums[3 * layer + 2].index_add_(0, mine, down)
    for number, (ours, theirs) in enumerate(zip(sums, reference["weights"])):
        name = ("gate", "up", "down")[number % 3]
        errors[f"{name} of layer {number // 3}"] = relative_error(ours, theirs)
    assert max(errors.values()) <= 1e-12, errors


CASES = {
    "some replicas": Case(),
    "no replicas": Case(replicas=0.0),
    "all everywhere": Case(replicas=1.0),
    "uneven owners": Case(even=False, seed=3),
    "few experts": Case(num_experts=2, even=False, seed=5),
    "one hot expert": Case(hot=50.0, seed=1),
    "one micro-batch": Case(num_micro_batches=1),
    "rematerialized": Case(rematerialize=True),
    "rematerialized, one micro-batch": Case(rematerialize=True, num_micro_batches=1),
    "revised": Case(revised=True, hot=3.0),
    "revised from none": Case(revised=True, replicas=0.0),
    "revised and rematerialized": Case(revised=True, rematerialize=True),
    "repaired": Case(repaired=True, replicas=0.1, hot=3.0, num_experts=8, num_micro_batches=3),
    "repaired, chunks, three layers": Case(
        repaired=True, replicas=0.1, hot=9.0, degrees=(2, 3), num_layers=3, even=False
    ),
    "repaired, rematerialized": Case(repaired=True, replicas=0.1, hot=3.0, rematerialize=True),
    "chunks": Case(degrees=(2, 2)),
    "chunks that differ": Case(degrees=(3, 2), replicas=0.7),
    "three layers": Case(num_layers=3),
    "three layers, started early": Case(num_layers=3, starts_early=True),
    "three layers, rematerialized": Case(num_layers=3, rematerialize=True),
    "three layers, rematerialized, few replicas": Case(
        num_layers=3, rematerialize=True, replicas=0.1, even=False, seed=2
    ),
    "three layers, rematerialized, revised": Case(num_layers=3, rematerialize=True, revised=True),
    "three layers, rematerialized, started early": Case(
        num_layers=3, rematerialize=True, starts_early=True
    ),
    "frozen experts": Case(num_layers=2, is_trained=False),
    "frozen experts, rematerialized": Case(num_layers=2, is_trained=False, rematerialize=True),
    "x without gradient": Case(num_layers=2, reaches_x=False),
    "after other replicas": Case(num_layers=2, follows=True),
    "after other replicas, rematerialized": Case(num_layers=2, follows=True, rematerialize=True),
    "one node": Case(ranks_per_node=8),
    "a node each": Case(ranks_per_node=1),
}

IN_SEGMENTS = TransferSize(start_bytes=5)  # an expert has 288 weights
CASES |= {
    f"in segments, {name}": replace(CASES[name], transfer_size=IN_SEGMENTS)
    for name in (
        "all everywhere",
        "uneven owners",
        "rematerialized",
        "revised",
        "three layers, rematerialized, revised",
        "after other replicas",
        "one node",
        "a node each",
    )
}

GUARDED = {
    *(
        "no replicas",
        "uneven owners",
        "one micro-batch",
        "rematerialized, one micro-batch",
        "chunks",
    ),
    *("revised from none", "three layers", "frozen experts", "after other replicas", "one node"),
    *("in segments, uneven owners", "in segments, rematerialized", "in segments, one node"),
    *("in segments, a node each", "in segments, after other replicas"),
    *("rematerialized", "revised", "repaired", "three layers, started early", "some replicas"),
    *("three layers, rematerialized", "three layers, rematerialized, few replicas"),
    *("frozen experts, rematerialized", "in segments, revised"),
}
"""By cases that have what they have, and more."""
QUICK = {
    *((name, 4) for name in CASES if name not in GUARDED),
    *(("three layers, rematerialized", 2), ("in segments, all everywhere", 8)),
}


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        (name, number) if (name, number) in QUICK else slow(name, number)
        for name in CASES
        for number in (2, 4, 8)
    ],
)
def test_equals_dense(name: str, world_size: int) -> None:
    check(CASES[name], world_size)


def _segments(rank: int, world_size: int, case: Case) -> set[int]:
    """In how many of them what this rank sends and receives travels."""
    ((layer, _),) = layers_of(case, world_size)
    rounds = replicas_of(layer).transfers.whole.rounds
    return {move.segment.of for each in rounds for move in (*each.sends, *each.receives)}


@pytest.mark.parametrize(
    ("name", "world_size", "of"),
    [
        ("all everywhere", 2, {1}),
        ("all everywhere", 4, {3}),
        ("all everywhere", 8, {15}),
        ("one node", 4, {1, 3}),
        ("one node", 8, {1, 3, 5}),
        ("a node each", 4, {1, 10}),
    ],
)
def test_replicas_in_segments_are(name: str, world_size: int, of: set[int]) -> None:
    found = pool_of(world_size).run(_segments, CASES[f"in segments, {name}"])
    assert set().union(*found) == of


def _sent_by_passes(rank: int, world_size: int, case: Case) -> list[tuple[bool, int]]:
    """Behind the forward of each micro-batch: whether more replicas are there than were planned,
    and what has been sent of them."""
    ((layer, _),) = layers_of(case, world_size)
    replicas, found = replicas_of(layer), []
    for number in range(case.num_micro_batches):
        replicas.is_last_pass = lambda now=number: now == case.num_micro_batches - 1
        x, grad = tokens_of(case, rank, number)
        y = forward(case, [layer], x)
        sent = replicas.traffic.sent_bytes
        planned = layer.routed.layer_context.plan.target
        found.append((replicas.widest(planned) is not planned, sent))
        torch.sum(y * grad).backward()
    layer.routed.after_step()
    return found


def test_replicas_that_were_added_serve_later_micro_batches() -> None:
    """They are sent once; the gradients of all go to the owner behind the last one."""
    case = replace(CASES["repaired"], num_micro_batches=4)
    ranks = pool_of(4).run(_sent_by_passes, case)
    for passes in ranks:
        assert [more for more, _ in passes] == [more for more, _ in ranks[0]]
        first = [more for more, _ in passes].index(True)
        sent = [number for _, number in passes[first:]]
        assert sent == [sent[0]] * len(sent)
    assert any(passes[-1][1] for passes in ranks)


def _behind_an_evaluation(rank: int, world_size: int, case: Case) -> list[Tensor]:
    """Gradients of experts, where a pass in inference mode comes before those of the step."""
    ((layer, mine),) = layers_of(case, world_size)
    with torch.inference_mode():
        layer(tokens_of(case, rank, 0)[0])
    assert replicas_of(layer)._kept is None
    for number in range(case.num_micro_batches):
        replicas_of(layer).is_last_pass = lambda now=number: now == case.num_micro_batches - 1
        x, grad = tokens_of(case, rank, number)
        torch.sum(forward(case, [layer], x) * grad).backward()
    layer.routed.after_step()
    return gradients_of(layer, mine)


def test_replicas_that_an_evaluation_adds_serve_no_training() -> None:
    case = CASES["repaired"]
    reference = dense(case, 2)["weights"]
    sums = [torch.zeros_like(weight) for weight in reference]
    for gate_grad, up, down, mine in pool_of(2).run(_behind_an_evaluation, case):
        sums[0] += gate_grad
        sums[1].index_add_(0, mine, up)
        sums[2].index_add_(0, mine, down)
    assert max(map(relative_error, sums, reference)) <= 1e-12


EVERYWHERE = (0, 1, 2, 3)
PLACEMENTS = [
    ((0, EVERYWHERE),),
    ((0, (0, 2)), (1, (1, 3))),
    ((3, EVERYWHERE), (2, (1, 2))),
]


@pytest.mark.parametrize("holders", PLACEMENTS)
def test_golden_p8(holders: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
    """Pro-Prophet's placements of four experts on four devices."""
    check(Case(num_experts=4, replicas=0.0, holders=holders, goes_to_owner=True), 4)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    st.builds(
        Case,
        num_experts=st.integers(1, 9).filter(lambda number: number >= TOP_K),
        replicas=st.sampled_from([0.0, 0.2, 0.8]),
        even=st.booleans(),
        hot=st.sampled_from([0.0, 3.0, 50.0]),
        degrees=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        rematerialize=st.booleans(),
        revised=st.booleans(),
        repaired=st.booleans(),
        goes_to_owner=st.booleans(),
        ranks_per_node=st.integers(1, 4),
        num_micro_batches=st.integers(1, 3),
        num_tokens=st.sampled_from([0, 1, 9]),
        num_layers=st.integers(1, 3),
        starts_early=st.booleans(),
        reaches_x=st.booleans(),
        is_trained=st.booleans(),
        transfer_size=st.sampled_from([SMALL, IN_SEGMENTS, TransferSize(start_bytes=1)]),
        seed=st.integers(0, 100),
    )
)
def test_any_case_equals_dense(case: Case) -> None:
    check(case, 4)


# The pieces in which a plan's replicas travel are what each would be alone.


@pytest.mark.parametrize("broadcasts", [False, True])
@pytest.mark.parametrize("num_ep_ranks", [2, 3, 8])
@pytest.mark.parametrize("everywhere", [False, True])
def test_pieces_are_those_of_their_experts_alone(
    everywhere: bool, num_ep_ranks: int, broadcasts: bool
) -> None:
    rng = np.random.default_rng(num_ep_ranks)
    node_C, nobody = np.arange(num_ep_ranks) // 2, cast(Any, None)
    for _ in range(20):
        owner = Placement.owned_by(rng.integers(0, num_ep_ranks, 6), num_ep_ranks)
        copied = tuple(rng.permutation(6)[: rng.integers(1, 6)].tolist())
        replicas_EC = np.zeros_like(owner.holds_EC)
        replicas_EC[list(copied)] = everywhere or rng.random((len(copied), num_ep_ranks)) < 0.7
        target = owner.with_replicas(replicas_EC)
        splits = [Split(copied[:at], copied[at:]) for at in rng.integers(0, len(copied) + 1, 2)]
        plan = Plan(owner, target, LocalElseOwner(owner, target), carried=Carried(*splits))
        for ep_rank in range(num_ep_ranks):
            coordinates = LayerCoordinates(0, ep_rank, node_C, nobody, broadcasts=broadcasts)
            transfers = Transfers.of(coordinates, plan)
            assert transfers.whole == coordinates.part(owner, target)
            for pieces, split in zip((transfers.gathers, transfers.reductions), splits):
                assert [piece.number for piece in pieces] == [0, 1]
                for piece, experts in zip(pieces, split):
                    some_EC = np.zeros_like(replicas_EC)
                    some_EC[list(experts)] = replicas_EC[list(experts)]
                    assert piece.experts == frozenset(experts)
                    assert piece.part == coordinates.part(owner, owner.with_replicas(some_EC))
