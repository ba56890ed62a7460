"""Better shares: what they rest on is worked out on one rank, layer by layer, and told to all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ds_moe_ext.comm import gather_objects
from ds_moe_ext.layout import GRID
from ds_moe_ext.schedule.task import INTER
from ds_moe_ext.strategy import Plan, Site


def completed(plans: Sequence[Plan], sites: Sequence[Site]) -> Sequence[Plan]:
    """The plans, by their better shares; the same where they have none. Collective over the grid
    where some have: between steps, when no layer runs.

    Args:
        plans: one a layer, equal on all ranks of the grid.
        sites: of the layers, in the same order; of one grid.
    """
    better = {n: plan.better for n, plan in enumerate(plans) if plan.better is not None}
    if not better:
        return plans
    own = {n: each.numbers for n, each in better.items() if sites[n].solves}
    layout = sites[0].layout
    told: list[dict[int, np.ndarray]] = [own]
    if layout.grid.size > 1:
        told = gather_objects(own, layout.group(GRID, INTER))
    numbers = {n: found for each in told for n, found in each.items()}
    return [
        replace(plan, share=better[n].share(numbers[n]), better=None) if n in better else plan
        for n, plan in enumerate(plans)
    ]
