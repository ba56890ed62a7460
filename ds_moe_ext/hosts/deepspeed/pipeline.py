# SPDX-License-Identifier: Apache-2.0
"""Stages of DeepSpeed's ``PipelineModule``: the ranks of each, and which pass is the last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn

from ds_moe_ext.core.layout import Grid
from ds_moe_ext.hosts.attachment.host_layer import Found
from ds_moe_ext.hosts.deepspeed.engine_record import record_of
from ds_moe_ext.hosts.steps.host import Passes, Schedules
from ds_moe_ext.hosts.steps.training_run import run_of
from ds_moe_ext.schedule.watch import WATCH
from ds_moe_ext.strategies.settings import BLOCK


@dataclass(frozen=True, eq=False)
class Stages:
    """Who runs which layers of a pipeline.

    Attributes:
        ranks: of each stage, in their order.
        own: number of this rank's stage.
        group: the ranks of this one.
    """

    ranks: tuple[tuple[int, ...], ...]
    own: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, model: nn.Module) -> Stages | None:
        """Of a model that ``refusals`` let through; None where it is no ``PipelineModule``."""
        if not isinstance(model, PipelineModule):
            return None
        ranks = tuple(tuple(each) for each in model.topology().get_axis_comm_lists("data"))
        mpu = model.mpu()
        return cls(ranks, mpu.get_pipe_parallel_rank(), mpu.get_data_parallel_group())

    @property
    def size(self) -> int:
        """Ranks of a stage."""
        return len(self.ranks[self.own])

    def grids(self, grid: Grid) -> tuple[Grid, ...]:
        """Of every stage, from cells of one."""
        return tuple(replace(grid, members=ranks) for ranks in self.ranks)

    def check(self, found: Iterable[Found]) -> None:
        """Whether this rank's stage can take part.

        Raises:
            ValueError: it has no layer to replace, or one that stages share.
        """
        names = [layer.name for layer in found]
        if not names:
            raise ValueError(
                f"{BLOCK} is enabled, but stage {self.own} of {len(self.ranks)} of this "
                "PipelineModule has no MoE layer that it knows or that it was asked for, and "
                "stages reduce the norms of experts together; use fewer stages, or a "
                "partition_method (as 'type:NAME', with the class of the MoE blocks) by which each "
                "has some"
            )
        tied = [name for name in names if name.startswith("tied_modules.")]
        if tied:
            raise ValueError(
                f"{BLOCK} is enabled, but {', '.join(tied)} is of a TiedLayerSpec, whose experts "
                "several stages have; give it a LayerSpec, or leave it out with "
                f"{BLOCK}.moe_layer_pattern"
            )


def num_stages(model: nn.Module) -> int:
    """Of a ``PipelineModule``; 1 of any other model."""
    stages = Stages.of(model)
    return 1 if stages is None else len(stages.ranks)


def is_of_another_stage(model: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether this rank's stage has a copy of a weight that it shares with an earlier one."""
    return isinstance(model, PipelineModule) and bool(getattr(parameter, PIPE_REPLICATED, False))


def go_back_once(model: nn.Module, stages: Stages) -> None:
    """Let a stage's backward, which DeepSpeed starts from one output after the other, wait for the
    gradients of all: a layer's program, and what it sends, can be gone back through once."""
    if stages.own + 1 < len(stages.ranks):  # the last one has one loss
        model.register_forward_hook(lambda _, __, made: _apart(made))


def _apart(made: Any) -> Any:
    """What a stage hands on; where that is several tensors with gradients, cut off behind."""
    if not isinstance(made, tuple):
        return made
    floats = [x for x in made if isinstance(x, Tensor) and x.is_floating_point()]
    if len(floats) < 2 or not all(x.requires_grad for x in floats):
        return made
    leaves = [x.detach().requires_grad_() for x in floats]

    def go_back(_: Tensor) -> None:
        outputs, grads = tuple(floats), [leaf.grad for leaf in leaves]
        floats.clear()
        leaves.clear()  # which hold this hook, where no garbage collector looks
        torch.autograd.backward(outputs, grads)

    leaves[-1].register_post_accumulate_grad_hook(go_back)  # DeepSpeed takes them in order
    left = iter(leaves)
    return tuple(next(left) if any(x is each for each in floats) else x for x in made)


def counted(hosted: nn.Module, schedules: Schedules) -> Passes:
    """Count a layer's passes, of which several are under way at once."""
    passes = Passes(schedules)
    hosted.register_forward_pre_hook(lambda module, _: passes.begins(is_training=module.training))
    hosted.register_forward_hook(lambda _, __, output: passes.watch(output))
    return passes


def train_batch(engine: Any, arguments: Mapping[str, Any], train: Callable[..., Any]) -> Any:
    """All passes of a step.

    Args:
        engine: DeepSpeed's, of a pipeline.
        arguments: of ``train``.
        train: DeepSpeed's ``train_batch``.
    """
    if run_of(engine) is None:
        return train(**arguments)
    schedules = record_of(engine).schedules
    schedules.begin(engine.micro_batches, forward_only=False)
    try:
        with WATCH.host_pass("engine.train_batch"):
            return train(**arguments)
    finally:
        schedules.end()
