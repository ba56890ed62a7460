"""Strategy zebra under the real DeepSpeed engine learns what ``ep`` learns: float64, Adam.

Where stripes cut a rank's batch, balance losses and capacities are those of the pieces, as they are
of smaller micro-batches; the jobs that do so have neither.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.hosts import families
from tests.hosts.copied_runs import check_equal, plain
from tests.hosts.jobs import Job, Result, train
from tests.marks import slow
from tests.ranks import pool_of

NUM_EXPERTS = {2: 4, 3: 6, 4: 4, 6: 12, 8: 8}
"""By ranks: a number that the ranks divide, and the expert ranks too."""


def job_of(world_size: int, family: str = "mixtral", **named: Any) -> Job:
    """Each rank accumulates two micro-batches."""
    job = Job(
        family,
        0,
        dtype="float64",
        steps=3,
        clip=0.5,
        micro_batches=2 * world_size,
        num_experts=NUM_EXPERTS[world_size],
    )
    return replace(job, **named)


def zebra(job: Job, attention: int, experts: int, **keys: Any) -> Job:
    """The job with roles."""
    own = {"attention_size": attention, "expert_size": experts, **keys}
    return replace(job, strategy="zebra", keys=tuple(own.items()))


def result_of(world_size: int, job: Job) -> Result:
    result: Result = pool_of(world_size).run(train, job)[0]
    return result


def check(
    attention: int, experts: int, job: Job, *, groups: int = 1, on: int | None = None, **keys: Any
) -> None:
    """The job is the same with roles as without, on as many ranks or on ``on``."""
    world_size = groups * (attention + experts)
    ours = result_of(world_size, zebra(job, attention, experts, **keys))
    check_equal(ours, plain(on or world_size, job), job, tolerance=1e-11)


SHAPES = [
    (1, 1, 1, None),
    (1, 1, 1, [0, 1]),
    (2, 2, 1, [0, 1]),
    (1, 1, 2, [1, 0]),
    slow(2, 2, 1, None),
    slow(2, 2, 1, [2, 2]),
    (1, 2, 1, [1, 2]),
    slow(1, 2, 1, None),
    (2, 1, 1, [2, 0]),
    slow(2, 1, 1, None),
    slow(1, 3, 1, None),
    slow(2, 4, 1, [1, 0]),
    slow(2, 4, 1, None),
    slow(4, 2, 1, [2, 0]),
    slow(4, 2, 1, None),
    slow(2, 2, 2, [1, 2]),
    slow(1, 1, 4, [2, 4]),
]


@pytest.mark.parametrize(("attention", "experts", "groups", "moved"), SHAPES)
def test_shapes(attention: int, experts: int, groups: int, moved: list[int] | None) -> None:
    """Ranks of either role, several groups, with experts of attention ranks and without."""
    world_size = groups * (attention + experts)
    job = job_of(world_size, aux_coefficient=0.0 if attention > experts else 0.02)
    if experts == 3:
        job = replace(job, num_experts=12)
    check(attention, experts, job, groups=groups, moved=moved)


@pytest.mark.parametrize("num_stripes", [1, 4, slow(2), slow(3)])
def test_stripes(num_stripes: int) -> None:
    """One that holds both batches; and some that are a part of one."""
    job = job_of(2, aux_coefficient=0.0)
    check(1, 1, job, num_micro_batches=num_stripes, moved=[0, 1])


@pytest.mark.parametrize(
    ("attention", "experts", "num_stripes"),
    [slow(2, 1, 1), slow(2, 1, 2), slow(1, 2, 4), slow(2, 2, 1), slow(2, 2, 3), slow(2, 2, 4)],
)
def test_stripes_of_several_batches(attention: int, experts: int, num_stripes: int) -> None:
    """Stripes end within batches, and an expert rank's batch goes to two attention ranks."""
    job = job_of(attention + experts, aux_coefficient=0.0)
    check(attention, experts, job, num_micro_batches=num_stripes)


@pytest.mark.parametrize(
    ("recomputes", "use_reentrant"), [(True, False), slow(True, None), slow(False, False)]
)
@pytest.mark.parametrize("family", ["mixtral", slow("gpt_moe"), slow("toy")])
def test_computing_again(family: str, recomputes: bool, use_reentrant: bool | None) -> None:
    """On expert ranks, and by the user on attention ranks."""
    job = job_of(2, family, use_reentrant=use_reentrant)
    check(1, 1, job, recompute_experts=recomputes, num_micro_batches=2)


FAMILIES = [
    "gpt_moe",
    "qwen2_moe",
    "deepseek_v3",
    *(slow(n) for n in families.NAMES if n not in ("qwen2_moe", "deepseek_v3", "mixtral")),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    num_layers = families.MOE_LAYERS.get(family, 2)
    check(1, 1, job_of(2, family), moved=[1, 0][:num_layers])


TOYS = [
    "toy, uneven layers",
    "toy, paired",
    slow("toy"),
    slow("toy, frozen experts"),
    slow("toy, experts alone"),
    slow("toy, some experts frozen"),
    slow("toy, top alone"),
    slow("toy, two pools"),
]


@pytest.mark.parametrize("family", TOYS)
def test_unusual_models(family: str) -> None:
    check(1, 1, job_of(2, family))


def test_weights_with_one_gradient() -> None:
    """With one stripe a gradient is found once; two weights have the same tensor of it."""
    check(1, 1, job_of(2, "toy, paired"), num_micro_batches=1)


@pytest.mark.parametrize("family", ["toy, two pools", slow("toy, uneven layers")])
def test_experts_of_different_layers_move(family: str) -> None:
    check(1, 1, job_of(2, family), moved=[0, 1, 3, 2])


@pytest.mark.parametrize("moved", [[4, 4], slow([2, 4])])
def test_an_expert_rank_that_gives_up_all(moved: list[int]) -> None:
    check(1, 1, job_of(2), moved=moved)


@pytest.mark.parametrize("num_layers", [slow(3), slow(4)])
@pytest.mark.parametrize("family", ["mixtral", "gpt_moe"])
def test_deeper_models(family: str, num_layers: int) -> None:
    moved = [0, 1, 2, 1][:num_layers]
    check(2, 2, job_of(4, family, num_layers=num_layers), moved=moved)


@pytest.mark.parametrize("family", ["mixtral", slow("gpt_moe")])
def test_capacity(family: str) -> None:
    """Over a piece; here a piece is a batch."""
    check(1, 1, job_of(2, family, capacity_factor=0.8), num_micro_batches=2)


def test_evaluation() -> None:
    """Between steps, and between a forward and its backward; it leaves no trace."""
    check(1, 1, job_of(2, evaluate=True, evaluate_within=True), moved=[0, 1])


def test_no_accumulation() -> None:
    check(1, 1, job_of(2, micro_batches=2, learning_rate=1e-2))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt_moe"])
def test_long_run(family: str) -> None:
    job = job_of(4, family, steps=30)
    ours = result_of(4, zebra(job, 2, 2, moved=[0, 1]))
    theirs = plain(4, job)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    assert ours.losses[-1] < ours.losses[0]
