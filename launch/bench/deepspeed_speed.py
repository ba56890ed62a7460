# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of our strategies beside what a DeepSpeed user has today, in one run.

`torchrun --nproc_per_node 4 launch/bench/deepspeed_speed.py
--model configs/models/mixtral_tiny.json`
`... --strategies fssdp ep`: the first one named is compared with all others.
`... --rounds 16 --steps_per_round 3`: as in docs/results.md; 24 rounds for 4 ranks on 2 cores.

All contenders are built in the same processes and take turns, a few steps each, in an order that
rotates, so that a machine whose speed drifts slows them alike; ratios are paired by round.

`... --model configs/models/public/qwen3_30b_a3b.json --config '{"num_hidden_layers": 2}'
--micro_batch_size 1 --micro_batches 8 --sequence_length 4096 --profiled 2`: on one GPU, and
whether it waits for its host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from rich.console import Console
from rich.table import Table
from rotation import Contender, build_each, covered_us, kernels_of, measure, show

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script sees its own folder alone

from console import Batch, WindowSampler, read_json, read_text
from pretrain_deepspeed import GPT_MOE, LanguageModel, model_of


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--config", type=json.loads, default={}, help="JSON: keys of the model, over the file's")
    add("--host", type=Path, default=Path("configs/hosts/deepspeed_plain.json"))
    add("--strategies", nargs="+", default=["ep"], help="of ds_moe_ext; their blocks: --block")
    add("--block", type=json.loads, default={}, help="JSON: strategy blocks and other keys")
    add("--rounds", type=int, default=12)
    add("--steps_per_round", type=int, default=5)
    add("--sequence_length", type=int, default=128)
    add("--micro_batch_size", type=int, help="of a rank; the host's file has one, too")
    add("--micro_batches", type=int, help="a step, likewise")
    add("--profiled", type=int, default=0, help="steps of each at the end; a GPU's busy time")
    add("--seed", type=int, default=1)
    add("--zero_stage", type=int, default=1)
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    add("--json", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    arguments.ep_size = None
    return arguments


def documents(arguments: argparse.Namespace, family: str, world_size: int) -> dict[str, Any]:
    """DeepSpeed JSON of each contender."""
    plain = read_json(arguments.host, "--host")
    plain["zero_optimization"] = {"stage": arguments.zero_stage}
    plain["bf16"] = {"enabled": arguments.dtype == "bf16"}
    if arguments.micro_batch_size:
        plain["train_micro_batch_size_per_gpu"] = arguments.micro_batch_size
    if arguments.micro_batches:
        plain["gradient_accumulation_steps"] = arguments.micro_batches
    found = {}
    for strategy in arguments.strategies:
        ours = {
            "enabled": True,
            "strategy": strategy,
            "expert_parallel_size": world_size,
            "report": {"enabled": False, "trace_step": None},
            **arguments.block,
        }
        found[f"ds_moe_ext {strategy}"] = {**plain, "ds_moe_ext": ours}
    if family == GPT_MOE:
        found[f"deepspeed.moe, ep_size {world_size}"] = plain
    else:
        block = {"enabled": True, "autoep_size": world_size, "preset_model": family}
        found[f"DeepSpeed AutoEP, size {world_size}"] = {**plain, "expert_parallel": block}
        found["Hugging Face, data parallel"] = plain
    return found


def contender(
    arguments: argparse.Namespace,
    described: Mapping[str, Any],
    name: str,
    document: dict[str, Any],
) -> Contender:
    """Build one engine with its own model. Collective."""
    arguments.ep_size = dist.get_world_size() if name.startswith("deepspeed.moe") else None
    with torch.device(get_accelerator().current_device_name()):
        model: LanguageModel = model_of(described, arguments)
    engine, *_ = deepspeed.initialize(
        model=model.module, model_parameters=model.module.parameters(), config=document
    )
    sampler = WindowSampler(
        text=read_text(None).training,
        source="the standard library",
        sequence_length=arguments.sequence_length,
        micro_batch_size=engine.train_micro_batch_size_per_gpu(),
        num_micro_steps=engine.gradient_accumulation_steps(),
        num_ranks=dist.get_world_size(),
        seed=arguments.seed,
    )

    def step(number: int) -> None:
        for micro_step in range(sampler.num_micro_steps):
            batch = sampler.batch(number, micro_step, dist.get_rank())
            batch = Batch(*(tensor.to(engine.device) for tensor in batch))
            engine.backward(engine(**model.arguments(batch)).loss)
            engine.step()

    return Contender(name, step)


def show_busy(
    contenders: Sequence[Contender], seconds: Mapping[str, Sequence[float]], profiled: int
) -> dict[str, float]:
    """Print in how much of a step a kernel ran, and give it by contender. Collective."""
    parts = {}
    table = Table(title="Kernels, by torch's profiler, in steps of their own", title_justify="left")
    for heading in ("contender", "ms a step", "kernels ms", "busy", "kernels"):
        table.add_column(heading)

    def whole_step(each: Contender, number: int) -> None:
        each.step(number)
        get_accelerator().synchronize()

    for each in contenders:
        steps = [kernels_of(partial(whole_step, each, number)) for number in range(profiled)]
        kernels_ms = statistics.median(covered_us(events) / 1e3 for events in steps)
        wall_ms = 1e3 * statistics.median(seconds[each.name])
        num_kernels = statistics.median(len(events) for events in steps)
        parts[each.name] = kernels_ms / wall_ms
        busy = f"{parts[each.name]:.0%}"
        table.add_row(each.name, f"{wall_ms:.1f}", f"{kernels_ms:.1f}", busy, f"{num_kernels:.0f}")
    if dist.get_rank() == 0:
        Console().print(table)
    return parts


def main() -> None:
    """Build, take turns, print."""
    arguments = parse_arguments()
    deepspeed.init_distributed()
    world_size = dist.get_world_size()
    described = read_json(arguments.model, "--model")
    described["config"] = {**described["config"], **arguments.config}
    found = documents(arguments, described["family"], world_size)
    builders = {
        name: partial(contender, arguments, described, name, document)
        for name, document in found.items()
    }
    contenders, skipped = build_each(builders)
    seconds = measure(contenders, rounds=arguments.rounds, steps=arguments.steps_per_round)
    profiled = arguments.profiled
    busy = show_busy(contenders, seconds, profiled) if profiled else None
    if dist.get_rank() == 0:
        plain = next(iter(found.values()))
        rows = plain["train_micro_batch_size_per_gpu"] * plain["gradient_accumulation_steps"]
        tokens = rows * world_size * arguments.sequence_length
        title = (
            f"{arguments.model.stem}, {world_size} ranks, {arguments.dtype}, ZeRO "
            f"{arguments.zero_stage}, {arguments.rounds} x {arguments.steps_per_round} steps"
        )
        show(seconds, tokens, title, arguments.json, skipped, busy=busy)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
