# SPDX-License-Identifier: Apache-2.0
"""A small mixture-of-experts GPT of Megatron-core alone, which trains on its own source.
pretrain_gpt.py of Megatron-LM gets the flag from ds_moe_ext; this script has it as its own.
torchrun --nproc_per_node 2 examples/megatron_core.py --ds-moe-ext-config fssdp
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

import ds_moe_ext

STEPS, SAMPLES, LENGTH = 10, 4, 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build_model(config: TransformerConfig) -> Any:
    """In Megatron's data parallel wrapper."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(config, spec, 256, LENGTH).to(DEVICE)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def batches() -> Iterator[Tensor]:
    """Samples of this rank's own, int64 ``[B, T]``."""
    text = torch.tensor(list(Path(__file__).read_bytes()), device=DEVICE)
    draw = torch.Generator().manual_seed(dist.get_rank())
    while True:
        starts_B = torch.randint(len(text) - LENGTH - 1, (SAMPLES, 1), generator=draw)
        yield text[(starts_B + torch.arange(LENGTH + 1)).to(DEVICE)]


def forward_step(
    data: Iterator[Tensor], model: nn.Module
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    """One micro-batch, as Megatron's schedules ask for it."""
    ids_BT = next(data)
    position_BT = torch.arange(LENGTH, device=DEVICE).expand(SAMPLES, LENGTH)
    losses_BT = model(ids_BT[:, :-1], position_BT, None, labels=ids_BT[:, 1:])
    return losses_BT, mean_loss


def mean_loss(losses_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """To differentiate, and to report."""
    loss = losses_BT.mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule divides the first in place


def train() -> None:
    """Train for a few steps; rank 0 prints losses. Collective."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    torch.manual_seed(0)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=dist.get_world_size(),
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = build_model(config)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=2e-3), [model])
    run_schedule, data = get_forward_backward_func(), batches()
    for step in range(1, STEPS + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        (reported,) = run_schedule(
            forward_step_func=forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=SAMPLES,
            forward_only=False,
        )
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {reported['loss'].item():.4f}", flush=True)
    parallel_state.destroy_model_parallel()


def main() -> None:
    """Without the flag Megatron's own code runs the experts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ds-moe-ext-config", metavar="FILE", help="or of configs/strategies")
    arguments = parser.parse_args()
    if arguments.ds_moe_ext_config:
        ds_moe_ext.use(arguments.ds_moe_ext_config)  # before the model is built
    if DEVICE.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    dist.init_process_group()
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
