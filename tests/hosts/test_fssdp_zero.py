"""Copies under DeepSpeed's ZeRO stages, precisions, optimizers and clipping."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.hosts.copied_runs import (
    alone,
    check_equal,
    num_copied,
    num_moved,
    plain,
    run,
    varied,
    worst,
)
from tests.hosts.jobs import Job
from tests.marks import slow

pytestmark = pytest.mark.slow  # quicker tests train at ZeRO 1 and 2 too

GRADIENT = {"sgd": True, "optimizer": "object", "learning_rate": 1e4, "steps": 1}


@pytest.mark.parametrize("rematerialized", [0.0, 1.0])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("family", ["mixtral", "gpt_moe"])
def test_first_gradients_equal_one_rank(family: str, stage: int, rematerialized: float) -> None:
    """One step of SGD at a huge rate is the gradient, whatever ZeRO does with it. Two micro-batches
    a rank; the first plan has copies already."""
    job = Job(family, stage, **GRADIENT)
    keys = {"layers": 1.0, "copies": 0.7, "rematerialized": rematerialized}
    ours, (step,) = run(2, varied(job, **keys))
    theirs = alone(job)
    assert num_copied([step])[0] > 1
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    check_equal(ours, theirs, job, tolerance=1e-6)


KEYS = {"shard_every": 4, "revised": 0.3, "rematerialized": 0.3, "carried": 0.5}


@pytest.mark.parametrize(("world_size", "stage"), [(2, 1), (4, 2), slow(2, 2), slow(4, 1)])
def test_curves_in_float32(world_size: int, stage: int) -> None:
    """A flipped choice may move a curve, but not far in ten steps."""
    job = Job("mixtral", stage, clip=0.5)
    ours, steps = run(world_size, varied(job, **KEYS))
    theirs = plain(world_size, job)
    assert num_moved(steps)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)


@pytest.mark.parametrize(
    ("dtype", "stage"),
    [
        *(("bfloat16", 2), ("float16", 0), ("float16", 1)),
        *(slow("bfloat16", 0), slow("bfloat16", 1), slow("float16", 2)),
    ],
)
def test_curves_in_half_precision(dtype: str, stage: int) -> None:
    """In float16 the first gradients overflow on purpose: their steps are skipped."""
    job = Job("gpt_moe", stage, dtype=dtype, clip=0.5)
    ours, steps = run(2, varied(job, **KEYS))
    assert num_moved(steps)
    assert ours.losses == pytest.approx(plain(2, job).losses, rel=5e-3)
    if stage:
        assert ours.norms == pytest.approx(plain(2, job).norms, rel=5e-2)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_first_gradients_in_bfloat16(stage: int) -> None:
    job = Job("mixtral", stage, dtype="bfloat16", **GRADIENT)
    ours, _ = run(2, varied(job, layers=1.0, copies=0.7))
    check_equal(ours, plain(2, job), job, tolerance=2e-2)


@pytest.mark.parametrize("stage", [slow(0), 1, slow(2)])
@pytest.mark.parametrize(("optimizer", "parameters"), [("object", "groups"), ("callable", "list")])
def test_users_own_optimizer(optimizer: str, parameters: str, stage: int) -> None:
    job = Job("mixtral", stage, steps=5, optimizer=optimizer, parameters=parameters)
    ours, steps = run(2, varied(job, shard_every=2))
    assert num_moved(steps)
    assert ours.losses == pytest.approx(alone(replace(job, stage=0)).losses, rel=2e-5)


@pytest.mark.parametrize("stage", [slow(1), 2])
def test_adam_goes_with_its_expert(stage: int) -> None:
    """Weights after steps of Adam with homes that are drawn anew in each: in float32 close to those
    of experts that stay."""
    job = Job("toy", stage, steps=6)
    ours, steps = run(4, varied(job, shard_every=1))
    assert num_moved(steps) > 20
    assert worst(ours.state, plain(4, job).state, job) <= 1e-4


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync(stage: int) -> None:
    """DeepSpeed itself refuses it at ZeRO 2."""
    job = Job("toy", stage, steps=5, clip=0.5, no_sync=True, evaluate=True)
    ours, _ = run(2, varied(job, revised=0.3))
    assert ours.losses == pytest.approx(plain(2, job).losses, rel=1e-5)
    assert ours.norms == pytest.approx(plain(2, job).norms, rel=1e-4)
