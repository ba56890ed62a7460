# SPDX-License-Identifier: Apache-2.0
"""The tasks of an expert rank in the picture of an attention rank: both sides of a striped step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from ds_moe_ext.comm import gather_objects
from ds_moe_ext.report.record import Span
from ds_moe_ext.roles import Roles
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
            replace(span, start_s=span.start_s + later_s, end_s=span.end_s + later_s)
            for span in computed
        )
        return sorted([*spans, *moved], key=lambda span: span.start_s)


def _first_end_s(spans: Sequence[Span]) -> float:
    """When the first exchange of the step had ended."""
    return min((span.end_s for span in spans if span.name == DISPATCH.name), default=0.0)
