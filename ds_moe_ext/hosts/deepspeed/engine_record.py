# SPDX-License-Identifier: Apache-2.0
"""Our one record of a DeepSpeed engine: on the engine, and on what reduces its gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ds_moe_ext.hosts.deepspeed.slices import GradientSlices
from ds_moe_ext.hosts.steps.host import Schedules
from ds_moe_ext.hosts.steps.training_run import RECORD, Record


@dataclass(eq=False)
class EngineRecord(Record):
    """What we know of an engine.

    Attributes:
        slices: of its dense gradients; None where DeepSpeed reduces them alone.
        users_groups: parameter groups of a user's own optimizer, while DeepSpeed wraps it.
        last: gradients of these are reduced when all others have been.
        waiting: those of them that are ready, with the number of their group.
        means: of the gradients that ZeRO is about to sum, flat, while it takes one back.
        averaged: addresses of gradients that slices averaged at ZeRO 0.
        drops: times that its optimizer of ZeRO dropped what it had accumulated.
        has_linked: its weights know where their states are.
        averaged_experts: gradients of experts that the engine averaged in the present step at
            ZeRO 0, in lists, with the factor by which another average leaves them as they are.
        schedules: of a pipeline, what its engine is about to do.
        order: numbers of the weights whose gradients slices were shown at ZeRO 0.
    """

    slices: GradientSlices | None = None
    users_groups: list[dict[str, Any]] | None = None
    last: set[nn.Parameter] = field(default_factory=set)
    waiting: list[tuple[nn.Parameter, int]] = field(default_factory=list)
    means: Tensor | None = None
    averaged: set[int] = field(default_factory=set)
    averaged_experts: list[tuple[list[Tensor], float]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    drops: int = 0
    has_linked: bool = False
    schedules: Schedules = field(default_factory=Schedules)

    def drop_slices(self) -> None:
        """Forget what slices have of a backward pass that failed."""
        if self.slices is not None:
            self.slices.drop()
            self.averaged.clear()
            self.order.clear()

    def take_averaged(self) -> list[tuple[list[Tensor], float]]:
        """Gradients of experts that were averaged, which are about to be others."""
        averaged, self.averaged_experts = self.averaged_experts, []
        return averaged

    def take_waiting(self) -> list[tuple[nn.Parameter, int]]:
        """What waits, which no longer does."""
        waiting, self.waiting = self.waiting, []
        return waiting


NOTHING = EngineRecord()
"""Of an engine that does not run by us; nobody writes to it."""


def record_of(carrier: Any) -> EngineRecord:
    """Of an engine, or of its optimizer of ZeRO."""
    record: EngineRecord = getattr(carrier, RECORD, NOTHING)
    return record


def begin(engine: Any) -> EngineRecord:
    """The record of an engine that runs by us, from now on if it did not before."""
    if record_of(engine) is NOTHING:
        setattr(engine, RECORD, EngineRecord())
    return record_of(engine)


def share(engine: Any) -> None:
    """Let an engine's optimizer of ZeRO, which knows of no engine, carry its record too."""
    if record_of(engine) is not NOTHING and engine.zero_optimization():
        setattr(engine.optimizer, RECORD, record_of(engine))
