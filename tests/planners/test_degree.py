# SPDX-License-Identifier: Apache-2.0
"""FSMoE's Algorithm 1: golden tests, the formulas against running schedules, and properties.

Shape letters: R degrees, G all-reduces, N random layers.
"""

from __future__ import annotations

import sys
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_moe_ext.planning.layer_costs import (
    Chunks,
    LayerCosts,
    link_seconds,
    makespans,
    path_seconds,
    windows,
)
from ds_moe_ext.planning.pipeline_degrees import (
    BRANCHES,
    best_degree,
    case_of,
    case_seconds,
    fastest_seconds,
    margins,
    solved_degree,
)
from ds_moe_ext.planning.prices import LinearCost
from ds_moe_ext.schedule.simulator import Timeline, simulate
from ds_moe_ext.schedule.step import in_streams
from ds_moe_ext.schedule.task import (
    COMBINE,
    DISPATCH,
    EXPERT,
    INTER,
    INTRA,
    ChunkRange,
    Kind,
    Op,
    Schedule,
    Task,
    Value,
    chunk_ranges,
)
from tests.planners.plainly import PROPERTY

G1 = LayerCosts(
    all_to_all=LinearCost(alpha_s=0.2, beta_s=1e-3, n=4000),
    all_gather=LinearCost(alpha_s=0.1, beta_s=1e-3, n=1000),
    reduce_scatter=LinearCost(alpha_s=0.1, beta_s=1e-3, n=1000),
    expert=LinearCost(alpha_s=0.3, beta_s=1e-3, n=5000),
)
# Testbed A of the paper: F 2.4, B * L 4096, M 1600, H 6400, N_ESP 8, two products in an expert.
ELEMENTS = 2.4 * 4096 * 1600
G5 = LayerCosts(
    all_to_all=LinearCost(alpha_s=0.28746, beta_s=2.3201e-6, n=ELEMENTS / 8),
    all_gather=LinearCost(alpha_s=0.33789, beta_s=2.3478e-7, n=ELEMENTS),
    reduce_scatter=LinearCost(alpha_s=0.39538, beta_s=2.2171e-7, n=ELEMENTS),
    expert=LinearCost(alpha_s=0.70623, beta_s=7.6571e-11, n=ELEMENTS * 6400 / 8 * 2),
)


def chunks_of(degree: int, *seconds: float) -> Chunks:
    """Chunks at one degree, of given seconds."""
    return Chunks(np.array(degree), *map(np.array, seconds))


def cases_up_to(costs: LayerCosts, gradient_s: float, max_degree: int = 8) -> list[int]:
    return [case_of(costs.cut(np.array(r)), gradient_s) for r in range(1, max_degree + 1)]


# Golden tests.


def test_g1_forward() -> None:
    plan = best_degree(G1, 0.0, 8)
    times = [15.9, 11.2, 10.0667, 10.3, 10.6, 10.9333, 11.2857, 11.65]
    assert plan.times_R == pytest.approx(times, abs=5e-5)
    assert (plan.degree, plan.case) == (3, 3)
    assert plan.time_s == plan.times_R[2]
    assert plan.window_s == pytest.approx(0.8667, abs=5e-5)
    assert cases_up_to(G1, 0.0) == [2, 2, 3, 3, 3, 3, 3, 3]


def test_g1_backward() -> None:
    plan = best_degree(G1.in_backward(), 0.0, 8)
    times = [21.2, 16.8, 15.7333, 15.5, 15.6, 15.8667, 16.2286, 16.65]
    assert plan.times_R == pytest.approx(times, abs=5e-5)
    assert (plan.degree, plan.case) == (4, 2)
    assert plan.window_s == pytest.approx(5.9)
    assert cases_up_to(G1.in_backward(), 0.0) == [2] * 8
    chunks = G1.in_backward().cut(np.array(4))
    assert chunks[1:] == pytest.approx([1.2, 0.35, 0.35, 3.1])
    assert case_seconds(chunks, 0.0) == pytest.approx([9.6, 15.5, 10.3, 5.2])


def test_g1_backward_with_an_all_reduce() -> None:
    plan = best_degree(G1.in_backward(), 9.0, 8)
    assert plan.times_R[:5] == pytest.approx([21.2, 17.8, 18.2, 18.6, 19.0])
    assert (plan.degree, plan.case) == (2, 1)
    assert cases_up_to(G1.in_backward(), 9.0) == [2] + [1] * 7


def test_g3_a_case_is_less_than_the_makespan() -> None:
    chunks = chunks_of(2, 1.0, 0.5, 1.5, 0.1)
    assert case_seconds(chunks, 0.0) == pytest.approx([4, 4.2, 6, 6])
    assert case_of(chunks, 0.0) == 3
    assert makespans(chunks, 0.0) == pytest.approx(6.5)


def test_g5() -> None:
    """The spec's times are those of seconds rounded to thousandths."""
    at_one = G5.cut(np.array(1))
    assert at_one[1:] == pytest.approx([4.849, 4.031, 3.883, 2.633], abs=5e-4)
    forward, backward = best_degree(G5, 0.0, 8), best_degree(G5.in_backward(), 0.0, 8)
    times = [20.245, 14.596, 13.975, 13.951, 14.167, 15.353]
    assert forward.times_R[[0, 1, 2, 3, 4, 7]] == pytest.approx(times, abs=1e-3)
    times = [22.878, 16.139, 14.834, 14.888, 15.485, 18.5]
    assert backward.times_R[[0, 1, 2, 3, 4, 7]] == pytest.approx(times, abs=1e-3)
    assert (forward.degree, backward.degree) == (4, 3)


# The schedule that the formulas price: task lists of the paper's figure 3 (c) and (d).

GATHER_ETP = Op("all_gather", INTRA)
SCATTER_ETP = Op("reduce_scatter", INTRA)
ALL_REDUCE = Op("all_reduce", INTER)
X, SENT, GATHERED, COMPUTED, SCATTERED, Y, GRADIENT, REDUCED = (
    *(Kind(name, by_token=True) for name in ("x", "sent", "gathered", "computed", "scattered")),
    *(Kind(name) for name in ("y", "gradient", "reduced")),
)


def tasks_of(op: Op, read: Kind, written: Kind, chunks: tuple[ChunkRange, ...]) -> list[Task]:
    return [Task(op, 0, c, (Value(read, 0, c),), (Value(written, 0, c),)) for c in chunks]


def fsmoe(degree: int, has_all_reduce: bool = True) -> Schedule:
    """The MoE part of a layer, in the order in which the host issues it (spec 2.5)."""
    chunks, whole = chunk_ranges(degree, degree), ChunkRange(0, degree)
    sent = tasks_of(DISPATCH, X, SENT, chunks), tasks_of(GATHER_ETP, SENT, GATHERED, chunks)
    reduced = tasks_of(ALL_REDUCE, GRADIENT, REDUCED, (whole,) * has_all_reduce)
    computed = (
        tasks_of(EXPERT, GATHERED, COMPUTED, chunks),
        tasks_of(SCATTER_ETP, COMPUTED, SCATTERED, chunks),
    )
    combined = tasks_of(COMBINE, SCATTERED, Y, chunks)
    pairs = [task for lists in (sent, computed) for pair in zip(*lists) for task in pair]
    tasks = (*pairs[: 2 * degree], *reduced, *pairs[2 * degree :], *combined)
    return Schedule(tasks, (Value(X, 0, whole), Value(GRADIENT, 0, whole)), (Value(Y, 0, whole),))


class Seconds(NamedTuple):
    """Of one task: all-to-all, all-gather, reduce-scatter, expert, all-reduce."""

    a: float
    g: float
    s: float
    e: float
    t: float

    def of(self, rank: int, task: Task) -> float:
        by_op = {DISPATCH: self.a, COMBINE: self.a, EXPERT: self.e, ALL_REDUCE: self.t}
        by_op |= {GATHER_ETP: self.g, SCATTER_ETP: self.s}
        return {op.name: seconds for op, seconds in by_op.items()}[task.op.name]


def events(schedule: Schedule, timeline: Timeline, op: Op) -> list[tuple[float, float]]:
    """Start and end of each task of an op."""
    times = zip(schedule.tasks, timeline.start_s[0], timeline.end_s[0])
    return [(start, end) for task, start, end in times if task.op == op]


def test_g4_events() -> None:
    schedule = fsmoe(2)
    timeline = simulate(schedule, Seconds(a=2, g=1, s=1, e=3, t=3).of)
    assert {
        op: events(schedule, timeline, op)
        for op in (DISPATCH, ALL_REDUCE, GATHER_ETP, EXPERT, SCATTER_ETP, COMBINE)
    } == {
        DISPATCH: [(0, 2), (2, 4)],
        ALL_REDUCE: [(4, 7)],
        GATHER_ETP: [(2, 3), (4, 5)],
        EXPERT: [(3, 6), (6, 9)],
        SCATTER_ETP: [(6, 7), (9, 10)],
        COMBINE: [(7, 9), (10, 12)],
    }
    assert timeline.makespan_s == 12
    chunks = chunks_of(2, 2.0, 1.0, 1.0, 3.0)
    assert makespans(chunks, 3.0) == makespans(chunks, 0.0) == 12
    assert windows(chunks) == 4


def in_one_stream(schedule: Schedule) -> Schedule:
    """All that is sent in one queue; combines and reduce-scatters of the chunks take turns."""
    last = (SCATTER_ETP, COMBINE)
    tasks = sorted(
        schedule.tasks, key=lambda task: (task.op in last) * (1 + task.chunk_range.start)
    )
    in_turns = Schedule(tuple(tasks), schedule.inputs, schedule.outputs)
    return in_streams(in_turns, {INTRA: INTER})


def test_g4_in_one_stream() -> None:
    """Then the all-reduce is no longer free."""
    for has_all_reduce, makespan_s in ((True, 15), (False, 12)):
        schedule = in_one_stream(fsmoe(2, has_all_reduce))
        assert simulate(schedule, Seconds(a=2, g=1, s=1, e=3, t=3).of).makespan_s == makespan_s


@pytest.mark.parametrize("costs", [G5, G5.in_backward()], ids=["forward", "backward"])
def test_g5_in_one_stream(costs: LayerCosts) -> None:
    times = []
    for degree in range(1, 9):
        _, a, g, s, e = map(float, costs.cut(np.array(degree)))
        schedule = in_one_stream(fsmoe(degree, has_all_reduce=False))
        times.append(simulate(schedule, Seconds(a, g, s, e, 0).of).makespan_s)
    assert times.index(min(times)) + 1 == 2
    assert min(times) == pytest.approx(18.92, abs=5e-3)


def test_the_makespan_is_what_the_schedule_takes() -> None:
    draw = np.random.default_rng(0)
    schedules = {key: fsmoe(*key) for key in product(range(1, 9), (False, True))}
    for _ in range(300):
        degree, has_all_reduce = int(draw.integers(1, 9)), bool(draw.integers(2))
        seconds = Seconds(*(draw.integers(0, 40, size=5) / 4))
        chunks = chunks_of(degree, *seconds[:4])
        simulated = simulate(schedules[degree, has_all_reduce], seconds.of).makespan_s
        assert simulated == makespans(chunks, seconds.t * has_all_reduce)


def recurrence(chunks: Chunks, all_reduce_N: np.ndarray) -> np.ndarray:
    """When the last combine is done, stream by stream, float ``[N]``."""
    _, a, g, s, e = chunks
    inter, intra, compute = np.zeros((3, *a.shape))
    gathered, scattered = [], []
    for _ in range(chunks.degree_R[0]):
        inter = inter + a
        intra = np.maximum(intra, inter) + g
        gathered.append(intra)
    for arrived in gathered:
        compute = np.maximum(compute, arrived) + e
        intra = np.maximum(intra, compute) + s
        scattered.append(intra)
    inter = inter + all_reduce_N
    for ready in scattered:
        inter = np.maximum(inter, ready) + a
    return inter


def random_chunks(degree: int, num: int) -> tuple[Chunks, np.ndarray]:
    """Chunks of ``N`` layers with all ratios of seconds, and their all-reduces, half of them 0."""
    draw = np.random.default_rng(degree)
    a, g, s, e, t = 10 ** draw.uniform(-2, 1, size=(5, num))
    s = np.where(draw.integers(2, size=num) > 0, s, g)
    t = np.where(draw.integers(2, size=num) > 0, degree * t, 0.0)
    return Chunks(np.full(num, degree), a, g, s, e), t


@pytest.mark.parametrize("degree", range(1, 11))
def test_the_makespan_is_the_recurrence(degree: int) -> None:
    """10,000 layers."""
    chunks, t_N = random_chunks(degree, 1000)
    np.testing.assert_allclose(recurrence(chunks, t_N), makespans(chunks, t_N), rtol=1e-12)


# The paper's cases.


def test_cases_are_exhaustive_and_exclusive() -> None:
    """Whatever the predicates are."""
    for holds in product((False, True), repeat=7):
        fitting = [b for b in BRANCHES if all(holds[abs(q) - 1] == (q > 0) for q in b.where)]
        assert len(fitting) == 1


@pytest.mark.parametrize("degree", range(1, 11))
def test_a_case_is_the_makespan_if_gather_and_scatter_are_equal(degree: int) -> None:
    chunks, t_N = random_chunks(degree, 300)
    seen = set()
    for n, gradient_s in enumerate(t_N):
        one = Chunks(*(seconds_N[n] for seconds_N in chunks))
        times = case_seconds(one, gradient_s)
        case = case_of(one, gradient_s)
        seen.add(case)
        makespan_s = float(makespans(one, gradient_s))
        assert makespan_s >= max(times)
        if one.all_gather_R == one.reduce_scatter_R:
            assert times[case - 1] == pytest.approx(max(times), rel=1e-12)
            assert makespan_s == pytest.approx(max(times), rel=1e-12)
    assert seen == ({1, 2} if degree == 1 else {1, 2, 3, 4})


def test_the_window_is_the_papers_if_gather_and_scatter_are_equal() -> None:
    for degree in range(1, 11):
        chunks, _ = random_chunks(degree, 200)
        window_N = windows(chunks)
        r, a, g, s, e = chunks
        by_case = {
            2: r * e + g + s - 2 * (r - 1) * a,
            3: g + s,
            4: r * g + r * s - 2 * (r - 1) * a,
        }
        for n in np.flatnonzero(g == s):
            case = case_of(Chunks(*(seconds_N[n] for seconds_N in chunks)), 0.0)
            assert window_N[n] == pytest.approx(by_case[case][n], rel=1e-9)


def test_predicates() -> None:
    """One chunk time at a time, of G1's backward at its degree."""
    holds = [bool(m > 0) for m in margins(chunks_of(4, 1.2, 0.35, 0.35, 3.1), 2.0)]
    assert holds == [True, True, True, True, False, True, False]


# Properties of the search.

SECONDS = st.floats(0, 10)


@st.composite
def layer_costs(draw: st.DrawFn, ep_ranks_are_even: bool = False) -> LayerCosts:
    def one() -> LinearCost:
        beta_s, n = draw(st.sampled_from([1e-3, 1e-6, 0.0])), draw(st.floats(0, 1e4))
        return LinearCost(alpha_s=draw(st.floats(0, 1)), beta_s=beta_s, n=n)

    gather = one()
    return LayerCosts(
        all_to_all=one(),
        all_gather=gather,
        reduce_scatter=gather if ep_ranks_are_even else one(),
        expert=one(),
    )


@PROPERTY
@given(layer_costs(), SECONDS, st.integers(1, 40))
def test_the_search_is_exact_and_takes_the_smallest(
    costs: LayerCosts, gradient_s: float, max_degree: int
) -> None:
    plan = best_degree(costs, gradient_s, max_degree)
    times = [makespans(costs.cut(np.array(r)), gradient_s).item() for r in range(1, max_degree + 1)]
    assert plan.times_R.tolist() == times
    assert plan.time_s == pytest.approx(min(times), rel=1e-11)
    assert all(time > plan.time_s for time in times[: plan.degree - 1])
    assert not plan.times_R.flags.writeable


@PROPERTY
@given(layer_costs(), SECONDS)
def test_times_fall_and_then_rise(costs: LayerCosts, gradient_s: float) -> None:
    plan = best_degree(costs, gradient_s, 64)
    at = plan.degree - 1
    slack = 1e-9 * plan.times_R.max()
    assert (np.diff(plan.times_R[: at + 1]) <= slack).all()
    assert (np.diff(plan.times_R[at:]) >= -slack).all()


@PROPERTY
@given(layer_costs(), st.lists(SECONDS, min_size=2, max_size=20))
def test_longer_all_reduces_cost_no_less_and_no_more_than_themselves(
    costs: LayerCosts, gradients: list[float]
) -> None:
    gradient_G = np.array(sorted(gradients))
    seconds_G = fastest_seconds(costs, gradient_G, 16)
    alone = [best_degree(costs, t, 16).time_s for t in gradient_G]
    assert seconds_G == pytest.approx(alone, rel=1e-11)
    rises_G, grows_G = np.diff(seconds_G), np.diff(gradient_G)
    assert (rises_G >= 0).all()
    assert (rises_G <= grows_G + 1e-12 * seconds_G.max()).all()


@PROPERTY
@given(layer_costs(), st.floats(0, 1))
def test_what_fits_into_the_window_is_free(costs: LayerCosts, share: float) -> None:
    plan = best_degree(costs, 0.0, 16)
    assert plan.window_s >= 0
    (hidden_s,) = fastest_seconds(costs, np.array([plan.window_s * share]), 16)
    assert hidden_s == pytest.approx(plan.time_s, rel=1e-11)
    at_degree = costs.cut(np.array(plan.degree))
    longer = makespans(at_degree, plan.window_s + 1.0)
    assert longer == pytest.approx(plan.time_s + 1.0, rel=1e-9)


@PROPERTY
@given(layer_costs(), SECONDS)
def test_the_best_degree_is_beside_a_closed_candidate(costs: LayerCosts, gradient_s: float) -> None:
    """A path's seconds are ``A / r + B r + C``: the best is where one is least, or two cross."""
    degree_3 = np.array([1.0, 2.0, 4.0])
    chunks = costs.cut(degree_3)
    times_83 = np.vstack([link_seconds(chunks) + gradient_s, path_seconds(chunks)])
    terms_33 = np.stack([1 / degree_3, degree_3, np.ones(3)])
    abc = times_83 @ np.linalg.inv(terms_33)
    candidates = {1.0, 64.0}
    for a, b, _ in abc:
        if a > 0 and b > 0:
            candidates.add(float(np.sqrt(a / b)))
    for one, other in combinations(abc, 2):
        a, b, c = one - other
        candidates |= {float(root.real) for root in np.roots([b, c, a])} if b or c else set()
    degrees = {int(d) for x in candidates if 1 <= x <= 64 for d in (np.floor(x), np.ceil(x))}
    best = makespans(costs.cut(np.array(sorted(degrees))), gradient_s).min()
    assert best == pytest.approx(best_degree(costs, gradient_s, 64).time_s, rel=1e-9)


def test_the_smallest_of_equal_degrees() -> None:
    """6 / r + r is 5 for 2 and for 3, but for rounding; and nothing costs nothing anywhere."""
    nothing = LinearCost(alpha_s=0, beta_s=0, n=0)
    for unit_s in (1.0, 0.1, 0.7, 1e-6):
        costs = LayerCosts(
            all_to_all=LinearCost(alpha_s=0, beta_s=unit_s, n=3),
            all_gather=nothing,
            reduce_scatter=nothing,
            expert=LinearCost(alpha_s=unit_s, beta_s=unit_s, n=100),
        )
        assert best_degree(costs, 0.0, 8).degree == 2
    free = LayerCosts(
        all_to_all=nothing, all_gather=nothing, reduce_scatter=nothing, expert=nothing
    )
    assert (best_degree(free, 0.0, 8).degree, best_degree(free, 0.0, 8).time_s) == (1, 0.0)


# The paper's solver.


def test_the_solver_finds_the_best_degree() -> None:
    pytest.importorskip("scipy")
    for costs, gradient_s in product((G1, G1.in_backward()), (0.0, 9.0)):
        solved, exact = (plan(costs, gradient_s, 8) for plan in (solved_degree, best_degree))
        assert (solved.degree, solved.time_s) == (exact.degree, exact.time_s)
    assert solved_degree(G5, 0.0, 8).degree == 4
    assert solved_degree(G5.in_backward(), 0.0, 8).degree == 3


@pytest.mark.slow
@settings(PROPERTY, max_examples=8)
@given(layer_costs(), layer_costs(ep_ranks_are_even=True), SECONDS)
def test_the_solver_is_never_better(any_costs: LayerCosts, even: LayerCosts, t: float) -> None:
    """And equally good if all-gather and reduce-scatter take equally long."""
    pytest.importorskip("scipy")
    assert solved_degree(any_costs, t, 8).time_s >= best_degree(any_costs, t, 8).time_s * (1 - 1e-9)
    assert solved_degree(even, t, 8).time_s == pytest.approx(best_degree(even, t, 8).time_s)


def test_the_solver_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match="pip install scipy, or take planner 'exact'"):
        solved_degree(G1, 0.0, 8)


# Input that cannot be.


@pytest.mark.parametrize("plan", [best_degree, solved_degree])
def test_bad_input(plan: object) -> None:
    assert callable(plan)
    for gradient_s in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"the all-reduce takes .* s; give finite seconds"):
            plan(G1, gradient_s, 8)
    with pytest.raises(ValueError, match="max_degree is 0; a layer has 1 chunk at least"):
        plan(G1, 0.0, 0)


@pytest.mark.parametrize("name", ["alpha_s", "beta_s", "n"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_bad_costs(name: str, value: float) -> None:
    good = {"alpha_s": 0.0, "beta_s": 0.0, "n": 0.0}
    with pytest.raises(ValueError, match=f"{name} is {value}; costs are finite"):
        LinearCost(**{**good, name: value})
