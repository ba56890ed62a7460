# SPDX-License-Identifier: Apache-2.0
"""FSMoE's planners as jobs: into how many chunks, and which gradients beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_moe_ext.commands.plan_jobs.job_inputs import MOST_COST, check_number
from ds_moe_ext.planning.layer_costs import LayerCosts
from ds_moe_ext.planning.layer_pipelines import SOLVERS
from ds_moe_ext.planning.pipeline_degrees import BackwardLayer, best_degree, partition_gradients
from ds_moe_ext.planning.prices import AllReduce, LinearCost
from ds_moe_ext.strict import nearest, read_record

MOST_DEGREE = 2**12  # chunks of a layer
MOST_LAYERS = 2**10
MOST_ELEMENTS = 2**40  # of gradients; times quanta and layers these fit into 64 bits


@dataclass(frozen=True, kw_only=True)
class LinearInput:
    """Costs of one operation; see ``LinearCost``. The job that it stands in checks the numbers."""

    alpha_s: float
    beta_s: float
    n: float

    def check(self, name: str) -> None:
        """Refuse numbers that cannot be; ``name`` is the key of the operation."""
        for key, value in vars(self).items():
            check_number(f"{name}.{key}", value, float, most=MOST_COST)

    @property
    def cost(self) -> LinearCost:
        return LinearCost(**vars(self))


@dataclass(frozen=True, kw_only=True)
class LayerInput:
    """Costs of one MoE layer in one direction.

    Attributes:
        all_to_all: of the whole layer, once: dispatch, or combine.
        all_gather: inside a cell, of what was dispatched.
        reduce_scatter: inside a cell, of what experts yield.
        expert: of the direction: in backward twice what forward takes, for the same ``n``.
    """

    all_to_all: LinearInput
    all_gather: LinearInput
    reduce_scatter: LinearInput
    expert: LinearInput

    def __post_init__(self) -> None:
        self.all_to_all.check("all_to_all")
        self.all_gather.check("all_gather")
        self.reduce_scatter.check("reduce_scatter")
        self.expert.check("expert")

    @property
    def costs(self) -> LayerCosts:
        return LayerCosts(
            all_to_all=self.all_to_all.cost,
            all_gather=self.all_gather.cost,
            reduce_scatter=self.reduce_scatter.cost,
            expert=self.expert.cost,
        )


@dataclass(frozen=True, kw_only=True)
class DegreeJob(LayerInput):
    """Input of FSMoE's Algorithm 1, for one layer in one direction.

    Seconds may be any other unit of time; the plan is in the same.

    Attributes:
        gradient_s: seconds of the all-reduce inside the layer; 0 in forward.
        max_degree: the largest degree to try.
        solver: "exact", or "paper" for SciPy's SLSQP.
    """

    gradient_s: float
    max_degree: int
    solver: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("gradient_s", self.gradient_s, float, most=MOST_COST)
        check_number("max_degree", self.max_degree, int, least=1, most=MOST_DEGREE)
        _check_solver(self.solver)


def _check_solver(solver: str) -> None:
    if solver not in SOLVERS:
        raise ValueError(f"solver is {solver!r}, which is unknown; {nearest(solver, SOLVERS)}")


@dataclass(frozen=True, kw_only=True)
class DegreePlan:
    """Output of FSMoE's Algorithm 1.

    Attributes:
        degree: number of chunks.
        time_s: seconds of the layer.
        case: what bounds them: 1 the slow links, with an all-reduce; 2 the experts; 3 the slow
            links but for one chunk inside a cell; 4 the fast links.
        times_s: seconds at degree 1, 2 and so on.
    """

    degree: int
    time_s: float
    case: int
    times_s: list[float]


def pipeline_degree(job: DegreeJob) -> DegreePlan:
    """FSMoE's Algorithm 1."""
    plan = SOLVERS[job.solver].degree(job.costs, job.gradient_s, job.max_degree)
    return DegreePlan(
        degree=plan.degree, time_s=plan.time_s, case=plan.case, times_s=plan.times_R.tolist()
    )


@dataclass(frozen=True, kw_only=True)
class BackwardInput(LayerInput):
    """One layer of a gradient partition, with its costs in backward.

    Attributes:
        dense_window_s: seconds of all-reduce that its dense part hides.
        gradient_elements: that become ready when its backward begins: those of the layer before it
            in backward, of the head for the first.
    """

    dense_window_s: float
    gradient_elements: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("dense_window_s", self.dense_window_s, float, most=MOST_COST)
        check_number("gradient_elements", self.gradient_elements, int, most=MOST_ELEMENTS)


@dataclass(frozen=True, kw_only=True)
class AllReduceInput:
    """Costs of reducing gradients; see ``AllReduce``. The job checks the numbers."""

    alpha_s: float
    beta_s: float


@dataclass(frozen=True, kw_only=True)
class PartitionJob:
    """Input of FSMoE's gradient partition. Seconds may be any other unit of time.

    Attributes:
        layers: objects as ``BackwardInput``, in the order of backward.
        all_reduce: costs of reducing gradients.
        tail_elements: gradients of the last layer, which no layer is left to hide.
        max_degree: the largest degree to try.
        solver: "exact", or "paper" for SciPy's differential evolution.
    """

    layers: list[Any]
    all_reduce: AllReduceInput
    tail_elements: int
    max_degree: int = 8
    solver: str = "exact"

    def __post_init__(self) -> None:
        if not 1 <= len(self.layers) <= MOST_LAYERS:
            raise ValueError(
                f"layers has {len(self.layers)} objects; give one for each layer, from 1 to "
                f"{MOST_LAYERS}"
            )
        for key, value in vars(self.all_reduce).items():
            check_number(f"all_reduce.{key}", value, float, most=MOST_COST)
        check_number("tail_elements", self.tail_elements, int, most=MOST_ELEMENTS)
        check_number("max_degree", self.max_degree, int, least=1, most=MOST_DEGREE)
        _check_solver(self.solver)


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """Output of FSMoE's gradient partition: elements by layer. What is in none is reduced last.

    Attributes:
        dense: reduced beside the dense part.
        moe: reduced in the MoE part, hidden.
        extra: reduced in the MoE part besides, in one all-reduce with ``moe``.
        degrees: of the MoE parts.
        time_s: seconds of all MoE parts and of the last all-reduce; dense parts are not in it.
    """

    dense: list[int]
    moe: list[int]
    extra: list[int]
    degrees: list[int]
    time_s: float


def gradient_partition(job: PartitionJob) -> PartitionPlan:
    """FSMoE's two steps, and its Algorithm 1 on the slices."""
    inputs = _read_layers(job.layers)
    all_reduce = AllReduce(**vars(job.all_reduce))
    layers = [
        BackwardLayer.of(
            layer.costs,
            max_degree=job.max_degree,
            dense_window_s=layer.dense_window_s,
            gradient_elements=layer.gradient_elements,
        )
        for layer in inputs
    ]
    partition = partition_gradients(
        layers,
        all_reduce=all_reduce,
        tail_elements=job.tail_elements,
        step_2=SOLVERS[job.solver].step_2,
    )
    return PartitionPlan(
        dense=list(partition.dense),
        moe=list(partition.moe),
        extra=list(partition.extra),
        degrees=[
            best_degree(layer.costs, all_reduce.seconds(elements), job.max_degree).degree
            for layer, elements in zip(inputs, partition.within_moe)
        ],
        time_s=partition.time_s,
    )


def _read_layers(layers: Sequence[Any]) -> list[BackwardInput]:
    inputs = []
    for index, values in enumerate(layers):
        try:
            inputs.append(read_record(BackwardInput, values, "layer"))
        except ValueError as error:
            raise ValueError(f"layers[{index}]: {error}") from error
    return inputs
