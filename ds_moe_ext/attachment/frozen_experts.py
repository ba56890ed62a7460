# SPDX-License-Identifier: Apache-2.0
"""Layers of which some experts are trained and others are frozen, as expert-specialized tuning has
them: ranks must agree on whether gradients of copies travel, whatever their own experts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_moe_ext.attachment.defaults import HOMES, Tell, settle
from ds_moe_ext.attachment.host_layer import Hosted
from ds_moe_ext.attachment.refusal import Refusal
from ds_moe_ext.attachment.replacement import AttachedLayer, Blueprint
from ds_moe_ext.comm import gather_objects
from ds_moe_ext.layout import GRID
from ds_moe_ext.schedule.task import INTER


def _are_mixed(names: Sequence[str]) -> str:
    return f"of {names[0]} some experts are frozen and some are trained" if names else ""


MIXED = Refusal(
    "a layer with frozen experts beside trained ones",
    _are_mixed,
    "a home that is frozen cannot train the expert that comes",
    "freeze all experts of a layer alike",
)
"""Of names of such layers, where experts move. What is frozen is a place, which the host's
optimizer steps or does not."""


def settled(blueprint: Blueprint, layers: Sequence[AttachedLayer], tell: Tell) -> Blueprint:
    """Let gradients of copies travel wherever a layer has an expert that is trained. Collective,
    over the ranks that run the layers.

    Args:
        blueprint: of the layers.
        layers: that were built.
        tell: is given what was left out of defaults, a line each.

    Returns:
        What was built, where experts of such layers keep their homes.

    Raises:
        ValueError: on all ranks; a key asks for experts that move, and some only are trained.
    """
    copied = [layer.routed for layer in layers if layer.routed.copies is not None]
    if not copied:
        return blueprint
    own = [_ways_to_learn(layer.hosted) for layer in layers if layer.routed.copies is not None]
    told = gather_objects(own, copied[0].site.layout.group(GRID, INTER))
    mixed = [each for each, *ways in zip(copied, *told) if len(set().union(*ways)) > 1]
    for routed in mixed:
        assert routed.copies is not None
        routed.copies.some_are_trained = True
    names = [routed.name for routed in mixed]
    return replace(blueprint, strategy=settle(HOMES, blueprint.strategy, (MIXED,), names, tell))


def _ways_to_learn(hosted: Hosted) -> list[bool]:
    """Whether there are trained experts at home here, and whether there are frozen ones."""
    return sorted({any(p.requires_grad for p in slot.parameters) for slot in hosted.slots()})
