# SPDX-License-Identifier: Apache-2.0
"""A small Mixtral in a PyTorch loop of one's own, in DistributedDataParallel, on its own source.
The block is named: a JSON file, or one of configs/strategies, as fssdp.
torchrun --nproc_per_node 2 examples/plain_torch.py fssdp
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM

import ds_moe_ext

STEPS, SAMPLES, LENGTH = 10, 4, 64


def train(block: str) -> None:
    """Train for a few steps; rank 0 prints losses. Collective.

    Args:
        block: file that has it, or a name of ``configs/strategies``.
    """
    torch.manual_seed(0)
    model: Any = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    )
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    moe = ds_moe_ext.attach(model, block)  # before the model is wrapped
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    moe.watch(optimizer)

    text = torch.tensor(list(Path(__file__).read_bytes()))
    draw = torch.Generator().manual_seed(dist.get_rank())  # every rank has its own samples
    for step in range(1, STEPS + 1):
        starts_B = torch.randint(len(text) - LENGTH, (SAMPLES, 1), generator=draw)
        ids_BT = text[starts_B + torch.arange(LENGTH)].to(moe.device)
        loss = wrapped(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        moe.saw_loss(loss)  # for the report
        moe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    dist.init_process_group()
    train(sys.argv[1])
    dist.destroy_process_group()
