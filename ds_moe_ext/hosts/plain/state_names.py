# SPDX-License-Identifier: Apache-2.0
"""Model and optimizer for ``torch.distributed.checkpoint``, experts by their numbers in the model.

On a rank an expert's weight is ``<layer>.<weight>.<slot>``; two ranks have other experts in the
same slot, and experts may move. Saved it is ``<layer>.<weight>.<number of the expert>``, which any
layout can read. Hyperparameters are saved by the number of their parameter group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_states

from ds_moe_ext.moe.cell import whole_weights
from ds_moe_ext.moe.sharding import Shard
from ds_moe_ext.schedule.task import INTRA
from ds_moe_ext.steps.training_run import Run

MODEL, OPTIMIZER, STATE, GROUPS, PARAMS = "model", "optimizer", "state", "param_groups", "params"
"""Keys: ours and torch's."""


class Stored(NamedTuple):
    """An expert's weight, and what the optimizer keeps of it, as a checkpoint has them.

    Attributes:
        name: with the number of the expert.
        shard: the part of the expert that this rank has.
        number: of the weight among those of an expert.
        cell: the ranks that have its parts; None where this one has all of it.
    """

    name: str
    shard: Shard
    number: int
    cell: dist.ProcessGroup | None

    def whole(self, part: Any) -> Any:
        """From this rank's part; what has no part for each element is as it is. Collective."""
        if self.cell is None or not isinstance(part, Tensor) or not part.dim():
            return part
        return whole_weights(part.detach()[None], self.shard, self.number, self.cell)[0]

    def part(self, whole: Any) -> Any:
        """This rank's."""
        has_parts = isinstance(whole, Tensor) and whole.dim() > 0
        return self.shard.of(self.number, whole) if has_parts else whole


def stored_of(model: nn.Module, run: Run) -> dict[str, Stored]:
    """By name, how each expert weight of this rank is stored."""
    layout = run.layers[0].routed.site.layout
    cell = layout.group("esp", INTRA) if layout.grid.cell_size > 1 else None
    expert_of: dict[nn.Parameter, tuple[int, Shard, int]] = {}
    for layer, home in zip(run.layers, run.planning.job.homes):
        numbers = home.experts_of(layout.index("ep")).tolist()
        for expert, slot in zip(numbers, layer.hosted.slots(), strict=True):
            for number, parameter in enumerate(slot.parameters):
                expert_of[parameter] = expert, layer.hosted.shard, number
    stored = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in expert_of:
            expert, shard, number = expert_of[parameter]
            stored[name] = Stored(f"{name.rpartition('.')[0]}.{expert}", shard, number, cell)
    return stored


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, stored: Mapping[str, Stored]
) -> dict[str, Any]:
    """What a checkpoint has. Collective.

    Args:
        model: with replaced experts.
        optimizer: None saves none.
        stored: see ``stored_of``.
    """
    state: dict[str, Any] = {MODEL: _wholes(torch_states.get_model_state_dict(model), stored)}
    if optimizer is not None:
        kept: Any = torch_states.get_optimizer_state_dict(model, optimizer)
        groups = [{k: v for k, v in group.items() if k != PARAMS} for group in kept[GROUPS]]
        state[OPTIMIZER] = {STATE: _wholes(kept[STATE], stored), GROUPS: groups}
    return state


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    stored: Mapping[str, Stored],
) -> None:
    """Put what was read where it belongs. Collective.

    Args:
        model: as of ``state_of``; likewise the optimizer and what is stored.
        state: as ``state_of`` made it.
    """
    torch_states.set_model_state_dict(model, _parts(state[MODEL], stored))
    if optimizer is not None:
        own: Any = torch_states.get_optimizer_state_dict(model, optimizer)
        read = state[OPTIMIZER]
        pairs = zip(read[GROUPS], own[GROUPS], strict=True)
        groups = [{**options, PARAMS: group[PARAMS]} for options, group in pairs]
        kept: Any = {STATE: _parts(read[STATE], stored), GROUPS: groups}
        torch_states.set_optimizer_state_dict(model, optimizer, kept)


def _wholes(state: Mapping[str, Any], stored: Mapping[str, Stored]) -> dict[str, Any]:
    """Tensors, or what is kept of each, by the names of a checkpoint."""
    return {
        stored[name].name: _each(stored[name].whole, value)
        for name, value in state.items()
        if name in stored
    } | {name: value for name, value in state.items() if name not in stored}


def _parts(state: Mapping[str, Any], stored: Mapping[str, Stored]) -> dict[str, Any]:
    """The same by the names of this rank."""
    here = {each.name: name for name, each in stored.items()}
    return {
        here.get(name, name): _each(stored[here[name]].part, value) if name in here else value
        for name, value in state.items()
    }


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: change(each) for key, each in value.items()}
    return change(value)
