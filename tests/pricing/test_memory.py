# SPDX-License-Identifier: Apache-2.0
"""Memory of replicas, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner
from ds_moe_ext.planning.described_run import copied_bytes_C
from ds_moe_ext.planning.strategy import Carried, Plan

OWNER = Placement.block(4, 2)  # experts 0 and 1 live in EP rank 0


def copying(experts: list[int], **given: bool) -> Plan:
    """These experts compute in both EP ranks."""
    replicas_EC = np.zeros_like(OWNER.holds_EC)
    replicas_EC[experts] = True
    target = OWNER.with_replicas(replicas_EC)
    return replace(Plan(OWNER, target, LocalElseOwner(OWNER, target)), **given)


COPIED = ([0], [0, 1, 2], [2])  # of three layers: EP rank 0 gets 0, 1, 1; EP rank 1 gets 1, 2, 0
BYTES_L = (10, 10, 100)


@pytest.mark.parametrize(
    ("frees", "carries", "accumulates", "ep_rank_0", "ep_rank_1"),
    [
        (False, False, False, 110 + 100, 30 + 20),  # all replicas, the largest layer's gradients
        (False, False, True, 110 + 110, 30 + 30),
        (True, False, False, 100 + 100, 20 + 20),
        (True, False, True, 100 + 100, 20 + 20),
        (True, True, False, 110 + 110, 30 + 30),  # two layers at a time
        (False, True, False, 110 + 110, 30 + 30),
    ],
)
def test_replicas_and_their_gradients(
    frees: bool, carries: bool, accumulates: bool, ep_rank_0: int, ep_rank_1: int
) -> None:
    plans = [copying(experts, rematerialize=frees) for experts in COPIED]
    if carries:
        plans[1] = replace(plans[1], carried=Carried(((), ()), ((), ())))
    held_C = copied_bytes_C(plans, BYTES_L, accumulates=accumulates)
    assert held_C.tolist() == [ep_rank_0, ep_rank_1]


def test_experts_at_owner_take_nothing() -> None:
    plans = [Plan.at_owner(OWNER)] * 3
    assert copied_bytes_C(plans, BYTES_L, accumulates=True).tolist() == [0, 0]
