# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in Megatron's distributed form, in folders laid out as Megatron-LM lays them out.

Other numbers of ranks can load them, as far as Megatron can cut the optimizer's state anew: without
`--use-distributed-optimizer` any sizes that have experts' parallelism on both sides or on neither.
Nothing in the script draws random numbers once the weights are there, so no generators are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from packaging.version import Version
from torch import Tensor

LATEST = "latest_checkpointed_iteration.txt"
# How the distributed optimizer's state is cut. From 0.15 on as Megatron-LM does by default, for any
# number of data parallel ranks but the same model parallel sizes: `fully_reshardable` would do for
# all, but misplaces state where buckets are padded (upstream, 0.16.1; seen with tied embeddings in
# a pipeline).
CUT = (
    "dp_reshardable"
    if Version(megatron.core.__version__) >= Version("0.15")
    else "fully_sharded_model_space"
)


@dataclass(frozen=True, eq=False)
class Kept:
    """What a checkpoint is made of. All collective.

    Attributes:
        chunks: this rank's part of the model.
        optimizer: with its state.
        scheduler: of the learning rate.
    """

    chunks: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    def save(self, folder: Path, iteration: int) -> None:
        """Write a checkpoint."""
        self._save(folder, iteration)
        if dist.get_rank() == 0:
            (folder / LATEST).write_text(str(iteration))
        dist.barrier()

    def save_beside(self, folder: Path, iteration: int) -> Any:
        """Begin to write one, as Megatron-LM does with `--async-save`.

        Returns:
            For Megatron's queue of such saves, which ends it.
        """
        request = self._save(folder, iteration, async_sharded_save=True)
        if dist.get_rank() == 0:
            request.finalize_fns.append(lambda: (folder / LATEST).write_text(str(iteration)))
        return request

    def _save(self, folder: Path, iteration: int, **how: Any) -> Any:
        path = folder / f"iter_{iteration:07d}"
        if dist.get_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        progress = {"iteration": iteration, "checkpoint_version": 3.0}
        return dist_checkpointing.save(self._state(is_loading=False) | progress, str(path), **how)

    def load(self, folder: Path) -> int:
        """Take over the latest checkpoint of a folder.

        Returns:
            Steps that it had behind it.

        Raises:
            ValueError: there is none, or Megatron cannot load it into this optimizer.
        """
        latest = folder / LATEST
        if not latest.is_file():
            raise ValueError(f"--load {folder} has no file {LATEST}; name the folder of --save")
        path = folder / f"iter_{int(latest.read_text()):07d}"
        start_adam(self.optimizer)
        asked = self._state(is_loading=True)
        has_two = 0 in asked["optimizer"]
        state = dist_checkpointing.load(asked, str(path))
        if (0 in state["optimizer"]) != has_two:
            raise ValueError(
                f"--load {path}: with --expert-model-parallel-size above 1 Megatron keeps a second "
                "optimizer for experts, with 1 it does not, and one cannot load the other's state; "
                "load with a size above 1 what was saved so, and with 1 what was saved with 1"
            )
        for name, module in self._modules().items():
            module.load_state_dict(state[name])
        load_optimizer(self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["opt_param_scheduler"])
        return int(state["iteration"])

    def _modules(self) -> dict[str, MegatronModule]:
        if len(self.chunks) == 1:
            return {"model": self.chunks[0].module}
        return {f"model{index}": chunk.module for index, chunk in enumerate(self.chunks)}

    def _state(self, *, is_loading: bool) -> dict[str, Any]:
        metadata = {"distrib_optim_sharding_type": CUT, "chained_optim_avoid_prefix": True}
        model = {
            name: module.sharded_state_dict(metadata=metadata)
            for name, module in self._modules().items()
        }
        return {
            **model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading, metadata=metadata),
            "opt_param_scheduler": self.scheduler.state_dict(),
        }


# Megatron's distributed optimizer loads what Apex's or Transformer Engine's Adam keeps. Without
# them torch's Adam is used, and (upstream, 0.14 to 0.16) two things stop it: its state has to be
# there already, and the step counts in it must not be.


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    is_chain = isinstance(optimizer, ChainedOptimizer)
    return optimizer.chained_optimizers if is_chain else [optimizer]


def _adams(optimizer: MegatronOptimizer) -> list[torch.optim.Adam]:
    """Those of torch that a distributed optimizer uses."""
    return [
        part.optimizer
        for part in _parts(optimizer)
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam)
    ]


def start_adam(optimizer: MegatronOptimizer) -> None:
    """Give torch's Adam its state before the first step."""
    for adam in _adams(optimizer):
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            adam.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Load, with torch's step counts set aside between Adam's own part and Megatron's."""
    steps: dict[Tensor, Tensor] = {}

    def set_aside(adam: torch.optim.Optimizer) -> None:
        steps.update({parameter: kept.pop("step") for parameter, kept in adam.state.items()})

    adams = _adams(optimizer)
    hooks = [adam.register_load_state_dict_post_hook(set_aside) for adam in adams]
    with torch.no_grad():  # it copies into views of float32 weights
        optimizer.load_state_dict(state)
    for hook in hooks:
        hook.remove()
    for adam in adams:
        for parameter, kept in adam.state.items():
            kept["step"] = steps[parameter].clone()
