# SPDX-License-Identifier: Apache-2.0
"""FasterMoE's policy: the golden test, and the policy line by line. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.planning.layer_costs import placement_seconds
from ds_moe_ext.planning.prophet_planner import shadow_experts, shadow_seconds
from tests.planners.plainly import (
    BLOCK_PRICES,
    GATING_CE,
    ONE_EACH,
    PROPERTY,
    Block,
    blocks,
    shadowed,
)

# Golden P7: one byte an element, d = 1 and alpha_h = 1, so that w = 4 / 8 s, feat = 1 s and an
# expert has 2 elements.
P7_PRICES = replace(BLOCK_PRICES, weight_bytes=2.0, gradient_bytes=2.0)


def test_golden_p7() -> None:
    """Expert rows are 34, 10, 12, 8."""
    assert shadowed(GATING_CE.tolist(), P7_PRICES) == ([0, 2, 1], [187, 68, 59, 50])
    costs = [
        shadow_seconds(P7_PRICES, most_rows=rows, num_shadows=shadows)
        for shadows, rows in enumerate([34, 12, 10, 8])
    ]
    assert costs == [187, 68, 59, 50]
    plan = shadow_experts(ONE_EACH, GATING_CE, prices=P7_PRICES)
    assert plan.selected == (0, 2, 1)
    assert plan.target.holds_EC.tolist() == [[True] * 4] * 3 + [[False, False, False, True]]
    # Cell 3 gets the 5 rows of expert 3 beside its own 16; three experts go there and back.
    assert plan.rows.computed_C.tolist() == [15, 14, 14, 21]
    assert plan.seconds.step_s == 4 * 5 + 3 * 21 / 2 + 3 * 2 + 3 * 2
    assert plan.seconds_without.step_s == 147
    fitting = shadow_experts(ONE_EACH, GATING_CE, prices=P7_PRICES, max_copied=2)
    assert fitting.selected == plan.selected[:2]
    assert not shadow_experts(ONE_EACH, GATING_CE, prices=P7_PRICES, max_copied=0).selected


def test_it_stops_at_the_first_that_is_no_gain() -> None:
    """The third would pay for the second, but is never looked at."""
    rows_CE = np.array([[30, 20, 20, 1]])
    prices = replace(P7_PRICES, row_bytes=0.0, row_s=1 / 3)  # 30, 20 + 2, 20 + 4, 1 + 6
    plan = shadow_experts(Placement.block(4, 1), rows_CE, prices=prices)
    assert plan.selected == (0,)


def test_nothing_to_gain() -> None:
    dear = replace(P7_PRICES, weight_bytes=1000.0)
    plan = shadow_experts(ONE_EACH, GATING_CE, prices=dear)
    assert plan.target is ONE_EACH
    assert plan.seconds == plan.seconds_without
    with pytest.raises(ValueError, match="rows have shape"):
        shadow_experts(ONE_EACH, GATING_CE.T[:3], prices=dear)


@PROPERTY
@given(blocks())
def test_the_plan_is_fastermoes(block: Block) -> None:
    home, rows_CE, prices = block
    plan = shadow_experts(home, rows_CE, prices=prices)
    shadows, _ = shadowed(rows_CE.tolist(), prices)
    assert plan.selected == tuple(shadows)
    is_shadow_E = np.isin(np.arange(home.num_experts), shadows)
    assert np.array_equal(plan.target.holds_EC, home.holds_EC | is_shadow_E[:, None])
    assert plan.seconds == placement_seconds(home, plan.target, rows_CE, prices=prices)
