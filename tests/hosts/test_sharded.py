# SPDX-License-Identifier: Apache-2.0
"""ZeRO 3 with replaced experts: what a rank keeps, models built under ``zero.Init``, what a user
may do with weights that are in shards. ``test_configurations.py`` has that runs learn the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import ds_moe_ext
from tests.hosts import jobs
from tests.hosts.copied_runs import fssdp
from tests.hosts.jobs import Job, Result, engine_of, loss_of, micro_batch
from tests.marks import slow
from tests.ranks import pool_of, preload

preload("deepspeed", "transformers")

JOB = Job("mixtral", 3, clip=0.5, steps=4)
REPLICAS = fssdp(replace(JOB, num_experts=8), overlap_degree=2, replicas_per_rank=2)


def steps(engine: Any, rank: int, world_size: int, number: int) -> None:
    for step in range(number):
        for batch in range(rank, jobs.MICRO_BATCHES, world_size):
            engine.backward(loss_of(engine, micro_batch(step, batch)))
            engine.step()


# What a rank keeps.


def kept(rank: int, world_size: int, job: Job) -> tuple[set[float], set[float], bool]:
    """Shares of dense weights and of its experts, and whether experts are gathered by a copy."""
    from ds_moe_ext.hosts.deepspeed.zero_3 import whole
    from ds_moe_ext.hosts.steps.training_run import run_of

    engine = engine_of(job, world_size)
    steps(engine, rank, world_size, 1)
    experts = [p for layer in run_of(engine).layers for p in layer.parameters]
    dense = [p for p in engine.module.parameters() if all(p is not e for e in experts)]
    assert not any(p.numel() for p in engine.module.parameters())
    with whole(experts):
        is_copied = any(p.data_ptr() != p.ds_tensor.data_ptr() for p in experts)
    shares = ({p.partition_numel() / p.ds_numel for p in own} for own in (dense, experts))
    return (*shares, is_copied)


@pytest.mark.parametrize(
    ("ranks", "ep_ranks", "share", "is_copied"), [(2, None, 1.0, False), slow(4, 2, 0.5, True)]
)
def test_experts_are_sharded_over_those_that_have_them(
    ranks: int, ep_ranks: int | None, share: float, is_copied: bool
) -> None:
    for dense, experts, copied in pool_of(ranks).run(kept, replace(JOB, ep_ranks=ep_ranks)):
        assert dense == {1 / ranks}
        assert experts == {share}
        assert copied == is_copied


def held(rank: int, world_size: int, job: Job) -> tuple[list[bool], list[bool]]:
    """Which of the experts that forward gathered are in memory before backward, and after the
    step."""
    from ds_moe_ext.hosts.steps.training_run import run_of

    engine, gathered = engine_of(job, world_size), list[StorageWeakRef]()

    def see(module: nn.Module, _: Any) -> None:
        gathered.extend(StorageWeakRef(p.untyped_storage()) for p in module.parameters())

    hooks = [
        layer.hosted.register_forward_pre_hook(see)  # type: ignore[attr-defined]
        for layer in run_of(engine).layers
    ]
    loss = loss_of(engine, micro_batch(0, rank))
    before = [not each.expired() for each in gathered]
    for hook in hooks:
        hook.remove()
    engine.backward(loss)
    engine.step()
    return before, [not each.expired() for each in gathered]


@pytest.mark.parametrize("use_reentrant", [slow(None), slow(True), False])
def test_experts_of_several_ranks_are_let_go(use_reentrant: bool | None) -> None:
    """Before backward by who checkpoints activations; else the layer keeps them for backward."""
    job = replace(JOB, ep_ranks=2, micro_batches=4, use_reentrant=use_reentrant)
    for before, after in pool_of(4).run(held, job):
        assert len(before) == 4  # two weights of two layers
        assert all(before) if use_reentrant is None else not any(before)
        assert not any(after)


@pytest.mark.slow
def test_small_weights_may_stay_whole_between_passes() -> None:
    default = replace(JOB, extra=(("zero_optimization", {"stage": 3}),))
    expected, got = (pool_of(2).run(jobs.train, job)[0] for job in (JOB, default))
    assert got.losses == expected.losses
    assert all(torch.equal(got.state[name], weight) for name, weight in expected.state.items())


def gathered_behind(rank: int, world_size: int, job: Job, number: int) -> list[int]:
    """Steps, from 0, behind which experts are gathered."""
    from ds_moe_ext.hosts.deepspeed import zero_3

    engine, found = engine_of(job, world_size), []
    whole = zero_3.whole

    def watched(parameters: Any) -> Any:
        given = list(parameters)
        if given:
            found.append(engine.global_steps - 1)
        return whole(given)

    with mock.patch.object(zero_3, "whole", watched):
        steps(engine, rank, world_size, number)
    return found


@pytest.mark.slow  # a cost, no result
def test_what_measures_gathers_only_where_it_measures() -> None:
    keys = (("slice_gradients", False),)
    job = replace(JOB, strategy="esp", keys=keys, ep_ranks=2, etp_size=1)
    assert pool_of(4).run(gathered_behind, job, 7) == [[4]] * 4


def traced(rank: int, world_size: int, job: Job) -> bool:
    engine = engine_of(job, world_size)
    steps(engine, rank, world_size, 4)
    return bool(engine.optimizer.parameter_offload.get_param_coordinator().is_complete_trace())


@pytest.mark.slow  # a cost, no result
def test_other_plans_do_not_disturb_what_is_fetched_beforehand() -> None:
    """ZeRO looks ahead by the order of modules in the steps before."""
    assert all(pool_of(2).run(traced, REPLICAS))


# Models built under zero.Init.


def built_under_init(job: Job, world_size: int) -> nn.Module:
    import deepspeed

    from ds_moe_ext.hosts.deepspeed.zero_3 import take_shards

    document = jobs.document_of(replace(job, block=False), world_size)
    with deepspeed.zero.Init(config_dict_or_path=document):
        model = jobs.model_of(job)
    take_shards(model, jobs.model_of(job).state_dict())
    return model


def train_one_built_so(rank: int, world_size: int, job: Job) -> Result | None:
    model = built_under_init(job, world_size)
    with mock.patch.object(jobs, "model_of", lambda _: model):
        return jobs.train(rank, world_size, job)


@pytest.mark.parametrize(
    ("ranks", "job"),
    [
        (2, JOB),
        slow(4, replace(JOB, ep_ranks=2)),
        slow(2, REPLICAS),
        slow(2, replace(JOB, dtype="bfloat16")),
        slow(2, replace(JOB, optimizer="object", parameters="groups")),
        slow(4, replace(JOB, strategy="esp", etp_size=2, keys=(("slice_gradients", False),))),
    ],
    ids=str,
)
def test_models_built_under_init_learn_the_same(ranks: int, job: Job) -> None:
    expected = pool_of(ranks).run(jobs.train, job)[0]
    got = pool_of(ranks).run(train_one_built_so, job)[0]
    if job.dtype == "bfloat16":  # of which it makes buffers, too
        assert got.losses == pytest.approx(expected.losses, rel=1e-3)
        return
    assert got.losses == expected.losses and got.norms == expected.norms
    assert all(torch.equal(got.state[name], weight) for name, weight in expected.state.items())


# Weights in a user's hands.


def emptied(rank: int, world_size: int) -> dict[str, Tensor]:
    import deepspeed

    engine = engine_of(JOB, world_size)
    steps(engine, rank, world_size, 1)
    weights = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(weights, modifier_rank=0):
        for weight in weights:
            weight.data.zero_()
    return ds_moe_ext.full_state_dict(engine.module)


def test_a_user_may_gather_and_change_weights() -> None:
    for state in pool_of(2).run(emptied):
        assert not any(weight.any() for weight in state.values())


def exported(rank: int, world_size: int, folder: str, gathers: bool) -> tuple[bool, Any]:
    key = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": gathers}
    engine = engine_of(replace(JOB, extra=(("zero_optimization", key),)), world_size)
    steps(engine, rank, world_size, 1)
    is_saved = engine.save_16bit_model(folder)
    return is_saved, ds_moe_ext.full_state_dict(engine.module)


@pytest.mark.parametrize("gathers", [True, slow(False)])
def test_a_saved_model_is_whole_where_that_is_asked_for(gathers: bool, tmp_path: Path) -> None:
    (is_saved, state), _ = pool_of(2).run(exported, str(tmp_path), gathers)
    assert is_saved == gathers
    path = tmp_path / "pytorch_model.bin"
    assert path.exists() == gathers
    if gathers:
        saved = torch.load(path)
        assert saved.keys() == jobs.model_of(JOB).state_dict().keys()
        assert all(torch.equal(weight, state[name]) for name, weight in saved.items())


# Passes.


def evaluated(rank: int, world_size: int, job: Job) -> list[float]:
    """Losses of an engine without an optimizer, and of one with."""
    import deepspeed

    document = jobs.document_of(job, world_size)
    del document["optimizer"]
    bare, *_ = deepspeed.initialize(model=jobs.model_of(job), config=document)
    losses = []
    for engine in (bare, engine_of(job, world_size)):
        engine.eval()
        with torch.no_grad():
            losses.append(float(loss_of(engine, micro_batch(0, rank))))
    return losses


@pytest.mark.parametrize("job", [slow(JOB), REPLICAS], ids=["ep", "fssdp"])
def test_an_engine_without_an_optimizer_evaluates(job: Job) -> None:
    for bare, full in pool_of(2).run(evaluated, job):
        assert bare == full


def generated(rank: int, world_size: int) -> list[int]:
    """As many tokens as the rank's number says, and one."""
    engine = engine_of(JOB, world_size)
    engine.eval()
    tokens: Tensor = engine.module.generate(
        micro_batch(7, 0)[:1, :4],
        max_new_tokens=1 + rank,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return tokens[0].tolist()


def test_ranks_generate_at_other_lengths() -> None:
    short, long = pool_of(2).run(generated)
    assert len(short) == 5 and len(long) == 6 and short == long[:5]


def refused(rank: int, world_size: int) -> str:
    engine = engine_of(JOB, world_size)
    with pytest.raises(ValueError) as error, ds_moe_ext.joined(engine):
        pass
    return str(error.value)


def test_a_rank_cannot_call_the_model_alone() -> None:
    for message in pool_of(2).run(refused):
        assert "ds_moe_ext.joined" in message and "stage is 3" in message
        assert "use stage 0, 1 or 2" in message
