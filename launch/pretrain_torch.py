# SPDX-License-Identifier: Apache-2.0
"""Pre-train a Hugging Face mixture-of-experts model on bytes in a plain PyTorch loop.

torchrun --nproc_per_node 4 launch/pretrain_torch.py --model configs/models/mixtral_tiny.json \
  --config configs/strategies/fssdp.json
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from console import WindowSampler, plain_errors, read_json, read_text
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ds_moe_ext

SCRIPT = "pretrain_torch"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="model file of a Hugging Face family")
    add("--config", type=Path, required=True, help="JSON with a ds_moe_ext block")
    add("--shard", action="store_true", help="fully_shard in place of DistributedDataParallel")
    add("--steps", type=int, default=20, help="of the optimizer, in all")
    add("--micro_batches", type=int, default=1, help="of a step, on each rank")
    add("--sequence_length", type=int, default=128, help="bytes in a window")
    add("--data", type=Path, help="file or folder of text; default: Python's standard library")
    add("--save", type=Path, help="folder for a checkpoint after the last step")
    add("--resume", type=Path, help="folder of the checkpoint to resume from")
    return parser.parse_args()


def build_model(path: Path) -> Any:
    """The model that a file describes, on this rank's device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    file = read_json(path, "--model")
    torch.manual_seed(1)
    needed = {"output_router_logits": True, "use_cache": False}
    config = AutoConfig.for_model(file["family"], **{**file["config"], **needed})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_config(config).to(device)


def train(arguments: argparse.Namespace) -> None:
    """From the start or from a checkpoint. Collective."""
    with plain_errors(SCRIPT):
        model = build_model(arguments.model)
        moe = ds_moe_ext.attach(model, arguments.config, micro_batches=arguments.micro_batches)
    if arguments.shard:
        for block in model.get_submodule("model.layers").children():
            fully_shard(block, ignored_params=moe.expert_parameters)
        fully_shard(model, ignored_params=moe.expert_parameters)
    wrapped = model if arguments.shard else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    moe.watch(optimizer)
    first = 0
    saved: dict[str, Any]
    if arguments.resume:
        saved = {"moe": moe.state_dict(), "step": first}
        checkpoint.load(saved, checkpoint_id=arguments.resume)
        moe.load_state_dict(saved["moe"])
        first = saved["step"]
    text = read_text(arguments.data)
    sampler = WindowSampler(
        text=text.training,
        source=text.source,
        sequence_length=arguments.sequence_length,
        micro_batch_size=4,
        num_micro_steps=arguments.micro_batches,
        num_ranks=dist.get_world_size(),
        seed=1,
    )
    for step in range(first, arguments.steps):
        for number in range(arguments.micro_batches):
            is_last = number == arguments.micro_batches - 1
            with contextlib.ExitStack() as stack:
                if arguments.shard:
                    model.set_requires_gradient_sync(is_last)
                elif not is_last:
                    stack.enter_context(wrapped.no_sync())
                if not is_last:
                    stack.enter_context(moe.no_sync())
                ids = sampler.batch(step, number, dist.get_rank()).input_ids.to(moe.device)
                loss = wrapped(input_ids=ids, labels=ids).loss / arguments.micro_batches
                loss.backward()
                moe.saw_loss(loss * arguments.micro_batches)
        norm = moe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            total = float(loss.detach()) * arguments.micro_batches
            print(f"step {step + 1}: loss {total:.4f}, norm {float(norm):.3f}", flush=True)
    if arguments.save:
        saved = {"moe": moe.state_dict(), "step": arguments.steps}
        checkpoint.save(saved, checkpoint_id=arguments.save)


def main() -> None:
    """Train between the groups' beginning and their end."""
    arguments = parse_arguments()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    dist.init_process_group()
    train(arguments)  # the model ends in it: a wrapper that outlives the groups may hang
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
