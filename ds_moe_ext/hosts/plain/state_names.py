# SPDX-License-Identifier: Apache-2.0
"""Model and optimizer for ``torch.distributed.checkpoint``, experts by their numbers in the model.

On a rank an expert's weight is ``<layer>.<weight>.<slot>``; two ranks have other experts in the
same slot, and experts may move. Saved it is ``<layer>.<weight>.<number of the expert>``, which any
layout can read. Hyperparameters are saved by the number of their parameter group.

Names are torch's own for checkpoints, without what wrappers put in. An expert that is not
found by its name would be saved by its slot, where other ranks overwrite it: all must be found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_states

from ds_moe_ext.hosts.steps.training_run import Run
from ds_moe_ext.moe.sharding import Shard, whole_weights
from ds_moe_ext.schedule.task import INTRA

MODEL, OPTIMIZER, STATE, GROUPS, PARAMS = "model", "optimizer", "state", "param_groups", "params"
"""Keys: ours and torch's."""


class Stored(NamedTuple):
    """An expert's weight, and what the optimizer keeps of it, as a checkpoint has them.

    Attributes:
        name: with the number of the expert.
        shard: the part of the expert that this rank has.
        number: of the weight among those of an expert.
        cell: the ranks that have its parts; None where this one has all of it.
        parameter: that holds it here.
    """

    name: str
    shard: Shard
    number: int
    cell: dist.ProcessGroup | None
    parameter: nn.Parameter

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
            plain = _name_in_states(model, name)
            saved = f"{plain.rpartition('.')[0]}.{expert}"
            stored[plain] = Stored(saved, shard, number, cell, parameter)
    return stored


def _name_in_states(model: nn.Module, name: str) -> str:
    """By which torch's states have a parameter: they leave out where ``torch.compile``, activation
    checkpointing and the like have put a module that they wrap. What torch itself asks, as there is
    no public list of what it leaves out."""
    (plain,) = torch_states._get_fqns(model, name)
    return plain


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, stored: Mapping[str, Stored]
) -> dict[str, Any]:
    """What a checkpoint has. Collective.

    Args:
        model: with replaced experts.
        optimizer: None saves none.
        stored: see ``stored_of``.
    """
    weights = torch_states.get_model_state_dict(model)
    state: dict[str, Any] = {MODEL: _wholes(weights, stored, _parameters(stored))}
    if optimizer is not None:
        kept: Any = torch_states.get_optimizer_state_dict(model, optimizer)
        groups = [{k: v for k, v in group.items() if k != PARAMS} for group in kept[GROUPS]]
        wholes = _wholes(kept[STATE], stored, _with_states(optimizer))
        state[OPTIMIZER] = {STATE: wholes, GROUPS: groups}
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

    Raises:
        ValueError: it lacks an expert of this rank, or what the optimizer keeps of it.
    """
    weights = _parts(state[MODEL], stored, _parameters(stored))
    torch_states.set_model_state_dict(model, weights)
    if optimizer is not None:
        own: Any = torch_states.get_optimizer_state_dict(model, optimizer)
        read = state[OPTIMIZER]
        pairs = zip(read[GROUPS], own[GROUPS], strict=True)
        groups = [{**options, PARAMS: group[PARAMS]} for options, group in pairs]
        parts = _parts(read[STATE], stored, _with_states(optimizer))
        kept: Any = {STATE: parts, GROUPS: groups}
        torch_states.set_optimizer_state_dict(model, optimizer, kept)


def _parameters(stored: Mapping[str, Stored]) -> set[Tensor]:
    return {each.parameter for each in stored.values()}


def _with_states(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    """Of which it keeps something."""
    return {parameter for parameter, kept in optimizer.state.items() if kept}


def _wholes(
    state: Mapping[str, Any], stored: Mapping[str, Stored], wanted: Collection[Tensor]
) -> dict[str, Any]:
    """Tensors, or what is kept of each, by the names of a checkpoint.

    Args:
        state: by torch's names.
        stored: see ``stored_of``.
        wanted: what must be there, as far as these are experts.

    Raises:
        ValueError: it is not.
    """
    found = {stored[name].parameter for name in state if name in stored}
    for name, each in stored.items():
        if each.parameter in wanted and each.parameter not in found:
            raise ValueError(
                f"the weight {name} of an expert has no entry of that name in what torch gives for "
                "a checkpoint, so that it would not be saved; remove the hook of state_dict() that "
                "drops or renames it"
            )
    return {
        stored[name].name: _each(stored[name].whole, value)
        for name, value in state.items()
        if name in stored
    } | {name: value for name, value in state.items() if name not in stored}


def _parts(
    state: Mapping[str, Any], stored: Mapping[str, Stored], wanted: Collection[Tensor]
) -> dict[str, Any]:
    """The same by the names of this rank; arguments and errors likewise."""
    here = {each.name: name for name, each in stored.items()}
    found = {stored[here[name]].parameter for name in state if name in here}
    for each in stored.values():
        if each.parameter in wanted and each.parameter not in found:
            raise ValueError(
                f"the state to load has no {each.name}, an expert of this rank; give what "
                "state_dict() made on this rank, read into by torch.distributed.checkpoint.load"
            )
    return {
        here.get(name, name): _each(stored[here[name]].part, value) if name in here else value
        for name, value in state.items()
    }


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: change(each) for key, each in value.items()}
    return change(value)
