# SPDX-License-Identifier: Apache-2.0
"""Steps of several backward passes that go otherwise than planned: a user drops what came so far,
one fails, or nobody knows beforehand which is the last."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ds_moe_ext
from ds_moe_ext.hosts.deepspeed.gradients import EngineAccumulation
from ds_moe_ext.hosts.steps.host import Schedules
from ds_moe_ext.hosts.steps.training_run import run_of
from ds_moe_ext.moe.replica_memory import KeptInGrad, KeptMeanwhile
from ds_moe_ext.testing import relative_error
from tests.hosts import jobs, pipelines, toy
from tests.hosts.jobs import Job, engine_of, loss_of, micro_batch
from tests.hosts.pipelines import Pipeline
from tests.hosts.varied import IN_SLOTS, VARIED
from tests.marks import slow
from tests.ranks import pool_of, preload, refusal

preload("deepspeed")

STOCK = Job(
    "toy",
    block=False,
    optimizer="object",
    sgd=True,
    learning_rate=0.5,
    steps=3,
    micro_batches=8,
)
COPYING = replace(
    STOCK, block=True, strategy=VARIED, keys=(("layers", 1.0), ("replicas", 1.0), ("revised", 0.5))
)
SLICING = replace(STOCK, block=True, strategy="esp", ep_ranks=2, etp_size=1)

SUMS_IN_32_BITS = (("data_types", {"grad_accum_dtype": "fp32"}),)

Step = Callable[[Any, int, int], None]
"""What is done with an engine behind a backward pass, given numbers of the step and the pass."""


def by_engine(engine: Any, step: int, number: int) -> None:
    if number == 1:
        engine.zero_grad()


def by_optimizer(engine: Any, step: int, number: int) -> None:
    if number == 1:
        engine.optimizer.zero_grad()


def by_zeros(engine: Any, step: int, number: int) -> None:
    if number == 1:
        engine.optimizer.zero_grad(set_to_none=False)


def by_hand(engine: Any, step: int, number: int) -> None:
    for parameter in engine.module.parameters() if number == step else ():
        parameter.grad = None


def trained(rank: int, world_size: int, job: Job, drop: Step) -> dict[str, Tensor]:
    """The weights at the end; each rank accumulates four passes a step."""
    engine = engine_of(job, world_size)
    for step in range(job.steps):
        for number, batch in enumerate(range(rank, job.micro_batches, world_size)):
            engine.backward(loss_of(engine, micro_batch(step, batch)))
            drop(engine, step, number)
            engine.step()
    return _weights(engine.module)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: w.detach().clone() for name, w in ds_moe_ext.full_state_dict(model).items()}


def _differ(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert got.keys() == wanted.keys()
    return max(relative_error(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("stage", "drop"),
    [
        (0, by_hand),
        slow(1, by_zeros),
        slow(2, by_optimizer),
        slow(3, by_optimizer),
        *(
            slow(stage, drop)
            for stage, drops in (
                (0, (by_engine, by_optimizer, by_zeros)),
                (1, (by_engine, by_optimizer, by_hand)),
                (2, (by_engine, by_zeros)),
                (3, (by_engine, by_zeros)),
            )
            for drop in drops
        ),
    ],
)
def test_replicas_are_dropped_as_the_engine_drops(stage: int, drop: Step) -> None:
    job = replace(COPYING, stage=stage)
    wanted = pool_of(2).run(trained, replace(STOCK, stage=stage), drop)[0]
    assert _differ(pool_of(2).run(trained, job, drop)[0], wanted) < 1e-5


def sums_of_experts(rank: int, world_size: int, job: Job, drop: Step) -> Tensor:
    """All gradients of this rank's experts as the optimizer would step by them."""
    from deepspeed.utils import safe_get_full_grad

    engine = engine_of(job, world_size)
    for number, batch in enumerate(range(rank, job.micro_batches, world_size)):
        engine.backward(loss_of(engine, micro_batch(0, batch)))
        drop(engine, 0, number)
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    weights = [weight for layer in run_of(engine).layers for weight in layer.parameters]
    return torch.cat([safe_get_full_grad(weight).flatten() for weight in weights])


@pytest.mark.parametrize("drop", [by_engine, by_optimizer])
def test_sums_beside_grad(drop: Step) -> None:
    """DeepSpeed's BF16_Optimizer keeps sums of its own, which its own ``zero_grad`` alone drops."""
    job = replace(COPYING, dtype="bfloat16", extra=SUMS_IN_32_BITS)
    wanted, got = (
        pool_of(2).run(sums_of_experts, replace(job, **changed), drop)
        for changed in ({"strategy": "ep", "keys": ()}, {"strategy": IN_SLOTS})
    )
    for own, reference in zip(got, wanted):
        assert (own - reference).norm() < 0.02 * reference.norm()  # of 8 bits


def whether_kept(rank: int, world_size: int, train: Any, job: Any) -> list[bool]:
    """What layers are reported earlier passes, where nobody drops anything."""
    answers: list[bool] = []
    asked = EngineAccumulation.is_kept

    def is_kept(self: EngineAccumulation) -> bool:
        answers.append(asked(self))
        return answers[-1]

    with mock.patch.object(EngineAccumulation, "is_kept", is_kept):
        train(rank, world_size, job)
    return answers


KEEPING = replace(COPYING, steps=2)
BF16 = replace(KEEPING, dtype="bfloat16")
OVERLAPPED = (("zero_optimization", {"stage": 1, "overlap_comm": True}),)
PIPELINE = replace(
    BF16, family="gpt_moe", num_layers=1, optimizer="json", learning_rate=0.1, stage=0
)
ENGINES: dict[str, Job | Pipeline] = {
    **{f"ZeRO {stage}": replace(KEEPING, stage=stage) for stage in range(4)},
    "overlapped": replace(KEEPING, extra=OVERLAPPED),
    "offloaded": replace(KEEPING, offload=(("device", "cpu"),)),
    "bfloat16": BF16,
    "bfloat16, ZeRO 0": replace(BF16, stage=0),
    "sums in 32 bits": replace(BF16, extra=SUMS_IN_32_BITS),
    "pipeline": Pipeline(replace(PIPELINE, dtype="float32"), num_stages=1),
    "pipeline in bfloat16": Pipeline(PIPELINE, num_stages=1),
}


QUICK = {"ZeRO 1", "sums in 32 bits", "pipeline in bfloat16"}


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in ENGINES])
def test_nothing_is_dropped_that_nobody_drops(name: str) -> None:
    """Engines do various things to ``.grad`` between passes."""
    job = ENGINES[name]
    train = pipelines.train if isinstance(job, Pipeline) else jobs.train
    for answers in pool_of(2).run(whether_kept, train, job):
        assert answers and all(answers)


def caught(rank: int, world_size: int, job: Job, fails: Any) -> dict[str, Tensor]:
    """The weights, where backward passes fail on all ranks and a user goes on."""
    engine = engine_of(job, world_size)
    passes = iter(range(1000))

    def fail(grad: Tensor) -> None:
        if next(passes) in fails:
            raise torch.OutOfMemoryError("no memory")

    def watch(module: nn.Module, given: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    engine.module.blocks[1].norm.register_forward_hook(watch)
    for step in range(job.steps):
        for batch in range(rank, job.micro_batches, world_size):
            try:
                engine.backward(loss_of(engine, micro_batch(step, batch)))
                engine.step()
            except torch.OutOfMemoryError:
                engine.optimizer.zero_grad()
    return _weights(engine.module)


@pytest.mark.parametrize(("job", "stage"), [(SLICING, 0), slow(SLICING, 1), slow(COPYING, 0)])
def test_a_caught_error(job: Job, stage: int) -> None:
    """One in the last pass of a step, which reduces gradients, and one in the midst of one."""
    fails = (3, 9)
    wanted = pool_of(2).run(caught, replace(STOCK, stage=stage), fails)[0]
    assert _differ(pool_of(2).run(caught, replace(job, stage=stage), fails)[0], wanted) < 1e-5


def unmanaged(rank: int, world_size: int, job: Job) -> dict[str, Tensor]:
    """The weights, where a user calls ``step`` when a step has had enough passes."""
    engine = engine_of(job, world_size)
    for step in range(job.steps):
        for batch in range(rank, job.micro_batches, world_size):
            engine.backward(loss_of(engine, micro_batch(step, batch)))
        engine.step()
    return _weights(engine.module)


@pytest.mark.parametrize("stage", [1, *map(slow, (0, 2, 3))])
def test_nobody_says_which_pass_is_the_last(stage: int) -> None:
    """With ``managed_gradient_accumulation`` false; so gradients of replicas go to the owner in
    each."""
    extra = (("managed_gradient_accumulation", False),)
    job = replace(COPYING, stage=stage, extra=extra)
    wanted = pool_of(2).run(unmanaged, replace(STOCK, stage=stage, extra=extra))[0]
    assert _differ(pool_of(2).run(unmanaged, job)[0], wanted) < 1e-5


def in_two_passes(rank: int, world_size: int, job: Job) -> dict[str, Tensor]:
    """The weights, where a loss has two parts, each with a backward pass of its own."""
    engine = engine_of(job, world_size)
    for step in range(job.steps):
        for batch in range(rank, job.micro_batches, world_size):
            parts = [loss_of(engine, micro_batch(step, number)) for number in (batch, batch + 50)]
            for part in parts:
                engine.backward(part)
            engine.step()
    return _weights(engine.module)


@pytest.mark.parametrize(
    "job",
    [
        COPYING,
        *map(
            slow,
            (
                replace(SLICING, strategy="ep", ep_ranks=1),
                SLICING,
                replace(SLICING, strategy="ep"),
                replace(COPYING, ep_ranks=1),
            ),
        ),
    ],
    ids=lambda job: f"{job.strategy} {job.ep_ranks}",
)
def test_two_backward_passes_of_a_micro_batch(job: Job) -> None:
    """DeepSpeed averages gradients behind each of them, at ZeRO 0."""
    wanted = pool_of(2).run(in_two_passes, replace(STOCK, stage=0))[0]
    assert _differ(pool_of(2).run(in_two_passes, replace(job, stage=0))[0], wanted) < 1e-5


def _nothing(*_: Any) -> None:
    pass


def in_a_loop(
    rank: int, world_size: int, strategy: str, drop: Any, before: Any = _nothing
) -> dict[str, Tensor]:
    """The weights behind a loop of a user's own, of four passes a step; what is done before each of
    them, and what is dropped amid a step."""
    job = replace(COPYING, strategy=strategy, keys=COPYING.keys if ":" in strategy else ())
    model = jobs.model_of(job).double()
    moe = ds_moe_ext.attach(model, jobs.document_of(job, world_size)["ds_moe_ext"], micro_batches=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    moe.watch(optimizer)
    for step in range(job.steps):
        for number in range(4):
            with moe.no_sync() if number < 3 else nullcontext():
                ids = micro_batch(step, 4 * rank + number)
                before(model, ids)
                model(input_ids=ids, labels=ids).loss.backward()
            if number == 1:
                drop(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return _weights(model)


def _by_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()


def _by_zeros(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def _halve(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= 2


@pytest.mark.parametrize("drop", [slow(_by_model), _by_zeros])
def test_a_loop_of_ones_own(drop: Any) -> None:
    with jobs.float64_everywhere():
        got, wanted = (pool_of(2).run(in_a_loop, name, drop)[0] for name in (VARIED, "ep"))
    assert _differ(got, wanted) < 1e-12


def test_gradients_that_change_are_refused() -> None:
    """Those of replicas would not be changed alike."""
    results = pool_of(2).run(refusal, in_a_loop, VARIED, _halve)
    assert all("scale losses instead" in text for text in results)


def _shift(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)


def test_weights_that_change_are_refused() -> None:
    """As sharpness-aware steps change them: replicas would be of the old ones."""
    results = pool_of(2).run(refusal, in_a_loop, VARIED, _shift)
    assert all("were changed between two passes" in text for text in results)


def _look(model: Any, ids: Tensor) -> None:
    """Ask for gradients of embeddings alone."""
    loss = model(input_ids=(ids + 1) % toy.VOCABULARY, labels=ids).loss
    torch.autograd.grad(loss, model.embedding.weight)


def test_passes_that_want_no_gradients_of_experts() -> None:
    """As adversarial training and saliency have them: what replicas would get is nobody's."""
    with jobs.float64_everywhere():
        ranks = (pool_of(2).run(in_a_loop, name, _nothing, _look) for name in (VARIED, "ep"))
        got, wanted = (rank[0] for rank in ranks)
    assert _differ(got, wanted) < 1e-12


def test_which_weight_tells() -> None:
    """The one that got a gradient last: an expert without rows has none."""
    idle, frozen, busy = (nn.Parameter(torch.ones(2), requires_grad=i != 1) for i in range(3))
    kept = KeptInGrad(0, lambda: (idle, frozen, busy))
    kept.begin()
    assert kept.is_kept()  # nobody knows
    for _ in range(2):
        busy.sum().backward()
        assert kept.is_kept()
    busy.grad = None
    assert not kept.is_kept()
    kept.begin()
    idle.sum().backward()
    assert kept.is_kept()
    assert idle.grad is not None
    idle.grad.zero_()
    assert not kept.is_kept()


def test_a_schedule_that_failed_leaves_nothing() -> None:
    schedules = Schedules()
    kept = KeptMeanwhile(lambda: schedules.steps)
    schedules.begin(4, forward_only=False)
    kept.begin()
    assert kept.is_kept()
    schedules.end()
    schedules.begin(4, forward_only=True)
    assert kept.is_kept()
    schedules.begin(4, forward_only=False)
    assert not kept.is_kept()
