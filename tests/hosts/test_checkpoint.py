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
from deepspeed.moe.utils import is_moe_param
from torch import Tensor, nn

from ds_moe_ext.hosts.deepspeed import dcp_folder
from ds_moe_ext.hosts.deepspeed.parameter_groups import OptimizerStates
from tests.hosts import jobs
from tests.hosts.checkpoints import (
    LAST,
    MOVED,
    MOVING,
    WEIGHT,
    Call,
    Held,
    Layout,
    Saved,
    assert_all_raise,
    assert_equal,
    check_cross,
    edit_layout,
    edit_module,
    ep,
    esp,
    fssdp,
    held_by,
    joined,
    joined_master,
    loaded,
    moving,
    names_of,
    of,
    prophet,
    refused,
    run_steps,
    save,
    saved,
    striped,
    with_frozen,
)
from tests.hosts.jobs import Job
from tests.hosts.test_states import trust_in_float16
from tests.marks import slow
from tests.ranks import pool_of

pytestmark = pytest.mark.usefixtures("checkpoints_removed")


# Any layout to any other.


SPLIT, GROUPS = esp(2, 1, 1, 2), striped(4, 2, moved=[1, 0])
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
    # From split experts to whole ones, back, and split otherwise.
    ("mixtral", "float32", SPLIT, [ep(1, 2, 1), esp(4, 2, 2, 2), fssdp(2, 1)]),
    ("mixtral", "bfloat16", esp(4, 2, 1, 2), [esp(4, 1, 1, 4)]),
    ("mixtral", "float32", esp(4, 1, 2, 2), [esp(4, 2, 4, 1)]),
    ("mixtral", "float32", esp(4, 0, 1, 4), [esp(2, 2, 2, 1)]),
    ("mixtral", "bfloat16", ep(1, 0, 1), [esp(4, 2, 1, 4)]),
    ("gpt_moe", "bfloat16", ep(2, 2), [esp(4, 2, 1, 2)]),
    ("gpt_moe", "float32", fssdp(2, 1), [esp(2, 0, 1, 2)]),
    ("gpt_moe", "float32", moving(1), [fssdp(2, 2)]),
    ("gpt_moe", "bfloat16", moving(2), [ep(2, 1)]),
    ("gpt_moe", "float32", SPLIT, [moving(2)]),
    ("gpt_moe", "bfloat16", esp(4, 1, 1, 4), [ep(2, 1, 1)]),
    # Of two roles.
    ("mixtral", "float32", MOVED, [ep(4, 2, 2), striped(4, 0, 3, 1), fssdp(2, 2)]),
    ("mixtral", "float32", fssdp(2, 1), [striped(4, 2, 2, 2), striped(2, 0, moved=[2, 0])]),
    ("gpt_moe", "bfloat16", GROUPS, [striped(2, 1), ep(1, 1), prophet(4, 2), ep(2, 0)]),
    ("gpt_moe", "bfloat16", ep(2, 1), [striped(2, 2, **LAST), striped(4, 1, 2, 2, moved=[1, 0])]),
    ("gpt_moe", "float32", striped(2, 0, **LAST), [ep(2, 1), striped(2, 2), striped(4, 1)]),
    ("gpt_moe", "float32", MOVED, [esp(4, 1, 2, 2), esp(2, 2, 1, 2)]),
    ("mixtral", "float32", esp(2, 1, 1, 2), [striped(2, 1)]),
    ("mixtral", "float32", striped(4, 2, 3, 1), [striped(4, 2, 1, 1), ep(4, 0), prophet(2, 1)]),
]
QUICK = {(7, 1), (9, 0), (20, 2), (21, 0)}
EVERY = [
    *(
        ep(w, stage, ep_ranks)
        for w, ep_ranks in ((1, 1), (2, 2), (2, 1), (4, 2))
        for stage in range(4)
    ),
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


@pytest.mark.parametrize(
    "layout",
    [
        fssdp(2, 1),
        slow(of(moving(1), "gpt_moe", "float32")),
        slow(of(fssdp(4, 1), "gpt_moe", "float32")),
    ],
    ids=str,
)
def test_experts_had_moved(layout: Layout) -> None:
    """Or the crosses above would show less."""
    first = pool_of(layout.world_size).run(held_at_start, layout.job)
    assert saved(layout.world_size, layout.job).ranks[0].owners != first[0].owners


def held_at_start(rank: int, world_size: int, job: Job) -> Held:
    return held_by(jobs.engine_of(job, world_size))


@pytest.mark.parametrize(("here", "there"), [("float32", "bfloat16"), slow("bfloat16", "float32")])
def test_another_precision_keeps_masters_and_states(here: str, there: str) -> None:
    checkpoint = saved(2, Job("gpt_moe", 1, dtype=here))
    got = joined(loaded(4, Job("gpt_moe", 2, dtype=there, ep_ranks=2), checkpoint))
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
IN_FLOAT32 = (("data_types", {"grad_accum_dtype": "fp32"}),)
WRAPPED = replace(UNWRAPPED, extra=IN_FLOAT32)
WITH_ROLES = of(MOVED, "gpt_moe", "bfloat16", clip=0.5, extra=IN_FLOAT32).job


@pytest.mark.parametrize(
    ("source", "goals"),
    [
        (WRAPPED, (WRAPPED, UNWRAPPED)),
        slow(UNWRAPPED, (WRAPPED,)),
        slow(WITH_ROLES, (WITH_ROLES, WRAPPED)),
    ],
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


PRICED = replace(MOVING, stage=1, keys=(*MOVING.keys, ("share", "priced")))
PARTS = replace(MOVING, stage=1, keys=(*MOVING.keys, ("share", "planned")))


@pytest.mark.parametrize(
    "layout",
    [
        slow(of(fssdp(2, 1), "mixtral", "bfloat16")),
        *(slow(of(fssdp(2, 0), "mixtral", "float32", clip=clip)) for clip in (0.0, 0.1)),
        *(slow(of(fssdp(2, 2), "gpt_moe", "float32", clip=clip)) for clip in (0.0, 0.1)),
        slow(of(fssdp(2, 1), "mixtral", "bfloat16", clip=0.1)),
        Layout(2, PRICED),  # rows are divided by what is remembered
        slow(Layout(2, PARTS)),
        slow(of(Layout(2, PRICED), "mixtral", "bfloat16")),
        slow(of(moving(1), "gpt_moe", "float32")),
        *(slow(esp(4, stage, 1, 2)) for stage in (0, 1, 2)),
        slow(of(MOVED, "mixtral", "float32", clip=0.1)),
        slow(of(striped(4, 2, 2, 2, moved=[1, 0]), "gpt_moe", "bfloat16", clip=0.1)),
        slow(of(striped(2, 0, **LAST), "gpt_moe", "float32", clip=0.1)),
        slow(of(striped(4, 0), "mixtral", "bfloat16", clip=0.1)),
        slow(of(striped(4, 1, 3, 1), "gpt_moe", "bfloat16", clip=0.1)),
    ],
    ids=str,
)
def test_the_same_layout_goes_on_to_the_last_bit(layout: Layout) -> None:
    """Owners, slots and what was remembered come back, into an engine that has moved its own."""
    checkpoint = saved(layout.world_size, layout.job, steps=3)
    ranks = loaded(layout.world_size, layout.job, checkpoint, Call(before=1, after=2))
    for got, expected in zip(ranks, checkpoint.ranks):
        assert (got.owners, got.slots) == (expected.owners, expected.slots)
        assert got.losses == expected.losses
    if layout.job.strategy == "fssdp":
        assert ranks[0].remembered == checkpoint.ranks[0].remembered == 3
    assert_equal(joined(ranks), joined(checkpoint.ranks))


@pytest.mark.slow
@pytest.mark.parametrize("after", [replace(MOVING, stage=1), PARTS])
def test_another_share_goes_on(after: Job) -> None:
    """And back: what is saved says nothing of how rows were divided."""
    for source, goal in ((PRICED, after), (after, PRICED)):
        checkpoint = saved(2, source, steps=3)
        ranks = loaded(2, goal, checkpoint, Call(before=1, after=2))
        assert ranks[0].owners == checkpoint.ranks[0].owners
        assert ranks[0].losses == pytest.approx(checkpoint.ranks[0].losses, rel=1e-5)
        assert_equal(joined(ranks), joined(checkpoint.ranks))


def test_other_ep_ranks_keep_their_owners_and_remember_nothing() -> None:
    checkpoint = saved(2, replace(MOVING, stage=1))
    ranks = loaded(4, replace(MOVING, stage=1), checkpoint)
    assert ranks[0].owners == [[0, 1, 2, 3]] * 2
    assert ranks[0].remembered == 0


@pytest.mark.parametrize(
    ("dtype", "stage"),
    [("float32", 1), slow("bfloat16", 0), slow("float32", 0), slow("bfloat16", 1)],
)
def test_before_the_first_step(dtype: str, stage: int) -> None:
    checkpoint = saved(2, Job("mixtral", stage, dtype=dtype), steps=0)
    ranks = loaded(2, Job("mixtral", stage, dtype=dtype), checkpoint, Call(before=1, after=2))
    assert_equal(joined(ranks), joined(checkpoint.ranks))
    assert ranks[0].losses == checkpoint.ranks[0].losses


# What is asked for.


ALONE = of(fssdp(2, 1), "gpt_moe", "float32")
HALVES = of(ep(2, 1), "mixtral", "bfloat16")


@pytest.mark.parametrize("argument", ["load_module_only", "load_optimizer_states"])
@pytest.mark.parametrize(
    ("source", "goal"),
    [
        (ALONE, ALONE),
        slow(HALVES, of(MOVED, "mixtral", "bfloat16")),
        slow(of(ep(2, 0), "mixtral", "bfloat16"), of(ep(2, 0), "mixtral", "bfloat16")),
        slow(of(ep(2, 1), "gpt_moe", "float32"), of(striped(2, 0), "gpt_moe", "float32")),
        slow(of(ep(2, 1), "gpt_moe", "bfloat16"), of(striped(4, 2, 2, 2), "gpt_moe", "bfloat16")),
        slow(SPLIT, ep(2, 1)),
        slow(SPLIT, esp(4, 2, 2, 2)),
    ],
    ids=str,
)
def test_weights_without_states(source: Layout, goal: Layout, argument: str) -> None:
    """The optimizer goes on from the weights, with the states it had; replicas are made anew."""
    checkpoint = saved(source.world_size, source.job)
    only = argument == "load_module_only"
    call = Call(before=1, arguments=((argument, only),))
    ranks = loaded(goal.world_size, goal.job, checkpoint, call)
    expected, got = joined(checkpoint.ranks), joined(ranks)
    assert {held.steps for held in ranks} == {1 if only else 2}
    for key in got:
        if key[1] == WEIGHT:
            assert torch.equal(got[key], expected[key])
            assert torch.equal(got[key], joined_master(got, key))
        if key[1] == "exp_avg":
            assert not torch.equal(got[key], expected[key])
    rel = 2e-2 if goal.job.dtype == "bfloat16" else 1e-4
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


def there_and_back(*layouts: Layout) -> list[tuple[Layout, Layout]]:
    first, second = layouts
    return [(first, second), (second, first), (first, first)]


@pytest.mark.slow  # test_frozen.py has it at another stage
@pytest.mark.parametrize(
    ("source", "goal"),
    [
        *((ep(2, stage), ep(ranks, stage)) for stage in (0, 2, 3) for ranks in (2, 1)),
        *(pair for stage in (0, 2) for pair in there_and_back(esp(2, stage, 1, 2), ep(2, stage))),
        *(
            pair
            for stage in (0, 2)
            for pair in there_and_back(striped(2, stage, moved=[0, 1]), ep(2, stage))
        ),
    ],
    ids=str,
)
def test_frozen_weights_come_back(source: Layout, goal: Layout, tmp_path: Path) -> None:
    """DeepSpeed gives every rank those of rank 0's slots, at ZeRO 2; of an expert rank all weights
    may be."""
    expected = pool_of(source.world_size).run(with_frozen, source.job, str(tmp_path), True)
    got = pool_of(goal.world_size).run(with_frozen, goal.job, str(tmp_path), False)
    assert_equal(joined(got), joined(expected))


@pytest.mark.parametrize(
    "layout", [fssdp(2, 1), SPLIT, *map(slow, (MOVED, striped(2, 1, **LAST)))], ids=str
)
def test_files_of_a_checkpoint(layout: Layout) -> None:
    """Those of any run: dense weights once, experts whole by names that reports nothing of
    ranks."""
    checkpoint, other = (
        saved(2, of(each, "gpt_moe", "float32").job) for each in (layout, ep(2, 1))
    )
    names = sorted(path.name for path in checkpoint.tag.iterdir())
    assert names == ["ds_moe_ext", "ds_moe_ext.json", "mp_rank_00_model_states.pt"]
    document = json.loads((checkpoint.tag / "ds_moe_ext.json").read_text())
    assert document["strategy"] == layout.job.strategy
    assert document["step"] == 2 and document["optimizer"] == "AdamW"
    assert document["expert_sharding_size"] == (layout.job.etp_size or 1)
    assert list(document["homes"].values()) == checkpoint.ranks[0].owners
    shapes = dcp_folder.contents(checkpoint.tag / "ds_moe_ext").shapes
    assert {name: math.prod(shape) for name, shape in shapes.items()} == {
        "/".join(key): tensor.numel()
        for key, tensor in joined(checkpoint.ranks).items()
        if key[1] != WEIGHT and tensor.dim()
    }
    own, theirs = (
        torch.load(each.tag / "mp_rank_00_model_states.pt", weights_only=False)["module"].keys()
        for each in (checkpoint, other)
    )
    assert own == theirs and not [name for name in own if "deepspeed_experts" in name]


def exported(rank: int, world_size: int, job: Job, folder: str) -> dict[str, Tensor]:
    """The model's whole state, of one that was not trained but for a buffer."""
    from ds_moe_ext import full_state_dict

    def with_counter(job: Job) -> nn.Module:
        model = build(job)
        model.register_buffer("counter", torch.tensor([True]))
        return model

    build = jobs.model_of
    with mock.patch.object(jobs, "model_of", with_counter):
        engine = jobs.engine_of(job, world_size)
    if not all(map(is_moe_param, engine.module.parameters())):  # an attention rank
        engine.module.counter.fill_(False)
    engine.save_16bit_model(folder)
    return {k: v.detach().clone() for k, v in full_state_dict(engine.module).items()}


@pytest.mark.parametrize(
    "layout",
    [
        slow(esp(4, 1, 2, 2)),
        MOVED,
        of(striped(2, 0, **LAST), "gpt_moe", "float32"),
        SPLIT,
        slow(esp(4, 2, 1, 4)),
        slow(of(MOVED, "gpt_moe", "float32")),
        slow(striped(2, 0, **LAST)),
        slow(striped(4, 2, 2, 2)),
        slow(of(striped(4, 2, 2, 2), "gpt_moe", "float32")),
    ],
    ids=str,
)
def test_a_whole_state_is_gathered(layout: Layout, tmp_path: Path) -> None:
    """The stock model's own, on every rank; what attention ranks have in their buffers."""
    stock = jobs.model_of(layout.job).state_dict() | {"counter": torch.tensor([False])}
    states = pool_of(layout.world_size).run(exported, layout.job, str(tmp_path))
    for state in (*states, torch.load(tmp_path / "pytorch_model.bin")):
        assert state.keys() == stock.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in stock.items())


# Refusals.


def tried_without_us(rank: int, world_size: int, job: Job, folder: str) -> dict[str, str]:
    """What becomes of loading it by an engine whose block is off, asked for in several ways."""
    engine = jobs.engine_of(replace(job, block=False), world_size)
    before = {name: weight.clone() for name, weight in engine.module.state_dict().items()}
    reported = {}
    for name, arguments in {
        "strict": {},
        "not strict": {"load_module_strict": False},
        "no states": {"load_module_strict": False, "load_optimizer_states": False},
    }.items():
        with pytest.raises(ValueError) as caught:
            engine.load_checkpoint(folder, **arguments)
        reported[name] = str(caught.value)
    for name, weight in engine.module.state_dict().items():
        assert torch.equal(weight, before[name])
    if (job.family, job.stage) == ("mixtral", 1):  # one's own function sees what is there
        seen = mock.Mock()
        engine.load_checkpoint(folder, load_module_only=True, custom_load_fn=seen)
        assert not [name for name in seen.call_args.kwargs["src"] if ".experts." in name]
    # DeepSpeed's own save over it leaves our file there, and is no checkpoint of ours.
    engine.save_checkpoint(folder, tag=next(Path(folder).glob("global_step*")).name)
    assert engine.load_checkpoint(folder)[0] is not None
    return reported


@pytest.mark.parametrize("job", [Job("mixtral", 1), Job("gpt_moe", 0), Job("mixtral", 3)])
def test_without_us_it_is_refused_by_name(job: Job, tmp_path: Path) -> None:
    """DeepSpeed alone would leave the experts as they were drawn."""
    shutil.copytree(saved(1, job).folder, tmp_path / "ours")
    (results,) = pool_of(1).run(tried_without_us, job, str(tmp_path / "ours"))
    assert_all_raise(
        results.values(), "written with ds_moe_ext .*enabled to true, or .*ds-moe-ext conv"
    )


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
    for (_, expected), messages in zip(
        DAMAGES.values(), zip(*pool_of(2).run(refused, job, folders)), strict=True
    ):
        assert_all_raise(messages, expected)


NUMBER = ({"num_experts": 8}, {}, "has 4 there and 8 here; .*build the model with the same number")
SHAPE: Any = ({}, {"width": 40}, r"of shape \(96, 32\), but this run of shape \(80, 32\)")
FAILS: Any = ({}, {"fails": "a bad disk"}, r"cannot be read: OSError\('a bad disk'\)")


@pytest.mark.parametrize(
    ("layout", "changes", "arguments", "expected"),
    [
        (ep(2, 1), *NUMBER),
        (ep(2, 1), *SHAPE),
        (ep(2, 1), *FAILS),
        (
            ep(2, 1),
            {"optimizer": "object", "sgd": True},
            {},
            "states of AdamW, but .* SGD, .*use AdamW",
        ),
        (
            ep(2, 1),
            {"extra": (("scheduler", {"type": "WarmupLR", "params": {}}),)},
            {},
            "without a schedule .* has a WarmupLR; load with load_lr_scheduler_states=False",
        ),
        (
            ep(2, 1),
            {"extra": (("checkpoint", {"load_universal": True}),)},
            {},
            "load_universal is true",
        ),
        (SPLIT, *SHAPE),
        *(slow(MOVED, *each) for each in (NUMBER, SHAPE, FAILS)),
    ],
    ids=str,
)
def test_what_differs_is_named(
    layout: Layout, changes: dict[str, Any], arguments: dict[str, Any], expected: str
) -> None:
    checkpoint = saved(2, layout.job)
    folder = str(checkpoint.folder)
    if "universal" in expected:
        (checkpoint.folder / "latest_universal").write_text(checkpoint.tag.name)
    messages = pool_of(2).run(refused, replace(layout.job, **changes), [folder], **arguments)
    assert_all_raise([message for each in messages for message in each], expected)
