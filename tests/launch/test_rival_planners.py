# SPDX-License-Identifier: Apache-2.0
"""Policies of others, written anew: what their descriptions promise, and cases by hand.

Shape letters: C ranks, E experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from planners_table import Policy, on_own_node, over_all
from rival_planners import (
    A100,
    Layer,
    Layout,
    PricedCluster,
    balanced_slots,
    even_slots,
    evenly_on_node,
    exchanged,
    expanded,
    in_bins,
    in_one_shot,
    laid_out,
    overflow,
    packed,
    placed,
    quotas,
    replicas_by_rows,
    replicated,
    sent,
    spilled,
    transported,
)

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.planning.load_models import zipf_loads
from ds_moe_ext.planning.prices import RowPrices

LOADS = zipf_loads((20, 1, 8, 16), rows=500, skew=1.2)[:, 0]
"""Rows of 8 ranks for 16 experts, 20 layers."""
NODE_C = np.repeat([0, 1], 4)
OWNER_E = np.arange(16) // 2


def test_eplb_by_hand() -> None:
    """Replicas of 30 rows; ranks take 30, 30, 30, 10, 10, 10 in turn, each where there is least."""
    rows_E = np.array([90, 10, 10, 10])
    assert replicated(rows_E, 6).tolist() == [3, 1, 1, 1]
    assert packed(np.array([30, 30, 30, 10, 10, 10]), 2).tolist() == [0, 1, 0, 1, 1, 0]
    slots_EC = balanced_slots(rows_E, 2, 3)
    assert slots_EC.tolist() == [[2, 1], [0, 1], [0, 1], [1, 0]]


def test_smartmoe_by_hand() -> None:
    """90 and 10 stay together with the least, as do 60 and 40; nothing moves where nothing is
    gained."""
    owner_E = np.array([0, 0, 1, 1])
    assert exchanged(np.array([90, 60, 40, 10]), owner_E, 2).tolist() == [0, 1, 1, 0]
    assert exchanged(np.array([90, 10, 60, 40]), owner_E, 2).tolist() == [0, 0, 1, 1]
    for rows_CE in LOADS:
        rows_E = rows_CE.sum(axis=0)
        rank_E = exchanged(rows_E, OWNER_E, 8)
        assert (np.bincount(rank_E, minlength=8) == 2).all()
        after, before = (np.bincount(each_E, rows_E, 8).max() for each_E in (rank_E, OWNER_E))
        assert after <= before


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_flexmoe_keeps_every_expert_and_is_no_slower(slots: int) -> None:
    def seconds(sent_CC: np.ndarray) -> float:
        return float(sent_CC.sum(axis=0).max())

    first_EC = even_slots(16, slots, NODE_C)
    assert (first_EC.sum(axis=0) == slots).all()
    gains = []
    for rows_CE in LOADS:
        slots_EC = expanded(rows_CE, first_EC, NODE_C, seconds)
        assert (slots_EC.sum(axis=0) == slots).all()
        assert (slots_EC.sum(axis=1) >= 1).all() and (slots_EC >= 0).all()
        before, after = (seconds(sent(rows_CE, each, NODE_C)) for each in (first_EC, slots_EC))
        gains.append(before / after)
    assert min(gains) >= 1
    assert (max(gains) > 1.2) == (slots > 2)
    with pytest.raises(ValueError, match="16 experts do not fit 8 ranks x 1 slots"):
        even_slots(16, 1, NODE_C)


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_eplb_uses_all_slots(slots: int) -> None:
    for rows_CE in LOADS:
        slots_EC = balanced_slots(rows_CE.sum(axis=0), 8, slots)
        assert (slots_EC.sum(axis=0) == slots).all()
        assert slots_EC.any(axis=1).all()


def test_eplb_replicas_whom_it_helps_most() -> None:
    """No other number of replicas has fewer rows in the fullest copy."""
    for rows_E in np.random.default_rng(0).integers(0, 100, (20, 4)):
        found = (rows_E / replicated(rows_E, 8)).max()
        counts = (c for c in itertools.product(range(1, 6), repeat=4) if sum(c) == 8)
        assert found == min((rows_E / np.array(replicas_E)).max() for replicas_E in counts)


def test_llep_by_hand() -> None:
    """Ranks of one expert each; the fullest shall have the mean, 30."""
    spill = partial(spilled, owner_E=np.arange(4), num_ranks=4, alpha=1.0)
    quota_EC = spill(np.array([100, 20, 0, 0]), min_rows=15)
    assert quota_EC.tolist() == [[30, 10, 30, 30], [0, 20, 0, 0], [0] * 4, [0] * 4]
    # The mean is 31: rank 1 has room for 6 of the last 7, too short a piece; it takes all of them,
    # and one of its own has to go.
    quota_EC = spill(np.array([100, 25, 0, 0]), min_rows=15)
    assert quota_EC[:2].tolist() == [[31, 7, 31, 31], [1, 24, 0, 0]]
    # Within 1.3 times the mean nobody moves.
    assert np.array_equal(spill(np.array([38, 32, 30, 20])), np.diag([38, 32, 30, 20]))


@pytest.mark.parametrize("alpha", [1.0, 1.1, 1.5])
def test_llep_keeps_below_alpha(alpha: float) -> None:
    """Where the ranks together have the room; and no row is lost."""
    owner_E = np.arange(16) // 2
    for rows_CE in LOADS:
        rows_E = rows_CE.sum(axis=0)
        rows_E[0] += -rows_E.sum() % 8  # so that whole rows can be even
        quota_EC = spilled(rows_E, owner_E, 8, alpha=alpha, min_rows=1)
        assert (quota_EC.sum(axis=1) == rows_E).all()
        assert quota_EC.min() == 0
        assert quota_EC.sum(axis=0).max() <= alpha * rows_E.sum() / 8


def test_llep_makes_no_small_replicas() -> None:
    """A piece is as long as asked, or the rest of its expert."""
    for rows_CE in LOADS:
        rows_E = rows_CE.sum(axis=0)
        quota_EC = spilled(rows_E, np.arange(16) // 2, 8, min_rows=100)
        copied = quota_EC * (np.arange(16)[:, None] // 2 != np.arange(8))
        for pieces_C in copied:
            pieces = pieces_C[pieces_C > 0]
            assert (pieces < 100).sum() <= 1


OVERLAP: tuple[tuple[str, Callable[[int], Policy]], ...] = (
    ("echo", lambda slots: over_all(partial(in_one_shot, slots=slots))),
    ("loongforge", lambda slots: partial(transported, slots=slots)),
    ("ultraep", lambda slots: over_all(partial(quotas, slots=slots))),
    ("ultraep, own node", lambda slots: on_own_node(partial(quotas, slots=slots))),
)
"""Policies after the gate by their slots."""


@pytest.mark.parametrize(
    ("slots", "policy"),
    [
        (1, over_all(in_bins)),
        *((slots, of(slots)) for _, of in OVERLAP for slots in (1, 2)),
    ],
)
def test_after_the_gate_slots_are_kept(slots: int, policy: Policy) -> None:
    """No row is lost, none added, no rank holds more replicas than slots, none that had more than
    the mean gets rows, and the fullest has fewer than at the owner; wherever the experts are at the
    owner."""
    random = np.random.default_rng(0)
    for rows_CE in LOADS:
        rows_E, owner_E = rows_CE.sum(axis=0), random.permutation(OWNER_E)
        at_owner_C = np.bincount(owner_E, rows_E, 8)
        quota_EC = policy(rows_E, owner_E, NODE_C)
        assert quota_EC.dtype == np.int64
        assert quota_EC.min() == 0
        assert np.array_equal(quota_EC.sum(axis=1), rows_E)
        is_replica_EC = (quota_EC > 0) & (owner_E[:, None] != np.arange(8))
        assert is_replica_EC.sum(axis=0).max() <= slots
        busiest = at_owner_C.argmax()
        assert not is_replica_EC[:, busiest].any()
        assert quota_EC.sum(axis=0).max() < at_owner_C.max()


@pytest.mark.parametrize("name", ["echo", "loongforge", "ultraep"])
def test_after_the_gate_the_level_is_reached(name: str) -> None:
    """With slots enough: the mean up to whole rows of the ranks, or what UltraEP takes as such."""
    policy = dict(OVERLAP)[name](16)
    for rows_CE in LOADS:
        rows_E = rows_CE.sum(axis=0)
        level = np.ceil(1.01 * rows_E.sum() / 8) if name == "ultraep" else rows_E.sum() // 8 + 7
        assert policy(rows_E, OWNER_E, NODE_C).sum(axis=0).max() <= level


ECHOED_E = np.array([50, 100, 150, 200, 50, 80, 100, 120, 25, 25, 25, 25, 10, 10, 15, 15])
"""Of 4 ranks of 4 experts, which have 500, 350, 100 and 50 rows: 250 is the mean."""


def test_echo_by_hand() -> None:
    """What is smallest stays; expert 3 spills 200, 7 spills 100 and 2 spills 50."""
    owner_E = np.arange(16) // 4
    spill_E, room_C = overflow(ECHOED_E, owner_E, 4)
    assert {e: int(spill_E[e]) for e in np.flatnonzero(spill_E)} == {2: 50, 3: 200, 7: 100}
    assert room_C.tolist() == [0, 0, 150, 200]
    quota_EC = in_one_shot(ECHOED_E, owner_E, 4, slots=2)
    assert quota_EC[[2, 3, 7]].tolist() == [[100, 0, 50, 0], [0, 0, 0, 200], [0, 20, 100, 0]]
    assert quota_EC.sum(axis=0).tolist() == [250] * 4
    # With one slot the larger piece lives, by either policy.
    for quota_EC in (in_one_shot(ECHOED_E, owner_E, 4, slots=1), in_bins(ECHOED_E, owner_E, 4)):
        assert quota_EC[[2, 3, 7]].tolist() == [[150, 0, 0, 0], [0, 0, 0, 200], [0, 20, 100, 0]]


def test_echo_in_bins_by_hand() -> None:
    """Spills of 80, 79 and 1, room of 70, 60, 20 and 10, a mean of 70 and bins of 10. What the
    first rank leaves of expert 0, 10, waits in the last bin behind the 1 of expert 2; what the
    second leaves of expert 1, 19, waits in the bin before it."""
    rows_E = np.array([150, 149, 71, 0, 10, 50, 60])
    quota_EC = in_bins(rows_E, np.arange(7), 7)
    assert quota_EC[:3].tolist() == [
        [80, 0, 0, 70, 0, 0, 0],
        [0, 70, 0, 0, 60, 19, 0],
        [0, 0, 70, 0, 0, 0, 1],
    ]
    assert np.array_equal(quota_EC[3:], np.diag(rows_E)[3:])


def test_loongforge_by_hand() -> None:
    """Ranks of one expert each, two of which spill 20: they go to their own node where they can."""
    rows_E, owner_E, node_C = np.array([50, 10, 50, 10]), np.arange(4), np.array([0, 1, 1, 0])
    quota_EC = transported(rows_E, owner_E, node_C, slots=1)
    assert quota_EC.tolist() == [[30, 0, 0, 20], [0, 10, 0, 0], [0, 20, 30, 0], [0, 0, 0, 10]]
    # ECHO goes by size and number alone.
    assert in_one_shot(rows_E, owner_E, 4, slots=1)[[0, 2]].tolist() == [
        [30, 20, 0, 0],
        [0, 0, 30, 20],
    ]
    # All of what one spills, over the ranks that have room: a tie goes by number.
    quota_EC = transported(np.array([90, 10, 10, 10]), owner_E, node_C, slots=1)
    assert quota_EC[0].tolist() == [30, 20, 20, 20]


def test_loongforge_keeps_replicas_on_their_nodes() -> None:
    """More of them than ECHO."""
    is_far_EC = NODE_C[OWNER_E][:, None] != NODE_C
    far = {name: 0 for name, _ in OVERLAP[:2]}
    for (name, of), rows_CE in itertools.product(OVERLAP[:2], LOADS):
        far[name] += int((of(2)(rows_CE.sum(axis=0), OWNER_E, NODE_C)[is_far_EC] > 0).sum())
    assert far["loongforge"] < far["echo"]


def test_ultraep_by_hand() -> None:
    """Ranks of one expert each, and of two."""
    shared = partial(quotas, slots=1, tolerance=0.0)
    rows_E = np.array([100, 20, 0, 0])
    quota_EC = shared(rows_E, np.arange(4), 4)
    assert quota_EC.tolist() == [[30, 10, 30, 30], [0, 20, 0, 0], [0] * 4, [0] * 4]
    # No copy of less than 15 rows: at 49 the second would have 2, and the search looks above; that
    # 34 and 32 rows would do at 34 it does not see.
    quota_EC = shared(rows_E, np.arange(4), 4, min_rows=15)
    assert quota_EC[0].tolist() == [50, 0, 50, 0]
    # One slot: expert 0 fills both ranks at 58 and below; at 59 the one takes all but a row of it.
    rows_E, owner_E = np.array([60, 60, 0, 0]), np.array([0, 0, 1, 2])
    assert shared(rows_E, owner_E, 3)[:2].tolist() == [[1, 59, 0], [58, 0, 2]]
    quota_EC = quotas(rows_E, owner_E, 3, slots=2, tolerance=0.0)
    assert quota_EC[:2].tolist() == [[1, 40, 19], [39, 0, 21]]
    # Within the tolerance nobody moves.
    even_E = np.array([101, 100, 99, 100])
    assert np.array_equal(quotas(even_E, np.arange(4), 4, slots=1), np.diag(even_E))


def test_on_their_own_node() -> None:
    """Each node as if it were alone, wherever its ranks and experts are."""
    node_C, owner_E = np.tile([1, 0], 4), np.tile(np.arange(8), 2)
    policy = partial(quotas, slots=2)
    for rows_CE in LOADS:
        rows_E = rows_CE.sum(axis=0)
        quota_EC = on_own_node(policy)(rows_E, owner_E, node_C)
        of_node_EC = policy(rows_E[1::2], owner_E[1::2] // 2, 4)
        assert np.array_equal(quota_EC[1::2, 1::2], of_node_EC)
        assert not quota_EC[1::2, ::2].any()
        assert not quota_EC[::2, 1::2].any()


def test_laer_replicas_by_hand() -> None:
    """Two nodes: one replica on each, where there is room, and then one more on each."""
    rows_E = np.array([80, 10, 5, 5])
    assert replicas_by_rows(rows_E, 12, 2).tolist() == [6, 2, 2, 2]
    # 6 slots: one each and two left, of which the hottest gets one; it then wants two.
    assert replicas_by_rows(rows_E, 6, 2).tolist() == [2, 2, 1, 1]


def test_laer_places_by_hand() -> None:
    """Replicas of 30, 30, 20, 10 rows on 4 ranks: first to the other node, to the emptiest rank."""
    slots_EC = placed(
        np.array([60, 20, 10]), np.array([2, 1, 1]), slots=1, node_C=np.array([0, 0, 1, 1])
    )
    assert slots_EC.tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_laer_lays_out(slots: int) -> None:
    """Slots are kept, and with 32 of them every expert is on both nodes; of the layouts it is the
    faster one."""
    seconds = partial(RowPrices(np.ones(8), 0.2, 2.0).seconds, node_C=NODE_C)
    for rows_CE in LOADS:
        slots_EC = laid_out(rows_CE, slots, NODE_C, seconds)
        assert slots_EC.sum(axis=0).max() <= slots
        assert slots_EC.any(axis=1).all()
        rows_E = rows_CE.sum(axis=0)
        if slots * 8 >= 32:
            replicas_E = replicas_by_rows(rows_E, slots * 8, 2)
            by_rows_EC = placed(rows_E, replicas_E, slots, NODE_C)
            assert by_rows_EC.reshape(16, 2, 4).any(axis=2).all()
        even_EC = placed(rows_E, np.full(16, slots * 8 // 16), slots, NODE_C)
        found_s = seconds(sent(rows_CE, slots_EC, NODE_C))
        assert slots % 2 or found_s <= seconds(sent(rows_CE, even_EC, NODE_C))


def test_laer_plans_for_the_way_its_rows_go() -> None:
    """What it counts of a layout is what the table sends, up to whole rows."""
    cluster = PricedCluster.of(replace(A100, ranks_per_node=4), rows=500, width=64)
    slots_EC = laid_out(LOADS[0], 3, NODE_C, lambda sent_CC: float(sent_CC.max()))
    way = evenly_on_node(
        Layer(Placement.block(16, 8), Layout.of_slots(slots_EC), LOADS[0], cluster)
    )
    off_CC = way(LOADS[0]).sum(axis=1) - sent(LOADS[0], slots_EC, NODE_C)
    assert np.abs(off_CC).max() < 16  # experts: a row of each


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="16 experts do not fit 7 ranks x 2 slots"):
        balanced_slots(np.ones(16), 7, 2)
    with pytest.raises(ValueError, match="16 experts do not fit 8 ranks x 1 slots"):
        laid_out(LOADS[0], 1, NODE_C, lambda sent_CC: 0.0)
