"""Experts to new homes under Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_moe_ext.hosts.attach import AttachedLayer
from ds_moe_ext.placement import Placement
from ds_moe_ext.strategies.base import Pool


@dataclass(frozen=True, eq=False)
class ExpertMover:
    """Moves experts between the ranks of a run."""

    optimizer: Any
    layers: Sequence[AttachedLayer]
    pools: Sequence[Pool]

    def __call__(self, old: Sequence[Placement], new: Sequence[Placement]) -> None:
        raise NotImplementedError
