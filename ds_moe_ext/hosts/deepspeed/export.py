"""The model's state with all experts under the host's names, as the stock class loads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ds_moe_ext.comm import all_gather_slots
from ds_moe_ext.hosts.deepspeed.engine import run_of
from ds_moe_ext.hosts.deepspeed.native import HostedMoE
from ds_moe_ext.hosts.experts import HostedExperts
from ds_moe_ext.hosts.found import Hosted
from ds_moe_ext.schedule.task import INTER


@contextmanager
def whole_state(engine: Any) -> Iterator[None]:
    """While it lasts, ``engine.module_state_dict`` gives all experts. Collective."""
    if run_of(engine) is None:
        yield
        return
    engine.module_state_dict = lambda **_: gathered_state(engine.module)
    try:
        yield
    finally:
        del engine.module_state_dict


def gathered_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state with all experts under the host's names, as the stock class loads it.

    Collective. Every rank gets it; experts are in host memory, one weight at a time on the device.
    """
    state = dict(model.state_dict())
    for name, module in model.named_modules(remove_duplicate=False):  # some blocks share experts
        if isinstance(module, HostedExperts):
            slots = module.slots()
            for index, weight in enumerate(module.weight_names):
                state[f"{name}.{weight}"] = _joined(module, index)
                for slot in range(len(slots)):
                    del state[f"{name}.{weight}.{slot}"]
        elif isinstance(module, HostedMoE):
            prefix = f"{name}.experts.deepspeed_experts"
            slots = module.slots()
            for index, weight in enumerate(module.weight_names):
                for expert, tensor in enumerate(_joined(module, index)):
                    state[f"{prefix}.{expert}.{weight}"] = tensor
    return state


def _joined(module: Hosted, index: int) -> Tensor:
    """A weight of all experts, ``[E, ...]``, from this rank's. Collective.

    Args:
        index: of the weight among those of an expert.
    """
    routed = module.routed
    weights: list[Tensor] = [slot.parameters[index] for slot in module.slots()]
    if not weights:  # none of the layer's experts is at home here
        assert routed.copies is not None
        weights = [routed.copies.like[index]]
    local_S = torch.stack([weight.detach() for weight in weights])[: len(module.slots())]
    home, layout = routed.site.plan.home, routed.site.layout
    if home.num_cells == 1:
        return local_S
    held_C = [home.experts_of(cell) for cell in range(home.num_cells)]
    joined = all_gather_slots(local_S, [len(held) for held in held_C], layout.group("ep", INTER))
    order = torch.from_numpy(np.concatenate(held_C).argsort())
    return joined.cpu().index_select(0, order)  # all experts at once may not fit a device
