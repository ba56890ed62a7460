# SPDX-License-Identifier: Apache-2.0
"""Copies under two computations: the golden test, both rules both ways, properties. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.planning.prophet_planner import (
    SPLITS,
    Split,
    SplitRule,
    split_backward,
    split_forward,
)
from tests.planners.plainly import PROPERTY

FNEC_FIRST, HALF = SPLITS["fnec_first"], SPLITS["half"]


def test_golden_p6() -> None:
    """Two moves of 4 s fit into 9 s: the last two in forward, the first two in backward."""
    selected = (7, 5, 6)
    forward = split_forward(selected, rule=FNEC_FIRST, layer_s=9.0, move_s=4.0)
    assert forward == Split(first=(7,), second=(5, 6))
    backward = split_backward(selected, rule=FNEC_FIRST, layer_s=9.0, move_s=4.0)
    assert backward == Split(first=(7, 5), second=(6,))


@pytest.mark.parametrize(
    ("layer_s", "move_s", "beside_layer"),
    [(0.0, 4.0, 0), (3.9, 4.0, 0), (4.0, 4.0, 1), (1e300, 1e-300, 3), (0.0, 0.0, 3), (9.0, 0.0, 3)],
)
def test_how_many_the_layer_hides(layer_s: float, move_s: float, beside_layer: int) -> None:
    split = split_forward((0, 1, 2), rule=FNEC_FIRST, layer_s=layer_s, move_s=move_s)
    assert len(split.second) == beside_layer
    split = split_backward((0, 1, 2), rule=FNEC_FIRST, layer_s=layer_s, move_s=move_s)
    assert len(split.first) == beside_layer


def test_halves() -> None:
    """The odd expert goes beside the layer, whatever fits there."""
    for layer_s in (0.0, 99.0):
        forward = split_forward((4, 2, 0, 1, 3), rule=HALF, layer_s=layer_s, move_s=1.0)
        assert forward == Split(first=(4, 2), second=(0, 1, 3))
        backward = split_backward((4, 2, 0, 1, 3), rule=HALF, layer_s=layer_s, move_s=1.0)
        assert backward == Split(first=(4, 2, 0), second=(1, 3))


@pytest.mark.parametrize(("layer_s", "move_s"), [(-1.0, 1.0), (1.0, -1.0), (1.0, math.nan)])
def test_times_that_cannot_be(layer_s: float, move_s: float) -> None:
    for split in (split_forward, split_backward):
        with pytest.raises(ValueError, match=f"takes {layer_s} s and a move {move_s} s; give"):
            split((0,), rule=FNEC_FIRST, layer_s=layer_s, move_s=move_s)


@PROPERTY
@given(
    st.lists(st.integers(0, 99), unique=True),
    st.sampled_from(sorted(SPLITS.values(), key=lambda rule: rule.__name__)),
    st.floats(0, 100),
    st.floats(0, 10),
    st.sampled_from([split_forward, split_backward]),
)
def test_all_experts_move_once_in_order(
    selected: list[int],
    rule: SplitRule,
    layer_s: float,
    move_s: float,
    split: Callable[..., Split],
) -> None:
    both = split(selected, rule=rule, layer_s=layer_s, move_s=move_s)
    assert list(both.first + both.second) == selected


@PROPERTY
@given(st.integers(0, 9), st.floats(0.25, 4), st.floats(0, 40), st.floats(0, 40))
def test_the_layer_first_exposes_least(
    num_experts: int, move_s: float, layer_s: float, expert_s: float
) -> None:
    """Of whole experts, no other number beside the layer exposes less than one move less."""
    split = split_forward(range(num_experts), rule=FNEC_FIRST, layer_s=layer_s, move_s=move_s)

    def exposed(beside_layer: int) -> float:
        rest = num_experts - beside_layer
        return max(0.0, beside_layer * move_s - layer_s) + max(0.0, rest * move_s - expert_s)

    least = min(map(exposed, range(num_experts + 1)))
    assert exposed(len(split.second)) <= least + move_s + 1e-9
