# SPDX-License-Identifier: Apache-2.0
"""Host time of Megatron's own MoE layer with and without replicas, measured without a GPU.

`python launch/bench/host_megatron.py --ranks 8 --slots 1 8`

As `host_path.py`, whose clock, counts and table these are: one process stands for one of all ranks,
experts are tiny, grouped GEMMs return at once. Layers are transformer blocks of Megatron-core with
nothing but an MoE layer in them, with its router, in its DDP. All are compared with stock
Megatron's. The update of weights, which is the same for all, is left out.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fake_world import CPU, Batch, Sizes, as_on_cuda, fake_world, inline
from host_path import Result, in_turn, table_of
from rich.console import Console
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script sees its own folder alone

import megatron_on_cpu

from ds_moe_ext.core.layout import Grid
from ds_moe_ext.report.recorder import Recorder

_NO_REPORT = {"report": {"enabled": False, "trace_step": None}}
_FSSDP = {"overlap_degree": 8, "replicas_per_rank": 2, "reshard_interval": 0}
WAYS: Mapping[str, dict[str, Any] | None] = {
    "Megatron, alltoall": None,
    "ep": {"strategy": "ep"},
    "fssdp": {"strategy": "fssdp", "fssdp": _FSSDP},
    "prophet": {"strategy": "prophet"},
    "fssdp, our layer": {"strategy": "fssdp", "fssdp": _FSSDP, "megatron": {"layer": "program"}},
}
"""Blocks by name; the first, without one, is what the others are compared with."""


class _AtOnce(torch.autograd.Function):
    """A grouped GEMM whose launch is all that there is to it, and gradients of weights that are
    added to ``main_grad`` in the same launch, as Transformer Engine does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int, *weights: Tensor) -> Tensor:
        ctx.widths, ctx.weights = (x.shape[-1], width), weights
        return x.new_zeros(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        for weight in ctx.weights:
            weight.grad_added_to_main_grad = True
        dummies = (torch.zeros_like(weight) for weight in ctx.weights)
        return grad.new_zeros(*grad.shape[:-1], ctx.widths[0]), None, *dummies


class GroupedLinear(nn.Module):
    """What ``TEGroupedMLP`` asks of Transformer Engine's: a weight for each expert."""

    def __init__(self, num_gemms: int, into: int, out: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        self.num_gemms, self.width = num_gemms, out
        for number in range(num_gemms):
            weight = nn.Parameter(torch.zeros(out, into, dtype=config.params_dtype))
            vars(weight).update(allreduce=False)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, None]:
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        return _AtOnce.apply(x, self.width, *weights), None


@dataclass(frozen=True)
class Job:
    """What one process measures."""

    ranks: int
    sizes: Sizes
    only: Sequence[str]
    rounds: int
    is_settled: bool
    micro_batches: int


class Layers:
    """Megatron's blocks under a way; as ``fake_world.Ours``."""

    def __init__(self, name: str, block: dict[str, Any] | None, job: Job) -> None:
        from ds_moe_ext.hosts.megatron import engine
        from ds_moe_ext.patches.megatron import forget, use

        sizes, ranks, self.name = job.sizes, job.ranks, name
        self._schedules, self._micro_batches = engine.SCHEDULES, job.micro_batches
        forget()
        if block is not None:
            use({"ds_moe_ext": {"enabled": True, **_NO_REPORT, **block}})
        from megatron.core.distributed import DistributedDataParallel as DDP
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.moe.experts import TEGroupedMLP
        from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.transformer_block import (
            TransformerBlock,
            TransformerBlockSubmodules,
        )
        from megatron.core.transformer.transformer_layer import (
            TransformerLayer,
            TransformerLayerSubmodules,
        )

        config = TransformerConfig(
            num_layers=sizes.layers,
            hidden_size=sizes.width,
            ffn_hidden_size=sizes.expert_width,
            num_attention_heads=1,
            expert_model_parallel_size=ranks,
            num_moe_experts=sizes.experts,
            moe_router_topk=sizes.top_k,
            moe_token_dispatcher_type="alltoall",
            moe_grouped_gemm=True,
            moe_aux_loss_coeff=0.0,
            add_bias_linear=False,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            hidden_dropout=0.0,
        )
        linears = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        grouped = ModuleSpec(TEGroupedMLP, submodules=linears)
        moe = ModuleSpec(MoELayer, submodules=MoESubmodules(experts=grouped))
        modules = TransformerLayerSubmodules(mlp=moe, mlp_bda=get_bias_dropout_add)
        alone = ModuleSpec(TransformerLayer, submodules=modules)
        specs = TransformerBlockSubmodules(layer_specs=[alone] * sizes.layers)
        torch.manual_seed(0)
        stack = TransformerBlock(config, specs, pre_process=False, post_process=False)
        self.model: Any = DDP(config, DistributedDataParallelConfig(), stack)
        self._stack = stack
        # Ranks of a fake world all say what this one says.
        grids = engine.Grids(Grid(ranks, ranks, 1, tuple(range(ranks))), (), 0)
        with mock.patch.object(engine, "grids", lambda model: grids):
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(optimizer="sgd", lr=0.0, clip_grad=0.0),
                [self.model],
                use_gloo_process_groups=False,
            )
        forget()

    def turn(self) -> AbstractContextManager[None]:
        """In which all of a step happens."""
        return nullcontext()

    def forward(self, batch: Batch) -> Tensor:
        """Tokens of the last micro-batch through all blocks; those before it go there and back."""
        self.model.zero_grad_buffer()
        self._schedules.begin(self._micro_batches, forward_only=False)
        hidden = batch.x_TD[:, None]
        self._stack.set_input_tensor(hidden)
        with self.model.no_sync():
            for _ in range(self._micro_batches - 1):
                self.model(hidden, None).backward(torch.ones_like(hidden))
        made: Tensor = self.model(hidden, None)
        return made

    def after_step(self, number: int) -> None:
        """What Megatron's schedule and its optimizer do behind backward."""
        self._schedules.end()
        self.model.finish_grad_sync()
        self.optimizer.step()


@contextmanager
def megatron(ranks: int) -> Iterator[None]:
    """Its groups, in a fake world."""
    with ExitStack() as stack:
        # Without the mode that looks at each call to torch, which costs and is not there on a GPU.
        shims = [one for one in megatron_on_cpu.SHIMS if one.id != "device_names"]
        stack.enter_context(mock.patch.object(megatron_on_cpu, "SHIMS", shims))
        megatron_on_cpu.install()
        stack.callback(megatron_on_cpu.remove)
        stack.enter_context(fake_world(ranks))
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.optimizer.optimizer import ChainedOptimizer

        # As in host_path.py: without what the report takes.
        stack.enter_context(mock.patch.object(Recorder, "after_step", lambda *_: None))
        stack.enter_context(mock.patch.object(ChainedOptimizer, "step", lambda _: (True, 0.0, 0)))
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=ranks, create_gloo_process_groups=False
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        stack.enter_context(as_on_cuda())
        stack.enter_context(inline())  # as one thread issues all on CUDA
        yield


def measure(job: Job) -> list[Result]:
    """All ways, turn by turn. In a process of its own."""
    torch.set_num_threads(1)
    names = [name for name in WAYS if not job.only or name in job.only]
    with megatron(job.ranks):
        with megatron_on_cpu.CudaMeansCpu():
            built = [Layers(name, WAYS[name], job) for name in names]
        title = f"{job.ranks} ranks"
        return in_turn(
            built, job.sizes, job.rounds, title, lambda number: 0 if job.is_settled else number
        )


def main() -> None:
    """Measure each world in a process of its own, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[8])
    add("--slots", type=int, nargs="+", default=[1, 8], help="experts a rank")
    add("--only", nargs="+", choices=[*WAYS], default=[])
    add("--layers", type=int, default=4)
    add("--tokens", type=int, default=64, help="of a rank")
    add("--top_k", type=int, default=2)
    add("--micro-batches", type=int, default=1, help="of a step; times are of all")
    add("--rounds", type=int, default=24)
    add("--settled", action="store_true", help="loads stay, and so do plans")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    for ranks, slots in product(given.ranks, given.slots):
        sizes = Sizes(given.layers, ranks * slots, given.tokens, given.top_k, device=CPU)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            found = process.submit(
                measure,
                Job(ranks, sizes, given.only, given.rounds, given.settled, given.micro_batches),
            ).result()
        console.print(table_of(f"{ranks} ranks, {slots} experts each", found))
    load = f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
    console.print(f"{load}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
