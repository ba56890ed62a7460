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
from ds_moe_ext.planners.materialize import materialize
from ds_moe_ext.planners.shard import shard
from ds_moe_ext.strict import nearest, read_record

MOST_ROWS = 2**32
MOST_PAIRS = 2**20  # of expert and rank; rows in PARTS times these fit into 64 bits
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
        for index, rank in enumerate(self.home):
            _check_number(f"home[{index}]", rank, int, most=self.num_ranks - 1)
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
        holders=[np.flatnonzero(holds_C).tolist() for holds_C in target.holds_EC],
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
    if num_ranks * num_experts > MOST_PAIRS:
        raise ValueError(
            f"{num_experts} experts times {num_ranks} ranks are more than {MOST_PAIRS}; plan for "
            "fewer ranks or layers at once"
        )


def _check_loads(name: str, load: Any) -> None:
    if not isinstance(load, list) or not load:
        raise ValueError(f"{name} is {reprlib.repr(load)}; give a list of rows for each expert")
    for index, rows in enumerate(load):
        _check_number(f"{name}[{index}]", rows, float, most=MOST_ROWS)


def _check_number(
    name: str, value: Any, kind: type, *, least: int = 0, most: int | None = None
) -> None:
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not is_number or not least <= value <= (math.inf if most is None else most):
        what = "an integer" if kind is int else "a number"
        limit = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise ValueError(f"{name} is {reprlib.repr(value)}; it must be {what} {limit}")


def _whole(loads: Sequence[Sequence[float]]) -> list[np.ndarray]:
    """Loads as planners take them; only their ratios count."""
    return [np.rint(np.array(load) * float(PARTS)).astype(np.int64) for load in loads]
