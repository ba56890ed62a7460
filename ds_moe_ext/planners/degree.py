# SPDX-License-Identifier: Apache-2.0
"""In how many chunks a layer's tokens travel: FSMoE's Algorithm 1, exact (spec 2.2 to 2.5). Pure.

Letters of the formulas are the paper's, as in ``cost.layer_costs``, and ``t``, the seconds of the
all-reduce. Shape letters: R degrees, G all-reduces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_moe_ext.cost.layer_costs import (
    TIE,
    Chunks,
    LayerCosts,
    link_seconds,
    makespans,
    path_seconds,
    windows,
)


def case_seconds(chunks: Chunks, gradient_s: float) -> tuple[np.ndarray, ...]:
    """The paper's ``t1`` to ``t4``, each float ``[R]``."""
    t2_R, t3_R, t4_R, *_ = path_seconds(chunks)
    return (link_seconds(chunks) + gradient_s, t2_R, t3_R, t4_R)


class Branch(NamedTuple):
    """One way to be in a case.

    Attributes:
        case: 1 if the slow links are busy to the end, 2 the experts, 3 the slow links but for the
            gap that all-gather and reduce-scatter leave, 4 the fast links.
        where: predicates that hold, by number; those that do not are below zero.
    """

    case: int
    where: tuple[int, ...]


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
    """The paper's case of one degree: 1 to 4, see ``Branch``.

    Args:
        chunks: at one degree, ``[]``.
        gradient_s: seconds of the all-reduce.
    """
    holds = [bool(margin > 0) for margin in margins(chunks, gradient_s)]
    return next(
        case for case, where in BRANCHES if all(holds[abs(q) - 1] == (q > 0) for q in where)
    )


@dataclass(frozen=True, eq=False)
class PipelinePlan:
    """The degree of one layer in one direction.

    Attributes:
        degree: number of chunks.
        case: what bounds the layer at that degree; see ``Branch``.
        window_s: all-reduce that the layer hides at that degree; see ``windows``.
        times_R: seconds of the layer at degree 1, 2 and so on.
    """

    degree: int
    case: int
    window_s: float
    times_R: np.ndarray

    @property
    def time_s(self) -> float:
        """Seconds of the layer."""
        return float(self.times_R[self.degree - 1])


Planner = Callable[[LayerCosts, float, int], PipelinePlan]
"""From the costs of a layer, the seconds of its all-reduce and the largest degree."""


def best_degree(costs: LayerCosts, gradient_s: float, max_degree: int) -> PipelinePlan:
    """The degree at which the layer is fastest; of equals the smallest.

    Args:
        costs: of the direction; see ``LayerCosts.in_backward``.
        gradient_s: seconds of the all-reduce inside the layer; 0 in forward.
        max_degree: the largest degree to try; the search costs a few operations on each.

    Raises:
        ValueError: seconds below zero or not finite, or no degree to try.
    """
    _check(gradient_s, max_degree)
    times_R = makespans(costs.cut(_degrees(max_degree)), gradient_s)
    return _planned(costs, gradient_s, times_R, degree=_first_least(times_R) + 1)


def fastest_seconds(costs: LayerCosts, gradient_G: np.ndarray, max_degree: int) -> np.ndarray:
    """Seconds of the layer at its best degree under each of many all-reduces, float ``[G]``.

    The paper's ``f_moe``: it does not fall as all-reduces grow, and rises by no more than they do.

    Args:
        costs: of the direction.
        gradient_G: seconds of each all-reduce, finite, from 0.
        max_degree: the largest degree to try.
    """
    chunks = costs.cut(_degrees(max_degree))
    path_R = path_seconds(chunks).max(axis=0)
    times_GR = np.maximum(link_seconds(chunks) + gradient_G[:, None], path_R)
    return times_GR.min(axis=1)


def solved_degree(costs: LayerCosts, gradient_s: float, max_degree: int) -> PipelinePlan:
    """The degree that SciPy's SLSQP finds, as in the paper; to compare with ``best_degree``.

    Each branch of the cases is solved between whole degrees, and the whole degrees beside the
    solutions are compared by the makespan. If all-gather and reduce-scatter take equally long, that
    is the best degree. Else the time of a case is not quite the makespan, and the best degree may
    lie beside no solution. Arguments as of ``best_degree``.

    Raises:
        ImportError: SciPy is not installed.
        ValueError: as ``best_degree``.
    """
    _check(gradient_s, max_degree)
    times_R = makespans(costs.cut(_degrees(max_degree)), gradient_s)
    beside = {1}
    if times_R[0] > 0:
        for solution in _solutions(costs, gradient_s, max_degree, unit_s=float(times_R[0])):
            beside |= {math.floor(solution), math.ceil(solution)}
    degrees = sorted(beside & set(range(1, max_degree + 1)))
    best = _first_least(times_R[np.array(degrees) - 1])
    return _planned(costs, gradient_s, times_R, degree=degrees[best])


def _solutions(
    costs: LayerCosts, gradient_s: float, max_degree: int, *, unit_s: float
) -> Iterable[float]:
    """Where each branch is fastest, if the solver finds it.

    Args:
        unit_s: seconds that count as 1, so that the solver's tolerance suits any unit of time.
    """
    try:
        from scipy.optimize import minimize
    except ImportError as error:
        raise ImportError(
            "planner 'slsqp' needs SciPy, which is not installed; pip install scipy, or take "
            "planner 'exact', which needs nothing and finds no slower degree"
        ) from error

    for case, where in BRANCHES:
        branch = _Program(costs, gradient_s, unit_s, case, where)
        for start in (1.0, math.sqrt(max_degree), float(max_degree)):
            found = minimize(
                branch.cost,
                x0=[start],
                method="SLSQP",
                bounds=[(1, max_degree)],
                constraints={"type": "ineq", "fun": branch.slack},
            )
            if found.success:
                yield float(found.x[0])


@dataclass(frozen=True)
class _Program:
    """What a solver minimises on one branch; attributes as of ``_solutions`` and ``Branch``."""

    costs: LayerCosts
    gradient_s: float
    unit_s: float
    case: int
    where: tuple[int, ...]

    def cost(self, degree_1: np.ndarray) -> float:
        times = case_seconds(self.costs.cut(degree_1), self.gradient_s)
        return float(times[self.case - 1][0]) / self.unit_s

    def slack(self, degree_1: np.ndarray) -> list[float]:
        """Not below zero where the branch is."""
        margin = margins(self.costs.cut(degree_1), self.gradient_s)
        return [
            math.copysign(1 / self.unit_s, q) * float(margin[abs(q) - 1][0]) for q in self.where
        ]


def _degrees(max_degree: int) -> np.ndarray:
    return np.arange(1, max_degree + 1)


def _first_least(times_R: np.ndarray) -> int:
    """Position of the least time, the first of those that are equal but for rounding."""
    return int(np.argmax(times_R <= times_R.min() * (1 + TIE)))


def _planned(
    costs: LayerCosts, gradient_s: float, times_R: np.ndarray, *, degree: int
) -> PipelinePlan:
    chunks = costs.cut(np.asarray(degree))
    times_R.flags.writeable = False
    return PipelinePlan(
        degree=degree,
        case=case_of(chunks, gradient_s),
        window_s=float(windows(chunks)),
        times_R=times_R,
    )


def _check(gradient_s: float, max_degree: int) -> None:
    if not 0 <= gradient_s < math.inf:
        raise ValueError(f"the all-reduce takes {gradient_s} s; give finite seconds from 0")
    if max_degree < 1:
        raise ValueError(f"max_degree is {max_degree}; a layer has 1 chunk at least")
