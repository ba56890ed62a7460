# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch as a host: every rank trains the model on data of its own, wrapped as it likes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ds_moe_ext.core.comm import sum_in_place
from ds_moe_ext.core.layout import group_among
from ds_moe_ext.hosts import huggingface
from ds_moe_ext.hosts.attachment import experts, replacement, startup_check
from ds_moe_ext.hosts.attachment.grid import grid_of
from ds_moe_ext.hosts.attachment.host_layer import Found
from ds_moe_ext.hosts.attachment.notices import Refusal, refuse
from ds_moe_ext.hosts.attachment.replacement import Around, AttachedLayer, Blueprint
from ds_moe_ext.hosts.attachment.startup_check import cluster_of, start_of
from ds_moe_ext.hosts.meta_model import ADAPTERS, MetaModel
from ds_moe_ext.hosts.steps.expert_moves import Group, States
from ds_moe_ext.hosts.steps.host import Built, ModelGrids, device_names
from ds_moe_ext.hosts.steps.pipeline_costs import DenseGradients
from ds_moe_ext.hosts.steps.training_run import RECORD, Record, Run
from ds_moe_ext.moe.replica_memory import Accumulation, KeptInGrad
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.schedule.watch import JOINED
from ds_moe_ext.strategies.settings import BLOCK, Settings

NAME = "ds_moe_ext.attach"
FINDERS = (huggingface.find, experts.find_registered)


class Asked(NamedTuple):
    """What the user's refusals look at."""

    model: nn.Module
    settings: Settings
    strategy: Strategy


def _is_wrapped(asked: Asked) -> str:
    is_sharded = any(isinstance(p, DTensor) for p in asked.model.parameters())
    if is_sharded or isinstance(asked.model, DistributedDataParallel):
        return "the model is wrapped already"
    return ""


REFUSALS = (
    Refusal(
        "a strategy that gives ranks roles",
        lambda asked: (
            f"{BLOCK}.strategy is {asked.settings.strategy!r}" if asked.strategy.roles else ""
        ),
        "your own loop runs the same code on every rank",
        "use another strategy, or train under DeepSpeed or Megatron-core",
    ),
    Refusal(
        "sequence_parallel",
        lambda asked: (
            f"{BLOCK}.sequence_parallel is true" if asked.settings.sequence_parallel else ""
        ),
        "every rank has its own tokens here",
        "leave it out",
    ),
    Refusal(
        "megatron.layer",
        lambda asked: (
            f"{BLOCK}.megatron.layer is {asked.settings.megatron.layer!r}"
            if asked.settings.megatron.layer
            else ""
        ),
        "it applies to Megatron-core only",
        "leave it out",
    ),
    Refusal(
        "a model in DistributedDataParallel or fully_shard",
        _is_wrapped,
        "it must not wrap the experts",
        f"call {NAME} first, then wrap the model",
    ),
    ADAPTERS,
)


class Experts:
    """This rank's experts, and what becomes of their gradients.

    Each rank's experts see the rows of all ranks of its grid, so that their gradients are sums over
    these ranks' losses. What is wanted is the mean over all ranks, as the dense weights have it: so
    they are divided as they come, and where an expert has several owners its gradients are summed
    over these once, before a step.
    """

    def __init__(self) -> None:
        self.parameters: tuple[nn.Parameter, ...] = ()  # in model order; none if none was replaced
        self.num_owners = 0  # of each expert; 0 where nothing was replaced
        self.optimizer: torch.optim.Optimizer | None = None  # that steps them, once it is known
        self.is_last_pass = True  # see ``steps.host.Host.last_pass``
        self.is_averaged = False  # owners have summed what came since the last step
        self._owners: dist.ProcessGroup | None = None

    def take(self, blueprint: Blueprint, layers: Sequence[AttachedLayer]) -> None:
        """Take care of these. Collective."""
        grid = blueprint.grid
        self.parameters = tuple(dict.fromkeys(p for layer in layers for p in layer.parameters))
        self.num_owners = grid.world_size // grid.size
        if self.num_owners > 1:
            self._owners = group_among(grid.along("edp"))
        for parameter in filter(torch.is_floating_point, self.parameters):
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # torch hooks no other, and keeps hooks where it is not
            parameter.register_hook(partial(self._divided, grid.world_size))
            parameter.requires_grad_(is_trained)  # the user may train it later

    def _divided(self, num_ranks: int, gradient: Tensor) -> Tensor:
        if self.optimizer is None:
            raise RuntimeError(
                f"a backward pass came before {BLOCK} had an optimizer; call watch(optimizer) "
                f"of what {NAME} gave first"
            )
        # Gradients that a user has dropped are None or zero; looking waits for the device.
        kept = (p.grad is not None and bool(p.grad.any()) for p in self.parameters)
        if self.is_averaged and self.num_owners > 1 and any(kept):
            raise RuntimeError(
                "a backward pass ran after clip_grad_norm_, when owners had already summed "
                "expert gradients; clip after the last backward pass of a step, and call "
                "zero_grad after a skipped step"
            )
        self.is_averaged = False
        return gradient / num_ranks

    def average(self) -> None:
        """Sum gradients over the owners of each expert, once a step. Collective."""
        if self._owners is None or self.is_averaged:
            return
        self.is_averaged = True
        for parameter in self.parameters:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                sum_in_place(parameter.grad, self._owners)

    def states(self) -> States:
        """All that the optimizer keeps of them."""
        groups = [Group.of_one(parameter, parameter) for parameter in self.parameters]
        return States([(self.optimizer, groups)])


class PlainHost:
    """A model, not wrapped yet, that a user trains in plain PyTorch; a ``steps.host.Host``. The
    ``experts`` are filled."""

    name = NAME
    remedy = JOINED
    micro_batch = None

    def __init__(
        self, model: nn.Module, block: Mapping[str, Any], micro_batches: int, experts: Experts
    ) -> None:
        first = next(model.parameters())
        self.device, self.dtype = device_for(first), first.dtype
        self.num_micro_batches = micro_batches
        self.carrier = model
        self._block, self._experts, self._meta = block, experts, MetaModel(model)

    def devices(self) -> list[str]:
        return device_names(self.device)

    def refuse(self, settings: Settings, strategy: Strategy) -> tuple[Settings, Strategy]:
        """Dense gradients are left to what wraps the model."""
        refuse(REFUSALS, Asked(self.carrier, settings, strategy))
        if strategy.slices_gradients and dist.get_world_size() > 1:
            start_of(NAME).settled.append(
                f"{strategy.keys.slices_gradients} has no effect, and dense gradients are left to "
                "what wraps the model"
            )
        return settings, strategy.without_slices()

    def find(self, settings: Settings) -> list[Found]:
        found = replacement.found_in(self.carrier, FINDERS, settings)
        return [self._meta.drawing(layer) for layer in found]

    def grid(self, settings: Settings, strategy: Strategy, found: Sequence[Found]) -> ModelGrids:
        alike = {
            **startup_check.settings_of(settings, self._block),
            "micro_batches": str(self.num_micro_batches),
            **startup_check.versions("torch", str(torch.__version__)),
            **startup_check.layers_of(found),
            **startup_check.weights_of(self.carrier),
            **startup_check.empty_of(self.carrier),
        }
        start = start_of(NAME)
        start.agree(alike)
        cluster = cluster_of(settings, self.device, start)
        grid, why = grid_of(settings, strategy, found, dist.get_world_size(), cluster)
        text = f"{grid.num_ep_ranks} EP ranks of {grid.etp_size} ranks"
        return ModelGrids(grid, (), {**alike, "the grid": text}, why)

    def prepare(self, blueprint: Blueprint) -> tuple[Blueprint, Around | None]:
        """Of dense weights DistributedDataParallel takes rank 0's too."""
        replacement.warn_of_what_stays(self.carrier, blueprint)
        made = self._meta.make_real(blueprint.found, self.device)
        replacement.take_first_ranks_experts(self.carrier, blueprint, self.device)
        return replace(blueprint, made=made), None

    def mark(self, blueprint: Blueprint, built: Built) -> None:
        """DistributedDataParallel looks for names that it shall ignore on the model."""
        self._experts.take(blueprint, [layer for layer, _ in built])
        own = set(self._experts.parameters)
        named = self.carrier.named_parameters(remove_duplicate=False)
        names = [name for name, parameter in named if parameter in own]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.carrier, names)

    def last_pass(self, layer: AttachedLayer) -> Callable[[], bool]:
        known = self._experts
        return lambda: known.is_last_pass

    def accumulation(self, layer: AttachedLayer) -> Accumulation:
        return KeptInGrad(layer.routed.layer_context.layer, lambda: layer.parameters)

    def optimizer_states(self) -> Callable[[], States]:
        return self._experts.states

    def dense_gradients(
        self, blueprint: Blueprint, layers: Sequence[AttachedLayer]
    ) -> DenseGradients:
        return DenseGradients.of(self.carrier, layers, self.dtype, None)

    def watch_steps(self, run: Run) -> None:
        """``Attachment.watch`` hears of the optimizer, which is made later."""
        setattr(self.carrier, RECORD, Record(run))
        run.planning.log(replacement.owners_line(run.blueprint))


def device_for(weight: Tensor) -> torch.device:
    """Of a weight; where it is on the meta device, that which the process computes on."""
    if not weight.is_meta:
        return weight.device
    is_cuda = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
