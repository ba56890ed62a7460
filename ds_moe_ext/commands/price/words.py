# SPDX-License-Identifier: Apache-2.0
"""What was priced, in sentences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from ds_moe_ext.commands.price.cases import Market
from ds_moe_ext.commands.price.ways import OVER
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.planning.candidates import Priced, most_copies
from ds_moe_ext.report.units import bytes_text, counted
from ds_moe_ext.strategies.settings import BLOCK


def about(market: Market) -> str:
    """The model, the cluster, the training."""
    shape, training, hardware = market.case.shape, market.case.training, market.case.hardware
    return (
        f"{shape.name}: {shape.all_weights / 1e9:,.1f} billion weights, {len(shape.moe_layers)} "
        f"layers of {shape.num_experts} experts, {shape.top_k} a token; on {_clusters(market)}; "
        f"{training.tokens_of_step:,} tokens a step, {training.micro_batches} x "
        f"{training.micro_batch} samples of {training.length:,} a rank, {training.number_type}, "
        f"ZeRO {training.zero_stage}{', layers run again in backward' * training.recomputes}; "
        f"{_parallel(market)}"
        f"loads: {market.loads}; {hardware.num_ranks:,} ranks"
    )


def _parallel(market: Market) -> str:
    parallel = market.case.training.parallel
    if not parallel.is_any:
        return ""
    told = f"tensor parallelism {parallel.tensor}, context {parallel.context}, "
    told += counted(parallel.pipeline, "pipeline stage")
    if parallel.pipeline > 1:
        stages = parallel.layers(market.case.shape.num_layers)
        layers = [sum(map(len, chunks)) for chunks in stages]
        told += f" of {layers[0] if len(set(layers)) == 1 else _runs(layers)} layers"
        told += f" in {parallel.chunks} chunks each" if parallel.chunks > 1 else ""
    return told + "; "


def _runs(numbers: Sequence[int]) -> str:
    """Numbers that follow each other, with how often each comes."""
    runs = [(len(list(same)), number) for number, same in groupby(numbers)]
    return ", ".join(f"{times} x {number}" if times > 1 else f"{number}" for times, number in runs)


def _clusters(market: Market) -> str:
    return " beside ".join(
        f"{each.num_nodes} nodes of {each.ranks_per_node} {each.device.name}"
        for each in market.case.clusters
    )


def grid_text(grid: Grid) -> str:
    """A grid for a person."""
    homes = grid.world_size // grid.size
    ranks = f" of {grid.cell_size} ranks" if grid.cell_size > 1 else ""
    return f"{counted(grid.num_cells, 'cell')}{ranks}" + (f", {homes} homes" if homes > 1 else "")


def verdict(market: Market) -> str:
    """The fastest that fits into memory, and what it gains."""
    best, base, own = market.best, market.base, market.own_best
    if not market.priced:
        return "no way can be"
    if best is None:
        least = min(market.priced, key=lambda each: each.memory.total)
        return (
            f"nothing fits into memory: {_with_memory(market, least)} needs least; take more "
            "nodes, --recomputes, shorter samples or a higher ZeRO stage"
        )
    which = "fastest" if market.too_large is None else "fastest that fits into memory"
    told = f"{which}: {best.way.name} on {grid_text(best.way.grid)}"
    if best is base:
        told += ", the best plain expert parallelism"
    elif base is None:
        told += f", {best.tokens_per_s:,.0f} tokens/s"
    else:
        told += f", {_times(market, best)}"
        told += f" (which is on {grid_text(base.way.grid)}{_unless_it_fits(market, base)})"
    if own is not None and own is not best and own is not base and base is not None:
        told += f"; yours, {own.way.name} on {grid_text(own.way.grid)}: {_times(market, own)}"
        told += _unless_it_fits(market, own)
    if market.too_large is not None:
        told += f"; {_with_memory(market, market.too_large)} would be faster, and does not fit"
    return told


def _unless_it_fits(market: Market, priced: Priced) -> str:
    return "" if market.fits(priced) else ", and does not fit into memory"


def _with_memory(market: Market, priced: Priced) -> str:
    has = market.case.hardware.device.memory_bytes
    assert has is not None, "without it all fit"
    return (
        f"{priced.way.name} on {grid_text(priced.way.grid)} "
        f"({bytes_text(int(priced.memory.total))} of {bytes_text(has)})"
    )


def _times(market: Market, priced: Priced) -> str:
    return f"{market.gain(priced):.2f} times the speed of the best plain expert parallelism"


def plan_words(priced: Priced) -> str:
    """What the layers do: where experts live, which are copied, and what the strategy says."""
    way = priced.way
    told = [f"{way.name} on {grid_text(way.grid)}", _homes(priced), _copies(priced), priced.told]
    step = priced.steps[-1]
    if step.turns:
        told.append(f"pipeline stage {step.stage} is the busiest, {priced.fullest} the fullest")
    return "; ".join(filter(None, told))


def _homes(priced: Priced) -> str:
    grid, plans = priced.way.grid, priced.plans
    held = np.stack([plan.home.holds_EC.sum(axis=0) for plan in plans])
    ranks = f"{grid.cell_size} ranks split each expert, " if grid.cell_size > 1 else ""
    homes = grid.world_size // grid.size
    times = f", which have {homes} homes each" if homes > 1 else ""
    return f"{ranks}a cell is home to {_span(held.ravel().tolist())} of a layer's experts{times}"


def _copies(priced: Priced) -> str:
    copies_L = [most_copies(plan) for plan in priced.plans]
    if not any(copies_L):
        return "no copies"
    told = f"{sum(map(bool, copies_L))} of {len(copies_L)} layers have copies, "
    told += f"{_span([copies for copies in copies_L if copies])} in the fullest cell"
    if any(plan.carried is not None for plan in priced.plans):
        told += ", which travel during the block before"
    if any(plan.rematerialize for plan in priced.plans):
        told += ", freed between forward and backward"
    return told


def _span(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"


def zebra_words(market: Market) -> list[str]:
    """What zebra would take, where devices are unlike."""
    found = market.zebra
    if found is None:
        return []
    if isinstance(found, str):
        return [f"zebra cannot be: {found}"]
    shape, base = found.shape, market.base
    gain = "" if base is None else f", {base.step_s / found.step_s:.2f} x"
    return [
        f"zebra, {counted(found.num_groups, 'group')} of {shape.attention_ranks} attention and "
        f"{shape.expert_ranks} expert ranks: {1e3 * found.step_s:,.1f} ms a step{gain}, by a "
        "simulator of its own: exchanges are even, the host takes no time; of each expert rank "
        f"{_span(found.moved_L)} experts of a layer move to attention ranks"
    ]


def block_words(market: Market) -> list[str]:
    """How the fastest way is asked for."""
    best = market.best
    if best is None:
        return []
    strategy, _, balance = best.way.name.partition(OVER)
    grid = best.way.grid
    block = {
        "enabled": True,
        "strategy": strategy,
        "balance": balance or None,
        "expert_parallel_size": grid.num_cells,
        "expert_sharding_size": grid.cell_size if grid.cell_size > 1 else None,
    }
    said = {key: value for key, value in block.items() if value is not None}
    return [
        f"to run the fastest: {json.dumps({BLOCK: said})}; under Megatron the sizes are flags: "
        f"--expert-model-parallel-size {grid.num_cells} "
        f"--expert-tensor-parallel-size {grid.cell_size}"
    ]


def assumed(market: Market) -> list[str]:
    """What the prices rest on."""
    reached = market.case.reached
    told = [
        "assumed where the hardware file has no measurement: products reach "
        f"{reached.products:.0%} of the peak, memory {reached.memory:.0%}, links "
        f"{reached.links:.0%}, which start in {1e6 * reached.start_s:.0f} us; the host issues as "
        "measured (docs/price.md says all)"
    ]
    training = market.case.training
    if training.zero_stage >= 2 and training.micro_batches > 1:
        told.append(
            f"ZeRO {training.zero_stage} sums gradients in each of {training.micro_batches} "
            "micro-batches: all but the last sums are taken as hidden"
        )
    if training.offloaded_states:
        told.append(
            f"{training.offloaded_states:.0%} of the optimizer's states lie in host memory, and "
            "take none of the device; their step is taken as if they lay there"
        )
    if len({each.device.name for each in market.case.clusters}) > 1:
        told.append(
            "unlike devices: each computes experts at its own speed, all else at the slowest's"
        )
    return told
