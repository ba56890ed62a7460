# SPDX-License-Identifier: Apache-2.0
"""Layers of which some experts are trained and others are frozen, as expert-specialized tuning has
them: ranks must agree on whether gradients of copies travel, whatever their own experts are."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from ds_moe_ext.attachment.host_layer import Hosted
from ds_moe_ext.comm import gather_objects
from ds_moe_ext.settings import BLOCK, Settings
from ds_moe_ext.strategy import Strategy


def agree_on_frozen(
    layers: Sequence[Hosted],
    group: dist.ProcessGroup,
    settings: Settings,
    strategy: Strategy,
) -> None:
    """Let gradients of copies travel wherever a layer has an expert that is trained. Collective.

    Args:
        layers: that can have copies.
        group: all ranks that run them.
        settings: the block.
        strategy: the chosen strategy.

    Raises:
        ValueError: on all ranks; experts are to move, and some only are trained. What is frozen is
            a place, which the host's optimizer steps or does not.
    """
    own = [_ways_to_learn(hosted) for hosted in layers]
    told = gather_objects(own, group)
    for hosted, *ways in zip(layers, *told):
        if len(set().union(*ways)) < 2:
            continue
        if strategy.rhythm().shard_every:
            raise ValueError(
                f"{BLOCK}: strategy {settings.placing} moves experts to new homes, but of "
                f"{hosted.routed.name} "
                "some experts are frozen and some are trained, and a home that is frozen cannot "
                "train the expert that comes; freeze all experts of a layer alike, or let experts "
                f"stay: {strategy.keys.homes} null or 0"
            )
        copies = hosted.routed.copies
        assert copies is not None
        copies.some_are_trained = True


def _ways_to_learn(hosted: Hosted) -> list[bool]:
    """Whether there are trained experts at home here, and whether there are frozen ones."""
    return sorted({any(p.requires_grad for p in slot.parameters) for slot in hosted.slots()})
