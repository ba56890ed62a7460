# SPDX-License-Identifier: Apache-2.0
"""What links carry: rows and copies worked by hand, and lines through what was found. Pure.

Shape letters: C cells, E experts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.transfer import Cargo, gather_rounds
from ds_moe_ext.planning.exchange_costs import BARE, LinkPrices, Trip, trip_through

NODE_C = np.array([0, 0, 1, 1])
LINKS = LinkPrices(near_bytes_per_s=10.0, far_bytes_per_s=2.0, node_bytes_per_s=4.0)
"""Each cell has a card of its own."""


def test_an_exchange_takes_as_long_as_its_busiest_link() -> None:
    near_CC, far_CC = np.zeros((2, 4, 4))
    near_CC[0, 1], near_CC[2, 2] = 50, 999  # what stays does not travel
    assert LINKS.link_s(near_CC, NODE_C) == 5
    far_CC[0, 2], far_CC[0, 3] = 6, 4  # cell 0 sends 10
    assert LINKS.link_s(far_CC, NODE_C) == 5
    far_CC[1, 2] = 4  # cell 2 receives 10, and node 0 sends 14
    assert LINKS.link_s(far_CC, NODE_C) == 5
    shared = replace(LINKS, node_bytes_per_s=2.0)
    assert shared.link_s(far_CC, NODE_C) == 7
    assert LINKS.link_s(near_CC + far_CC, NODE_C) == 5


def test_what_layers_add() -> None:
    bytes_CC = np.zeros((4, 4))
    bytes_CC[0, 2] = 8  # 4 s
    links = replace(LINKS, start_s=0.5, trip=Trip(start_s=2.0, factor=3.0))
    assert links.exchange_s(bytes_CC, NODE_C) == 2 + 3 * (0.5 + 4)
    assert links.exchange_s(bytes_CC, NODE_C, num_chunks=4) == 2 + 3 * (4 * 0.5 + 4)
    assert links.exchange_start_s == 2 + 3 * 0.5


def copies_s(holds: list[list[int]], links: LinkPrices = LINKS) -> list[float]:
    """Of experts of 20 bytes, the first at home in cell 0, the second in cell 1, and so on."""
    homes = Placement.block(4, 4)
    target = homes.with_copies(np.array(holds, dtype=bool))
    transfers = gather_rounds(homes, target, NODE_C, Cargo())
    seconds: list[float] = links.copies_s_C(transfers, 20.0).tolist()
    return seconds


NOWHERE = [0, 0, 0, 0]


def test_copies_of_one_home_follow_each_other() -> None:
    """2 s within the node, 10 s out of it; who takes no part is through at once."""
    assert copies_s([[0, 1, 0, 0], *[NOWHERE] * 3]) == [2, 2, 0, 0]
    assert copies_s([[0, 0, 1, 0], *[NOWHERE] * 3]) == [10, 0, 10, 0]
    # Out of the node and in it, at once; what is passed on in the other node comes behind.
    assert copies_s([[0, 1, 1, 1], *[NOWHERE] * 3]) == [10, 2, 12, 12]
    # Two experts of two homes leave a node by two cards; or by one that these share.
    both = [[0, 0, 1, 0], [0, 0, 0, 1], NOWHERE, NOWHERE]
    assert copies_s(both) == [10, 10, 10, 10]
    assert copies_s(both, replace(LINKS, node_bytes_per_s=2.0)) == [20, 20, 20, 20]
    assert copies_s(both, replace(LINKS, start_s=1.0, copy_factor=2.0)) == [22, 22, 22, 22]
    assert copies_s([NOWHERE] * 4) == [0, 0, 0, 0]


def test_segments_share_what_an_expert_weighs() -> None:
    """Three nodes of one cell, along a chain of four segments: the last cell has the first of them
    after two hops, and then one a hop."""
    homes = Placement.block(3, 3)
    everywhere = homes.with_copies(np.array([[1, 1, 1], [0, 0, 0], [0, 0, 0]], dtype=bool))
    cargo = Cargo(expert_bytes=16 * 80, start_bytes=80)
    transfers = gather_rounds(homes, everywhere, np.arange(3), cargo)
    (num_segments,) = set(transfers.num_segments_N.tolist())
    assert num_segments > 1
    links = LinkPrices(near_bytes_per_s=1.0, far_bytes_per_s=2.0, node_bytes_per_s=2.0)
    hop_s = 20.0 / num_segments / 2.0
    found = sorted(links.copies_s_C(transfers, 20.0).tolist())
    assert found == pytest.approx([n * hop_s for n in (num_segments, *[num_segments + 1] * 2)])


SECONDS = st.floats(1e-3, 10.0)


@given(SECONDS, st.floats(0.2, 5.0), st.lists(SECONDS, min_size=2, unique=True))
def test_a_line_is_found_again(start_s: float, factor: float, said_N: list[float]) -> None:
    trip = trip_through(said_N, [start_s + factor * said for said in said_N])
    if max(said_N) >= 2 * min(said_N):
        assert (trip.start_s, trip.factor) == pytest.approx((start_s, factor), rel=1e-5, abs=1e-6)
    else:
        assert trip.factor == 1


@pytest.mark.parametrize(
    ("said", "found", "trip"),
    [
        ([], [], BARE),
        ([0.0, 1.0], [1.0, 0.0], BARE),  # nothing was said, or found
        ([2.0, 2.5], [3.0, 4.0], Trip(1.25)),
        ([2.0, 2.5], [1.0, 2.0], BARE),  # no start is below zero
        ([1.0, 4.0], [1.0, 8.0], Trip(0.0, (1 + 0.5) / (1 + 0.25))),  # a line from below zero
        ([1.0, 4.0], [9.0, 5.0], Trip(4.5)),  # that falls
    ],
)
def test_trips_worked_by_hand(said: list[float], found: list[float], trip: Trip) -> None:
    assert trip_through(said, found) == pytest.approx(trip)


def test_costs_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"factor is -1\.0"):
        replace(LINKS, trip=Trip(0.0, -1.0))
    with pytest.raises(ValueError, match="far_bytes_per_s is 0"):
        replace(LINKS, far_bytes_per_s=0.0)
