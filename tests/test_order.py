# SPDX-License-Identifier: Apache-2.0
"""Routes of all ranks, made in one process: the exchange of counts is replaced by a table.

Shape letters: T tokens, K choices, N rows sent, R rows received, F chunks, C EP ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.row_levels import RowLevels, WholePrices
from ds_moe_ext.core.share import SWEEPS, LevelShare, LocalElseOwner, NearestReplica, Rule, Share
from ds_moe_ext.moe import order
from ds_moe_ext.moe.order import Order, RankCoordinates, counted, keys_of, kind_of
from ds_moe_ext.moe.route import LayerRoute, Restore, one_rank_route, transposed_blocks
from ds_moe_ext.moe.slot_rows import SlotRows
from ds_moe_ext.planning.strategy import Destination
from ds_moe_ext.schedule.task import ChunkRange, Cut, chunk_ranges

CPU = torch.device("cpu")
BIG = 10_000  # more choices than a rank has: names a row by sender and choice


@dataclass(frozen=True, eq=False)
class Layer:
    """What all ranks route: an EP rank a rank."""

    ids_C: tuple[Tensor, ...]  # of each EP rank, [T, K]
    target: Placement
    rule: Rule
    num_chunks: int = 1

    @property
    def share(self) -> Share:
        """By the rows of all EP ranks."""
        kept_C = (ids[ids >= 0] for ids in self.ids_C)
        rows = [kept.bincount(minlength=self.target.num_experts).numpy() for kept in kept_C]
        return self.rule.of_rows(np.stack(rows))

    def routes(self) -> list[LayerRoute]:
        """The route that Order makes on each EP rank."""
        num_experts = self.target.num_experts
        kind = kind_of(3, is_training=True, is_graded=True)
        cuts = [Cut.equal(len(ids), self.num_chunks) for ids in self.ids_C]
        lines = []
        for ids, cut in zip(self.ids_C, cuts):
            key_N = keys_of(ids, cut, num_experts + 1, may_drop=True)
            lines.append(counted(key_N, cut, num_experts, (kind,), may_drop=True))

        def all_gather_counts(own_reported: Tensor, ep_rank: int) -> Tensor:
            assert torch.equal(own_reported, lines[ep_rank])
            return torch.stack(lines)

        with mock.patch.object(order, "all_gather_counts", all_gather_counts):
            return [self._route(ep_rank) for ep_rank in range(self.target.num_ep_ranks)]

    def _route(self, ep_rank: int) -> LayerRoute:
        lines: list[np.ndarray] = []
        stage = Order(
            destination=Destination(self.target, self.rule),
            coordinates=RankCoordinates(ep_rank),
            group=ep_rank,  # all that the replaced exchange wants to know
            capacity_factor=None,
            gate_may_drop=True,
            on_rows=lambda rows_CE, top_k, share: lines.append(rows_CE),
            kind=partial(kind_of, 3, is_training=True, is_graded=True),
        )
        (route,), saved = stage.forward(ChunkRange(0, self.num_chunks), self.ids_C[ep_rank])
        assert saved == ()
        assert len(lines) == 1
        for ids, rows_E in zip(self.ids_C, lines[0]):
            assert rows_E.tolist() == ids[ids >= 0].bincount(minlength=rows_E.size).tolist()
        return route

    def name(self, sender: int, choice: int, chunk_range: ChunkRange) -> int:
        """Of a row: ``choice`` is a position in the chunk range's choices."""
        ids = self.ids_C[sender]
        first = Cut.equal(len(ids), self.num_chunks).first(chunk_range)
        return sender * BIG + first * ids.shape[1] + choice

    def expert(self, name: int) -> int:
        return int(self.ids_C[name // BIG].flatten()[name % BIG])


def travelled(layer: Layer, routes: Sequence[LayerRoute], chunk_range: ChunkRange) -> list[Tensor]:
    """Names of the rows at each EP rank in slot order: what Dispatch does with a real exchange."""
    parcels = []
    for sender, layer_route in enumerate(routes):
        route = layer_route.on(chunk_range)
        names = [layer.name(sender, choice, chunk_range) for choice in route.choice_N.tolist()]
        parcels.append(torch.tensor(names, dtype=torch.int64).split(route.splits.sent_C))
    at_ep_ranks = []
    for ep_rank, layer_route in enumerate(routes):
        route = layer_route.on(chunk_range)
        arrived = (
            parcels[ep_rank] if route.splits.stays else [parcel[ep_rank] for parcel in parcels]
        )
        assert tuple(map(len, arrived)) == route.splits.received_C
        at_ep_ranks.append(route.to_slots(torch.cat(arrived)))
    return at_ep_ranks


def by_owner(*owners: int, num_ep_ranks: int) -> tuple[Placement, Share]:
    placement = Placement.owned_by(np.array(owners), num_ep_ranks)
    return placement, LocalElseOwner(placement, placement)


# By hand.


def test_transposed_blocks() -> None:
    # Blocks A, B / C, D of lengths 1, 2 / 3, 0 lie as A0 B1 B2 C3 C4 C5; wanted: A C B D.
    lengths = np.array([[1, 2], [3, 0]])
    assert transposed_blocks(lengths, (1, 0), CPU).tolist() == [0, 3, 4, 5, 1, 2]
    # The identity, and back.
    assert transposed_blocks(lengths, (0, 1), CPU).tolist() == [0, 1, 2, 3, 4, 5]
    assert transposed_blocks(lengths.T, (1, 0), CPU).tolist() == [0, 4, 5, 1, 2, 3]


def test_two_ep_ranks_by_hand() -> None:
    """EP rank 0 holds experts 1 and 2, EP rank 1 holds 0 and 3; rank 0 has 3 tokens, rank 1 has
    1."""
    target, share = by_owner(1, 0, 0, 1, num_ep_ranks=2)
    #           choices:      0  1     2  3     4  5            0  1
    ids = (torch.tensor([[1, 3], [0, 1], [3, 2]]), torch.tensor([[2, 0]]))
    layer = Layer(ids, target, share)
    routes = layer.routes()
    whole = ChunkRange(0, 1)

    first = routes[0].on(whole)
    # To EP rank 0: expert 1 (choices 0, 3), expert 2 (5). To EP rank 1: expert 0 (2), expert 3 (1,
    # 4).
    assert first.choice_N.tolist() == [0, 3, 5, 2, 1, 4]
    assert first.token_N.tolist() == [0, 1, 2, 1, 0, 2]
    assert (first.splits.sent_C, first.splits.received_C) == ((3, 3), (3, 1))
    # At EP rank 0 arrive, from rank 0: experts 1 1 2; from rank 1: expert 2.
    assert first.slots.on_host() == (2, 2)
    assert first.slots.end_S.tolist() == [2, 4]
    assert first.slots.end_S.dtype == torch.int32
    assert first.slots.num_rows == 4
    assert first.is_full

    second = routes[1].on(whole)
    assert (second.splits.sent_C, second.splits.received_C) == ((1, 1), (3, 1))
    # At EP rank 1 arrive, from rank 0: experts 0 3 3; from rank 1: expert 0, which goes before the
    # 3s.
    assert second.sorting is not None
    assert second.sorting.together.indices(0)[0].tolist() == [0, 3, 1, 2]
    names = [rows.tolist() for rows in travelled(layer, routes, whole)]
    assert names == [[0, 3, 5, BIG], [2, BIG + 1, 1, 4]]


def test_rows_of_experts() -> None:
    """3 tokens in chunks of 2 and 1; experts 0 to 2, -1 is dropped; 77 is reported."""
    ids, cut = torch.tensor([[0, 2], [2, -1], [2, 1]]), Cut.equal(3, 2)
    key_N = keys_of(ids, cut, 4, may_drop=True)
    assert key_N.tolist() == [0, 2, 2, 8, 4 + 2, 4 + 1]
    for _ in range(2):
        assert counted(key_N, cut, 3, (77,), may_drop=True).tolist() == [
            [1, 0, 2, 77],
            [0, 1, 1, 77],
        ]


@given(st.integers(0, 12), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32))
def test_rows_that_are_packed_ahead_are_those_of_the_route(
    num_tokens: int, top_k: int, num_chunks: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    target = Placement.owned_by(rng.permutation(np.arange(6) % 2), 2)  # not in the order of experts
    ids = torch.from_numpy(rng.integers(target.num_experts, size=(num_tokens, top_k)))
    x_TD = torch.arange(2.0 * num_tokens).view(num_tokens, 2)

    def route_of(*, packs: bool) -> LayerRoute:
        stage = Order(
            destination=Destination(target, LocalElseOwner(target, target)),
            coordinates=RankCoordinates(1),
            group=1,
            capacity_factor=None,
            gate_may_drop=False,
            on_rows=lambda rows, top_k, share: None,
            packs=packs,
        )
        gather = "ds_moe_ext.moe.order.all_gather_counts"
        with mock.patch(gather, lambda reported, group: torch.stack([reported] * 2)):
            (route,), _ = stage.forward(ChunkRange(0, num_chunks), ids, x_TD)
        return route

    ready, later = route_of(packs=True), route_of(packs=False)
    cut = Cut.equal(num_tokens, num_chunks)
    for chunk_range in chunk_ranges(num_chunks, num_chunks):
        own_TD = x_TD[cut.first(chunk_range) :][: cut.length(chunk_range)]
        rows_ND = later.on(chunk_range).of_tokens(own_TD)
        assert ready.splits(chunk_range) == later.splits(chunk_range)
        assert torch.equal(ready.sent_rows(chunk_range, torch.empty(0)), rows_ND)
        assert torch.equal(later.sent_rows(chunk_range, own_TD), rows_ND)
        assert torch.equal(ready.on(chunk_range).token_N, later.on(chunk_range).token_N)
        assert torch.equal(ready.on(chunk_range).choice_N, later.on(chunk_range).choice_N)
    assert not ready.ahead.rows, "they are kept by nobody"


# An EP rank.


def one_ep_rank(ids: Tensor, num_experts: int, *, gate_may_drop: bool) -> LayerRoute:
    target = Placement.block(num_experts, 1)
    lines: list[object] = []
    stage = Order(
        destination=Destination(target, LocalElseOwner(target, target)),
        coordinates=RankCoordinates(0),
        group=None,
        capacity_factor=None,
        gate_may_drop=gate_may_drop,
        on_rows=lambda rows, top_k, share: lines.append(rows),
    )
    (route,), _ = stage.forward(ChunkRange(0, 1), ids)
    (rows,) = lines
    counted = np.array([rows.on_host()]) if isinstance(rows, SlotRows) else rows
    assert counted.tolist() == [ids.flatten().bincount(minlength=num_experts).tolist()]
    return route


@given(st.integers(0, 12), st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**32))
def test_one_ep_rank_needs_no_exchange(
    num_tokens: int, top_k: int, num_experts: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(rng.integers(num_experts, size=(num_tokens, top_k)))
    fast = one_ep_rank(ids, num_experts, gate_may_drop=False).on(ChunkRange(0, 1))
    exchanged = one_ep_rank(ids, num_experts, gate_may_drop=True).on(ChunkRange(0, 1))
    alone = one_rank_route(ids, Placement.block(num_experts, 1))
    assert torch.equal(fast.choice_N, alone.by_key_N)
    assert torch.equal(fast.choice_N, exchanged.choice_N)
    assert torch.equal(fast.token_N, exchanged.token_N)
    assert torch.equal(fast.slots.end_S, exchanged.slots.end_S)
    assert fast.slots.on_host() == exchanged.slots.on_host()
    assert fast.slots.num_rows == exchanged.slots.num_rows
    assert (fast.splits.sent_C, fast.splits.received_C) == (
        exchanged.splits.sent_C,
        exchanged.splits.received_C,
    )
    assert fast.is_full and exchanged.is_full
    rows_RD = torch.arange(num_tokens * top_k)[:, None]
    for route in (fast, exchanged):
        assert torch.equal(route.to_slots(rows_RD), rows_RD)
        assert torch.equal(route.to_arrival(rows_RD), rows_RD)


def test_capacity_drops_before_the_exchange() -> None:
    """An EP rank, 4 rows, 2 experts, factor 1: each expert takes 2."""
    target = Placement.block(2, 1)
    lines: list[np.ndarray] = []
    stage = Order(
        destination=Destination(target, LocalElseOwner(target, target)),
        coordinates=RankCoordinates(0),
        group=None,
        capacity_factor=1.0,
        gate_may_drop=True,
        on_rows=lambda rows, top_k, share: lines.append(rows),
    )
    ((route,), _) = stage.forward(ChunkRange(0, 1), torch.tensor([[0], [0], [0], [-1]]))
    assert lines[0].tolist() == [[2, 0]]
    assert route.on(ChunkRange(0, 1)).choice_N.tolist() == [0, 1]


# What is worked out between gate and dispatch.


@pytest.mark.parametrize("rule", ["nearest", "local", "by time"])
@pytest.mark.parametrize("lacks", [False, True])
def test_who_has_all_experts_sends_none_of_its_rows(rule: str, lacks: bool) -> None:
    """Nor do the others: all know that there is nothing to exchange, whatever is routed."""
    holds_EC = np.ones((3, 2), dtype=bool)
    holds_EC[2, 1] = not lacks
    target, node_C = Placement(holds_EC), np.zeros(2, dtype=np.int64)
    rules: dict[str, Rule] = {
        "nearest": NearestReplica(target, node_C),
        "local": LocalElseOwner(target, target),
        "by time": _by_time(target),
    }
    ids_C = torch.tensor([[0, 1], [1, 0], [2, 2]]), torch.tensor([[1, 0]])
    routes = Layer(ids_C, target, rules[rule], num_chunks=2).routes()
    stay = not lacks and rule != "by time"
    for route in routes:
        chunks = ChunkRange(0, 1), ChunkRange(1, 2), ChunkRange(0, 2)
        assert [route.on(chunk_range).splits.stays for chunk_range in chunks] == [stay] * 3
    if stay:
        assert (
            routes[0].on(ChunkRange(0, 2)).splits.sent_C
            == routes[0].on(ChunkRange(0, 2)).splits.received_C
            == (6,)
        )


def _by_time(target: Placement) -> LevelShare:
    prices = WholePrices.of(np.ones(target.num_ep_ranks), 0.0, 0.0)
    levels = RowLevels(target, np.zeros(target.num_ep_ranks, dtype=np.int64), prices)
    predicted_CE = np.ones((target.num_ep_ranks, target.num_experts), dtype=np.int64)
    return LevelShare.planned(levels, predicted_CE, sweeps=SWEEPS)


# Any routing.


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """Ragged ranks, dropped choices, experts with replicas, quotas that are not round."""
    num_ep_ranks, num_experts = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    held_EC = rng.random((num_experts, num_ep_ranks)) < draw(st.sampled_from((0.0, 0.5, 1.0)))
    held_EC[np.arange(num_experts), rng.integers(num_ep_ranks, size=num_experts)] = True
    top_k = draw(st.integers(1, 3))
    lowest = draw(st.sampled_from((0, -1)))
    ids_C = tuple(
        torch.from_numpy(rng.integers(lowest, num_experts, size=(num_tokens, top_k)))
        for num_tokens in draw(
            st.lists(st.integers(0, 14), min_size=num_ep_ranks, max_size=num_ep_ranks)
        )
    )
    target = Placement(held_EC)
    node_C = rng.integers(2, size=num_ep_ranks)
    prices = WholePrices.of(np.ones(num_ep_ranks), *rng.integers(3, size=2).astype(float))
    predicted_CE = rng.integers(9, size=(num_ep_ranks, num_experts))
    levels, sweeps = RowLevels(target, node_C, prices), draw(st.sampled_from((0, SWEEPS)))
    by_time = LevelShare.planned(levels, predicted_CE, sweeps=sweeps)
    rules = NearestReplica(target, node_C), LocalElseOwner(target, target), by_time
    return Layer(ids_C, target, draw(st.sampled_from(rules)), draw(st.sampled_from((1, 2, 6))))


@given(layers(), st.data())
def test_every_row_comes_to_a_slot_of_its_expert_once(layer: Layer, data: st.DataObject) -> None:
    routes = layer.routes()
    degree = data.draw(st.sampled_from([d for d in (1, 2, 3, 6) if layer.num_chunks % d == 0]))
    seen: list[int] = []
    for chunk_range in chunk_ranges(layer.num_chunks, degree):
        at_ep_ranks = travelled(layer, routes, chunk_range)
        for ep_rank, names in enumerate(at_ep_ranks):
            slots = routes[ep_rank].on(chunk_range).slots
            experts = layer.target.experts_of(ep_rank).tolist()
            rows_S = slots.on_host()
            assert sum(rows_S) == slots.num_rows == len(names)
            wanted = [e for e, n in zip(experts, rows_S) for _ in range(n)]
            assert [layer.expert(name) for name in names.tolist()] == wanted
            seen += names.tolist()
    everything = [
        sender * BIG + choice
        for sender, ids in enumerate(layer.ids_C)
        for choice in (ids.flatten() >= 0).nonzero().flatten().tolist()
    ]
    assert sorted(seen) == everything


@given(layers())
def test_rows_go_by_quota_in_the_order_of_tokens(layer: Layer) -> None:
    routes = layer.routes()
    for chunk in range(layer.num_chunks):
        chunk_range = ChunkRange(chunk, chunk + 1)
        at_ep_ranks = [names.tolist() for names in travelled(layer, routes, chunk_range)]
        for sender, ids in enumerate(layer.ids_C):
            cut = Cut.equal(len(ids), layer.num_chunks)
            first = cut.first(chunk_range)
            own = ids[first : first + cut.length(chunk_range)]
            rows_FE = np.zeros((layer.num_chunks, layer.target.num_experts), dtype=np.int64)
            rows_FE[chunk] = own[own >= 0].bincount(minlength=layer.target.num_experts)
            quota_EC = layer.share.rows_from(sender, rows_FE)[chunk]
            for expert in range(layer.target.num_experts):
                mine = [
                    [n for n in names if n // BIG == sender and layer.expert(n) == expert]
                    for names in at_ep_ranks
                ]
                assert [len(names) for names in mine] == quota_EC[expert].tolist()
                # The first holder has the first tokens.
                in_turn = [name for names in mine for name in names]
                assert in_turn == sorted(in_turn)


@given(layers())
def test_where_a_row_goes_does_not_depend_on_the_cut(layer: Layer) -> None:
    routes = layer.routes()
    whole = travelled(layer, routes, ChunkRange(0, layer.num_chunks))
    pieces = [
        travelled(layer, routes, chunk_range)
        for chunk_range in chunk_ranges(layer.num_chunks, layer.num_chunks)
    ]
    for ep_rank, names in enumerate(whole):
        in_pieces = torch.cat([piece[ep_rank] for piece in pieces])
        assert sorted(names.tolist()) == sorted(in_pieces.tolist())


@given(layers())
def test_back_is_the_inverse(layer: Layer) -> None:
    routes = layer.routes()
    for chunk_range in {ChunkRange(0, layer.num_chunks), ChunkRange(0, 1)}:
        for ep_rank, layer_route in enumerate(routes):
            route = layer_route.on(chunk_range)
            assert layer_route.on(chunk_range) is route  # made once
            rows = torch.arange(sum(route.splits.received_C))[:, None]
            assert torch.equal(route.to_arrival(route.to_slots(rows)), rows)
            assert torch.equal(route.to_slots(route.to_arrival(rows)), rows)
            # Rows back at their tokens: every choice has its own row, or zeros.
            ids = layer.ids_C[ep_rank]
            cut = Cut.equal(len(ids), layer.num_chunks)
            names_ND = route.choice_N[:, None] + 1
            expected = (
                torch.arange(cut.length(chunk_range) * ids.shape[1]).view(-1, ids.shape[1]) + 1
            )
            first = cut.first(chunk_range)
            is_dropped = ids[first : first + cut.length(chunk_range)] < 0
            spread = route.spread(names_ND)[..., 0]
            assert torch.equal(spread, expected.masked_fill(is_dropped, 0))


@given(layers(), st.data())
def test_rows_of_one_cut_from_rows_of_another(layer: Layer, data: st.DataObject) -> None:
    routes = layer.routes()
    degrees = st.sampled_from([d for d in (1, 2, 3, 6) if layer.num_chunks % d == 0])
    before, after = data.draw(degrees), data.draw(degrees)
    had = {
        chunk_range: travelled(layer, routes, chunk_range)
        for chunk_range in chunk_ranges(layer.num_chunks, before)
    }
    for chunk_range in chunk_ranges(layer.num_chunks, after):
        wanted = travelled(layer, routes, chunk_range)
        for ep_rank, layer_route in enumerate(routes):
            pieces = [
                (s, rows[ep_rank][:, None]) for s, rows in had.items() if s.overlaps(chunk_range)
            ]
            assert torch.equal(layer_route.rows_of(chunk_range, pieces)[:, 0], wanted[ep_rank])


# I-Order.


def routed(ids: Tensor, num_chunks: int = 1) -> LayerRoute:
    """The route on the first of two EP ranks."""
    layer = Layer((ids, ids[:2]), *by_owner(0, 1, 1, 0, 0, num_ep_ranks=2), num_chunks)
    return layer.routes()[0]


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def some_ids(num_tokens: int, top_k: int, lowest: int) -> Tensor:
    generator = torch.Generator().manual_seed(top_k)
    return torch.randint(lowest, 5, (num_tokens, top_k), generator=generator)


@pytest.mark.parametrize("lowest", [0, -1], ids=["all travel", "some dropped"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_restore_is_the_weighted_sum(top_k: int, lowest: int) -> None:
    num_tokens, width = 6, 4
    layer_route = routed(some_ids(num_tokens, top_k, lowest))
    chunk_range = ChunkRange(0, 1)
    route = layer_route.on(chunk_range)
    assert route.is_full == (lowest == 0)
    rows_ND = rand(len(route.choice_N), width).requires_grad_()
    score_TK = rand(num_tokens, top_k).requires_grad_()
    grad_TD = rand(num_tokens, width)
    # Each row to its token, weighed by its own score.
    scores_N = score_TK.flatten()[route.choice_N]
    zeros_TD = torch.zeros(num_tokens, width, dtype=torch.float64)
    expected_TD = zeros_TD.index_add(0, route.token_N, rows_ND * scores_N[:, None])
    expected_TD.backward(grad_TD)

    stage = Restore()
    with torch.no_grad():
        (y_TD,), saved = stage.forward(
            chunk_range, rows_ND.detach(), score_TK.detach(), layer_route
        )
        grad_ND, grad_TK = stage.backward(chunk_range, saved, grad_TD)
    assert torch.allclose(y_TD, expected_TD, rtol=1e-12, atol=1e-12)
    assert rows_ND.grad is not None
    assert score_TK.grad is not None
    assert torch.allclose(grad_ND, rows_ND.grad, rtol=1e-12, atol=1e-12)
    assert torch.allclose(grad_TK, score_TK.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("score_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lowest", [0, -1], ids=["all travel", "some dropped"])
def test_restore_keeps_the_precision_of_its_reads(
    lowest: int, dtype: torch.dtype, score_dtype: torch.dtype
) -> None:
    layer_route = routed(some_ids(8, 2, lowest))
    chunk_range = ChunkRange(0, 1)
    rows_ND = rand(len(layer_route.on(chunk_range).choice_N), 4, dtype=dtype)
    score_TK, grad_TD = rand(8, 2, dtype=score_dtype), rand(8, 4, dtype=dtype)
    exact = [t.double() for t in (rows_ND, score_TK, grad_TD)]
    stage = Restore()
    (y_TD,), saved = stage.forward(chunk_range, rows_ND, score_TK, layer_route)
    grads = stage.backward(chunk_range, saved, grad_TD)
    (exact_y_TD,), saved = stage.forward(chunk_range, exact[0], exact[1], layer_route)
    exact_grads = stage.backward(chunk_range, saved, exact[2])
    assert [t.dtype for t in (y_TD, *grads)] == [dtype, dtype, score_dtype]
    low = torch.bfloat16 in (dtype, score_dtype)
    for ours, theirs in zip((y_TD, *grads), (exact_y_TD, *exact_grads)):
        assert torch.allclose(ours.double(), theirs, rtol=0, atol=0.05 if low else 1e-5)


@pytest.mark.parametrize("lowest", [0, -1], ids=["all travel", "some dropped"])
def test_restore_cut_anew(lowest: int) -> None:
    """Forward on chunks 0-1 and 2-3 of 4, backward on 1-2: as if forward had been there."""
    ids = some_ids(9, 2, lowest)
    layer_route = routed(ids, num_chunks=4)
    stage, cut = Restore(), layer_route.cut
    assert cut.bounds == (0, 3, 5, 7, 9)
    row_of_choice, score_TK = rand(18, 3), rand(9, 2)

    def saved_on(chunk_range: ChunkRange) -> tuple[object, ...]:
        first, stop = cut.first(chunk_range), cut.first(chunk_range) + cut.length(chunk_range)
        rows_ND = row_of_choice[layer_route.on(chunk_range).choice_N + 2 * first]
        return stage.forward(chunk_range, rows_ND, score_TK[first:stop], layer_route)[1]

    wanted = ChunkRange(1, 3)
    grad_TD = rand(cut.length(wanted), 3)
    recut = stage.recut(
        wanted, [(chunk_range, saved_on(chunk_range)) for chunk_range in chunk_ranges(4, 2)]
    )
    ours = stage.backward(wanted, recut, grad_TD.clone())
    theirs = stage.backward(wanted, saved_on(wanted), grad_TD.clone())
    for our, their in zip(ours, theirs):
        assert torch.equal(our, their)
