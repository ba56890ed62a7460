# SPDX-License-Identifier: Apache-2.0
"""The cost model: traffic by hand and against the shares, seconds by hand. Pure.

Shape letters: L layers, E experts, C EP ranks, N nodes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import NearestReplica
from ds_moe_ext.core.transfer import TransferSize, gather_rounds
from ds_moe_ext.planning.exchange_costs import BARE, ExchangeFit, LinkPrices, exchange_fit_of
from ds_moe_ext.planning.prices import PARTS, Prices, nearest_replica_flow, step_seconds
from tests.planners.plainly import NODE_C, OWNER, PROPERTY, ROWS_CE, small_models

PRICES = Prices(
    row_s=1e-3, row_bytes=100.0, copy_s=0.0, inter_bytes_per_s=1e4, intra_bytes_per_s=1e5
)


def test_seconds_by_hand() -> None:
    """Plain expert parallelism on the golden rows: 50 rows at the busiest EP rank; 30 enter node
    0."""
    traffic = nearest_replica_flow([OWNER], [ROWS_CE], NODE_C)
    assert traffic.computed_LC.tolist() == [[50, 10, 28, 12]]
    assert traffic.in_LN.tolist() == [[30, 20]]
    assert traffic.out_LN.tolist() == [[20, 30]]
    # EP rank 0 keeps 10 + 3 of its 25 rows, and computes 50.
    assert traffic.sent_LC[0, 0] == 12
    assert traffic.received_LC[0, 0] == 37
    # 50 ms, and 4 trips of 30 rows of 100 bytes at 10 kB/s: 0.3 s each. (37 at 100 kB/s: 0.037 s.)
    seconds = step_seconds([OWNER], [ROWS_CE], prices=PRICES, node_C=NODE_C)
    assert seconds.tolist() == pytest.approx([0.05 + 4 * 0.3])
    # On one node the EP ranks' own links are the slowest.
    seconds = step_seconds([OWNER], [ROWS_CE], prices=PRICES, node_C=np.zeros(4, dtype=np.int64))
    assert seconds.tolist() == pytest.approx([0.05 + 4 * 0.037])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("row_s", -1.0),
        ("row_bytes", float("nan")),
        ("copy_s", float("inf")),
        ("inter_bytes_per_s", 0.0),
        ("intra_bytes_per_s", -1.0),
    ],
)
def test_costs_that_no_cluster_has(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        Prices(**{**vars(PRICES), field: value})


@st.composite
def models(
    draw: st.DrawFn,
) -> tuple[tuple[Placement, ...], list[np.ndarray], np.ndarray]:
    """Targets with replicas, rows of each layer, nodes."""
    owners, sizes, node_C, rng = draw(small_models())
    targets = tuple(owner.with_replicas(rng.random(owner.holds_EC.shape) < 0.3) for owner in owners)
    rows = [rng.integers(0, 500, (len(node_C), size)) for size in sizes]
    return targets, rows, node_C


@PROPERTY
@given(models())
def test_traffic_is_that_of_the_share(
    model: tuple[tuple[Placement, ...], list[np.ndarray], np.ndarray],
) -> None:
    """But for remainders: exactly what leaves, what comes within a row for each sender."""
    targets, rows, node_C = model
    traffic = nearest_replica_flow(targets, rows, node_C)
    nodes = np.unique(node_C)
    for layer, (target, rows_CE) in enumerate(zip(targets, rows)):
        share, ep_ranks = NearestReplica(target, node_C), range(len(node_C))
        moved_CEC = np.stack([share.rows_from(c, rows_CE[c][None])[0] for c in ep_ranks])
        moved_CC = moved_CEC.sum(axis=1)
        kept_C = moved_CC.diagonal()
        assert traffic.sent_LC[layer].tolist() == (moved_CC.sum(axis=1) - kept_C).tolist()
        slack = len(node_C) * target.num_experts
        assert np.allclose(traffic.computed_LC[layer], moved_CC.sum(axis=0), rtol=0, atol=slack)
        far_NN = np.array(
            [[moved_CC[node_C == a][:, node_C == b].sum() for b in nodes] for a in nodes]
        )
        np.fill_diagonal(far_NN, 0)
        assert traffic.out_LN[layer].tolist() == far_NN.sum(axis=1).tolist()
        assert np.allclose(traffic.in_LN[layer], far_NN.sum(axis=0), rtol=0, atol=slack)
        # What comes is what leaves, but for the rounding.
        lost = traffic.sent_LC[layer].sum() - traffic.received_LC[layer].sum()
        assert 0 <= lost <= 2 * target.holds_EC.sum() / PARTS


# What links carry: rows and copies worked by hand, and lines through what was found. Pure.


LINKS = LinkPrices(near_bytes_per_s=10.0, far_bytes_per_s=2.0, node_bytes_per_s=4.0)
"""Each EP rank has a card of its own."""


def test_an_exchange_takes_as_long_as_its_busiest_link() -> None:
    near_CC, far_CC = np.zeros((2, 4, 4))
    near_CC[0, 1], near_CC[2, 2] = 50, 999  # what stays does not travel
    assert LINKS.link_s(near_CC, NODE_C) == 5
    far_CC[0, 2], far_CC[0, 3] = 6, 4  # EP rank 0 sends 10
    assert LINKS.link_s(far_CC, NODE_C) == 5
    far_CC[1, 2] = 4  # EP rank 2 receives 10, and node 0 sends 14
    assert LINKS.link_s(far_CC, NODE_C) == 5
    shared = replace(LINKS, node_bytes_per_s=2.0)
    assert shared.link_s(far_CC, NODE_C) == 7
    assert LINKS.link_s(near_CC + far_CC, NODE_C) == 5


def test_what_layers_add() -> None:
    bytes_CC = np.zeros((4, 4))
    bytes_CC[0, 2] = 8  # 4 s
    links = replace(LINKS, start_s=0.5, exchange_fit=ExchangeFit(start_s=2.0, factor=3.0))
    assert links.exchange_s(bytes_CC, NODE_C) == 2 + 3 * (0.5 + 4)
    assert links.exchange_s(bytes_CC, NODE_C, num_chunks=4) == 2 + 3 * (4 * 0.5 + 4)
    assert links.exchange_start_s == 2 + 3 * 0.5


def replicas_s(holds: list[list[int]], links: LinkPrices = LINKS) -> list[float]:
    """Of experts of 20 bytes, the first at the owner in EP rank 0, the second in EP rank 1, and so
    on."""
    owners = Placement.block(4, 4)
    target = owners.with_replicas(np.array(holds, dtype=bool))
    transfers = gather_rounds(owners, target, NODE_C, TransferSize())
    seconds: list[float] = links.replicas_s_C(transfers, 20.0).tolist()
    return seconds


NOWHERE = [0, 0, 0, 0]


def test_replicas_of_one_owner_follow_each_other() -> None:
    """2 s within the node, 10 s out of it; who takes no part is through at once."""
    assert replicas_s([[0, 1, 0, 0], *[NOWHERE] * 3]) == [2, 2, 0, 0]
    assert replicas_s([[0, 0, 1, 0], *[NOWHERE] * 3]) == [10, 0, 10, 0]
    # Out of the node and in it, at once; what is passed on in the other node comes behind.
    assert replicas_s([[0, 1, 1, 1], *[NOWHERE] * 3]) == [10, 2, 12, 12]
    # Two experts of two owners leave a node by two cards; or by one that these share.
    both = [[0, 0, 1, 0], [0, 0, 0, 1], NOWHERE, NOWHERE]
    assert replicas_s(both) == [10, 10, 10, 10]
    assert replicas_s(both, replace(LINKS, node_bytes_per_s=2.0)) == [20, 20, 20, 20]
    assert replicas_s(both, replace(LINKS, start_s=1.0, copy_factor=2.0)) == [22, 22, 22, 22]
    assert replicas_s([NOWHERE] * 4) == [0, 0, 0, 0]


def test_segments_share_what_an_expert_weighs() -> None:
    """Three nodes of an EP rank, along a chain of four segments: the last EP rank has the first of
    them after two hops, and then one a hop."""
    owners = Placement.block(3, 3)
    everywhere = owners.with_replicas(np.array([[1, 1, 1], [0, 0, 0], [0, 0, 0]], dtype=bool))
    transfer_size = TransferSize(expert_bytes=16 * 80, start_bytes=80)
    transfers = gather_rounds(owners, everywhere, np.arange(3), transfer_size)
    (num_segments,) = set(transfers.num_segments_N.tolist())
    assert num_segments > 1
    links = LinkPrices(near_bytes_per_s=1.0, far_bytes_per_s=2.0, node_bytes_per_s=2.0)
    hop_s = 20.0 / num_segments / 2.0
    found = sorted(links.replicas_s_C(transfers, 20.0).tolist())
    assert found == pytest.approx([n * hop_s for n in (num_segments, *[num_segments + 1] * 2)])


SECONDS = st.floats(1e-3, 10.0)


@given(SECONDS, st.floats(0.2, 5.0), st.lists(SECONDS, min_size=2, unique=True))
def test_a_line_is_found_again(start_s: float, factor: float, predicted_N: list[float]) -> None:
    exchange_fit = exchange_fit_of(
        predicted_N, [start_s + factor * stated for stated in predicted_N]
    )
    if max(predicted_N) >= 2 * min(predicted_N):
        assert (exchange_fit.start_s, exchange_fit.factor) == pytest.approx(
            (start_s, factor), rel=1e-5, abs=1e-6
        )
    else:
        assert exchange_fit.factor == 1


@pytest.mark.parametrize(
    ("stated", "found", "exchange_fit"),
    [
        ([], [], BARE),
        ([0.0, 1.0], [1.0, 0.0], BARE),  # nothing was stated, or found
        ([2.0, 2.5], [3.0, 4.0], ExchangeFit(1.25)),
        ([2.0, 2.5], [1.0, 2.0], BARE),  # no start is below zero
        (
            [1.0, 4.0],
            [1.0, 8.0],
            ExchangeFit(0.0, (1 + 0.5) / (1 + 0.25)),
        ),  # a line from below zero
        ([1.0, 4.0], [9.0, 5.0], ExchangeFit(4.5)),  # that falls
    ],
)
def test_trips_worked_by_hand(
    stated: list[float], found: list[float], exchange_fit: ExchangeFit
) -> None:
    assert exchange_fit_of(stated, found) == pytest.approx(exchange_fit)


def test_costs_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"factor is -1\.0"):
        replace(LINKS, exchange_fit=ExchangeFit(0.0, -1.0))
    with pytest.raises(ValueError, match="far_bytes_per_s is 0"):
        replace(LINKS, far_bytes_per_s=0.0)
