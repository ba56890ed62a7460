# SPDX-License-Identifier: Apache-2.0
"""A small Mixtral of Hugging Face under DeepSpeed, which trains on its own source.
Nothing here knows of ds_moe_ext: the section "ds_moe_ext" of deepspeed_mixtral.json is all.
deepspeed --num_accelerators 2 examples/deepspeed_mixtral.py --deepspeed_config FILE.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

STEPS, SAMPLES, LENGTH = 10, 4, 64


def main() -> None:
    """Train for a few steps; rank 0 prints losses."""
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    arguments = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = MixtralForCausalLM(
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
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=arguments.deepspeed_config
    )

    text = torch.tensor(list(Path(__file__).read_bytes()))
    draw = torch.Generator().manual_seed(dist.get_rank())  # every rank has its own samples
    for step in range(1, STEPS + 1):
        starts_B = torch.randint(len(text) - LENGTH, (SAMPLES, 1), generator=draw)
        ids_BT = text[starts_B + torch.arange(LENGTH)].to(engine.device)
        loss = engine(input_ids=ids_BT, labels=ids_BT).loss
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
