# SPDX-License-Identifier: Apache-2.0
"""Gives scalars of a run to the monitor of whoever trains: DeepSpeed's, Megatron's, or a user's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ds_moe_ext.report.rank_figures import Point
from ds_moe_ext.report.recorder import Recorder
from ds_moe_ext.report.scalars import scalars_of

Event = tuple[str, float, int]
"""Name, value, and where on the axis of steps or samples."""

WriteEvents = Callable[[Sequence[Event]], object]
"""A monitor, as DeepSpeed's ``write_events``."""

MONITORED = 10
"""Steps between two writings where the host says nothing of it: one of them is timed."""


@dataclass(eq=False)
class Monitor:
    """What a run shows while it goes on.

    Attributes:
        is_on: the settings want it.
    """

    is_on: bool
    _shown: Point | None = field(default=None, init=False)
    _has_failed: bool = field(default=False, init=False)

    def show(self, recorder: Recorder, write: WriteEvents, at: int) -> None:
        """Write the scalars of the latest step. No error of a monitor ends a training: the first is
        a warning.

        Args:
            recorder: of the run.
            write: takes them.
            at: where they stand on the host's axis.
        """
        point = None if recorder.ranks is None else recorder.ranks.latest
        news, self._shown = None if point is self._shown else point, point
        events = [(name, value, at) for name, value in scalars_of(recorder, news).items()]
        try:
            write(events)
        except Exception as error:
            if not self._has_failed:
                warnings.warn(f"ds_moe_ext: the monitor has failed: {error!r}", stacklevel=2)
            self._has_failed = True
