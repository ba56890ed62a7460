# SPDX-License-Identifier: Apache-2.0
"""Optimizers that look at more than single numbers: exact by expert, or refused by name."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ds_moe_ext.hosts.steps.optimizers import Stepping, check_kind
from tests.hosts import jobs, test_torch
from tests.hosts.jobs import Job, Result
from tests.marks import slow
from tests.ranks import pool_of, preload, refusal

preload("transformers", "deepspeed")

LAMB = Job(stage=0, dtype="float64", optimizer="callable", steps=4, learning_rate=0.02)
MOVING = (("replicas_per_rank", 2), ("reshard_interval", 2), ("resharding", "paper"))


class Lamb(torch.optim.Optimizer):
    """LAMB, as its paper has it: one trust ratio a weight."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros_like(weight)
                state["step"] += 1
                mean = state["exp_avg"].lerp_(weight.grad, 0.1)
                square = (
                    state["exp_avg_sq"].mul_(0.999).addcmul_(weight.grad, weight.grad, value=1e-3)
                )
                root = (square / (1 - 0.999 ** state["step"])).sqrt() + 1e-6
                update = mean / (1 - 0.9 ** state["step"]) / root + 0.01 * weight
                ratio = weight.norm() / update.norm()
                weight.sub_(update * ratio, alpha=group["lr"])


class FusedAdam(torch.optim.Optimizer):
    """As apex's: steps are counted in each group, and states have none; what it goes through, it
    pairs with lists that it made at first."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})
        groups = self.param_groups
        self.param_groups_master = [{"params": [None for _ in own["params"]]} for own in groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, masters in zip(self.param_groups, self.param_groups_master):
            if not group["params"]:
                continue
            count = group["step"] = group.get("step", 0) + 1
            for weight, _ in zip(group["params"], masters["params"]):
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros_like(weight)
                mean = state["exp_avg"].lerp_(weight.grad, 0.1)
                square = (
                    state["exp_avg_sq"].mul_(0.999).addcmul_(weight.grad, weight.grad, value=1e-3)
                )
                root = (square / (1 - 0.999**count)).sqrt() + group["eps"]
                weight.addcdiv_(mean, root, value=-group["lr"] / (1 - 0.9**count))


def learnt_by(rank: int, world_size: int, job: Job, kind: type[Any]) -> Result | None:
    """A job of DeepSpeed's, with an optimizer of a user's own."""
    with mock.patch.object(jobs, "_torch_optimizer", lambda job, ps: kind(ps, job.learning_rate)):
        return jobs.train(rank, world_size, job)


def in_a_loop(rank: int, world_size: int, loop: test_torch.Loop, kind: type[Any]) -> list[float]:
    """A loop of a user's own."""

    def made(model: nn.Module, moe: Any, *, fused: bool) -> Any:
        return kind(model.parameters(), LAMB.learning_rate)

    with mock.patch.object(test_torch, "_optimizer", made):
        return test_torch.train(rank, world_size, loop).losses


def reference(rank: int, world_size: int, kind: type[Any], apart: bool, clip: float) -> list[float]:
    """One rank without us or DeepSpeed; each expert's weights are weights of their own, or those
    of all experts one."""
    with jobs.float64_everywhere():
        model = jobs.model_of(LAMB).double()
        experts = [p for n, p in model.named_parameters() if ".experts." in n] if apart else []
        views = {p: [nn.Parameter(each) for each in p.data] for p in experts}
        own = [each for p in model.parameters() for each in views.get(p, [p])]
        optimizer, losses = kind(own, LAMB.learning_rate), []
        for step in range(LAMB.steps):
            total = torch.zeros((), dtype=torch.float64)
            for number in range(jobs.MICRO_BATCHES):
                ids = jobs.micro_batch(step, number)
                loss = model(input_ids=ids, labels=ids).loss / jobs.MICRO_BATCHES
                loss.backward()
                total += loss.detach()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            for stack, each in views.items():
                assert stack.grad is not None
                for view, gradient in zip(each, stack.grad):
                    view.grad = gradient
            optimizer.step()
            model.zero_grad()
            losses.append(float(total))
    return losses


@functools.cache
def wanted(kind: type[Any], apart: bool = True, clip: float = 0.0) -> list[float]:
    losses: list[float] = pool_of(1).run(reference, kind, apart, clip)[0]
    return losses


def adafactor(params: Any, lr: float) -> Any:
    return torch.optim.Adafactor(params, lr=lr)


def test_one_norm_of_a_stack_is_another_update() -> None:
    by_expert, by_stack = wanted(Lamb), wanted(Lamb, apart=False)
    assert abs(by_expert[-1] - by_stack[-1]) > 1e-6


@pytest.mark.parametrize(
    ("job", "world_size"),
    [
        (LAMB, 2),
        (replace(LAMB, strategy="fssdp", keys=MOVING), 2),
        slow(replace(LAMB, optimizer="object"), 2),
        slow(replace(LAMB, strategy="prophet"), 4),
        slow(replace(LAMB, ep_ranks=2), 4),
    ],
)
def test_lamb_is_exact_by_expert_under_deepspeed(job: Job, world_size: int) -> None:
    learnt: Result = pool_of(world_size).run(learnt_by, job, Lamb)[0]
    assert learnt.losses == pytest.approx(wanted(Lamb), rel=1e-12)


@pytest.mark.slow
def test_lamb_is_stock_where_experts_are_modules() -> None:
    job = Job("gpt_moe", stage=0, optimizer="callable", steps=4)
    stock: Result = pool_of(1).run(learnt_by, replace(job, block=False), Lamb)[0]
    learnt: Result = pool_of(2).run(learnt_by, job, Lamb)[0]
    assert learnt.losses == pytest.approx(stock.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        slow(Lamb, {"strategy": "fssdp", **test_torch.MOVING}),
        (adafactor, {"strategy": "ep"}),
    ],
)
def test_and_in_a_loop_of_a_users_own(kind: Any, block: dict[str, Any]) -> None:
    loop = test_torch.Loop("mixtral", "ddp", block=block, steps=LAMB.steps)
    for losses in pool_of(2).run(in_a_loop, loop, kind):
        assert losses == pytest.approx(wanted(kind, clip=0.5), rel=1e-12)


def test_apexs_adam_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """It is known by its name, and its count of steps is saved with its groups."""
    job = Job(optimizer="object", steps=4, save_at=2, folder=str(tmp_path))
    whole: Result = pool_of(2).run(learnt_by, job, FusedAdam)[0]
    stock: Result = pool_of(1).run(learnt_by, replace(job, block=False, save_at=None), FusedAdam)[0]
    assert whole.losses == pytest.approx(stock.losses, rel=1e-5)
    resumed: Result = pool_of(2).run(learnt_by, replace(job, save_at=None, resume=True), FusedAdam)[
        0
    ]
    assert resumed.losses == whole.losses[2:]


@pytest.mark.parametrize(
    "job",
    [
        Job(optimizer="object", stage=0, steps=3, strategy="fssdp", keys=MOVING),
        slow(Job(optimizer="callable", stage=0, steps=3, dtype="bfloat16")),
        slow(Job(optimizer="object", stage=0, steps=3, dtype="bfloat16")),
        slow(Job(optimizer="object", stage=1, steps=3)),
    ],
)
def test_apexs_adam_steps_all_weights(job: Job) -> None:
    """Before, weights that it had not seen when it was made stayed as they were: an expert's where
    there are more than there were, and all experts' in bfloat16."""
    ours: Result = pool_of(2).run(learnt_by, job, FusedAdam)[0]
    stock: Result = pool_of(1).run(learnt_by, replace(job, block=False), FusedAdam)[0]
    for name, start in jobs.model_of(job).state_dict().items():
        moved, expected = (found.state[name].float() - start for found in (ours, stock))
        assert moved.norm() == pytest.approx(float(expected.norm()), rel=0.1), name
        if job.dtype == "float32":
            assert (moved - expected).norm() < 1e-4 * expected.norm(), name


def muon(rank: int, world_size: int, job: Job) -> Result | None:
    """DeepSpeed's own, by the JSON; not compiled, which takes a minute."""

    def document_of(job: Job, world_size: int) -> dict[str, Any]:
        params = {"lr": 0.02, "momentum": 0.9, "torch_adam": True}
        return {**plain(job, world_size), "optimizer": {"type": "muon", "params": params}}

    plain = jobs.document_of
    with (
        mock.patch.object(jobs, "document_of", document_of),
        torch.compiler.set_stance("force_eager"),
    ):
        return jobs.train(rank, world_size, job)


WHOLE_GRADIENTS = (("zero_optimization", {**jobs.zero(3), "reduce_scatter": False}),)


@pytest.mark.parametrize(
    ("job", "world_size"),
    [
        slow(Job(stage=0, steps=3), 2),
        (Job(stage=1, steps=3), 2),
        slow(Job(stage=2, steps=3), 2),
        slow(Job(stage=2, steps=3, ep_ranks=2), 4),
        slow(Job(stage=3, steps=3, extra=WHOLE_GRADIENTS), 2),
    ],
)
def test_deepspeeds_muon_is_what_it_is_without_us(job: Job, world_size: int) -> None:
    """It orthogonalizes in bfloat16, and each expert of a stack by itself."""
    stock: Result = pool_of(1).run(muon, Job(block=False, stage=0, steps=3))[0]
    learnt: Result = pool_of(world_size).run(muon, job)[0]
    assert learnt.losses == pytest.approx(stock.losses, rel=2e-3)
    for name, weight in learnt.state.items():
        error = (weight - stock.state[name]).norm() / stock.state[name].norm()
        assert error < 0.02, name


def named(module: str, name: str, **options: Any) -> torch.optim.Optimizer:
    """A stand-in for a class that may not be installed."""
    kind = type(name, (torch.optim.SGD,), {"__module__": module})
    optimizer: torch.optim.Optimizer = kind([nn.Parameter(torch.zeros(2))], lr=0.1)
    optimizer.param_groups[0].update(options)
    return optimizer


ZERO_1 = {"sharding": "zero_optimization.stage is 1"}
SPLIT = {"splitting": "2 ranks split each expert (expert_sharding_size)"}
SAVED = {"by_elements": "checkpoints hold optimizer states per element"}
ZERO_3 = {"in_turns": "zero_optimization.stage is 3"}
MASTERS = {"has_masters": True}
APEXS_ADAM = "apex.optimizers.fused_adam", "FusedAdam"
DEEPSPEED = "deepspeed.runtime"


@pytest.mark.parametrize(
    ("optimizer", "how", "expected"),
    [
        (
            named(f"{DEEPSPEED}.fp16.onebit.adam", "OneBitAdam"),
            {},
            "OneBitAdam: it runs its own collectives",
        ),
        (
            named("torch.distributed.optim", "ZeroRedundancyOptimizer"),
            {},
            "it runs its own collectives",
        ),
        (
            named(f"{DEEPSPEED}.zero.muon.original_muon", "Muon"),
            {},
            "muon.Muon: it runs its own collectives",
        ),
        (named("muon", "MuonWithAuxAdam"), {}, "use another, as AdamW or torch.optim.Muon"),
        (named("prodigyopt", "Prodigy"), {}, "Prodigy: its step depends on all weights"),
        (named("apex.optimizers.fused_lamb", "FusedLAMB", max_grad_norm=1.0), {}, "is 1.0: it"),
        (named("apex.optimizers.fused_lamb", "FusedLAMB"), ZERO_1, "stage is 1: it takes norms"),
        (named("deepspeed.ops.lamb.fused_lamb", "FusedLamb"), SPLIT, "2 ranks split each expert"),
        (named("torch.optim", "Adafactor"), SAVED, "row and column states"),
        (named("torch.optim._muon", "Muon"), ZERO_1, "use ZeRO stage 0"),
        (named(f"{DEEPSPEED}.zero.muon.muon_optimizer", "MuonWithAuxAdam"), SPLIT, "2 ranks"),
        (named(*APEXS_ADAM), ZERO_3, "stage is 3: it counts steps per group"),
        (
            named(*APEXS_ADAM),
            SAVED | MASTERS,
            "it keeps master copies of its initial weights",
        ),
    ],
)
def test_what_would_do_another_thing_is_refused(optimizer: Any, how: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=r"ds_moe_ext is enabled, but .*; (use|give)") as error:
        check_kind(Stepping(optimizer, **how))
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("optimizer", "how"),
    [
        (named(*APEXS_ADAM), ZERO_1 | SPLIT | SAVED),
        (named("deepspeed.ops.adam.fused_adam", "FusedAdam"), ZERO_3),
        (named(*APEXS_ADAM), MASTERS),
        (named("apex.optimizers.fused_sgd", "FusedSGD"), ZERO_1 | SPLIT),
        (named("apex.optimizers.fused_lamb", "FusedLAMB", max_grad_norm=math.inf), SAVED),
        (named("timm.optim.lamb", "Lamb", max_grad_norm=None), SAVED),
        (named("torch.optim", "Adafactor"), {}),
        (named("torch.optim._muon", "Muon"), {}),
        (named(f"{DEEPSPEED}.zero.muon.muon_optimizer", "MuonWithAuxAdam"), ZERO_1 | SAVED),
        (named("users", "Own"), SAVED),
    ],
)
def test_what_is_exact_is_taken(optimizer: Any, how: Any, recwarn: pytest.WarningsRecorder) -> None:
    check_kind(Stepping(optimizer, **how))
    assert not recwarn.list


def test_one_that_nobody_knows_is_reported_where_weights_are_cut() -> None:
    with pytest.warns(
        UserWarning, match="does not know the optimizer users.Own: zero_optimization"
    ):
        check_kind(Stepping(named("users", "Own"), **ZERO_1))


def test_both_hosts_ask() -> None:
    """Of an optimizer that a user gives, before a step."""
    job = replace(LAMB, dtype="float32", stage=1)
    for stated in pool_of(2).run(refusal, learnt_by, job, Lamb):
        assert "Lamb, and zero_optimization.stage is 1" in stated
    block = {"strategy": "esp", "expert_sharding_size": 2}
    loop = test_torch.Loop("mixtral", block=block, steps=1)
    for stated in pool_of(2).run(refusal, in_a_loop, loop, Lamb):
        assert "Lamb, and 2 ranks split each expert" in stated
