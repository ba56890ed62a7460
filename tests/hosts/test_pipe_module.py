# SPDX-License-Identifier: Apache-2.0
"""``PipelineModule`` with replaced experts learns what one rank learns with whole experts, without
us; and goes on from its checkpoints with other stages and by another strategy."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import pipelines
from tests.hosts.copied_runs import fssdp, varied, worst
from tests.hosts.jobs import Job
from tests.hosts.pipelines import Pipeline, Result
from tests.hosts.zebra_runs import by_device, zebra
from tests.marks import slow
from tests.ranks import pool_of

GPT = Job(family="gpt_moe", stage=0, num_layers=4, steps=4, micro_batches=8, dtype="float64")
GPT = replace(GPT, num_experts=8, optimizer="object", sgd=True, learning_rate=0.1)
MIXTRAL = replace(GPT, family="mixtral")
ZERO_1 = replace(GPT, stage=1, dtype="float32", optimizer="json", steps=3)

RANDOM = {"replicas": 0.5, "revised": 0.3, "rematerialized": 0.4, "carried": 0.6}


def run(world_size: int, pipeline: Pipeline) -> Result:
    result: Result = pool_of(world_size).run(pipelines.train, pipeline)[0]
    return result


@functools.cache
def alone(pipeline: Pipeline) -> Result:
    """One rank, one stage, whole experts, without us."""
    job = replace(pipeline.job, block=False, strategy="ep", keys=(), balance=None, etp_size=None)
    job = replace(job, ep_ranks=None, balance_keys=())
    return run(1, replace(pipeline, job=job, num_stages=1, checkpoint_interval=0))


@dataclass(frozen=True)
class Row:
    """A pipeline on ranks."""

    pipeline: Pipeline
    ranks: int = 4
    error: float = 1e-12
    replicas: bool = False


class Keys(dict[str, Any]):
    """A block in a job, whose results are remembered."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


ESP = replace(GPT, strategy="esp", keys=(("slice_gradients", False),))
NOT_REENTRANT = (("pipeline", Keys(activation_checkpoint_interval=2, use_reentrant=False)),)
QUICK, QUICKLY = {"varied", "zebra"}, replace(GPT, steps=2)
ROWS = {
    "varied": Row(Pipeline(varied(QUICKLY, **RANDOM), checkpoint_interval=1), replicas=True),
    "ep": Row(Pipeline(GPT, evaluates=True)),
    "balance losses": Row(Pipeline(varied(GPT, **RANDOM), carries_aux=True), replicas=True),
    "untied": Row(Pipeline(GPT, is_tied=False)),
    "moved": Row(Pipeline(varied(GPT, **RANDOM, shard_every=1)), replicas=True),
    "mixtral": Row(Pipeline(varied(MIXTRAL, **RANDOM)), replicas=True),
    "fssdp": Row(Pipeline(fssdp(GPT, overlap_degree=2, replicas_per_rank=2)), replicas=True),
    "prophet": Row(Pipeline(replace(GPT, strategy="prophet"))),
    "esp": Row(Pipeline(ESP)),
    "esp of two ranks": Row(Pipeline(replace(ESP, etp_size=2))),
    "esp over fssdp": Row(Pipeline(replace(ESP, balance="fssdp"))),
    "grids": Row(Pipeline(varied(replace(GPT, ep_ranks=1), **RANDOM))),
    "one stage": Row(Pipeline(varied(GPT, **RANDOM), num_stages=1), ranks=2, replicas=True),
    "four stages": Row(Pipeline(GPT, num_stages=4)),
    "zebra": Row(Pipeline(zebra(QUICKLY), evaluates=True)),
    "zebra, moved": Row(Pipeline(zebra(GPT, moved=[1, 0, 2, 3]))),
    "zebra, 2 + 1, moved": Row(
        Pipeline(zebra(replace(GPT, micro_batches=6), 2, 1, moved=[0, 2, 0, 4])), ranks=6
    ),
    "zebra, checkpointed": Row(Pipeline(zebra(GPT), checkpoint_interval=1)),
    "zebra, checkpointed by torch": Row(
        Pipeline(zebra(GPT), checkpoint_interval=1, is_reentrant=False)
    ),
    "zebra, checkpointed, not reentrant": Row(
        Pipeline(zebra(replace(GPT, extra=NOT_REENTRANT), moved=[1, 0, 2, 3]), carries_aux=True)
    ),
    "zebra, recomputes": Row(Pipeline(zebra(GPT, recompute_experts=True))),
    "zebra, experts first": Row(Pipeline(zebra(GPT, attention_ep_ranks=[1]))),
    "zebra, mixtral": Row(Pipeline(zebra(MIXTRAL), is_tied=False)),
    "zebra, balance losses": Row(Pipeline(zebra(GPT), carries_aux=True, evaluates=True)),
    "zebra, four stages": Row(Pipeline(zebra(GPT), num_stages=4), ranks=8),
    "zebra, two groups": Row(Pipeline(zebra(GPT)), ranks=8),
    "zebra, 2 + 1": Row(Pipeline(zebra(replace(GPT, micro_batches=6), 2, 1)), ranks=6),
    "zebra, 1 + 2, 4 stripes": Row(
        Pipeline(zebra(replace(GPT, micro_batches=6), 1, 2, num_micro_batches=4)), ranks=6
    ),
    "zebra, one stage": Row(Pipeline(zebra(GPT), num_stages=1), ranks=2),
    "zebra, zero 1": Row(Pipeline(zebra(ZERO_1)), error=1e-5),
    "zebra, zero 0, clipped": Row(Pipeline(zebra(replace(ZERO_1, stage=0, clip=0.5))), error=1e-5),
    "zebra, zero 1, clipped": Row(Pipeline(zebra(replace(ZERO_1, clip=0.5))), error=1e-5),
    "zebra, bf16": Row(Pipeline(zebra(replace(ZERO_1, dtype="bfloat16"))), error=5e-2),
    "zebra, bf16, zero 0": Row(
        Pipeline(zebra(replace(ZERO_1, dtype="bfloat16", stage=0))), error=5e-2
    ),
    "zero 1": Row(Pipeline(ZERO_1), error=1e-5),
    "zero 0, clipped": Row(Pipeline(replace(ZERO_1, stage=0, clip=0.5)), error=1e-5),
    "zero 1, clipped": Row(Pipeline(replace(ZERO_1, clip=0.5)), error=1e-5),
    "bf16": Row(Pipeline(replace(ZERO_1, dtype="bfloat16")), error=5e-2),
    "bf16, zero 0": Row(Pipeline(replace(ZERO_1, dtype="bfloat16", stage=0)), error=5e-2),
}


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in ROWS])
def test_learns_what_one_rank_does(name: str) -> None:
    row = ROWS[name]
    ours, theirs = run(row.ranks, row.pipeline), alone(row.pipeline)
    assert ours.losses == pytest.approx(theirs.losses, rel=row.error)
    assert ours.evaluations == pytest.approx(theirs.evaluations, rel=max(row.error, 1e-6))
    if any(theirs.norms) and any(ours.norms):  # in float32, over all stages
        assert ours.norms == pytest.approx(theirs.norms, rel=10 * row.error)
    assert bool(ours.replicas) or not row.replicas
    if row.error < 1e-6:
        assert worst(ours.state, theirs.state, row.pipeline.job) < row.error


SAVED = replace(
    fssdp(GPT, overlap_degree=2, replicas_per_rank=2), steps=4, sgd=False, learning_rate=1e-3
)
BY_EP = {"strategy": "ep", "keys": ()}
OF_MIXTRAL = replace(SAVED, family=MIXTRAL.family, **BY_EP)
OF_ZEBRA = zebra(SAVED)
ANOTHER = {
    "the same": (4, Pipeline(SAVED)),
    "by zebra": (4, Pipeline(zebra(SAVED))),
    "by zebra, one stage": (2, Pipeline(zebra(SAVED), num_stages=1)),
    "zebra by zebra": (4, Pipeline(OF_ZEBRA)),
    "zebra by zebra, experts first": (4, Pipeline(zebra(SAVED, attention_ep_ranks=[1]))),
    "zebra by zebra, four stages": (8, Pipeline(OF_ZEBRA, num_stages=4)),
    "zebra by ep": (4, Pipeline(replace(SAVED, **BY_EP))),
    "by ep": (4, Pipeline(replace(SAVED, **BY_EP))),
    "four stages": (4, Pipeline(SAVED, num_stages=4)),
    "one stage": (2, Pipeline(SAVED, num_stages=1)),
    "one rank at ZeRO 0": (1, Pipeline(SAVED, num_stages=1)),
    "mixtral by prophet": (4, Pipeline(replace(OF_MIXTRAL, strategy="prophet"))),
    "mixtral by fssdp, one stage": (
        2,
        Pipeline(replace(SAVED, family=MIXTRAL.family), num_stages=1),
    ),
}


@pytest.mark.parametrize("name", [slow(name) for name in ANOTHER])
def test_goes_on(name: str, tmp_path: Path) -> None:
    ranks, pipeline = ANOTHER[name]
    source = OF_MIXTRAL if pipeline.job.family == MIXTRAL.family else SAVED
    source = OF_ZEBRA if name.startswith("zebra") else source
    whole = run(4, Pipeline(source))
    folder = str(tmp_path)
    run(4, Pipeline(replace(source, steps=2, save_at=2, folder=folder)))
    resumed = replace(pipeline, job=replace(pipeline.job, resume=True, folder=folder))
    rest = run(ranks, resumed)
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-9)
    assert worst(rest.state, whole.state, source) < 1e-8


@pytest.mark.slow
def test_a_stage_without_experts_is_refused_on_all_ranks() -> None:
    results = pool_of(2).run(pipelines.why_refused, Pipeline(replace(GPT, num_layers=1)))
    assert all("of this PipelineModule has no MoE layer" in text for text in results)
    assert all("partition_method" in text for text in results)


@pytest.mark.slow
def test_stages_want_groups_of_neighbours() -> None:
    """All ranks of one kind come first, so that each stage has one kind."""
    pipeline = Pipeline(zebra(GPT, attention_device="A40"))
    devices = ("A40", "A40", "T4", "T4")
    for text in pool_of(4).run(by_device, devices, pipelines.why_refused, pipeline):
        assert "1 attention + 1 expert ranks by device" in text
        assert "a pipeline stage has 2 of them; order the hostfile so that" in text


@pytest.mark.slow
def test_each_stage_leaves_a_report(tmp_path: Path) -> None:
    job = replace(GPT, steps=2, dtype="float32", folder=str(tmp_path))
    pool_of(4).run(pipelines.train_with_report, Pipeline(job))
    for stage, layers in enumerate((("2", "3"), ("4", "5"))):
        document = json.loads((tmp_path / f"stage_{stage}" / "report.json").read_text())
        names = [layer["name"] for layer in document["layers"]]
        assert [name.partition(".")[0] for name in names] == list(layers)
