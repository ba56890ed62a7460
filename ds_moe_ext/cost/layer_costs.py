# SPDX-License-Identifier: Apache-2.0
"""What the chunks of an MoE layer take in three lanes: FSMoE's model, exact (spec 2.2, 2.3). Pure.

``r`` chunks pass through three lanes, each in its own order; one all-reduce of gradients may stand
between the dispatches and the combines::

    inter    D_1 ... D_r, [all-reduce], C_1 ... C_r      all-to-alls, over the slow links
    intra    AG_1 ... AG_r, RS_1 ... RS_r                inside a cell, over the fast links
    compute  E_1 ... E_r

Letters of the formulas are the paper's: ``a``, ``g``, ``s``, ``e`` are the seconds of one chunk's
all-to-all, all-gather, reduce-scatter and expert. The unit of time is that of the costs. Shape
letters: R degrees, P paths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ds_moe_ext.cost.lines import LinearCost

TIE = 1e-12  # of the least time: what rounding makes of equal times


class Chunks(NamedTuple):
    """Seconds of one of ``r`` chunks, each float ``[R]``: ``r``, ``a``, ``g``, ``s``, ``e``."""

    degree_R: np.ndarray
    all_to_all_R: np.ndarray
    all_gather_R: np.ndarray
    reduce_scatter_R: np.ndarray
    expert_R: np.ndarray


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """The operations of one MoE layer, in one direction.

    Attributes:
        all_to_all: dispatch, or combine; both are of one size.
        all_gather: of a dispatched chunk inside a cell.
        reduce_scatter: of what the cell's ranks computed.
        expert: the experts' computation.
    """

    all_to_all: LinearCost
    all_gather: LinearCost
    reduce_scatter: LinearCost
    expert: LinearCost

    def in_backward(self) -> LayerCosts:
        """The costs of backward, from forward's: experts compute two gradients of each row.

        The units stay as they are; the paper's text doubles these too, its code does not.
        """
        return replace(self, expert=self.expert.doubled())

    def cut(self, degree_R: np.ndarray) -> Chunks:
        """Seconds of a chunk at each degree; a solver may ask between whole degrees."""
        return Chunks(
            degree_R,
            self.all_to_all.chunk_seconds(degree_R),
            self.all_gather.chunk_seconds(degree_R),
            self.reduce_scatter.chunk_seconds(degree_R),
            self.expert.chunk_seconds(degree_R),
        )


def link_seconds(chunks: Chunks) -> np.ndarray:
    """Seconds that all-to-alls take on the slow links, float ``[R]``."""
    return 2 * chunks.degree_R * chunks.all_to_all_R


def path_seconds(chunks: Chunks) -> np.ndarray:
    """Seconds of the paths through a layer that no all-reduce is on, float ``[P, R]``.

    The first three are the paper's ``t2`` to ``t4``. The others exceed all of these and
    ``t1`` only if all-gather and reduce-scatter take unequally long.
    """
    r, a, g, s, e = chunks
    return np.stack(
        [
            2 * a + g + s + r * e,
            2 * r * a + g + s,
            2 * a + r * g + r * s,
            (r + 1) * a + g + r * s,
            (r + 1) * a + r * g + s,
            2 * a + g + e + r * s,
            2 * a + r * g + e + s,
        ]
    )


def makespans(chunks: Chunks, gradient_s: float | np.ndarray) -> np.ndarray:
    """Seconds from the first dispatch to the last combine, exactly, float ``[R]``.

    Args:
        chunks: at each degree.
        gradient_s: of the all-reduce; one for all, or ``[R]``.
    """
    return np.maximum(link_seconds(chunks) + gradient_s, path_seconds(chunks).max(axis=0))


def windows(chunks: Chunks) -> np.ndarray:
    """How long an all-reduce the layer hides in full, float ``[R]``: the paper's ``t_olp,moe``.

    It is the makespan without an all-reduce, less the all-to-alls. The paper's own formulas take
    the time of the case for the makespan, which is the same if all-gather and reduce-scatter take
    equally long, and else may be less.
    """
    return path_seconds(chunks).max(axis=0) - link_seconds(chunks)
