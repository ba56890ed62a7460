# SPDX-License-Identifier: Apache-2.0
"""How many copies can be hidden, and how many fit: HECATE's ``t``, ``m`` and memory. Pure."""

from __future__ import annotations

import math


def overlap_degree(
    window_s: float,
    *,
    bytes_per_s: float,
    expert_bytes: float,
    num_experts: int,
    latency_s: float = 0.0,
) -> int:
    """Experts whose copies can be sent behind other work: ``t`` (spec rules 11 and 50).

    Args:
        window_s: seconds of the forward of what runs beside the copies: attention.
        bytes_per_s: bandwidth between nodes, all cards of a node together; within a node where
            there is only one.
        expert_bytes: bytes of one expert's parameters.
        num_experts: of the layer; no more are ever copied.
        latency_s: seconds until the first byte arrives; 0 is the paper's formula.
    """
    hidden = (window_s - latency_s) * bytes_per_s / expert_bytes
    return min(max(math.floor(hidden), 0), num_experts)


def copies_that_fit(
    free_bytes: float, *, expert_bytes: float, layers_held: int, layers_reduced: int = 0
) -> int:
    """Copies that a cell has memory for in each layer: ``m`` (spec choice B8).

    Args:
        free_bytes: memory to spend.
        expert_bytes: bytes of one expert's parameters; its gradient takes as many.
        layers_held: layers whose copies are in memory at once: all, or 1 where copies are released
            after forward and gathered again.
        layers_reduced: layers whose copies' gradients are in memory at once: 1 where they are
            reduced layer by layer; all where they are summed over micro-steps. With 0, gradients
            are taken to fit elsewhere, as in the spec's formula for the default mode.
    """
    return max(math.floor(free_bytes / ((layers_held + layers_reduced) * expert_bytes)), 0)
