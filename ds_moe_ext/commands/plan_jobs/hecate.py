# SPDX-License-Identifier: Apache-2.0
"""HECATE's planners as jobs: which experts are copied where, and where they live.

A cell is one rank here. Shape letter: C cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_moe_ext.commands.plan_jobs.job_inputs import (
    check_cluster,
    check_home,
    check_loads,
    check_number,
    holders_of,
)
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.planning.fssdp_planner import materialize, shard
from ds_moe_ext.strict import at_least

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
        check_cluster(self.num_ranks, self.ranks_per_node, len(self.home))
        check_home(self.home, self.num_ranks)
        check_loads("load", self.load)
        if len(self.load) != len(self.home):
            raise ValueError(
                f"load has {len(self.load)} numbers, but home has {len(self.home)} ranks; give "
                "both one for each expert"
            )
        check_number("overlap_degree", self.overlap_degree, int)
        at_least("overlap_degree", self.overlap_degree, 0)
        check_number("copies_per_rank", self.copies_per_rank, int)
        at_least("copies_per_rank", self.copies_per_rank, 0)


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
        holders=holders_of(target),
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
            check_loads(f"load[{index}]", load)
        check_cluster(self.num_ranks, self.ranks_per_node, sum(map(len, self.load)))
        check_number("overlap_degree", self.overlap_degree, int)
        at_least("overlap_degree", self.overlap_degree, 0)


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


def _whole(loads: Sequence[Sequence[float]]) -> list[np.ndarray]:
    """Loads as planners take them; only their ratios count."""
    return [np.rint(np.array(load) * float(PARTS)).astype(np.int64) for load in loads]
