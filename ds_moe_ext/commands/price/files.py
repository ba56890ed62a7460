# SPDX-License-Identifier: Apache-2.0
"""What was priced, for other programs: all numbers, and a timeline for Perfetto."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_moe_ext.commands.price.cases import Market
from ds_moe_ext.commands.price.timelines import boxes, row_names
from ds_moe_ext.commands.price.words import about, assumed, plan_words, verdict, zebra_words
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.planning.candidates import Priced
from ds_moe_ext.schedule.simulator import chrome_trace

NUMBERS = ("computed_s", "imbalance_s", "exposed_s", "host_s", "end_s", "bubble_s", "balance")


def write_trace(path: Path, market: Market, pays: Sequence[str]) -> None:
    """The timeline of a way, a process a class of cells, and one a pipeline stage."""
    way = market.traced
    assert way is not None
    path.write_text(chrome_trace(boxes(way), dict(enumerate(row_names(way)))), "utf-8")


def write_json(path: Path, market: Market, pays: Sequence[str]) -> None:
    """All numbers: seconds, bytes, and what they rest on."""
    case = market.case
    document = {
        "about": about(market),
        "verdict": verdict(market),
        "model": dataclasses.asdict(case.shape),
        "training": dataclasses.asdict(case.training),
        "clusters": [dataclasses.asdict(each) for each in case.clusters],
        "loads": market.loads,
        "ways": [_way(market, each) for each in market.priced],
        "refused": [
            {"strategy": each.way.name, **_sizes(each.way.grid), "why": each.why}
            for each in market.refused
        ],
        "zebra": None if market.zebra is None else zebra_words(market)[0],
        "pays": list(pays),
        "reached": dataclasses.asdict(case.reached),
        "assumed": assumed(market),
    }
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def _way(market: Market, priced: Priced) -> Mapping[str, Any]:
    return {
        "strategy": priced.way.name,
        **_sizes(priced.way.grid),
        "is_own": priced.way.name == market.own,
        "is_fastest": priced is market.best,
        "is_base": priced is market.base,
        "fits": market.fits(priced),
        "step_s": priced.step_s,
        "tokens_per_s": priced.tokens_per_s,
        "gain": market.gain(priced),
        **{name: priced.mean(name) for name in NUMBERS},
        "copies": priced.copies,
        "busiest_stage": priced.steps[-1].stage,
        "fullest_stage": priced.fullest,
        "memory_bytes": {**vars(priced.memory), "total": priced.memory.total},
        "plan": plan_words(priced),
    }


def _sizes(grid: Grid) -> Mapping[str, int]:
    """As the block's keys say them."""
    return {
        "expert_parallel_size": grid.num_cells,
        "expert_sharding_size": grid.cell_size,
        "homes": grid.world_size // grid.size,
    }
