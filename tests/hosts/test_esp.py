"""Strategy ``esp`` under a real DeepSpeed engine: experts split in cells, rows in chunks, over any
placement of experts. Every loss, norm and weight is that of ``ep``, to 1e-12."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from ds_moe_ext.steps.training_run import run_of
from ds_moe_ext.strategies.esp import Pipelined
from ds_moe_ext.strategy import Strategy
from tests.hosts.copied_runs import check_equal, plain
from tests.hosts.jobs import ROWS, Job, Result, engine_of, train
from tests.hosts.varied import VARIED
from tests.marks import slow
from tests.ranks import pool_of
from tests.strategies_for_tests import Sine

STEPS = 6
SINE = f"{Sine.__module__}:{Sine.__qualname__}"


def job_of(family: str, **fields: Any) -> Job:
    return Job(family, 0, dtype="float64", steps=STEPS, clip=0.5, **fields)


def esp(job: Job, cell_size: int, **keys: Any) -> Job:
    given = {"degree": {"forward": 2, "backward": 3}, "slice_gradients": False, **keys}
    return replace(job, strategy="esp", keys=tuple(given.items()), cell_size=cell_size)


def run(world_size: int, job: Job) -> Result:
    result: Result = pool_of(world_size).run(train, job)[0]
    return result


@pytest.mark.parametrize("family", ["mixtral", "gpt_moe"])
@pytest.mark.parametrize(
    ("world_size", "cell_size"), [(2, 2), (4, 2), slow(1, 1), slow(4, 4), slow(4, 1)]
)
def test_split_experts_train_alike(family: str, world_size: int, cell_size: int) -> None:
    job = job_of(family)
    tolerance = 1e-11 if family == "gpt_moe" else 1e-12  # Adam makes steps of its keys' zero bias
    check_equal(run(world_size, esp(job, cell_size)), plain(world_size, job), job, tolerance)


@pytest.mark.parametrize(
    "schedule",
    ["tutel", "fsmoe_no_iio", *(slow("default"), slow("tutel_improved"), slow("pipemoe_lina"))],
)
def test_every_schedule_trains_alike(schedule: str) -> None:
    job = job_of("mixtral")
    degree = None if schedule == "default" else 2
    check_equal(run(4, esp(job, 2, schedule=schedule, degree=degree)), plain(4, job), job)


COPIED = (("carried", 0.5), ("rematerialized", 0.5), ("revised", 0.5))


@pytest.mark.parametrize(("world_size", "cell_size"), [(2, 1), (4, 2)])
def test_copies_of_split_experts_train_alike(world_size: int, cell_size: int) -> None:
    """Copies by chance, revised and carried by chance, new homes by chance, under pipelines."""
    job = job_of("toy")
    placed = replace(
        esp(job, cell_size), balance=VARIED, balance_keys=(*COPIED, ("shard_every", 2))
    )
    check_equal(run(world_size, placed), plain(world_size, job), job)


@pytest.mark.parametrize("balance", ["fssdp", "prophet"])
def test_balanced_pipelines_train_alike(balance: str) -> None:
    job = replace(job_of("mixtral"), steps=10)
    keys = {"fssdp": (("copies_per_rank", 2), ("reshard_interval", 3)), "prophet": ()}[balance]
    placed = replace(esp(job, 2), balance=balance, balance_keys=keys)
    check_equal(run(4, placed), plain(4, job), job)


def balance_of(rank: int, world_size: int, job: Job) -> Strategy:
    """What a run goes by."""
    run = run_of(engine_of(job, world_size))
    assert run is not None and isinstance(run.planning.strategy, Pipelined)
    return run.planning.strategy.placing


def test_stages_of_a_balance_and_what_it_settles_train_alike() -> None:
    job = replace(job_of("mixtral"), steps=3)
    alone, over = replace(job, strategy=SINE), replace(esp(job, 1), balance=SINE)
    stages = run(2, alone)
    assert stages.losses != plain(2, job).losses
    check_equal(run(2, over), stages, job)
    assert pool_of(2).run(balance_of, over) == [Sine(micro_batch=ROWS, num_devices=2)] * 2


@pytest.mark.parametrize("use_reentrant", [False, slow(True)])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    job = replace(job_of("mixtral"), use_reentrant=use_reentrant)
    check_equal(run(4, esp(job, 2)), plain(4, job), job)


@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (2, "float32"), (2, "bfloat16")])
def test_curves_at_zero_stages(stage: int, dtype: str) -> None:
    job = Job("mixtral", stage, dtype=dtype, clip=0.5)
    ours = run(4, esp(job, 2))
    rel = 1e-5 if dtype == "float32" else 5e-3
    assert ours.losses == pytest.approx(plain(4, job).losses, rel=rel)


# Measured pipelines, and dense gradients in slices.


@pytest.mark.parametrize(("world_size", "cell_size"), [(2, 2), (4, 2), slow(4, 1)])
@pytest.mark.parametrize("micro_batches", [4, 8])
def test_planned_pipelines_train_alike(world_size: int, cell_size: int, micro_batches: int) -> None:
    """Costs are measured in step 4; by then dense gradients are reduced in slices."""
    job = replace(job_of("mixtral"), steps=8, micro_batches=micro_batches)
    planned = esp(job, cell_size, degree=None, slice_gradients=True)
    check_equal(run(world_size, planned), plain(world_size, job), job)


@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (2, "float32"), (2, "bfloat16")])
@pytest.mark.parametrize("schedule", ["fsmoe", slow("tutel_improved"), slow("pipemoe_lina")])
def test_sliced_curves_at_zero_stages(stage: int, dtype: str, schedule: str) -> None:
    job = Job("mixtral", stage, dtype=dtype, clip=0.5)
    ours = run(4, esp(job, 2, slice_gradients=True, degree=2, schedule=schedule))
    rel = 1e-5 if dtype == "float32" else 5e-3
    assert ours.losses == pytest.approx(plain(4, job).losses, rel=rel)


def on_unequal_nodes(rank: int, world_size: int) -> str:
    """A node of two ranks, and two of one."""
    here = {"LOCAL_WORLD_SIZE": "2" if rank < 2 else "1"}
    with mock.patch.dict(os.environ, here), pytest.raises(ValueError) as caught:
        engine_of(Job("toy", strategy="esp"), world_size)
    return str(caught.value)


def test_ranks_that_choose_other_sizes() -> None:
    for message in pool_of(4).run(on_unequal_nodes):
        assert "is 2 cells of 2 ranks on rank 0 and 4 cells of 1 ranks on rank" in message
        assert "set ds_moe_ext.expert_parallel_size and ds_moe_ext.expert_sharding_size" in message
