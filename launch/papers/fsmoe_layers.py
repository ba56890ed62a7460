# SPDX-License-Identifier: Apache-2.0
"""What FSMoE's schedule and its rivals take on layers of the paper. Pure.

Each schedule is planned without interference. Without it, prices are closed formulas, which tests
show to be the simulator's; with it, the simulator runs every schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from ds_moe_ext.planning.layer_costs import LayerCosts
from ds_moe_ext.planning.layer_pipelines import Measured, MeasuredLayer, MoePart, place
from ds_moe_ext.planning.prices import AllReduce
from ds_moe_ext.schedule import orders
from ds_moe_ext.schedule.orders import PIPELINES, Pipeline, Slices, reductions
from ds_moe_ext.schedule.simulator import simulate
from ds_moe_ext.schedule.task import (
    ATTENTION,
    COMBINE,
    COMPUTE,
    DISPATCH,
    ETP_GATHER,
    ETP_SCATTER,
    EXPERT,
    GATE,
    GRADIENTS,
    INTRA,
    RESTORE,
    ChunkRange,
    Kind,
    Op,
    Schedule,
    Task,
    Value,
    chunk_ranges,
)
from papers.fsmoe_grid import ELEMENT_BYTES, ROUTE_S, Cluster, PricedLayer, Shape

DENSE_GATHER = Op("dense_gather", INTRA)
DENSE_SCATTER = Op("dense_scatter", INTRA)
DENSE_OPS = (GATE, DENSE_GATHER, ATTENTION, DENSE_SCATTER)

QUANTA = 64  # parts in which gradients move that no window hides
OVER = "tutel"


# Plans.


class Reduced(NamedTuple):
    """Elements of each reduction of dense gradients, by place; see ``Slices``."""

    within_moe: tuple[int, ...] = ()
    dense: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()

    @property
    def slices(self) -> Slices:
        return Slices(*map(len, self))


def reduced(pipeline: Pipeline, layer: PricedLayer, backward: MoePart) -> Reduced:
    """Where the gradients of one attention are reduced beside the next layer's backward.

    All layers are equal, so that each reduces what the one before leaves it.
    """
    cost, elements = layer.all_reduce, layer.gradient_elements
    beside = MeasuredLayer(layer.forward, layer.back_dense_s, gradient_elements=0)
    measured = Measured((beside,), elements, cost, ELEMENT_BYTES)
    (placed,) = place(pipeline, measured, [backward], num_quanta=QUANTA)
    left = elements - sum(map(sum, placed))
    size = left if pipeline.piece_bytes is None else pipeline.piece_bytes // ELEMENT_BYTES
    tail = [size] * (left // size) + [left % size] * (left % size > 0) if left else []
    return Reduced(*placed, tuple(tail))


@dataclass(frozen=True)
class Plan:
    """How one of many equal layers runs.

    Attributes:
        forward: the MoE part in forward.
        backward: and in backward.
        reduced: reductions beside backward.
        all_reduce: what they cost.
    """

    forward: MoePart
    backward: MoePart
    reduced: Reduced
    all_reduce: AllReduce

    @classmethod
    def of(cls, pipeline: Pipeline, layer: PricedLayer, degrees: Sequence[int]) -> Plan:
        """The best by the formulas.

        Args:
            pipeline: whose plan it is.
            layer: what operations cost.
            degrees: to choose from.
        """
        forward = MoePart.of(pipeline, layer.forward, degrees)
        backward = MoePart.of(pipeline, layer.forward.in_backward(), degrees)
        return cls(forward, backward, reduced(pipeline, layer, backward), layer.all_reduce)

    @property
    def place_s(self) -> tuple[float, ...]:
        """Seconds of the reductions of each place."""
        return tuple(sum(map(self.all_reduce.seconds, place)) for place in self.reduced)

    @property
    def slice_s(self) -> tuple[float, ...]:
        """Seconds of each reduction, in the order of issue."""
        return tuple(self.all_reduce.seconds(n) for place in self.reduced for n in place)

    @property
    def forward_degree(self) -> int:
        return self.forward.degree()

    @property
    def backward_degree(self) -> int:
        """It suits the reductions within the MoE part."""
        return self.backward.degree(self.place_s[0])


# Prices.


def closed_s(layer: PricedLayer, plan: Plan) -> float:
    """Forward and backward without interference."""
    within_s, dense_s, tail_s = plan.place_s
    forward_s = plan.forward.fastest_seconds(np.zeros(1))[0]
    backward_s = plan.backward.fastest_seconds(np.array([within_s]))[0]
    return float(layer.dense_s + forward_s + backward_s + max(layer.back_dense_s, dense_s) + tail_s)


@dataclass(frozen=True)
class Interference:
    """How tasks under way slow each other.

    Attributes:
        collectives: share by which one between EP ranks and one within slow each other (gamma).
        compute: share by which computation and collectives do (delta).
    """

    collectives: float
    compute: float

    def __call__(self, task: Task, under_way: Sequence[Task]) -> float:
        streams = {each.stream for each in under_way}
        by_compute = 1 + self.compute * (COMPUTE in streams and len(streams) > 1)
        if task.stream == COMPUTE:
            return by_compute
        return by_compute * (1 + self.collectives * (len(streams - {COMPUTE}) > 1))


@cache
def forward_schedule(pipeline: Pipeline, degree: int) -> Schedule:
    """The MoE part from dispatch to combine."""
    return pipeline.arranged(moe_schedule(degree))


@cache
def backward_schedule(pipeline: Pipeline, degree: int, slices: Slices) -> Schedule:
    """The MoE part, behind it what is dense, and the tail behind all."""
    moe = pipeline.arranged(moe_schedule(degree).reversed(), slices._replace(tail=0))
    whole, before = ChunkRange(0, 1), moe.outputs[:1]
    dense = []
    for op in DENSE_OPS:
        dense.append(Task(op, 0, whole, before, (Value(Kind(op.name), 0, whole),)))
        before = dense[-1].writes
    first = slices.within_moe + slices.dense
    tail = reductions(0, ChunkRange(first, first + slices.tail), after=before)
    return Schedule((*moe.tasks, *dense, *tail), moe.inputs, before)


def moe_schedule(degree: int) -> Schedule:
    """Dispatch to combine: order and restore are in the dense part's time."""
    tasks = orders.routed_tasks(0, num_chunks=degree, degree=degree, sharded=True)[1:]
    whole = ChunkRange(0, degree)
    inputs = (orders.X, orders.ROUTE, orders.WEIGHTS)
    given = tuple(Value(kind, 0, None if kind == orders.WEIGHTS else whole) for kind in inputs)
    returned = tuple(
        Value(orders.RETURNED, 0, chunk_range) for chunk_range in chunk_ranges(degree, degree)
    )
    return Schedule(tuple(t for t in tasks if t.op != RESTORE), given, returned)


def simulated_s(
    pipeline: Pipeline, layer: PricedLayer, plan: Plan, interference: Interference
) -> float:
    """Forward and backward, tasks slowing each other."""
    forward = forward_schedule(pipeline, plan.forward_degree)
    backward = backward_schedule(pipeline, plan.backward_degree, plan.reduced.slices)
    slice_s = plan.slice_s
    in_forward = task_seconds(layer, layer.forward, plan.forward_degree)
    in_backward = task_seconds(layer, layer.forward.in_backward(), plan.backward_degree)

    def forward_s(rank: int, task: Task) -> float:
        return in_forward[task.op.name]

    def backward_s(rank: int, task: Task) -> float:
        if task.op.name == GRADIENTS.name:
            return slice_s[task.chunk_range.start]
        return in_backward[ADJOINTS.get(task.op.name, task.op.name)]

    return (
        layer.dense_s
        + simulate(forward, forward_s, crowding_of=interference).makespan_s
        + simulate(backward, backward_s, crowding_of=interference).makespan_s
    )


ADJOINTS = {ETP_GATHER.name: ETP_SCATTER.name, ETP_SCATTER.name: ETP_GATHER.name}


def task_seconds(layer: PricedLayer, costs: LayerCosts, degree: int) -> Mapping[str, float]:
    """Of each task alone, by its op's name; what is dense as in backward."""
    _, a, g, s, e = map(float, costs.cut(np.array(degree)))
    each = {DISPATCH: a, ETP_GATHER: g, EXPERT: e, ETP_SCATTER: s, COMBINE: a}
    each |= {GATE: ROUTE_S, DENSE_GATHER: layer.dense_gather_s}
    each |= {ATTENTION: 2 * layer.attention_s, DENSE_SCATTER: layer.dense_scatter_s}
    return {op.name: alone_s for op, alone_s in each.items()}


# Means.


@dataclass(frozen=True)
class Sums:
    """Of a grid of layers.

    Attributes:
        speed: mean over layers of times faster than Tutel, by pipeline.
        num_unequal: layers whose degrees by Algorithm 1, without a reduction, differ in forward
            and backward.
    """

    speed: Mapping[str, float]
    num_unequal: int


def summed(
    cluster: Cluster,
    shapes: Sequence[Shape],
    *,
    choices: int,
    degrees: Sequence[int],
    interference: Interference | None = None,
) -> Sums:
    """Plan and price every layer of a grid by every pipeline."""
    speeds, num_unequal = [], 0
    for shape in shapes:
        layer = cluster.priced(shape, choices)
        plans = {name: Plan.of(pipeline, layer, degrees) for name, pipeline in PIPELINES.items()}
        taken = {
            name: closed_s(layer, plan)
            if interference is None
            else simulated_s(PIPELINES[name], layer, plan, interference)
            for name, plan in plans.items()
        }
        speeds.append([taken[OVER] / taken_s for taken_s in taken.values()])
        num_unequal += plans["fsmoe"].forward.best() != plans["fsmoe"].backward.best()
    return Sums(dict(zip(PIPELINES, np.mean(speeds, axis=0).tolist())), num_unequal)
