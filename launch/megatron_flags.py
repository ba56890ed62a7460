# SPDX-License-Identifier: Apache-2.0
"""The command line of `pretrain_megatron.py`: Megatron-LM's flags, and a few of ours."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console import named, read_json
from gpt_megatron import Architecture, read_architecture
from text import Text, read_text

WARMUP_FRACTION = 0.15
ABOUT = """Pre-train a mixture-of-experts language model on bytes under Megatron-core. Flags are
Megatron-LM's, and a few of ours."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=ABOUT, allow_abbrev=False)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="model file, see configs/models/")
    add("--num-layers", type=int, help="replaces the number of layers of the model file")
    add("--seq-length", type=int, default=128, help="bytes in a window")
    add("--data", type=Path, help="file or folder of text; default: Python's standard library")
    add("--output", type=Path, help="folder for results; default: runs/megatron/<strategy>")
    add("--seed", type=int, default=1, help="of weights and of the order of the text")
    add("--ds-moe-ext-config", type=Path, metavar="FILE", help="with a block as configs/strategies")

    add = parser.add_argument_group("training").add_argument
    add("--micro-batch-size", type=int, default=8, help="windows in a micro-batch of a rank")
    add("--global-batch-size", type=int, help="windows in a step; default: one micro-batch a rank")
    add("--train-iters", type=int, default=200)
    add("--lr", type=float, default=2e-3)
    add("--min-lr", type=float, help="default: a tenth of --lr")
    add("--lr-warmup-iters", type=int, help=f"default: {WARMUP_FRACTION:.0%}% of --lr-decay-iters")
    add("--lr-decay-iters", type=int, help="default: --train-iters")
    add("--weight-decay", type=float, default=0.1)
    add("--clip-grad", type=float, default=1.0)
    add("--bf16", action="store_true")
    add("--eval-interval", type=int, default=0, help="in steps; 0: after the last step only")
    add("--eval-iters", type=int, default=4)
    add("--save", type=Path, help="folder for a checkpoint after the last step")
    add("--save-interval", type=int, default=0, help="save also every so many steps")
    add("--load", type=Path, help="folder of a checkpoint to go on from")

    add = parser.add_argument_group("parallelism").add_argument
    add("--tensor-model-parallel-size", type=int, default=1)
    add("--pipeline-model-parallel-size", type=int, default=1)
    add(
        "--num-virtual-stages-per-pipeline-rank",
        "--virtual-pipeline-model-parallel-size",
        dest="virtual_pipeline_model_parallel_size",
        type=int,
    )
    add("--expert-model-parallel-size", type=int, default=1)
    add("--expert-tensor-parallel-size", type=int, help="default: that of the other layers")
    add("--sequence-parallel", action="store_true")
    add("--use-distributed-optimizer", action="store_true")
    add("--overlap-grad-reduce", action="store_true")
    add("--overlap-param-gather", action="store_true")
    add("--recompute-granularity", choices=("full", "selective"))
    add("--recompute-method", choices=("uniform", "block"))
    add("--recompute-num-layers", type=int)
    add("--recompute-modules", nargs="+", metavar="MODULE")

    add = parser.add_argument_group("experts").add_argument
    add("--num-experts", dest="num_moe_experts", type=int)
    add("--moe-router-topk", type=int)
    add("--moe-router-load-balancing-type")
    add("--moe-aux-loss-coeff", type=float)
    add("--moe-token-dispatcher-type", default="alltoall")
    add("--moe-grouped-gemm", action="store_true")
    add("--moe-expert-capacity-factor", type=float)
    add("--moe-pad-expert-input-to-capacity", action="store_true")
    add("--moe-shared-expert-intermediate-size", type=int)
    return _complete(parser.parse_args())


def _complete(arguments: argparse.Namespace) -> argparse.Namespace:
    """Fill in defaults that follow from other arguments."""
    if arguments.min_lr is None:
        arguments.min_lr = arguments.lr / 10
    if arguments.lr_decay_iters is None:
        arguments.lr_decay_iters = arguments.train_iters
    if arguments.lr_warmup_iters is None:
        arguments.lr_warmup_iters = int(WARMUP_FRACTION * arguments.lr_decay_iters)
    return arguments


@dataclass(frozen=True, eq=False)
class Run:
    """What the command line asks for, once the files it names are read."""

    arguments: argparse.Namespace
    ds_moe_ext: dict[str, Any] | None  # what --ds-moe-ext-config holds
    strategy: str  # "plain" without an enabled ds_moe_ext block
    output: Path
    text: Text
    architecture: Architecture

    @property
    def dtype(self) -> str:
        """Of weights in forward."""
        return "bf16" if self.arguments.bf16 else "fp32"


def read_run(arguments: argparse.Namespace) -> Run:
    """Read the files that the command line names, and check what Megatron does not."""
    if arguments.train_iters < 1:
        raise ValueError(f"--train-iters {arguments.train_iters} trains nothing; give 1 or more")
    if arguments.save_interval and arguments.save is None:
        raise ValueError(f"--save-interval {arguments.save_interval} needs --save FOLDER")
    path = arguments.ds_moe_ext_config
    document = None if path is None else read_json(path, "--ds-moe-ext-config")
    name = named(document or {}, arguments.output, Path("runs/megatron"))
    text, architecture = read_text(arguments.data), read_architecture(arguments)
    return Run(arguments, document, name.strategy, name.output, text, architecture)
