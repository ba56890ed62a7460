# SPDX-License-Identifier: Apache-2.0
"""Strategy zebra under DeepSpeed: a long run, and what it asks for before anything is built."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_moe_ext.core.layout import Roles
from ds_moe_ext.hosts.attachment.replacement import Blueprint
from ds_moe_ext.strategies.zebra import Zebra
from tests.hosts.copied_runs import Step, check_equal, num_copied, plain, train_watched
from tests.hosts.jobs import LENGTH, Job, Result, document_of, model_of, train
from tests.hosts.zebra_runs import by_device, zebra
from tests.marks import slow
from tests.ranks import pool_of

NUM_EXPERTS = {2: 4, 3: 6, 4: 4, 6: 12, 8: 8}
"""By ranks: a number that the ranks divide, and the expert ranks too."""
A40S_FIRST = ("NVIDIA A40", "NVIDIA A40", "Tesla V100", "Tesla V100")


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


def result_of(world_size: int, job: Job) -> Result:
    result: Result = pool_of(world_size).run(train, job)[0]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt_moe"])
def test_long_run(family: str) -> None:
    job = job_of(4, family, steps=30)
    ours = result_of(4, zebra(job, 2, 2, moved=[0, 1]))
    theirs = plain(4, job)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    assert ours.losses[-1] < ours.losses[0]


def run_by_device(job: Job, devices: tuple[str, ...]) -> tuple[Result, list[Step]]:
    """And the steps of rank 0."""
    result, steps = pool_of(len(devices)).run(by_device, devices, train_watched, job)[0]
    return result, steps


@pytest.mark.parametrize("devices", [A40S_FIRST, slow(A40S_FIRST[::-1])])
@pytest.mark.parametrize("stage", [0, slow(1), slow(2)])
def test_groups_of_ranks_that_are_no_neighbours(stage: int, devices: tuple[str, ...]) -> None:
    """All ranks of one kind come first, of which two groups take one each."""
    job = job_of(4, stage=stage, dtype="float32" if stage else "float64")
    ours, _ = run_by_device(zebra(job, 1, 1, attention_device="A40", moved=[0, 1]), devices)
    theirs = plain(4, job)
    assert ours.losses == pytest.approx(theirs.losses, rel=2e-5 if stage else 1e-11)
    assert ours.norms == pytest.approx(theirs.norms, rel=2e-4 if stage else 1e-9)
    if not stage:
        torch.testing.assert_close(ours.state, theirs.state, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("balance", "keys"),
    [
        (None, {"profile": {"sequence_length": LENGTH, "num_repeats": 2}}),
        ("ep", {"send_once": True}),
        ("ep", {"static_capacity": 14}),
        ("fssdp", {"overlap_degree": 2, "replicas_per_rank": 2}),
    ],
    ids=str,
)
def test_so_do_they_with_more(balance: str | None, keys: dict[str, Any]) -> None:
    """Of one attention and two expert ranks each."""
    devices = ("NVIDIA A40",) * 2 + ("Tesla V100",) * 4
    own, other = ({}, tuple(keys.items())) if balance else (keys, ())
    job = job_of(6, micro_batches=6, steps=9 if balance == "fssdp" else 3)
    ours = replace(zebra(job, 1, 2, attention_device="A40", **own), balance=balance)
    stock = replace(job, keys=other) if "static_capacity" in keys else job
    found, steps = run_by_device(replace(ours, balance_keys=other), devices)
    check_equal(found, result_of(6, stock), job)
    assert any(num_copied(steps)) == (balance == "fssdp")


@pytest.mark.slow  # test_striped.py has them without an engine
def test_rows_that_are_sent_once_equal_ep() -> None:
    """Where blocks are computed again, too."""
    job = job_of(4, micro_batches=4)
    ours = replace(zebra(job, 2, 2, moved=[0, 1]), use_reentrant=False, balance="ep")
    ours = result_of(4, replace(ours, balance_keys=(("send_once", True),)))
    check_equal(ours, plain(4, job), job)


@pytest.mark.slow  # likewise
def test_a_static_capacity_equals_ep_with_the_same() -> None:
    """Which drops as many of a batch, of which a stripe is one."""
    job = job_of(4, micro_batches=4)
    keys = (("static_capacity", 14),)
    theirs = result_of(4, replace(job, keys=keys))
    ours = replace(zebra(job, 2, 2, moved=[0, 1]), balance="ep", balance_keys=keys)
    check_equal(result_of(4, ours), theirs, job)
    assert theirs.losses != pytest.approx(plain(4, job).losses, rel=1e-6)


# Before anything is built.


def drawn(job: Job, monkeypatch: pytest.MonkeyPatch, world_size: int = 2) -> Blueprint | None:
    """What the job's document asks for of its model, on so many ranks."""
    from ds_moe_ext.hosts.deepspeed.startup import blueprint_of

    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    return blueprint_of(document_of(job, world_size), model_of(job), None)


def reported_devices(monkeypatch: pytest.MonkeyPatch, *devices: str) -> None:
    """As if the ranks had these."""
    from ds_moe_ext.hosts.deepspeed import startup

    monkeypatch.setattr(startup, "agree", lambda given: None)
    monkeypatch.setattr(startup, "device_names", lambda device: devices)


def test_experts_of_several_pools_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are by layer, though widths differ."""
    job = zebra(job_of(2, "toy, two pools"), 1, 1, moved=[0, 1, 3, 2])
    blueprint = drawn(job, monkeypatch)
    assert blueprint is not None
    held = [len(owner.experts_of(0)) for owner in blueprint.owners()]
    assert held == [0, 1, 3, 2]


def test_expert_ranks_that_give_up_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="moved"):
        drawn(zebra(job_of(2), 1, 1, moved=[4, 4]), monkeypatch)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"moved": [1]}, "moved has 1 numbers, but there are 2 MoE layers; give one a layer"),
        ({"moved": []}, "moved has 0 numbers, but there are 2 MoE layers; give one a layer"),
        ({"moved": [0, 5]}, "moved has 5, .* has 4 experts of a layer, .* choose fewer"),
        ({"moved": [0, -1]}, r"zebra\.moved is \[0, -1\], .* integers from 0; mend it"),
        ({"moved": [0, True]}, r"zebra\.moved\[1\] is True, but must be an integer"),
        ({"moved": ["1", 0]}, r"zebra\.moved\[0\] is '1', but must be an integer"),
        ({"moved": "all"}, "moved is 'all', but must be a list or null"),
        ({"moved": "auto"}, "moved is 'auto', .* write null"),
        ({"num_micro_batches": 0}, "num_micro_batches is 0; it must be at least 1"),
        ({"num_micro_batches": 2.0}, "num_micro_batches is 2.0, but must be an integer or null"),
        (
            {"num_micro_batches": 5},
            "num_micro_batches is 5, .* run 5 stripes, .* has 4 samples; set it to 4 or less",
        ),
        (
            {"attention_size": 2, "expert_size": 2},
            r"2 attention \+ 2 expert ranks, .* 2 ranks of the run; choose sizes",
        ),
        ({"attention_size": 0}, "attention_size is 0; it must be at least 1"),
        ({"attention_size": True}, "attention_size is True, but must be an integer or null"),
        ({"attention_size": None}, "attention_size is None and expert_size 1; set both"),
        (
            {"attention_ep_ranks": []},
            r"attention_ep_ranks is \[\], which are not 1 of the 2 places",
        ),
        ({"attention_ep_ranks": [2]}, "attention_ep_ranks is .2., .* 0 to 1; mend it"),
        (
            {"attention_ep_ranks": [False]},
            r"attention_ep_ranks\[0\] is False, but must be an integer",
        ),
        (
            {"attention_ep_ranks": [0], "expert_size": None},
            "attention_ep_ranks is .0., .* set both",
        ),
        (
            {"attention_ep_ranks": [0], "attention_device": "A40"},
            "attention_ep_ranks is .0., .* 'A40' sets the places too; set one of them to null",
        ),
        ({"attention_device": 40}, "attention_device is 40, but must be a string or null"),
        ({"recompute_experts": 1}, "recompute_experts is 1, but must be true or false"),
        ({"profile": {}}, "profile needs the key 'sequence_length' under DeepSpeed"),
        ({"profile": True}, "profile is True, but must be an object or null"),
        ({"profile": {"sequence_length": 0}}, "profile.sequence_length is 0; .* at least 1"),
        ({"profile": {"sequence_length": 8, "variant": "x"}}, "variant is 'x', but must be 'corr"),
        ({"profile": {"sequence_length": 8, "num_repeats": 0}}, "num_repeats is 0; .* at least 1"),
        ({"profile": {"sequence_length": 8}, "moved": [0, 1]}, "moved is .* set one of them"),
        ({"attention_sizes": 1}, "no key 'attention_sizes'; did you mean 'attention_size'"),
    ],
)
def test_keys_that_cannot_work(
    keys: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=expected) as caught:
        drawn(zebra(job_of(2), **keys), monkeypatch)
    assert str(caught.value).startswith("ds_moe_ext.zebra")


@pytest.mark.parametrize(
    ("attention", "experts", "num_stripes"), [(1, 1, 2), (1, 3, 4), (2, 1, 3), (3, 1, 2)]
)
def test_stripes_that_a_batch_has_samples_for(
    attention: int, experts: int, num_stripes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two samples a rank are too few for 3 x 4 stripes."""
    job = zebra(replace(job_of(2), num_experts=6), attention, experts)
    blueprint = drawn(job, monkeypatch, attention + experts)
    assert blueprint is not None and isinstance(blueprint.strategy, Zebra)
    assert blueprint.strategy.num_micro_batches == num_stripes


@pytest.mark.parametrize(
    ("device", "sizes", "roles"),
    [
        ("A40", (None, None), Roles((0, 1), (2, 3))),
        ("v100", (None, 2), Roles((2, 3), (0, 1))),
        ("A40", (2, 2), Roles((0, 1), (2, 3))),
        ("A40", (1, 1), Roles((0,), (1,), order=(0, 2, 1, 3))),
        ("V100", (1, 1), Roles((1,), (0,), order=(0, 2, 1, 3))),
    ],
)
def test_roles_by_device(
    device: str, sizes: tuple[Any, Any], roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported_devices(monkeypatch, *A40S_FIRST)
    blueprint = drawn(zebra(job_of(4), *sizes, attention_device=device), monkeypatch, 4)
    assert blueprint is not None
    assert blueprint.strategy.roles == roles


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("NVVV", "1 of the 4 ranks have, but 2 groups of 1 attention and 1 expert ranks need 2"),
        ("NVVN", "different places in the groups of 2 ranks: .*; order the hostfile so that"),
    ],
)
def test_devices_that_pair_no_ranks(
    devices: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported_devices(monkeypatch, *devices)
    with pytest.raises(ValueError, match=expected):
        drawn(zebra(job_of(4), 1, 1, attention_device="N"), monkeypatch, 4)


@pytest.mark.parametrize(
    ("device", "sizes", "expected"),
    [
        ("H100", (None, None), "'H100', which no ranks have: NVIDIA A40, Tesla V100; name one"),
        ("", (None, None), "'', which all ranks have: NVIDIA A40, Tesla V100; name one"),
        ("A40", (1, 3), "attention_size is 1, but 2 ranks of a group .* set it to null"),
        ("A40", (2, 1), "groups of 3 ranks, .* the 4 ranks of the run; choose .* divides 4"),
        ("A40", (1, 2), "groups of 3 ranks, .* the 4 ranks of the run; choose .* divides 4"),
        ("A40", (3, 1), "attention_size is 3, but 2 ranks of a group .* set it to null"),
    ],
)
def test_devices_that_cannot_work(
    device: str, sizes: tuple[Any, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported_devices(monkeypatch, *A40S_FIRST)
    with pytest.raises(ValueError, match=expected) as caught:
        drawn(zebra(job_of(4), *sizes, attention_device=device), monkeypatch, 4)
    assert str(caught.value).startswith("ds_moe_ext.zebra")


AT_1 = {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"zero_optimization": {"stage": 3}}, "stage is 3"),
        ({"zero_optimization": {"stage": 2, "contiguous_gradients": False}}, "contiguous_grad"),
        ({"zero_optimization": {"stage": 1, "reduce_scatter": False}}, "reduce_scatter is false"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, "optimizer.type"),
        ({"optimizer": {"type": "AdamW", "legacy_fusion": True}}, "legacy_fusion"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency"),
        ({"tensor_parallel": {"autotp_size": 2}}, r"among 2 neighbouring .* ranks \[0, 1\] have"),
    ],
)
def test_what_does_not_go_with_roles(
    document: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = zebra(job_of(2, extra=tuple(document.items()), optimizer="object"), 1, 1)
    with pytest.raises(ValueError, match=expected):
        drawn(job, monkeypatch)


BLOCKS: list[tuple[dict[str, Any], str]] = [
    ({"expert_parallel_size": 1}, "expert_parallel_size is 1, .* leave it out"),
    ({"expert_sharding_size": 2}, "expert_sharding_size is 2, .* leave it out"),
    ({"balance": "fssdp"}, "expert_size is 1, .* balance 'fssdp'; leave balance out"),
    ({"balance": "auto"}, "balance is 'auto', .* known: ep, fssdp, prophet$"),
    (
        {"balance": "tests.strategies_for_tests:Copied"},
        "balance is Copied, .* roles of its own and make it the strategy",
    ),
    (
        {"balance": "fssdp", "fssdp": {"reshard_interval": 9}},
        "fssdp.reshard_interval is 9, .* moved say where experts live; leave it out",
    ),
    ({"balance": "prophet", "prophet": {"share": "local"}}, 'prophet.share is .* set share to "pr'),
    ({"strategy": "esp", "balance": "zebra"}, "balance is 'zebra', .* known: ep, fssdp, prophet$"),
    ({"sequence_parallel": True}, "sequence_parallel is true, but no mpu .* leave"),
    ({"options": {"moved": None}}, "options has no effect .* go into the block ds_moe_ext.zebra"),
]


@pytest.mark.parametrize(("block", "expected"), BLOCKS)
def test_what_a_block_of_roles_cannot_have(
    block: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_moe_ext.hosts.deepspeed.startup import blueprint_of

    monkeypatch.setenv("WORLD_SIZE", "2")
    job = zebra(job_of(2))
    document = document_of(job, 2)
    document["ds_moe_ext"] |= block
    with pytest.raises(ValueError, match=expected):
        blueprint_of(document, model_of(job), None)


def test_no_mpu_of_ranks_of_both_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_moe_ext.hosts.deepspeed.startup import blueprint_of

    monkeypatch.setenv("WORLD_SIZE", "2")
    job = zebra(job_of(2))
    mpu = SimpleNamespace(
        get_model_parallel_world_size=lambda: 2,
        get_model_parallel_rank=lambda: 0,
        get_model_parallel_group=lambda: None,
    )
    with pytest.raises(ValueError, match=r"among 2 neighbouring ranks .* choose attention_size"):
        blueprint_of(document_of(job, 2), model_of(job), mpu)


@pytest.mark.parametrize("hooks", [[], ["bf16"]], ids=str)
def test_hooks_go_with_roles(hooks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_moe_ext.hosts.deepspeed.startup import blueprint_of

    monkeypatch.setenv("WORLD_SIZE", "2")
    job = zebra(job_of(2))
    document = document_of(job, 2)
    document["ds_moe_ext"]["hooks"] = hooks
    blueprint = blueprint_of(document, model_of(job), None)
    assert blueprint is not None
    assert len(blueprint.settings.hooks.codecs) == len(hooks)
