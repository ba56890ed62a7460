# SPDX-License-Identifier: Apache-2.0
"""What a run saved, any other run of the model goes on from: weights and states to the last bit."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ds_moe_ext.hosts.deepspeed import dcp_folder
from ds_moe_ext.hosts.deepspeed.parameter_groups import OptimizerStates
from tests.hosts import jobs
from tests.hosts.checkpoints import (
    MOVING,
    WEIGHT,
    Call,
    Held,
    Layout,
    Saved,
    assert_all_say,
    assert_equal,
    check_cross,
    edit_layout,
    edit_module,
    ep,
    fssdp,
    held_by,
    joined,
    joined_master,
    loaded,
    names_of,
    prophet,
    refused,
    run_steps,
    save,
    saved,
    with_frozen,
)
from tests.hosts.jobs import Job
from tests.hosts.test_states import trust_in_float16
from tests.marks import slow
from tests.ranks import pool_of

pytestmark = pytest.mark.usefixtures("checkpoints_removed")


# Any layout to any other.


CROSSES = [
    ("mixtral", "float32", fssdp(2, 1), [ep(1, 2, 1), fssdp(4, 2), ep(2, 1), ep(4, 0, 2)]),
    ("mixtral", "float32", fssdp(4, 2), [prophet(2, 1)]),
    ("gpt_moe", "bfloat16", prophet(4, 2), [ep(2, 1), fssdp(2, 2)]),
    ("gpt_moe", "bfloat16", ep(4, 2, 2), [fssdp(2, 1), ep(2, 0), fssdp(4, 2), ep(1, 1)]),
    ("gpt_moe", "float32", fssdp(4, 0), [ep(2, 2, 1), fssdp(2, 1)]),
    ("mixtral", "bfloat16", fssdp(2, 0), [ep(4, 1, 4), fssdp(2, 2)]),
    ("mixtral", "float32", ep(2, 3), [ep(4, 1, 2), ep(1, 2, 1)]),
    ("gpt_moe", "bfloat16", fssdp(2, 2), [ep(4, 3, 2), ep(2, 3)]),
    ("mixtral", "bfloat16", ep(4, 3, 2), [prophet(2, 3), ep(4, 3), fssdp(2, 1)]),
]
QUICK = {(1, 0), (7, 1)}
EVERY = [
    *(ep(w, stage, cells) for w, cells in ((1, 1), (2, 2), (2, 1), (4, 2)) for stage in range(4)),
    *(fssdp(w, stage) for w in (2, 4) for stage in (0, 1, 2)),
    *(prophet(w, stage) for w in (2, 4) for stage in range(4)),
]


@pytest.mark.parametrize(
    ("family", "dtype", "source", "goal"),
    [
        case if (row, column) in QUICK else slow(*case)
        for row, (*rest, goals) in enumerate(CROSSES)
        for column, goal in enumerate(goals)
        if (case := (*rest, goal))
    ],
    ids=str,
)
def test_another_layout_goes_on(family: str, dtype: str, source: Layout, goal: Layout) -> None:
    check_cross(family, dtype, source, goal)


@pytest.mark.slow
@pytest.mark.parametrize("goal", EVERY, ids=str)
@pytest.mark.parametrize("source", [ep(1, 0, 1), ep(4, 1, 2), fssdp(2, 2), fssdp(4, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_moe"])
def test_every_layout_goes_on(family: str, dtype: str, source: Layout, goal: Layout) -> None:
    check_cross(family, dtype, source, goal)


@pytest.mark.parametrize(("world_size", "family"), [(2, "mixtral"), slow(4, "gpt_moe")])
def test_experts_had_moved(world_size: int, family: str) -> None:
    """Or the crosses above would show less."""
    job = replace(MOVING, family=family, stage=1)
    first = pool_of(world_size).run(held_at_start, job)
    assert saved(world_size, job).ranks[0].homes != first[0].homes


def held_at_start(rank: int, world_size: int, job: Job) -> Held:
    return held_by(jobs.engine_of(job, world_size))


@pytest.mark.parametrize(("here", "there"), [("float32", "bfloat16"), slow("bfloat16", "float32")])
def test_another_precision_keeps_masters_and_states(here: str, there: str) -> None:
    checkpoint = saved(2, Job("gpt_moe", 1, dtype=here))
    got = joined(loaded(4, Job("gpt_moe", 2, dtype=there, cells=2), checkpoint))
    for key, tensor in joined(checkpoint.ranks).items():
        expected = joined_master(got, key) if key[1] == WEIGHT else tensor
        assert torch.equal(got[key], expected), key


@trust_in_float16
def scales(rank: int, world_size: int, job: Job, folder: str, saves: bool) -> tuple[str, float]:
    """The optimizer's wrapper and its loss scale, of a run that saved or loaded."""
    engine = jobs.engine_of(job, world_size)
    if saves:
        run_steps(rank, world_size, engine, range(3))
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    return type(engine.optimizer).__name__, float(engine.optimizer.loss_scale)


@pytest.mark.slow  # a quick one is in test_zebra_checkpoint.py
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_loss_scale_goes_on(stage: int, tmp_path: Path) -> None:
    halves = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 1}
    job = Job("gpt_moe", stage, extra=(("fp16", halves),))
    written = pool_of(2).run(scales, job, str(tmp_path), True)
    assert all(scale > 2**6 for _, scale in written)
    assert pool_of(2).run(scales, job, str(tmp_path), False) == written
    other = replace(job, stage=0 if stage else 1)
    for wrapper, scale in pool_of(2).run(scales, other, str(tmp_path), False):
        assert wrapper != written[0][0]
        assert scale == 2**6  # it starts anew


UNWRAPPED = Job("gpt_moe", 1, dtype="bfloat16", clip=0.5)
WRAPPED = replace(UNWRAPPED, extra=(("data_types", {"grad_accum_dtype": "fp32"}),))


@pytest.mark.parametrize(
    ("source", "goals"), [(WRAPPED, (WRAPPED, UNWRAPPED)), slow(UNWRAPPED, (WRAPPED,))]
)
def test_bf16_optimizer_goes_on(source: Job, goals: tuple[Job, ...], tmp_path: Path) -> None:
    """DeepSpeed's wrapper for gradients that accumulate in float32."""
    ranks = pool_of(2).run(save, source, str(tmp_path), steps=2)
    for goal in goals:
        got = loaded(2, goal, Saved(tmp_path, ranks), Call(before=1, after=2))
        assert_equal(joined(got), joined(ranks))
        if goal == source:
            assert got[0].losses == ranks[0].losses


# The same layout.


@pytest.mark.parametrize(
    ("family", "stage", "dtype", "clip"),
    [
        slow("mixtral", 0, "float32", 0.1),
        ("mixtral", 1, "bfloat16", 0.0),
        slow("gpt_moe", 2, "float32", 0.1),
        slow("mixtral", 0, "float32", 0.0),
        slow("mixtral", 1, "bfloat16", 0.1),
        slow("gpt_moe", 2, "float32", 0.0),
    ],
)
def test_fssdp_goes_on_to_the_last_bit(family: str, stage: int, dtype: str, clip: float) -> None:
    """Homes, slots and what was remembered come back, into an engine that has moved its own."""
    job = replace(MOVING, family=family, stage=stage, dtype=dtype, clip=clip)
    checkpoint = saved(2, job, steps=3)
    for before in (0, 1):
        ranks = loaded(2, job, checkpoint, Call(before=before, after=2))
        assert ranks[0].homes == checkpoint.ranks[0].homes
        assert [held.slots for held in ranks] == [held.slots for held in checkpoint.ranks]
        assert ranks[0].remembered == checkpoint.ranks[0].remembered == 3
        assert ranks[0].losses == checkpoint.ranks[0].losses
        assert_equal(joined(ranks), joined(checkpoint.ranks))


PRICED = replace(MOVING, stage=1, keys=(*MOVING.keys, ("share", "priced")))
PARTS = replace(MOVING, stage=1, keys=(*MOVING.keys, ("share", "planned")))


@pytest.mark.parametrize("job", [PRICED, slow(PARTS), slow(replace(PRICED, dtype="bfloat16"))])
def test_shares_by_time_go_on_to_the_last_bit(job: Job) -> None:
    """Rows are divided by what is remembered, which comes back."""
    checkpoint = saved(2, job, steps=3)
    ranks = loaded(2, job, checkpoint, Call(before=1, after=2))
    assert ranks[0].homes == checkpoint.ranks[0].homes
    assert ranks[0].losses == checkpoint.ranks[0].losses
    assert_equal(joined(ranks), joined(checkpoint.ranks))


@pytest.mark.slow
@pytest.mark.parametrize("after", [replace(MOVING, stage=1), PARTS])
def test_another_share_goes_on(after: Job) -> None:
    """And back: what is saved says nothing of how rows were divided."""
    for source, goal in ((PRICED, after), (after, PRICED)):
        checkpoint = saved(2, source, steps=3)
        ranks = loaded(2, goal, checkpoint, Call(before=1, after=2))
        assert ranks[0].homes == checkpoint.ranks[0].homes
        assert ranks[0].losses == pytest.approx(checkpoint.ranks[0].losses, rel=1e-5)
        assert_equal(joined(ranks), joined(checkpoint.ranks))


def test_other_cells_keep_their_homes_and_remember_nothing() -> None:
    checkpoint = saved(2, replace(MOVING, stage=1))
    ranks = loaded(4, replace(MOVING, stage=1), checkpoint)
    assert ranks[0].homes == [[0, 1, 2, 3]] * 2
    assert ranks[0].remembered == 0


@pytest.mark.parametrize(
    ("dtype", "stage"),
    [("float32", 1), ("bfloat16", 0), slow("float32", 0), slow("bfloat16", 1)],
)
def test_before_the_first_step(dtype: str, stage: int) -> None:
    checkpoint = saved(2, Job("mixtral", stage, dtype=dtype), steps=0)
    ranks = loaded(2, Job("mixtral", stage, dtype=dtype), checkpoint, Call(before=1, after=2))
    assert_equal(joined(ranks), joined(checkpoint.ranks))
    assert ranks[0].losses == checkpoint.ranks[0].losses


# What is asked for.


@pytest.mark.parametrize("argument", ["load_module_only", "load_optimizer_states"])
@pytest.mark.parametrize(
    "job", [slow(Job("mixtral", 0, dtype="bfloat16")), replace(MOVING, family="gpt_moe", stage=1)]
)
def test_weights_without_states(job: Job, argument: str) -> None:
    """The optimizer goes on from the weights, with the states it had; copies are made anew."""
    checkpoint = saved(2, job)
    only = argument == "load_module_only"
    ranks = loaded(2, job, checkpoint, Call(before=1, arguments=((argument, only),)))
    expected, got = joined(checkpoint.ranks), joined(ranks)
    assert ranks[0].steps == (1 if only else 2)
    for key in got:
        if key[1] == WEIGHT:
            assert torch.equal(got[key], expected[key])
            assert torch.equal(got[key], joined_master(got, key))
        if key[1] == "exp_avg":
            assert not torch.equal(got[key], expected[key])
    rel = 1e-3 if job.dtype == "bfloat16" else 1e-6
    assert ranks[0].loss == pytest.approx(checkpoint.ranks[0].loss, rel=rel)


def schedule_and_groups(rank: int, world_size: int, folder: str) -> list[Any]:
    """Rates of the parameter groups: of a run, of one that goes on from it, and of that one before;
    with the steps that a second tag was saved at."""
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 0.1}}
    job = Job("mixtral", 1, extra=(("scheduler", schedule),))

    def seen(engine: Any) -> list[Any]:
        states = OptimizerStates(engine)
        options = {name: states.options(p) for p, name in names_of(engine).items()}
        rates = sorted({float(each["lr"]) for each in options.values()})
        return [rates, engine.lr_scheduler.last_batch_iteration, engine.global_steps]

    engine = jobs.engine_of(job, world_size)
    run_steps(rank, world_size, engine, range(2))
    engine.save_checkpoint(folder, tag="two")
    expected = seen(engine)
    run_steps(rank, world_size, engine, range(2, 3))
    engine.save_checkpoint(folder, tag="three")
    other = jobs.engine_of(replace(job, learning_rate=0.5), world_size)
    fresh = seen(other)
    other.load_checkpoint(folder, tag="two")
    again = seen(other)
    other.load_checkpoint(folder)  # the latest
    return [expected, again, fresh, other.global_steps]


def test_rates_counters_and_tags(tmp_path: Path) -> None:
    for expected, again, fresh, latest in pool_of(2).run(schedule_and_groups, str(tmp_path)):
        assert again == expected != fresh
        assert latest == 3


@pytest.mark.slow  # test_frozen.py has it at another stage
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_weights_come_back(stage: int, tmp_path: Path) -> None:
    """DeepSpeed gives every rank those of rank 0's slots, at ZeRO 2."""
    job = Job("mixtral", stage)
    expected = pool_of(2).run(with_frozen, job, str(tmp_path), True)
    for world_size in (2, 1):
        got = pool_of(world_size).run(with_frozen, job, str(tmp_path), False)
        assert_equal(joined(got), joined(expected))


def test_files_of_a_checkpoint() -> None:
    checkpoint = saved(2, replace(MOVING, stage=1, family="gpt_moe"))
    names = sorted(path.name for path in checkpoint.tag.iterdir())
    assert names == ["ds_moe_ext", "ds_moe_ext.json", "mp_rank_00_model_states.pt"]
    layout = json.loads((checkpoint.tag / "ds_moe_ext.json").read_text())
    assert layout["strategy"] == "fssdp" and layout["step"] == 2 and layout["optimizer"] == "AdamW"
    assert list(layout["homes"].values()) == checkpoint.ranks[0].homes
    shapes = dcp_folder.contents(checkpoint.tag / "ds_moe_ext").shapes
    contents = joined(checkpoint.ranks)
    assert {name: math.prod(shape) for name, shape in shapes.items()} == {
        "/".join(key): tensor.numel()
        for key, tensor in contents.items()
        if key[1] != WEIGHT and tensor.dim()
    }
    assert shapes["blocks.0.ffn.2.weight.3/exp_avg"] == (32, 48)
    module = torch.load(checkpoint.tag / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    assert not [name for name in module if "deepspeed_experts" in name]


# Refusals.


def tried_without_us(rank: int, world_size: int, job: Job, folder: str) -> dict[str, str]:
    """What becomes of loading it by an engine whose block is off, asked for in several ways."""
    engine = jobs.engine_of(replace(job, block=False), world_size)
    before = {name: weight.clone() for name, weight in engine.module.state_dict().items()}
    told = {}
    for name, arguments in {
        "strict": {},
        "not strict": {"load_module_strict": False},
        "no states": {"load_module_strict": False, "load_optimizer_states": False},
    }.items():
        with pytest.raises(ValueError) as caught:
            engine.load_checkpoint(folder, **arguments)
        told[name] = str(caught.value)
    for name, weight in engine.module.state_dict().items():
        assert torch.equal(weight, before[name])
    if (job.family, job.stage) == ("mixtral", 1):  # one's own function sees what is there
        seen = mock.Mock()
        engine.load_checkpoint(folder, load_module_only=True, custom_load_fn=seen)
        assert not [name for name in seen.call_args.kwargs["src"] if ".experts." in name]
    # DeepSpeed's own save over it leaves our file there, and is no checkpoint of ours.
    engine.save_checkpoint(folder, tag=next(Path(folder).glob("global_step*")).name)
    assert engine.load_checkpoint(folder)[0] is not None
    return told


@pytest.mark.parametrize("job", [Job("mixtral", 1), Job("gpt_moe", 0), Job("mixtral", 3)])
def test_without_us_it_is_refused_by_name(job: Job, tmp_path: Path) -> None:
    """DeepSpeed alone would leave the experts as they were drawn."""
    shutil.copytree(saved(1, job).folder, tmp_path / "ours")
    (told,) = pool_of(1).run(tried_without_us, job, str(tmp_path / "ours"))
    assert_all_say(told.values(), "written with ds_moe_ext .*enabled to true, or .*ds-moe-ext conv")


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "without us": (lambda tag: (tag / "ds_moe_ext.json").unlink(), r"has no ds_moe_ext\.json"),
    "an earlier format": (edit_layout(format=1), "another version of ds_moe_ext"),
    "another number of experts": (
        edit_layout(num_experts={"model.layers.0.mlp.experts": 8}),
        r"layers\.0\.mlp\.experts has 8 there and 4 here; "
        r"model\.layers\.1\.mlp\.experts has none there and 4 here",
    ),
    "another optimizer": (edit_layout(optimizer="SGD"), "states of SGD, but this run .* AdamW"),
    "no weights of DeepSpeed's": (
        lambda tag: (tag / "mp_rank_00_model_states.pt").unlink(),
        r"has no mp_rank_00_model_states\.pt",
    ),
    "no index": (lambda tag: (tag / "ds_moe_ext/.metadata").unlink(), r"\.metadata.*missing"),
    "a file is missing": (
        lambda tag: (tag / "ds_moe_ext/__1_0.distcp").unlink(),
        r"__1_0\.distcp.*missing or damaged",
    ),
    "a dense weight is missing": (
        edit_module(lambda state: state["module"].pop("lm_head.weight")),
        r"has no \['lm_head\.weight'\]",
    ),
    "a dense weight of another shape": (
        edit_module(lambda state: state["module"].update({"lm_head.weight": torch.zeros(3)})),
        r"lm_head\.weight of shape \(3,\), but this model of shape \(64, 32\)",
    ),
}


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    job = replace(MOVING, stage=1)
    checkpoint = saved(2, job)
    folders = []
    for number, (damage, _) in enumerate(DAMAGES.values()):
        shutil.copytree(checkpoint.folder, tmp_path / str(number))
        damage(tmp_path / str(number) / checkpoint.tag.name)
        folders.append(str(tmp_path / str(number)))
    for (_, says), messages in zip(
        DAMAGES.values(), zip(*pool_of(2).run(refused, job, folders)), strict=True
    ):
        assert_all_say(messages, says)


@pytest.mark.parametrize(
    ("changes", "arguments", "says"),
    [
        ({"num_experts": 8}, {}, "has 4 there and 8 here; .*build the model with as many"),
        ({}, {"width": 40}, r"of shape \(96, 32\), but this run of shape \(80, 32\)"),
        ({"optimizer": "object", "sgd": True}, {}, "states of AdamW, but .* SGD, .*use AdamW"),
        ({}, {"fails": "a bad disk"}, r"cannot be read: OSError\('a bad disk'\)"),
        (
            {"extra": (("scheduler", {"type": "WarmupLR", "params": {}}),)},
            {},
            "without a schedule .* has a WarmupLR; load with load_lr_scheduler_states=False",
        ),
        ({"extra": (("checkpoint", {"load_universal": True}),)}, {}, "load_universal is true"),
    ],
    ids=["experts", "shape", "optimizer", "one rank", "schedule", "universal"],
)
def test_what_differs_is_named(
    changes: dict[str, Any], arguments: dict[str, Any], says: str
) -> None:
    job = Job("mixtral", 1)
    checkpoint = saved(2, job)
    folder = str(checkpoint.folder)
    if "universal" in says:
        (checkpoint.folder / "latest_universal").write_text(checkpoint.tag.name)
    messages = pool_of(2).run(refused, replace(job, **changes), [folder], **arguments)
    assert_all_say([message for each in messages for message in each], says)
