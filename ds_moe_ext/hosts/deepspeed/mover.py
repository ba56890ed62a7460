"""Experts to new homes under DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ds_moe_ext.attach.replacement import AttachedLayer
from ds_moe_ext.hosts.deepspeed.state_places import OptimizerStates
from ds_moe_ext.steps.expert_moves import ExpertMover
from ds_moe_ext.strategy import Pool


def mover_of(engine: Any, layers: Sequence[AttachedLayer], pools: Sequence[Pool]) -> ExpertMover:
    """Moves experts between the ranks of an engine.

    Args:
        engine: DeepSpeed's.
        layers: in model order.
        pools: layers that may exchange experts.
    """
    return ExpertMover(partial(OptimizerStates, engine), layers, pools)
