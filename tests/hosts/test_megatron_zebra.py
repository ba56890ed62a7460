# SPDX-License-Identifier: Apache-2.0
"""Zebra parallelism under Megatron-core, beside stock Megatron on the attention ranks alone."""

from __future__ import annotations

import json
import math
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.core.layout import Roles
from ds_moe_ext.hosts.megatron import active_settings
from ds_moe_ext.hosts.megatron.active_settings import part
from tests.hosts import megatron_jobs
from tests.hosts.copied_runs import num_copied
from tests.hosts.megatron_jobs import Trained, Training, _forward, megatron, merged, train
from tests.hosts.megatron_skewed import train_skewed
from tests.hosts.megatron_toy import VOCABULARY, MegatronRun
from tests.hosts.test_megatron_checkpoint import FULLY, load, save, steps
from tests.hosts.test_megatron_context import in_parts
from tests.marks import slow
from tests.ranks import pool_of, preload
from tests.trace_rules import assert_sound, of

preload("megatron.core.dist_checkpointing")

RUN = MegatronRun(dtype="float64", num_microbatches=2)
OVERLAP = replace(
    RUN,
    optimizer="distributed",
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    bucket_size=2000,
)


def block(attention: int, expert: int, **zebra: Any) -> dict[str, Any]:
    sizes = {"attention_size": attention, "expert_size": expert}
    return {
        "enabled": True,
        "strategy": "zebra",
        "zebra": {**sizes, **zebra},
        "report": {"enabled": False},
        "debug": True,
    }


def evaluated(training: Training) -> float:
    """The loss of a batch that is not trained on."""
    return training.evaluate(11)


def train_whole(
    rank: int, world_size: int, run: MegatronRun, settings: dict[str, Any] | None = None
) -> Trained:
    with in_parts() if run.cp > 1 else nullcontext():
        return train(rank, world_size, run, settings, keep=True, look=evaluated)


@cache
def stock(world_size: int, run: MegatronRun) -> list[Trained]:
    return pool_of(world_size).run(train_whole, run)


def assert_as_stock(
    attention: int, expert: int, run: MegatronRun, *, num_groups: int = 1, **zebra: Any
) -> None:
    """Losses and norms on every rank of both roles, gradients and weights of all pieces."""
    settings = block(attention, expert, **zebra)
    world_size, num_attention = num_groups * (attention + expert), num_groups * attention
    _assert_as_stock(world_size, num_attention, run, settings)


def _assert_as_stock(
    world_size: int, num_attention: int, run: MegatronRun, settings: dict[str, Any]
) -> None:
    assert_stock(pool_of(world_size).run(train_whole, run, settings), num_attention, run)


def assert_stock(found: list[Trained], num_attention: int, run: MegatronRun) -> None:
    # Up to version 0.18 whole experts of stock Megatron drift apart where it has EP 1 and TP.
    expected = stock(num_attention, replace(run, ep=run.tp))
    for rank in found:
        torch.testing.assert_close(rank.losses, expected[0].losses, rtol=1e-12, atol=0)
        torch.testing.assert_close(rank.norms, expected[0].norms, rtol=1e-12, atol=0)
        assert rank.seen == pytest.approx(expected[0].seen, rel=1e-9)
    for name in ("gradients", "weights"):
        *dense, own = by_role([vars(rank)[name] for rank in found])
        *its_dense, whole = by_role([vars(rank)[name] for rank in expected])
        for one, its in zip((*dense, own), (*its_dense, whole), strict=True):
            assert one.keys() == its.keys()
            for key, tensor in its.items():
                torch.testing.assert_close(one[key], tensor, rtol=1e-9, atol=1e-12, msg=key)


def by_role(shares: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """What each attention rank has of all but experts, shares under tensor parallelism; and last
    all experts, whole."""
    dense = [
        {name: tensor for name, tensor in share.items() if ".experts." not in name}
        for share in shares
    ]
    experts = [
        {name: tensor for name, tensor in share.items() if ".experts." in name} for share in shares
    ]
    return [*filter(None, dense), merged(experts)]


def test_both_roles_train_as_attention_ranks_alone_would() -> None:
    assert_as_stock(2, 1, RUN)


def freeze_experts(chunk: nn.Module) -> None:
    """Those of the first layer, before the model is wrapped: expert ranks alone have them then."""
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_("layers.0.mlp.experts" not in name)


def freeze_all_experts(chunk: nn.Module) -> None:
    """An expert rank has nothing to train."""
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_("mlp.experts" not in name)


@pytest.mark.parametrize(
    ("freeze", "run"),
    [
        slow(freeze_experts, RUN),
        slow(freeze_all_experts, RUN),
        slow(freeze_experts, OVERLAP),
        slow(freeze_all_experts, OVERLAP),
    ],
)
def test_experts_that_are_not_trained(
    freeze: Callable[[nn.Module], None], run: MegatronRun
) -> None:
    run = replace(run, steps=2)
    found = pool_of(3).run(train_skewed, run, block(2, 1), prepare=freeze)
    expected = pool_of(2).run(train_skewed, run, None, prepare=freeze)
    for rank in found:
        torch.testing.assert_close(
            rank.trained.losses, expected[0].trained.losses, rtol=1e-12, atol=0
        )
        torch.testing.assert_close(
            rank.trained.norms, expected[0].trained.norms, rtol=1e-12, atol=0
        )


def two_schedules(
    rank: int, world_size: int, settings: dict[str, Any] | None
) -> tuple[list[float], list[float | None]]:
    """Losses and norms of two steps whose gradients two schedules add up."""
    losses, norms = [], []
    with megatron(RUN, settings):
        training = Training(RUN)
        finalize = training.config.finalize_model_grads_func
        for step in range(2):
            training.config.finalize_model_grads_func = None
            losses.append(training.compute(step))
            training.config.finalize_model_grads_func = finalize
            losses.append(training._pass(step + 10, forward_only=False))  # nothing is made zero
            norms.append(training.update())
    return losses, norms


PIPELINE = replace(RUN, pp=2, num_layers=4, num_microbatches=4)


@pytest.mark.parametrize(
    ("attention", "expert", "num_groups", "run", "stripes"),
    [
        (1, 1, 2, PIPELINE, None),
        slow(1, 1, 2, PIPELINE, 1),
        slow(1, 1, 2, replace(PIPELINE, num_microbatches=1), None),
        slow(1, 1, 2, replace(PIPELINE, num_microbatches=3), 2),
        slow(2, 1, 2, replace(PIPELINE, optimizer="distributed"), None),
        slow(1, 2, 2, replace(OVERLAP, pp=2, num_layers=4, num_microbatches=4), None),
        slow(1, 1, 4, replace(PIPELINE, pp=4), 4),
        slow(1, 1, 4, PIPELINE, None),
    ],
)
def test_stages_of_a_pipeline_around_groups(
    attention: int, expert: int, num_groups: int, run: MegatronRun, stripes: int | None
) -> None:
    """Each stage has ZP groups of its own."""
    keys = {"num_micro_batches": stripes}
    assert_as_stock(attention, expert, run, num_groups=num_groups, **keys)


def by_device(
    rank: int, world_size: int, devices: list[str], work: Callable[..., Any], *given: Any
) -> Any:
    """The work where ranks have these."""
    with mock.patch.object(active_settings, "device_names", lambda _: devices):
        return work(rank, world_size, *given)


def by_a40(attention: int, expert: int, **zebra: Any) -> dict[str, Any]:
    return block(attention, expert, attention_device="A40", **zebra)


def ranks_with(num_attention: int, num_expert: int) -> list[str]:
    """Devices, where groups are of no neighbours: those for attention come last."""
    return ["T4"] * num_expert + ["A40"] * num_attention


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "expert", "run", "moved"),
    [
        (1, 1, RUN, [0, 1]),
        (1, 1, PIPELINE, [0, 1, 0, 1]),
        (1, 2, OVERLAP, None),
        (2, 2, replace(RUN, tp=2, etp=1, steps=2), None),
        (2, 2, replace(RUN, cp=2, steps=2, optimizer="distributed"), [1, 0]),
    ],
)
def test_groups_of_ranks_that_are_no_neighbours(
    attention: int, expert: int, run: MegatronRun, moved: list[int] | None
) -> None:
    devices, settings = (
        ranks_with(2 * attention, 2 * expert),
        by_a40(attention, expert, moved=moved),
    )
    found = pool_of(len(devices)).run(by_device, devices, train_whole, run, settings)
    assert_stock(found, 2 * attention, run)


@pytest.mark.parametrize(
    ("attention", "expert", "num_groups", "run", "moved"),
    [
        (2, 2, 1, RUN, [1, 0]),
        slow(2, 2, 1, RUN, [1, 2]),
        slow(1, 2, 1, replace(RUN, experts="te_grouped", swiglu=True), [1, 1]),
        slow(2, 1, 1, OVERLAP, [2, 2]),
        slow(1, 1, 2, replace(RUN, optimizer="distributed"), [3, 1]),
        slow(1, 1, 2, PIPELINE, [1, 0, 2, 3]),
    ],
)
def test_experts_on_attention_ranks(
    attention: int, expert: int, num_groups: int, run: MegatronRun, moved: list[int]
) -> None:
    assert_as_stock(attention, expert, run, num_groups=num_groups, moved=moved)


PREDICTING = replace(RUN, steps=2, config=(("mtp_num_layers", 2),))
PREDICTING_STAGES = replace(PREDICTING, pp=2, num_microbatches=4)


@pytest.mark.parametrize(
    ("attention", "expert", "num_groups", "run", "moved"),
    [
        (2, 2, 1, PREDICTING, [1, 0, 1, 2]),
        slow(1, 1, 2, PREDICTING_STAGES, [1, 0, 1, 2]),
        slow(2, 2, 1, replace(OVERLAP, config=PREDICTING.config), None),
        slow(2, 1, 1, replace(PREDICTING, tp=2, etp=1, recompute="full"), None),
        slow(2, 1, 1, replace(PREDICTING, recompute="moe"), None),
    ],
)
def test_layers_that_predict_more_tokens(
    attention: int, expert: int, num_groups: int, run: MegatronRun, moved: list[int] | None
) -> None:
    """They are in blocks of their own, and come last."""
    assert_as_stock(attention, expert, run, num_groups=num_groups, moved=moved)


SECONDS = {True: (8.0, 9.0, 2.0), False: (6.0,)}
"""As if measured on attention ranks, of blocks, the whole model and experts; on expert ranks."""


def train_profiled(
    rank: int, world_size: int, run: MegatronRun, settings: dict[str, Any], is_real: bool
) -> tuple[Trained, list[str]]:
    """And what it reports; times are measured, or ``SECONDS``."""
    from ds_moe_ext.hosts.zebra import profile
    from ds_moe_ext.hosts.zebra.rehearsal import Scene
    from ds_moe_ext.planning.zebra_planner import Timed

    lines: list[str] = []
    logger = mock.patch.object(profile, "line_logger", lambda settings, rank: lines.append)
    sizes = settings["zebra"]
    is_attention = rank % (sizes["attention_size"] + sizes["expert_size"]) < sizes["attention_size"]
    real = Scene.timed
    left = list(SECONDS[is_attention])

    def timed(scene: Scene, work: Callable[[], object], num_repeats: int) -> Timed:
        found = real(scene, work, num_repeats)
        return found if is_real else Timed(left.pop(0), 0.0)

    with logger, mock.patch.object(Scene, "timed", timed):
        return train_whole(rank, world_size, run, settings), lines


PROFILE = {"sequence_length": RUN.length, "samples": RUN.batch, "num_repeats": 2}


@pytest.mark.slow  # experts on attention ranks are above; measured, in test_zebra_profile.py
@pytest.mark.parametrize(
    ("num_groups", "run", "is_real", "gives"),
    [
        (1, RUN, False, [0, 1]),
        (1, RUN, True, None),
        (1, replace(RUN, tp=2, etp=1, swiglu=True, shared_ffn=32), False, [0, 1]),
        (1, replace(RUN, cp=2, optimizer="distributed"), False, [0, 1]),
        (2, PIPELINE, False, [0, 1]),
        (1, PREDICTING, True, None),
        (2, PREDICTING_STAGES, True, None),
    ],
)
def test_experts_that_move_by_what_is_measured(
    num_groups: int, run: MegatronRun, is_real: bool, gives: list[int] | None
) -> None:
    settings = block(2, 2, profile=PROFILE, num_micro_batches=2)
    found = pool_of(4 * num_groups).run(train_profiled, run, settings, is_real)
    assert_stock([trained for trained, _ in found], 2 * num_groups, run)
    for _, (seen, chosen) in found:
        assert f"zebra: {RUN.batch} x {RUN.length} tokens through one layer" in seen
        assert gives is None or f"each expert rank leaves {gives} of the 2 experts" in chosen


@pytest.mark.slow
@pytest.mark.parametrize(("size", "run"), [(1, RUN), (2, replace(RUN, tp=2, etp=1))])
def test_groups_of_ranks_that_are_no_neighbours_are_measured(size: int, run: MegatronRun) -> None:
    settings, devices = by_a40(size, size, profile=PROFILE), ranks_with(2 * size, 2 * size)
    found = pool_of(4 * size).run(by_device, devices, train_profiled, run, settings, True)
    assert_stock([trained for trained, _ in found], 2 * size, run)
    for _, (seen, _) in found:
        assert ("of 2 ranks together" in seen) == (size > 1)


DROPOUT = replace(
    RUN,
    aux_coefficient=0.0,
    config=(
        ("hidden_dropout", 0.2),
        ("attention_dropout", 0.2),
        ("moe_router_enable_expert_bias", True),
        ("moe_router_score_function", "sigmoid"),
    ),
)


@pytest.mark.slow
def test_measuring_leaves_no_trace() -> None:
    """Of random numbers, of what routers count and of gradients."""
    keys: dict[str, Any] = {"num_micro_batches": 2}
    measured = block(2, 2, profile=PROFILE, **keys)
    found = pool_of(4).run(train_profiled, DROPOUT, measured, False)
    expected = pool_of(4).run(train_whole, DROPOUT, block(2, 2, moved=[0, 1], **keys))
    for (one, _), other in zip(found, expected):
        assert (one.losses, one.norms) == (other.losses, other.norms)


def test_a_profile_without_a_length_is_refused() -> None:
    """No script of Megatron-LM says it."""
    for stated in pool_of(2).run(built, RUN, block(1, 1, profile={"samples": 1})):
        assert "zebra.profile.sequence_length is null" in stated and "set it" in stated


@pytest.mark.slow
def test_roles_by_device() -> None:
    """The last rank has the device for attention."""
    sizes = {"attention_size": None, "expert_size": None, "attention_device": "A40"}
    settings = block(1, 2) | {"zebra": sizes}
    for trained in pool_of(3).run(by_device, ranks_with(1, 2), train, RUN, settings):
        torch.testing.assert_close(trained.losses, stock(1, RUN)[0].losses, rtol=1e-12, atol=0)


@pytest.mark.slow  # micro-batches do in every other test
def test_gradients_of_two_schedules_add_up() -> None:
    found, expected = (
        pool_of(3).run(two_schedules, block(2, 1)),
        pool_of(2).run(two_schedules, None),
    )
    for rank in found:
        torch.testing.assert_close(rank, expected[0], rtol=1e-12, atol=0)


@pytest.mark.slow  # test_trace.py has all ranks in one, quickly
@pytest.mark.parametrize("first_step", [0, 1])
def test_both_roles_are_in_one_trace(first_step: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    asked = {"path": str(path), "first_step": first_step, "num_steps": 1}
    pool_of(3).run(train, RUN, {**block(2, 1), "trace": asked})
    events = json.loads(path.read_text())["traceEvents"]
    assert_sound(events)
    assert {event["pid"] for event in of(events, "X")} == {0, 1, 2}


@pytest.mark.slow  # on expert ranks, quickly, below
def test_replicas_on_either_role() -> None:
    options = {"attention_size": 1, "expert_size": 2, "on_attention": True, "revises": True}
    own = {"strategy": "tests.strategies_for_tests:TwoRoles", "options": options}
    settings = {**block(1, 2), **own}
    _assert_as_stock(3, 1, RUN, {key: settings[key] for key in settings if key != "zebra"})


@pytest.mark.parametrize(
    ("balance", "keys", "num_layers", "num_groups"),
    [
        ("fssdp", {"overlap_degree": 2, "replicas_per_rank": 2}, 2, 1),
        slow("fssdp", {"overlap_degree": 2, "replicas_per_rank": 2}, 2, 2),
        slow("prophet", {"planner": "shadow"}, 2, 1),
        slow("fssdp", {"overlap_degree": 2, "replicas_per_rank": 2, "rematerialize": True}, 4, 1),
        slow("prophet", {"planner": "shadow", "rematerialize": True}, 3, 1),
    ],
)
def test_replicas_of_busy_experts(
    balance: str, keys: dict[str, Any], num_layers: int, num_groups: int
) -> None:
    """Until costs have been measured, and some steps more. Two groups are of no neighbours."""
    run = replace(RUN, steps=8, num_layers=num_layers)
    skew = (3.0, 2.0, *[0.0] * (RUN.num_experts - 2))
    settings = {**(block if num_groups == 1 else by_a40)(1, 2), "balance": balance, balance: keys}
    devices = ranks_with(num_groups, 2 * num_groups)
    found = pool_of(len(devices)).run(by_device, devices, train_skewed, run, settings, skew)
    expected = pool_of(num_groups).run(train_skewed, run, None, skew)
    assert any(num_copied(found[0].steps))
    for rank in found:
        torch.testing.assert_close(
            rank.trained.losses, expected[0].trained.losses, rtol=1e-12, atol=0
        )
        torch.testing.assert_close(
            rank.trained.norms, expected[0].trained.norms, rtol=1e-12, atol=0
        )


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize(("attention", "expert"), [(1, 1), (1, 2), (2, 2)])
def test_with_other_ranks_and_micro_batches(attention: int, expert: int, num: int) -> None:
    assert_as_stock(attention, expert, replace(RUN, num_microbatches=num))


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        replace(RUN, steps=10),
        replace(RUN, optimizer="distributed"),
        replace(OVERLAP, optimizer="ddp", overlap_param_gather=False),
        replace(RUN, swiglu=True, shared_ffn=32, experts="te_grouped"),
        replace(RUN, capacity_factor=0.8, pad_to_capacity=True),
        replace(
            RUN,
            aux_coefficient=0.0,
            config=(
                ("moe_router_enable_expert_bias", True),
                ("moe_router_score_function", "sigmoid"),
            ),
        ),
    ],
    ids=["10 steps", "distributed", "overlap", "swiglu, shared, grouped", "capacity", "bias"],
)
def test_with_what_the_host_does(run: MegatronRun) -> None:
    assert_as_stock(2, 1, run)


def settled(
    rank: int, world_size: int, run: MegatronRun, settings: dict[str, Any]
) -> tuple[Trained, list[str]]:
    """And what was settled at start."""
    lines: list[str] = []

    def look(training: Training) -> float:
        asked = active_settings.chosen()
        assert asked is not None
        lines.extend(asked.start.settled)
        return evaluated(training)

    return train(rank, world_size, run, settings, keep=True, look=look), lines


def test_shared_experts_run_on_attention_ranks() -> None:
    """--moe-shared-expert-overlap is off by itself."""
    run = replace(RUN, shared_ffn=32)
    overlapping = replace(run, config=(("moe_shared_expert_overlap", True),))
    found = pool_of(3).run(settled, overlapping, block(2, 1))
    assert_stock([trained for trained, _ in found], 2, run)
    for _, (line,) in found:
        assert "--moe-shared-expert-overlap is off" in line


@pytest.mark.slow
def test_rows_that_are_sent_once() -> None:
    """In groups of no neighbours too."""
    once = {"ep": {"send_once": True}}
    _assert_as_stock(3, 2, RUN, {**block(2, 1), **once})
    work = partial(pool_of(6).run, by_device, ranks_with(2, 4))
    assert_stock(work(train_whole, RUN, {**by_a40(1, 2), **once}), 2, RUN)


@pytest.mark.slow
def test_a_static_capacity_as_megatron_pads() -> None:
    """Its router drops what is above it, so that nothing waits for counts and nothing more is
    dropped. In groups of no neighbours too."""
    run = replace(RUN, capacity_factor=0.8, pad_to_capacity=True)
    num_choices = run.length * run.batch * run.topk
    capacity = {"ep": {"static_capacity": math.ceil(0.8 * num_choices / run.num_experts)}}
    _assert_as_stock(3, 2, run, {**block(2, 1), **capacity})
    settings = {**by_a40(1, 2, moved=[1, 0]), **capacity}
    assert_stock(pool_of(6).run(by_device, ranks_with(2, 4), train_whole, run, settings), 2, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [{"num_micro_batches": 2}, {"attention_ep_ranks": [1, 2]}, {"recompute_experts": True}],
)
def test_with_keys_of_the_strategy(keys: dict[str, Any]) -> None:
    assert_as_stock(2, 1, replace(RUN, num_microbatches=5), **keys)


@pytest.mark.slow
@pytest.mark.parametrize("run", [OVERLAP, replace(OVERLAP, tp=2, etp=1)])
def test_parameters_that_are_gathered_beside_forward(run: MegatronRun) -> None:
    """The last step's weights have not been gathered when they are looked at."""
    found = pool_of(4).run(train, run, block(2, 2))
    expected = pool_of(2).run(train, replace(run, ep=run.tp))
    torch.testing.assert_close(found[0].losses, expected[0].losses, rtol=1e-12, atol=0)


# Tensor and context parallel attention ranks.

TP = replace(RUN, tp=2, etp=1, steps=2)
CP = replace(RUN, cp=2, steps=2)


@pytest.mark.parametrize(
    ("expert", "run"),
    [
        (1, TP),
        slow(2, TP),
        slow(1, replace(TP, optimizer="distributed")),
        slow(2, replace(TP, swiglu=True, shared_ffn=32, experts="te_grouped")),
        slow(1, CP),
        slow(2, CP),
        slow(1, replace(CP, optimizer="distributed")),
    ],
)
def test_attention_ranks_with_parts_of_a_sample(expert: int, run: MegatronRun) -> None:
    assert_as_stock(2, expert, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_groups", "run", "moved"),
    [
        (1, TP, [1, 2]),
        (1, replace(CP, optimizer="distributed"), [1, 0]),
        (2, replace(TP, pp=2, num_layers=4, num_microbatches=4), None),
        (2, replace(TP, pp=2, num_layers=4, num_microbatches=4), [1, 0, 2, 1]),
    ],
)
def test_parts_of_a_sample_with_moved_experts_and_stages(
    num_groups: int, run: MegatronRun, moved: list[int] | None
) -> None:
    assert_as_stock(2, 2, run, num_groups=num_groups, moved=moved)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "run"),
    [(2, TP), (2, replace(TP, optimizer="distributed")), (4, TP), (4, replace(TP, cp=2))],
)
def test_several_tensor_parallel_groups(attention: int, run: MegatronRun) -> None:
    """Of two ZP groups, or of one."""
    groups = 4 // attention
    _assert_as_stock(groups * (attention + 1), 4, run, block(attention, 1))


def losses_of_equal_batches(rank: int, world_size: int, run: MegatronRun) -> list[float]:
    """Of the micro-batches of a step."""
    from megatron.core.pipeline_parallel import schedules

    with megatron(run, block(2, 1)):
        training = Training(run)
        tokens = (torch.arange(run.length + 1) % VOCABULARY).expand(run.batch, -1)
        found = schedules.get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter([tokens] * run.num_microbatches),
            model=training.chunks[0],
            num_microbatches=run.num_microbatches,
            seq_length=run.length,
            micro_batch_size=run.batch,
        )
        return [float(each["loss"]) for each in found]


def test_micro_batches_draw_dropout_of_their_own() -> None:
    """Megatron forks its random numbers around all layers under sequence parallelism."""
    run = replace(TP, num_microbatches=3, config=(("hidden_dropout", 0.5),))
    for losses in pool_of(3).run(losses_of_equal_batches, run):
        assert len(set(losses)) == 3


@pytest.mark.slow  # under DeepSpeed a row of test_configurations.py is quick
def test_several_groups_are_data_parallel() -> None:
    """Two ZP groups of one attention and one expert rank each."""
    run = replace(RUN, num_microbatches=1)
    found = pool_of(4).run(train, run, block(1, 1))
    expected = stock(2, run)
    for rank in found:
        torch.testing.assert_close(rank.losses, expected[0].losses, rtol=1e-12, atol=0)
        torch.testing.assert_close(rank.norms, expected[0].norms, rtol=1e-12, atol=0)


PER_TOKEN = replace(RUN, config=(("calculate_per_token_loss", True),))


@pytest.mark.parametrize(
    ("attention", "expert", "run"),
    [(2, 1, PER_TOKEN), slow(1, 2, PER_TOKEN), slow(2, 2, replace(PER_TOKEN, num_microbatches=3))],
)
def test_losses_of_tokens(attention: int, expert: int, run: MegatronRun) -> None:
    """--calculate-per-token-loss: micro-batches have unequal numbers of tokens that count."""
    assert_as_stock(attention, expert, run)


# Megatron-LM's loop.


class SignalHandler:
    """As Megatron-LM's, by which the ranks of its world learn of a signal to one of them."""

    has_one = False

    def signals_received(self) -> list[bool]:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.has_one)
        return gathered


def ending(rank: int, world_size: int) -> tuple[list[tuple[bool, bool]], bytes]:
    """Of each step, whether the loop ends for a signal, and for the time: an expert rank has the
    signal in the second step, and an attention rank the hour in the third. Also the script's
    arguments, as a checkpoint has them."""
    handler, given = SignalHandler(), SimpleNamespace(exit_duration_in_mins=60)
    script = SimpleNamespace(_GLOBAL_ARGS=given, _GLOBAL_SIGNAL_HANDLER=handler)
    loaded = mock.patch.dict(sys.modules, {"megatron.training.global_vars": script})
    found = []
    with loaded, megatron(RUN, block(2, 1)):
        training = Training(RUN)
        for step in range(3):
            training.compute(step)
            training.update()
            handler.has_one = (rank, step) == (2, 1)
            minutes = 60.5 if (rank, step) == (0, 2) else 59.5
            ends = any(handler.signals_received())
            found.append((ends, minutes > given.exit_duration_in_mins))
    return found, pickle.dumps(given.exit_duration_in_mins)


def test_both_roles_end_together() -> None:
    for found, pickled in pool_of(3).run(ending):
        assert found == [(False, False), (True, False), (False, True)]
        assert pickle.loads(pickled) == 60.0


# float16.

HALF = replace(
    RUN,
    dtype="float16",
    stepping=(("initial_loss_scale", 2.0**20), ("hysteresis", 1), ("loss_scale_window", 3)),
)
SAVED_STEP, NUM_STEPS = 4, 8


class Scaled(NamedTuple):
    """A step."""

    is_taken: bool
    loss: float
    norm: float  # 0 where it was skipped
    scale: float  # of the loss in the next one


def scaled(
    rank: int,
    world_size: int,
    run: MegatronRun,
    settings: dict[str, Any] | None,
    *,
    folder: str | None = None,
    first: int = 0,
) -> list[Scaled]:
    """Steps from the first one, which is behind a checkpoint unless it is 0; a folder gets one."""
    found = []
    with megatron(run, settings):
        training = Training(run)
        if folder and first:
            load(training, folder, FULLY)
        for step in range(first, NUM_STEPS):
            loss = training.compute(step)
            is_taken, norm, _ = training.optimizer.step()
            scale = float(training.optimizer.get_loss_scale())
            found.append(Scaled(is_taken, loss, float(norm or 0), scale))
            if folder and step + 1 == SAVED_STEP:
                save(training, folder, FULLY)
                dist.barrier()
    return found


@pytest.mark.slow  # under DeepSpeed in test_zebra_checkpoint.py
@pytest.mark.parametrize("optimizer", ["ddp", "distributed"])
def test_float16_scales_losses_of_both_roles_alike(optimizer: Any, tmp_path: Path) -> None:
    """The first step overflows and is skipped; when the scale has grown again, others are."""
    run = replace(HALF, optimizer=optimizer)
    folder = str(tmp_path)
    ours = pool_of(3).run(scaled, run, block(2, 1), folder=folder)
    (stock_steps, _) = pool_of(2).run(scaled, run, None)
    for found in ours:
        for step, expected in zip(found, stock_steps, strict=True):
            assert step == pytest.approx(expected, rel=2e-3)
    taken = [step.is_taken for step in stock_steps]
    assert not taken[0] and set(taken[:SAVED_STEP]) == set(taken[SAVED_STEP:]) == {True, False}
    resumed = pool_of(3).run(scaled, run, block(2, 1), folder=folder, first=SAVED_STEP)
    assert resumed == [found[SAVED_STEP:] for found in ours]


# Activation recomputation.


LAYERS = {"moe_layer_freq": 2}  # the second of three is dense


def recomputing(granularity: str | None = None, **fields: Any) -> MegatronRun:
    fields = {f"recompute_{name}": value for name, value in fields.items()}
    config = {**LAYERS, "recompute_granularity": granularity, **fields}
    return replace(RUN, num_layers=3, config=tuple(config.items()))


UNIFORM = recomputing("full", method="uniform", num_layers=1)
BY_TWO = replace(recomputing("full", method="uniform", num_layers=2), num_layers=4)
BLOCK = recomputing("full", method="block", num_layers=2)
MODULES = recomputing("selective", modules=("core_attn", "mlp", "moe"))


def with_dropout(run: MegatronRun) -> MegatronRun:
    more = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    return replace(run, config=(*run.config, *more.items()))


@pytest.mark.slow  # that they are is below; test_configurations.py has stripes computed again
@pytest.mark.parametrize("run", [BLOCK, UNIFORM, BY_TWO, MODULES])
def test_recomputed_activations(run: MegatronRun) -> None:
    assert_as_stock(2, 1, run)


@pytest.mark.slow
@pytest.mark.parametrize("run", [UNIFORM, MODULES])
def test_recomputed_activations_draw_the_same_random_numbers(run: MegatronRun) -> None:
    found = pool_of(3).run(train, with_dropout(run), block(2, 1))
    expected = pool_of(3).run(train, with_dropout(recomputing()), block(2, 1))
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.losses, other.losses, rtol=1e-12, atol=0)
        torch.testing.assert_close(one.norms, other.norms, rtol=1e-12, atol=0)


def train_alone(rank: int, world_size: int, run: MegatronRun, settings: dict[str, Any]) -> Trained:
    """Megatron asks Transformer Engine about fp8 where it computes a module alone again."""
    from megatron.core.tensor_parallel import random

    engine = {
        "FP8GlobalStateManager": SimpleNamespace(is_fp8_enabled=lambda: False),
        "activation_recompute_forward": lambda **named: nullcontext(),
        "fp8_autocast": lambda **named: nullcontext(),
    }
    with mock.patch.multiple(random, create=True, **engine):
        return train_whole(rank, world_size, run, settings)


@pytest.mark.parametrize(
    ("fields", "moved"),
    [
        ({"shared_ffn": 32}, [2, 0]),
        slow({"tp": 2, "etp": 1, "optimizer": "distributed"}, None),
        slow({"config": (*LAYERS.items(), *PREDICTING.config), "num_layers": 3}, None),
    ],
)
def test_norms_that_are_computed_alone_again(
    fields: dict[str, Any], moved: list[int] | None
) -> None:
    """Each micro-batch its own, though the layer keeps one."""
    run = replace(RUN, num_microbatches=3, steps=2, **fields)
    alone = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    norms = replace(run, config=(*run.config, *alone.items()))
    assert_stock(pool_of(3).run(train_alone, norms, block(2, 1, moved=moved)), 2, run)


def kept(rank: int, world_size: int, run: MegatronRun) -> tuple[int, int]:
    """Bytes that autograd keeps of the model in a step of this rank, and how often its first
    attention runs."""
    sizes, calls = [], []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    forward = megatron_jobs._forward

    def watched(*args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return forward(*args)

    with megatron(run, block(1, 1)):
        training = Training(run)
        attention = training.chunks[0].module.decoder.layers[0].self_attention
        attention.register_forward_pre_hook(lambda *args: calls.append(args))
        with mock.patch.object(megatron_jobs, "_forward", watched):
            training.compute(0)
    return sum(sizes), len(calls)


def test_recomputed_activations_are_freed() -> None:
    """Those of blocks are not kept, and each block runs a second time."""
    (all_bytes, calls), _ = pool_of(2).run(kept, recomputing())
    (fewer_bytes, twice), _ = pool_of(2).run(kept, UNIFORM)
    assert fewer_bytes < all_bytes / 5
    assert (calls, twice) == (2, 4)


def counted(
    rank: int, world_size: int, run: MegatronRun, settings: dict[str, Any] | None
) -> tuple[list[float], list[Tensor]]:
    """Losses of two steps, and what routers know then: their biases, and losses to be shown."""
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    with megatron(run, settings):
        training, losses = Training(run), []
        for step in range(2):
            losses.append(training.compute(step))
            training.update()
        shown = [each["values"].clone() for each in get_moe_layer_wise_logging_tracker().values()]
        named = training.chunks[0].named_buffers()
        return losses, [*shown, *(tensor for name, tensor in named if ".router." in name)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"moe_router_load_balancing_type": "global_aux_loss"},
        {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    ],
)
def test_routers_count_recomputed_tokens_once(config: dict[str, Any]) -> None:
    run = replace(UNIFORM, config=(*UNIFORM.config, *config.items()))
    found = pool_of(3).run(counted, run, block(2, 1))[0]
    torch.testing.assert_close(found, pool_of(2).run(counted, run, None)[0], rtol=1e-9, atol=0)


# Checkpoints.


def saving(
    rank: int, world_size: int, run: MegatronRun, settings: dict[str, Any] | None, folder: str
) -> tuple[list[float], list[float]]:
    """Some steps, a checkpoint, and what the steps behind it found."""
    with megatron(run, settings):
        training = Training(run)
        steps(training, 0, 3)
        save(training, folder, FULLY)
        dist.barrier()
        return steps(training, 3, 5)


def resuming(
    rank: int, world_size: int, run: MegatronRun, settings: dict[str, Any] | None, folder: str
) -> tuple[list[float], list[float]]:
    """The same steps, from a checkpoint."""
    with megatron(run, settings):
        training = Training(run)
        load(training, folder, FULLY)
        return steps(training, 3, 5)


def assert_goes_on(found: list[Any], saved: list[Any]) -> None:
    for rank in found:
        torch.testing.assert_close(rank, saved[0], rtol=1e-9, atol=0)


def goes_to_stock(folder: Path, run: MegatronRun) -> None:
    """Two and two ranks; stock Megatron shares the experts among two, and so keeps an optimizer of
    their own for them, as expert ranks do."""
    saved = pool_of(4).run(saving, run, block(2, 2), str(folder))
    assert_goes_on(pool_of(2).run(resuming, replace(run, ep=2), None, str(folder)), saved)


def goes_on_here(folder: Path, run: MegatronRun) -> None:
    """Saved by two and two ranks."""
    saved = pool_of(4).run(saving, run, block(2, 2), str(folder))
    assert_goes_on(pool_of(4).run(resuming, run, block(2, 2), str(folder)), saved)


def comes_from_stock(folder: Path, run: MegatronRun) -> None:
    saved = pool_of(2).run(saving, replace(run, ep=2), None, str(folder))
    assert_goes_on(pool_of(4).run(resuming, run, block(2, 2), str(folder)), saved)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["ddp", "distributed"])
@pytest.mark.parametrize("goes", [True, False])
def test_checkpoints_with_experts_on_attention_ranks(
    goes: bool, optimizer: Any, tmp_path: Path
) -> None:
    run = replace(RUN, optimizer=optimizer, swiglu=goes)
    there, here = (2, replace(run, ep=2), None), (4, run, block(2, 2, moved=[1, 2]))
    (saves, *first), (goes_on, *then) = (here, there) if goes else (there, here)
    saved = pool_of(saves).run(saving, *first, str(tmp_path))
    assert_goes_on(pool_of(goes_on).run(resuming, *then, str(tmp_path)), saved)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["ddp", "distributed"])
@pytest.mark.parametrize("goes", ["here", "to neighbours", "to stock"])
def test_checkpoints_of_groups_of_ranks_that_are_no_neighbours(
    goes: str, optimizer: Any, tmp_path: Path
) -> None:
    """There and back."""
    run = replace(RUN, optimizer=optimizer)
    here = (4, run, by_a40(1, 1, moved=[0, 1]))
    others = {"to neighbours": (4, run, block(1, 1)), "to stock": (2, replace(run, ep=2), None)}
    there = others.get(goes, here)
    for number, ((saves, *first), (goes_on, *then)) in enumerate([(here, there), (there, here)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        devices = ranks_with(2, 2)
        saved = pool_of(saves).run(by_device, devices, saving, *first, str(folder))
        found = pool_of(goes_on).run(by_device, devices, resuming, *then, str(folder))
        assert_goes_on(found, saved)


@pytest.mark.slow
@pytest.mark.parametrize("run", [PIPELINE, PREDICTING_STAGES])
@pytest.mark.parametrize("optimizer", ["ddp", "distributed"])
@pytest.mark.parametrize("goes", [True, False])
def test_checkpoints_of_stages_are_those_of_whole_models(
    goes: bool, optimizer: Any, run: MegatronRun, tmp_path: Path
) -> None:
    """Of stages with roles, and of stock Megatron without stages, whose experts two ranks share."""
    run = replace(run, optimizer=optimizer)
    there = (2, replace(run, pp=1, ep=2, num_microbatches=2), None)
    here = (4, run, block(1, 1))
    (saves, *first), (goes_on, *then) = (here, there) if goes else (there, here)
    saved = pool_of(saves).run(saving, *first, str(tmp_path))
    assert_goes_on(pool_of(goes_on).run(resuming, *then, str(tmp_path)), saved)


@pytest.mark.parametrize(
    ("way", "optimizer", "tp"),
    [
        (goes_to_stock, "ddp", 1),
        *(
            slow(way, optimizer, tp)
            for way in (goes_to_stock, goes_on_here, comes_from_stock)
            for optimizer in ("ddp", "distributed")
            for tp in (1, 2)
            if (way, optimizer, tp) != (goes_to_stock, "ddp", 1)
        ),
    ],
)
def test_checkpoints_are_those_of_stock_megatron(
    way: Callable[[Path, MegatronRun], None], optimizer: Any, tp: int, tmp_path: Path
) -> None:
    way(tmp_path, replace(RUN, optimizer=optimizer, tp=tp, etp=1))


def saved_by_rank(rank: int, world_size: int) -> str:
    with megatron(RUN, block(1, 1)):
        try:
            save(Training(RUN), "", "torch")
        except ValueError as error:
            return str(error)
    return ""


# Refusals.


def built(
    rank: int, world_size: int, run: MegatronRun, settings: dict[str, Any] | None = None
) -> str:
    """What was stated as a model was built."""
    try:
        with megatron(run, settings or block(2, 1)):
            Training(run)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("run", "reported"),
    [
        (replace(RUN, ep=2), "--expert-model-parallel-size 2; attention ranks are tensor, context"),
        (replace(RUN, tp=2, cp=2, etp=1), r"\(2 x 2, of 2 attention ranks\): .*; choose sizes"),
        (replace(RUN, etp=2), r"\(2\): .*whole experts.* --expert-tensor-parallel-size 1"),
        (
            replace(RUN, tp=2, etp=1, config=(("use_te_rng_tracker", True),)),
            "use_te_rng_tracker with sequence_parallel of your own config.*leave it out",
        ),
    ],
)
def test_refused_by_the_flag(run: MegatronRun, reported: str) -> None:
    for stated in pool_of(3).run(built, run):
        with pytest.raises(ValueError, match=reported):
            raise ValueError(stated)


@pytest.mark.parametrize(
    ("attention", "expert", "moved", "reported"),
    [
        (2, 1, [2, 0], "2 attention ranks .* has 3; choose an attention_size .*, or leave moved"),
        (1, 2, None, "2 expert ranks .* has 3; choose an expert_size that divides 3"),
    ],
)
def test_experts_that_ranks_do_not_divide_are_refused(
    attention: int, expert: int, moved: list[int] | None, reported: str
) -> None:
    run = replace(RUN, num_experts=3)
    for stated in pool_of(3).run(built, run, block(attention, expert, moved=moved)):
        with pytest.raises(ValueError, match=reported):
            raise ValueError(stated)


@pytest.mark.slow  # no other layer is special
def test_attention_ranks_without_experts_need_not_divide_them() -> None:
    assert_as_stock(2, 1, replace(RUN, num_experts=3, steps=2), moved=[0, 0])


def test_a_file_a_rank_is_refused() -> None:
    assert all("use --ckpt-format torch_dist" in stated for stated in pool_of(2).run(saved_by_rank))


def test_arguments_of_the_script_are_refused() -> None:
    from ds_moe_ext.hosts.megatron import roles

    worlds: Any = SimpleNamespace(roles=Roles.first(1, 1), is_attention=True)
    given = SimpleNamespace(save="here", ckpt_format="torch")
    with pytest.raises(ValueError, match="use --ckpt-format torch_dist"):
        roles.settle_arguments(worlds, given)


@pytest.mark.parametrize("is_attention", [True, False])
def test_expert_ranks_of_a_script_are_undivided(
    is_attention: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_moe_ext.hosts.megatron import active_settings
    from ds_moe_ext.patches.megatron_training import _validate_args

    parted = SimpleNamespace(roles=Roles.first(4, 1), is_attention=is_attention)
    monkeypatch.setattr(active_settings, "worlds", lambda: parted)
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
    args = SimpleNamespace(**sizes, expert_tensor_parallel_size=1)
    validated = _validate_args(lambda args, defaults: args, args, {})
    size = 2 if is_attention else 1
    assert {vars(validated)[name] for name in sizes} == {size}
    args = SimpleNamespace(tensor_model_parallel_size=2, expert_tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"whole experts; .*--expert-tensor-parallel-size 1"):
        _validate_args(lambda args, defaults: args, args, {})


def test_defaults_of_a_script_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_moe_ext.hosts.megatron import roles

    said: list[str] = []
    asked = SimpleNamespace(start=SimpleNamespace(settled=said))
    monkeypatch.setattr(roles, "chosen", lambda: asked)
    worlds: Any = SimpleNamespace(roles=Roles.first(4, 1), is_attention=True)
    asks = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": None}
    args = SimpleNamespace(**asks, **dict.fromkeys(roles.SETTLED, True))
    roles.settle_arguments(worlds, args)
    assert args.expert_tensor_parallel_size == 1
    assert not any(vars(args)[name] for name in roles.SETTLED)
    whole, fusion, *others = said
    assert "--expert-tensor-parallel-size is 1" in whole and "fusion is off" in fusion
    for flag, line in zip(("--async-save", "--log-straggler", "--te-rng-tracker"), others):
        assert f"{flag} is off" in line


@pytest.mark.parametrize("size", [3, 4])
def test_groups_by_device_are_as_large_as_asked(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is known when the names of devices are."""
    sizes = {"attention_size": None, "expert_size": None, "attention_device": "A40"}
    document = {**block(1, 2), "zebra": sizes, "expert_parallel_size": size}
    asked = active_settings.read({"ds_moe_ext": document})
    assert asked is not None
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr(active_settings, "device_names", lambda _: ["T4", "T4", "A40"])
    monkeypatch.setattr(active_settings, "part", lambda roles, agree: roles)
    if size != 3:
        with pytest.raises(ValueError, match=r"expert_parallel_size is 4.* zebra's sizes say"):
            active_settings.with_roles(asked)
        return
    assert active_settings.with_roles(asked).worlds == Roles((2,), (0, 1))


def test_another_torch_is_refused_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(default_pg=None, group_count=0)  # groups' ranks are kept elsewhere
    monkeypatch.setattr("torch.distributed.distributed_c10d._world", world)
    with pytest.raises(ValueError, match=r"_world\.pg_group_ranks of .* was tested with torch 2\."):
        part(Roles.first(2, 2))


def test_ranks_must_be_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ValueError, match="groups of 4, which do not divide the 6 ranks"):
        part(Roles.first(2, 2))


@pytest.mark.parametrize(
    ("zebra", "reported"),
    [
        ({"attention_size": None}, "zebra.attention_size is None .* set both, or name"),
    ],
)
def test_keys_that_work_under_deepspeed_only_are_refused(
    zebra: dict[str, Any], reported: str
) -> None:
    from ds_moe_ext.hosts.megatron.active_settings import read

    with pytest.raises(ValueError, match=reported):
        read({"ds_moe_ext": block(1, 1) | {"zebra": block(1, 1)["zebra"] | zebra}})
