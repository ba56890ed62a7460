# SPDX-License-Identifier: Apache-2.0
"""No default refuses: with nothing but ``enabled`` and ``strategy`` written every strategy starts,
whatever the host does, and its first step has the loss that plain expert parallelism has.

In the normal ring every pair of values runs once at least; all combinations are slow. What ranks
with roles cannot do is a list of its own (docs/known_limits.md), so ``zebra`` is not among these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ds_moe_ext
from ds_moe_ext.hosts.attachment.notices import OWNERS, settle
from ds_moe_ext.strategies.fssdp import FullySharded
from tests.hosts import divided_runs, jobs, megatron_jobs, pipelines
from tests.hosts import tensor_parallel as tp
from tests.hosts.jobs import Job
from tests.hosts.megatron_toy import MegatronRun
from tests.hosts.pipelines import Pipeline
from tests.marks import Values, cases
from tests.ranks import pool_of, preload, refusal

preload("transformers")

STRATEGIES = ("ep", "fssdp", "prophet", "esp", "auto")


class Step(NamedTuple):
    """The first step of a run."""

    loss: float
    reported: str


def block(strategy: str) -> dict[str, Any]:
    return {"enabled": True, "strategy": strategy}


# DeepSpeed.


class OnDeepSpeed(NamedTuple):
    """A run."""

    strategy: str
    stage: int
    offload: bool = False
    division: str = "none"
    reentrant: bool | None = None
    more: tuple[tuple[str, Any], ...] = ()
    num_experts: int = 4

    @property
    def size(self) -> int:
        """Ranks of one copy of the model."""
        return 1 if self.division == "none" else 2

    @property
    def job(self) -> Job:
        return Job(
            "mixtral",
            self.stage,
            steps=1,
            use_reentrant=self.reentrant,
            offload=(("device", "cpu"),) if self.offload else (),
            num_experts=self.num_experts,
        )


def on_deepspeed(rank: int, world_size: int, case: OnDeepSpeed) -> Step:
    """Its first step, on all ranks of a pool."""
    with divided_runs._no_groups_left(), redirect_stdout(StringIO()) as printed:
        loss = _first_loss(rank, world_size, case)
    return Step(loss, printed.getvalue())


def _first_loss(rank: int, world_size: int, case: OnDeepSpeed) -> float:
    import deepspeed

    replicas, here = world_size // case.size, rank // case.size
    mpu = tp.Mpu.of(case.size) if case.division == "mpu" else None
    document = jobs.document_of(case.job, replicas)
    document["ds_moe_ext"] = block(case.strategy)
    document.update(case.more)
    if case.division == "autotp":
        document["tensor_parallel"] = {"preset_model": "mixtral", "autotp_size": case.size}
    model = _model(case, mpu)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), mpu=mpu, config=document
    )
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for number in range(here, case.job.micro_batches, replicas):
        loss = jobs.loss_of(engine, jobs.micro_batch(0, number))
        engine.backward(loss)
        engine.step()
        total += loss.detach().double()
    dist.all_reduce(total)
    assert engine.global_steps == 1
    return float(total) / case.job.micro_batches / case.size


def _model(case: OnDeepSpeed, mpu: Any) -> nn.Module:
    if mpu is None:
        return jobs.model_of(case.job)
    model = tp.build(tp.Ranks(mpu.model, case.size, dist.get_rank(mpu.model)))
    if case.reentrant is not None:
        jobs._checkpoint_activations(model, case.reentrant)
    return model


@functools.cache
def ep_on_deepspeed(division: str, num_experts: int = 4) -> float:
    """The loss of plain expert parallelism at ZeRO 1, which nothing else changes."""
    case = OnDeepSpeed("ep", 1, division=division, num_experts=num_experts)
    return started(on_deepspeed, 2 * case.size, case).loss


def started(job: Callable[..., Step], world_size: int, case: Any) -> Step:
    """Rank 0's; an error of any shows as it is."""
    step: Step = pool_of(world_size).run(job, case)[0]
    return step


QUICK = ((2, True, "autotp", True), (3, False, "mpu", False))
"""Stage, offload, division and checkpointing. Undivided they are in what is reported, below."""


def is_possible(case: Values) -> bool:
    """DeepSpeed offloads what ZeRO has parted, for any strategy."""
    return case["stage"] > 0 or not case["offload"]


@pytest.mark.parametrize(
    "case",
    cases(
        is_possible,
        quick=lambda case: tuple(case.values())[1:] in QUICK,
        strategy=STRATEGIES,
        stage=range(4),
        offload=(False, True),
        division=("none", "autotp", "mpu"),
        reentrant=(None, True, False),
    ),
)
def test_deepspeed(case: Values) -> None:
    run = OnDeepSpeed(**case)
    loss = started(on_deepspeed, 2 * run.size, run).loss
    assert loss == pytest.approx(ep_on_deepspeed(run.division), rel=1e-5)


SUMS = (("bf16", {"enabled": True}), ("data_types", {"grad_accum_dtype": "fp32"}))
OFFLOADED = {
    "stage": 2,
    "contiguous_gradients": False,
    "offload_optimizer": {"device": "cpu"},
}


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (OnDeepSpeed("esp", 3), "stage is 3: it shards weights; use stage 0, 1 or 2"),
        (OnDeepSpeed("esp", 1, more=SUMS), "bfloat16 weights have float32 sums at stage 1"),
        (
            OnDeepSpeed("esp", 2, more=(("zero_optimization", OFFLOADED),)),
            "contiguous_gradients is false",
        ),
    ],
)
def test_what_is_left_out_of_esp_is_reported(run: OnDeepSpeed, expected: str) -> None:
    step = started(on_deepspeed, 2, run)
    (line,) = [each for each in step.reported.splitlines() if "esp.slice_gradients is null" in each]
    assert "dense gradients are not reduced in slices, because" in line and expected in line
    assert step.loss == pytest.approx(ep_on_deepspeed("none"), rel=1e-2 if run.more else 1e-5)


def test_owners_stay_at_zero_3() -> None:
    step = started(on_deepspeed, 2, OnDeepSpeed("fssdp", 3))
    assert (
        "fssdp.reshard_interval is null: experts keep their owners, because zero_opt"
        in step.reported
    )
    assert "is null: experts keep" not in started(on_deepspeed, 2, OnDeepSpeed("fssdp", 2)).reported


@pytest.mark.parametrize("strategy", ["fssdp", "auto"])
def test_ep_ranks_that_divide_experts_at_zero_3(strategy: str) -> None:
    """Of six experts four ranks would have one or two each."""
    step = started(on_deepspeed, 4, OnDeepSpeed(strategy, 3, num_experts=6))
    assert (
        "2 EP ranks, the largest that divides ranks and experts, because zero_optimiz"
    ) in step.reported
    assert step.loss == pytest.approx(ep_on_deepspeed("none", 6), rel=1e-5)


@pytest.mark.parametrize(
    ("strategy", "keys", "expected"),
    [
        ("esp", {"slice_gradients": True}, "esp.slice_gradients is true, but zero_opt.* is 3: it "),
        ("fssdp", {"reshard_interval": 9}, "fssdp.reshard_interval is 9, but zero_opt.* is 3: st"),
    ],
)
def test_what_is_written_is_refused(strategy: str, keys: Mapping[str, Any], expected: str) -> None:
    more = (("ds_moe_ext", {**block(strategy), strategy: keys}),)
    for reported in pool_of(2).run(refusal_of, on_deepspeed, OnDeepSpeed(strategy, 3, more=more)):
        assert reported.startswith("ds_moe_ext.")
        with pytest.raises(ValueError, match=expected):
            raise ValueError(reported)


def refusal_of(rank: int, world_size: int, job: Callable[..., Any], case: Any) -> str:
    return refusal(rank, world_size, job, case)


# DeepSpeed's pipelines.


def in_pipeline(rank: int, world_size: int, pipeline: Pipeline) -> Step:
    """Its first step, on all ranks of a pool."""
    document_of = jobs.document_of

    def with_block(job: Job, replicas: int) -> dict[str, Any]:
        return {**document_of(job, replicas), "ds_moe_ext": block(job.strategy)}

    with mock.patch.object(jobs, "document_of", with_block), redirect_stdout(StringIO()) as printed:
        result = pipelines.train(rank, world_size, pipeline)
    return Step(float("nan") if result is None else result.losses[0], printed.getvalue())


@pytest.mark.parametrize(
    "case",
    cases(
        lambda _: True,
        quick=lambda case: case["stage"] == case["checkpoint_interval"] == 1,
        strategy=STRATEGIES,
        stage=(0, 1),
        checkpoint_interval=(0, 1),
    ),
)
def test_pipelines(case: Values) -> None:
    job = Job("gpt_moe", case["stage"], steps=1, strategy=case["strategy"])
    run = Pipeline(job, checkpoint_interval=case["checkpoint_interval"])
    step = started(in_pipeline, 4, run)
    assert step.loss == pytest.approx(ep_in_pipeline(), rel=1e-5)
    if case["strategy"] == "esp":
        assert "esp.slice_gradients is null" in step.reported and "PipelineModule" in step.reported


@functools.cache
def ep_in_pipeline() -> float:
    return started(in_pipeline, 4, Pipeline(Job("gpt_moe", 0, steps=1))).loss


# Megatron-core.


def on_megatron(rank: int, world_size: int, case: tuple[MegatronRun, str]) -> Step:
    run, strategy = case
    with redirect_stdout(StringIO()) as printed:
        trained = megatron_jobs.train(rank, world_size, run, block(strategy))
    return Step(trained.losses[0], printed.getvalue())


QUICK_OF_MEGATRON = (("ddp", False, 2, "moe"), ("distributed", True, 1, "full"))


@pytest.mark.parametrize(
    "case",
    cases(
        lambda _: True,
        quick=lambda case: tuple(case.values())[1:] in QUICK_OF_MEGATRON,
        strategy=STRATEGIES,
        optimizer=("ddp", "distributed"),
        overlap_grad_reduce=(False, True),
        tp=(1, 2),
        recompute=("none", "moe", "full"),
    ),
)
def test_megatron(case: Values) -> None:
    keys = dict(case)
    strategy = keys.pop("strategy")
    run = MegatronRun(ep=2, etp=1, steps=1, **keys)
    step = started(on_megatron, 2, (run, strategy))
    assert step.loss == pytest.approx(ep_on_megatron(run.tp), rel=1e-5)


@functools.cache
def ep_on_megatron(size: int) -> float:
    return started(on_megatron, 2, (MegatronRun(ep=2, etp=1, steps=1, tp=size), "ep")).loss


class Optimizer(NamedTuple):
    """What is looked at of Megatron's, of a kind that is not known."""

    config: Any
    is_stub_optimizer: bool = False


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"use_precision_aware_optimizer": True}, "--use-precision-aware-optimizer"),
        ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload"),
        ({}, "the optimizer is a Optimizer"),
    ],
)
def test_owners_stay_where_megatron_cannot_move_states(
    fields: Mapping[str, Any], expected: str
) -> None:
    assert pool_of(1).run(owners_on_megatron, fields, expected) == [True]


def owners_on_megatron(
    rank: int, world_size: int, fields: Mapping[str, Any], expected: str
) -> bool:
    from ds_moe_ext.hosts.megatron.checkpoint import UNMOVABLE

    optimizer, reported = Optimizer(SimpleNamespace(**fields)), []
    stays = settle(OWNERS, FullySharded(), UNMOVABLE, optimizer, reported.append)
    with pytest.raises(ValueError, match=r"interval is 9, but .*to 0 or null"):
        settle(OWNERS, FullySharded(reshard_interval=9), UNMOVABLE, optimizer, reported.append)
    (line,) = reported
    return expected in line and not stays.intervals().shard_every


# A loop of a user's own.


class InLoop(NamedTuple):
    """A run."""

    strategy: str
    wrap: str = ""
    reentrant: bool | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    spoil: Callable[[nn.Module], None] | None = None


def in_loop(rank: int, world_size: int, case: InLoop) -> Step:
    """Its first step, on all ranks of a pool."""
    with redirect_stdout(StringIO()) as printed:
        model = jobs.model_of(Job("mixtral", use_reentrant=case.reentrant))
        if case.spoil is not None:
            case.spoil(model)
        moe = ds_moe_ext.attach(model, block(case.strategy))
        wrapped = _wrapped(model, moe, case.wrap)
        optimizer = (case.optimizer or _adam)(model)
        moe.watch(optimizer)
        ids = jobs.micro_batch(0, rank)
        loss: Tensor = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        total = loss.detach().double()
        dist.all_reduce(total)
    return Step(float(total) / world_size, printed.getvalue())


def _wrapped(model: Any, moe: Any, wrap: str) -> Any:
    if wrap == "ddp":
        return DistributedDataParallel(model)
    if wrap == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer, ignored_params=moe.expert_parameters)
        fully_shard(model, ignored_params=moe.expert_parameters)
    return model


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def _adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


def _a_rate_for_each_layer(model: nn.Module) -> torch.optim.Optimizer:
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        layer = name.partition("layers.")[2][:1]
        groups.setdefault(layer, []).append(parameter)
    return torch.optim.AdamW([{"params": each} for each in groups.values()], lr=3e-3)


@functools.cache
def ep_in_loop() -> float:
    return started(in_loop, 2, InLoop("ep")).loss


@pytest.mark.parametrize(
    "case",
    cases(
        lambda _: True,
        strategy=STRATEGIES,
        wrap=("", "ddp", "fsdp"),
        reentrant=(None, True, False),
    ),
)
def test_plain(case: Values) -> None:
    step = started(in_loop, 2, InLoop(**case))
    assert step.loss == pytest.approx(ep_in_loop(), rel=1e-5)
    expected = "esp.slice_gradients has no effect, and dense gradients are left to what wraps"
    assert (expected in step.reported) == (case["strategy"] == "esp")


@pytest.mark.parametrize("optimizer", [_adafactor, _a_rate_for_each_layer])
@pytest.mark.parametrize("strategy", ["fssdp", "auto"])
def test_owners_stay_by_what_the_optimizer_is(strategy: str, optimizer: Any) -> None:
    step = started(in_loop, 2, InLoop(strategy, optimizer=optimizer))
    assert step.loss == pytest.approx(ep_in_loop(), rel=1e-5)
    assert (": experts keep their owners, because" in step.reported) == (strategy == "fssdp")


def test_owners_that_move_are_refused_by_what_the_optimizer_is() -> None:
    for optimizer, expected in ((_adafactor, "is Adafactor"), (_a_rate_for_each_layer, "groups")):
        for reported in pool_of(2).run(refused_in_loop, InLoop("fssdp", optimizer=optimizer)):
            assert (
                reported.startswith("ds_moe_ext.fssdp.reshard_interval is 9, but ")
                and expected in reported
            )


def refused_in_loop(rank: int, world_size: int, case: InLoop) -> str:
    written = {**block(case.strategy), "fssdp": {"reshard_interval": 9}}
    with mock.patch(f"{__name__}.block", lambda _: written):
        return refusal(rank, world_size, in_loop, case)
