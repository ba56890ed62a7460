# SPDX-License-Identifier: Apache-2.0
"""What Megatron-core's MoE layers can do goes on as without us: routers, losses, shared experts.

Each feature is compared with stock Megatron, in float64, some experts busy and one without rows.
``moe_latent_size`` and recomputing norms alone need Transformer Engine, and are not tried here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from tests.hosts.megatron_jobs import Training
from tests.hosts.megatron_skewed import (
    NEVER,
    Seen,
    assert_equal,
    num_replicas,
    stock,
    train_skewed,
    worst,
)
from tests.hosts.megatron_toy import MegatronRun
from tests.hosts.varied import VARIED
from tests.ranks import pool_of

SKEW = (2.0, 1.0, 0.0, NEVER)
RUN = MegatronRun(dtype="float64", ep=2, num_microbatches=2, clip=0.1)
COMMON = {"enabled": True, "debug": True, "report": {"enabled": False}}
FSSDP = {"overlap_degree": 2, "replicas_per_rank": 2, "reshard_interval": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "ep": {**COMMON, "strategy": "ep"},
    "fssdp": {**COMMON, "strategy": "fssdp", "fssdp": FSSDP},
    "varied": {**COMMON, "strategy": VARIED, "options": {"replicas": 0.5, "rematerialized": 0.5}},
}


def config(**fields: Any) -> MegatronRun:
    """A run with fields of TransformerConfig."""
    return replace(RUN, config=tuple(fields.items()))


def router(kind: str, **fields: Any) -> MegatronRun:
    """A run with another kind of router, without the common loss."""
    fields = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.0, **fields}
    return replace(config(**fields), aux_coefficient=0.0)


def squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x) ** 2


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


SHARED = replace(RUN, shared_ffn=64)
FULL = replace(SHARED, capacity_factor=1.0, pad_to_capacity=True)
ONE_CHOICE: dict[str, Any] = {"moe_router_pre_softmax": True}
LOSSES = ["aux_loss", "seq_aux_loss", "global_aux_loss"]

FEATURES: dict[str, MegatronRun] = {
    "shared experts": SHARED,
    "shared experts with a gate": replace(SHARED, config=(("moe_shared_expert_gate", True),)),
    "shared experts beside": replace(SHARED, config=(("moe_shared_expert_overlap", True),)),
    "shared experts beside, split": replace(
        SHARED, tp=2, etp=1, config=(("moe_shared_expert_overlap", True),)
    ),
    "shared experts computed again": replace(
        SHARED,
        config=(
            ("recompute_granularity", "selective"),
            ("recompute_modules", ["shared_experts", "core_attn"]),
        ),
    ),
    "capacity": replace(RUN, capacity_factor=1.0),
    "capacity, filled up": replace(RUN, capacity_factor=1.0, pad_to_capacity=True),
    "capacity by position": replace(config(moe_token_drop_policy="position"), capacity_factor=0.5),
    "capacity by position, filled up": replace(
        config(moe_token_drop_policy="position"), capacity_factor=2.0, pad_to_capacity=True
    ),
    "loss by sequence": config(moe_router_load_balancing_type="seq_aux_loss"),
    "loss over all ranks": config(moe_router_load_balancing_type="global_aux_loss"),
    "all losses": config(
        moe_router_load_balancing_type=LOSSES, moe_aux_loss_coeff=[0.01, 0.02, 0.03]
    ),
    "z-loss": config(moe_z_loss_coeff=0.01),
    "loss per token": config(calculate_per_token_loss=True),
    "expert bias": router(
        "none",
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
        moe_router_bias_update_rate=0.01,
    ),
    "sinkhorn": replace(router("sinkhorn"), topk=1),
    "scores on the input": replace(config(moe_apply_probs_on_input=True, **ONE_CHOICE), topk=1),
    "groups of experts": replace(
        config(moe_router_num_groups=4, moe_router_group_topk=2), num_experts=8
    ),
    "softmax before the choice, scaled": config(
        moe_router_pre_softmax=True, moe_router_topk_scaling_factor=2.5
    ),
    "router in float64": config(moe_router_dtype="fp64"),
    "input jitter": config(moe_input_jitter_eps=0.05),
    "three choices": replace(RUN, topk=3),
    "grouped experts": replace(RUN, experts="te_grouped", swiglu=True, bias=True),
    "SwiGLU": replace(RUN, swiglu=True),
    "SwiGLU, fused": replace(config(bias_activation_fusion=True), swiglu=True),
    "SwiGLU, fused, with a clamp that Megatron forgets": replace(
        config(bias_activation_fusion=True, activation_func_clamp_value=0.05), swiglu=True
    ),
    "GEGLU": replace(config(activation_func=gelu), swiglu=True),
    "clamped": replace(
        config(activation_func=quick_gelu, activation_func_clamp_value=0.3, glu_linear_offset=1.0),
        swiglu=True,
    ),
    "squared ReLU": config(activation_func=squared_relu),
    "biases": replace(RUN, bias=True),
    "narrower experts": config(moe_ffn_hidden_size=48),
    "dense layers between": replace(config(moe_layer_freq=[0, 1, 0, 1]), num_layers=4),
    "allgather": replace(RUN, dispatcher="allgather"),
}
QUICK = ("shared experts beside", "expert bias")
SLOW = [(name, strategy) for name in FEATURES for strategy in SETTINGS]


class Found(NamedTuple):
    """At the end of a run."""

    evaluated: float
    again: float
    biases: tuple[Tensor, ...]


def found_at_end(training: Training) -> Found:
    """By a training that has ended."""
    modules = [module for chunk in training.chunks for module in chunk.modules()]
    biases = [b for m in modules if (b := m._buffers.get("expert_bias")) is not None]
    evaluated = training.evaluate(100)
    return Found(evaluated, training.compute(101), tuple(bias.clone() for bias in biases))


def skew_of(run: MegatronRun) -> tuple[float, ...]:
    return SKEW * (run.num_experts // len(SKEW))


def check(run: MegatronRun, settings: dict[str, Any], prepare: Any = None) -> list[Seen]:
    ours = pool_of(2).run(
        train_skewed, run, settings, skew_of(run), prepare=prepare, look=found_at_end
    )
    theirs = stock(2, run, skew_of(run), prepare=prepare, look=found_at_end)
    assert_equal(ours, theirs)
    for one, other in zip(ours, theirs):
        own, its = one.trained.seen, other.trained.seen
        assert (own.evaluated, own.again) == pytest.approx((its.evaluated, its.again), rel=1e-12)
        assert len(own.biases) == len(its.biases)
        assert all(map(torch.equal, own.biases, its.biases))
    return ours


@pytest.mark.parametrize("name", QUICK)
def test_features(name: str) -> None:
    ours = check(replace(FEATURES[name], steps=2), SETTINGS["varied"])
    assert num_replicas(ours) > 0
    biases = ours[0].trained.seen.biases
    assert bool(biases) == (name == "expert bias")
    assert all(bias.any() for bias in biases)  # they have moved


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), SLOW)
def test_features_by_strategy(name: str, strategy: str) -> None:
    ours = check(replace(FEATURES[name], steps=4), SETTINGS[strategy])
    if strategy != "ep" and name != "three choices":  # that leave nothing to balance
        assert num_replicas(ours) > 0


# What the model is called with, or has.


def mask_some(chunk: nn.Module) -> None:
    """The last tokens of each sample are padding."""

    def masked(model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        mask = torch.zeros(given[0].shape, dtype=torch.bool)
        mask[:, -5:] = True
        return given, {**named, "padding_mask": mask}

    chunk.register_forward_pre_hook(masked, with_kwargs=True)


def freeze_experts(chunk: nn.Module) -> None:
    """They are not trained; the rest is."""
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(".local_experts." not in name)


def freeze_first_layers(chunk: nn.Module) -> None:
    """The experts of the first layer are not trained, those of the second are."""
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_("layers.0.mlp.experts." not in name)


def freeze_first_experts(chunk: nn.Module) -> None:
    """The first expert of each rank is not trained, its others are."""
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(".local_experts.0." not in name)


def freeze_first_ranks_experts(chunk: nn.Module) -> None:
    """Those of one rank are not trained, those of the other are."""
    if torch.distributed.get_rank() == 0:
        freeze_experts(chunk)


@pytest.mark.parametrize(
    ("prepare", "strategy"),
    [
        pytest.param(freeze_first_experts, "fssdp", marks=pytest.mark.slow),
        pytest.param(freeze_first_ranks_experts, "fssdp", marks=pytest.mark.slow),
        pytest.param(freeze_first_ranks_experts, "ep", marks=pytest.mark.slow),
        pytest.param(freeze_first_experts, "varied", marks=pytest.mark.slow),
        pytest.param(freeze_first_ranks_experts, "varied", marks=pytest.mark.slow),
        pytest.param(mask_some, "varied", marks=pytest.mark.slow),
        (freeze_experts, "varied"),
        pytest.param(mask_some, "ep", marks=pytest.mark.slow),
        pytest.param(freeze_experts, "ep", marks=pytest.mark.slow),
        pytest.param(freeze_experts, "fssdp", marks=pytest.mark.slow),
        pytest.param(freeze_first_layers, "fssdp", marks=pytest.mark.slow),
        pytest.param(freeze_first_layers, "varied", marks=pytest.mark.slow),
    ],
)
def test_models_that_are_used_otherwise(prepare: Any, strategy: str) -> None:
    check(replace(RUN, steps=2, overlap_grad_reduce=True), SETTINGS[strategy], prepare)


@pytest.mark.parametrize("strategy", ["varied", pytest.param("ep", marks=pytest.mark.slow)])
def test_a_layer_that_is_left_to_megatron(strategy: str) -> None:
    settings = {**SETTINGS[strategy], "moe_layer_pattern": r"layers\.1"}
    ours = check(replace(RUN, steps=2), settings)
    assert all(len(step.plans) == 1 for seen in ours for step in seen.steps)


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["sequential", "te_grouped"])
@pytest.mark.parametrize("strategy", ["ep", "fssdp"])
def test_bfloat16_follows(strategy: str, experts: Any) -> None:
    run = replace(
        RUN,
        dtype="bfloat16",
        experts=experts,
        optimizer="distributed",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        steps=10,
    )
    ours, theirs = (
        pool_of(2).run(train_skewed, run, settings, SKEW) for settings in (SETTINGS[strategy], None)
    )
    assert ours[0].trained.losses == pytest.approx(theirs[0].trained.losses, rel=5e-3)
    assert ours[0].trained.norms == pytest.approx(theirs[0].trained.norms, rel=5e-2)
    assert worst(ours[0].trained.gradients, theirs[0].trained.gradients) < 0.1
