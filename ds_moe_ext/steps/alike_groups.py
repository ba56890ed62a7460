# SPDX-License-Identifier: Apache-2.0
"""Parameter groups of an optimizer, where experts move from slot to slot: those that may change
places must be optimized alike."""

from __future__ import annotations

import torch

from ds_moe_ext.attachment.defaults import HOMES
from ds_moe_ext.attachment.refusal import Refusal
from ds_moe_ext.attachment.replacement import AttachedLayer
from ds_moe_ext.comm import gather_objects
from ds_moe_ext.steps.training_run import Run

_REMEDY = "put them into one group"

UNLIKE = Refusal(
    "several parameter groups for weights of experts that are alike, as of a rate for each layer",
    str,
    "an expert that moves would be stepped as the one whose slot it takes",
    _REMEDY,
)
"""Of what ``_unlike`` says, where experts move."""


def settle_alike(run: Run, optimizer: torch.optim.Optimizer) -> None:
    """Look at an optimizer before its first step: by its groups experts may have to keep their
    homes. Collective, over the ranks of the run.

    Raises:
        ValueError: experts that may change places are optimized differently.
    """
    if run.blueprint.moves_experts:
        own = _unlike(run, optimizer)
        everyone = run.layers[0].routed.site.layout.everyone
        run.settle(HOMES, (UNLIKE,), next(filter(None, gather_objects(own, everyone)), ""))
    check_alike(run, optimizer)


def check_alike(run: Run, optimizer: torch.optim.Optimizer) -> None:
    """Look at an optimizer on one rank. Where experts move, a slot of one layer comes to hold an
    expert of another; and where a layer is at home unevenly, a rank may have no expert of it, but
    must have all groups.

    Raises:
        ValueError: experts that may change places are optimized differently.
    """
    blueprint = run.blueprint
    if not blueprint.strategy.has_uneven_homes:
        return
    stay = all(home.is_everywhere for home in blueprint.homes()) and not blueprint.moves_experts
    if not stay and (unlike := _unlike(run, optimizer)):
        raise ValueError(
            f"under strategy {blueprint.settings.placing} experts may move between layers, and a "
            f"rank may have none of a layer, but {unlike}; {_REMEDY}, or use ep in its place"
        )


def _unlike(run: Run, optimizer: torch.optim.Optimizer) -> str:
    """Which weights of this rank that are alike are optimized differently, for a person; else
    empty."""
    group_of = {
        parameter: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    for pool in run.blueprint.pools:
        own: list[AttachedLayer] = [run.layers[layer] for layer in pool.layers]
        names = own[0].hosted.weight_names
        for number, name in enumerate(names):
            held = (p for layer in own for p in layer.parameters[number :: len(names)])
            if len({group_of.get(parameter) for parameter in held}) > 1:
                return (
                    f"the weights {name!r} of {', '.join(layer.name for layer in own)} are in "
                    "several parameter groups of the optimizer"
                )
    return ""
