# SPDX-License-Identifier: Apache-2.0
"""Looks at some layers in each step: what was predicted of their rows, and where these went.

A look reads whole tables of rows, while nothing else goes on. So layers take turns: all are looked
at in each step where they are few and small, else some, each as often as the others. Shape letters:
I recorded steps, L layers, C cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ds_moe_ext.moe.observation import Rows
from ds_moe_ext.planning.loads import balance_L
from ds_moe_ext.planning.strategy import Plan
from ds_moe_ext.report.record import LooksRecord

MOST_LAYERS = 4  # in a step
MOST_ENTRIES = 64 * 256  # of their tables: one layer of 64 cells and 256 experts


class Look(NamedTuple):
    """At one layer in one step.

    Attributes:
        predicted_C: rows that each cell would have computed by the plan, had the rows come that it
            was made for, int64; None where it was made for none.
        by_paper_C: rows that each would have computed of those that came, by the same copies and
            the paper's own rule, int64; None where no other was followed.
        num_left: rows that another cell computed than they came from.
        num_crossed: and one on another node.
    """

    predicted_C: np.ndarray | None
    by_paper_C: np.ndarray | None
    num_left: int
    num_crossed: int

    @classmethod
    def at(cls, plan: Plan, seen: Rows, node_C: np.ndarray) -> Look:
        """Args: plan: that the layer ran by. seen: what it routed. node_C: node of each cell."""
        between_CC = np.zeros((len(node_C), len(node_C)), dtype=np.int64)
        for rows_CE, (_, share) in seen.passes:
            between_CC += share.of_rows(rows_CE).rows_between(rows_CE[:, None])[0]
        predicted_CE, by_paper = plan.predicted_CE, plan.by_paper
        predicted_C = by_paper_C = None
        if predicted_CE is not None and predicted_CE.any():
            predicted_C = plan.share.of_rows(predicted_CE).computed_C(predicted_CE)
        if by_paper is not None:
            by_paper_C = np.zeros(len(node_C), dtype=np.int64)
            for rows_CE, (target, _) in seen.passes:
                by_paper_C += by_paper(target).computed_C(rows_CE)
        return cls(
            predicted_C,
            by_paper_C,
            num_left=int(between_CC.sum() - between_CC.trace()),
            num_crossed=int(between_CC[node_C[:, None] != node_C].sum()),
        )


def in_turn(step: int, rows: Sequence[Rows]) -> range:
    """The layers whose turn it is.

    Args:
        step: its number.
        rows: of each layer.
    """
    size = sum(one.rows_CE.size for seen in rows for one in seen.passes)
    rounds = max(-(-len(rows) // MOST_LAYERS), -(-size // MOST_ENTRIES))
    rounds |= 1  # odd: records are thinned to every second step, and all layers stay in it
    return range(step % rounds, len(rows), rounds)


def looks_record(
    looks_I: Sequence[Mapping[int, Look]], num_layers: int, homes: Sequence[int], node_C: np.ndarray
) -> LooksRecord:
    """All looks of a run.

    Args:
        looks_I: in each recorded step, by layer.
        num_layers: of the run.
        homes: cells that are home to experts.
        node_C: node of each cell.
    """
    predicted_IL, by_paper_IL, left_IL, crossed_IL = np.full((4, len(looks_I), num_layers), np.nan)
    for index, looks in enumerate(looks_I):
        for layer, look in looks.items():
            at = index, layer
            left_IL[at], crossed_IL[at] = look.num_left, look.num_crossed
            if look.predicted_C is not None:
                predicted_IL[at] = balance_L(look.predicted_C[homes])
            if look.by_paper_C is not None:
                by_paper_IL[at] = balance_L(look.by_paper_C[homes])
    num_nodes = len(np.unique(node_C))
    return LooksRecord(predicted_IL, by_paper_IL, left_IL, crossed_IL, num_nodes)
