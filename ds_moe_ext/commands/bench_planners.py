# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext bench-planners``: strategies of the user's own beside ours on the same loads.

Every strategy plans each step by the steps before it, as many as its ``intervals`` ask for, and is
priced on the tokens that came, by the simulator of ``ds-moe-ext price`` with a host that takes no
time. Experts, layers, ranks and tokens are those of the loads; only the sizes of an expert and of
attention are a model's. Shape letters: I steps, L layers, C EP ranks, E experts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import NamedTuple

import numpy as np
from rich.table import Table

from ds_moe_ext.commands.loads_table import SIZES
from ds_moe_ext.commands.price.inputs import DEFAULT_LENGTH, read_clusters, read_model
from ds_moe_ext.commands.price.market import BASE, SEVERAL, Case, Chosen, chosen_strategies
from ds_moe_ext.core.hardware import Hardware
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.planning.candidates import Way, price_way
from ds_moe_ext.planning.layer_seconds import NO_HOST, Flow
from ds_moe_ext.planning.load_files import read_loads
from ds_moe_ext.planning.loads import Loads
from ds_moe_ext.planning.model_shape import ModelShape, Training, Vocabulary
from ds_moe_ext.planning.prices import busiest_link
from ds_moe_ext.planning.strategy import Job, Overlay, Plan, Strategy
from ds_moe_ext.report.units import bytes_text, say, wide_console

BESIDE = (BASE, "fssdp", "prophet")
"""Ours, which stand in every table."""


class Planned(NamedTuple):
    """One step."""

    plans: tuple[Plan, ...]  # of each layer
    processor_s: float  # of planning them all


@dataclass(frozen=True, kw_only=True)
class Watched(Overlay):
    """A strategy whose plans are kept, with what they took."""

    placing: Strategy
    seen: list[Planned] = field(default_factory=list)  # of each step, in order

    def plan(self, job: Job) -> tuple[Plan, ...]:
        started = time.process_time()
        plans = self.placing.plan(job)
        self.seen.append(Planned(plans, time.process_time() - started))
        return plans


@dataclass(frozen=True, kw_only=True)
class Score:
    """Means over steps and layers."""

    name: str  # of the strategy
    balance: float  # tokens of the busiest rank over the mean
    replicas: float  # that a rank receives in a layer
    replica_bytes: float  # of replicas on the busiest link of a layer, there; gradients return
    exchange_s: float  # of the busiest link in one all-to-all
    plan_s: float  # processor seconds of planning a layer
    layer_s: float  # of attention and experts, forward and backward, with what is not hidden


def bench_planners(given: argparse.Namespace) -> int:
    """Print a verdict and a table."""
    sys.path.insert(0, "")  # as the interpreter itself has it: for a strategy of the user's own
    loads = read_loads(given.loads, **{name: vars(given)[name] for name in SIZES})
    case = case_of(loads, read_clusters([given.hardware], None)[0], read_model(given.model))
    chosen = chosen_strategies({}, SEVERAL.join((*BESIDE, *given.strategies)))
    scores = [score(each, case, loads) for each in chosen]
    to = wide_console()
    for line in (verdict(scores, given.strategies), about(case, loads)):
        say(to, line)
    to.print(table_of(scores))
    return 0


def case_of(loads: Loads, hardware: Hardware, model: ModelShape) -> Case:
    """As many layers of a model as the loads have, on as many nodes as their ranks fill.

    Raises:
        ValueError: the ranks fill no whole nodes.
    """
    _, num_layers, num_ranks, num_experts = loads.rows_ILCE.shape
    per_node = min(hardware.ranks_per_node, num_ranks)
    if num_ranks % per_node:
        raise ValueError(
            f"the loads have {num_ranks} ranks, which are no whole nodes of {per_node}; give "
            "another --ranks, or --hardware"
        )
    shape = replace(
        model,
        num_layers=num_layers,
        moe_layers=tuple(range(num_layers)),
        num_experts=num_experts,
        top_k=loads.top_k or min(model.top_k, num_experts),
        vocabulary=Vocabulary(has_embedding=False, has_head=False),
    )
    tokens = round(float(loads.rows_ILCE.sum(axis=3).mean()) / shape.top_k)
    cluster = replace(hardware, num_nodes=num_ranks // per_node, ranks_per_node=per_node)
    case = Case((cluster,), shape, Training(num_ranks=num_ranks, length=DEFAULT_LENGTH))
    return case.with_tokens(max(tokens, 1))


def score(chosen: Chosen, case: Case, loads: Loads) -> Score:
    """Of all steps but the first of each evenly spaced run of the loads.

    Raises:
        ValueError: there are no two steps, or the strategy refuses the case.
    """
    runs = [rows_ILCE for rows_ILCE in loads.runs() if len(rows_ILCE) > 1]
    if not runs:
        raise ValueError(
            f"{loads.source} has no two steps in a row (of {len(loads.steps_I)}), but plans go by "
            "the step before; give loads of more steps, or another --steps"
        )
    num_ranks = case.training.num_ranks
    run = replace(case.run(Grid(num_ranks, num_ranks, 1)), own_host=NO_HOST)
    group, layers = run.cost_group, list[tuple[float, ...]]()
    steps_s, plans_s = list[float](), list[float]()
    for rows_ILCE in runs:
        watched = Watched(placing=chosen.strategy)
        way = Way(chosen.name, watched, run.grid)
        try:
            priced = price_way(way, run, rows_ILCE, num_priced=len(rows_ILCE) - 1)
        except ValueError as error:
            raise ValueError(f"{chosen.name} cannot plan these loads: {error}") from error
        steps_s += [step.step_s - step.end_s for step in priced.steps]
        plans_s += [planned.processor_s for planned in watched.seen]
        for planned, rows_LCE in zip(watched.seen, rows_ILCE[1:], strict=True):
            for plan, rows_CE in zip(planned.plans, rows_LCE, strict=True):
                flow = Flow.of(plan, np.ascontiguousarray(rows_CE), run.node_C, group)
                moved = int((flow.target.holds_EC & ~plan.owner.holds_EC).sum())
                link = busiest_link(plan.owner, plan.owner, flow.target, run.node_C)
                layers.append(
                    (
                        float(flow.computed_C.max() / max(flow.computed_C.mean(), 1e-9)),
                        moved / num_ranks,
                        link * run.expert_bytes,
                        0.0 if flow.all_stay else float(flow.exchange_s_C.max()),
                    )
                )
    balance, replicas, replica_bytes, exchange_s = map(fmean, zip(*layers))
    num_layers = len(case.shape.moe_layers)
    return Score(
        name=chosen.name,
        balance=balance,
        replicas=replicas,
        replica_bytes=replica_bytes,
        exchange_s=exchange_s,
        plan_s=fmean(plans_s) / num_layers,
        layer_s=fmean(steps_s) / num_layers,
    )


def verdict(scores: Sequence[Score], own: Sequence[str]) -> str:
    """Where the user's stand, by layer time."""
    by_time = sorted(scores, key=lambda each: each.layer_s)
    places = (
        f"{each.name} is {place} of {len(by_time)}, {gain_of(each, scores)} {BASE}'s speed"
        for place, each in enumerate(by_time, 1)
        if each.name in own or place == 1
    )
    return f"by predicted layer time: {'; '.join(places)}"


def gain_of(each: Score, scores: Sequence[Score]) -> str:
    """Speed over plain expert parallelism, which comes first."""
    return f"{scores[0].layer_s / each.layer_s:.2f} x"


def about(case: Case, loads: Loads) -> str:
    """What the table rests on."""
    num_steps, num_layers, num_ranks, num_experts = loads.rows_ILCE.shape
    training, shape = case.training, case.shape
    return (
        f"{loads.source}: {num_steps} steps, {num_layers} layers, {num_ranks} ranks, {num_experts} "
        f"experts, top-{shape.top_k}, {training.tokens:,} tokens a rank; {case.hardware.num_nodes} "
        f"x {case.hardware.ranks_per_node} {case.hardware.device.name}; width {shape.width}, "
        f"experts {shape.expert_width} wide as in {shape.name}. Planned by the steps before each; "
        "layer times are simulated, without a host"
    )


def table_of(scores: Sequence[Score]) -> Table:
    table = Table("planner")
    for heading in (
        "busiest rank / mean",
        "replicas a rank",
        "replicas, busiest link",
        "all-to-all, busiest link, ms",
        "planning, ms a layer",
        "layer, ms",
        f"speed, of {BASE}",
    ):
        table.add_column(heading, justify="right")
    for each in scores:
        table.add_row(
            each.name,
            f"{each.balance:.2f}",
            f"{each.replicas:.2f}",
            bytes_text(each.replica_bytes),
            f"{1e3 * each.exchange_s:.3g}",
            f"{1e3 * each.plan_s:.3g}",
            f"{1e3 * each.layer_s:.3g}",
            gain_of(each, scores),
        )
    return table
