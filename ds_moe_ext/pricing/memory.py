# SPDX-License-Identifier: Apache-2.0
"""What a rank needs memory for. Pure. Shape letters: L layers, C cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_moe_ext.layout import Grid
from ds_moe_ext.pricing.model_shape import ModelShape
from ds_moe_ext.pricing.pipeline_order import Pass, most_kept
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
        optimizer: weights in 32 bits and two states, but for those in host memory.
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
    dense = shape.held_dense_weights(training.parallel.tensor)
    dense_replicas = training.dense_replicas
    stage = training.zero_stage
    held = dense / (dense_replicas if stage >= 3 else 1) + experts
    if stage >= 3 and training.recomputes and experts:  # else layers keep theirs whole for backward
        a_layer = experts / len(shape.moe_layers)
        held += (experts - a_layer) * (1 / num_replicas - 1)
    reduced = dense / (dense_replicas if stage >= 2 else 1)
    reduced += experts / (num_replicas if stage >= 2 else 1)
    stepped = dense / (dense_replicas if stage >= 1 else 1)
    stepped += experts / (num_replicas if stage >= 1 else 1)
    stepped *= 1 - training.offloaded_states
    return MemoryUse(
        weights=held * element,
        gradients=reduced * training.gradient_bytes,
        optimizer=stepped * (MASTER_AND_STATES if element < 4 else 8),
        activations=sum(activations(shape, training, grid, most_rows)),
    )


class Activations(NamedTuple):
    """Bytes of one pass: hidden states of dense parts, rows there and back, hidden ones of experts.

    Attributes:
        kept: from its forward to its backward.
        passing: more, of a layer that runs again.
    """

    kept: float
    passing: float


def activations(shape: ModelShape, training: Training, grid: Grid, most_rows: float) -> Activations:
    """Of one pass. Arguments as of ``memory_use``."""
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
    logits = (
        training.tokens * shape.vocabulary.size * LOGIT_BYTES if shape.vocabulary.has_head else 0
    )
    if training.recomputes:
        rows = rows if num_moe else 0
        states = shape.num_layers * training.tokens * state
        return Activations(states + logits, dense + max(rows, of_mlp))
    whole = shape.num_layers * dense + num_moe * rows + num_dense * of_mlp
    return Activations(whole + logits, 0.0)


def stage_memory(
    uses: Sequence[MemoryUse], passes: Sequence[Activations], order: Iterable[Pass]
) -> MemoryUse:
    """Of the chunks of a pipeline stage together.

    Args:
        uses: of each chunk alone.
        passes: of one pass through each.
        order: passes of the stage.
    """
    kept = most_kept(order, [each.kept for each in passes])
    return MemoryUse(
        weights=sum(each.weights for each in uses),
        gradients=sum(each.gradients for each in uses),
        optimizer=sum(each.optimizer for each in uses),
        activations=kept + max(each.passing for each in passes),
    )


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
