# SPDX-License-Identifier: Apache-2.0
"""Planners and ways of rows beside each other on real loads, a table in markdown.

HECATE's and Pro-Prophet's planners are the product's own, the others' those of `rival_planners.py`.
Every planner plans each logged step twice: on the rows to come, and on those of the step before;
the last four plan after the gate, on the rows to come in either case. HECATE's plans are guarded.
No device and no process group is needed::

    python launch/bench/planners_table.py --trace loads.npz > table.md
    python launch/bench/planners_table.py --trace loads.npz --run 1 --degrees 8 16 --replicas 1 2 4

Of its pairs of figures the left one is planned on the rows to come, the right one on those before.

A trace holds ``rows_ILCE`` and ``steps_I``, as ``ds_moe_ext.loads`` writes them, or ``counts_IRLE``
and ``iteration_I``. Shape letters: I logged steps, L layers, C EP ranks, E experts.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rival_planners import (
    A100,
    Layer,
    Layout,
    PricedCluster,
    Way,
    balanced_slots,
    by_optimum,
    by_own_rule,
    by_planned_parts,
    by_priced,
    even_slots,
    evenly,
    evenly_on_node,
    exchanged,
    expanded,
    in_bins,
    in_one_shot,
    in_turn,
    laid_out,
    quotas,
    spilled,
    to_nearest,
    to_owner,
    transported,
)

from ds_moe_ext.core.hardware import read_hardware
from ds_moe_ext.core.placement import Placement, even_owners
from ds_moe_ext.planning.fssdp_planner import guarded, materialize
from ds_moe_ext.planning.load_files import read_table
from ds_moe_ext.planning.loads import LoadWindow, balance_L
from ds_moe_ext.planning.prices import RoutedRows, RowPrices, between_nodes, busiest_link
from ds_moe_ext.planning.prophet_planner import place_experts
from ds_moe_ext.planning.strategy import CostGroup, Job, Strategy
from ds_moe_ext.strategies.fssdp import FullySharded
from ds_moe_ext.strategies.prophet import ProProphet

REPLICA_TRANSFERS = 2  # weights to a replica, gradients back


@dataclass(frozen=True, eq=False)
class Step:
    """What is planned, and for what."""

    owners: Sequence[Placement]  # of each layer
    planned_LCE: np.ndarray  # rows planned on
    actual_LCE: np.ndarray  # rows to come
    cluster: PricedCluster


@dataclass(frozen=True)
class Planner:
    """One row of the table."""

    name: str  # as printed
    layouts: Callable[[Step], Sequence[Layout]]  # plans a step
    way: Way = to_owner  # of the rows


@dataclass(frozen=True)
class Score:
    """Means over steps and layers."""

    balance: float  # rows of the busiest rank over the mean
    remote: float  # share of rows that leave their rank
    abroad: float  # share of rows that leave their node
    replicas: float  # that a rank holds in a layer
    late: float  # replicas of these that are made after the gate
    priced_s: float  # of a layer's experts and exchanges, by what rows cost
    # and of the way of replicas that are made after the gate, weights there and gradients back, on
    # the busiest link
    open_s: float
    plan_s: float  # processor seconds of planning a layer


def planned_steps(
    runs: Sequence[np.ndarray], window: int, age: int = 1
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows planned on and rows to come of every step, ``[L, C, E]``.

    The first steps of a run, of which nothing can be predicted, are left out."""
    for rows_ILCE in runs:
        seen = LoadWindow(max(window, 1))
        predicted: deque[np.ndarray] = deque(maxlen=age)
        for step, rows_LCE in enumerate(rows_ILCE):
            if step >= age:
                yield (predicted[0] if window else rows_LCE), rows_LCE
            seen.push(rows_LCE)
            predicted.append(np.stack(seen.predicted()))


def score(
    planner: Planner,
    runs: Sequence[np.ndarray],
    cluster: PricedCluster,
    *,
    window: int,
    age: int = 1,
) -> Score:
    """Plan every step of the trace, and route its rows by the plan."""
    scores = []
    _, num_layers, num_ranks, num_experts = runs[0].shape
    owners = even_owners([num_experts] * num_layers, num_ranks)
    for planned_LCE, rows_LCE in planned_steps(runs, window, age):
        started = time.process_time()
        layouts = planner.layouts(Step(owners, planned_LCE, rows_LCE, cluster))
        sendings = [
            planner.way(Layer(owner, layout, planned_CE, cluster))
            for owner, layout, planned_CE in zip(owners, layouts, planned_LCE)
        ]
        plan_s = (time.process_time() - started) / num_layers
        sent = [send(rows_CE).sum(axis=1) for send, rows_CE in zip(sendings, rows_LCE)]
        scores.append(_score_of_step(owners, layouts, np.stack(sent), cluster, plan_s))
    return Score(*np.mean([list(vars(each).values()) for each in scores], axis=0).tolist())


def _score_of_step(
    owners: Sequence[Placement],
    layouts: Sequence[Layout],
    sent_LCC: np.ndarray,
    cluster: PricedCluster,
    plan_s: float,
) -> Score:
    targets = [layout.target for layout in layouts]
    at_gate = [layout.at_gate for layout in layouts]
    computed_LC, node_C = sent_LCC.sum(axis=1), cluster.node_C
    received_LC = computed_LC - sent_LCC.diagonal(axis1=1, axis2=2)
    num_rows = int(computed_LC.sum())
    num_abroad = sum(int(between_nodes(sent_CC, node_C).sum()) for sent_CC in sent_LCC)
    priced_s = float(np.mean([cluster.row_prices.seconds(sent_CC, node_C) for sent_CC in sent_LCC]))
    links = [busiest_link(*placements, node_C) for placements in zip(owners, at_gate, targets)]
    return Score(
        balance=float(balance_L(computed_LC).mean()),
        remote=float(received_LC.sum()) / num_rows,
        abroad=num_abroad / num_rows,
        replicas=_added(owners, targets) / computed_LC.size,
        late=_added(at_gate, targets) / computed_LC.size,
        priced_s=priced_s,
        open_s=priced_s + REPLICA_TRANSFERS * cluster.prices.copy_s * float(np.mean(links)),
        plan_s=plan_s,
    )


def _added(before: Sequence[Placement], after: Sequence[Placement]) -> int:
    """Replicas that the ranks hold more."""
    return sum(int((b.holds_EC & ~a.holds_EC).sum()) for a, b in zip(before, after))


def materialized(step: Step, *, degree: int, replicas: int) -> list[Layout]:
    """HECATE's targets, guarded."""
    prices, node_C = step.cluster.prices, step.cluster.node_C
    targets = materialize(
        step.owners,
        list(step.planned_LCE.sum(axis=1)),
        overlap_degree=degree,
        replicas_per_ep_rank=replicas,
        node_C=node_C,
    )
    targets = guarded(
        step.owners, targets, RoutedRows.of(list(step.planned_LCE), node_C), prices=prices
    )
    return [Layout.of(target) for target in targets]


def as_it_comes(step: Step, *, strategy: Strategy) -> list[Layout]:
    """What a strategy of the product plans, and makes of the rows to come; loads are taken to move,
    memory to be plenty, and attention to hide as many replicas as the strategy asks for."""
    cluster, owners = step.cluster, step.owners
    prices, block = cluster.prices, cluster.block
    cost_group = CostGroup(
        layers=tuple(range(len(owners))),
        prices=prices,
        expert_bytes=int(block.weight_bytes),
        row_bytes_per_s=block.bytes_per_s,
        copy_bytes_per_s=block.copy_bytes_per_s,
    )
    job = Job(
        rows=tuple(np.ascontiguousarray(step.planned_LCE)),
        owners=tuple(owners),
        node_C=cluster.node_C,
        cost_groups=(cost_group,),
        window_s=(block.forward_gap_s,) * len(owners),
        back_window_s=(block.backward_gap_s,) * len(owners),
        free_bytes=int(block.weight_bytes) * 4 * sum(owner.num_experts for owner in owners),
    )
    layouts = []
    for plan, rows_CE in zip(strategy.plan(job), step.actual_LCE):
        target, rule = plan.destination_of(np.ascontiguousarray(rows_CE))
        layouts.append(replace(Layout.of(target, plan.target), rule=rule))
    return layouts


def replicated(step: Step, *, balance: float) -> list[Layout]:
    """What Pro-Prophet's planner finds, by equation (8)."""
    search = partial(place_experts, num_excluded=0, balance=balance)
    prices = replace(step.cluster.block, is_scheduled=True)
    plans = (
        search(owner, rows_CE, prices=prices)
        for owner, rows_CE in zip(step.owners, step.planned_LCE)
    )
    return [Layout.of(plan.target) for plan in plans]


def at_owner(step: Step) -> list[Layout]:
    """No replicas."""
    return [Layout.of(owner) for owner in step.owners]


def redundant(step: Step, *, more: int) -> list[Layout]:
    """EPLB's slots, so many more of each rank than ``ep`` needs."""
    _, num_ranks, num_experts = step.planned_LCE.shape
    slots = partial(
        balanced_slots,
        num_ranks=num_ranks,
        slots=-(-num_experts // num_ranks) + more,
    )
    return [Layout.of_slots(slots(rows_CE.sum(axis=0))) for rows_CE in step.planned_LCE]


def relaid(step: Step, *, slots: int) -> list[Layout]:
    """LAER-MoE's slots."""
    seconds = partial(step.cluster.row_prices.seconds, node_C=step.cluster.node_C)
    found = (laid_out(rows_CE, slots, step.cluster.node_C, seconds) for rows_CE in step.planned_LCE)
    return [Layout.of_slots(slots_EC) for slots_EC in found]


def moved(step: Step) -> list[Layout]:
    """SmartMoE's owners."""
    _, num_ranks, _ = step.planned_LCE.shape
    ranks = (
        exchanged(rows_CE.sum(axis=0), owner.owner_E, num_ranks)
        for owner, rows_CE in zip(step.owners, step.planned_LCE)
    )
    return [Layout.of(Placement.owned_by(rank_E, num_ranks)) for rank_E in ranks]


def flexible(step: Step, *, slots: int) -> list[Layout]:
    """FlexMoE's slots."""
    node_C = step.cluster.node_C
    seconds = partial(step.cluster.row_prices.seconds, node_C=node_C)
    first_EC = even_slots(step.planned_LCE.shape[2], slots, node_C)
    return [
        Layout.of_slots(expanded(rows_CE, first_EC, node_C, seconds))
        for rows_CE in step.planned_LCE
    ]


Policy = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Rows of each expert that each rank computes, int64 ``[E, C]``: of the rows of each expert, the
rank at which each is at the owner and the node of each rank."""


def after_gate(step: Step, *, policy: Policy) -> list[Layout]:
    """A policy's, on the rows to come, whatever else is planned on."""
    return [
        Layout.of_quotas(owner, policy(rows_CE.sum(axis=0), owner.owner_E, step.cluster.node_C))
        for owner, rows_CE in zip(step.owners, step.actual_LCE)
    ]


def over_all(policy: Callable[[np.ndarray, np.ndarray, int], np.ndarray]) -> Policy:
    """Of one that knows no nodes, but how many ranks there are: all of them."""
    return lambda rows_E, owner_E, node_C: policy(rows_E, owner_E, len(node_C))


def on_own_node(policy: Callable[[np.ndarray, np.ndarray, int], np.ndarray]) -> Policy:
    """Of such a one: of the experts and ranks of each node apart."""

    def quotas_EC(rows_E: np.ndarray, owner_E: np.ndarray, node_C: np.ndarray) -> np.ndarray:
        quota_EC = np.zeros((len(rows_E), len(node_C)), dtype=np.int64)
        for node in np.unique(node_C):
            ranks = np.flatnonzero(node_C == node)
            experts = np.flatnonzero(node_C[owner_E] == node)
            owner_X = np.searchsorted(ranks, owner_E[experts])
            of_node = policy(rows_E[experts], owner_X, len(ranks))
            quota_EC[np.ix_(experts, ranks)] = of_node
        return quota_EC

    return quotas_EC


EP = Planner("ep", at_owner)
OUR_WAYS: tuple[tuple[str, Way], ...] = (
    ("planned", by_planned_parts),
    ("priced", by_priced),
    ("optimum", by_optimum),
)
"""By the priced share, besides the way that a paper has for its own copies."""


def divided(planner: Planner, own: str) -> Iterator[Planner]:
    """The same copies, whose rows go the paper's own way and ours."""
    for name, way in ((own, planner.way), *OUR_WAYS):
        yield replace(planner, name=f"{planner.name}, {name}", way=way)


def others(more: Sequence[int], slots: Sequence[int]) -> Iterator[Planner]:
    """Rows of policies on forecasts that the product does not have."""
    yield Planner("smartmoe", moved, evenly)
    for count in more:
        layouts = partial(redundant, more=count)
        yield from divided(Planner(f"eplb, +{count}", layouts, evenly), "even")
    for name, policy in (("laer", relaid), ("flexmoe", flexible)):
        for count in slots:
            layouts = partial(policy, slots=count)
            planner = Planner(f"{name}, {count} slots", layouts, evenly_on_node)
            yield from divided(planner, "even, own node")


def late(alphas: Sequence[float], slots: Sequence[int]) -> Iterator[Planner]:
    """Policies after the gate, with their own ways of rows."""

    def planner(name: str, policy: Policy, way: Way) -> Planner:
        return Planner(name, partial(after_gate, policy=policy), way)

    for alpha in alphas:
        policy = over_all(partial(spilled, alpha=alpha))
        yield planner(f"llep, alpha = {alpha:g}", policy, in_turn)
    for count in slots:
        of_replicas = f"{count} slot{'s' if count > 1 else ''}"
        if count == 1:
            yield planner(f"echo in bins, {of_replicas}", over_all(in_bins), evenly)
        in_shot = over_all(partial(in_one_shot, slots=count))
        yield planner(f"echo in one shot, {of_replicas}", in_shot, evenly)
        yield planner(f"loongforge, {of_replicas}", partial(transported, slots=count), evenly)
        quota = partial(quotas, slots=count)
        yield planner(f"ultraep, {of_replicas}", over_all(quota), in_turn)
        yield planner(f"ultraep, {of_replicas}, own node", on_own_node(quota), in_turn)


def late_others(alphas: Sequence[float], slots: Sequence[int]) -> Iterator[Planner]:
    """Rows of these; parts of a forecast are of no use to replicas that are chosen after the
    gate."""
    for each in late(alphas, slots):
        for name, way in (("spilled", each.way), ("optimum", by_optimum)):
            yield replace(each, name=f"{each.name}, {name}", way=way)


def ours(
    degrees: Sequence[int], replicas: Sequence[int], balances: Sequence[float]
) -> Iterator[Planner]:
    """Rows of the product's copies."""
    for degree, count in itertools.product(degrees, replicas):
        layouts = partial(materialized, degree=degree, replicas=count)
        hecate = Planner(f"fssdp, t = {degree}, m = {count}", layouts, to_nearest)
        yield from divided(hecate, "nearest")
        for reported, repair in (("as it comes", None), ("without repair", 0)):
            strategy = FullySharded(overlap_degree=degree, replicas_per_rank=count, repair=repair)
            layouts = partial(as_it_comes, strategy=strategy)
            yield Planner(f"fssdp, t = {degree}, m = {count}, {reported}", layouts, by_own_rule)
    for balance in balances:
        layouts = partial(replicated, balance=balance)
        prophet = Planner(f"prophet, alpha = {balance:g}", layouts, to_owner)
        yield from divided(prophet, "local else owner")
        layouts = partial(as_it_comes, strategy=ProProphet(balance=balance))
        yield Planner(f"prophet, alpha = {balance:g}, as it comes", layouts, by_own_rule)


class Column(NamedTuple):
    """Of the table."""

    title: str  # as printed
    figure: Callable[[Score, Score], str]  # of a planner and of ``ep``, as printed


COLUMNS = (
    Column("max/mean", lambda it, ep: f"{it.balance:.3f}"),
    Column("`ep` / it, seconds", lambda it, ep: f"{ep.priced_s / it.priced_s:.2f}"),
    Column("`ep` / it, open copies counted", lambda it, ep: f"{ep.open_s / it.open_s:.2f}"),
    Column("remote rows", lambda it, ep: f"{it.remote:.0%}"),
    Column("to other nodes", lambda it, ep: f"{it.abroad:.0%}"),
    Column("replicas a rank", lambda it, ep: f"{it.replicas:.2f}"),
    Column("of these after the gate", lambda it, ep: f"{it.late:.2f}"),
)


def line(cells: Sequence[str]) -> str:
    """A row in markdown."""
    return f"| {' | '.join(cells)} |"


def figures(exact: Score, ahead: Score, ep: Score) -> list[str]:
    """Of plans on the exact rows, and on predicted ones; and milliseconds of planning."""
    pairs = [f"{each.figure(exact, ep)} / {each.figure(ahead, ep)}" for each in COLUMNS]
    return [*pairs, f"{1e3 * ahead.plan_s:.2f}"]


def priced(prices: RowPrices, ep: Score) -> str:
    """What rows cost, for a person."""
    row, link, card = (
        f"{1e9 * s:.3g} ns" for s in (prices.row_s_C[0], prices.local_row_s, prices.cross_row_s)
    )
    return (
        f"In all its transfers a routed token takes {row} of an expert, {link} of the link of "
        f"each rank that it leaves or enters, {card} of the card of each such node. `ep` takes "
        f"{1e3 * ep.priced_s:.3g} ms a layer."
    )


def table_parser() -> argparse.ArgumentParser:
    """What the script takes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--trace", type=Path, required=True)
    add("--run", type=int, help="only this one of the trace's runs of evenly spaced steps, from 0")
    add("--nodes", type=int, default=2, help="the ranks lie on so many")
    add("--hardware", type=Path, help="a file of configs/hardware; without, A100 nodes")
    add("--width", type=int, default=768, help="of the model; that of GPT-MoE-S")
    add("--window", type=int, default=1, help="logged steps whose mean predicts the next")
    add("--age", type=int, default=1, help="of plans on these, in logged steps, when rows come")
    add("--degrees", type=int, nargs="+", default=[8], help="t")
    add("--replicas", type=int, nargs="+", default=[1, 2, 4, 8], help="m")
    add("--balances", type=float, nargs="+", default=[1.0], help="alpha of prophet")
    add("--eplb", type=int, nargs="*", default=[1, 2], help="slots of a rank more than of ep")
    add("--laer", type=int, nargs="*", default=[3, 5], help="slots of a rank; of flexmoe too")
    add("--llep", type=float, nargs="*", default=[1.1], help="alpha of llep")
    add("--late_slots", type=int, nargs="*", default=[1, 2], help="of echo, loongforge, ultraep")
    add("--only", default="", help="rows whose name has this")
    return parser


def planners(given: argparse.Namespace) -> list[Planner]:
    """Rows of the table."""
    rows = [
        EP,
        *others(given.eplb, given.laer),
        *late_others(given.llep, given.late_slots),
        *ours(given.degrees, given.replicas, given.balances),
    ]
    return [row for row in rows if row is EP or given.only in row.name]


def check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Refuse what no trace allows."""
    for name in ("nodes", "width", "window", "age"):
        if vars(given)[name] < 1:
            parser.error(f"--{name} is {vars(given)[name]}; give 1 or more")
    if min(given.eplb, default=0) < 0:
        parser.error(f"--eplb is {min(given.eplb)}; give 0 or more")
    if min(given.late_slots, default=1) < 1:
        parser.error(f"--late_slots is {min(given.late_slots)}; give 1 or more")
    if importlib.util.find_spec("scipy") is None:
        parser.error("our ways of rows need SciPy; pip install scipy")


def runs_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[np.ndarray]:
    """The trace's runs of steps, or the one that is asked for; refuse what they do not allow."""
    runs = read_table(given.trace).runs()
    if given.run is not None and not 0 <= given.run < len(runs):
        parser.error(
            f"--run is {given.run}, but the trace has {len(runs)}; give 0 to {len(runs) - 1}"
        )
    runs = runs if given.run is None else [runs[given.run]]
    _, _, num_ranks, num_experts = runs[0].shape
    if num_ranks % given.nodes:
        parser.error(f"--nodes is {given.nodes}, which does not divide {num_ranks} ranks")
    least = -(-num_experts // num_ranks)
    if min(given.laer, default=least) < least:
        parser.error(
            f"--laer is {min(given.laer)}, but {num_experts} experts need {least} slots of each of "
            f"{num_ranks} ranks; give {least} or more"
        )
    return runs


def main() -> None:
    parser = table_parser()
    given = parser.parse_args()
    check(parser, given)
    runs = runs_of(parser, given)
    num_ranks = runs[0].shape[2]
    try:
        hardware = read_hardware(given.hardware) if given.hardware else A100
        cluster = PricedCluster.of(
            replace(hardware, num_nodes=given.nodes, ranks_per_node=num_ranks // given.nodes),
            rows=float(np.concatenate(runs).sum(axis=3).mean()),
            width=given.width,
        )
    except ValueError as error:
        parser.error(str(error))
    run = partial(score, runs=runs, cluster=cluster, age=given.age)
    ep = run(EP, window=0)
    print(f"{cluster.text} {priced(cluster.row_prices, ep)}\n")
    titles = ["planner", *(column.title for column in COLUMNS), "planning, ms a layer"]
    print(f"{line(titles)}\n|{'---|' * len(titles)}")
    for planner in track(planners(given), console=Console(stderr=True), description="planning"):
        exact, ahead = run(planner, window=0), run(planner, window=given.window)
        print(line([planner.name, *figures(exact, ahead, ep)]), flush=True)


if __name__ == "__main__":
    main()
