# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of our strategies under Megatron-core beside Megatron's own MoE, in one run.

`torchrun --nproc_per_node 4 launch/bench/megatron_speed.py --strategies ep --model
configs/models/mixtral_tiny.json --bf16 --expert-model-parallel-size 4`: the first strategy that is
named is compared with all others. Other flags are those of pretrain_megatron.py.
`... --rounds 10 --steps-per-round 3 --data docs`: as in docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rotation import Contender, build_each, measure, show

from ds_moe_ext.patches import megatron

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script sees its own folder alone

import megatron_on_cpu
from console import plain_errors
from pretrain_megatron import (
    SCRIPT,
    Run,
    Trainer,
    leave_out_warnings,
    parse_arguments,
    read_run,
    start_ranks,
)


def parse_own() -> argparse.Namespace:
    """Read the flags of the comparison; the others stay for the trainer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--strategies", nargs="+", default=["ep"], help="of ds_moe_ext; their blocks: --block")
    add("--block", type=json.loads, default={}, help="JSON: strategy blocks and other keys")
    add("--rounds", type=int, default=12)
    add("--steps-per-round", type=int, default=5)
    add("--json", type=Path, help="JSON file for the results")
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    return own


def builders(
    own: argparse.Namespace, run: Run, device: torch.device, trainers: list[Trainer]
) -> dict[str, Callable[[], Contender]]:
    """Of all contenders, each with its own model and optimizer; ``trainers`` gets each."""
    found = {}
    for strategy in own.strategies:
        report = {"enabled": False, "trace_step": None}
        block = {"enabled": True, "strategy": strategy, "report": report, **own.block}
        found[f"ds_moe_ext {strategy}"] = {"ds_moe_ext": block}
    stock = f"Megatron, {run.arguments.moe_token_dispatcher_type}"
    named: dict[str, dict[str, Any] | None] = {**found, stock: None}

    def build(name: str, document: dict[str, Any] | None) -> Contender:
        if document is None:
            megatron.forget()
        else:
            megatron.use(document)
        trainer = Trainer(run, device)
        trainers.append(trainer)
        return Contender(name, lambda number: trainer.take_step())  # whatever its number

    return {name: partial(build, name, document) for name, document in named.items()}


def main() -> None:
    """Build, take turns, print."""
    own = parse_own()
    leave_out_warnings()
    megatron_on_cpu.install()  # nothing where there are GPUs
    with plain_errors(SCRIPT):
        run = read_run(parse_arguments())
        trainers: list[Trainer] = []
        device = start_ranks(run.arguments)
        contenders, skipped = build_each(builders(own, run, device, trainers))
        seconds = measure(contenders, rounds=own.rounds, steps=own.steps_per_round)
    if dist.get_rank() == 0:
        arguments = run.arguments
        title = (
            f"{arguments.model.stem}, {dist.get_world_size()} ranks, expert parallel "
            f"{arguments.expert_model_parallel_size}, {own.rounds} x {own.steps_per_round} steps"
        )
        show(seconds, trainers[0].tokens_per_step, title, own.json, skipped)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
