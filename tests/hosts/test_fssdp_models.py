"""Models of many kinds with copies learn what they learn alone: float64, Adam."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.hosts import toy
from tests.hosts.copied_runs import (
    alone,
    check_equal,
    fssdp,
    num_copied,
    num_moved,
    plain,
    run,
    varied,
)
from tests.hosts.jobs import Job
from tests.marks import slow

ALL = {"revised": 0.4, "rematerialized": 0.4, "carried": 0.5, "shard_every": 2}
TOYS = sorted(set(toy.NAMES) - {"toy", "toy, wide", "toy, deep"})


def tolerance(family: str) -> float:
    """Keys have biases in gpt_moe, whose gradient is nothing but rounding: even without copies they
    differ by 2e-12 between two and four ranks."""
    return 1e-11 if family == "gpt_moe" else 1e-12


@pytest.mark.parametrize("family", TOYS)
def test_toys_equal_one_rank(family: str) -> None:
    """Few experts, layers of other sizes or shapes, shared or frozen ones."""
    job = Job(family, 0, dtype="float64", steps=5)
    ours, steps = run(4, varied(job, **ALL))
    check_equal(ours, alone(job), job)
    assert any(num_copied(steps))


@pytest.mark.parametrize(
    "family", ["toy, paired", slow("toy, shared experts"), slow("toy, top alone")]
)
def test_toys_that_accumulate(family: str) -> None:
    job = Job(family, 0, dtype="float64", steps=4, micro_batches=6)
    ours, _ = run(2, varied(job, layers=1.0, shard_every=2))
    check_equal(ours, alone(job), job)


@pytest.mark.slow
@pytest.mark.parametrize("family", TOYS)
def test_toys_on_more_ranks_than_experts(family: str) -> None:
    job = Job(family, 0, dtype="float64", steps=5, micro_batches=8)
    ours, _ = run(8, varied(job, **ALL))
    check_equal(ours, alone(job), job)


def test_frozen_experts_move_beside_trained_ones() -> None:
    """Nothing of the optimizer is kept of them; some ranks have only such to move."""
    job = Job("toy, some experts frozen", 0, dtype="float64", steps=6)
    ours, steps = run(4, varied(job, layers=0.0, shard_every=1, seed=1))
    check_equal(ours, alone(job), job)
    assert num_moved(steps)


@pytest.mark.parametrize("layers", [0.0, 1.0])
def test_ranks_without_experts_of_a_layer(layers: float) -> None:
    """Two experts a layer on four ranks, with copies and without."""
    job = Job("toy, experts alone", 0, dtype="float64", steps=5)
    ours, _ = run(4, varied(job, layers=layers, shard_every=3))
    check_equal(ours, alone(job), job)


FAMILIES = ["mixtral", "gpt_moe", "gpt_oss", slow("qwen3_moe"), slow("deepseek_v3")]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_equal_expert_parallelism(family: str) -> None:
    job = Job(family, 0, dtype="float64", steps=6)
    ours, steps = run(4, varied(job, layers=1.0, **ALL))
    check_equal(ours, plain(4, job), job, tolerance(family))
    assert any(num_copied(steps))


def test_native_layers_with_fewer_experts_than_ranks() -> None:
    job = Job("gpt_moe", 0, dtype="float64", steps=6, num_experts=2)
    ours, _ = run(4, varied(job, **ALL))
    check_equal(ours, alone(job), job, tolerance("gpt_moe"))


CHECKPOINTED = {
    "toy, uneven layers": ALL,
    "mixtral": {**ALL, "carried": 1.0},
    "qwen2_moe": {"rematerialized": 1.0},  # saves tensors after its experts: computed to the end
    "gpt_moe": {"revised": 1.0},
}


@pytest.mark.parametrize("use_reentrant", [slow(False), True])
@pytest.mark.parametrize("family", CHECKPOINTED)
def test_activation_checkpointing(family: str, use_reentrant: bool) -> None:
    job = Job(family, 0, dtype="float64", steps=3, use_reentrant=use_reentrant)
    world_size = 4 if "toy" in family else 2
    theirs = alone(job) if "toy" in family else plain(world_size, job)
    ours, _ = run(world_size, varied(job, layers=1.0, **CHECKPOINTED[family]))
    check_equal(ours, theirs, job, tolerance(family))


@pytest.mark.parametrize("family", ["toy", "toy, uneven layers"])
def test_capacity_drops_the_same_rows(family: str) -> None:
    """A rank's rows are dropped by the experts' rows, wherever they compute."""
    job = Job(family, 0, dtype="float64", steps=5, capacity_factor=0.8)
    ours, _ = run(2, varied(job, **ALL))
    theirs, _ = run(2, fssdp(job, overlap_degree=0, reshard_interval=0))
    check_equal(ours, theirs, job)
    assert theirs.losses != pytest.approx(alone(replace(job, capacity_factor=None)).losses)


@pytest.mark.parametrize("ranks", [2, 4])
def test_two_grids(ranks: int) -> None:
    """Experts of each grid are copied within it."""
    job = Job("toy", 1, steps=1, cells=ranks // 2, sgd=True, optimizer="object", learning_rate=1e3)
    ours, _ = run(ranks, varied(job, layers=1.0))
    check_equal(ours, alone(job), job, tolerance=1e-6)
