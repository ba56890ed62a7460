# SPDX-License-Identifier: Apache-2.0
"""The layer against the dense reference: output and every gradient, float64, 1e-12.

Shape letters: W ranks, T tokens, E experts, D model width, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.gate import SoftmaxTopK, capacity_of, drop_over_capacity
from ds_moe_ext.moe.layer import LayerOptions, MoELayer
from ds_moe_ext.moe.sharding import Along, Shard
from ds_moe_ext.planning.strategy import Job, Strategy
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.esp import ExpertSharding, TwoDegrees
from ds_moe_ext.testing import dense_experts, relative_error
from tests.marks import slow
from tests.ranks import pool_of
from tests.strategies_for_tests import Chunked, Sine


@dataclass(frozen=True)
class Case:
    num_experts: int = 8
    top_k: int = 2
    tokens_W: tuple[int, ...] = (24,) * 8  # tokens of each rank; ragged where they differ
    hot: float = 0.0  # added to the first expert's logits
    dead: int = 0  # experts that no token chooses
    degrees: tuple[int, int] = (1, 1)
    num_ep_ranks: int | None = None
    etp_size: int = 1
    schedule: str | None = None  # of strategy esp
    has_sine: bool = False  # by a stage of its own
    capacity_factor: float | None = None
    static_capacity: int | None = None
    order: str = "index"
    send_once: bool = False


D, F = 12, 20


def _weights(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(case.num_experts)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    e = case.num_experts
    gate_ED = rand(e, D)
    # The last input is always one: its column biases the routing.
    gate_ED[0, -1] += case.hot
    gate_ED[e - case.dead :, -1] -= 1e3
    return gate_ED, rand(e, 2 * F, D) * 0.3, rand(e, D, F) * 0.3


def _tokens(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    shape = (2, case.tokens_W[rank], D)
    x, grad = torch.randn(*shape, generator=generator, dtype=torch.float64)
    x[:, -1] = 1.0
    return x, grad


def _dense(case: Case, world_size: int) -> dict[str, list[Tensor]]:
    weights = [w.requires_grad_() for w in _weights(case)]
    results: dict[str, list[Tensor]] = {"y": [], "x": [], "losses": []}
    for rank in range(world_size):
        x, grad = _tokens(case, rank)
        x.requires_grad_()
        choice = SoftmaxTopK(top_k=case.top_k)(x, (weights[0],))
        expert_TK = choice.expert_TK
        if case.capacity_factor is not None:
            capacity = capacity_of(expert_TK.numel(), case.num_experts, case.capacity_factor)
            expert_TK = drop_over_capacity(expert_TK, case.num_experts, capacity)
        if case.static_capacity is not None:
            expert_TK = drop_over_capacity(expert_TK, case.num_experts, case.static_capacity)
        y = dense_experts(x, expert_TK, choice.score_TK, *weights[1:])
        y = y.sin() if case.has_sine else y
        (torch.sum(y * grad) + choice.losses @ choice.losses.new_tensor([0.3, 0.1])).backward()
        results["y"].append(y.detach())
        results["x"].append(x.grad)
        results["losses"].append(choice.losses.detach())
    results["weights"] = [w.grad for w in weights]
    return results


def _sharded(rank: int, world_size: int, case: Case) -> list[Tensor]:
    num_ep_ranks = case.num_ep_ranks or world_size // case.etp_size
    strategy = _strategy(case)
    layout = ParallelLayout.build(Grid(world_size, num_ep_ranks, case.etp_size), strategy.uses())
    owner = Placement.block(case.num_experts, num_ep_ranks)
    (plan,) = strategy.plan(Job.at_start([owner], layout.node_C))
    mine = owner.experts_of(layout.index("ep"))
    gate_ED, *weights = _weights(case)
    shard = _shard(case, layout.index("esp"))
    parts = [shard.of(number, weight, first_dim=1) for number, weight in enumerate(weights)]
    layer = MoELayer(
        nn.ParameterList([gate_ED]),
        nn.ParameterList([part[expert] for expert in mine for part in parts]),
        gate=SoftmaxTopK(top_k=case.top_k),
        function=FeedForwardExperts(silu_gated),
        strategy=strategy,
        plan=plan,
        layout=layout,
        options=LayerOptions(capacity_factor=case.capacity_factor),
    )
    x, grad = _tokens(case, rank)
    x.requires_grad_()
    out = layer(x)
    loss = torch.sum(out.y * grad) + 0.3 * out.balance_loss + 0.1 * out.z_loss
    loss.backward()
    with torch.no_grad():
        again = layer(x).y
    assert torch.equal(again, out.y)
    slots = [p.grad for p in layer.expert_weights]
    grads = [layer.gate_weights[0].grad, torch.stack(slots[::2]), torch.stack(slots[1::2])]
    losses = torch.stack((out.balance_loss, out.z_loss)).detach()
    return [out.y.detach(), x.grad, losses, *grads, torch.from_numpy(mine)]


def _strategy(case: Case) -> Strategy:
    forward, backward = case.degrees
    if case.schedule is not None:
        degree = TwoDegrees(forward=forward, backward=backward)
        placing = Sine() if case.has_sine else ExpertParallel(send_once=case.send_once)
        return ExpertSharding(degree=degree, schedule=case.schedule, placing=placing)
    if case.has_sine:
        return Sine()
    if case.degrees == (1, 1) and case.etp_size == 1:
        return ExpertParallel(
            static_capacity=case.static_capacity, send_once=case.send_once, order=case.order
        )
    return Chunked(forward=forward, backward=backward)


def _shard(case: Case, place: int) -> Shard:
    return Shard((Along(0, num_blocks=2), Along(1)), place, case.etp_size)


def _check(case: Case, world_size: int) -> None:
    reference = _dense(case, world_size)
    ranks = pool_of(world_size).run(_sharded, case)
    errors = {}
    up_sum, down_sum = (torch.zeros_like(w) for w in reference["weights"][1:])
    gate_sum = torch.zeros_like(reference["weights"][0])
    for rank, (y, x_grad, losses, gate_grad, up_grad, down_grad, mine) in enumerate(ranks):
        errors[f"y of rank {rank}"] = relative_error(y, reference["y"][rank])
        errors[f"x of rank {rank}"] = relative_error(x_grad, reference["x"][rank])
        errors[f"losses of rank {rank}"] = relative_error(losses, reference["losses"][rank])
        gate_sum += gate_grad
        shard = _shard(case, rank % case.etp_size)
        for number, (total, own) in enumerate(((up_sum, up_grad), (down_sum, down_grad))):
            dim = shard.alongs[number].dim + 1
            stretches = shard.stretches(number, total.shape[dim])
            for start, own_start, length in (
                stretches if case.etp_size > 1 else [(0, 0, own.shape[dim])]
            ):
                part = total.narrow(dim, start, length)
                part.index_add_(0, mine, own.narrow(dim, own_start, length))
    for name, ours, theirs in zip(
        ("gate", "up", "down"), (gate_sum, up_sum, down_sum), reference["weights"]
    ):
        errors[name] = relative_error(ours, theirs)
    assert max(errors.values()) <= 1e-12, errors


CASES = {
    "uniform": Case(),
    "one hot expert": Case(hot=50.0),
    "top 1": Case(top_k=1),
    "top 4": Case(top_k=4),
    "dead experts": Case(dead=3),
    "64 experts": Case(num_experts=64),
    "ragged": Case(tokens_W=(24, 7, 1, 30, 3, 24, 12, 9)),
    "a rank with no rows": Case(tokens_W=(24, 0, 5, 0, 3, 0, 8, 1)),
    "no rows at all": Case(tokens_W=(0,) * 8),
    "two chunks": Case(degrees=(2, 2)),
    "three chunks forward, two backward": Case(degrees=(3, 2)),
    "one chunk forward, four backward": Case(degrees=(1, 4)),
    "four chunks forward, one backward": Case(degrees=(4, 1), hot=3.0),
    "more chunks than tokens": Case(degrees=(4, 3), tokens_W=(2, 0, 1, 3, 2, 1, 0, 5)),
    "capacity": Case(capacity_factor=1.0, hot=1.0),
    "capacity in chunks": Case(capacity_factor=0.7, degrees=(3, 4), top_k=4),
    "static capacity": Case(static_capacity=5, tokens_W=(24, 7, 1, 30, 3, 24, 12, 9)),
    "static capacity for all": Case(static_capacity=40, top_k=4, dead=3),
    "static capacity, no rows": Case(static_capacity=2, tokens_W=(24, 0, 5, 0, 3, 0, 8, 1)),
    "masks": Case(static_capacity=5, order="one_hot", tokens_W=(24, 7, 1, 30, 3, 24, 12, 9)),
    "masks, for all": Case(static_capacity=40, order="one_hot", top_k=4, dead=3),
    "masks, no rows": Case(static_capacity=2, order="one_hot", tokens_W=(24, 0, 5, 0, 3, 0, 8, 1)),
}


CASES |= {
    "once": Case(send_once=True, top_k=4),
    "once, top 1": Case(send_once=True, top_k=1),
    "once, all experts": Case(send_once=True, top_k=8, tokens_W=(24, 7, 1, 30, 3, 24, 12, 9)),
    "once, 64 experts": Case(send_once=True, num_experts=64, top_k=8),
    "once, one hot expert": Case(send_once=True, hot=50.0),
    "once, dead experts": Case(send_once=True, dead=5, top_k=3),
    "once, a rank with no rows": Case(send_once=True, tokens_W=(24, 0, 5, 0, 3, 0, 8, 1)),
    "once, no rows at all": Case(send_once=True, tokens_W=(0,) * 8),
    "once, capacity": Case(send_once=True, capacity_factor=0.6, hot=1.0, top_k=4),
    "once in chunks": Case(send_once=True, schedule="fsmoe", degrees=(3, 2), top_k=4),
    "once, more chunks than tokens": Case(
        send_once=True, schedule="tutel", degrees=(4, 3), tokens_W=(2, 0, 1, 3, 2, 1, 0, 5)
    ),
}
ON_FEW = {"uniform", "capacity in chunks", "once", "static capacity"}
ON_EIGHT = {"ragged", "64 experts", "once in chunks"}


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        (name, number)
        if number == 4 or name in (ON_EIGHT if number == 8 else ON_FEW)
        else slow(name, number)
        for name in CASES
        for number in (1, 2, 4, 8)
    ],
)
def test_equals_dense(name: str, world_size: int) -> None:
    _check(CASES[name], world_size)


SPLIT = {
    "fsmoe": Case(schedule="fsmoe", degrees=(3, 2)),
    "no_iio": Case(schedule="fsmoe_no_iio", degrees=(2, 3)),
    "default": Case(schedule="default"),
    "tutel": Case(schedule="tutel", degrees=(2, 2), hot=50.0),
    "dead experts": Case(schedule="fsmoe", degrees=(2, 4), dead=3),
    "ragged": Case(schedule="fsmoe", degrees=(2, 1), tokens_W=(24, 7, 1, 30, 3, 0, 12, 9)),
    "no rows at all": Case(schedule="fsmoe", degrees=(2, 2), tokens_W=(0,) * 8),
    "capacity": Case(schedule="fsmoe", degrees=(1, 3), capacity_factor=0.7, top_k=4),
    "once": Case(send_once=True, schedule="fsmoe", degrees=(2, 3), top_k=4, hot=2.0),
}


WIDELY = {"ragged"}  # on more ranks, too


@pytest.mark.parametrize(
    ("name", "world_size", "etp_size"),
    [
        (name, *sizes) if sizes in ((2, 2), (4, 2)) or name in WIDELY else slow(name, *sizes)
        for name in SPLIT
        for sizes in ((1, 1), (2, 2), (4, 2), (4, 4), (8, 2), (8, 4))
    ],
)
def test_split_experts_equal_dense(name: str, world_size: int, etp_size: int) -> None:
    _check(replace(SPLIT[name], etp_size=etp_size), world_size)


OWN_STAGE = {
    "alone": Case(has_sine=True),
    "whole": Case(has_sine=True, schedule="default"),
    "two chunks": Case(has_sine=True, schedule="fsmoe", degrees=(2, 2)),
    "unlike degrees": Case(has_sine=True, schedule="fsmoe", degrees=(3, 2), hot=3.0),
    "of split experts": Case(has_sine=True, schedule="tutel", degrees=(1, 3), etp_size=2),
}


@pytest.mark.parametrize("name", OWN_STAGE)
def test_a_stage_of_the_balance_equals_dense(name: str) -> None:
    _check(OWN_STAGE[name], 4)


def test_several_grids_of_ep_ranks_equal_dense() -> None:
    _check(replace(SPLIT["fsmoe"], etp_size=2, num_ep_ranks=2), 8)
    _check(replace(SPLIT["fsmoe"], etp_size=2, num_ep_ranks=1), 4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_few_experts_equal_dense(world_size: int) -> None:
    _check(Case(num_experts=2, top_k=1), world_size)
    _check(Case(num_experts=1, top_k=1), 1)


@pytest.mark.parametrize("degrees", [(1, 1), (2, 3)])
def test_several_grids_equal_dense(degrees: tuple[int, int]) -> None:
    """Two expert-parallel grids of two EP ranks: each sees its own tokens only."""
    _check(Case(num_ep_ranks=2, degrees=degrees), 4)
    _check(Case(num_ep_ranks=1, degrees=degrees), 4)


@pytest.mark.parametrize("world_size", [3, slow(5), slow(6), slow(7)])
def test_odd_worlds_equal_dense(world_size: int) -> None:
    _check(Case(num_experts=2 * world_size, degrees=(2, 1)), world_size)
    _check(Case(num_experts=2 * world_size, top_k=3, send_once=True), world_size)


def _cases() -> st.SearchStrategy[Case]:
    num_experts = st.sampled_from([2, 4, 8, 12])
    return num_experts.flatmap(
        lambda experts: st.builds(
            Case,
            num_experts=st.just(experts),
            top_k=st.integers(1, min(experts, 4)),
            tokens_W=st.tuples(st.integers(0, 20), st.integers(0, 20)),
            hot=st.sampled_from([0.0, 2.0, 30.0]),
            dead=st.integers(0, experts // 2),
            degrees=st.tuples(st.integers(1, 4), st.integers(1, 4)),
            capacity_factor=st.sampled_from([None, None, 0.5, 1.25]),
        )
    )


@settings(max_examples=20, deadline=None, derandomize=True)
@given(_cases())
def test_any_case_sent_once_equals_dense(case: Case) -> None:
    _check(replace(case, send_once=True, schedule="fsmoe"), 2)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(_cases())
def test_any_case_equals_dense(case: Case) -> None:
    _check(case, 2)
