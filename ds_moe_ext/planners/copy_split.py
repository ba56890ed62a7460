# SPDX-License-Identifier: Apache-2.0
"""Which of a block's copies move beside which computation: Pro-Prophet's sub-operators (spec 3.3).

Experts move one after another, in the order in which they were selected. Under the block before,
there are two computations to hide them: its experts, whose time depends on rows, and its non-MoE
layer, whose time does not. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

SplitRule = Callable[[int, float], int]
"""How many experts move beside the non-MoE layer: of the experts there are, and of those whose
moves fit into that layer's time (not rounded; infinity where moves take no time)."""


class Split(NamedTuple):
    """Experts that move beside each of two computations.

    Attributes:
        first: beside the computation that comes first, in the order in which they move.
        second: beside the one after it.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]


def fill_static_first(num_experts: int, num_hidden: float) -> int:
    """As many as the non-MoE layer hides: its time is known beforehand, that of experts is not."""
    return math.floor(min(num_experts, num_hidden))


def by_halves(num_experts: int, num_hidden: float) -> int:
    """Half of them, the odd one too; as the authors' code does."""
    return num_experts - num_experts // 2


SPLITS: Mapping[str, SplitRule] = {"fnec_first": fill_static_first, "half": by_halves}


def split_forward(
    selected: Sequence[int], *, rule: SplitRule, layer_s: float, move_s: float
) -> Split:
    """Trans under the forward of the block before: first its experts, then its non-MoE layer.

    Args:
        selected: experts to move, in order.
        rule: of ``SPLITS``.
        layer_s: seconds of the non-MoE layer, ``T_FNEC``; the same on every rank.
        move_s: seconds of one expert's move; likewise.

    Raises:
        ValueError: seconds below zero or not finite.
    """
    num_first = len(selected) - _beside_layer(len(selected), rule, layer_s, move_s)
    return Split(tuple(selected[:num_first]), tuple(selected[num_first:]))


def split_backward(
    selected: Sequence[int], *, rule: SplitRule, layer_s: float, move_s: float
) -> Split:
    """Agg under the backward of the block before: first its non-MoE layer, then its experts.

    Arguments as of ``split_forward``, with ``T_BNEC`` and the time of one expert's gradients.
    """
    num_first = _beside_layer(len(selected), rule, layer_s, move_s)
    return Split(tuple(selected[:num_first]), tuple(selected[num_first:]))


def _beside_layer(num_experts: int, rule: SplitRule, layer_s: float, move_s: float) -> int:
    if not (0 <= layer_s < math.inf and 0 <= move_s < math.inf):
        raise ValueError(
            f"the layer takes {layer_s} s and a move {move_s} s; give finite seconds from 0"
        )
    return rule(num_experts, layer_s / move_s if move_s else math.inf)
