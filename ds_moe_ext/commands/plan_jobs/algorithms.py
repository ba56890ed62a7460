# SPDX-License-Identifier: Apache-2.0
"""Planners as jobs in JSON: what ``ds-moe-ext plan`` reads and prints.

A job is a record, read strictly; so is a plan. A new algorithm is a job, a plan, a function from
one to the other, and a row in ``ALGORITHMS``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_moe_ext.commands.plan_jobs.fsmoe import (
    DegreeJob,
    PartitionJob,
    gradient_partition,
    pipeline_degree,
)
from ds_moe_ext.commands.plan_jobs.hecate import (
    MaterializationJob,
    ShardingJob,
    heterogeneous_sharding,
    sparse_materialization,
)
from ds_moe_ext.commands.plan_jobs.heter_moe import AsymmetricJob, asymmetric_assignment
from ds_moe_ext.commands.plan_jobs.heter_moe_ratio import ZebraRatioJob, zebra_ratio
from ds_moe_ext.commands.plan_jobs.pro_prophet import ReplicationJob, prophet, shadow
from ds_moe_ext.commands.plan_jobs.row_shares import PricedShareJob, priced_share
from ds_moe_ext.files.documents import parsed
from ds_moe_ext.strict import nearest, read_record


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
    "asym-ea": Algorithm(AsymmetricJob, asymmetric_assignment),
    "gradient-partition": Algorithm(PartitionJob, gradient_partition),
    "heterogeneous-sharding": Algorithm(ShardingJob, heterogeneous_sharding),
    "pipeline-degree": Algorithm(DegreeJob, pipeline_degree),
    "priced-share": Algorithm(PricedShareJob, priced_share),
    "prophet": Algorithm(ReplicationJob, prophet),
    "shadow": Algorithm(ReplicationJob, shadow),
    "sparse-materialization": Algorithm(MaterializationJob, sparse_materialization),
    "zebra-ratio": Algorithm(ZebraRatioJob, zebra_ratio),
}


def plan_text(name: str, text: bytes, source: str = "the input") -> str:
    """Plans in JSON of one job in JSON, or of a list of jobs; ``source`` says where from in errors.

    Raises:
        ValueError: what is wrong with the name, the text or a job, in one line.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"there is no algorithm {name!r}; {nearest(name, ALGORITHMS)}")
    algorithm = ALGORITHMS[name]
    document = _read_json(text, source)
    if not isinstance(document, list):
        return json.dumps(_planned(algorithm, document, "job"))
    return json.dumps([_planned(algorithm, job, f"job {i}") for i, job in enumerate(document)])


def _planned(algorithm: Algorithm, values: Any, where: str) -> Any:
    try:
        plan = algorithm.plan(read_record(algorithm.job, values, "input"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return dataclasses.asdict(plan)


def _read_json(text: bytes, source: str) -> Any:
    try:
        return parsed(text, _no_constant)
    except ValueError as error:
        raise ValueError(f"{source} cannot be read as JSON: {error}; mend it") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")
