"""What carries rows between cells by each way: who takes part, over which communicators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ds_moe_ext.all_to_all import (
    Carrier,
    Channel,
    Planner,
    Reach,
    Relays,
    by_leaders,
    by_places,
)
from ds_moe_ext.cost.exchange import Way
from ds_moe_ext.layout import BETWEEN_NODES, WITHIN_NODES, ParallelLayout
from ds_moe_ext.moe.deep_ep import DeepEp
from ds_moe_ext.schedule.task import Lane

PLANNERS: Mapping[Way, Planner] = {Way.BY_LEADERS: by_leaders, Way.BY_PLACES: by_places}
"""Of ``BY_NODES``."""


def carrier_of(layout: ParallelLayout, lane: Lane, way: Way, direct: Channel) -> Carrier | None:
    """This rank's part in a way between the cells; None where that is the direct one.

    Args:
        layout: built with ``NODE_AXES`` of the lane, if the way leads by the nodes.
        lane: that the rows travel in.
        way: which.
        direct: between all cells.
    """
    if way is Way.DEEP_EP:
        return DeepEp.of(direct.group)
    if way not in PLANNERS or layout.why_flat:
        return None
    channels = {
        Reach.WITHIN: Channel(layout.group(WITHIN_NODES, lane)),
        Reach.BETWEEN: replace(direct, group=layout.group(BETWEEN_NODES, lane)),
    }
    return Relays(PLANNERS[way], layout.nodes, layout.index("ep"), channels)
