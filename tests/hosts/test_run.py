# SPDX-License-Identifier: Apache-2.0
"""What a person is notified at the start of a run, and what its timeline shows."""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import pytest

from ds_moe_ext.report.record import RunRecord
from tests.hosts.jobs import Job, document_of, loss_of, micro_batch, model_of
from tests.ranks import pool_of


def _recorded(rank: int, world_size: int) -> RunRecord:
    """Seven steps of split experts, with all that is ready reduced behind each layer."""
    import deepspeed

    import ds_moe_ext

    model = model_of(Job())
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "ds_moe_ext": {
                "enabled": True,
                "strategy": "esp",
                "balance": "ep",
                "expert_sharding_size": 2,
                "esp": {"degree": 2, "schedule": "tutel_improved"},
                "report": {"enabled": False, "trace_step": 6},
            },
        },
    )
    for step in range(7):
        tokens = micro_batch(step, rank)
        engine.backward(engine(input_ids=tokens, labels=tokens.roll(-1, 1)).loss)
        engine.step()
    return ds_moe_ext.recorder_of(engine).record()


@pytest.mark.slow
def test_tasks_of_ep_ranks_and_slices_are_in_the_timeline() -> None:
    record = pool_of(2).run(_recorded)[0]
    assert (record.strategy, record.num_ep_ranks) == ("esp over ep", 1)
    found = {
        (traced_task.name, traced_task.stream, traced_task.phase) for traced_task in record.timeline
    }
    assert found >= {
        ("etp_gather", "inter", "forward"),  # in the one queue of this schedule
        ("etp_scatter", "inter", "backward"),
        ("attention", "compute", "forward"),
        ("attention", "compute", "backward"),
        ("gradients", "inter", "backward"),
    }
    assert ("gradients", "inter", "forward") not in found
    slices = [traced_task for traced_task in record.timeline if traced_task.name == "gradients"]
    assert [traced_task.layer for traced_task in slices] == [
        layer.name for layer in record.layers[::-1]
    ]
    assert all(traced_task.end_s > traced_task.start_s for traced_task in slices)
    assert record.seconds_by_kind["backward:gradients"] > 0


def _printed(rank: int, world_size: int, job: Job, steps: int = 0) -> str:
    """What a rank shows as a run starts, and in these steps."""
    import deepspeed

    model, document = model_of(job), document_of(job, world_size)
    document["ds_moe_ext"]["report"] = {"enabled": True}
    with redirect_stdout(StringIO()) as printed:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=document
        )
        for step in range(steps):
            engine.backward(loss_of(engine, micro_batch(step, rank)))
            engine.step()
    return printed.getvalue()


def test_keys_that_cannot_do_anything_are_reported_once() -> None:
    keys = (("calibrate", True), ("overlap_degree", 4), ("replicas_per_rank", 4))
    keys += (("resharding", "paper"),)
    first, second = pool_of(2).run(_printed, Job(strategy="fssdp", keys=keys))
    assert first.count("ds_moe_ext: calibrate cannot add replicas: 4 of 4 experts") == 1
    assert first.count("ds_moe_ext: heterogeneous_sharding moves no expert") == 1
    assert "calibrate" not in second


FEW = Job("toy, two experts a layer", strategy="fssdp", ep_ranks=4)


def test_ranks_without_experts_are_reported_and_have_room_for_replicas() -> None:
    """Costs are measured in the fifth step."""
    printed, *others = pool_of(4).run(_printed, FEW, 5)
    assert (
        "ds_moe_ext: some of the 4 EP ranks own no expert of blocks.0.experts, which has 2 "
        "(of 4 layers likewise): they compute only on replicas; to give every EP rank experts, "
        'set {"ds_moe_ext": {"expert_parallel_size": 2}}\n'
    ) in printed
    assert "expert_parallel_size is null" not in printed
    assert (
        "a rank holds up to 1 replicas of a layer (replicas_per_rank)" in printed
        and "m is 0" not in printed
    )
    assert not any("ds_moe_ext" in other for other in others)


def test_null_leaves_no_rank_without_experts() -> None:
    """And when costs have been measured, what they forbid is reported."""
    job = replace(FEW, ep_ranks=None, keys=(("replica_bytes", 1), ("overlap_degree", 1)))
    printed, *_ = pool_of(4).run(_printed, job, 5)
    assert "strategy fssdp, 4 ranks = 2 EP groups x 2 EP ranks" in printed
    assert "ds_moe_ext: expert_parallel_size is null: 2 EP ranks, the largest" in printed
    assert "some of the" not in printed
    assert "no replicas for any layer: a rank has no memory for one (m is 0)" in printed


def test_one_ep_rank_has_nobody_to_copy_to() -> None:
    printed, _ = pool_of(2).run(_printed, Job("toy", strategy="prophet", ep_ranks=1))
    assert (
        "every rank has all experts, so there are no replicas; raise ds_moe_ext.expert"
    ) in printed
