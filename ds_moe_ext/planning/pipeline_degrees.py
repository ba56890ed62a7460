# SPDX-License-Identifier: Apache-2.0
"""FSMoE's two planners: chunks of a layer's tokens, and gradients beside the layers. Pure.

``best_degree`` is Algorithm 1, exact (spec 2.2 to 2.5), ``solved_degree`` the same by SciPy's
solver, as in the paper. ``partition_gradients`` says which gradients are reduced beside which layer
of backward (section 5): Step 1 fills windows, Step 2 moves what is left, by dynamic programming or,
as the paper does, by SciPy's differential evolution (``evolved``). Letters of the formulas are the
paper's, as in ``cost.layer_costs``, and ``t``, the seconds of the all-reduce. Shape letters: R
degrees, G all-reduces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ds_moe_ext.planning.layer_costs import (
    TIE,
    Chunks,
    LayerCosts,
    link_seconds,
    makespans,
    path_seconds,
    windows,
)
from ds_moe_ext.planning.prices import AllReduce, check_costs


def case_seconds(chunks: Chunks, gradient_s: float) -> tuple[np.ndarray, ...]:
    """The paper's ``t1`` to ``t4``, each float ``[R]``."""
    t2_R, t3_R, t4_R, *_ = path_seconds(chunks)
    return (link_seconds(chunks) + gradient_s, t2_R, t3_R, t4_R)


class Branch(NamedTuple):
    """One way to be in a case."""

    # 1 if the slow links are busy to the end, 2 the experts, 3 the slow links but for the gap that
    # all-gather and reduce-scatter leave, 4 the fast links
    case: int
    where: tuple[int, ...]  # predicates that hold, by number; those that do not are below zero


BRANCHES = (
    Branch(1, (1, -2, 4)),
    Branch(1, (1, 2, 5)),
    Branch(1, (-1, -3, 6)),
    Branch(1, (-1, 3, 7)),
    Branch(2, (1, 2, -5)),
    Branch(2, (-1, 3, -7)),
    Branch(3, (1, -2, -4)),
    Branch(4, (-1, -3, -6)),
)
"""Of these a degree is in exactly one."""


def margins(chunks: Chunks, gradient_s: float) -> tuple[np.ndarray, ...]:
    """By how many seconds predicates ``Q1`` to ``Q7`` hold, each float ``[R]``; above 0 they do."""
    r, a, g, s, e = chunks
    t = gradient_s
    beside_experts = r * e - 2 * (r - 1) * a + g + s
    return (
        a - g,
        r * e - 2 * (r - 1) * a,
        r * e - (r - 1) * (g + s),
        t - (g + s),
        t - beside_experts,
        t - (r * g + r * s - 2 * (r - 1) * a),
        t - beside_experts,
    )


def case_of(chunks: Chunks, gradient_s: float) -> int:
    """The paper's case of one degree: 1 to 4, see ``Branch``."""
    holds = [bool(margin > 0) for margin in margins(chunks, gradient_s)]
    return next(
        case for case, where in BRANCHES if all(holds[abs(q) - 1] == (q > 0) for q in where)
    )


@dataclass(frozen=True, eq=False)
class PipelinePlan:
    """The degree of one layer in one direction."""

    degree: int  # number of chunks
    case: int  # what bounds the layer at that degree; see ``Branch``
    window_s: float  # all-reduce that the layer hides at that degree; see ``windows``
    times_R: np.ndarray  # seconds of the layer at degree 1, 2 and so on

    @property
    def time_s(self) -> float:
        return float(self.times_R[self.degree - 1])


Planner = Callable[[LayerCosts, float, int], PipelinePlan]
"""From the costs of a layer, the seconds of its all-reduce and the largest degree."""


def best_degree(costs: LayerCosts, gradient_s: float, max_degree: int) -> PipelinePlan:
    """The degree at which the layer is fastest; of equals the smallest.

    Args:
        costs: of the direction; see ``LayerCosts.in_backward``.
        gradient_s: seconds of the all-reduce inside the layer; 0 in forward.
        max_degree: the largest degree to try; the search costs a few operations on each.
    """
    times_R = _times(costs, gradient_s, max_degree)
    return _planned(costs, gradient_s, times_R, degree=int(first_least(times_R)) + 1)


def _times(costs: LayerCosts, gradient_s: float, max_degree: int) -> np.ndarray:
    if not 0 <= gradient_s < math.inf:
        raise ValueError(f"the all-reduce takes {gradient_s} s; give finite seconds from 0")
    if max_degree < 1:
        raise ValueError(f"max_degree is {max_degree}; a layer has 1 chunk at least")
    times_R = makespans(costs.cut(np.arange(1, max_degree + 1)), gradient_s)
    times_R.flags.writeable = False
    return times_R


def _planned(
    costs: LayerCosts, gradient_s: float, times_R: np.ndarray, *, degree: int
) -> PipelinePlan:
    chunks = costs.cut(np.asarray(degree))
    return PipelinePlan(degree, case_of(chunks, gradient_s), float(windows(chunks)), times_R)


def first_least(seconds: np.ndarray) -> np.ndarray:
    """Along the last axis: the first place of the least, or of what equals it but for rounding."""
    return (seconds <= seconds.min(axis=-1, keepdims=True) * (1 + TIE)).argmax(axis=-1)


def fastest_seconds(costs: LayerCosts, gradient_G: np.ndarray, max_degree: int) -> np.ndarray:
    """Seconds of the layer at its best degree under each of many all-reduces, float ``[G]``: the
    paper's ``f_moe``. It does not fall as all-reduces grow, and rises by no more than they do."""
    chunks = costs.cut(np.arange(1, max_degree + 1))
    path_R = path_seconds(chunks).max(axis=0)
    times_GR = np.maximum(link_seconds(chunks) + gradient_G[:, None], path_R)
    return times_GR.min(axis=1)


def solved_degree(costs: LayerCosts, gradient_s: float, max_degree: int) -> PipelinePlan:
    """The degree that SciPy's SLSQP finds, as in the paper; to compare with ``best_degree``.

    Each branch of the cases is solved between whole degrees, and the whole degrees beside the
    solutions are compared by the makespan. If all-gather and reduce-scatter take equally long, that
    is the best degree. Else the time of a case is not quite the makespan, and the best degree may
    lie beside no solution. Arguments as of ``best_degree``.
    """
    times_R = _times(costs, gradient_s, max_degree)
    beside = {1}
    if times_R[0] > 0:
        for solution in _solutions(costs, gradient_s, max_degree, unit_s=float(times_R[0])):
            beside |= {math.floor(solution), math.ceil(solution)}
    degrees = sorted(beside & set(range(1, max_degree + 1)))
    best = first_least(times_R[np.array(degrees) - 1])
    return _planned(costs, gradient_s, times_R, degree=degrees[best])


def _solutions(
    costs: LayerCosts, gradient_s: float, max_degree: int, *, unit_s: float
) -> Iterable[float]:
    """Where each branch is fastest, if the solver finds it."""
    try:
        from scipy.optimize import minimize
    except ImportError as error:
        raise ImportError(
            "planner 'slsqp' needs SciPy, which is not installed; pip install scipy, or take "
            "planner 'exact', which needs nothing and finds no slower degree"
        ) from error

    def on(branch: Branch) -> Iterable[float]:
        def cost(degree_1: np.ndarray) -> float:
            times = case_seconds(costs.cut(degree_1), gradient_s)
            return float(times[branch.case - 1][0]) / unit_s

        def slack(degree_1: np.ndarray) -> list[float]:
            """Not below zero where the branch is."""
            margin = margins(costs.cut(degree_1), gradient_s)
            return [
                math.copysign(1 / unit_s, q) * float(margin[abs(q) - 1][0]) for q in branch.where
            ]

        for start in (1.0, math.sqrt(max_degree), float(max_degree)):
            found = minimize(
                cost,
                x0=[start],
                method="SLSQP",
                bounds=[(1, max_degree)],
                constraints={"type": "ineq", "fun": slack},
            )
            if found.success:
                yield float(found.x[0])

    for branch in BRANCHES:
        yield from on(branch)


QUANTA = 256  # steps in which Step 2 moves what is left


@dataclass(frozen=True, kw_only=True)
class BackwardLayer:
    """One generalized layer, as the partition sees it."""

    # from seconds of a reduction placed in its MoE part to seconds of that part at the degree which
    # suits it best, for each of many reductions, both float ``[N]``: ``f_moe``, as
    # ``degree.fastest_seconds``. It does not fall, and rises by no more than the seconds placed.
    moe_seconds: Callable[[np.ndarray], np.ndarray]
    moe_window_s: float  # seconds of reduction that its MoE part hides, ``t_olp,moe``
    dense_window_s: float  # seconds of reduction that its dense part hides, ``t_olp,dense``
    # elements of gradients that become ready when its backward begins: those of the layer before it
    # in backward, of the head for the first; ``n_grad^(i-1)``
    gradient_elements: int

    def __post_init__(self) -> None:
        check_costs({k: v for k, v in vars(self).items() if k.endswith("_window_s")})
        _check_count("gradient_elements", self.gradient_elements)

    @classmethod
    def of(
        cls, costs: LayerCosts, *, max_degree: int, dense_window_s: float, gradient_elements: int
    ) -> BackwardLayer:
        """A layer whose MoE part, with such costs in backward, runs at the degree that suits its
        reduction best."""
        return cls(
            moe_seconds=partial(fastest_seconds, costs, max_degree=max_degree),
            moe_window_s=best_degree(costs, 0.0, max_degree).window_s,
            dense_window_s=dense_window_s,
            gradient_elements=gradient_elements,
        )


@dataclass(frozen=True)
class HiddenSlices:
    """Step 1: elements by layer, in the order of backward."""

    dense: tuple[int, ...]  # reduced in the dense window
    moe: tuple[int, ...]  # reduced in the MoE window
    # ready but not reduced when the layer ends. Step 2 may have moved no more by then.
    left: tuple[int, ...]


def fill_windows(layers: Sequence[BackwardLayer], all_reduce: AllReduce) -> HiddenSlices:
    """Step 1: each layer hides as much as its windows take of what is ready (eqs. 3 and 4).

    Both windows begin their own reduction, and what does not fit waits for the next layer whole
    (spec section 3; as printed, the equations lose elements at every layer and can go below zero).
    """
    dense, moe, left = [], [], []
    ready = 0
    for layer in layers:
        ready += layer.gradient_elements
        dense.append(all_reduce.hidden_elements(ready, layer.dense_window_s))
        ready -= dense[-1]
        moe.append(all_reduce.hidden_elements(ready, layer.moe_window_s))
        ready -= moe[-1]
        left.append(ready)
    return HiddenSlices(tuple(dense), tuple(moe), tuple(left))


@dataclass(frozen=True)
class GradientPartition:
    """Elements by layer, in the order of backward."""

    dense: tuple[int, ...]  # reduced beside the dense part
    moe: tuple[int, ...]  # reduced in the window of the MoE part
    # reduced in the MoE part besides, in one piece with ``moe``; they may lengthen it
    extra: tuple[int, ...]
    tail: int  # elements reduced after the last layer: what no layer took, and its own gradients
    # seconds of all MoE parts and of the tail's reduction. Dense parts are not in it: they hide
    # their slices and take the same time under any partition.
    time_s: float

    @property
    def within_moe(self) -> tuple[int, ...]:
        """Elements of the one reduction within each MoE part."""
        return tuple(moe + extra for moe, extra in zip(self.moe, self.extra))


Step2 = Callable[[Sequence[BackwardLayer], HiddenSlices, AllReduce, int, int], tuple[int, ...]]
"""``(layers, what Step 1 hid, costs, tail elements, parts) -> elements moved into each MoE part``;
there is something left to move."""


def partition_gradients(
    layers: Sequence[BackwardLayer],
    *,
    all_reduce: AllReduce,
    tail_elements: int = 0,
    num_quanta: int = QUANTA,
    step_2: Step2 | None = None,
) -> GradientPartition:
    """Both steps. Costs ``Q`` values of ``moe_seconds`` and ``Q * Q`` sums a layer.

    Step 2 (eq. 5, with the tail in the objective and a causal bound) is solved by dynamic
    programming: the best there is if what is left moves in ``num_quanta`` equal parts. The best of
    all is faster by the reduction of one element more than a part, for each layer and the tail, or
    by less. Among equals the fewest elements move, and as late as they can.

    Args:
        layers: in the order of backward.
        all_reduce: cost of reducing gradients.
        tail_elements: gradients that become ready after the last layer: its own.
        num_quanta: parts in which elements move; of one element if there are fewer elements.
        step_2: another way to solve it, as ``evolved``.
    """
    _check_count("tail_elements", tail_elements)
    _check_count("num_quanta", num_quanta, least=1)
    hidden = fill_windows(layers, all_reduce)
    left = hidden.left[-1] if layers else 0
    extra = (0,) * len(layers)
    if left:
        move = step_2 or _move
        extra = move(layers, hidden, all_reduce, tail_elements, min(num_quanta, left))
        assert min(extra) >= 0 and all(map(int.__le__, accumulate(extra), hidden.left))
    tail = tail_elements + left - sum(extra)
    reduced_s_N = all_reduce.seconds_of_each(np.array(hidden.moe) + np.array(extra))
    moe_s = sum(
        layer.moe_seconds(reduced_s_1).item()
        for layer, reduced_s_1 in zip(layers, reduced_s_N[:, None])
    )
    time_s = moe_s + all_reduce.seconds(tail)
    return GradientPartition(hidden.dense, hidden.moe, extra, tail, time_s)


def _move(
    layers: Sequence[BackwardLayer],
    hidden: HiddenSlices,
    all_reduce: AllReduce,
    tail_elements: int,
    num_quanta: int,
) -> tuple[int, ...]:
    """Step 2: elements moved into each layer's MoE part, of those left after the last layer."""
    left = hidden.left[-1]
    elements_Q = np.array([quanta * left // num_quanta for quanta in range(num_quanta + 1)])
    moved_QQ = np.subtract.outer(elements_Q, elements_Q)  # by after and before a layer
    moved_N, size_N = np.unique(np.maximum(moved_QQ, 0), return_inverse=True)
    size_QQ = size_N.reshape(moved_QQ.shape)  # which NumPy 1 leaves flat
    best_s_Q = np.where(elements_Q == 0, 0.0, np.inf)
    sources = []
    for layer, moe, ready in zip(layers, hidden.moe, hidden.left):
        seconds_N = layer.moe_seconds(all_reduce.seconds_of_each(moe + moved_N))
        best_s_QQ = np.where(moved_QQ >= 0, best_s_Q + seconds_N[size_QQ], np.inf)
        sources.append(first_least(best_s_QQ))
        best_s_Q = np.where(elements_Q <= ready, best_s_QQ.min(axis=1), np.inf)
    tail_s_Q = all_reduce.seconds_of_each(tail_elements + left - elements_Q)
    path = [int(first_least(best_s_Q + tail_s_Q))]
    for source_Q in reversed(sources):
        path.append(int(source_Q[path[-1]]))
    return tuple(np.diff(elements_Q[path[::-1]]).tolist())


def _check_count(name: str, value: int, *, least: int = 0) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}; give a number of at least {least}")


GENERATIONS = 300
SEED = 0  # the same on every rank


def evolved(
    layers: Sequence[BackwardLayer],
    hidden: HiddenSlices,
    all_reduce: AllReduce,
    tail_elements: int,
    num_quanta: int,
) -> tuple[int, ...]:
    """Step 2 by SciPy's differential evolution; arguments as of ``Step2``.

    A candidate names elements for each layer; what is not ready by then, or hidden by a later
    layer, counts for nothing, and what is left for the tail.
    """
    try:
        from scipy.optimize import differential_evolution
    except ImportError as error:
        raise ImportError(
            "solver 'paper' needs SciPy, which is not installed; pip install scipy, or take solver "
            "'exact', which needs nothing and finds no slower partition"
        ) from error

    # What a layer moves, the windows of later ones must be able to do without (as in ``_move``).
    movable = np.minimum.accumulate(hidden.left[::-1])[::-1].tolist()

    def taken(wanted_IN: np.ndarray) -> np.ndarray:
        """Whole elements, as many as are ready, int64 ``[I, N]``."""
        moved_N = np.zeros(wanted_IN.shape[1], dtype=np.int64)
        taken_IN = np.zeros(wanted_IN.shape, dtype=np.int64)
        for own_N, wanted_N, most in zip(taken_IN, wanted_IN, movable):
            own_N[:] = np.minimum(np.rint(wanted_N).astype(np.int64), most - moved_N)
            moved_N += own_N
        return taken_IN

    def cost(wanted_IN: np.ndarray) -> np.ndarray:
        taken_IN = taken(wanted_IN)
        tail_N = tail_elements + hidden.left[-1] - taken_IN.sum(axis=0)
        total_N = all_reduce.seconds_of_each(tail_N)
        for layer, moe, own_N in zip(layers, hidden.moe, taken_IN):
            total_N = total_N + layer.moe_seconds(all_reduce.seconds_of_each(moe + own_N))
        return total_N

    found = differential_evolution(
        cost,
        bounds=[(0, most) for most in movable],
        maxiter=GENERATIONS,
        rng=SEED,
        vectorized=True,
        updating="deferred",
        polish=False,
    )
    return tuple(taken(found.x[:, None])[:, 0].tolist())
