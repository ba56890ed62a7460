# SPDX-License-Identifier: Apache-2.0
"""Steps of zebra parallelism on several ranks, without a host, beside plain autograd.

Spec hetermoe.md: G9, G12, rule 33 and invariants 1 to 4. Shape letters: B samples, T tokens, K
choices, E experts, C ranks of a ZP group, L layers, D model width.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_moe_ext.core.comm import Traffic, all_to_all_rows
from ds_moe_ext.core.layout import Grid, ParallelLayout, Roles, group_among
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner, NearestReplica
from ds_moe_ext.hosts.zebra import stripe_model
from ds_moe_ext.hosts.zebra.role_exchange import GradientSums
from ds_moe_ext.hosts.zebra.stripe_model import Stack
from ds_moe_ext.hosts.zebra.stripe_pass import Answer, Here, Stripe, StripePass
from ds_moe_ext.moe import dispatch
from ds_moe_ext.moe.codecs import Codec
from ds_moe_ext.moe.expert import Expert
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.gate import drop_over_capacity
from ds_moe_ext.moe.hooks import NO_HOOKS, Batch, Hooked, Hooks
from ds_moe_ext.moe.hooks import Moe as MoeLayer
from ds_moe_ext.moe.layer import LayerOptions, RoutedExperts
from ds_moe_ext.moe.order import Order
from ds_moe_ext.moe.replica_memory import ReplicaMemory
from ds_moe_ext.moe.route import LayerRoute, Restore, one_rank_route
from ds_moe_ext.planning.prophet_planner import Split
from ds_moe_ext.planning.strategy import Carried, Destination, Job, LayerContext, Plan, Strategy
from ds_moe_ext.schedule.executor import ThreadStreams
from ds_moe_ext.schedule.simulator import simulate
from ds_moe_ext.schedule.stages import Stage
from ds_moe_ext.schedule.stripes import SHARED, striped_step
from ds_moe_ext.schedule.task import EXPERT, PARAM, RESTORE, ChunkRange, Op, Schedule
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.fssdp import FullySharded
from ds_moe_ext.strategies.zebra import Zebra, asymmetric_owner
from tests.marks import slow
from tests.ranks import pool_of
from tests.test_stripe_pass import (
    EXPERTS,
    LENGTH,
    STRIPE,
    TOP_K,
    VOCABULARY,
    Block,
    D,
    Experts,
    Grads,
    Model,
    Moe,
    NoAux,
    SharedAfter,
    cut,
    worst,
)

# Where experts live.


def splits(num_experts: int, roles: Roles, moved: int, capacity: int) -> np.ndarray:
    """Rows from each rank to each, where every attention rank has as many for each expert."""
    owner = asymmetric_owner(num_experts, roles, moved)
    rows_CFE = np.zeros((roles.size, 1, num_experts), dtype=np.int64)
    rows_CFE[list(roles.attention_ep_ranks)] = capacity
    share = LocalElseOwner(owner, owner)
    (between_CC,) = share.rows_between(rows_CFE)
    return between_CC


def test_splits_of_plain_zebra() -> None:
    """G9, o = 0."""
    between_CC = splits(8, Roles.first(2, 4), 0, 3)
    assert between_CC[:2].tolist() == [[0, 0, 6, 6, 6, 6]] * 2
    assert between_CC[:, 2:].T.tolist() == [[6, 6, 0, 0, 0, 0]] * 4


def test_splits_with_an_expert_of_each_rank_moved() -> None:
    """G9, o = 1."""
    owner = asymmetric_owner(8, Roles.first(2, 4), 1)
    owned = [owner.experts_of(ep_rank).tolist() for ep_rank in range(6)]
    assert owned == [[1, 3], [5, 7], [0], [2], [4], [6]]
    between_CC = splits(8, Roles.first(2, 4), 1, 3)
    assert between_CC[:2].tolist() == [[6, 6, 3, 3, 3, 3]] * 2
    assert between_CC[:, :2].T.tolist() == [[6, 6, 0, 0, 0, 0]] * 2
    assert between_CC[:, 2:].T.tolist() == [[3, 3, 0, 0, 0, 0]] * 4
    assert not between_CC[2:].any()


@st.composite
def assignments(draw: st.DrawFn) -> tuple[int, Roles, int]:
    """Experts, roles at any places, and how many move: n1 M = n2 N."""
    attention, experts = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ep_ranks = draw(st.permutations(range(attention + experts)))
    own = tuple(sorted(ep_ranks[:attention]))
    roles = Roles(own, tuple(sorted(ep_ranks[attention:])))
    step = int(np.lcm(attention, experts)) // experts
    moved = step * draw(st.integers(0, 3))
    per_rank = max(moved, 1) + draw(st.integers(0, 2))
    return per_rank * experts, roles, moved


@given(assignments())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_every_expert_is_on_one_rank(case: tuple[int, Roles, int]) -> None:
    """Invariant 4; and rule 33: the last ones of each expert rank move, in order."""
    num_experts, roles, moved = case
    owner = asymmetric_owner(num_experts, roles, moved)
    attention, experts = roles.attention_ep_ranks, roles.expert_ep_ranks
    assert owner.holds_EC.sum(axis=1).tolist() == [1] * num_experts
    held_C = owner.holds_EC.sum(axis=0)
    per_rank = num_experts // len(experts)
    assert set(held_C[list(experts)]) == {per_rank - moved}
    assert set(held_C[list(attention)]) == {moved * len(experts) // len(attention)}
    gone = [e for e in range(num_experts) if e % per_rank >= per_rank - moved]
    assert [e for ep_rank in attention for e in owner.experts_of(ep_rank)] == gone


@pytest.mark.parametrize(
    ("num_experts", "roles", "moved", "named"),
    [
        (8, Roles.first(1, 3), 0, "expert_size is 3"),
        (4, Roles.first(2, 2), 3, "moved has 3"),
        (4, Roles.first(3, 2), 1, "moved has 1"),
    ],
)
def test_owners_that_do_not_divide(num_experts: int, roles: Roles, moved: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        asymmetric_owner(num_experts, roles, moved)


# On several ranks.


class Case(NamedTuple):
    """What a group of ranks runs, in float64."""

    attention: int = 2
    experts: int = 2
    moved: tuple[int, ...] = (0, 0)
    num_stripes: int = 3
    num_pieces: int = 1
    recomputes: bool = False
    router: str = "drawn"
    is_graded: bool = True
    kinds: tuple[type[Block], ...] = ()
    attention_ep_ranks: tuple[int, ...] = ()
    hooks: Hooked = NO_HOOKS
    strategy: type[Strategy] = Zebra
    num_steps: int = 1
    in_halves: bool = False  # backward comes later, as in a pipeline
    capacity: int | None = None  # rows of an expert from a stripe, padded
    once: int | None = None  # ranks of a node, to each of which a token's row goes once

    @property
    def roles(self) -> Roles:
        if not self.attention_ep_ranks:
            return Roles.first(self.attention, self.experts)
        ep_ranks = range(self.attention + self.experts)
        others = tuple(ep_rank for ep_rank in ep_ranks if ep_rank not in self.attention_ep_ranks)
        return Roles(self.attention_ep_ranks, others)

    def model(self, capacity: int | None = None) -> Model:
        """Args: capacity: what is above it, the model itself drops."""
        torch.manual_seed(2)
        model = Model(*(self.kinds or (Block,) * len(self.moved))).double()
        for moe in (module for module in model.modules() if isinstance(module, Moe)):
            moe.experts.forward = partial(_rerouted, moe.experts.forward, self, capacity)
        return model

    def batch(self, ep_rank: int, stripe: int, piece: int) -> Tensor:
        """Pieces differ in size."""
        number = (ep_rank * self.num_stripes + stripe) * self.num_pieces + piece
        generator = torch.Generator().manual_seed(100 + number)
        return torch.randint(0, VOCABULARY, (1 + number % 2, LENGTH), generator=generator)

    def seed(self, ep_rank: int, stripe: int, piece: int) -> float:
        return 1.0 + 0.3 * ep_rank + 0.1 * stripe + 0.05 * piece

    def pieces(self, ep_rank: int) -> list[tuple[int, int, int]]:
        shape = (self.num_stripes, self.num_pieces)
        return [(ep_rank, int(stripe), int(piece)) for stripe, piece in np.ndindex(*shape)]


def _rerouted(
    forward: Any, case: Case, capacity: int | None, x_TD: Tensor, *choices: Tensor
) -> Tensor:
    expert_TK, score_TK = choices
    if case.router == "one":
        expert_TK = torch.arange(TOP_K).expand_as(expert_TK) + 1
    if case.router == "dropped":
        odd_T1 = torch.arange(len(expert_TK))[:, None] % 2 == 1
        expert_TK = expert_TK.masked_fill(odd_T1, -1)
    if capacity is not None:
        expert_TK = drop_over_capacity(expert_TK, EXPERTS, capacity)
    out: Tensor = forward(x_TD, expert_TK, score_TK)
    return out


class Outcome(NamedTuple):
    """Of one rank."""

    losses: list[float]
    grads: Grads
    issued: tuple[tuple[str, tuple[str, ...]], ...]
    routed_LE: np.ndarray
    splits: list[tuple[tuple[int, ...], tuple[int, ...]]]
    traffic: Traffic
    freed_bytes: int  # of replicas, all layers' and steps' together


def run_case(rank: int, world_size: int, case: Case) -> Outcome:
    """A step of one rank."""
    roles, model = case.roles, case.model()
    strategy = case.strategy(attention_size=case.attention, expert_size=case.experts)
    if isinstance(strategy, Zebra) and case.attention_ep_ranks:
        strategy = replace(strategy, attention_ep_ranks=list(case.attention_ep_ranks))
    if isinstance(strategy, Zebra) and case.capacity is not None:
        strategy = strategy.over(ExpertParallel(static_capacity=case.capacity))
    if isinstance(strategy, Zebra) and case.once is not None:
        strategy = strategy.over(ExpertParallel(send_once=True))
    grid = Grid(world_size, roles.size)
    layout = ParallelLayout.build(grid, strategy.uses(), ranks_per_node=case.once)
    owners = [asymmetric_owner(EXPERTS, roles, moved) for moved in case.moved]
    plans = strategy.plan(Job.at_start(owners, layout.node_C))
    routed = [
        RoutedExperts(
            strategy,
            LayerContext(plan, layout, layer),
            FeedForwardExperts(silu_gated),
            options=LayerOptions(gate_may_drop=True, hooks=case.hooks),
        )
        for layer, plan in enumerate(plans)
    ]
    ep_rank = layout.index("ep")
    control = group_among(layout.grid.along("ep"), backend="gloo")
    named = _own_weights(model, owners, ep_rank)
    weights = [tuple(own.values()) for own in named]
    if ("ep", PARAM) in strategy.uses():
        for layer in routed:
            layer.allow_replicas(_like(model))
    parameters = {name: p for own in named for name, p in own.items()}
    parameters |= {n: p for n, p in model.named_parameters() if ".experts." not in n}
    freed: list[int] = []
    release = ReplicaMemory.release

    def counted(memory: ReplicaMemory) -> None:
        release(memory)
        freed.append(sum(memory._sizes))

    with (
        ThreadPoolExecutor(16) as threads,
        mock.patch.object(Order, "routed", seeing()) as seen,
        mock.patch.object(ReplicaMemory, "release", counted),
    ):
        stack = Stack(
            layers=routed,
            weights=weights.__getitem__,
            roles=roles,
            device=torch.device("cpu"),
            streams=_streams(),
            recomputes=case.recomputes,
            threads=threads,
        )
        for step in range(case.num_steps):
            if step:
                grow(parameters.values())
                for layer in routed:
                    layer.after_step()
            sums = GradientSums() if case.is_graded else None
            add = None if sums is None else sums.add
            stripes = _stripes(case, model, stack, sums) if stack.is_attention else []
            with cut(model, stack.here):
                if case.in_halves:
                    assert add is not None
                    ahead = stack.ahead(case.num_stripes, stripes, add, counts=True)
                    issued = ahead.later.schedule
                    stack.back(ahead)
                    continue
                issued = stack.run(case.num_stripes, stripes, add, counts=True, control=control)
    one = torch.ones(())
    taken = {} if sums is None else {name: sums.take(p, one) for name, p in parameters.items()}
    stripe_passes = [stripe_pass for stripe in stripes for stripe_pass in stripe.stripe_passes]
    return Outcome(
        losses=[float(stripe_pass.output.loss) for stripe_pass in stripe_passes],
        grads={name: grad for name, grad in taken.items() if grad is not None},
        issued=tuple((stream.name, tuple(issued.in_stream(stream).split())) for stream in SHARED),
        routed_LE=np.stack([layer.rows.take().routed_CE[ep_rank] for layer in routed]),
        splits=seen.splits,
        traffic=sum((each.replicas.traffic for each in routed if each.replicas), Traffic()),
        freed_bytes=sum(freed),
    )


@torch.no_grad()
def grow(weights: Iterable[Tensor]) -> None:
    for weight in weights:
        weight.mul_(1.1)


def _like(model: Model) -> tuple[Tensor, ...]:
    """An expert's weights."""
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    return tuple(w[0].detach().requires_grad_() for w in (experts.up_EFD, experts.down_EDF))


@functools.cache
def _streams() -> ThreadStreams:
    return ThreadStreams()


class seeing:
    """In the place of ``Order.routed``: keeps the splits."""

    def __init__(self) -> None:
        self.splits: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self._routed = Order.routed

    def __get__(self, order: Order, _: type) -> Any:
        return partial(self, order)

    def __call__(self, order: Order, *given: Any) -> LayerRoute:
        made = self._routed(order, *given)
        route = made.on(STRIPE)
        if route.splits.stays:  # an EP rank's own rows alone
            none = [0] * order.destination.target.num_ep_ranks
            none[order.coordinates.ep_rank] = route.slots.num_rows
            self.splits.append((tuple(none), tuple(none)))
        else:
            self.splits.append((route.splits.sent_C, route.splits.received_C))
        return made


def _own_weights(
    model: Model, owners: list[Placement], ep_rank: int
) -> list[dict[str, nn.Parameter]]:
    """Weights of the experts of each layer that live here, slot by slot."""
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, Experts)]
    return [
        {
            f"{name}.{weight}.{expert}": nn.Parameter(getattr(module, weight)[expert].clone())
            for expert in owner.experts_of(ep_rank)
            for weight in ("up_EFD", "down_EDF")
        }
        for (name, module), owner in zip(layers, owners)
    ]


def _stripes(case: Case, model: Model, stack: Stack, sums: GradientSums | None) -> list[Stripe]:
    ep_rank = stack.layers[0].layer_context.layout.index("ep")
    stripe_passes = {
        numbers: StripePass(
            partial(model, case.batch(*numbers)),
            None if sums is None else sums.add,
            stack.threads,
            stack.here,
        )
        for numbers in case.pieces(ep_rank)
    }
    return [
        Stripe(
            [stripe_pass for numbers, stripe_pass in stripe_passes.items() if numbers[1] == stripe],
            [case.seed(*numbers) for numbers in stripe_passes if numbers[1] == stripe],
        )
        for stripe in range(case.num_stripes)
    ]


@functools.cache
def expected(case: Case) -> tuple[dict[int, list[float]], Grads]:
    """Losses of each attention rank and gradients of all, by plain autograd in one process."""
    model = case.model(case.capacity)
    for _ in range(1, case.num_steps):
        grow(model.parameters())
    total, losses = torch.zeros(()), {}
    for ep_rank in case.roles.attention_ep_ranks:
        losses[ep_rank] = []
        for numbers in case.pieces(ep_rank):
            loss = model(case.batch(*numbers)).loss
            losses[ep_rank].append(float(loss.detach()))
            total = total + case.seed(*numbers) * loss
    named = dict(model.named_parameters())
    grads: Grads = {}
    for name, grad in zip(named, torch.autograd.grad(total, list(named.values()))):
        if ".experts." in name:
            grads.update({f"{name}.{expert}": part for expert, part in enumerate(grad)})
        else:
            grads[name] = grad
    return losses, grads


def check(case: Case) -> list[Outcome]:
    outcomes: list[Outcome] = pool_of(case.roles.size).run(run_case, case)
    losses, grads = expected(case)
    found: Grads = {}
    for ep_rank, outcome in enumerate(outcomes):
        assert outcome.losses == pytest.approx(losses.get(ep_rank, []), rel=1e-13)
        for name, grad in outcome.grads.items():
            found[name] = found[name] + grad if name in found else grad
    if case.is_graded:
        assert worst(found, grads) < 1e-12
    assert len({outcome.issued for outcome in outcomes}) == 1
    if case.capacity is None:
        _check_rows(case, outcomes)
    return outcomes


def _check_rows(case: Case, outcomes: list[Outcome]) -> None:
    """Invariant 3: what is sent is received, and all that was chosen is sent."""
    splits_SPCC = np.array([outcome.splits for outcome in outcomes])  # rank, pass, way, other
    sent, received = splits_SPCC[:, :, 0], splits_SPCC[:, :, 1]
    np.testing.assert_array_equal(sent, received.transpose(2, 1, 0))
    for ep_rank, outcome in enumerate(outcomes):
        if ep_rank not in case.roles.attention_ep_ranks:
            assert not outcome.routed_LE.any()
            continue
        num_tokens = sum(case.batch(*numbers).numel() for numbers in case.pieces(ep_rank))
        if case.router != "dropped":
            each = case.num_steps * TOP_K * num_tokens
            assert set(outcome.routed_LE.sum(axis=1)) == {each}


@pytest.mark.parametrize("moved", [(0, 0), (0, 1), (1, 1), (2, 0)])
def test_equals_one_process(moved: tuple[int, int]) -> None:
    """G12; with (2, 0) expert ranks have no experts in the first layer."""
    check(Case(moved=moved))


CASES = {
    "one of each": Case(1, 1, (0, 2), 2),
    "one stripe": Case(1, 1, (1, 0), 1),
    "more expert ranks": Case(1, 2, (0, 1), 2, kinds=(SharedAfter, SharedAfter)),
    "more attention ranks": Case(2, 1, (2, 0, 4), 2),
    "all experts moved": Case(2, 2, (2, 2), 2),
    "computed again": Case(2, 2, (0, 1), 3, recomputes=True),
    "pieces": Case(2, 2, (0, 1), 2, num_pieces=3),
    "all to the same experts": Case(2, 2, (0, 1), 3, router="one"),
    "the same experts, computed again": Case(1, 2, (0, 0), 2, router="one", recomputes=True),
    "dropped": Case(2, 2, (1, 0), 2, router="dropped", num_pieces=2),
    "one layer": Case(1, 1, (0,), 4),
    "attention ranks last": Case(2, 2, (1, 0), 2, attention_ep_ranks=(1, 3)),
    "no gradients": Case(2, 2, (0, 1), 3, is_graded=False, num_pieces=2),
}


@pytest.mark.parametrize("name", CASES)
def test_cases_equal_one_process(name: str) -> None:
    outcomes = check(CASES[name])
    if CASES[name].router == "one":
        received = np.array([outcome.splits for outcome in outcomes])[:, :, 1].sum(axis=(1, 2))
        assert 0 in received  # a rank that no row comes to


PADDED = {
    "some are dropped": Case(2, 2, (0, 1), 3, capacity=5, num_steps=2),
    "expert ranks first, more of them": Case(1, 2, (0, 0), 2, capacity=3, attention_ep_ranks=(2,)),
    "one layer moved": Case(2, 1, (4, 0), 2, capacity=5, recomputes=True),
    "pieces": Case(2, 2, (0, 1), 2, capacity=60, num_pieces=3),
    "no gradients": Case(2, 2, (0, 1), 2, capacity=4, is_graded=False),
}


@pytest.mark.parametrize("name", PADDED)
def test_a_static_capacity_equals_one_process(name: str) -> None:
    """Each expert takes as many tokens of a stripe, padded or the first."""
    case = PADDED[name]
    outcomes = check(case)
    pieces = chain.from_iterable(map(case.pieces, case.roles.attention_ep_ranks))
    num_chosen = case.num_steps * TOP_K * sum(case.batch(*numbers).numel() for numbers in pieces)
    computed_L = sum(outcome.routed_LE for outcome in outcomes).sum(axis=1)
    assert (computed_L < num_chosen).all() if name != "pieces" else (computed_L == num_chosen).all()


ONCE = {
    "to ranks": Case(2, 2, (0, 1), 2, once=1, num_steps=2),
    "to nodes": Case(2, 2, (0, 0), 3, once=2, num_steps=2),
    "to nodes, moved": Case(2, 2, (1, 0), 2, once=2, recomputes=True, router="dropped"),
    "to nodes of both roles": Case(
        2, 2, (0, 1), 2, once=2, num_pieces=2, attention_ep_ranks=(1, 2)
    ),
    "more expert ranks": Case(1, 2, (0, 0), 2, once=2, router="one"),
    "no gradients": Case(2, 2, (0, 1), 2, once=2, is_graded=False),
}


@pytest.mark.parametrize("name", ONCE)
def test_rows_that_are_sent_once_equal_one_process(name: str) -> None:
    """Scores weigh them at the experts, and have their gradients from there."""
    check(ONCE[name])


def bytes_between_nodes(rank: int, world_size: int, case: Case) -> tuple[int, int]:
    """That this rank sends to the other node of two: of rows, and with what goes along."""
    counted = Counter[bool]()

    def seen(rows_ND: Tensor, sent: Any, received: Any, group: dist.ProcessGroup) -> Tensor:
        ranks = dist.get_process_group_ranks(group)
        away = sum(n for n, other in zip(sent, ranks) if other // 2 != rank // 2)
        width = rows_ND.shape[1] * rows_ND.itemsize
        counted[width == 8 * D] += away * width
        return all_to_all_rows(rows_ND, sent, received, group)

    names = ("all_to_all_rows", "all_to_all_by_pairs")
    with mock.patch.multiple(dispatch, **dict.fromkeys(names, seen)):
        run_case(rank, world_size, case)
    return counted[True], counted.total()


def test_a_row_that_goes_once_crosses_once() -> None:
    """Of two choices, in both directions, forward and backward; scores and their gradients, which
    go along, are a number each."""
    case = Case(2, 2, (0, 0), 2)
    once, twice = (
        np.sum(pool_of(4).run(bytes_between_nodes, each), axis=0)
        for each in (case._replace(once=2), case)
    )
    assert 2 * once[0] == twice[0] == twice[1]
    num_rows = twice[0] // (8 * D)
    assert num_rows == 4 * 2 * TOP_K * sum(
        case.batch(*numbers).numel() for ep_rank in (0, 1) for numbers in case.pieces(ep_rank)
    )
    assert once[1] - once[0] <= num_rows * 2 * 8


class Waiting(TorchFunctionMode):
    """Counts what makes the host wait on a GPU; threads take it over."""

    NAMES = ("item", "tolist", "numpy", "cpu", "nonzero", "bincount", "unique", "masked_select")
    NAMES += ("__int__", "__bool__", "__float__", "__index__", "is_nonzero", "equal", "argwhere")

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        is_mask = name == "__getitem__" and getattr(args[1], "dtype", None) == torch.bool
        if name in self.NAMES or is_mask:
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))


def waits_of(rank: int, world_size: int, case: Case) -> list[int]:
    """Of the host, step by step."""
    found, run = [], Stack.run

    def counting(stack: Stack, *args: Any, **kwargs: Any) -> Schedule:
        with Waiting() as waiting:
            issued = run(stack, *args, **{**kwargs, "control": None})
        found.append(waiting.waits.total())
        return issued

    with mock.patch.object(Stack, "run", counting):
        run_case(rank, world_size, case)
    return found


@pytest.mark.parametrize("num_pieces", [slow(1), 2])
def test_a_static_capacity_leaves_no_wait_by_stripe_and_layer(num_pieces: int) -> None:
    """A layer more is no wait more, but for the first step, which asks what its rows are like."""

    def of_two_layers(capacity: int | None) -> list[list[int]]:
        case = Case(1, 1, (0,), 3, num_pieces=num_pieces, num_steps=3, capacity=capacity)
        more = case._replace(moved=(0, 1, 0))
        one, three = (pool_of(2).run(waits_of, each) for each in (case, more))
        return [[b - a for a, b in zip(*steps)] for steps in zip(one, three)]

    assert of_two_layers(40) == [[2, 0, 0]] * 2
    attention, expert = of_two_layers(None)
    assert min(attention) >= 2 * 3 * num_pieces
    assert min(expert) >= 2 * 3


def test_order_of_theorem_1() -> None:
    """Rule 10: a2e carries D^F and C^B, e2a carries C^F and D^B; stripes ascend in both."""
    outcomes = check(Case(1, 1, (0, 0), 2))
    (a2e, there), (e2a, back), param = outcomes[0].issued
    assert (a2e, e2a, param) == ("a2e", "e2a", ("param", ()))
    ops = [task.split("(")[0].split("[")[0] for task in (*there, *back)]
    assert len(set(ops[:4])) == len(set(ops[4:8])) == 1
    assert set(ops[:4]) != set(ops[4:8])
    assert len(there) == len(back) == 8


SWAPPED = ("dispatch[0,0]", "dispatch[0,1]")


def _tampered(rank: int, world_size: int) -> str:
    """A rank that swaps two collectives is found out, on all ranks."""
    case = Case(1, 1, (0, 0), 2)
    check_orders = stripe_model.check_orders

    def swapped(issued: Schedule, control: dist.ProcessGroup) -> None:
        tasks = list(issued.tasks)
        if rank == 1:
            first, second = (i for i, t in enumerate(tasks) if str(t) in SWAPPED)
            tasks[first], tasks[second] = tasks[second], tasks[first]
        check_orders(replace(issued, tasks=tuple(tasks)), control)

    with (
        mock.patch.object(stripe_model, "check_orders", swapped),
        pytest.raises(RuntimeError) as raised,
    ):
        run_case(rank, world_size, case)
    return str(raised.value)


def test_another_order_is_reported() -> None:
    first, second = pool_of(2).run(_tampered)
    assert first == second
    assert "in different orders: place 0 a2e" in first
    assert "| place 1 a2e" in first


# What layers have under other strategies, they have here.


class Watching(Hooks):
    """Counts calls, and rows, by hook and direction."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()

    def _see(self, hook: str, batch: Batch) -> None:
        name = f"{hook}{chr(39) if batch.is_backward else ''}"
        self.calls[name] += 1
        self.rows[name] += len(batch.data)

    def before_dispatch_hook(self, moe: MoeLayer, batch: Batch) -> None:
        self._see("before dispatch", batch)

    def after_dispatch_hook(self, moe: MoeLayer, batch: Batch) -> None:
        self._see("after dispatch", batch)

    def before_combine_hook(self, moe: MoeLayer, batch: Batch) -> None:
        self._see("before combine", batch)

    def after_combine_hook(self, moe: MoeLayer, batch: Batch) -> None:
        self._see("after combine", batch)


def _watched(rank: int, world_size: int) -> tuple[Counter[str], Counter[str]]:
    watching = Watching()
    run_case(rank, world_size, Case(1, 1, (0, 0), 2, hooks=Hooked((watching,))))
    return watching.calls, watching.rows


def test_hooks_see_rows_of_both_sides() -> None:
    (calls, rows), (expert_calls, expert_rows) = pool_of(2).run(_watched)
    hooks = ("before dispatch", "after dispatch", "before combine", "after combine")
    names = {*hooks, *(f"{hook}'" for hook in hooks)}
    assert calls == expert_calls == dict.fromkeys(names, 4)  # of two layers and two stripes
    num_tokens = rows["before dispatch"]
    assert num_tokens == 2 * LENGTH * (1 + 2)  # stripes of one sample and of two
    assert expert_rows["after dispatch"] == expert_rows["before combine"] == TOP_K * num_tokens
    assert rows["after combine"] == rows["before dispatch'"] == TOP_K * num_tokens
    assert not rows["after dispatch"]
    assert not expert_rows["before dispatch"]


class Borders(Hooks):
    """Keeps what stands at a layer's two ends."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def before_moe_start_hook(self, moe: MoeLayer, batch: Batch) -> None:
        self.seen.append(batch.data)

    def before_moe_end_hook(self, moe: MoeLayer, batch: Batch) -> None:
        self.seen.append(batch.data)


def test_hooks_see_a_piece_before_and_behind_its_experts() -> None:
    """Where the model pauses."""
    borders = Borders()
    options = LayerOptions(hooks=Hooked((borders,)))
    plan = Plan.at_owner(asymmetric_owner(EXPERTS, Roles.first(1, 1), 0))
    routed = _layer_of(Zebra(attention_size=1, expert_size=1), plan, options)
    stripe_pass = SimpleNamespace(experts=lambda layer, x_TD, *given: x_TD + 1)
    here: Any = SimpleNamespace(stripe_pass=stripe_pass)
    hosted: Any = SimpleNamespace(routed=routed)
    paused = stripe_model.Pausing(here, None)(0, hosted)
    x_TD, expert_TK = torch.randn(3, 4), torch.zeros(3, 1, dtype=torch.int64)
    y_TD = paused(x_TD, expert_TK, torch.ones(3, 1), ())
    assert torch.equal(y_TD, x_TD + 1)
    before, behind = borders.seen
    assert torch.equal(before, x_TD)
    assert torch.equal(behind, y_TD)


@dataclass(frozen=True, kw_only=True)
class Halves(Codec):
    """Rows travel as half of themselves, and gradients as they are."""

    gradients: bool = False

    def encode(self, rows_ND: Tensor) -> Tensor:
        return rows_ND / 2

    def decode(self, arrived: Tensor, like_ND: Tensor) -> Tensor:
        return arrived * 2


def test_codecs_are_laid_over_the_rows() -> None:
    check(Case(2, 2, (0, 1), 2, hooks=Hooked(codecs=(Halves(),))))


@dataclass(frozen=True, eq=False)
class Doubling(Expert):
    """Gives its rows twice over."""

    def forward(
        self, chunk_range: ChunkRange, *reads: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        (computed_RD,), saved = super().forward(chunk_range, *reads)
        return (computed_RD * 2,), saved

    def backward(
        self, chunk_range: ChunkRange, saved: tuple[Any, ...], grad_RD: Tensor
    ) -> tuple[Any, ...]:
        return super().backward(chunk_range, saved, grad_RD * 2)


@dataclass(frozen=True, kw_only=True)
class DoubledZebra(Zebra):
    def stages(self, layer_context: LayerContext) -> dict[Op, Stage]:
        return {EXPERT: Doubling(FeedForwardExperts(silu_gated))}


@dataclass(frozen=True, kw_only=True)
class RestoringZebra(Zebra):
    def stages(self, layer_context: LayerContext) -> dict[Op, Stage]:
        return {RESTORE: Restore()}


@dataclass(frozen=True, kw_only=True)
class OwnRoles(Strategy):
    """Roles by the members of a strategy, as a user would say them."""

    attention_size: int
    expert_size: int

    @property
    def roles(self) -> Roles:
        return Roles.first(self.attention_size, self.expert_size)

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(map(Plan.at_owner, job.owners))


def test_a_strategy_of_the_users_own_may_give_roles() -> None:
    case = Case(1, 1, (0, 0), 2)
    own, ours = (
        pool_of(2).run(run_case, case._replace(strategy=kind)) for kind in (OwnRoles, Zebra)
    )
    assert [rank.losses for rank in own] == [rank.losses for rank in ours]
    for mine, theirs in zip(own, ours):
        assert mine.grads.keys() == theirs.grads.keys()
        assert all(torch.equal(mine.grads[name], theirs.grads[name]) for name in mine.grads)


# Copies.


@dataclass(frozen=True, kw_only=True)
class Copied(OwnRoles):
    """A copy of every second expert on the last rank, of the others wherever experts are."""

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(self._plan_of(owner, job.node_C) for owner in job.owners)

    def _plan_of(self, owner: Placement, node_C: np.ndarray) -> Plan:
        holds_EC = owner.holds_EC.copy()
        holds_EC[::2, -1] = True
        holds_EC[1::2] = owner.holds_EC.any(axis=0)
        target = Placement(holds_EC)
        return Plan(owner, target, NearestReplica(target, node_C))


@dataclass(frozen=True, kw_only=True)
class CopiedEverywhere(Copied):
    """Attention ranks compute, too, where the first layer is; the others have no replicas."""

    def plan(self, job: Job) -> tuple[Plan, ...]:
        first, *rest = job.owners
        target = Placement(np.ones_like(first.holds_EC))
        plan = Plan(first, target, NearestReplica(target, job.node_C))
        return plan, *map(Plan.at_owner, rest)


@dataclass(frozen=True, kw_only=True)
class Revised(OwnRoles):
    """Nothing is copied before the rows are known."""

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(
            replace(Plan.at_owner(owner), revise=partial(busiest, owner, job.node_C))
            for owner in job.owners
        )


def busiest(target: Placement, node_C: np.ndarray, rows_CE: np.ndarray) -> Destination:
    """The two busiest experts compute on every rank: each stripe has its own."""
    holds_EC = target.holds_EC.copy()
    holds_EC[np.argsort(-rows_CE.sum(axis=0), kind="stable")[:2]] = True
    more = Placement(holds_EC)
    return Destination(more, NearestReplica(more, node_C))


@dataclass(frozen=True, kw_only=True)
class CopiedAndRevised(Copied):
    """Every second layer is revised."""

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(
            replace(plan, revise=partial(busiest, plan.target, job.node_C) if layer % 2 else None)
            for layer, plan in enumerate(super().plan(job))
        )


@dataclass(frozen=True, kw_only=True)
class Freed(CopiedAndRevised):
    """Replicas are freed after forward; and the block before would carry them elsewhere."""

    def plan(self, job: Job) -> tuple[Plan, ...]:
        halves = Split((0, 1), (2, 3))
        return tuple(
            replace(plan, rematerialize=True, carried=Carried(halves, halves))
            for plan in super().plan(job)
        )


HECATE = FullySharded(overlap_degree=2, replicas_per_rank=2, reshard_interval=0)
FREEING = replace(HECATE, rematerialize=True)


@dataclass(frozen=True, kw_only=True)
class OverFssdp(Zebra):
    """Replicas among expert ranks, by rows of which most are of the first experts."""

    placing: Strategy = HECATE

    def plan(self, job: Job) -> tuple[Plan, ...]:
        rows_CE = np.zeros_like(job.rows[0])
        rows_CE[self.roles.attention_ep_ranks, :] = 100 // (1 + np.arange(EXPERTS))
        (alike,) = job.cost_groups
        known = replace(alike, expert_bytes=1)
        plans = super().plan(replace(job, rows=(rows_CE,) * len(job.rows), cost_groups=(known,)))
        assert any(plan.target is not plan.owner and plan.revise for plan in plans)
        return plans


@dataclass(frozen=True, kw_only=True)
class OverFreed(OverFssdp):
    """They are freed after forward."""

    placing: Strategy = FREEING


COPYING = (Copied, CopiedEverywhere, Revised, CopiedAndRevised, OverFssdp, Freed, OverFreed)
WITH_REPLICAS = {
    "two layers": Case(1, 2, (0, 0), 2),
    "offloaded": Case(2, 2, (0, 1, 0), 2, num_pieces=2),
    "one stripe": Case(1, 2, (0, 0), 1),
    "two steps": Case(2, 2, (0, 1, 1), 2, num_steps=2),
    "no gradients": Case(2, 2, (0, 1), 2, is_graded=False, num_steps=2),
    "no gradients, one attention rank": Case(1, 2, (0, 0), 2, is_graded=False),
    "computed again": Case(1, 2, (0, 0), 2, recomputes=True),
    "the same experts": Case(2, 2, (0, 0), 3, router="one"),
    "attention ranks last": Case(2, 2, (1, 0), 2, attention_ep_ranks=(1, 3), router="dropped"),
    "four layers": Case(1, 2, (0, 2, 0, 0), 2, num_steps=2),
    "in halves": Case(1, 2, (0, 1), 2, in_halves=True),
    "four layers, computed again": Case(1, 2, (0, 0, 0, 0), 3, recomputes=True),
}


QUICK = {
    ("two layers", CopiedEverywhere),
    ("offloaded", CopiedAndRevised),
    ("one stripe", Revised),
    ("two steps", Copied),
    ("no gradients", Revised),
    ("no gradients, one attention rank", Copied),
    ("computed again", CopiedAndRevised),
    ("the same experts", Revised),
    ("attention ranks last", CopiedEverywhere),
    ("the same experts", OverFssdp),
    ("attention ranks last", OverFssdp),
    ("four layers", Freed),
    ("four layers, computed again", OverFreed),
    ("in halves", Freed),
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        case if (case := (name, strategy)) in QUICK else slow(*case)
        for name in WITH_REPLICAS
        for strategy in COPYING
    ],
)
def test_replicas_between_roles_equal_one_process(name: str, strategy: type[Strategy]) -> None:
    case = WITH_REPLICAS[name]
    outcomes = check(case._replace(strategy=strategy))
    frees = strategy in (Freed, OverFreed)
    freed_bytes = sum(outcome.freed_bytes for outcome in outcomes)
    assert (freed_bytes > 0) == (frees and (len(case.moved) > 2 or case.in_halves))
    sent, received = (
        sum(getattr(outcome.traffic, way) for outcome in outcomes)
        for way in ("sent_bytes", "received_bytes")
    )
    assert sent == received > 0


def test_the_simulator_prices_what_ran() -> None:
    """Nothing is copied to the attention ranks of the first layer and of the last."""
    case = WITH_REPLICAS["offloaded"]._replace(strategy=CopiedAndRevised)
    outcomes = check(case)
    step = striped_step(3, case.num_stripes, offloaded=[1], copied=[0, 1, 2], revised=[1])
    streams = tuple((stream.name, tuple(step.in_stream(stream).split())) for stream in SHARED)
    assert outcomes[0].issued == streams
    copied_s = {"gather": 3.0, "revise": 1.0}
    timeline = simulate(step, lambda rank, task: copied_s.get(task.op.name, 0.5))
    assert timeline.makespan_s > simulate(step, lambda rank, task: 0.5).makespan_s


def test_stages_of_the_strategy_are_run() -> None:
    case = Case(1, 1, (0, 0), 2)
    plain, doubled = (
        pool_of(2).run(run_case, case._replace(strategy=kind)) for kind in (Zebra, DoubledZebra)
    )
    model = case.model()
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        with torch.no_grad():
            experts.down_EDF *= 2
    with torch.no_grad():
        losses = [float(model(case.batch(*numbers)).loss) for numbers in case.pieces(0)]
    assert doubled[0].losses == pytest.approx(losses, rel=1e-12)
    assert doubled[0].losses != plain[0].losses


def _layer_of(strategy: Strategy, plan: Plan, options: LayerOptions | None = None) -> RoutedExperts:
    layer_context = LayerContext(plan, ParallelLayout(Grid(2, 2), rank=0), 0)
    return RoutedExperts(strategy, layer_context, FeedForwardExperts(silu_gated), options=options)


def test_what_has_no_task_is_refused() -> None:
    owner = asymmetric_owner(EXPERTS, Roles.first(1, 1), 0)
    plan = Plan.at_owner(owner)
    with pytest.raises(ValueError, match=r"has stages of its own for restore, .* give it none but"):
        _layer_of(RestoringZebra(attention_size=1, expert_size=1), plan)
    revised = replace(plan, revise=lambda rows_CE: Destination(owner, plan.share))
    zebra = Zebra(attention_size=1, expert_size=1)
    with pytest.raises(ValueError, match=r"Zebra plans replicas .* add \('ep', PARAM\)"):
        _layer_of(zebra, revised)
    with pytest.raises(ValueError, match="Zebra plans replicas"):
        _layer_of(zebra, plan).take(revised)


# Models that call their layers in another way.


class Ways(Model):
    """Calls blocks in an order of its own."""

    order = (0, 1, 2)

    def hidden(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        for number in self.order:
            x_BTD = self.blocks[number](x_BTD)
        return x_BTD, torch.zeros(())


def _run(*order: int) -> None:
    """Forward of a stripe on the spot, its model calling layers in some order."""
    torch.manual_seed(0)
    model = Ways(NoAux, NoAux, NoAux)
    model.order = order
    here, sums = Here(), GradientSums()
    batch = torch.zeros(1, LENGTH, dtype=torch.int64)
    with ThreadPoolExecutor(2) as threads, cut(model, here):
        stripe_pass = StripePass(partial(model, batch), sums.add, threads, here)
        stripe = Stripe([stripe_pass], [1.0])
        returned = None
        try:
            for layer in range(3):
                question = stripe.forward(layer, returned)
                route = one_rank_route(question.expert_TK, Placement.block(EXPERTS, 1))
                rows_ND = question.x_TD[route.on(STRIPE).token_N]
                returned = Answer(rows_ND, route.on(STRIPE))
            assert returned is not None
            stripe.finish(3, returned)
        finally:
            stripe_pass.abandon()


def test_layers_in_their_order() -> None:
    _run(0, 1, 2)


@pytest.mark.parametrize(
    "order", [(0, 0, 1, 2), (0, 2), (1, 0, 2), (0, 1, 2, 1), (0, 1), ()], ids=str
)
def test_layers_in_another_order_are_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="every forward calls every layer once"):
        _run(*order)


class TwoInABlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"first": Experts(), "second": Experts()})])


def test_two_layers_in_a_block_are_refused() -> None:
    names = ("blocks.0.first", "blocks.0.second")
    layers: Any = [SimpleNamespace(name=name) for name in names]
    with pytest.raises(ValueError, match=r"blocks\.0 has two MoE layers"):
        stripe_model.blocks_of(TwoInABlock(), layers)
