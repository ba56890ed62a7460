# SPDX-License-Identifier: Apache-2.0
"""Gradients over windows: the golden test, every rule of both steps, properties. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, product
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.planning import pipeline_degrees
from ds_moe_ext.planning.layer_costs import LayerCosts
from ds_moe_ext.planning.layer_pipelines import SOLVERS
from ds_moe_ext.planning.pipeline_degrees import (
    BackwardLayer,
    GradientPartition,
    fill_windows,
    partition_gradients,
)
from ds_moe_ext.planning.prices import AllReduce, LinearCost
from tests.planners.plainly import PROPERTY

GOLDEN = AllReduce(alpha_s=0.5, beta_s=1e-3)
ROUND_OFF = 1e-9


def layer(
    degrees: Sequence[tuple[float, float]], dense_window_s: float, gradient_elements: int
) -> BackwardLayer:
    """A layer by the degrees it may have: seconds of its MoE part, and those of its all-to-alls."""

    def moe_seconds(reduced_N: np.ndarray) -> np.ndarray:
        return np.min([np.maximum(whole, exchange + reduced_N) for whole, exchange in degrees], 0)

    whole_s, exchange_s = min(degrees)
    return BackwardLayer(
        moe_seconds=moe_seconds,
        moe_window_s=whole_s - exchange_s,
        dense_window_s=dense_window_s,
        gradient_elements=gradient_elements,
    )


def golden_layer(gradient_elements: int = 8000) -> BackwardLayer:
    """Backward of the spec's G1."""
    gather = LinearCost(alpha_s=0.1, beta_s=1e-3, n=1000)
    costs = LayerCosts(
        all_to_all=LinearCost(alpha_s=0.2, beta_s=1e-3, n=4000),
        all_gather=gather,
        reduce_scatter=gather,
        expert=LinearCost(alpha_s=0.3, beta_s=1e-3, n=5000),
    )
    return BackwardLayer.of(
        costs.in_backward(),
        max_degree=8,
        dense_window_s=2.0,
        gradient_elements=gradient_elements,
    )


def seconds(layer: BackwardLayer, reduced_s: float) -> float:
    return float(layer.moe_seconds(np.array([reduced_s])).item())


def cost(
    layers: Sequence[BackwardLayer], within_moe: Sequence[int], tail: int, all_reduce: AllReduce
) -> float:
    """Equation (5) with the tail, in full."""
    slices_s = [all_reduce.alpha_s + n * all_reduce.beta_s if n else 0.0 for n in within_moe]
    tail_s = all_reduce.alpha_s + tail * all_reduce.beta_s if tail else 0.0
    return sum(seconds(layer, t) for layer, t in zip(layers, slices_s)) + tail_s


def least_cost(
    layers: Sequence[BackwardLayer], all_reduce: AllReduce, tail_elements: int, part: int = 1
) -> float:
    """Equation (5) by trying every causal way to move parts of so many elements."""
    hidden = fill_windows(layers, all_reduce)
    left = hidden.left[-1]
    ways = product(range(0, left + 1, part), repeat=len(layers))
    return min(
        cost(
            layers,
            [moe + x for moe, x in zip(hidden.moe, extra)],
            tail_elements + left - sum(extra),
            all_reduce,
        )
        for extra in ways
        if all(moved <= ready for moved, ready in zip(accumulate(extra), hidden.left))
    )


def test_golden_g2_step_1() -> None:
    hidden = fill_windows([golden_layer()] * 3, GOLDEN)
    assert hidden.dense == (1500, 1500, 1500)
    assert hidden.moe == (5400, 5400, 5400)
    assert hidden.left == (1100, 2200, 3300)


def test_golden_g2_step_2() -> None:
    layers = [golden_layer()] * 3
    assert cost(layers, [5400] * 3, 3300, GOLDEN) == pytest.approx(50.3)
    assert cost(layers, [6500] * 3, 0, GOLDEN) == pytest.approx(48.6)
    assert cost(layers, [6000, 6000, 7500], 0, GOLDEN) == pytest.approx(48.2667, abs=1e-4)
    by_hundreds = partition_gradients(layers, all_reduce=GOLDEN, num_quanta=33)
    assert by_hundreds.extra == (600, 600, 2100)
    for num_quanta in (33, 256, 660):
        partition = partition_gradients(layers, all_reduce=GOLDEN, num_quanta=num_quanta)
        assert partition.time_s == pytest.approx(48.2667, abs=1e-4)
        assert partition.tail == 0


def test_few_quanta_are_exact_on_their_grid() -> None:
    layers = [golden_layer()] * 3
    partition = partition_gradients(layers, all_reduce=GOLDEN, num_quanta=6)
    assert partition.time_s == pytest.approx(least_cost(layers, GOLDEN, 0, part=550))


def test_golden_g8() -> None:
    """The last layer's gradients are exposed; both MoE parts stay as long as they were."""
    layers = [golden_layer(0), golden_layer(6900)]
    partition = partition_gradients(layers, all_reduce=GOLDEN, tail_elements=6900)
    assert (partition.dense, partition.moe, partition.extra) == ((0, 1500), (0, 5400), (0, 0))
    assert partition.tail == 6900
    assert partition.time_s == pytest.approx(2 * 15.5 + 7.4)


def test_what_is_hidden_where() -> None:
    """A pool smaller than its windows, and windows shorter than a reduction's start."""
    assert GOLDEN.hidden_elements(100, 0.6) == 100
    assert GOLDEN.hidden_elements(100, 0.55) == 50
    assert GOLDEN.hidden_elements(100, 0.5) == 0
    assert GOLDEN.hidden_elements(100, 0.1) == 0
    assert GOLDEN.hidden_elements(0, 0.0) == 0
    assert GOLDEN.seconds(0) == 0.0
    # In floats, (0.6 - 0.3) / 0.1 is below 3.
    assert AllReduce(alpha_s=0.3, beta_s=0.1).hidden_elements(100, 0.6) == 3
    free = AllReduce(alpha_s=0.5, beta_s=0.0)
    assert (free.hidden_elements(100, 0.4), free.hidden_elements(100, 0.5)) == (0, 100)


def test_of_less_than_nothing_there_is_no_reduction() -> None:
    assert GOLDEN.seconds(-1) == math.inf
    assert GOLDEN.seconds_of_each(np.array([-1, 0, 1])).tolist() == [math.inf, 0.0, 0.501]


def test_a_later_window_takes_what_earlier_ones_left() -> None:
    layers = [golden_layer(9000), golden_layer(0)]
    hidden = fill_windows(layers, GOLDEN)
    assert (hidden.dense, hidden.moe, hidden.left) == ((1500, 1500), (5400, 600), (2100, 0))
    assert partition_gradients(layers, all_reduce=GOLDEN).extra == (0, 0)


def test_gradients_move_only_once_they_are_ready() -> None:
    """The first layer could take all for nothing but has none yet; the second lengthens by all."""
    roomy, full = [(2.0, 0.0)], [(1.0, 1.0)]
    unit = AllReduce(alpha_s=0.5, beta_s=1.0)
    late = partition_gradients([layer(roomy, 0.0, 0), layer(full, 0.0, 1)], all_reduce=unit)
    assert (late.extra, late.tail) == ((0, 0), 1)
    early = partition_gradients([layer(full, 0.0, 1), layer(roomy, 0.0, 0)], all_reduce=unit)
    assert (early.moe, early.tail, early.time_s) == ((0, 1), 0, 3.0)


def test_a_tail_that_starts_anyway_takes_them_at_the_same_price() -> None:
    """Where the window is saturated an element costs as much in it as in the tail: none move.
    If the tail would be empty otherwise, its start is saved, and all move."""
    layers = [layer([(4.0, 2.0)], 0.0, 5)]
    unit = AllReduce(alpha_s=1.0, beta_s=1.0)
    with_tail = partition_gradients(layers, all_reduce=unit, tail_elements=3)
    assert (with_tail.moe, with_tail.extra, with_tail.tail) == ((1,), (0,), 7)
    without = partition_gradients(layers, all_reduce=unit)
    assert (without.moe, without.extra, without.tail) == ((1,), (4,), 0)
    assert (with_tail.time_s, without.time_s) == (4.0 + 8.0, 2.0 + 6.0)


def test_among_equals_elements_move_late() -> None:
    roomy = [(2.0, 2.0), (3.0, 0.0)]
    layers = [layer(roomy, 0.0, 2), layer(roomy, 0.0, 0)]
    partition = partition_gradients(layers, all_reduce=AllReduce(alpha_s=0.5, beta_s=1.0))
    assert (partition.extra, partition.time_s) == ((0, 2), 2.0 + 3.0)


def test_no_layers_and_no_gradients() -> None:
    nothing = partition_gradients([], all_reduce=GOLDEN, tail_elements=1000)
    assert nothing == GradientPartition(dense=(), moe=(), extra=(), tail=1000, time_s=1.5)
    still = partition_gradients([golden_layer(0)], all_reduce=GOLDEN)
    assert still.time_s == pytest.approx(15.5)
    assert (still.within_moe, still.tail) == ((0,), 0)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_seconds_that_cannot_be(value: float) -> None:
    with pytest.raises(ValueError, match=f"alpha_s is {value}; costs are finite"):
        AllReduce(alpha_s=value, beta_s=0.0)
    with pytest.raises(ValueError, match=f"beta_s is {value}; costs are finite"):
        AllReduce(alpha_s=0.0, beta_s=value)
    with pytest.raises(ValueError, match=f"dense_window_s is {value}; costs are finite"):
        layer([(1.0, 1.0)], value, 0)
    with pytest.raises(ValueError, match=r"moe_window_s is -1\.0; costs are finite"):
        layer([(1.0, 2.0)], 0.0, 0)


def test_counts_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="gradient_elements is -1; give a number of at least 0"):
        golden_layer(-1)
    with pytest.raises(ValueError, match="tail_elements is -1; give a number of at least 0"):
        partition_gradients([], all_reduce=GOLDEN, tail_elements=-1)
    with pytest.raises(ValueError, match="num_quanta is 0; give a number of at least 1"):
        partition_gradients([], all_reduce=GOLDEN, num_quanta=0)


def layers_with(most_layers: int, most_elements: int) -> st.SearchStrategy[list[BackwardLayer]]:
    seconds = st.integers(0, 12).map(lambda quarters: quarters / 4)
    degrees = st.lists(
        st.tuples(seconds, seconds).map(lambda pair: (sum(pair), pair[0])), min_size=1, max_size=3
    )
    one = st.builds(layer, degrees, seconds, st.integers(0, most_elements))
    return st.lists(one, min_size=1, max_size=most_layers)


ALL_REDUCES = st.builds(
    AllReduce,
    alpha_s=st.sampled_from([0.0, 0.25, 0.5, 2.0]),
    beta_s=st.sampled_from([0.0, 0.125, 0.5, 1.0]),
)


@pytest.mark.parametrize("solver", SOLVERS)
@PROPERTY
@given(
    layers=layers_with(6, 50),
    all_reduce=ALL_REDUCES,
    tail_elements=st.integers(0, 20),
    num_quanta=st.integers(1, 40),
)
def test_slices_cover_all_once_when_they_are_ready(
    solver: str,
    layers: list[BackwardLayer],
    all_reduce: AllReduce,
    tail_elements: int,
    num_quanta: int,
) -> None:
    with mock.patch.object(pipeline_degrees, "GENERATIONS", 1):  # any candidate must be a partition
        partition = partition_gradients(
            layers,
            all_reduce=all_reduce,
            tail_elements=tail_elements,
            num_quanta=num_quanta,
            step_2=SOLVERS[solver].step_2,
        )
    assert min(*partition.dense, *partition.moe, *partition.extra, partition.tail) >= 0
    end = 0
    ready = accumulate(x.gradient_elements for x in layers)
    for moe, dense, ready_by_then in zip(partition.within_moe, partition.dense, ready):
        end += moe + dense
        assert end <= ready_by_then
    assert end + partition.tail == sum(x.gradient_elements for x in layers) + tail_elements
    assert partition.time_s == pytest.approx(
        cost(layers, partition.within_moe, partition.tail, all_reduce)
    )


@PROPERTY
@given(layers_with(6, 50), ALL_REDUCES)
def test_step_1_hides_all_it_places_and_no_element_more_fits(
    layers: list[BackwardLayer], all_reduce: AllReduce
) -> None:
    hidden = fill_windows(layers, all_reduce)
    for x, dense, moe, left in zip(layers, hidden.dense, hidden.moe, hidden.left):
        assert seconds(x, all_reduce.seconds(moe)) == pytest.approx(seconds(x, 0.0))
        assert all_reduce.seconds(dense) <= x.dense_window_s + ROUND_OFF
        if left:
            assert all_reduce.seconds(moe + 1) > x.moe_window_s
        if left + moe:
            assert all_reduce.seconds(dense + 1) > x.dense_window_s


@PROPERTY
@given(layers_with(3, 5), ALL_REDUCES, st.integers(0, 2))
def test_step_2_is_the_best_of_all(
    layers: list[BackwardLayer], all_reduce: AllReduce, tail_elements: int
) -> None:
    partition = partition_gradients(layers, all_reduce=all_reduce, tail_elements=tail_elements)
    assert partition.time_s == pytest.approx(least_cost(layers, all_reduce, tail_elements))


@PROPERTY
@given(layers_with(5, 60), ALL_REDUCES, st.integers(0, 9), st.integers(1, 9))
def test_coarse_quanta_lose_little(
    layers: list[BackwardLayer], all_reduce: AllReduce, tail_elements: int, num_quanta: int
) -> None:
    def partition(num_quanta: int) -> GradientPartition:
        return partition_gradients(
            layers, all_reduce=all_reduce, tail_elements=tail_elements, num_quanta=num_quanta
        )

    hidden = fill_windows(layers, all_reduce)
    most_lost = (hidden.left[-1] / num_quanta + 1) * (len(layers) + 1) * all_reduce.beta_s
    best_s, coarse_s = partition(10**6).time_s, partition(num_quanta).time_s
    in_tail_s = cost(layers, hidden.moe, tail_elements + hidden.left[-1], all_reduce)
    assert best_s - ROUND_OFF <= coarse_s <= in_tail_s + ROUND_OFF
    assert coarse_s <= best_s + most_lost + ROUND_OFF
