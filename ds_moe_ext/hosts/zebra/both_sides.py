# SPDX-License-Identifier: Apache-2.0
"""The tasks of an expert rank in the picture of an attention rank: both sides of a striped step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.core.layout import Roles
from ds_moe_ext.report.record import Span
from ds_moe_ext.schedule.stripes import DISPATCH, EXPERT_SIDE


@dataclass(frozen=True, eq=False)
class BothSides:
    """Adds what the first expert rank of a ZP group computes to what another rank saw of a step.

    Attributes:
        control: the ranks of the group, over gloo.
        place: of this rank there.
        roles: of its ranks.
    """

    control: dist.ProcessGroup
    place: int
    roles: Roles

    def __call__(self, spans: Sequence[Span]) -> list[Span]:
        """The same and the expert rank's, on this rank's clock: the first exchange ended at one
        moment for both. Collective."""
        teller = self.roles.expert_cells[0]
        own = list(spans)
        theirs = gather_objects(own if self.place == teller else [], self.control)[teller]
        if self.place == teller:
            return own
        later_s = _first_end_s(spans) - _first_end_s(theirs)
        computed = [span for span in theirs if span.lane == EXPERT_SIDE.name]
        moved = (
            replace(span, start_s=span.start_s + later_s, end_s=span.end_s + later_s, bound_by=None)
            for span in computed
        )
        return _merged(spans, moved)


def _merged(spans: Sequence[Span], others: Iterable[Span]) -> list[Span]:
    """All, in the order in which they began; the first ones know where those are now that they
    waited for."""
    both = [*spans, *others]
    order = sorted(range(len(both)), key=lambda old: both[old].start_s)
    new = {old: place for place, old in enumerate(order)}
    return [
        span if span.bound_by is None else replace(span, bound_by=new[span.bound_by])
        for span in (both[old] for old in order)
    ]


def _first_end_s(spans: Sequence[Span]) -> float:
    """When the first exchange of the step had ended."""
    return min((span.end_s for span in spans if span.name == DISPATCH.name), default=0.0)
