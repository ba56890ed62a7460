"""Experts to new homes under Megatron."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from ds_moe_ext.attach.replacement import AttachedLayer, Blueprint
from ds_moe_ext.hosts.megatron.state_places import OptimizerStates
from ds_moe_ext.steps.expert_moves import ExpertMover


def mover_of(optimizer: Any, layers: Sequence[AttachedLayer], blueprint: Blueprint) -> ExpertMover:
    """Moves experts between the ranks of a pipeline stage.

    Args:
        optimizer: Megatron's.
        layers: in model order.
        blueprint: of the run.

    Raises:
        ValueError: experts may move, but their states cannot.
    """
    if blueprint.moves_experts:
        OptimizerStates(optimizer)
    alive = weakref.ref(optimizer)  # layers, which a report outlives, know of this
    return ExpertMover(lambda: OptimizerStates(alive()), layers, blueprint.pools)
