# SPDX-License-Identifier: Apache-2.0
"""New homes for experts where that gains more than the move costs. Ours. Pure.

Experts change places by twos, so that every cell keeps its number of experts of each layer. What a
swap gains is what it leaves behind the copies that are planned for the new homes: these are planned
anew for every swap that is tried. Shape letters: L layers (of what is tried: a layer as often as
it is), E experts of a layer, C cells, S slots of a cell, Q pairs of cells, N nodes, D links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_moe_ext.cost.prices import TRIPS, Prices, RoutedRows, RowFlow, flow_seconds
from ds_moe_ext.placement import Placement
from ds_moe_ext.planners.materialize import materialize

ROUNDS = 16  # of trying, at most; each layer takes one step in each
PARTNERS = 4  # cells with least to do, with each of which the busiest tries a swap


@dataclass(frozen=True, eq=False)
class CopyRules:
    """How layers run by any homes: Algorithm 1 plans their copies, and the guard stands behind it.

    Attributes:
        routed: rows of each layer.
        overlap_degree_L: ``t`` of Algorithm 1, int64.
        copies_L: ``m``, likewise.
        prices: of the layers, whose experts are alike.
        flow_of: how rows go to copies.
    """

    routed: RoutedRows
    overlap_degree_L: np.ndarray
    copies_L: np.ndarray
    prices: Prices
    flow_of: Callable[[Sequence[Placement], RoutedRows], RowFlow]

    def seconds(self, homes: Sequence[Placement]) -> float:
        """Of all layers in a step, by homes of each."""
        return math.fsum(self.run(range(len(homes)), homes).seconds_L)

    def run(self, layers: Sequence[int], homes: Sequence[Placement]) -> Runs:
        """Layers by homes, each as often as it is named."""
        totals = self.routed.totals
        routed = self.routed.of_layers(layers)
        targets = materialize(
            homes,
            [totals[layer] for layer in layers],
            overlap_degree=self.overlap_degree_L[list(layers)],
            copies_per_cell=self.copies_L[list(layers)],
            node_C=routed.node_C,
        )
        alone, copied = (self.flow_of(placements, routed) for placements in (homes, targets))
        alone_L, copied_L = (flow_seconds(flow, prices=self.prices) for flow in (alone, copied))
        pays_L = copied_L < alone_L
        busy_LC = np.where(pays_L[:, None], self._busy_LC(copied), self._busy_LC(alone))
        in_force = [t if pays else home for t, home, pays in zip(targets, homes, pays_L)]
        per_holder = [totals[layer] / t.num_holders_E for layer, t in zip(layers, in_force)]
        return Runs(homes, per_holder, busy_LC, np.minimum(alone_L, copied_L))

    def _busy_LC(self, flow: RowFlow) -> np.ndarray:
        """Seconds that each cell and its links are busy, and its node's."""
        prices = self.prices
        row_bytes = TRIPS * prices.row_bytes
        cell_LC = np.maximum(flow.sent_LC, flow.received_LC) * row_bytes / prices.intra_bytes_per_s
        node_LN = np.maximum(flow.out_LN, flow.in_LN) * row_bytes / prices.inter_bytes_per_s
        busy_LC: np.ndarray = prices.row_s * flow.computed_LC + cell_LC
        return busy_LC + node_LN[:, self.routed.node_C]

    @property
    def row_s(self) -> float:
        """Seconds that a row keeps a cell and its link busy."""
        return self.prices.row_s + TRIPS * self.prices.row_bytes / self.prices.intra_bytes_per_s


class Runs(NamedTuple):
    """What came of layers by some homes.

    Attributes:
        homes: of each.
        rows: of each expert's holders, ``[E]`` a layer, as if they shared them evenly.
        busy_LC: seconds that each cell is busy.
        seconds_L: that each layer takes.
    """

    homes: Sequence[Placement]
    rows: Sequence[np.ndarray]
    busy_LC: np.ndarray
    seconds_L: np.ndarray


@dataclass(frozen=True)
class MoveCosts:
    """What experts that move must gain.

    Attributes:
        expert_s: seconds in which a link carries one, with all that is kept of it.
        num_steps: for which new homes are meant.
    """

    expert_s: float
    num_steps: int

    def seconds(
        self, old: Sequence[Placement], new: Sequence[Placement], node_C: np.ndarray
    ) -> float:
        """That the move takes: as long as its busiest link."""
        links = [_links_D(a.owner_E, b.owner_E, node_C) for a, b in zip(old, new)]
        return self.expert_s * int(np.sum(links, axis=0).max())


def _links_D(old_E: np.ndarray, new_E: np.ndarray, node_C: np.ndarray) -> np.ndarray:
    """Experts of a layer that leave each cell, that come to it, and likewise of nodes; int64."""
    moves_E = old_E != new_E
    from_, to = old_E[moves_E], new_E[moves_E]
    crosses = node_C[from_] != node_C[to]
    sizes = len(node_C), int(node_C.max()) + 1
    ends = (from_, to), (node_C[from_[crosses]], node_C[to[crosses]])
    return np.concatenate(
        [np.bincount(end, minlength=n) for n, two in zip(sizes, ends) for end in two]
    )


class _Step(NamedTuple):
    """What one layer has gained by its swaps of one round."""

    layer: int
    gain_s: float
    home: Placement


def swap_homes(
    homes: Sequence[Placement], rules: CopyRules, costs: MoveCosts
) -> tuple[Placement, ...]:
    """Let experts of a layer change places, as far as that gains more than it costs.

    In each round every layer pairs its busiest cell with the least busy, the next with the next,
    and tries to swap an expert between the first pair, the first two, four and so on, and between
    the busiest cell and some of the least busy; the best of these is kept, and a layer that gains
    nothing any more is left. Of all that was kept, in order of gain, so much is done that what
    ``num_steps`` steps gain less what the move takes is most. Which copies are planned depends on
    homes in no simple way, so that nothing is concluded: all that is tried is planned and priced.

    Costs at most ``ROUNDS`` times the planning of some ten times the layers.

    Args:
        homes: the present ones.
        rules: what layers take by any homes.
        costs: of a move.

    Returns:
        One placement a layer; the present one where none of its experts moves.
    """
    if not rules.row_s:  # rows cost nothing
        return tuple(homes)
    return _that_pay(homes, _steps(homes, rules, costs), costs, rules.routed.node_C)


def _steps(homes: Sequence[Placement], rules: CopyRules, costs: MoveCosts) -> list[_Step]:
    """What layers could gain, one after the other; of each layer in order."""
    steps: list[_Step] = []
    # What a swap adds to all links, on average.
    swap_s = 2 * costs.expert_s / (homes[0].num_cells * costs.num_steps)
    now = rules.run(range(len(homes)), homes)
    layers = list(range(len(homes)))
    for _ in range(ROUNDS):
        tried = [
            (at, layer, num_swaps, home)
            for at, layer in enumerate(layers)
            for num_swaps, home in _candidates(now, at, rules.row_s)
        ]
        if not tried:
            break
        ats, of_layers, counts, tried_homes = zip(*tried)
        found = rules.run(of_layers, tried_homes)
        gain = now.seconds_L[list(ats)] - found.seconds_L
        net = gain - swap_s * np.array(counts)
        best: dict[int, int] = {}
        for number, at in enumerate(ats):
            if net[number] > max(0.0, net[best[at]] if at in best else 0.0):
                best[at] = number
        kept = list(best.values())
        layers = [of_layers[number] for number in kept]
        steps += [_Step(of_layers[n], float(gain[n]), tried_homes[n]) for n in kept]
        now = Runs(
            [found.homes[n] for n in kept],
            [found.rows[n] for n in kept],
            found.busy_LC[kept],
            found.seconds_L[kept],
        )
    return steps


def _candidates(now: Runs, at: int, row_s: float) -> Iterator[tuple[int, Placement]]:
    """Homes to try in place of those of a layer, and how many swaps lead there."""
    home, rows_E, busy_C = now.homes[at], now.rows[at], now.busy_LC[at]
    order_C = np.argsort(-busy_C, kind="stable")
    num_pairs, idle_C = home.num_cells // 2, order_C[::-1]
    others = idle_C[1 : min(PARTNERS, home.num_cells - 1)]
    from_Q = np.concatenate([order_C[:num_pairs], np.repeat(order_C[:1], len(others))])
    to_Q = np.concatenate([idle_C[:num_pairs], others])
    given_Q, taken_Q, is_one_Q = _best_swaps(
        home, rows_E, from_Q, to_Q, (busy_C[from_Q] - busy_C[to_Q]) / (2 * row_s)
    )
    pairs = np.flatnonzero(is_one_Q[:num_pairs])
    counts = sorted({len(pairs), *(2**power for power in range(len(pairs).bit_length()))} - {0})
    chosen = [pairs[:count] for count in counts]
    chosen += [np.array([q]) for q in range(num_pairs, len(from_Q)) if is_one_Q[q]]
    for few in chosen:
        owner_E = home.owner_E.copy()
        owner_E[given_Q[few]], owner_E[taken_Q[few]] = to_Q[few], from_Q[few]
        yield len(few), Placement.owned_by(owner_E, home.num_cells)


def _best_swaps(
    home: Placement,
    rows_E: np.ndarray,
    from_Q: np.ndarray,
    to_Q: np.ndarray,
    wanted_Q: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The swap between each pair of cells that takes so many rows from one to the other, or nearly.

    Returns:
        Experts of the one and of the other, int64 ``[Q]``, and whether any swap takes some.
    """
    given_QS, taken_QS = home.expert_CS[from_Q], home.expert_CS[to_Q]
    less_QSS = rows_E[given_QS][:, :, None] - rows_E[taken_QS][:, None, :]
    off_QSS = np.abs(less_QSS - wanted_Q[:, None, None])
    off_QSS[(less_QSS <= 0) | (given_QS < 0)[:, :, None] | (taken_QS < 0)[:, None, :]] = np.inf
    all_Q = np.arange(len(from_Q))
    best_Q = off_QSS.reshape(len(from_Q), home.num_slots**2).argmin(axis=1)
    given_Q, taken_Q = np.divmod(best_Q, home.num_slots)
    is_one_Q = np.isfinite(off_QSS[all_Q, given_Q, taken_Q])
    return given_QS[all_Q, given_Q], taken_QS[all_Q, taken_Q], is_one_Q


def _that_pay(
    homes: Sequence[Placement], steps: Sequence[_Step], costs: MoveCosts, node_C: np.ndarray
) -> tuple[Placement, ...]:
    """The homes after so many of the steps, in order of gain, as gain most less what they cost."""
    # A step that follows on a smaller one comes behind it, so that layers take theirs in order.
    least_s: dict[int, float] = {}
    keys = []
    for step in steps:
        least_s[step.layer] = min(step.gain_s, least_s.get(step.layer, math.inf))
        keys.append(-least_s[step.layer])
    chosen, new = tuple(homes), list(homes)
    links = [_links_D(home.owner_E, home.owner_E, node_C) for home in homes]  # none yet
    total_D, gain_s, most_s = np.zeros_like(links[0]), 0.0, 0.0
    for number in sorted(range(len(steps)), key=keys.__getitem__):
        layer, step_s, home = steps[number]
        now_D = _links_D(homes[layer].owner_E, home.owner_E, node_C)
        total_D += now_D - links[layer]
        links[layer], new[layer] = now_D, home
        gain_s += step_s
        net_s = costs.num_steps * gain_s - costs.expert_s * int(total_D.max())
        if net_s > most_s:
            chosen, most_s = tuple(new), net_s
    return chosen
