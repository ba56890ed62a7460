# SPDX-License-Identifier: Apache-2.0
"""Communication that nothing hides, and exchanges of rows, among the tasks of a timed step."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import numpy as np

from ds_moe_ext.report.record import Span
from ds_moe_ext.schedule.stripes import A2E, ATTENTION_SIDE, E2A, EXPERT_SIDE, OFFLOADED_JOIN
from ds_moe_ext.schedule.task import (
    COMBINE,
    COMPUTE,
    DISPATCH,
    GATHER,
    GRADIENTS,
    HAVE_AGAIN,
    INTER,
    INTRA,
    JOIN,
    START,
)

REDUCTION = "reduction"  # a gather's adjoint is known by a name of its own
TRAVELS = frozenset((GATHER.name, REDUCTION))
"""Copies of experts on their way, and their gradients."""
WAITS = frozenset(op.name for op in (START, JOIN, HAVE_AGAIN, OFFLOADED_JOIN))
"""Tasks that only wait for copies of experts, or for their gradients."""
_COMPUTING = frozenset(lane.name for lane in (COMPUTE, ATTENTION_SIDE, EXPERT_SIDE))
_SENDING = frozenset(lane.name for lane in (INTER, INTRA, A2E, E2A))
_EXCHANGES = frozenset(op.name for op in (DISPATCH, COMBINE))


def exposed_s(spans: Iterable[Span]) -> float:
    """Seconds in which rows were exchanged or copies waited for, and nothing was computed. Pure.

    What else the lane ``param`` does is hidden, or waited for; slices of dense gradients go on
    beside what the host computes, which nobody times.
    """
    computed, sent = [], []
    for span in spans:
        if span.lane in _COMPUTING and span.name not in WAITS:
            computed.append(span)
        elif span.name in WAITS or (span.lane in _SENDING and span.name != GRADIENTS.name):
            sent.append(span)
    return _covered_s([*computed, *sent]) - _covered_s(computed)


def _covered_s(spans: Sequence[Span]) -> float:
    """Seconds in which one of them ran, at least."""
    if not spans:
        return 0.0
    times = np.array([(span.start_s, span.end_s) for span in spans])
    start_N, end_N = times[np.argsort(times[:, 0])].T
    reached_N = np.maximum.accumulate(end_N)
    gaps_s = np.maximum(start_N[1:] - reached_N[:-1], 0.0).sum()
    return float(reached_N[-1] - start_N[0] - gaps_s)


def exchanges_s(spans: Iterable[Span], apart: Container[str] = ()) -> tuple[float, ...]:
    """Seconds of each exchange of rows, waiting included, in the order that a lane has them, which
    is the same on all ranks that exchange. Pure.

    Args:
        spans: of a step.
        apart: layers in which nothing was exchanged: their tasks did not wait for other ranks.
    """
    found = [span for span in spans if span.name in _EXCHANGES and span.layer not in apart]
    found.sort(key=lambda span: (span.lane, span.start_s))
    return tuple(span.end_s - span.start_s for span in found)
