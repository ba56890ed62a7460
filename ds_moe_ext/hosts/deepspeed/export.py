# SPDX-License-Identifier: Apache-2.0
"""The model's state with all experts under the host's names, as the stock class loads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ds_moe_ext.core.comm import all_gather_slots, as_bytes, exchange, gather_objects
from ds_moe_ext.hosts.attachment.experts import HostedExperts
from ds_moe_ext.hosts.attachment.host_layer import Hosted
from ds_moe_ext.hosts.attachment.modules import without
from ds_moe_ext.hosts.deepspeed import shards
from ds_moe_ext.hosts.deepspeed.native import HostedMoE
from ds_moe_ext.hosts.steps.training_run import run_of
from ds_moe_ext.moe.sharding import whole_weights
from ds_moe_ext.schedule.task import INTER, INTRA

CHECKPOINTED = "_checkpoint_wrapped_module"
"""Where torch's ``checkpoint_wrapper`` keeps the module that it wraps; not in names of a state."""


@contextmanager
def whole_state(engine: Any) -> Iterator[None]:
    """While it lasts, ``engine.module_state_dict`` gives all experts. Collective."""
    if run_of(engine) is None:
        yield
        return
    engine.module_state_dict = lambda **_: full_state_dict(engine.module)
    try:
        is_asked = not shards.are_of(engine) or engine.zero_gather_16bit_weights_on_model_save()
        with shards.one_file(engine) if is_asked else nullcontext():
            yield
    finally:
        del engine.module_state_dict


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's state with all experts under the host's names, as the stock class loads it.

    Collective. Every rank gets all of it, one that has experts only too; experts, and what an
    expert rank gets from others, are in host memory, one weight at a time on the device.

    Args:
        model: ``engine.module``.
    """
    state, experts = shards.state_of(model), dict[str, Tensor]()
    for path, module in model.named_modules(remove_duplicate=False):  # some blocks share experts
        name = without(CHECKPOINTED, path)
        if isinstance(module, HostedExperts):
            for own, _ in module.named_parameters():
                del state[f"{name}.{own}"]
            with shards.whole(module.parameters()):
                outer = name.removesuffix(module.inside) if module.inside else f"{name}."
                for index, stored in enumerate(module.stored):
                    for weight, tensor in stored.exported(_joined(module, index)):
                        experts[f"{outer}{weight}"] = tensor
        elif isinstance(module, HostedMoE):
            prefix = f"{name}.experts.deepspeed_experts"
            for index, weight in enumerate(module.weight_names):
                for slot in range(len(module.slots())):
                    del state[f"{prefix}.{slot}.{weight}"]
                with shards.whole(module.experts.parameters()):
                    whole = _joined(module, index)
                for expert, tensor in enumerate(whole):
                    experts[f"{prefix}.{expert}.{weight}"] = tensor
    hosted = (m for m in model.modules() if isinstance(m, (HostedExperts, HostedMoE)))
    first = next(hosted, None)
    if first is None:
        return state
    return _completed(state, first.routed.site.layout.group("ep", INTER)) | experts


class _Shape(NamedTuple):
    """What a tensor is like, for other ranks to make room for it."""

    dtype: torch.dtype
    shape: torch.Size

    def empty(self) -> Tensor:
        device = get_accelerator().current_device_name()
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def _completed(state: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """A rank's state without experts. One that has fewer tensors than others, as it has no dense
    weights, gets all that the first of those with most has; its buffers too, for its own have seen
    no data. Collective."""
    own = {name: _Shape(t.dtype, t.shape) for name, t in state.items() if isinstance(t, Tensor)}
    told_C = gather_objects(own, group)
    whole = max(told_C, key=len)
    source = told_C.index(whole)
    lacking = [place for place, told in enumerate(told_C) if len(told) < len(whole)]
    if dist.get_rank(group) == source:
        for name in whole if lacking else ():
            flat = as_bytes(state[name].detach().to(get_accelerator().current_device_name()))
            exchange([], [(flat, place) for place in lacking], group)
    if dist.get_rank(group) in lacking:
        for name, shape in whole.items():
            state[name] = shape.empty()
            exchange([(as_bytes(state[name]), source)], [], group)
            state[name] = state[name].cpu()
    return state


def _joined(module: Hosted, index: int) -> Tensor:
    """A weight of all experts, ``[E, ...]``, from this rank's. Collective.

    Args:
        index: of the weight among those of an expert.
    """
    home, layout = module.routed.site.plan.home, module.routed.site.layout
    weights: list[Tensor] = [slot.parameters[index].detach() for slot in module.slots()]
    if home.num_cells == 1:
        return _of_cell(module, index, torch.stack(weights))
    group = layout.group("ep", INTER)
    part_S = torch.stack(weights) if weights else None
    part_S = _like_others(part_S, group)
    local_S = _of_cell(module, index, part_S)
    held_C = [home.experts_of(cell) for cell in range(home.num_cells)]
    joined = all_gather_slots(local_S, [len(held) for held in held_C], group)
    order = torch.from_numpy(np.concatenate(held_C).argsort())
    return joined.cpu().index_select(0, order)  # all experts at once may not fit a device


def _like_others(part_S: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """This rank's part; where it has none, no experts of the shape and type of the others'.
    Collective."""
    own = None if part_S is None else _Shape(part_S.dtype, part_S.shape)
    told = gather_objects(own, group)
    if part_S is not None:
        return part_S
    dtype, (_, *shape) = next(filter(None, told))
    return _Shape(dtype, torch.Size((0, *shape))).empty()


def _of_cell(module: Hosted, index: int, part_S: Tensor) -> Tensor:
    """A weight of the cell's experts, ``[S, ...]``, from the part of it that each of the cell's
    ranks has. Collective."""
    shard = module.shard
    if shard.is_whole:
        return part_S
    group = module.routed.site.layout.group("esp", INTRA)
    return whole_weights(part_S, shard, index, group)
