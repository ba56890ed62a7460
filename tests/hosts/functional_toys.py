# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's functional cases made small enough for two or four ranks of a CPU, by rules.

Each flag that names a field of ``TransformerConfig`` is passed on with its value, except those of
the tables below: sizes are reduced, and what a CPU cannot do is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.hosts.functional_cases import Case
from tests.hosts.megatron_toy import MegatronRun

NUM_RANKS = 4  # at most
AT_MOST = {  # sizes that are reduced, where a case gives them
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_latent_size": 16,
    "num_query_groups": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_attention_freq": 2,
    "moe_router_topk": 4,
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1,
}
NUM_EXPERTS = 8  # at most
OTHER_NAMES = {
    "fp8_format": "fp8",
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}
OF_THE_TOY = {  # said by fields of MegatronRun, or by weights that are drawn
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "bf16", "fp16"),
    *("context_parallel_size", "init_method_std", "hidden_dropout", "attention_dropout"),
    *("moe_layer_freq", "gated_linear_unit", "gradient_accumulation_fusion", "attention_backend"),
    *("is_hybrid_model", "mamba_num_heads", "mamba_head_dim", "mamba_state_dim"),
    "mamba_num_groups",
}
DROPPED = {  # flag, or how it begins -> what the table says
    "cuda_graph": "CUDA graphs",
    "pipeline_model_parallel_layout": "pipeline layout",
    "fp8_param": "weights in fp8",
    "reuse_grad_buf_for_mxfp8_param_ag": "weights in fp8",
    "moe_hybridep_num_sms": "",
    "moe_flex_dispatcher_num_sms": "",
    "num_distributed_optimizer_instances": "several optimizer instances",
    "optimizer": "",
    "use_transformer_engine_op_fuser": "op fuser",
    "fp16": "float16",
    "mtp_use_repeated_layer": "",
    "fine_grained_activation_offloading": "offloading (Transformer Engine's)",
    "offload_modules": "",
    "flextron": "Flextron",
    "export_kd_teacher_load": "distillation",
}
CANNOT = {  # flag -> why stock does not run on a CPU
    "use_megatron_fsdp": "Megatron FSDP (CUDA)",
}
HYBRID = "E*E"  # layers of what is a hybrid of Mamba, attention and experts, without Mamba's


@dataclass(frozen=True)
class Toy:
    """A run that cases are reduced to."""

    run: MegatronRun
    world_size: int
    by_engine: bool  # by Transformer Engine's layers
    model: tuple[tuple[str, Any], ...]  # arguments of GPTModel

    @property
    def is_hybrid(self) -> bool:
        return "hybrid_override_pattern" in dict(self.model)

    @property
    def is_rounded(self) -> bool:
        """Whether replicas round otherwise: sums of 16 bits, scales of a slot's tokens."""
        return self.run.dtype == "bfloat16" or "fp8" in dict(self.run.config)


@dataclass(frozen=True)
class Reduced:
    """What becomes of a case."""

    toy: Toy | None
    dropped: tuple[str, ...]
    cannot: str = ""


def reduced(case: Case) -> Reduced:
    """The toy of a case, or why there is none."""
    given = {key: value for key, value in vars(_flags(case)).items() if value is not False}
    for flag, why in CANNOT.items():
        if flag in given:
            return Reduced(None, (), why)
    sizes, without = layout(given)
    tp, pp, cp, ep, etp = sizes.values()
    vpp = 2 if pp > 1 and _is_interleaved(given) else None
    is_hybrid = "mamba_num_heads" in given
    num_layers = 4 if pp > 1 else 3 if is_hybrid or "moe_layer_freq" in given else 2
    config = dict(_config(given, num_layers))
    names = {"position_embedding_type": str, "rotary_percent": float}
    model = {name: kind(given[name]) for name, kind in names.items() if name in given}
    if is_hybrid:  # its model in megatron-core 0.16.1 predicts one token
        model["hybrid_override_pattern"] = HYBRID
        without += (
            ["Mamba layers", "MTP"] if config.pop("mtp_num_layers", None) else ["Mamba layers"]
        )
    is_distributed = bool(given.get("use_distributed_optimizer"))
    is_later = bool(given.get("delay_wgrad_compute"))
    run = MegatronRun(
        **{"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": ep, "etp": etp},
        num_layers=num_layers,
        num_experts=min(NUM_EXPERTS, int(given["num_experts"])),
        topk=min(4, int(given["moe_router_topk"])),
        num_microbatches=4 if pp > 1 else 2,
        dtype=_dtype(given),
        clip=0.1,
        optimizer="distributed" if is_distributed else "ddp",
        overlap_grad_reduce=bool(given.get("overlap_grad_reduce")),
        overlap_param_gather=is_distributed and bool(given.get("overlap_param_gather")),
        experts="te_grouped" if given.get("moe_grouped_gemm") else "sequential",
        swiglu=bool(given.get("gated_linear_unit")),
        aux_coefficient=float(given.get("moe_aux_loss_coeff", 0.0)),
        config=tuple(sorted(config.items())),
        ddp=(("delay_wgrad_compute", True),) if is_later else (),
    )
    by_engine = given.get("transformer_impl") != "local"
    size = max(2, tp * pp * cp, etp * ep * pp)
    toy = Toy(run, size, by_engine, tuple(model.items()))
    muon = ["Muon: Adam in its place"] if given.get("optimizer") == "muon" else []
    return Reduced(toy, tuple([*without, *sorted(_dropped(given)), *muon]))


def layout(given: dict[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Sizes of 1 or 2 for TP, PP, CP, EP and ETP, and which are 1 only since ranks do not suffice:
    pipeline stages first, then context parallel ranks."""
    flags = ("tensor", "pipeline", "context", "expert")
    names = [f"{flag}_model_parallel_size" for flag in flags]
    names[2] = "context_parallel_size"
    found = {n: min(2, int(given.get(flag, 1))) for n, flag in zip(("tp", "pp", "cp", "ep"), names)}
    found["etp"] = min(2, int(given.get("expert_tensor_parallel_size", found["tp"])))
    without = []
    for name, said in (("pp", "pipeline stages"), ("cp", "context parallelism")):
        dense = found["tp"] * found["pp"] * found["cp"]
        if max(dense, found["etp"] * found["ep"] * found["pp"]) > NUM_RANKS:
            without += [said] if found[name] > 1 else []
            found[name] = 1
    return found, without


def _flags(case: Case) -> Any:
    """Values as their file says, by names of fields."""
    found = case.config()
    for name, value in vars(found).items():
        if isinstance(value, str):
            setattr(found, name, _number(value))
    return found


def _number(value: str) -> Any:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    return value


def _is_interleaved(given: dict[str, Any]) -> bool:
    names = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
    return any(name in given for name in (*names, "pipeline_model_parallel_layout"))


def _dtype(given: dict[str, Any]) -> str:
    """float64, except where Megatron asks for less."""
    if given.get("overlap_moe_expert_parallel_comm"):
        return "bfloat16"
    return "float32" if given.get("moe_token_dispatcher_type") == "flex" else "float64"


@cache
def _fields(is_latent: bool) -> frozenset[str]:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if is_latent else TransformerConfig
    return frozenset(field.name for field in dataclasses.fields(kind))


def _config(given: dict[str, Any], num_layers: int) -> Iterator[tuple[str, Any]]:
    known = _fields("multi_latent_attention" in given) - OF_THE_TOY
    for flag, value in given.items():
        name = OTHER_NAMES.get(flag, flag)
        if name in known and _row(flag) is None:
            yield name, min(value, AT_MOST[name]) if name in AT_MOST else value
    if "moe_layer_freq" in given:
        yield "moe_layer_freq", [0] + [1] * (num_layers - 1)
    if "squared_relu" in given:
        yield "activation_func", "squared_relu"  # by name, as toys are known by their text


def _row(flag: str) -> str | None:
    return next((said for name, said in DROPPED.items() if flag.startswith(name)), None)


def _dropped(given: dict[str, Any]) -> set[str]:
    return {said for flag in given if (said := _row(flag))}
