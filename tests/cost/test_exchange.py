# SPDX-License-Identifier: Apache-2.0
"""Ways between EP ranks: their messages and bytes as itineraries have them, their lines, the
choice.

Shape letters: V nodes, G ranks of a node, P ranks that exchange rows.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_moe_ext.core.all_to_all import Itinerary, by_leaders, by_places, direct
from ds_moe_ext.core.hardware import Collectives, Device, Hardware, Link
from ds_moe_ext.core.layout import Nodes, Reach
from ds_moe_ext.planning.exchange_costs import (
    BY_COST,
    WAYS,
    Hops,
    Links,
    Load,
    Way,
    described_links,
    hops_of,
    line_of_way,
)
from ds_moe_ext.planning.layer_costs import LayerCosts
from ds_moe_ext.planning.layer_pipelines import Measured, MeasuredLayer, Piped, plan_pipelines
from ds_moe_ext.planning.prices import AllReduce, Line, LinearCost
from ds_moe_ext.schedule.orders import PIPELINES

PLANNERS = {Way.DIRECT: direct, Way.BY_LEADERS: by_leaders, Way.BY_PLACES: by_places}


def test_names() -> None:
    assert list(WAYS) == ["direct", "1dh", "2dh", "deepep"]


def test_loads_of_three_nodes_of_four() -> None:
    third = pytest.approx(2 / 3)
    assert hops_of(Way.DIRECT, 3, 4) == Hops((Load(3, 0.25),), (Load(8, third),))
    assert hops_of(Way.BY_PLACES, 3, 4) == Hops((Load(3, 0.75),), (Load(2, third),))
    assert hops_of(Way.BY_LEADERS, 3, 4) == Hops(
        (Load(3, 3.0), Load(3, 3.0)), (Load(2, pytest.approx(8 / 3)),)
    )


@pytest.mark.parametrize(("num_nodes", "node_size"), [(2, 2), (3, 4), (4, 2)])
@pytest.mark.parametrize("way", BY_COST)
def test_loads_are_those_of_itineraries(way: Way, num_nodes: int, node_size: int) -> None:
    nodes = Nodes(np.arange(num_nodes).repeat(node_size))
    num_ranks = nodes.node_P.size
    counts_PP = np.ones((num_ranks, num_ranks), dtype=np.int64)
    plans = [PLANNERS[way](nodes, counts_PP, rank) for rank in range(num_ranks)]
    busiest = max(plans, key=lambda plan: sum(out for out, _ in loads(plan, nodes, within=False)))
    hops = hops_of(way, num_nodes, node_size)
    assert loads(busiest, nodes, within=True) == [each(load, num_ranks) for load in hops.within]
    assert loads(busiest, nodes, within=False) == [each(load, num_ranks) for load in hops.between]


def each(load: Load, num_ranks: int) -> tuple[int, object]:
    return load.messages, pytest.approx(load.bytes_part * num_ranks)


def loads(itinerary: Itinerary, nodes: Nodes, *, within: bool) -> list[tuple[int, int]]:
    """Messages and rows of a rank that gives one row to each, hop by hop."""
    own, found = nodes.node_P[itinerary.rank], []
    for hop in itinerary.hops:
        if hop.reach is not Reach.ALL and (hop.reach is Reach.WITHIN) != within:
            continue
        others = [
            number
            for number, member in enumerate(hop.member_C)
            if member != itinerary.rank and (nodes.node_P[member] == own) == within
        ]
        ways = [[rows_C[number] for number in others] for rows_C in (hop.sent_C, hop.received_C)]
        rows = max(ways, key=sum)
        found.append((sum(count > 0 for count in rows), sum(rows)))
    return found


LINKS = Links(
    within=Line(alpha_s=3e-6, beta_s=1.5e-9),  # 1 us a message and 2 ns a byte that leaves
    between=Line(alpha_s=40e-6, beta_s=20e-9),  # 20 us a message and 30 ns a byte
    num_nodes=3,
    node_size=4,
)


def test_lines_by_hand() -> None:
    lines = {way: line_of_way(way, LINKS) for way in BY_COST}
    # 3 messages in the node and 8 to others; a quarter and two thirds of the bytes.
    assert lines[Way.DIRECT].alpha_s == pytest.approx(3e-6 + 160e-6)
    assert lines[Way.DIRECT].beta_s == pytest.approx(0.25 * 2e-9 + 2 / 3 * 30e-9)
    # 3 and 2; three quarters and two thirds.
    assert lines[Way.BY_PLACES].alpha_s == pytest.approx(3e-6 + 40e-6)
    assert lines[Way.BY_PLACES].beta_s == pytest.approx(0.75 * 2e-9 + 2 / 3 * 30e-9)
    # Twice 3 and 2; twice what three others have. A leader has the node's way out to itself.
    assert lines[Way.BY_LEADERS].alpha_s == pytest.approx(6e-6 + 40e-6)
    assert lines[Way.BY_LEADERS].beta_s == pytest.approx(6 * 2e-9 + 2 / 3 * 30e-9)


SECONDS = st.floats(1e-9, 1e-3)
SIZES = st.integers(2, 16)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.builds(Line, alpha_s=SECONDS, beta_s=SECONDS), SECONDS, SECONDS, SIZES, SIZES)
def test_where_relays_pay(
    within: Line, start_s: float, byte_s: float, num_nodes: int, node_size: int
) -> None:
    """2DH has fewer starts and more bytes: it pays up to one size, and longer with slower starts.
    1DH never does better than 2DH."""
    between = Line(alpha_s=start_s * (num_nodes - 1), beta_s=byte_s)
    links = Links(within, between, num_nodes, node_size)
    lines = {way: line_of_way(way, links) for way in BY_COST}
    direct_line, places, leaders = (lines[way] for way in BY_COST[:1] + BY_COST[:0:-1])
    saved_s = (num_nodes - 1) * (node_size - 1) * start_s
    carried_s = within.beta_s * (1 - 1 / num_nodes)  # of a byte
    assert direct_line.alpha_s - places.alpha_s == pytest.approx(saved_s, rel=1e-6)
    assert places.beta_s - direct_line.beta_s == pytest.approx(
        carried_s, rel=1e-6, abs=1e-9 * byte_s
    )
    assert leaders.alpha_s >= places.alpha_s
    assert leaders.beta_s >= places.beta_s


@pytest.mark.parametrize(("num_nodes", "node_size"), [(1, 4), (4, 1)])
def test_flat_nodes_have_no_links(num_nodes: int, node_size: int) -> None:
    with pytest.raises(ValueError, match=f"{num_nodes} nodes of {node_size} ranks .*at least 2"):
        Links(Line(), Line(), num_nodes, node_size)


# From a hardware file.


def cluster(**fields: object) -> Hardware:
    return Hardware(
        name="made up",
        source="a test",
        num_nodes=4,
        ranks_per_node=8,
        device=Device(name="none"),
        inter=Link(bytes_per_s=1e9, latency_s=2e-5),
        **fields,  # type: ignore[arg-type]
    )


def test_links_of_a_file() -> None:
    hardware = cluster(
        intra=Link(bytes_per_s=1e11),
        intra_collectives=Collectives(all_to_all=Link(bytes_per_s=2e11, latency_s=1e-6)),
    )
    links = described_links(hardware, 4, 4, etp_size=2)
    assert (links.num_nodes, links.node_size) == (4, 4)
    assert links.within == Line(alpha_s=1e-6, beta_s=1 / 2e11)  # as measured
    # A node's link carries three quarters of what its eight ranks give.
    assert links.between.alpha_s == 2e-5
    assert links.between.beta_s == pytest.approx(8 * 3 / 4 / 1e9)


def test_what_a_file_lacks() -> None:
    with pytest.raises(ValueError, match=r"'made up' does not say what all_to_all .*'intra'"):
        described_links(cluster(), 4, 8)


# The choice.

GATHER = LinearCost(alpha_s=0.1, beta_s=1e-3, n=1000)


def planned(start_s: float, byte_s: float, *, degrees: tuple[int | None, int | None]) -> Piped:
    """Of a layer whose rows may go directly, for a second and a ms a byte, or by 2DH."""
    exchanges = {
        Way.DIRECT: LinearCost(alpha_s=1.0, beta_s=1e-3, n=4000),
        Way.BY_PLACES: LinearCost(alpha_s=start_s, beta_s=byte_s, n=4000),
    }
    costs = LayerCosts(
        all_to_all=exchanges[Way.DIRECT],
        all_gather=GATHER,
        reduce_scatter=GATHER,
        expert=LinearCost(alpha_s=0.3, beta_s=1e-3, n=5000),
    )
    layer = MeasuredLayer(costs, 0.0, 0, exchanges)
    measured = Measured((layer,), 0, AllReduce(0.5, 1e-3), element_bytes=4)
    (piped,) = plan_pipelines(PIPELINES["fsmoe"], measured, max_degree=8, degrees=degrees)
    return piped


def test_the_fastest_way_is_taken() -> None:
    assert planned(0.5, 1e-3, degrees=(1, 1)).way is Way.BY_PLACES
    assert planned(2.0, 1e-3, degrees=(1, 1)).way is Way.DIRECT
    assert planned(1.0, 1e-3, degrees=(1, 1)).way is Way.DIRECT, "of equals the first"
    assert planned(0.5, 1.2e-3, degrees=(1, 1)).way is Way.DIRECT


def test_more_chunks_want_fewer_starts() -> None:
    """0.2 s a start and 4.8 s of bytes: slower in one piece, and faster in four."""
    assert planned(0.3, 1.2e-3, degrees=(1, 1)).way is Way.DIRECT
    assert planned(0.3, 1.2e-3, degrees=(4, 4)).way is Way.BY_PLACES


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.floats(0, 2), st.floats(1e-4, 2e-3), st.floats(0.1, 1))
def test_a_cheaper_way_is_taken_no_less(start_s: float, byte_s: float, factor: float) -> None:
    way = planned(start_s, byte_s, degrees=(None, None)).way
    if start_s >= 1.0 and byte_s >= 1e-3:
        assert way is Way.DIRECT
    if way is Way.BY_PLACES:
        cheaper = planned(factor * start_s, factor * byte_s, degrees=(None, None))
        assert cheaper.way is Way.BY_PLACES
