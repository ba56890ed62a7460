"""Stages beside the way of the rows: work that another lane does, or the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ds_moe_ext.moe.observation import RowsSeen
from ds_moe_ext.schedule.task import Span
from ds_moe_ext.strategy import Plan


@dataclass(frozen=True, eq=False)
class Aside:
    """A stage that only has an effect: what the task reads says when, not what.

    Attributes:
        act: called with the task's span.
    """

    act: Callable[[Span], None]

    def forward(self, span: Span, *reads: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        self.act(span)
        return (None,), ()

    def backward(self, span: Span, saved: tuple[Any, ...], *grads: Any) -> tuple[Any, ...]:
        return ()

    def recut(self, span: Span, pieces: Sequence[tuple[Span, tuple[Any, ...]]]) -> tuple[Any, ...]:
        return ()


@dataclass(eq=False)
class Ahead:
    """A layer's plan for the next step, made while the rows of this one travel.

    Attributes:
        rows: what the layer routed in this step.
    """

    rows: RowsSeen
    _planned: Plan | None = None

    def plan(self, plan: Plan) -> Plan:
        """Make the successor of the present plan. Call it in the last micro-batch of a step."""
        if self.rows.counts and plan.successor is not None:
            self._planned = plan.successor(self.rows.so_far_CE)
        return self._planned or plan

    def successor(self, plan: Plan, routed_CE: np.ndarray) -> Plan:
        """The successor of the present plan, from all rows of the step, int64 ``[C, E]``; the plan
        itself if it has none."""
        if self._planned is not None or plan.successor is None:
            return self._planned or plan
        return plan.successor(routed_CE)
