# SPDX-License-Identifier: Apache-2.0
"""Expert-sharding parallelism and pipelining: FSMoE.

The ranks of an ETP group split every expert. Rows travel in chunks, between EP ranks and within
them at the same time, behind the experts; in backward slices of the dense gradients are reduced in
the gaps. How the experts are spread and copied is another strategy's to decide (``balance``): this
one lays its pipeline over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib.util import find_spec

import numpy as np

from ds_moe_ext.planning.exchange_costs import BY_COST, WAYS, Way
from ds_moe_ext.planning.layer_pipelines import (
    EVEN,
    SOLVERS,
    Balance,
    Measured,
    Piped,
    plan_pipelines,
    with_degrees,
)
from ds_moe_ext.planning.layer_seconds import Flow
from ds_moe_ext.planning.strategy import (
    Intervals,
    Job,
    Keys,
    LayerContext,
    Overlay,
    Plan,
    Strategy,
    along_nodes,
    cutting_of,
    register,
)
from ds_moe_ext.schedule import orders
from ds_moe_ext.schedule.orders import PIPELINES, Pipeline
from ds_moe_ext.schedule.task import Schedule, Stream
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strict import NOT_A_KEY, all_at_least, one_of

KEY = "ds_moe_ext.esp"


@dataclass(frozen=True, kw_only=True)
class TwoDegrees:
    """Chunks that a layer's tokens are cut into; null: as many as is fastest, layer by layer."""

    forward: int | None = None  # in forward
    backward: int | None = None  # in backward

    def __post_init__(self) -> None:
        all_at_least(f"{KEY}.degree", self, forward=1, backward=1)


@register("esp")
@dataclass(frozen=True, kw_only=True)
class ExpertSharding(Overlay):
    """FSMoE's scheduler (sections 4 and 5 of the paper), laid over where experts compute."""

    # chunks that a layer's tokens are cut into, one number for both directions or one each; null:
    # as many as is fastest by what was measured, layer by layer
    degree: int | TwoDegrees | None = None
    max_degree: int = 8  # the most that are tried
    schedule: str = "fsmoe"  # which of the compared schedules: "fsmoe", or one of the others
    # "exact", or "paper" for SLSQP and differential evolution, which need SciPy
    solver: str = "exact"
    # reduce dense gradients in slices beside MoE layers, where the schedule has places for them;
    # false leaves them to the host; null: true where the host can
    slice_gradients: bool | None = None
    # the way of rows between EP ranks: "direct", "1dh", "2dh" or "deepep"; null: the direct one,
    # and once costs have been measured the fastest of the first three, layer by layer
    all_to_all: str | None = None
    # where experts compute
    placing: Strategy = field(default=ExpertParallel(), hash=False, metadata=NOT_A_KEY)

    splits_experts = True

    def __post_init__(self) -> None:
        if isinstance(self.degree, int):
            all_at_least(KEY, self, degree=1)
        all_at_least(KEY, self, max_degree=1)
        for key, known in (("schedule", PIPELINES), ("solver", SOLVERS)):
            one_of(f"{KEY}.{key}", vars(self)[key], known)
        package = SOLVERS[self.solver].package
        if package is not None and find_spec(package) is None:
            raise ValueError(
                f"{KEY}.solver is {self.solver!r}, which needs {package}, and that is not "
                f"installed; pip install {package}, or set solver to 'exact'"
            )
        if self.all_to_all is not None:
            one_of(f"{KEY}.all_to_all", self.all_to_all, WAYS)
        if not self.pipeline.is_cut and any(d not in (None, 1) for d in self.degrees):
            raise ValueError(
                f"{KEY}.degree is {self.degree}, but schedule {self.schedule!r} cuts no tokens; "
                "leave degree out, or choose another schedule"
            )
        self._check_placing()

    def _check_placing(self) -> None:
        own = type(self.placing)
        decided = {
            "schedules": own.schedules is not Strategy.schedules,
            "ways": own.ways is not Strategy.ways,
            "slices_gradients": own.slices_gradients is not Strategy.slices_gradients,
        }
        if any(decided.values()):
            names = " and ".join(name for name, is_own in decided.items() if is_own)
            raise ValueError(
                f"ds_moe_ext.balance is {own.__qualname__}, which chooses itself how tokens "
                "are sent, so it cannot be combined with strategy 'esp'; choose another, or "
                f"leave {names} to the base class"
            )

        if self.placing.static_capacity is not None:
            raise ValueError(
                f"{self.placing.keys.static_capacity} is {self.placing.static_capacity}, but "
                "strategy 'esp' cuts tokens into chunks whose number of tokens per expert "
                "varies; leave it out, or run without 'esp'"
            )
        if self.placing.cuda_graphs:
            raise ValueError(
                f"{self.placing.keys.cuda_graphs} is true, but the chunks of strategy 'esp' "
                "have a different number of tokens in each pass; leave it out, or run without "
                "'esp'"
            )

    @property
    def pipeline(self) -> Pipeline:
        return PIPELINES[self.schedule]

    @property
    def degrees(self) -> tuple[int | None, int | None]:
        """Of forward and backward, where they are given."""
        if isinstance(self.degree, TwoDegrees):
            return self.degree.forward, self.degree.backward
        return self.degree, self.degree

    @property
    def ways(self) -> tuple[Way, ...]:
        """Of rows between EP ranks: the given one, or all to choose from."""
        return BY_COST if self.all_to_all is None else (WAYS[self.all_to_all],)

    @property
    def slices_gradients(self) -> bool:
        if self.slice_gradients is False:
            return False
        return self.pipeline.slices_moe or self.pipeline.slices_dense

    @property
    def measures(self) -> bool:
        """Whether anything depends on what operations cost."""
        return (self.pipeline.is_cut and None in self.degrees) or self.slices_gradients

    @property
    def keys(self) -> Keys:
        return self.placing.keys._replace(
            ways=f"{KEY}.all_to_all", slices_gradients=f"{KEY}.slice_gradients"
        )

    def without_slices(self) -> ExpertSharding:
        return replace(self, slice_gradients=False)

    def with_gradients_left(self) -> ExpertSharding:
        return self.without_slices() if self.slice_gradients is None else self

    def uses(self) -> tuple[tuple[str, Stream], ...]:
        return (*self.placing.uses(), *along_nodes(self.ways))

    def intervals(self) -> Intervals:
        intervals = self.placing.intervals()
        return replace(intervals, measures=intervals.measures or self.measures)

    @property
    def expected(self) -> str:
        own = (
            "all-to-alls of chunks overlap with expert compute; expect a gain when "
            "all-to-alls take about as long as the experts"
        )
        return "; ".join(filter(None, (own, self.placing.expected)))

    def plan(self, job: Job) -> tuple[Plan, ...]:
        plans = self.placing.plan(job)
        forward, backward = self.degrees
        pipes = (Piped(forward or 1, backward or 1, way=self.ways[0]),) * len(plans)
        if job.pipelines is not None:
            pipes = self._pipes(job, job.pipelines, plans)
        return tuple(map(_piped, pipes, plans))

    def _pipes(self, job: Job, measured: Measured, plans: Sequence[Plan]) -> tuple[Piped, ...]:
        """How each layer runs, with the rows and the replicas that these plans make."""
        return tuple(
            _balanced(self, measured, layer, _balance(job, layer, plan))
            for layer, plan in enumerate(plans)
        )

    def describe(self, job: Job) -> str:
        lines = (
            [self.placing.describe(job)]
            if any(cost_group.expert_bytes for cost_group in job.cost_groups)
            else []
        )
        if job.pipelines is not None:
            plans = self.placing.plan(job)
            pipes = self._pipes(job, job.pipelines, plans)
            lines += [
                _reported(pipes, job.pipelines),
                self._replicas_line(pipes, job.pipelines, plans),
            ]
        return "; ".join(filter(None, lines))

    def _replicas_line(
        self, pipes: Sequence[Piped], measured: Measured, plans: Sequence[Plan]
    ) -> str:
        """Why replicas and chunks do not add up, where they do not; else nothing."""
        pairs = zip(pipes, _pipes(self, measured), plans)
        less = [_held(plan) for own, even, plan in pairs if sum(own[:2]) < sum(even[:2])]
        if not less or max(less) <= 1:
            return ""
        return (
            f"each chunk also reads the weights of replicas, up to {max(less):.3g} times those "
            f"of its own experts, so that {len(less)} of {len(plans)} layers get fewer chunks "
            "than without replicas"
        )

    def schedules(self, layer_context: LayerContext, *, gated: bool) -> tuple[Schedule, Schedule]:
        cutting = cutting_of(layer_context, self.pipeline)
        return orders.programs(
            layer_context.layer, gated=gated, beside=self.beside(layer_context), cutting=cutting
        )


@lru_cache(maxsize=4)
def _pipes(esp: ExpertSharding, measured: Measured) -> tuple[Piped, ...]:
    """How each layer runs, worked out once for what was measured."""
    return plan_pipelines(
        esp.pipeline,
        measured,
        max_degree=esp.max_degree,
        degrees=esp.degrees,
        slices=esp.slices_gradients,
        solver=SOLVERS[esp.solver],
    )


@lru_cache(maxsize=4096)
def _balanced(esp: ExpertSharding, measured: Measured, layer: int, balance: Balance) -> Piped:
    """How one layer runs under a plan of replicas, worked out once for all that are alike."""
    return with_degrees(
        _pipes(esp, measured)[layer],
        esp.pipeline,
        measured,
        layer,
        balance,
        max_degree=esp.max_degree,
        degrees=esp.degrees,
        solver=SOLVERS[esp.solver],
    )


STEP = 16  # parts of one, in which balances are distinguished: degrees hang on no less


def _balance(job: Job, layer: int, plan: Plan) -> Balance:
    """What a layer's plan makes of the rows that it is made for. Replicas that it adds when it has
    counted rows are left out: to find them takes as long as in the step itself."""
    rows_CE, node_C, cost_group = job.rows[layer], job.node_C, job.cost_group_of(layer)
    num_ep_ranks, total = len(rows_CE), int(rows_CE.sum())
    if not total:
        return EVEN
    owner = Plan.at_owner(plan.owner)
    flow = Flow.of(replace(plan, revise=None), rows_CE, node_C, cost_group)
    even_CE = np.full_like(rows_CE, -(-total // rows_CE.size))
    even_s = float(Flow.of(owner, even_CE, node_C, cost_group).exchange_s_C.max())
    ratios = (
        _held(plan),
        flow.computed_C.max() * num_ep_ranks / total,
        flow.exchange_s_C.max() / even_s if even_s else 1.0,
    )
    held, computed, exchanged = (round(STEP * float(ratio)) / STEP for ratio in ratios)
    return Balance(held, computed, exchanged, flow.all_stay)


def _held(plan: Plan) -> float:
    """Experts of the EP rank that computes most, over those at their owners on the one that has
    most."""
    held, at_owner = (each.holds_EC.sum(axis=0).max() for each in (plan.target, plan.owner))
    return float(held / at_owner)


def _reported(pipes: Sequence[Piped], measured: Measured) -> str:
    """What was chosen, for a person."""
    within, dense = (
        sum(sum(sizes) for sizes in places) for places in zip(*(p.placed for p in pipes))
    )
    elements = measured.head_elements + sum(layer.gradient_elements for layer in measured.layers)
    text = (
        f"tokens are sent in {_chunks([p.forward_degree for p in pipes])} forward and "
        f"{_chunks([p.backward_degree for p in pipes])} backward"
    )
    if measured.issued is not None:
        forward_ms, backward_ms = (1e3 * host.chunk_s for host in measured.issued)
        text += f" (the host issues one in {forward_ms:.2g} and {backward_ms:.2g} ms)"
    if any(layer.exchanges for layer in measured.layers):
        text += f", between EP ranks by {_each(p.way.value for p in pipes)} all-to-alls"
    if not within + dense:
        return text
    left = elements - within - dense
    return (
        f"{text}; of {elements:,} dense gradients {within:,} are reduced within MoE layers, "
        f"{dense:,} between them, and {left:,} at the end"
    )


def _chunks(degrees: Sequence[int]) -> str:
    return f"{_each(degrees)} chunk{'s' if max(degrees) > 1 else ''}"


def _each(choices: Iterable[int | str]) -> str:
    """The one of all layers, or that of each."""
    texts = [str(choice) for choice in choices]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def _piped(piped: Piped, plan: Plan) -> Plan:
    """The plan of where experts compute, and all that follow it, with how rows travel."""
    return replace(
        plan,
        forward_degree=piped.forward_degree,
        backward_degree=piped.backward_degree,
        reductions=piped.placed,
        way=piped.way,
        successor=plan.successor and partial(_piped_next, piped, plan.successor),
    )


def _piped_next(piped: Piped, successor: Callable[[np.ndarray], Plan], rows_CE: np.ndarray) -> Plan:
    return _piped(piped, successor(rows_CE))
