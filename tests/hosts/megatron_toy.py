# SPDX-License-Identifier: Apache-2.0
"""A tiny GPTModel of Megatron-core, and the record of a run that trains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.hosts.megatron_weights import draw, draw_moved

VOCABULARY = 64
DTYPES = {
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class MegatronRun:
    """A training run."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    num_layers: int = 2
    hidden: int = 32
    ffn: int = 64
    heads: int = 4
    num_experts: int = 4
    topk: int = 2
    length: int = 16
    batch: int = 2
    num_microbatches: int = 1
    steps: int = 3
    dtype: str = "float32"
    optimizer: Literal["none", "ddp", "distributed"] = "ddp"
    learning_rate: float = 3e-3
    clip: float = 1.0
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None
    recompute: Literal["none", "moe", "full"] = "none"
    experts: Literal["sequential", "te_grouped", "legacy_grouped"] = "sequential"
    swiglu: bool = False
    bias: bool = False
    aux_coefficient: float = 0.01
    shared_ffn: int | None = None
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    config: tuple[tuple[str, Any], ...] = ()
    ddp: tuple[tuple[str, Any], ...] = ()
    stepping: tuple[tuple[str, Any], ...] = ()
    seed: int = 7


RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def transformer_config(run: MegatronRun) -> Any:
    """The run's TransformerConfig."""
    from megatron.core.transformer import TransformerConfig

    fields: dict[str, Any] = {
        "num_layers": run.num_layers,
        "hidden_size": run.hidden,
        "ffn_hidden_size": run.ffn,
        "num_attention_heads": run.heads,
        "tensor_model_parallel_size": run.tp,
        "pipeline_model_parallel_size": run.pp,
        "virtual_pipeline_model_parallel_size": run.vpp,
        "context_parallel_size": run.cp,
        "expert_model_parallel_size": run.ep,
        "expert_tensor_parallel_size": run.tp if run.etp is None else run.etp,
        "sequence_parallel": run.tp > 1,
        "params_dtype": DTYPES[run.dtype],
        "pipeline_dtype": DTYPES[run.dtype],
        "overlap_p2p_comm": run.vpp is not None,  # Megatron-LM asks for it where pp is 2
        "batch_p2p_comm": run.vpp is None,
        "bf16": run.dtype == "bfloat16",
        "fp16": run.dtype == "float16",
        "use_cpu_initialization": True,
        "add_bias_linear": run.bias,
        "gated_linear_unit": run.swiglu,
        "activation_func": nn.functional.silu if run.swiglu else nn.functional.gelu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "num_moe_experts": run.num_experts,
        "moe_router_topk": run.topk,
        "moe_router_load_balancing_type": "aux_loss" if run.aux_coefficient else "none",
        "moe_aux_loss_coeff": run.aux_coefficient,
        "moe_token_dispatcher_type": run.dispatcher,
        "moe_grouped_gemm": run.experts != "sequential",
        "moe_use_legacy_grouped_gemm": run.experts == "legacy_grouped",
        "moe_shared_expert_intermediate_size": run.shared_ffn,
        "moe_expert_capacity_factor": run.capacity_factor,
        "moe_pad_expert_input_to_capacity": run.pad_to_capacity,
        "gradient_accumulation_fusion": False,
        **RECOMPUTE[run.recompute],
    }
    return TransformerConfig(**{**fields, **dict(run.config)})


class GroupedLinear(nn.Module):
    """What TEGroupedMLP asks of Transformer Engine's linears: one weight per expert, by torch."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool,
        skip_bias_add: bool,
        dim: int,
        **named: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.has_bias, self.returns_bias = num_gemms, bias, skip_bias_add
        shape = [output_size, input_size]
        shape[dim] //= config.expert_tensor_parallel_size
        is_whole = config.expert_model_parallel_size == 1
        for number in range(num_gemms):
            weight = nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
            vars(weight).update(allreduce=is_whole, tensor_model_parallel=True, partition_dim=dim)
            self.register_parameter(f"weight{number}", weight)
            if bias:
                vector = nn.Parameter(torch.zeros(shape[0], dtype=config.params_dtype))
                vars(vector).update(allreduce=is_whole, partition_dim=0 if dim == 0 else -1)
                self.register_parameter(f"bias{number}", vector)

    def forward(self, rows: Tensor, m_splits: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        biases: list[Tensor] = []
        if self.has_bias:
            biases = [getattr(self, f"bias{number}") for number in range(self.num_gemms)]
        parts = []
        for number, part in enumerate(torch.split(rows, m_splits)):
            added = biases[number] if biases and not self.returns_bias else None
            parts.append(nn.functional.linear(part, getattr(self, f"weight{number}"), added))
        return torch.cat(parts), biases if biases and self.returns_bias else None


def layer_spec(run: MegatronRun, config: Any, vp_stage: int | None) -> Any:
    """The specification of a pipeline stage's layers: Megatron's local one."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    if run.experts == "te_grouped":
        linears = MLPSubmodules(
            linear_fc1=ModuleSpec(GroupedLinear, params={"dim": 0}),
            linear_fc2=ModuleSpec(GroupedLinear, params={"dim": 1}),
        )
        experts = ModuleSpec(TEGroupedMLP, submodules=linears)
        for layer in spec.layer_specs:
            layer.submodules.mlp.submodules.experts = experts
    return spec


def model_chunks(run: MegatronRun, config: Any) -> list[Any]:
    """This rank's chunks of the model, in DDP, as Megatron-LM wraps them."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.module import Float16Module

    chunks: list[Any] = []
    for number in range(run.vpp or 1):
        stage = number if run.vpp else None
        place: dict[str, Any] = {"ignore_virtual": False, "vp_stage": stage}
        spec = layer_spec(run, config, stage)
        predicting = get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=False, vp_stage=stage
        )
        chunks.append(
            GPTModel(
                config,
                spec,
                VOCABULARY,
                run.length,
                pre_process=parallel_state.is_pipeline_first_stage(**place),
                post_process=parallel_state.is_pipeline_last_stage(**place),
                # Megatron-LM asks for it where layers predict more tokens.
                position_embedding_type="rope" if config.mtp_num_layers else "learned_absolute",
                mtp_block_spec=predicting,
                vp_stage=stage,
            )
        )
    draw(chunks, run.swiglu, run.num_experts)
    is_half = config.bf16 or config.fp16
    if is_half:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    reduction: dict[str, Any] = {
        "grad_reduce_in_fp32": is_half,
        "overlap_grad_reduce": run.overlap_grad_reduce,
        "overlap_param_gather": run.overlap_param_gather,
        "use_distributed_optimizer": run.optimizer == "distributed",
        "bucket_size": run.bucket_size,
    }
    wanted = DistributedDataParallelConfig(**{**reduction, **dict(run.ddp)})
    wrapped = [
        DistributedDataParallel(config, wanted, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    draw_moved(wrapped, run.swiglu, run.num_experts)
    return wrapped
