# SPDX-License-Identifier: Apache-2.0
"""What ds_moe_ext does not do under Megatron-core, found at start and told by the flag's name.

Nearly all is asked of a ``TransformerConfig``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_moe_ext.hosts.attachment.notices import Refusal
from ds_moe_ext.planning.strategy import names_with
from ds_moe_ext.strategies.settings import BLOCK, Settings


def flag(name: str, asked: Callable[[Any], object], reason: str, remedy: str) -> Refusal:
    """A refusal of what a flag of Megatron-LM does.

    Args:
        name: of the flag.
        asked: from a ``TransformerConfig`` to what was asked for; nothing, if it was not.
        reason: why not.
        remedy: what to do.
    """

    def told(config: Any) -> str:
        value = asked(config)
        given = "" if value is True else f" ({value})"
        return f"Megatron was given {name}{given}" if value else ""

    return Refusal(name, told, reason, remedy)


def field_of(name: str) -> Callable[[Any], object]:
    """Of a config; versions without it have not been asked for it."""
    return lambda config: getattr(config, name, None)


def graphed(config: Any) -> list[str]:
    """Parts of layers that are in CUDA graphs."""
    is_whole = any(
        getattr(config, name, False) for name in ("enable_cuda_graph", "external_cuda_graph")
    )
    if not is_whole and getattr(config, "cuda_graph_impl", "none") in ("none", None):
        return []
    scopes = getattr(config, "cuda_graph_modules", None)
    scopes = scopes or getattr(config, "cuda_graph_scope", None)
    if is_whole or not scopes:
        return ["all of a layer"]
    scopes = [scopes] if isinstance(scopes, str) else scopes
    return [str(getattr(scope, "name", scope)) for scope in scopes]


def _graphed_with_moe(config: Any) -> object:
    return [part for part in graphed(config) if part not in ("attn", "mamba")]


def _recomputed(part: str) -> Callable[[Any], object]:
    def asked(config: Any) -> object:
        is_selective = getattr(config, "recompute_granularity", None) == "selective"
        return is_selective and part in (getattr(config, "recompute_modules", None) or ())

    return asked


def _offloaded(config: Any) -> object:
    if not getattr(config, "fine_grained_activation_offloading", False):
        return None
    modules = getattr(config, "offload_modules", None) or ()
    return [module for module in modules if module in ("expert_fc1", "moe_act")]


def _split_biases(config: Any) -> object:
    size = getattr(config, "expert_tensor_parallel_size", None) or 1
    return getattr(config, "add_bias_linear", False) and size > 1


def _filled_with_biases(config: Any) -> object:
    names = "moe_apply_probs_on_input", "moe_pad_expert_input_to_capacity", "add_bias_linear"
    return all(getattr(config, name, False) for name in names)


REFUSALS = (
    flag(
        "--overlap-moe-expert-parallel-comm",
        field_of("overlap_moe_expert_parallel_comm"),
        "it takes MoE layers apart to interleave two micro-batches, past our schedule",
        f"leave it out; strategy {names_with('schedules')} overlaps within a layer",
    ),
    flag(
        "--delay-wgrad-compute",
        field_of("delay_wgrad_compute"),
        "gradients of expert weights are made in the layer's own backward schedule",
        "leave it out",
    ),
    flag(
        "--cuda-graph-impl with MoE scopes",
        _graphed_with_moe,
        "row counts change from step to step, and plans with them",
        "use --cuda-graph-scope attn (--cuda-graph-modules attn), or none",
    ),
    flag(
        "--moe-token-dispatcher-type flex",
        lambda config: config.moe_token_dispatcher_type == "flex",
        "rows travel by ds_moe_ext's own dispatch",
        f"use alltoall; strategy {names_with('ways')} has rows travel by DeepEP where asked to",
    ),
    flag(
        "--fp8-format",
        field_of("fp8"),
        "experts compute in the type of their weights",
        "use --bf16",
    ),
    flag(
        "--fp4-format",
        field_of("fp4"),
        "experts compute in the type of their weights",
        "use --bf16",
    ),
    flag(
        "--moe-router-padding-for-quantization",
        lambda config: (
            getattr(config, "moe_router_padding_for_quantization", False)
            or getattr(config, "moe_router_padding_for_fp8", False)
        ),
        "padded rows are for fp8 and fp4, which are not supported",
        "leave it out",
    ),
    flag(
        "--recompute-modules moe_act",
        _recomputed("moe_act"),
        "activations of experts are not recomputed alone",
        "use --recompute-modules moe",
    ),
    flag(
        "--offload-modules expert_fc1 or moe_act",
        _offloaded,
        "inputs of experts are kept by our program",
        "leave these modules out",
    ),
    flag(
        "--activation-func-fp8-input-store",
        field_of("activation_func_fp8_input_store"),
        "activations of experts are kept in their own type",
        "leave it out",
    ),
    flag(
        "biases of experts (no --disable-bias-linear) with --expert-tensor-parallel-size above 1",
        _split_biases,
        "Megatron adds the whole bias once on every rank that has a part of the expert",
        "use --disable-bias-linear",
    ),
    flag(
        "--moe-apply-probs-on-input with --moe-pad-expert-input-to-capacity and biases of experts "
        "(no --disable-bias-linear)",
        _filled_with_biases,
        "Megatron adds what the biases make of rows that only fill up to the tokens these rows "
        "were taken from, and here such rows are not computed",
        "use --disable-bias-linear, or leave one of the two flags out",
    ),
    flag(
        "--moe-mlp-glu-interleave-size",
        lambda config: (
            config.gated_linear_unit and getattr(config, "moe_mlp_glu_interleave_size", None)
        ),
        "gate and up lie behind each other in an expert's weights, not in turns",
        "leave it out",
    ),
    flag(
        "--overlap-dispatch-backward-with-experts-wgrad",
        field_of("overlap_dispatch_backward_with_experts_wgrad"),
        "gradients of expert weights are made in the layer's own backward schedule",
        "leave it out",
    ),
    flag(
        "--mtp-use-repeated-layer with --mtp-num-layers above 1",
        lambda config: (
            getattr(config, "mtp_use_repeated_layer", False) and (config.mtp_num_layers or 0) > 1
        ),
        "a layer runs once a micro-batch, or nobody knows which pass is the last",
        "leave it out",
    ),
    flag(
        "--use-kitchen or a quantization recipe",
        lambda config: (
            getattr(config, "use_kitchen", False) or getattr(config, "quant_recipe", None)
        ),
        "experts compute in the type of their weights",
        "leave it out",
    ),
    flag(
        "--transformer-impl inference_optimized",
        lambda config: getattr(config, "transformer_impl", None) == "inference_optimized",
        "its MoE layers are for inference, and move rows by themselves",
        "use --transformer-impl transformer_engine or local to train",
    ),
    flag(
        "--moe-single-grouped-weight",
        field_of("moe_single_grouped_weight"),
        "the weights of a rank's experts are one tensor, so that none can be copied or moved alone",
        "leave it out",
    ),
)


def _own_flag(key: str, flag: str) -> Refusal:
    """A key of ours, where Megatron has a flag of its own."""

    def asked(settings: Settings) -> str:
        value = getattr(settings, key)
        return f"{BLOCK}.{key} is {value}" if value else ""

    remedy = f"leave it out, and use {flag}"
    return Refusal(f"{BLOCK}.{key}", asked, "under Megatron its own flag says that", remedy)


SETTINGS = (
    _own_flag("gate", "--moe-router-load-balancing-type and its like"),
    _own_flag("capacity_factor", "--moe-expert-capacity-factor"),
    _own_flag("sequence_parallel", "--sequence-parallel"),
)

STEPPING = (
    flag(
        "--optimizer-cuda-graph",
        field_of("optimizer_cuda_graph"),
        "a graph is replayed, and nobody is told of steps",
        "leave it out",
    ),
)
"""Of an optimizer's config."""

_UNMOVED = "states of experts that move to new homes cannot be moved then"
_UNMOVING = "leave it out"

MOVING = (
    flag(
        "--use-precision-aware-optimizer",
        field_of("use_precision_aware_optimizer"),
        _UNMOVED,
        _UNMOVING,
    ),
    flag("--optimizer-cpu-offload", field_of("optimizer_cpu_offload"), _UNMOVED, _UNMOVING),
)
"""Of an optimizer's config, where experts move."""


def _summed_biases(config: Any) -> object:
    tensor = getattr(config, "tensor_model_parallel_size", None) or 1
    of_experts = getattr(config, "expert_tensor_parallel_size", None) or tensor
    is_biased = getattr(config, "add_bias_linear", False)
    return f"{tensor}, and {of_experts} for experts" if is_biased and tensor != of_experts else ""


SUMMED = (
    flag(
        "biases of experts (no --disable-bias-linear) with --tensor-model-parallel-size other than "
        "--expert-tensor-parallel-size",
        _summed_biases,
        "Megatron sums gradients of their last bias over tensor parallel ranks slot by slot, "
        "though these hold other experts, so that it matters which experts live where",
        "use --disable-bias-linear",
    ),
)
"""Of a config, where experts move."""
