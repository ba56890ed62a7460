# SPDX-License-Identifier: Apache-2.0
"""Which gradients are reduced beside which layer of backward: FSMoE, section 5. Pure.

A layer here is the paper's generalized layer: an MoE layer and all that follows it in backward up
to the next one. It has two windows in which the slow network would idle: one in its MoE part, one
in its dense part. Layers are in the order of backward. What is left after the last layer, and what
the last layer itself yields, is the tail: it is reduced at the end, in one piece and exposed.

Step 1 fills the windows. Step 2 moves what they cannot hide into MoE parts, which then take longer,
wherever that costs less than the tail. Shape letters: Q quanta moved so far, from none to all;
N slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from ds_moe_ext.cost.layer_costs import TIE, LayerCosts
from ds_moe_ext.cost.lines import AllReduce, check_costs
from ds_moe_ext.planners.degree import best_degree, fastest_seconds

QUANTA = 256  # steps in which Step 2 moves what is left


@dataclass(frozen=True, kw_only=True)
class BackwardLayer:
    """One generalized layer, as the partition sees it.

    Attributes:
        moe_seconds: from seconds of a reduction placed in its MoE part to seconds of that part at
            the degree which suits it best, for each of many reductions, both float ``[N]``:
            ``f_moe``, as ``degree.fastest_seconds``. It does not fall, and rises by no more than
            the seconds placed.
        moe_window_s: seconds of reduction that its MoE part hides, ``t_olp,moe``.
        dense_window_s: seconds of reduction that its dense part hides, ``t_olp,dense``.
        gradient_elements: elements of gradients that become ready when its backward begins:
            those of the layer before it in backward, of the head for the first; ``n_grad^(i-1)``.

    Raises:
        ValueError: a window or gradients below zero, or a window that is not finite.
    """

    moe_seconds: Callable[[np.ndarray], np.ndarray]
    moe_window_s: float
    dense_window_s: float
    gradient_elements: int

    def __post_init__(self) -> None:
        check_costs({k: v for k, v in vars(self).items() if k.endswith("_window_s")})
        _check_count("gradient_elements", self.gradient_elements)

    @classmethod
    def of(
        cls, costs: LayerCosts, *, max_degree: int, dense_window_s: float, gradient_elements: int
    ) -> BackwardLayer:
        """A layer whose MoE part runs at the degree that suits its reduction best.

        Args:
            costs: of the MoE part's operations in backward.
            max_degree: the largest degree to try.
            dense_window_s: as the attribute.
            gradient_elements: as the attribute.
        """
        return cls(
            moe_seconds=partial(fastest_seconds, costs, max_degree=max_degree),
            moe_window_s=best_degree(costs, 0.0, max_degree).window_s,
            dense_window_s=dense_window_s,
            gradient_elements=gradient_elements,
        )


@dataclass(frozen=True)
class HiddenSlices:
    """Step 1: elements by layer, in the order of backward.

    Attributes:
        dense: reduced in the dense window.
        moe: reduced in the MoE window.
        left: ready but not reduced when the layer ends. Step 2 may have moved no more by then.
    """

    dense: tuple[int, ...]
    moe: tuple[int, ...]
    left: tuple[int, ...]


def fill_windows(layers: Sequence[BackwardLayer], all_reduce: AllReduce) -> HiddenSlices:
    """Step 1: each layer hides as much as its windows take of what is ready (eqs. 3 and 4).

    Both windows begin their own reduction, and what does not fit waits for the next layer whole
    (spec section 3; as printed, the equations lose elements at every layer and can go below zero).
    """
    dense, moe, left = [], [], []
    ready = 0
    for layer in layers:
        ready += layer.gradient_elements
        dense.append(all_reduce.hidden_elements(ready, layer.dense_window_s))
        ready -= dense[-1]
        moe.append(all_reduce.hidden_elements(ready, layer.moe_window_s))
        ready -= moe[-1]
        left.append(ready)
    return HiddenSlices(tuple(dense), tuple(moe), tuple(left))


@dataclass(frozen=True)
class GradientPartition:
    """Elements by layer, in the order of backward.

    Attributes:
        dense: reduced beside the dense part.
        moe: reduced in the window of the MoE part.
        extra: reduced in the MoE part besides, in one piece with ``moe``; they may lengthen it.
        tail: elements reduced after the last layer: what no layer took, and its own gradients.
        time_s: seconds of all MoE parts and of the tail's reduction. Dense parts are not in it:
            they hide their slices and take the same time under any partition.
    """

    dense: tuple[int, ...]
    moe: tuple[int, ...]
    extra: tuple[int, ...]
    tail: int
    time_s: float

    @property
    def within_moe(self) -> tuple[int, ...]:
        """Elements of the one reduction within each MoE part."""
        return tuple(moe + extra for moe, extra in zip(self.moe, self.extra))


Step2 = Callable[[Sequence[BackwardLayer], HiddenSlices, AllReduce, int, int], tuple[int, ...]]
"""``(layers, what Step 1 hid, costs, tail elements, parts) -> elements moved into each MoE part``;
there is something left to move."""


def partition_gradients(
    layers: Sequence[BackwardLayer],
    *,
    all_reduce: AllReduce,
    tail_elements: int = 0,
    num_quanta: int = QUANTA,
    step_2: Step2 | None = None,
) -> GradientPartition:
    """Both steps. Costs ``Q`` values of ``moe_seconds`` and ``Q * Q`` sums a layer.

    Step 2 (eq. 5, with the tail in the objective and a causal bound) is solved by dynamic
    programming: the best there is if what is left moves in ``num_quanta`` equal parts. The best of
    all is faster by the reduction of one element more than a part, for each layer and the tail, or
    by less. Among equals the fewest elements move, and as late as they can.

    Args:
        layers: in the order of backward.
        all_reduce: cost of reducing gradients.
        tail_elements: gradients that become ready after the last layer: its own.
        num_quanta: parts in which elements move; of one element if there are fewer elements.
        step_2: another way to solve it, as ``evolution.evolved``.

    Raises:
        ValueError: ``tail_elements`` below 0 or ``num_quanta`` below 1.
    """
    _check_count("tail_elements", tail_elements)
    _check_count("num_quanta", num_quanta, least=1)
    hidden = fill_windows(layers, all_reduce)
    left = hidden.left[-1] if layers else 0
    extra = (0,) * len(layers)
    if left:
        move = step_2 or _move
        extra = move(layers, hidden, all_reduce, tail_elements, min(num_quanta, left))
        assert min(extra) >= 0 and all(map(int.__le__, accumulate(extra), hidden.left))
    tail = tail_elements + left - sum(extra)
    reduced_s_N = all_reduce.seconds_of_each(np.array(hidden.moe) + np.array(extra))
    moe_s = sum(
        layer.moe_seconds(reduced_s_1).item()
        for layer, reduced_s_1 in zip(layers, reduced_s_N[:, None])
    )
    return GradientPartition(
        dense=hidden.dense,
        moe=hidden.moe,
        extra=extra,
        tail=tail,
        time_s=moe_s + all_reduce.seconds(tail),
    )


def _move(
    layers: Sequence[BackwardLayer],
    hidden: HiddenSlices,
    all_reduce: AllReduce,
    tail_elements: int,
    num_quanta: int,
) -> tuple[int, ...]:
    """Step 2: elements moved into each layer's MoE part, of those left after the last layer."""
    left = hidden.left[-1]
    elements_Q = np.array([quanta * left // num_quanta for quanta in range(num_quanta + 1)])
    moved_QQ = np.subtract.outer(elements_Q, elements_Q)  # by after and before a layer
    moved_N, size_N = np.unique(np.maximum(moved_QQ, 0), return_inverse=True)
    size_QQ = size_N.reshape(moved_QQ.shape)  # which NumPy 1 leaves flat
    best_s_Q = np.where(elements_Q == 0, 0.0, np.inf)
    sources = []
    for layer, moe, ready in zip(layers, hidden.moe, hidden.left):
        seconds_N = layer.moe_seconds(all_reduce.seconds_of_each(moe + moved_N))
        best_s_QQ = np.where(moved_QQ >= 0, best_s_Q + seconds_N[size_QQ], np.inf)
        sources.append(_first_least(best_s_QQ))
        best_s_Q = np.where(elements_Q <= ready, best_s_QQ.min(axis=1), np.inf)
    tail_s_Q = all_reduce.seconds_of_each(tail_elements + left - elements_Q)
    path = [int(_first_least(best_s_Q + tail_s_Q))]
    for source_Q in reversed(sources):
        path.append(int(source_Q[path[-1]]))
    return tuple(np.diff(elements_Q[path[::-1]]).tolist())


def _first_least(seconds: np.ndarray) -> np.ndarray:
    """Along the last axis: the first place of the least, or of what equals it but for rounding."""
    return (seconds <= seconds.min(axis=-1, keepdims=True) * (1 + TIE)).argmax(axis=-1)


def _check_count(name: str, value: int, *, least: int = 0) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}; give a number of at least {least}")
