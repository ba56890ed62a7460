# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's MoE layer for layer_speed.py, by each of its three ways to compute experts: one
after the other, by the wheel grouped_gemm, and by Transformer Engine's GroupedLinear.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from layer_contenders import Builder, Contender, Problem
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script sees its own folder alone

import megatron_on_cpu

DEVICE_NAMES = ("device_names",)  # the shim that looks at every call of torch: for building only


@dataclass(frozen=True)
class Way:
    """How Megatron computes experts.

    Attributes:
        package: that it needs.
        keys: of TransformerConfig.
        fill: copies a problem's weights into the layer's experts.
    """

    package: str
    keys: Mapping[str, Any]
    fill: Callable[[Any, Problem], None]


def fill_sequential(experts: Any, problem: Problem) -> None:
    """Of a SequentialMLP."""
    for expert, up_FD, down_DF in zip(experts.local_experts, problem.up_EFD, problem.down_EDF):
        expert.linear_fc1.weight.copy_(up_FD)
        expert.linear_fc2.weight.copy_(down_DF)


def fill_grouped(experts: Any, problem: Problem) -> None:
    """Of a GroupedMLP: inputs before outputs, expert by expert."""
    experts.weight1.view(-1, *problem.up_EFD.mT.shape[1:]).copy_(problem.up_EFD.mT)
    experts.weight2.view(-1, *problem.down_EDF.mT.shape[1:]).copy_(problem.down_EDF.mT)


def fill_te(experts: Any, problem: Problem) -> None:
    """Of a TEGroupedMLP."""
    for number, (up_FD, down_DF) in enumerate(zip(problem.up_EFD, problem.down_EDF)):
        experts.linear_fc1.get_parameter(f"weight{number}").copy_(up_FD)
        experts.linear_fc2.get_parameter(f"weight{number}").copy_(down_DF)


GROUPED = {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True, "bf16": True}
"""It asks for bf16, whatever the weights are."""
TE = {"moe_grouped_gemm": True, "moe_permute_fusion": True}
WAYS = {
    "Megatron, expert by expert": Way("megatron.core", {}, fill_sequential),
    "Megatron, grouped GEMM": Way("grouped_gemm", GROUPED, fill_grouped),
    "Megatron, Transformer Engine's GroupedLinear": Way("transformer_engine", TE, fill_te),
}


def megatron_layer(name: str, problem: Problem) -> Contender:
    """The layer of a name in ``WAYS``."""
    way = WAYS[name]
    if find_spec(way.package) is None:
        raise ImportError(f"{way.package} is not installed")
    megatron_on_cpu.install()
    try:
        layer = _build(way, problem)
        with torch.no_grad():
            layer.router.weight.copy_(problem.gate_ED)
            way.fill(layer.experts, problem)
    finally:
        megatron_on_cpu.remove()
    megatron_on_cpu.install(without=DEVICE_NAMES)  # for passes of it: its backward, too

    def call(x_TD: Tensor) -> Tensor:
        y: Tensor = layer(x_TD[:, None])[0][:, 0]
        return y

    # In bfloat16 its router may choose other experts.
    return Contender(name, call, tuple(layer.parameters()), problem.x_TD.dtype == torch.float32)


def _build(way: Way, problem: Problem) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_layer import MoELayer

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1)
    shape = problem.shape
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.width,
        num_attention_heads=1,
        num_moe_experts=shape.num_experts,
        moe_ffn_hidden_size=shape.expert_width,
        moe_router_topk=shape.top_k,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        params_dtype=problem.x_TD.dtype,
        perform_initialization=False,
        **{"bf16": problem.x_TD.dtype == torch.bfloat16, **way.keys},
    )
    spec = get_moe_module_spec(
        use_te=way.package == "transformer_engine",
        num_experts=shape.num_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        moe_use_legacy_grouped_gemm=config.moe_use_legacy_grouped_gemm,
    )
    return MoELayer(config, spec.submodules, layer_number=1).to(problem.x_TD.device)


MEGATRON: Mapping[str, Builder] = {name: partial(megatron_layer, name) for name in WAYS}
"""By name."""
