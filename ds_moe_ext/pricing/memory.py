# SPDX-License-Identifier: Apache-2.0
"""What a rank needs memory for. Pure. Shape letters: L layers, C cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_moe_ext.layout import Grid
from ds_moe_ext.pricing.model_shape import ModelShape
from ds_moe_ext.pricing.training_shape import MASTER_AND_STATES, Training
from ds_moe_ext.strategy import Plan

RUNTIME = 2 << 30  # bytes of the device's own runtime and of communicators
KEPT_DENSE = 16  # hidden states that a layer's dense part keeps for backward, with fused attention
LOGIT_BYTES = 6  # of one logit: as computed, and in 32 bits for the loss


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of the fullest rank.

    Attributes:
        weights: as they compute.
        gradients: of these.
        optimizer: weights in 32 bits and two states.
        activations: kept for backward.
        copies: of experts, and their gradients.
        runtime: what the device and its communicators take.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    copies: float = 0.0
    runtime: float = RUNTIME

    @property
    def total(self) -> float:
        """All."""
        return sum(vars(self).values())


def memory_use(
    shape: ModelShape, training: Training, grid: Grid, *, slots: int, most_rows: float
) -> MemoryUse:
    """Of the rank with most experts and rows, without copies.

    Args:
        shape: of the model.
        training: of the run.
        grid: of the ranks.
        slots: experts of a layer that a cell is home to.
        most_rows: rows that a cell computes in one layer.
    """
    element, num_replicas = training.element_bytes, grid.world_size // grid.size
    experts = len(shape.moe_layers) * slots * shape.expert_weights / grid.cell_size
    dense = shape.all_dense_weights
    held = dense / (grid.world_size if training.zero_stage >= 3 else 1) + experts
    stage = training.zero_stage
    reduced = dense / (grid.world_size if stage >= 2 else 1)
    reduced += experts / (num_replicas if stage >= 2 else 1)
    stepped = dense / (grid.world_size if stage >= 1 else 1)
    stepped += experts / (num_replicas if stage >= 1 else 1)
    return MemoryUse(
        weights=held * element,
        gradients=reduced * training.gradient_bytes,
        optimizer=stepped * (MASTER_AND_STATES if element < 4 else 8),
        activations=_activations(shape, training, grid, most_rows),
    )


def _activations(shape: ModelShape, training: Training, grid: Grid, most_rows: float) -> float:
    """Of one pass: hidden states of dense parts, rows there and back, hidden ones of experts."""
    state = shape.width * training.element_bytes
    dense = KEPT_DENSE * training.tokens * state
    of_row = 2 * shape.width + shape.products * shape.expert_width / grid.cell_size
    rows = most_rows * of_row * training.element_bytes
    rows += training.tokens * shape.top_k * state  # as they came back
    hidden = shape.products * training.tokens * training.element_bytes
    rows += hidden * shape.shared_width
    num_moe = len(shape.moe_layers)
    num_dense = shape.num_layers - num_moe
    of_mlp = hidden * shape.dense_width if num_dense else 0
    whole = shape.num_layers * dense + num_moe * rows + num_dense * of_mlp
    if training.recomputes:
        whole = shape.num_layers * training.tokens * state + dense + max(rows, of_mlp)
    return whole + training.tokens * shape.vocab_size * LOGIT_BYTES


def copied_bytes_C(
    plans: Sequence[Plan], expert_bytes_L: Sequence[int], *, accumulates: bool
) -> np.ndarray:
    """Copies of experts and their gradients on each cell when it has most, int64 ``[C]``.

    All layers' copies, or one layer's where they are freed after forward, or two layers' where the
    block before carries them besides; of gradients those of as few layers, but where they wait for
    the last micro-batch those of as many as have copies.

    Args:
        plans: of each layer.
        expert_bytes_L: of one expert's weights.
        accumulates: several micro-batches make a step.
    """
    copies_LC = np.array([(p.target.holds_EC & ~p.home.holds_EC).sum(axis=0) for p in plans])
    most_first_LC = -np.sort(-copies_LC * np.array(expert_bytes_L)[:, None], axis=0)
    at_once = 2 if any(plan.carried is not None for plan in plans) else 1
    frees = all(plan.rematerialize for plan in plans if plan.has_copies)
    held_C: np.ndarray = most_first_LC[: at_once if frees else None].sum(axis=0)
    return held_C + (held_C if accumulates else most_first_LC[:at_once].sum(axis=0))
