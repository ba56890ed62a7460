# SPDX-License-Identifier: Apache-2.0
"""The optimizer's states in host memory: what a run saved there another goes on from without, and
the reverse, to the last bit; and what ``ratio`` leaves on the device.

That runs learn the same is in ``test_configurations.py``, and that experts move from there with all
that is theirs in ``test_states.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from tests.hosts.checkpoints import (
    Call,
    Held,
    Layout,
    Saved,
    assert_equal,
    check_cross,
    fssdp,
    joined,
    load,
    loaded,
    run_steps,
    save,
    saved,
)
from tests.hosts.jobs import Job, engine_of
from tests.marks import needs_compiler, slow
from tests.ranks import pool_of

pytestmark = pytest.mark.usefixtures("checkpoints_removed")

ON_HOST = (("device", "cpu"),)


@pytest.mark.parametrize("is_first", [True, slow(False)], ids=["from the host", "to the host"])
@pytest.mark.parametrize(
    "job",
    [
        Job(stage=2),
        slow(Job(stage=2, ep_ranks=1, dtype="bfloat16")),
        slow(Job(stage=1, strategy="prophet")),
        slow(Job(stage=3)),
        slow(Job(stage=3, ep_ranks=1, dtype="bfloat16")),
    ],
    ids=lambda job: f"zero{job.stage}-{job.strategy}-{job.dtype}",
)
def test_states_go_on_elsewhere_to_the_last_bit(job: Job, is_first: bool) -> None:
    here, there = replace(job, offload=ON_HOST), job
    source, goal = (here, there) if is_first else (there, here)
    checkpoint = saved(2, source)
    ranks = loaded(2, goal, checkpoint, Call(before=1, after=2))
    assert_equal(joined(ranks), joined(checkpoint.ranks))
    assert ranks[0].losses == checkpoint.ranks[0].losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "goal"),
    [
        (Layout(2, Job(stage=3, offload=ON_HOST)), fssdp(4, 1)),
        (Layout(2, Job(stage=3, offload=ON_HOST)), Layout(1, Job(stage=2, ep_ranks=1))),
        (fssdp(2, 2), Layout(4, Job(strategy="prophet", stage=3, offload=ON_HOST))),
    ],
    ids=str,
)
def test_another_layout_goes_on(source: Layout, goal: Layout) -> None:
    check_cross("mixtral", "float32", source, goal)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("is_first", [True, False])
def test_deepspeeds_own_adam_goes_on_elsewhere(stage: int, is_first: bool) -> None:
    """Without offload the same JSON makes a FusedAdam."""
    there = Job(stage=stage, torch_adam=False)
    here = replace(there, offload=ON_HOST)
    source, goal = (here, there) if is_first else (there, here)
    checkpoint = saved(2, source)
    ranks = loaded(2, goal, checkpoint, Call(before=1, after=2))
    assert_equal(joined(ranks), joined(checkpoint.ranks))
    assert ranks[0].losses == pytest.approx(checkpoint.ranks[0].losses, rel=1e-5)


# Some of it on the device: a CPU too, by another name.


def beside_a_device(job: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(job)
    def beside(*args: Any, **kwargs: Any) -> Any:
        from deepspeed.accelerator import get_accelerator

        with mock.patch.object(get_accelerator(), "_name", "cpu:0"):
            return job(*args, **kwargs)

    return beside


@beside_a_device
def save_beside(rank: int, world_size: int, job: Job, folder: str) -> Held:
    return save(rank, world_size, job, folder, steps=2)


@beside_a_device
def load_beside(rank: int, world_size: int, job: Job, folder: str, call: Call) -> Held:
    return load(rank, world_size, job, folder, call)


def in_part(ratio: float) -> Job:
    return Job(stage=3, torch_adam=False, offload=(*ON_HOST, ("ratio", ratio)))


@beside_a_device
def classes_and_rates(rank: int, world_size: int, ratio: float) -> list[tuple[str, float]]:
    """Of what steps each parameter, after a rate was written to the engine's optimizer."""
    from ds_moe_ext.hosts.deepspeed.parameter_groups import OptimizerStates

    engine = engine_of(in_part(ratio), world_size)
    run_steps(rank, world_size, engine, range(1))
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.25
    states, reported = OptimizerStates(engine), []
    for parameter in engine.module.parameters():
        options = states.options(parameter)
        assert options is not None
        step = states.of(parameter).scalars["step"]
        reported.append((type(step).__name__, options["lr"]))
    return reported


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratio", "kinds"), [(1.0, {"int"}), (0.5, {"int", "Tensor"}), (0.0, {"Tensor"})]
)
def test_a_part_is_stepped_on_the_device_at_the_same_rate(ratio: float, kinds: set[str]) -> None:
    for reported in pool_of(2).run(classes_and_rates, ratio):
        assert {kind for kind, _ in reported} == kinds
        assert {rate for _, rate in reported} == {0.25}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [(0.5, 1.0), (1.0, 0.5), (0.5, 0.0), (0.0, 1.0), (1.0, 0.0)]
)
def test_another_part_goes_on(first: float, second: float, tmp_path: Any) -> None:
    ranks: list[Held] = pool_of(2).run(save_beside, in_part(first), str(tmp_path))
    checkpoint = Saved(tmp_path, ranks)
    call = Call(before=1, after=2)
    own: list[Held] = pool_of(2).run(load_beside, in_part(second), str(tmp_path), call)
    assert_equal(joined(own), joined(checkpoint.ranks))
    assert own[0].losses == pytest.approx(checkpoint.ranks[0].losses, rel=1e-5)
    fresh: list[Held] = pool_of(2).run(load_beside, in_part(second), str(tmp_path), Call(after=2))
    assert fresh[0].losses == own[0].losses
