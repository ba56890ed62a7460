# SPDX-License-Identifier: Apache-2.0
"""What HECATE is compared with in figures 9 and 10: FasterMoE, SmartMoE, FlexMoE (section 5.1).

SmartMoE and FlexMoE move experts with their optimizer states while nothing else runs (section 2),
every few steps; the interval and the slots that are best for each count, as the authors tuned
theirs. Policies: ``rival_planners.py``; FasterMoE's is its released one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
from rival_planners import by_rule, even_slots, exchanged, expanded, sent

from ds_moe_ext.core.placement import Placement, even_owners
from ds_moe_ext.core.share import LocalElseOwner
from ds_moe_ext.planning.layer_costs import BlockPrices
from ds_moe_ext.planning.prices import RowPrices, busiest_link
from ds_moe_ext.planning.prophet_planner import shadow_experts
from papers.hecate_steps import BACKWARD, Setup, System

INTERVALS = (10, 25, 50, 100)  # steps between two rearrangements
OWN_SLOTS = 2  # of a rank and layer under EP
SLOTS = (3, 4, 6)  # figure 13 has FlexMoE at 3 times EP's memory: 6
STATES = 7  # times a replica's bytes: Adam's are 6 times fp16 weights (section 2)
WAYS = 2  # of a replica: weights there, gradients back


@lru_cache(maxsize=64)
def rival_speeds(of: Setup) -> dict[str, float]:
    """Of each rival over EP, end to end."""
    seen = [replace(of, age=interval) for interval in INTERVALS]
    return {
        "FasterMoE": _speed(of, _shadowed_s(of)),
        "SmartMoE": max(_speed(each, _rearranged_s(each, OWN_SLOTS)) for each in seen),
        "FlexMoE": max(
            _speed(each, _rearranged_s(each, slots)) for each in seen for slots in SLOTS
        ),
    }


def _speed(of: Setup, layers_s: float) -> float:
    return of.step(System.EP).seconds / (layers_s + of.other_s)


def _shadowed_s(of: Setup) -> float:
    """All layers under FasterMoE, which copies to all ranks after the gate; nothing hides that."""
    prices, node_C = of.prices, of.hardware.node_of_ep_ranks(of.num_ranks)
    (owner,) = even_owners([of.num_experts], of.num_ranks)
    block = BlockPrices(
        row_s=prices.row_s / (1 + BACKWARD),
        row_bytes=prices.row_bytes,
        bytes_per_s=prices.inter_bytes_per_s / of.hardware.ranks_per_node,
        weight_bytes=of.model.expert_bytes,
        gradient_bytes=of.model.expert_bytes,
        copy_bytes_per_s=prices.inter_bytes_per_s,
    )
    seconds = partial(RowPrices.of(prices, of.num_ranks).seconds, node_C=node_C)
    layers_s = 0.0
    for rows_CE in of.loads.now:
        target = shadow_experts(owner, rows_CE, prices=block).target
        sent_CEC = by_rule(LocalElseOwner(owner, target))(rows_CE)
        copied = busiest_link(owner, owner, target, node_C)
        layers_s += seconds(sent_CEC.sum(axis=1)) + WAYS * prices.copy_s * copied
    return layers_s


def _rearranged_s(of: Setup, slots: int) -> float:
    """All layers under SmartMoE, which has no slots to spare, or FlexMoE: placed ``age`` steps ago
    by the loads of then. The way from there to what is placed next is part of the steps between."""
    prices, node_C = of.prices, of.hardware.node_of_ep_ranks(of.num_ranks)
    seconds = partial(RowPrices.of(prices, of.num_ranks).seconds, node_C=node_C)
    first_EC = even_owners([of.num_experts], of.num_ranks)[0].holds_EC.astype(np.int64)
    if slots > OWN_SLOTS:
        first_EC = even_slots(of.num_experts, slots, node_C)

    def placed(rows_CE: np.ndarray, slots_EC: np.ndarray) -> np.ndarray:
        if slots > OWN_SLOTS:
            return expanded(rows_CE, slots_EC, node_C, seconds)
        rank_E = exchanged(rows_CE.sum(axis=0), slots_EC.argmax(axis=1), of.num_ranks)
        return Placement.owned_by(rank_E, of.num_ranks).holds_EC.astype(np.int64)

    layers_s = 0.0
    for then_CE, lately_CE, now_CE in zip(*vars(of.loads).values()):
        slots_EC = placed(then_CE, first_EC)
        holders, following = (
            Placement(each_EC > 0) for each_EC in (slots_EC, placed(lately_CE, slots_EC))
        )
        main = Placement.owned_by(holders.holds_EC.argmax(axis=1), of.num_ranks)
        moved_s = STATES * prices.copy_s * busiest_link(main, holders, following, node_C)
        summed_s = WAYS * prices.copy_s * busiest_link(main, main, holders, node_C)
        layers_s += seconds(sent(now_CE, slots_EC, node_C)) + moved_s / of.age
        layers_s += max(summed_s - BACKWARD * of.attention_s, 0.0)
    return layers_s
