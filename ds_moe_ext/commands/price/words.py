# SPDX-License-Identifier: Apache-2.0
"""How a person reads what was priced: in sentences, in tables, and as files for other programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from ds_moe_ext import older_names
from ds_moe_ext.commands.price.market import BASE, OVER, SIZED, Market
from ds_moe_ext.commands.price.timelines import boxes, row_names
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.core.placement import most_replicas
from ds_moe_ext.planning.candidates import Priced
from ds_moe_ext.planning.model_shape import Training
from ds_moe_ext.report.units import EN_DASH, bytes_text, counted, ratio_text, say, seconds_text
from ds_moe_ext.schedule.simulator import chrome_trace
from ds_moe_ext.strategies.settings import BLOCK

GIB = 2**30
PARTS = {
    "computed": "computed_s",
    "imbalance": "imbalance_s",
    "sending": "exposed_s",
    "host": "host_s",
    "end": "end_s",
}
"""Where the time of a step goes: heading, and number of ``StepPrice``."""
BUBBLE = {"bubble": "bubble_s"}
"""And where there are pipeline stages."""
FULL = 165
"""Columns of a terminal that all of these want."""
BRIEF = ("step", "MFU", "gain", "GiB a rank")
"""What is shown on fewer."""
ON_PAGES = ("balance", "replicas")
"""What is shown by --html and --json alone."""
MEMORY = ("weights", "gradients", "optimizer", "activations", "replicas", "runtime")
"""What a rank needs memory for: numbers of ``MemoryUse``."""
NUMBERS = (*PARTS.values(), *BUBBLE.values(), "balance")


def about(market: Market) -> str:
    """The model, the cluster, the training."""
    shape, training, hardware = market.case.shape, market.case.training, market.case.hardware
    clusters = " beside ".join(
        f"{each.num_nodes} nodes of {each.ranks_per_node} {each.device.name}"
        for each in market.case.clusters
    )
    return (
        f"{shape.name}: {shape.all_weights / 1e9:,.1f} billion weights, {len(shape.moe_layers)} "
        f"layers of {shape.num_experts} experts, {shape.top_k} a token; on {clusters}; "
        f"{training.tokens_of_step:,} tokens a step, {training.micro_batches} x "
        f"{training.micro_batch} samples of {training.length:,} a rank, {training.number_type}, "
        f"ZeRO {training.zero_stage}{', layers run again in backward' * training.recomputes}; "
        f"{_again(training)}{_parallel(market)}"
        f"loads: {market.loads}; {hardware.num_ranks:,} ranks"
    )


def _again(training: Training) -> str:
    if training.recomputes or not training.again:
        return ""
    return f"again in backward: {', '.join(training.again)}; "


def _parallel(market: Market) -> str:
    parallel = market.case.training.parallel
    if not parallel.is_any:
        return ""
    text = f"tensor parallelism {parallel.tensor}, context {parallel.context}, "
    text += counted(parallel.pipeline, "pipeline stage")
    if parallel.pipeline > 1:
        stages = parallel.layers(market.case.shape.num_layers)
        layers = [sum(map(len, chunks)) for chunks in stages]
        text += f" of {layers[0] if len(set(layers)) == 1 else _runs(layers)} layers"
        text += f" in {parallel.chunks} chunks each" if parallel.chunks > 1 else ""
    return text + "; "


def _runs(numbers: Sequence[int]) -> str:
    """Numbers that follow each other, with how often each comes."""
    runs = [(len(list(same)), number) for number, same in groupby(numbers)]
    return ", ".join(f"{times} x {number}" if times > 1 else f"{number}" for times, number in runs)


def grid_text(grid: Grid) -> str:
    owners = grid.world_size // grid.size
    ranks = f" of {grid.etp_size} ranks" if grid.etp_size > 1 else ""
    return f"{counted(grid.num_ep_ranks, 'EP rank')}{ranks}" + (
        f", {owners} owners" if owners > 1 else ""
    )


def verdict(market: Market) -> str:
    """The fastest that fits into memory, and what it gains."""
    best, base, own = market.best, market.base, market.own_best
    if not market.priced:
        return "no configuration is possible"
    if best is None:
        least = min(market.priced, key=lambda each: each.memory.total)
        return (
            f"nothing fits into memory: {_with_memory(market, least)} needs least memory; use "
            "more nodes, --recomputes, shorter samples or a higher ZeRO stage"
        )
    which = "fastest" if market.too_large is None else "fastest that fits into memory"
    text = f"{which}: {best.way.shown} on {grid_text(best.way.grid)}"
    if best is base:
        text += ", the best plain expert parallelism"
    elif base is None:
        text += f", {best.tokens_per_s:,.0f} tokens/s"
    else:
        text += f", {_times(market, best)}"
        text += f" (which is on {grid_text(base.way.grid)}{_unless_it_fits(market, base)})"
    if own is not None and own is not best and own is not base and base is not None:
        text += f"; yours, {own.way.shown} on {grid_text(own.way.grid)}: {_times(market, own)}"
        text += _unless_it_fits(market, own)
    if market.too_large is not None:
        text += f"; {_with_memory(market, market.too_large)} would be faster, but does not fit"
    return text


def _unless_it_fits(market: Market, priced: Priced) -> str:
    return "" if market.fits(priced) else ", but does not fit into memory"


def _with_memory(market: Market, priced: Priced) -> str:
    has = market.case.hardware.device.memory_bytes
    assert has is not None, "without it all fit"
    return (
        f"{priced.way.shown} on {grid_text(priced.way.grid)} "
        f"({bytes_text(int(priced.memory.total))} of {bytes_text(has)})"
    )


def _times(market: Market, priced: Priced) -> str:
    return f"{market.gain(priced):.2f} times the speed of the best plain expert parallelism"


def plan_words(priced: Priced) -> str:
    """What the layers do: where experts live, which are copied, and what the strategy says."""
    way = priced.way
    lines = [
        f"{way.shown} on {grid_text(way.grid)}",
        _owners(priced),
        _replicas(priced),
        priced.reported,
    ]
    step = priced.steps[-1]
    if step.stage_passes:
        lines.append(f"pipeline stage {step.stage} is the busiest, {priced.fullest} the fullest")
    return "; ".join(filter(None, lines))


def _owners(priced: Priced) -> str:
    grid, plans = priced.way.grid, priced.plans
    held = np.stack([plan.owner.holds_EC.sum(axis=0) for plan in plans])
    ranks = f"{grid.etp_size} ranks split each expert, " if grid.etp_size > 1 else ""
    owners = grid.world_size // grid.size
    times = f", which have {owners} owners each" if owners > 1 else ""
    return (
        f"{ranks}an EP rank owns {_range_text(held.ravel().tolist())} of a layer's experts{times}"
    )


def _replicas(priced: Priced) -> str:
    replicas_L = [most_replicas(plan.owner, plan.target) for plan in priced.plans]
    if not any(replicas_L):
        return "no replicas"
    text = f"{sum(map(bool, replicas_L))} of {len(replicas_L)} layers have replicas, "
    text += (
        f"{_range_text([replicas for replicas in replicas_L if replicas])} in the fullest EP rank"
    )
    if any(plan.carried is not None for plan in priced.plans):
        text += ", prefetched during the block before"
    if any(plan.rematerialize for plan in priced.plans):
        text += ", freed between forward and backward"
    return text


def _range_text(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"


def zebra_words(market: Market) -> list[str]:
    """What zebra would take, where devices are unlike."""
    found = market.zebra
    if found is None:
        return []
    if isinstance(found, str):
        return [f"zebra is not possible: {found}"]
    shape, base = found.shape, market.base
    gain = "" if base is None else f", {base.step_s / found.step_s:.2f} x"
    return [
        f"zebra, {counted(found.num_groups, 'group')} of {shape.attention_ranks} attention and "
        f"{shape.expert_ranks} expert ranks: {1e3 * found.step_s:,.1f} ms a step{gain}, in "
        f"{shape.num_stripes} stripes by its own simulator, where the host takes no time; from "
        f"each expert rank {_range_text(found.moved_L)} experts of a layer move to attention "
        "ranks; ds-moe-ext plan mixed-cluster compares it and writes its JSON"
    ]


def host_words(market: Market) -> list[str]:
    """Where the host bounds, and what helps."""
    bound = [each for each in market.best_of_each if market.host_bound(each)]
    if not bound:
        return []
    shares = ", ".join(
        f"{each.way.shown} {each.mean('host_s') / each.step_s:.0%}" for each in bound
    )
    return [
        f"host-bound: devices wait for their host for part of the step ({shares}); larger "
        "micro-batches, a faster host (host_launch_s of the hardware file) or ep help"
    ]


def block_words(market: Market) -> list[str]:
    """How the fastest way is asked for."""
    best = market.best
    if best is None:
        return []
    strategy, _, balance = best.way.name.partition(", ")[0].partition(OVER)
    grid = best.way.grid
    block = {
        "enabled": True,
        "strategy": strategy,
        "balance": balance or None,
        "expert_parallel_size": grid.num_ep_ranks,
        "expert_sharding_size": grid.etp_size if grid.etp_size > 1 else None,
    }
    stated = {key: value for key, value in block.items() if value is not None}
    training, trained = best.way.training, ""
    if training is not None:
        trained = f" with {counted(training.micro_batch, 'sample')} a micro-batch"
        trained += f" and {training.micro_batches} of these a step"
        trained += " and recomputation" * training.recomputes
    return [
        f"to run the fastest{trained}: {json.dumps({BLOCK: stated})}; under Megatron the sizes are "
        "flags: "
        f"--expert-model-parallel-size {grid.num_ep_ranks} "
        f"--expert-tensor-parallel-size {grid.etp_size}"
    ]


def assumed(market: Market) -> list[str]:
    reached = market.case.reached
    lines = [
        "assumed where the hardware file has no measurement: products reach "
        f"{reached.products:.0%} of the peak, memory {reached.memory:.0%}, links "
        f"{reached.links:.0%}, which start in {1e6 * reached.start_s:.0f} us; a host as slow as "
        "one H200's that was measured (docs/price.md)"
    ]
    training = market.case.training
    if training.zero_stage >= 2 and training.micro_batches > 1:
        lines.append(
            f"ZeRO {training.zero_stage} sums gradients in each of {training.micro_batches} "
            "micro-batches: all but the last are assumed to be hidden"
        )
    if training.offloaded_states:
        lines.append(
            f"{training.offloaded_states:.0%} of the optimizer's states are in host memory; "
            "their step is priced as if they were on the device"
        )
    if len({each.device.name for each in market.case.clusters}) > 1:
        lines.append(
            "different devices: each computes experts at its own speed, everything else at "
            "the speed of the slowest"
        )
    return lines


# Tables.


def parts_of(market: Market) -> dict[str, str]:
    """Where the time of this market's steps goes."""
    return PARTS | BUBBLE if market.case.training.parallel.pipeline > 1 else PARTS


def print_market(market: Market, pays: Sequence[str], to: Console) -> None:
    """The tables, the plans in words, from where ways pay, and what all rests on."""
    to.print(about(market), highlight=False)
    if market.priced:
        to.print(_seconds(market, to.width))
        to.print(_memory(market))
    if market.under and market.base is not None:
        to.print(_loads(market))
    lines = [verdict(market), *host_words(market), *block_words(market)]
    lines += [f"{name}: {plan_words(each)}" for name, each in market.named]
    lines += [*zebra_words(market), *pays]
    lines += [
        f"{each.way.shown} on {grid_text(each.way.grid)} cannot be: {each.why}"
        for each in market.refused
    ]
    lines += assumed(market)
    for line in lines:
        say(to, line)


class Style(NamedTuple):
    """How figures are written."""

    seconds: Callable[[float], str]
    balance: Callable[[float], str]
    gain: Callable[[float], str]
    unknown: str  # a gain


IN_TEXT = Style(lambda s: f"{1e3 * s:,.1f}", "{:.2f}".format, "{:.2f} x".format, "")
ON_PAGE = Style(seconds_text, ratio_text, ratio_text, EN_DASH)


def figures_of(market: Market, priced: Priced, style: Style) -> dict[str, str]:
    """A way's row of the table, by heading."""
    gain, memory = market.gain(priced), f"{priced.memory.total / GIB:,.0f}"
    parts = parts_of(market).items()
    return {
        "step": style.seconds(priced.step_s),
        "tokens/s": f"{priced.tokens_per_s / market.case.training.num_ranks:,.0f}",
        "TFLOP/s": f"{market.flops_per_s(priced) / 1e12:,.0f}",
        **({"MFU": f"{used:.0%}"} if (used := market.mfu(priced)) is not None else {}),
        "gain": style.unknown if gain is None else style.gain(gain),
        "micro-batch": f"{(priced.way.training or market.case.training).micro_batch}",
        **{heading: style.seconds(priced.mean(part)) for heading, part in parts},
        "balance": style.balance(priced.mean("balance")),
        "replicas": f"{priced.replicas:.1f}",
        "GiB a rank": memory if market.fits(priced) else f"{memory} too much",
    }


def _seconds(market: Market, width: int) -> Table:
    named = Column("", no_wrap=True), Column("strategy", no_wrap=True)
    title = "a step, ms; tokens/s and model TFLOP/s of one GPU"
    table = Table(*named, "grid", title=title, title_justify="left")
    rows = [figures_of(market, each, IN_TEXT) for each in market.priced]
    wanted = BRIEF if width < FULL else [each for each in rows[0] if each not in ON_PAGES]
    shown = [heading for heading in rows[0] if heading in wanted]
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for each, row in zip(market.priced, rows):
        marks = ">" if each is market.best else ""
        table.add_row(
            f"{marks} yours".strip() if each is market.own_best else marks,
            each.way.shown.partition(SIZED)[0],
            grid_text(each.way.grid),
            *(row[heading] for heading in shown),
            style=None if market.fits(each) else "dim",
        )
    if width < FULL:
        table.caption = f"step time by cause: with {FULL} columns or more, --html or --json"
    return table


def _loads(market: Market) -> Table:
    """Gains under other loads than those that were asked for."""
    table = Table("strategy", title=f"gain over {BASE}, by loads", title_justify="left")
    for name in (*market.under, market.loads):
        table.add_column(name, justify="right")
    for each in market.best_of_each:
        gains = [of_loads.get(each.way.shown) for of_loads in market.under.values()]
        shown = ["" if gain is None else f"{gain:.2f} x" for gain in (*gains, market.gain(each))]
        table.add_row(each.way.shown, *shown)
    return table


def _memory(market: Market) -> Table:
    has = market.case.hardware.device.memory_bytes
    of_device = "" if has is None else f" of {has / GIB:,.0f}"
    table = Table("", title=f"memory of the fullest rank, GiB{of_device}", title_justify="left")
    for _, each in market.named:
        table.add_column(f"{each.way.shown}, {grid_text(each.way.grid)}", justify="right")
    used = [{**vars(each.memory), "all": each.memory.total} for _, each in market.named]
    for name in (*MEMORY, "all"):
        table.add_row(name, *(f"{memory[name] / GIB:,.1f}" for memory in used))
    return table


# Files.


def write_trace(path: Path, market: Market, pays: Sequence[str]) -> None:
    """The timeline of a way, a process a class of EP ranks, and one a pipeline stage."""
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
            {"strategy": each.way.shown, **_sizes(each.way.grid), "why": each.why}
            for each in market.refused
        ],
        "zebra": None if market.zebra is None else zebra_words(market)[0],
        "pays": list(pays),
        "gains_by_loads": market.under,
        "reached": dataclasses.asdict(case.reached),
        "assumed": assumed(market),
    }
    path.write_text(json.dumps(older_names.on_disk(document), indent=1) + "\n", "utf-8")


def _way(market: Market, priced: Priced) -> Mapping[str, Any]:
    return {
        "strategy": priced.way.shown,
        **_sizes(priced.way.grid),
        "is_own": priced.way.shown == market.own,
        "is_fastest": priced is market.best,
        "is_base": priced is market.base,
        "fits": market.fits(priced),
        "step_s": priced.step_s,
        "tokens_per_s": priced.tokens_per_s,
        "model_flops_per_s_per_gpu": market.flops_per_s(priced),
        "mfu": market.mfu(priced),
        "micro_batch": (priced.way.training or market.case.training).micro_batch,
        "recomputes": (priced.way.training or market.case.training).recomputes,
        "gain": market.gain(priced),
        **{name: priced.mean(name) for name in NUMBERS},
        "replicas": priced.replicas,
        "busiest_stage": priced.steps[-1].stage,
        "fullest_stage": priced.fullest,
        "memory_bytes": {**vars(priced.memory), "total": priced.memory.total},
        "plan": plan_words(priced),
    }


def _sizes(grid: Grid) -> Mapping[str, int]:
    return {
        "expert_parallel_size": grid.num_ep_ranks,
        "expert_sharding_size": grid.etp_size,
        "owners": grid.world_size // grid.size,
    }
