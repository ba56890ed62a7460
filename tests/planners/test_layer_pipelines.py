# SPDX-License-Identifier: Apache-2.0
"""How layers run by a pipeline: degrees, and which gradients are reduced beside which layer."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_moe_ext.planning.layer_costs import LayerCosts
from ds_moe_ext.planning.layer_pipelines import (
    NOWHERE,
    SOLVERS,
    HostSeconds,
    Meanwhile,
    Measured,
    MeasuredLayer,
    MoePart,
    Placed,
    best_pair,
    place,
    plan_pipelines,
)
from ds_moe_ext.planning.layer_seconds import CPU_HOST, issued
from ds_moe_ext.planning.pipeline_degrees import BackwardLayer, best_degree, partition_gradients
from ds_moe_ext.planning.prices import FREE, AllReduce, LinearCost
from ds_moe_ext.schedule.orders import PIPELINES, Pipeline

GATHER = LinearCost(alpha_s=0.1, beta_s=1e-3, n=1000)
G1 = LayerCosts(
    all_to_all=LinearCost(alpha_s=0.2, beta_s=1e-3, n=4000),
    all_gather=GATHER,
    reduce_scatter=GATHER,
    expert=LinearCost(alpha_s=0.3, beta_s=1e-3, n=5000),
)
COST = AllReduce(alpha_s=0.5, beta_s=1e-3)
FSMOE = PIPELINES["fsmoe"]


def model(
    num_layers: int,
    elements: int,
    *,
    window_s: float = 2.0,
    tail: int = 0,
    costs: LayerCosts = G1,
) -> Measured:
    """Equal layers; each begins its backward with as many gradients ready."""
    layers = [MeasuredLayer(costs, window_s, elements) for _ in range(num_layers)]
    layers[0] = MeasuredLayer(costs, window_s, tail)
    return Measured(tuple(layers), elements, COST, element_bytes=4)


def test_g1_through_the_planner() -> None:
    """Each for itself 3 and 4; together 3 and 3, as 3 and 4 chunks are made of 6 pieces."""
    (paper,) = plan_pipelines(FSMOE, model(1, 0), max_degree=8, solver=SOLVERS["paper"])
    assert paper[:3] == (3, 4, NOWHERE)
    (piped,) = plan_pipelines(FSMOE, model(1, 0), max_degree=8)
    assert piped[:3] == (3, 3, NOWHERE)
    free = replace(G1, expert=replace(G1.expert, alpha_s=0.0))
    (piped,) = plan_pipelines(FSMOE, model(1, 0, costs=free), max_degree=8)
    assert piped.forward_degree != piped.backward_degree


@settings(max_examples=60, deadline=None, derandomize=True)
@given(alphas=st.tuples(*[st.floats(0, 1)] * 3), gradient_s=st.floats(0, 9))
def test_the_best_pair_is_the_best_of_all(
    alphas: tuple[float, float, float], gradient_s: float
) -> None:
    """By the formulas of one direction, with as many starts of experts as there are calls."""
    a, g, e = (replace(c, alpha_s=s) for c, s in zip((G1.all_to_all, GATHER, G1.expert), alphas))
    costs = LayerCosts(all_to_all=a, all_gather=g, reduce_scatter=g, expert=e)

    def seconds(forward: int, backward: int) -> float:
        calls = forward + backward - np.gcd(forward, backward)
        total_s = 0.0
        for each, degree, s in ((costs, forward, 0.0), (costs.in_backward(), backward, gradient_s)):
            start_s = each.expert.alpha_s * calls / degree
            called = replace(each, expert=replace(each.expert, alpha_s=start_s))
            total_s += MoePart.of(FSMOE, called, [degree]).seconds(np.array([s]))[0, 0]
        return total_s

    pair = best_pair(FSMOE, costs, (range(1, 7), range(1, 7)), Meanwhile(gradient_s))
    everything = [seconds(f, b) for f, b in product(range(1, 7), repeat=2)]
    assert pair.seconds == pytest.approx(min(everything), rel=1e-9)
    assert seconds(*pair[:2]) == pytest.approx(pair.seconds, rel=1e-9)


def test_g2_step_1() -> None:
    """Without a costly tail nothing moves beyond the windows: spec G2, dense 1500 and MoE 5400."""
    (last, middle, first) = place(FSMOE, model(3, 6900), parts_of(FSMOE, model(3, 6900)))[::-1]
    assert last == middle == first == Placed((5400,), (1500,))


def test_given_degrees_are_kept() -> None:
    (piped,) = plan_pipelines(FSMOE, model(1, 0), max_degree=8, degrees=(2, None))
    assert (piped.forward_degree, piped.backward_degree) == (2, 4)  # of 4 pieces


def test_longer_reductions_want_fewer_chunks() -> None:
    """Spec G1: with 9 ms of reduction inside, backward is fastest at 2 chunks instead of 4."""
    (piped,) = plan_pipelines(FSMOE, model(1, 8500, window_s=0.0), max_degree=8)
    within_s = sum(map(COST.seconds, piped.placed.within_moe))
    assert piped.backward_degree == best_degree(G1.in_backward(), within_s, 8).degree


def test_one_queue_has_another_best_degree() -> None:
    no_iio = MoePart.of(PIPELINES["fsmoe_no_iio"], G1, range(1, 9))
    two = MoePart.of(FSMOE, G1, range(1, 9))
    assert (no_iio.alone_R >= two.alone_R).all()


def test_pieces_go_where_they_fit() -> None:
    """Of 10 elements and 12 s each; the MoE window is a tenth too short for two."""
    cost = AllReduce(alpha_s=2.0, beta_s=1.0)
    lina = Pipeline(slices_moe=True, slices_dense=True, piece_bytes=40)
    part = MoePart(np.array([1]), np.array([123.9]), np.array([100.0]))
    measured = Measured((MeasuredLayer(G1, 24.0, 0),), 47, cost, element_bytes=4)
    assert place(lina, measured, [part]) == [Placed(within_moe=(10,), dense=(10, 10))]


def test_what_fits_nowhere_waits_for_the_next_layer() -> None:
    lina = Pipeline(slices_moe=True, slices_dense=True, piece_bytes=40)
    cost = AllReduce(alpha_s=2.0, beta_s=1.0)
    layers = MeasuredLayer(G1, 50.0, 0), MeasuredLayer(G1, 11.0, 5)
    parts = [MoePart(np.array([1]), np.array([1.0]), np.array([1.0]))] * 2
    found = place(lina, Measured(layers, 20, cost, element_bytes=4), parts)
    assert found == [Placed((), (10, 10, 5)), NOWHERE]


def parts_of(pipeline: Pipeline, measured: Measured) -> list[MoePart]:
    backward = [layer.costs.in_backward() for layer in measured.layers]
    return [MoePart.of(pipeline, costs, range(1, 9)) for costs in backward]


def test_the_papers_solvers() -> None:
    """SLSQP finds the best degrees of each direction; differential evolution a partition that is a
    little slower than the exact one (spec G2: 48.79 to 48.97 for 48.27)."""
    pytest.importorskip("scipy")
    measured = model(3, 8000)
    for piped in plan_pipelines(FSMOE, measured, max_degree=8, solver=SOLVERS["paper"]):
        assert piped.forward_degree == best_degree(G1, 0.0, 8).degree
        within_s = sum(map(COST.seconds, piped.placed.within_moe))
        assert piped.backward_degree == best_degree(G1.in_backward(), within_s, 8).degree
    costs = G1.in_backward()
    layers = [BackwardLayer.of(costs, max_degree=8, dense_window_s=2.0, gradient_elements=8000)] * 3
    exact, found = (
        partition_gradients(layers, all_reduce=COST, step_2=solver.step_2)
        for solver in SOLVERS.values()
    )
    assert exact.time_s <= found.time_s <= 1.02 * exact.time_s
    assert sum(found.extra) + found.tail == sum(exact.extra) + exact.tail
    assert all(extra >= 0 for extra in found.extra)


@pytest.mark.parametrize("name", PIPELINES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    elements=st.lists(st.integers(0, 20_000), min_size=1, max_size=5),
    window_s=st.floats(0, 20),
)
def test_slices_are_causal_and_cover_at_most_once(
    name: str, elements: list[int], window_s: float
) -> None:
    """No layer reduces what is not ready yet, and nothing is reduced twice."""
    layers = tuple(MeasuredLayer(G1, window_s, n) for n in elements)
    measured = Measured(layers, elements[-1], COST, element_bytes=4)
    placed = place(PIPELINES[name], measured, parts_of(PIPELINES[name], measured), num_quanta=16)
    ready = [measured.head_elements, *(layer.gradient_elements for layer in layers[:0:-1])]
    left = 0
    for each, now in zip(placed[::-1], ready, strict=True):
        left += now - sum(map(sum, each))
        assert left >= 0
        assert all(size > 0 for sizes in each for size in sizes)


def test_chunks_that_the_host_cannot_issue_in_time_are_not_made() -> None:
    """Where rows would pay for eight chunks, and the host takes longer for them than the layer."""
    costs = LayerCosts(
        all_to_all=LinearCost(alpha_s=0.0, beta_s=1.0, n=8.0),
        all_gather=FREE.over(1),
        reduce_scatter=FREE.over(1),
        expert=LinearCost(alpha_s=0.0, beta_s=2.0, n=8.0),
    )
    choices = (range(1, 9), range(1, 9))
    assert best_pair(FSMOE, costs, choices)[:2] == (8, 8)
    slow = (HostSeconds(layer_s=5.0, chunk_s=9.0), HostSeconds(layer_s=5.0, chunk_s=9.0))
    # r chunks take devices 16 + 16 / r and 32 + 16 / r, and the host 5 + 9 r.
    assert best_pair(FSMOE, costs, choices, Meanwhile(issued=slow))[:2] == (2, 3)
    # Forward waits for counts, backward has been issued while the dense part computed.
    ahead = Meanwhile(dense_s=(100.0, 100.0), issued=slow)
    assert best_pair(FSMOE, costs, choices, ahead)[:2] == (2, 8)
    quick = tuple(HostSeconds(layer_s=0.1, chunk_s=0.1) for _ in slow)
    assert best_pair(FSMOE, costs, choices, Meanwhile(issued=(quick[0], quick[1])))[:2] == (8, 8)


def test_a_host_is_as_slow_as_its_chunks() -> None:
    forward, backward = issued(CPU_HOST, is_split=False)
    assert issued(CPU_HOST, is_split=True)[0].chunk_s > forward.chunk_s
    chunk_s = (4 * forward.chunk_s, 2 * backward.chunk_s)
    slow_forward, slow_backward = issued(CPU_HOST, is_split=False, chunk_s=chunk_s)
    assert slow_forward == pytest.approx([4 * s for s in forward])
    assert slow_backward == pytest.approx([2 * s for s in backward])
