"""Model and optimizer for ``torch.distributed.checkpoint``, experts by their numbers in the model.

On a rank an expert's weight is ``<layer>.<weight>.<slot>``; two ranks have other experts in the
same slot, and experts may move. Saved it is ``<layer>.<weight>.<number of the expert>``, which any
layout can read. Hyperparameters are saved by the number of their parameter group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_states

from ds_moe_ext.steps.training_run import Run

MODEL, OPTIMIZER, STATE, GROUPS, PARAMS = "model", "optimizer", "state", "param_groups", "params"
"""Keys: ours and torch's."""


def names_of(model: nn.Module, run: Run) -> dict[str, str]:
    """Name of each expert weight of this rank -> its name in a checkpoint."""
    number_of: dict[nn.Parameter, int] = {}
    cell = run.layers[0].routed.site.layout.index("ep")
    for layer, home in zip(run.layers, run.planning.job.homes):
        for number, slot in zip(home.experts_of(cell).tolist(), layer.hosted.slots(), strict=True):
            number_of.update(dict.fromkeys(slot.parameters, number))
    return {
        name: f"{name.rpartition('.')[0]}.{number_of[parameter]}"
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter in number_of
    }


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, names: Mapping[str, str]
) -> dict[str, Any]:
    """What a checkpoint has. Collective.

    Args:
        model: with replaced experts.
        optimizer: None saves none.
        names: see ``names_of``.
    """
    state: dict[str, Any] = {MODEL: _renamed(torch_states.get_model_state_dict(model), names)}
    if optimizer is not None:
        kept: Any = torch_states.get_optimizer_state_dict(model, optimizer)
        state[OPTIMIZER] = {
            STATE: _renamed(kept[STATE], names),
            GROUPS: [_without_params(group) for group in kept[GROUPS]],
        }
    return state


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    names: Mapping[str, str],
) -> None:
    """Put what was read where it belongs. Collective.

    Args:
        model: as of ``state_of``; likewise the optimizer and the names.
        state: as ``state_of`` made it.
    """
    here = {saved: name for name, saved in names.items()}
    torch_states.set_model_state_dict(model, _renamed(state[MODEL], here))
    if optimizer is not None:
        own: Any = torch_states.get_optimizer_state_dict(model, optimizer)
        read = state[OPTIMIZER]
        groups = [
            {**options, PARAMS: group[PARAMS]}
            for options, group in zip(read[GROUPS], own[GROUPS], strict=True)
        ]
        kept: Any = {STATE: _renamed(read[STATE], here), GROUPS: groups}
        torch_states.set_optimizer_state_dict(model, optimizer, kept)


def _renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in state.items()}


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != PARAMS}
