# SPDX-License-Identifier: Apache-2.0
"""What each layer of a model does by a pipeline: its degrees, and which reductions beside it. Pure.

FSMoE's planner for any of the schedules of ``schedule.orders``: ``plan_pipelines`` says how each
layer of a ``Measured`` model runs (``Piped``), ``with_degrees`` with the degrees that suit a plan
of replicas. Layers here are in the order of the model; the partition of gradients wants that of
backward. Shape letters: R degrees, G reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ds_moe_ext.planning.exchange_costs import Way
from ds_moe_ext.planning.layer_costs import (
    BACKWARD,
    TIE,
    Chunks,
    LayerCosts,
    link_seconds,
    path_seconds,
)
from ds_moe_ext.planning.pipeline_degrees import (
    QUANTA,
    BackwardLayer,
    Planner,
    Step2,
    best_degree,
    evolved,
    first_least,
    partition_gradients,
    solved_degree,
)
from ds_moe_ext.planning.prices import AllReduce, LinearCost
from ds_moe_ext.schedule.orders import Pipeline


@dataclass(frozen=True, eq=False)
class MoePart:
    """The MoE part of one layer in one direction, at each degree."""

    degree_R: np.ndarray  # number of chunks
    alone_R: np.ndarray  # seconds without a reduction
    queue_R: np.ndarray  # seconds that what a reduction queues with takes

    @classmethod
    def of(cls, pipeline: Pipeline, costs: LayerCosts, degrees: Sequence[int]) -> MoePart:
        """What a pipeline takes at the degrees that it may choose from, by the costs of the
        direction; one that cuts no tokens has degree 1."""
        degree_R = np.array(degrees if pipeline.is_cut else (1,))
        return cls(degree_R, *_seconds(pipeline, costs.cut(degree_R)))

    def seconds(self, gradient_G: np.ndarray) -> np.ndarray:
        """Under each of many reductions, at each degree, float ``[G, R]``."""
        return np.maximum(self.alone_R, self.queue_R + gradient_G[:, None])

    def fastest_seconds(self, gradient_G: np.ndarray) -> np.ndarray:
        """Under each of many reductions, at the degree that suits it, float ``[G]``."""
        return self.seconds(gradient_G).min(axis=1)

    def best(self, gradient_s: float = 0.0) -> int:
        """Position of the fastest degree; of equals the smallest."""
        return int(first_least(self.seconds(np.array([gradient_s]))[0]))

    def degree(self, gradient_s: float = 0.0) -> int:
        return int(self.degree_R[self.best(gradient_s)])

    @property
    def window_s(self) -> float:
        """Seconds of reduction that the part hides at its best degree without one."""
        best = self.best()
        return float(self.alone_R[best] - self.queue_R[best])


def _seconds(pipeline: Pipeline, chunks: Chunks) -> tuple[np.ndarray, np.ndarray]:
    """Seconds without a reduction, and of what a reduction queues with, each float ``[R]``."""
    if not pipeline.has_one_queue:
        queue_R = link_seconds(chunks)
        return np.maximum(path_seconds(chunks).max(axis=0), queue_R), queue_R
    r, a, g, s, e = chunks
    there, back = a + g, s + a
    queue_R = r * (there + back)  # of all collectives
    ends = (queue_R, there + r * e + back, r * there + e + back, there + e + r * back)
    return np.max(ends, axis=0), queue_R


class Placed(NamedTuple):
    """Elements of each reduction of dense gradients beside one layer's backward, by place."""

    within_moe: tuple[int, ...] = ()  # between the two halves of its MoE part
    dense: tuple[int, ...] = ()  # beside its dense part


NOWHERE = Placed()


class HostSeconds(NamedTuple):
    """What a thread of the host takes to issue one layer in one direction, in seconds."""

    layer_s: float  # its dense part, and what a pass takes however it is cut
    chunk_s: float  # each chunk


@dataclass(frozen=True, eq=False)
class MeasuredLayer:
    """What is known of one layer, with all that follows its MoE part in backward."""

    costs: LayerCosts  # of its MoE part in forward
    dense_window_s: float  # seconds of backward behind its MoE part, up to the next
    # of dense gradients that become ready in the layer's backward, behind its MoE part
    gradient_elements: int
    # what all-to-alls cost by each way that rows may go; empty where that is the direct one
    exchanges: Mapping[Way, LinearCost] = field(default_factory=dict)

    @property
    def costs_by_way(self) -> dict[Way, LayerCosts]:
        """The costs by each way that rows may go."""
        ways = self.exchanges or {Way.DIRECT: self.costs.all_to_all}
        return {way: replace(self.costs, all_to_all=cost) for way, cost in ways.items()}


@dataclass(frozen=True, eq=False)
class Measured:
    """What is known of a model."""

    layers: tuple[MeasuredLayer, ...]  # in model order
    head_elements: int  # of dense gradients that are ready when the last layer's backward begins
    all_reduce: AllReduce  # what reductions cost
    element_bytes: int  # of a gradient
    # by the host, in forward and in backward, where devices may have to wait for it
    issued: tuple[HostSeconds, HostSeconds] | None = None


class Piped(NamedTuple):
    """How one layer runs."""

    forward_degree: int = 1  # chunks in forward
    backward_degree: int = 1  # and in backward
    placed: Placed = NOWHERE  # reductions beside backward
    way: Way = Way.DIRECT  # of rows between EP ranks


class Balance(NamedTuple):
    """What a plan of replicas makes of one layer's costs, over those of even rows at owners."""

    # experts of the EP rank that has most, over those at their owners: as many times as long does a
    # call take that has few rows
    held: float = 1.0
    computed: float = 1.0  # rows of the busiest EP rank
    exchanged: float = 1.0  # seconds of an exchange, but for its start
    all_stay: bool = False  # nothing is exchanged: there is no start either

    def of(self, costs: LayerCosts) -> LayerCosts:
        """The costs of a layer, from those of even rows at owners."""
        expert = costs.expert.started(self.held)
        all_to_all = costs.all_to_all.started(0.0 if self.all_stay else 1.0)
        return replace(
            costs,
            all_to_all=replace(all_to_all, n=self.exchanged * all_to_all.n),
            all_gather=replace(costs.all_gather, n=self.computed * costs.all_gather.n),
            reduce_scatter=replace(costs.reduce_scatter, n=self.computed * costs.reduce_scatter.n),
            expert=replace(expert, n=self.computed * expert.n),
        )


EVEN = Balance()


class Pair(NamedTuple):
    """The degrees of one layer, and what its MoE parts take with them."""

    forward_degree: int
    backward_degree: int
    seconds: float


Choices = tuple[Sequence[int], Sequence[int]]  # degrees of forward and of backward


@dataclass(frozen=True)
class Meanwhile:
    """What a layer's MoE parts have beside them."""

    gradient_s: float = 0.0  # reductions within the MoE part of backward
    dense_s: tuple[float, float] = (0.0, 0.0)  # its dense part, in forward and in backward
    issued: tuple[HostSeconds, HostSeconds] | None = None  # as of ``Measured``

    def with_host(self, direction: int, moe_R: np.ndarray, degree_R: np.ndarray) -> np.ndarray:
        """Seconds of the MoE part where the host issues no faster than it does."""
        if self.issued is None:
            return moe_R
        issued = self.issued[direction]
        chunks_R = degree_R * issued.chunk_s
        host_R = issued.layer_s + chunks_R - self.dense_s[direction]
        if direction == 0:  # it has waited for counts of rows, and is not ahead
            host_R = np.maximum(host_R, chunks_R)
        return np.maximum(moe_R, host_R)


NOTHING = Meanwhile()


@lru_cache(maxsize=4096)  # layers are often alike
def best_pair(
    pipeline: Pipeline, costs: LayerCosts, choices: Choices, meanwhile: Meanwhile = NOTHING
) -> Pair:
    """The fastest pair of degrees; of equals the smallest.

    Where the two differ, experts compute in the pieces that both kinds of chunks are made of, which
    are more calls than either has chunks: ``f + b - gcd(f, b)``.
    """
    if not pipeline.is_cut:
        choices = (1,), (1,)
    forward_R, backward_R = map(np.array, choices)
    pairs = []
    for degree in forward_R:
        calls_R = degree + backward_R - np.gcd(degree, backward_R)
        ahead = _called(costs, np.full_like(backward_R, degree), calls_R)
        behind = _called(costs.in_backward(), backward_R, calls_R)
        ahead_R, _ = _seconds(pipeline, ahead)
        alone_R, queue_R = _seconds(pipeline, behind)
        behind_R = np.maximum(alone_R, queue_R + meanwhile.gradient_s)
        total_R = meanwhile.with_host(0, ahead_R, degree) + meanwhile.with_host(
            1, behind_R, backward_R
        )
        best = int(first_least(total_R))
        pairs.append(Pair(int(degree), int(backward_R[best]), float(total_R[best])))
    least_s = min(pair.seconds for pair in pairs)
    return next(pair for pair in pairs if pair.seconds <= least_s * (1 + TIE))


def _called(costs: LayerCosts, degree_R: np.ndarray, calls_R: np.ndarray) -> Chunks:
    """Chunks whose experts take so many calls in all."""
    chunks = costs.cut(degree_R)
    called_R = costs.expert.chunk_seconds(calls_R) * calls_R / degree_R
    return chunks._replace(expert_R=called_R)


Degrees = tuple[int | None, int | None]
"""Of forward and of backward; None lets the planner choose."""


@dataclass(frozen=True)
class Solver:
    """How degrees and partitions are found."""

    degree: Planner  # of a layer whose collectives have a queue for each kind of link
    step_2: Step2 | None  # of the partition; None is the exact one
    package: str | None = None  # that they need, where it is not one of ours


SOLVERS: Mapping[str, Solver] = MappingProxyType(
    {"exact": Solver(best_degree, None), "paper": Solver(solved_degree, evolved, "scipy")}
)
"""By the name of a strategy's key; "paper" takes SciPy's solvers, as FSMoE's authors did."""


def plan_pipelines(
    pipeline: Pipeline,
    measured: Measured,
    *,
    max_degree: int,
    degrees: Degrees = (None, None),
    slices: bool = True,
    solver: Solver = SOLVERS["exact"],
) -> tuple[Piped, ...]:
    """How each layer runs, in model order.

    Degrees are chosen in pairs (``best_pair``) up to ``max_degree`` where they are not given, by
    the solver "paper" each for itself; of one queue always exactly. Rows go the way by which both
    directions are fastest together, without reductions; of equals the first. With ``slices``
    gradients are reduced beside layers, where the pipeline has places for them.
    """
    choices = _choices(degrees, max_degree)

    def seconds(way: tuple[Way, LayerCosts]) -> float:
        return best_pair(pipeline, way[1], choices).seconds

    chosen = [min(layer.costs_by_way.items(), key=seconds) for layer in measured.layers]
    placed = [NOWHERE] * len(chosen)
    if slices:
        parts = [MoePart.of(pipeline, c.in_backward(), choices[1]) for _, c in chosen]
        placed = place(pipeline, measured, parts, step_2=solver.step_2)
    piped = [Piped(placed=each, way=way) for (way, _), each in zip(chosen, placed)]
    found = partial(with_degrees, max_degree=max_degree, degrees=degrees, solver=solver)
    return tuple(found(each, pipeline, measured, layer) for layer, each in enumerate(piped))


def with_degrees(
    piped: Piped,
    pipeline: Pipeline,
    measured: Measured,
    layer: int,
    balance: Balance = EVEN,
    *,
    max_degree: int,
    degrees: Degrees = (None, None),
    solver: Solver = SOLVERS["exact"],
) -> Piped:
    """How a layer runs, with the degrees that suit its rows and replicas, of which ``balance`` says
    what they make of the costs. Ways and reductions stay: all ranks have the same, also where grids
    of them copy by plans of their own. Other arguments as of ``plan_pipelines``."""
    choices, of_layer = _choices(degrees, max_degree), measured.layers[layer]
    costs = balance.of(of_layer.costs_by_way[piped.way])
    within_s = sum(map(measured.all_reduce.seconds, piped.placed.within_moe))
    dense_s = of_layer.dense_window_s / BACKWARD, of_layer.dense_window_s
    meanwhile = Meanwhile(within_s, dense_s, measured.issued)
    pair = best_pair(pipeline, costs, choices, meanwhile)[:2]
    if solver.degree is not best_degree and not pipeline.has_one_queue:
        found = (
            solver.degree(costs, 0.0, max_degree).degree,
            solver.degree(costs.in_backward(), within_s, max_degree).degree,
        )
        pair = degrees[0] or found[0], degrees[1] or found[1]
    return piped._replace(forward_degree=pair[0], backward_degree=pair[1])


def _choices(degrees: Degrees, max_degree: int) -> Choices:
    """Of forward and of backward: the given one, or all."""
    every = range(1, max_degree + 1)
    forward, backward = (every if given is None else (given,) for given in degrees)
    return forward, backward


def place(
    pipeline: Pipeline,
    measured: Measured,
    parts: Sequence[MoePart],
    *,
    num_quanta: int = QUANTA,
    step_2: Step2 | None = None,
) -> list[Placed]:
    """Where gradients are reduced beside which layer's backward, of which ``parts`` are the MoE
    parts, in model order; what has no place in the pipeline is left to the end of backward."""
    cost = measured.all_reduce
    last_first = list(zip(measured.layers[::-1], parts[::-1], strict=True))
    ready = [measured.head_elements]
    ready += [layer.gradient_elements for layer, _ in last_first[:-1]]
    if pipeline.slices_moe and pipeline.piece_bytes is None:
        beside = [
            BackwardLayer(
                moe_seconds=part.fastest_seconds,
                moe_window_s=part.window_s,
                dense_window_s=layer.dense_window_s,
                gradient_elements=elements,
            )
            for (layer, part), elements in zip(last_first, ready)
        ]
        found = partition_gradients(
            beside,
            all_reduce=cost,
            tail_elements=measured.layers[0].gradient_elements,
            num_quanta=num_quanta,
            step_2=step_2,
        )
        placed = [Placed(*map(_some, each)) for each in zip(found.within_moe, found.dense)]
    elif pipeline.piece_bytes is not None:
        size = max(pipeline.piece_bytes // measured.element_bytes, 1)
        windows = [(layer.dense_window_s, part.window_s) for layer, part in last_first]
        placed = _in_pieces(ready, size, cost.seconds, windows)
    elif pipeline.slices_dense:
        placed = [Placed(dense=_some(elements)) for elements in ready]
    else:
        placed = [NOWHERE] * len(parts)
    return placed[::-1]


def _in_pieces(
    ready: Sequence[int],
    size: int,
    seconds: Callable[[int], float],
    windows: Sequence[tuple[float, float]],
) -> list[Placed]:
    """Whole pieces in each window, a layer's dense one first: what a low priority does (Lina)."""
    placed, left = [], []
    for elements, windows_s in zip(ready, windows):
        count, rest = divmod(elements, size)
        left += [size] * count + [rest] * (rest > 0)
        fitting = []
        for window_s in windows_s:
            ends_s = accumulate(map(seconds, left))
            num = sum(end_s <= window_s for end_s in ends_s)
            fitting.append(tuple(left[:num]))
            left = left[num:]
        dense, within_moe = fitting
        placed.append(Placed(within_moe, dense))
    return placed


def _some(elements: int) -> tuple[int, ...]:
    """One reduction, or none of nothing."""
    return (elements,) if elements else ()
