# SPDX-License-Identifier: Apache-2.0
"""The benchmark of copies whole and in segments: its model by hand, and its contenders."""

from __future__ import annotations

import argparse
import os
from unittest import mock

import numpy as np
import pytest
from cluster import SPEEDS
from copy_segments import CARDS, CASES, Fabric, compare, model_s, placements

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.transfer import SMALL, Cargo, gather_rounds
from tests.ranks import pool_of


def test_the_model_by_hand() -> None:
    """Four nodes of a cell: two rounds of all bytes, the first cell sending in both, or a chain."""
    home = Placement.owned_by(np.array([0]), 4)
    grid = home, Placement(np.ones((1, 4), dtype=bool)), np.arange(4)
    fabric = Fabric(inter_bytes_per_s=100.0, intra_bytes_per_s=1e9, start_s=0.4)
    assert model_s(gather_rounds(*grid), 600, fabric) == pytest.approx(2 * (0.4 + 6))
    chain = gather_rounds(*grid, Cargo(600, 40))
    assert chain.num_segments_N.tolist() == [5] * 3
    assert model_s(chain, 600, fabric) == pytest.approx((5 + 2) * (0.4 + 1.2))


def test_messages_of_a_round_share_a_link() -> None:
    home = Placement.owned_by(np.array([0, 0]), 3)
    holds_EC = home.holds_EC.copy()
    holds_EC[0, 1] = holds_EC[1, 2] = True
    fabric = Fabric(inter_bytes_per_s=100.0, intra_bytes_per_s=1000.0, start_s=1.0)
    for node_C, seconds in (([0, 1, 2], 13.0), ([0, 0, 0], 2.2), ([0, 0, 1], 7.0)):
        transfers = gather_rounds(home, Placement(holds_EC), np.array(node_C))
        assert model_s(transfers, 600, fabric) == pytest.approx(seconds)


@pytest.mark.parametrize("case", CASES)
def test_experts_of_a_case_go_to_all_nodes(case) -> None:
    home, wanted, node_C = placements(case, 4)
    assert (home.num_holders_E == 1).all() and home.num_experts == (case.num_experts or 4)
    for node in range(4):
        assert (wanted.holds_EC[:, node_C == node].sum(axis=1) >= case.cells_per_node).all()
        assert wanted.holds_EC[:, node_C == node].shape[1] == CARDS
    assert gather_rounds(home, wanted, node_C, SMALL).num_moved == home.num_experts


def _seconds(rank: int, world_size: int) -> dict[str, list[float]]:
    given = argparse.Namespace(start_us=10.0, rounds=1)
    environment = {"LOCAL_WORLD_SIZE": "2", SPEEDS[0]: "100"}
    with mock.patch.dict(os.environ, environment):
        return compare(given, 0.25)


def test_both_ways_are_timed_there_and_back() -> None:
    """They agree on copies and sums, or it raises."""
    for seconds in pool_of(4).run(_seconds):
        assert sorted(seconds) == [
            "segments, back",
            "segments, there",
            "whole, back",
            "whole, there",
        ]
        assert all(len(each) == 1 and each[0] > 0 for each in seconds.values())
