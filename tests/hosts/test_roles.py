# SPDX-License-Identifier: Apache-2.0
"""Engines whose ranks have attention, or experts only, beside one process that holds all weights.

No rank sends another anything but through DeepSpeed: the part of the loss that a rank's weights
take part in is computed where they are.

Shape letters: B samples, D width.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_moe_ext.core.layout import Roles
from tests.ranks import pool_of

WIDTH = 6
SAMPLES = 4
CLIP = 0.5
WARMUP = {"warmup_max_lr": 0.02, "warmup_num_steps": 5, "warmup_type": "linear"}


class Case(NamedTuple):
    """Sizes, and what a rank may differ in."""

    attention: int = 1
    experts: int = 1
    groups: int = 1
    moved: int = 0
    stage: int = 1
    dtype: str = "float32"
    optimizer: str = "AdamW"
    micro_batches: int = 1
    steps: int = 3
    overflows: bool = False  # on an expert rank, in the second step
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def roles(self) -> Roles:
        return Roles.first(self.attention, self.experts)

    @property
    def num_experts(self) -> int:
        return 3 * self.experts

    @property
    def num_readers(self) -> int:
        """Attention ranks of all groups."""
        return self.attention * self.groups

    def experts_of(self, rank: int) -> range:
        ep_rank = rank % self.roles.size
        if ep_rank == 0:
            return range(self.moved)
        first = 3 * (ep_rank - self.attention)
        return range(max(first, self.moved), first + 3) if first >= 0 else range(0)

    def batch(self, step: int, number: int, reader: int) -> Tensor:
        seed = 1000 * step + 100 * number + reader
        return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed))

    def skips(self, step: int) -> bool:
        return self.overflows and step == 1


class Outcome(NamedTuple):
    """Of one rank, and of the process that holds all."""

    norms: list[float]
    expected_norms: list[float]
    rates: list[float]
    expected_rates: list[float]
    steps: int
    skipped: int
    scales: list[float]  # of the loss, after each step
    distance: float  # of the rank's weights, to those expected


def all_weights(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    names = ["first", "second", *(f"expert_{number}" for number in range(case.num_experts))]
    return {name: torch.randn(WIDTH, WIDTH, generator=generator) for name in names}


def dense_loss(first: Tensor, second: Tensor, x_BD: Tensor) -> Tensor:
    return ((x_BD @ first).tanh() @ second).square().mean()


def expert_loss(expert: Tensor, x_BD: Tensor) -> Tensor:
    return ((x_BD @ expert).tanh() - x_BD).square().mean()


class Part(nn.Module):
    """What one rank holds; its loss is what its weights contribute."""

    def __init__(self, case: Case, rank: int) -> None:
        from ds_moe_ext.hosts.deepspeed.rank_groups import experts_factor

        super().__init__()
        self.case, self.rank = case, rank
        self.factor = experts_factor(case.roles, rank)
        self.experts = [f"expert_{number}" for number in case.experts_of(rank)]
        self.is_attention = case.roles.is_attention(rank)
        weights = all_weights(case)
        for name in [*(("first", "second") if self.is_attention else ()), *self.experts]:
            self.register_parameter(name, nn.Parameter(weights[name]))
        for parameter in map(self.get_parameter, self.experts):
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = f"ep_size_{case.roles.size}"  # type: ignore[attr-defined]
        self._unlike_others()

    def _unlike_others(self) -> None:
        """DeepSpeed has to give the weights of the first to all others."""
        if self.rank >= self.case.roles.size:
            for parameter in self.parameters():
                parameter.data.add_(1.0)
        elif 0 < self.rank < self.case.attention:
            for name in ("first", "second"):
                self.get_parameter(name).data.mul_(2.0)

    def forward(self, step: int, number: int) -> Tensor:
        place, size = self.rank % self.case.roles.size, self.case.attention
        group = self.rank // self.case.roles.size * size
        batch = functools.partial(self.case.batch, step, number)
        dtype = next(self.parameters()).dtype
        loss = torch.zeros((), dtype=dtype)
        if self.is_attention:
            first, second = (self.get_parameter(name) for name in ("first", "second"))
            loss = loss + dense_loss(first, second, batch(group + place).to(dtype))
        for name in self.experts:
            for reader in range(group, group + size):
                x_BD = batch(reader).to(dtype)
                loss = loss + self.factor * expert_loss(self.get_parameter(name), x_BD)
        is_bad = self.case.skips(step) and self.rank == self.case.roles.size - 1
        return loss * math.inf if is_bad else loss


def in_one_process(case: Case) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Weights, norms and learning rates."""
    from deepspeed.runtime.lr_schedules import WarmupLR

    weights = {name: nn.Parameter(value) for name, value in all_weights(case).items()}
    optimizer = getattr(torch.optim, case.optimizer)(weights.values(), lr=0.01)
    schedule = WarmupLR(optimizer, **WARMUP)
    norms, rates = [], []
    for step in range(case.steps):
        rates.append(schedule.get_lr()[0])
        if case.skips(step):
            norms.append(math.inf)
            continue
        for number in range(case.micro_batches):
            for reader in range(case.num_readers):
                x_BD = case.batch(step, number, reader)
                losses = [expert_loss(w, x_BD) for name, w in weights.items() if "_" in name]
                losses.append(dense_loss(weights["first"], weights["second"], x_BD))
                (sum(losses) / case.num_readers / case.micro_batches).backward()  # type: ignore[union-attr]
        norms.append(float(nn.utils.clip_grad_norm_(weights.values(), CLIP)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {name: weight.detach() for name, weight in weights.items()}, norms, rates


def document(case: Case, world_size: int) -> dict[str, Any]:
    halves = {"bfloat16": "bf16", "float16": "fp16"}
    mixed = {"enabled": True} | ({"initial_scale_power": 8} if case.dtype == "float16" else {})
    own = {"torch_adam": True} if case.optimizer == "AdamW" else {}
    return {
        "train_batch_size": SAMPLES * case.micro_batches * world_size,
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": case.stage, "reduce_bucket_size": 50},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "optimizer": {"type": case.optimizer, "params": {"lr": 0.01, **own}},
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
        **({halves[case.dtype]: mixed} if case.dtype in halves else {}),
        **dict(case.extra),
    }


@contextmanager
def float16_on_a_cpu() -> Iterator[None]:
    """DeepSpeed does not let a CPU train in float16, though torch can."""
    from deepspeed.accelerator import get_accelerator

    cls, dtypes = type(get_accelerator()), [torch.float32, torch.bfloat16, torch.float16]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(cls, "is_fp16_supported", lambda _: True))
        stack.enter_context(mock.patch.object(cls, "supported_dtypes", lambda _: dtypes))
        yield


def train(rank: int, world_size: int, case: Case, takes_flat: bool = False) -> Outcome:
    """Args: takes_flat: let AdamW count as fused, for DeepSpeed's optimizer of flat weights."""
    import deepspeed
    from deepspeed.runtime import engine as runtime

    with ExitStack() as stack:
        if case.dtype == "float16":
            stack.enter_context(float16_on_a_cpu())
        if takes_flat:
            stack.enter_context(mock.patch.object(runtime, "FusedAdam", torch.optim.AdamW))
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        return trained(rank, world_size, case)


def trained(rank: int, world_size: int, case: Case) -> Outcome:
    import deepspeed
    from deepspeed.utils import groups

    from ds_moe_ext.hosts.deepspeed import gradients
    from ds_moe_ext.hosts.deepspeed.rank_groups import RoleUnit

    groups._create_expert_and_data_parallel(case.roles.size)
    model = Part(case, rank)
    engine, *_ = deepspeed.initialize(
        model=model, config=document(case, world_size), mpu=RoleUnit.build(case.roles)
    )
    gradients.begin_record(engine).last.update(map(model.get_parameter, model.experts))
    gradients.share_record(engine)
    assert groups.mpu is None, "an engine that comes next has no roles"
    norms, rates, scales = [], [], []
    for step in range(case.steps):
        rates.append(engine.get_lr()[0])
        for number in range(case.micro_batches):
            engine.backward(engine(step, number))
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        scales.append(float(getattr(engine.optimizer, "loss_scale", None) or 1.0))
    expected, expected_norms, expected_rates = in_one_process(case)
    differences = [
        (weight.detach().float() - expected[name]).abs().max()
        for name, weight in engine.module.named_parameters()
    ]
    return Outcome(
        norms,
        expected_norms,
        rates,
        expected_rates,
        engine.global_steps,
        engine.skipped_steps,
        scales,
        float(max(differences)),
    )


def run(case: Case, takes_flat: bool = False) -> list[Outcome]:
    """Outcomes of all ranks, after what must be equal on them all."""
    outcomes = pool_of(case.roles.size * case.groups).run(train, case, takes_flat)
    first = outcomes[0]
    for outcome in outcomes:
        assert outcome.norms == first.norms
        assert outcome.rates == first.rates == pytest.approx(first.expected_rates)
        assert outcome.steps == case.steps
        assert outcome.skipped == case.overflows
        assert outcome.scales == first.scales
    return outcomes


SHAPES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_and_norms_are_those_of_one_process(
    shape: tuple[int, int, int], stage: int
) -> None:
    """SGD with accumulation at stage 0 and 2, as AdamW would hide a wrong factor."""
    optimizer = ("SGD", "AdamW", "SGD")[stage]
    case = Case(*shape, stage=stage, optimizer=optimizer, micro_batches=1 + (stage != 1))
    for outcome in run(case):
        assert outcome.norms == pytest.approx(outcome.expected_norms, rel=1e-5)
        assert max(outcome.norms) > CLIP
        assert outcome.distance < 2e-6


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (1, 1, 2)], ids=str)
def test_attention_ranks_may_hold_experts_too(shape: tuple[int, int, int], stage: int) -> None:
    """With (2, 1, 1) one attention rank has two experts, and the other has none."""
    for outcome in run(Case(*shape, moved=2, stage=stage, optimizer="SGD")):
        assert outcome.norms == pytest.approx(outcome.expected_norms, rel=1e-5)
        assert outcome.distance < 2e-6


IN_FLOAT32 = (("data_types", {"grad_accum_dtype": "fp32"}),)


@pytest.mark.parametrize(
    ("case", "takes_flat"),
    [
        (Case(2, 1, moved=2, stage=0), False),
        (Case(2, 1, moved=2, stage=0), True),
        (Case(1, 1, 2, stage=1), False),
        (Case(2, 1, moved=2, stage=1, extra=IN_FLOAT32), False),
        (Case(1, 2, stage=1, extra=IN_FLOAT32, micro_batches=2), False),
        (Case(2, 1, moved=2, stage=2, extra=IN_FLOAT32), False),
    ],
    ids=lambda value: f"{value}" if isinstance(value, bool) else f"stage{value.stage}",
)
def test_bfloat16(case: Case, takes_flat: bool) -> None:
    """Unfused, fused, ZeRO, and the optimizer that DeepSpeed has for float32 gradients."""
    for outcome in run(case._replace(dtype="bfloat16", optimizer="AdamW"), takes_flat):
        assert outcome.norms == pytest.approx(outcome.expected_norms, rel=0.02)
        assert outcome.distance < 0.02


@pytest.mark.parametrize(
    ("stage", "takes_flat"), [(0, False), (0, True), (1, False), (2, False)], ids=str
)
def test_all_ranks_skip_a_step_that_overflows_on_one(stage: int, takes_flat: bool) -> None:
    case = Case(2, 1, moved=1, stage=stage, dtype="float16", steps=4, overflows=True)
    for outcome in run(case, takes_flat):
        # At stage 0 DeepSpeed 0.19.8 unscales gradients that it did not scale.
        factors = outcome.scales if takes_flat else [1.0] * case.steps
        norms = [norm * factor for norm, factor in zip(outcome.norms, factors)]
        assert norms == pytest.approx(outcome.expected_norms, rel=0.02)
        assert outcome.scales[0] > 1
        assert outcome.distance < 0.02


CHECKED = (("bf16", {"enabled": True, "check_grad_overflow": True}),)


@pytest.mark.parametrize(
    ("stage", "takes_flat", "extra"),
    [(0, False, ()), (0, True, ()), (1, False, IN_FLOAT32), (2, False, CHECKED)],
    ids=["unfused", "fused", "float32 gradients", "checked"],
)
def test_so_they_do_in_bfloat16(stage: int, takes_flat: bool, extra: Any) -> None:
    case = Case(1, 2, stage=stage, dtype="bfloat16", steps=3, overflows=True, extra=extra)
    for outcome in run(case, takes_flat):
        assert outcome.norms[1] == math.inf
        assert outcome.distance < 0.02


OPTIONS: list[tuple[int, dict[str, Any]]] = [
    (0, {"prescale_gradients": True, "gradient_predivide_factor": 2.0}),
    (1, {"zero_optimization": {"stage": 1, "overlap_comm": True}}),
    (2, {"zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 40}}),
    (2, {"zero_optimization": {"stage": 2, "use_multi_rank_bucket_allreduce": False}}),
    (2, {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}),
]


@pytest.mark.parametrize(("stage", "options"), OPTIONS, ids=str)
def test_options_change_no_factor(stage: int, options: dict[str, Any]) -> None:
    case = Case(2, 1, moved=1, stage=stage, optimizer="SGD", extra=tuple(options.items()))
    for outcome in run(case._replace(micro_batches=2)):
        assert outcome.norms == pytest.approx(outcome.expected_norms, rel=1e-5)
        assert outcome.distance < 2e-6


def read(rank: int, world_size: int, case: Case) -> list[int]:
    import deepspeed
    from deepspeed.utils import groups

    from ds_moe_ext.hosts.deepspeed.rank_groups import RoleUnit

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    groups._create_expert_and_data_parallel(case.roles.size)
    _, _, loader, _ = deepspeed.initialize(
        model=Part(case, rank),
        config=document(case, world_size),
        mpu=RoleUnit.build(case.roles),
        training_data=list(range(3 * SAMPLES * world_size)),
    )
    return list(loader.data_sampler)  # its loader would start processes, which ranks may not


def test_every_rank_reads_its_own_data() -> None:
    numbers = pool_of(3).run(read, Case(2, 1))
    assert {len(of_rank) for of_rank in numbers} == {3 * SAMPLES}
    assert sorted(itertools.chain(*numbers)) == list(range(3 * SAMPLES * 3))


SIZES = st.integers(1, 4)


@settings(deadline=None, derandomize=True)
@given(attention=SIZES, experts=SIZES, num_groups=SIZES)
def test_every_weight_counts_once(attention: int, experts: int, num_groups: int) -> None:
    """One rank stands for dense weights, and one for the experts at a place of the groups; what a
    rank's experts are multiplied by is what DeepSpeed divides by, over the ranks with a loss."""
    from ds_moe_ext.hosts.deepspeed.rank_groups import RoleUnit, experts_factor

    roles = Roles.first(attention, experts)
    world_size = roles.size * num_groups

    def unit_of(rank: int) -> RoleUnit:
        ranks, group = roles.ranks_like(rank, world_size), mock.Mock()
        group.rank.return_value = ranks.index(rank)
        return RoleUnit(roles, rank, world_size, group, ranks, alike=mock.Mock())

    units = [unit_of(rank) for rank in range(world_size)]
    dense, expert = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    expert.allreduce = False  # type: ignore[attr-defined]
    with_dense = [unit for unit in units if roles.is_attention(unit.rank)]
    assert [unit.rank for unit in with_dense if unit.stands_for(dense)] == [0]
    assert [unit.rank for unit in units if unit.stands_for(expert)] == list(range(roles.size))
    for unit in units:
        divisor = len(unit.get_data_parallel_group_ranks())
        assert experts_factor(roles, unit.rank) / divisor == pytest.approx(1 / len(with_dense))
