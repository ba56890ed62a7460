# SPDX-License-Identifier: Apache-2.0
"""What a person is told at the start of a run, and what its timeline shows."""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

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


def test_tasks_of_cells_and_slices_are_in_the_timeline() -> None:
    record = pool_of(2).run(_recorded)[0]
    assert (record.strategy, record.num_cells) == ("esp over ep", 1)
    found = {(span.name, span.lane, span.phase) for span in record.timeline}
    assert found >= {
        ("cell_gather", "inter", "forward"),  # in the one queue of this schedule
        ("cell_scatter", "inter", "backward"),
        ("attention", "compute", "forward"),
        ("attention", "compute", "backward"),
        ("gradients", "inter", "backward"),
    }
    assert ("gradients", "inter", "forward") not in found
    slices = [span for span in record.timeline if span.name == "gradients"]
    assert [span.layer for span in slices] == [layer.name for layer in record.layers[::-1]]
    assert all(span.end_s > span.start_s for span in slices)
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


def test_keys_that_cannot_do_anything_are_told_once() -> None:
    keys = (("calibrate", True), ("overlap_degree", 4), ("copies_per_rank", 4))
    keys += (("resharding", "paper"),)
    first, second = pool_of(2).run(_printed, Job(strategy="fssdp", keys=keys))
    assert first.count("ds_moe_ext: calibrate can add no copies, for 4 of 4 experts") == 1
    assert first.count("ds_moe_ext: heterogeneous_sharding moves no expert") == 1
    assert "calibrate" not in second


FEW = Job("toy, two experts a layer", strategy="fssdp", cells=4)


def test_ranks_without_experts_are_told_and_have_room_for_copies() -> None:
    """Costs are measured in the fifth step."""
    printed, *others = pool_of(4).run(_printed, FEW, 5)
    assert (
        "ds_moe_ext: some of the 4 cells are home to no expert of blocks.0.experts, which has 2 "
        "(of 4 layers likewise): there they compute only what is copied to them; to have experts "
        'everywhere set {"ds_moe_ext": {"expert_parallel_size": 2}}\n'
    ) in printed
    assert "expert_parallel_size is null" not in printed
    assert (
        "a rank holds up to 1 copies of a layer (copies_per_rank)" in printed
        and "m is 0" not in printed
    )
    assert not any("ds_moe_ext" in other for other in others)


def test_null_leaves_no_rank_without_experts() -> None:
    """And when costs have been measured, what they forbid is told."""
    job = replace(FEW, cells=None, keys=(("copy_bytes", 1), ("overlap_degree", 1)))
    printed, *_ = pool_of(4).run(_printed, job, 5)
    assert "strategy fssdp, 4 ranks = 2 EP groups x 2 EP ranks" in printed
    assert "ds_moe_ext: expert_parallel_size is null: 2 cells, the most" in printed
    assert "some of the" not in printed
    assert "nothing is copied of any layer, for a rank has no room for a copy (m is 0)" in printed


def test_one_cell_has_nobody_to_copy_to() -> None:
    printed, _ = pool_of(2).run(_printed, Job("toy", strategy="prophet", cells=1))
    assert "every rank has all experts, so that none is copied; raise ds_moe_ext.expert" in printed
