"""Planners as jobs in JSON: what ``ds-moe-ext plan`` reads and prints.

A job is a record, read strictly; so is a plan. A new algorithm is a job, a plan, a function from
one to the other, and a row in ``ALGORITHMS``. A cell is one rank here. Shape letter: C cells.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ds_moe_ext.placement import Placement
from ds_moe_ext.planners.block_costs import BlockPrices
from ds_moe_ext.planners.materialize import materialize
from ds_moe_ext.planners.prophet import BlockPlan, place_experts
from ds_moe_ext.planners.shadow import shadow_experts
from ds_moe_ext.planners.shard import shard
from ds_moe_ext.strict import nearest, read_record

MOST_ROWS = 2**32
MOST_PAIRS = 2**20  # of expert and rank; rows in PARTS times these fit into 64 bits
LEAST_RATE = 1e-9  # of bytes or rows in a second
MOST_COST = 1e18  # bytes, seconds, or either's rate: products of these stay finite
PARTS = 2**10  # of a row: loads that are no whole rows, as a mean of steps, are rounded to these


@dataclass(frozen=True, kw_only=True)
class MaterializationJob:
    """Input of sparse materialization, for one layer.

    Attributes:
        home: rank that owns each expert.
        load: rows of each expert.
        overlap_degree: experts whose copies can be sent behind attention.
        copies_per_rank: copies that a rank has memory for.
        num_ranks: of the cluster.
        ranks_per_node: neighbours in rank share a node.
    """

    home: list[int]
    load: list[float]
    overlap_degree: int
    copies_per_rank: int
    num_ranks: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        _check_cluster(self.num_ranks, self.ranks_per_node, len(self.home))
        _check_home(self.home, self.num_ranks)
        _check_loads("load", self.load)
        if len(self.load) != len(self.home):
            raise ValueError(
                f"load has {len(self.load)} numbers, but home has {len(self.home)} ranks; give "
                "both one for each expert"
            )
        _check_number("overlap_degree", self.overlap_degree, int)
        _check_number("copies_per_rank", self.copies_per_rank, int)


@dataclass(frozen=True, kw_only=True)
class MaterializationPlan:
    """Output of sparse materialization.

    Attributes:
        holders: ranks that hold each expert, ascending, its home among them.
        received_per_rank: copies that each rank receives.
    """

    holders: list[list[int]]
    received_per_rank: list[int]


def sparse_materialization(job: MaterializationJob) -> MaterializationPlan:
    """HECATE's Algorithm 1."""
    home = Placement.owned_by(np.array(job.home), job.num_ranks)
    (target,) = materialize(
        [home],
        _whole([job.load]),
        overlap_degree=job.overlap_degree,
        copies_per_cell=job.copies_per_rank,
        node_C=np.arange(job.num_ranks) // job.ranks_per_node,
    )
    received_C = target.holds_EC.sum(axis=0) - home.holds_EC.sum(axis=0)
    return MaterializationPlan(
        holders=_holders(target),
        received_per_rank=received_C.tolist(),
    )


@dataclass(frozen=True, kw_only=True)
class ShardingJob:
    """Input of heterogeneous sharding, for all layers.

    Attributes:
        load: rows of each expert of each layer.
        overlap_degree: experts of a layer whose copies can be sent behind attention.
        num_ranks: of the cluster.
        ranks_per_node: neighbours in rank share a node.
    """

    load: list[list[float]]
    overlap_degree: int
    num_ranks: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if not self.load:
            raise ValueError("load is []; give a list of loads for each layer")
        for index, load in enumerate(self.load):
            _check_loads(f"load[{index}]", load)
        _check_cluster(self.num_ranks, self.ranks_per_node, sum(map(len, self.load)))
        _check_number("overlap_degree", self.overlap_degree, int)


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """Output of heterogeneous sharding.

    Attributes:
        home: rank that owns each expert of each layer.
    """

    home: list[list[int]]


def heterogeneous_sharding(job: ShardingJob) -> ShardingPlan:
    """HECATE's Algorithm 2; hot experts go to the ranks with most slots left."""
    homes = shard(
        _whole(job.load),
        overlap_degree=job.overlap_degree,
        node_C=np.arange(job.num_ranks) // job.ranks_per_node,
    )
    return ShardingPlan(home=[home.owner_E.tolist() for home in homes])


@dataclass(frozen=True, kw_only=True)
class ReplicationJob:
    """Input of Pro-Prophet's search and of FasterMoE's shadowing, for one layer.

    Shadowing copies to all ranks and has its own end: ``num_excluded`` and ``balance`` are not for
    it; what follows ``gradient_bytes`` only counts in the seconds that it reports.

    Attributes:
        rows: that each rank routes to each expert.
        home: rank that owns each expert.
        num_excluded: ranks that get no copy of an expert; null is automatic.
        balance: the spread of computed rows that is allowed, in mean rows of an expert.
        bytes_per_row: of one trip.
        bandwidth: of all transfers, in bytes per second.
        rows_per_second: that an expert computes in forward.
        parameter_bytes: of one expert.
        gradient_bytes: of one expert.
        forward_non_expert_s: seconds of the non-MoE layer's forward.
        backward_non_expert_s: seconds of its backward.
        scheduled: copies move beside the computations.
    """

    rows: list[list[int]]
    home: list[int]
    num_excluded: int | None
    balance: float
    bytes_per_row: float
    bandwidth: float
    rows_per_second: float
    parameter_bytes: float
    gradient_bytes: float
    forward_non_expert_s: float
    backward_non_expert_s: float
    scheduled: bool

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("rows is []; give a list of rows for each rank")
        _check_size(len(self.rows), len(self.home))
        for rank, rows in enumerate(self.rows):
            _check_loads(f"rows[{rank}]", rows, int)
            if len(rows) != len(self.home):
                raise ValueError(
                    f"rows[{rank}] has {len(rows)} numbers, but home has {len(self.home)} ranks; "
                    "give both one for each expert"
                )
        _check_home(self.home, len(self.rows))
        for name in ("bandwidth", "rows_per_second"):
            _check_number(name, vars(self)[name], float, least=LEAST_RATE, most=MOST_COST)
        for name in (
            *("bytes_per_row", "parameter_bytes", "gradient_bytes", "balance"),
            *("forward_non_expert_s", "backward_non_expert_s"),
        ):
            _check_number(name, vars(self)[name], float, most=MOST_COST)

    @property
    def placement(self) -> Placement:
        return Placement.owned_by(np.array(self.home), len(self.rows))

    @property
    def prices(self) -> BlockPrices:
        return BlockPrices(
            row_s=1 / self.rows_per_second,
            row_bytes=self.bytes_per_row,
            bytes_per_s=self.bandwidth,
            weight_bytes=self.parameter_bytes,
            gradient_bytes=self.gradient_bytes,
            copy_bytes_per_s=self.bandwidth,
            forward_gap_s=self.forward_non_expert_s,
            backward_gap_s=self.backward_non_expert_s,
            is_scheduled=self.scheduled,
        )


@dataclass(frozen=True, kw_only=True)
class ReplicationPlan:
    """Output of Pro-Prophet's search and of FasterMoE's shadowing.

    Attributes:
        holders: ranks that compute each expert, ascending, its home among them.
        selected: experts that are copied, in the order of selection.
        time_s: seconds of the layer's experts and transfers by Pro-Prophet's model.
        time_without_s: seconds without copies.
        rows_computed: by each rank.
        rows_received: by each rank, from others.
    """

    holders: list[list[int]]
    selected: list[int]
    time_s: float
    time_without_s: float
    rows_computed: list[int]
    rows_received: list[int]

    @classmethod
    def of(cls, plan: BlockPlan) -> ReplicationPlan:
        return cls(
            holders=_holders(plan.target),
            selected=list(plan.selected),
            time_s=plan.seconds.step_s,
            time_without_s=plan.seconds_without.step_s,
            rows_computed=plan.computed_C.tolist(),
            rows_received=plan.received_C.tolist(),
        )


def prophet(job: ReplicationJob) -> ReplicationPlan:
    """Pro-Prophet's Algorithm 1."""
    plan = place_experts(
        job.placement,
        np.array(job.rows),
        prices=job.prices,
        num_excluded=job.num_excluded,
        balance=job.balance,
    )
    return ReplicationPlan.of(plan)


def shadow(job: ReplicationJob) -> ReplicationPlan:
    """FasterMoE's shadowing, to compare with."""
    return ReplicationPlan.of(shadow_experts(job.placement, np.array(job.rows), prices=job.prices))


@dataclass(frozen=True)
class Algorithm:
    """One planner as a job.

    Attributes:
        job: record of its input.
        plan: from the input to the record of its output.
    """

    job: type
    plan: Callable[[Any], Any]


ALGORITHMS: Mapping[str, Algorithm] = {
    "heterogeneous-sharding": Algorithm(ShardingJob, heterogeneous_sharding),
    "prophet": Algorithm(ReplicationJob, prophet),
    "shadow": Algorithm(ReplicationJob, shadow),
    "sparse-materialization": Algorithm(MaterializationJob, sparse_materialization),
}


def plan_text(name: str, text: bytes) -> str:
    """Plans in JSON of one job in JSON, or of a list of jobs.

    Raises:
        ValueError: what is wrong with the name, the text or a job, in one line.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"there is no algorithm {name!r}; {nearest(name, ALGORITHMS)}")
    algorithm = ALGORITHMS[name]
    document = _read_json(text)
    if not isinstance(document, list):
        return json.dumps(_planned(algorithm, document, "job"))
    return json.dumps([_planned(algorithm, job, f"job {i}") for i, job in enumerate(document)])


def _planned(algorithm: Algorithm, values: Any, where: str) -> Any:
    try:
        plan = algorithm.plan(read_record(algorithm.job, values, "input"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return dataclasses.asdict(plan)


def _read_json(text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the input cannot be read as JSON: {error}; mend it") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _object(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"an object has a key twice, of {[key for key, _ in pairs]}")
    return values


def _check_cluster(num_ranks: int, ranks_per_node: int, num_experts: int) -> None:
    _check_number("num_ranks", num_ranks, int, least=1)
    _check_number("ranks_per_node", ranks_per_node, int, least=1)
    if num_ranks % ranks_per_node:
        raise ValueError(
            f"num_ranks is {num_ranks}, which ranks_per_node, {ranks_per_node}, does not divide; "
            "all nodes must have equally many ranks"
        )
    _check_size(num_ranks, num_experts)


def _check_size(num_ranks: int, num_experts: int) -> None:
    if num_ranks * num_experts > MOST_PAIRS:
        raise ValueError(
            f"{num_experts} experts times {num_ranks} ranks are more than {MOST_PAIRS}; plan for "
            "fewer ranks or layers at once"
        )


def _check_home(home: Sequence[Any], num_ranks: int) -> None:
    for index, rank in enumerate(home):
        _check_number(f"home[{index}]", rank, int, most=num_ranks - 1)


def _check_loads(name: str, load: Any, kind: type = float) -> None:
    if not isinstance(load, list) or not load:
        raise ValueError(f"{name} is {reprlib.repr(load)}; give a list of rows for each expert")
    for index, rows in enumerate(load):
        _check_number(f"{name}[{index}]", rows, kind, most=MOST_ROWS)


def _check_number(
    name: str, value: Any, kind: type, *, least: float = 0, most: float | None = None
) -> None:
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not is_number or not least <= value <= (math.inf if most is None else most):
        what = "an integer" if kind is int else "a number"
        limit = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise ValueError(f"{name} is {reprlib.repr(value)}; it must be {what} {limit}")


def _holders(target: Placement) -> list[list[int]]:
    """Ranks of each expert, ascending."""
    return [np.flatnonzero(holds_C).tolist() for holds_C in target.holds_EC]


def _whole(loads: Sequence[Sequence[float]]) -> list[np.ndarray]:
    """Loads as planners take them; only their ratios count."""
    return [np.rint(np.array(load) * float(PARTS)).astype(np.int64) for load in loads]
