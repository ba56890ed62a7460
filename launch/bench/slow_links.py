# SPDX-License-Identifier: Apache-2.0
"""What strategies that copy experts gain over `ep` where links are slow and routing is skewed.

`torchrun --standalone --nproc_per_node 4 launch/bench/slow_links.py --inter_mbit 400 --skews 0 1.2`
`... launch/bench/slow_links.py --trace loads.npz --replicas`
`... --skews 0.6 --strategies esp --rounds 9`; `... --skews 1.2 0 --strategies auto --rounds 15`

Results take 9 to 15 paired rounds after 13 steps in which costs are measured; the same command
twice gives ratios within 2 %, where sizes are measured by the run more.

On a busy machine put `chrt -r 10` before the command. Planners, layers and traffic are the
product's own, and every byte is sent; what computes and what links take is stood in for, see
`pace.py`. The contenders take turns, a few steps each, in an order that rotates; ratios are paired
by round. Before they are timed, they must agree on the gradients of all experts.

Shape letters: I steps, L layers, C ranks, E experts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from fake_world import ReplacedLayers
from pace import BACKWARD, Block, Card, Moments, Pace, bare, paced_links, union
from rich.console import Console
from rotation import NUM_WARM_UPS, rotated
from torch import Tensor, nn

from ds_moe_ext.core.comm import Traffic, all_gather_counts
from ds_moe_ext.moe.observation import TimedTask
from ds_moe_ext.planning.load_files import read_table
from ds_moe_ext.planning.load_models import zipf_loads
from ds_moe_ext.planning.loads import balance_L
from ds_moe_ext.planning.strategy import Plan
from ds_moe_ext.report.record import TermRecord
from ds_moe_ext.schedule.task import ATTENTION, COMPUTE, PARAM

# Where rows go.


def rows_between(plans: Sequence[Plan], rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows that each rank sends to each one, itself too, by each plan's share, ``[L, C, C]``."""
    each = zip(plans, rows)
    sent = [plan.share.of_rows(rows_CE).rows_between(rows_CE[:, None])[0] for plan, rows_CE in each]
    return np.array(sent)


@dataclass(frozen=True)
class Routed:
    """Where the rows of one step go."""

    remote: float  # share of all ranks' rows that leave their rank
    abroad: float  # share that leave their node
    balance: float  # rows of the busiest rank over the mean, mean over layers
    limit_s: float  # of the step, if rows were even, and all that travels took no time

    @classmethod
    def of(cls, rows_LCC: np.ndarray, node_C: np.ndarray, pace: Pace) -> Routed:
        """As the rows are shared and what computing is stated to take."""
        is_far_CC = node_C[:, None] != node_C
        computed_LC = rows_LCC.sum(axis=1)
        even_L = pace.attention_s + pace.row_s * computed_LC.mean(axis=1)
        return cls(
            remote=float((rows_LCC * ~np.eye(len(node_C), dtype=bool)).sum() / rows_LCC.sum()),
            abroad=float((rows_LCC * is_far_CC).sum() / rows_LCC.sum()),
            balance=float(balance_L(computed_LC).mean()),
            limit_s=float((1 + BACKWARD) * even_L.sum()),
        )


# What hides copies.


class Travel(NamedTuple):
    """Seconds of one rank in one step, all layers."""

    gather_s: float = 0.0  # copies travelled
    gather_bare_s: float = 0.0  # and the rank computed nothing
    reduction_s: float = 0.0  # gradients of replicas travelled
    reduction_bare_s: float = 0.0  # and the rank computed nothing


def travel(timed: Iterable[TimedTask], held: Iterable[Moments]) -> Travel:
    """What the tasks of all layers in a step say of its replicas."""
    tasks = list(timed)
    worked = [
        (each.start, each.end)
        for each in tasks
        if each.task.stream == COMPUTE and each.task.op.is_work and each.task.op is not ATTENTION
    ]
    busy = union([*held, *worked])
    total = Travel()
    for each in tasks:
        if each.task.stream == PARAM:
            seconds, bare_s = each.end - each.start, bare(each.start, each.end, busy)
            seen = (0.0, 0.0, seconds, bare_s) if each.task.adjoint_of else (seconds, bare_s)
            total = Travel(*(a + b for a, b in zip(total, seen)))
    return total


@dataclass(frozen=True)
class Seen:
    """One step of one contender on one rank."""

    routed: Routed  # the rows
    travel: Travel  # of replicas
    replica_bytes: int  # weights and gradients of replicas that this rank sent
    late_s: float  # by how much its paced waits lasted longer


# The table.


@dataclass(frozen=True)
class Reported:
    """What a strategy says of its costs."""

    line: str  # what it made of its measurements; empty if it measures none
    terms: tuple[TermRecord, ...]  # its model beside what was found; none if it has no model


@dataclass(frozen=True)
class Result:
    """One contender under one load."""

    load: str  # title
    name: str  # of the contender
    seconds: list[float]  # of a step, by round
    faster: list[float]  # expert parallelism's seconds over ours, by round
    limit_s: float  # of a step, if rows were even, and all that travels took no time
    # share of the gathers' time that their rank computed beside them; None without any
    hidden_gather: float | None
    hidden_reduction: float | None  # likewise of reductions
    remote: float  # see ``Routed``
    abroad: float  # see ``Routed``
    balance: float  # see ``Routed``
    sent_bytes: float  # of the busiest rank in a step, to other nodes
    replica_bytes: float  # of replicas and their gradients, to whatever rank
    late_s: float  # a step's paced waits lasted longer by so much, mean over ranks
    reported: Reported  # what its strategy says


@dataclass
class Tally:
    """What one contender's counted steps add up to on this rank."""

    seconds: list[float] = field(default_factory=list)  # of a step, by round
    seen: list[Seen] = field(default_factory=list)  # of every step
    sent_bytes: int = 0  # of all steps

    def result(self, load: str, name: str, reported: Reported, first: Tally) -> Result:
        """Over all ranks. Collective."""
        num_steps = len(self.seen)
        mine = [sum(column) for column in zip(*(seen.travel for seen in self.seen))]
        mine += [sum(seen.late_s for seen in self.seen)]
        mine += [self.sent_bytes, sum(seen.replica_bytes for seen in self.seen)]
        table = all_gather_counts(torch.tensor(mine, dtype=torch.float64), None)
        gather_s, gather_bare_s, reduction_s, reduction_bare_s, late_s, *_ = table.sum(dim=0)
        *_, sent, copied = table.max(dim=0).values.tolist()
        ours = [seen.routed for seen in self.seen]
        return Result(
            load=load,
            name=name,
            seconds=self.seconds,
            faster=[theirs / ours for theirs, ours in zip(first.seconds, self.seconds)],
            limit_s=statistics.mean(routed.limit_s for routed in ours),
            hidden_gather=_hidden(float(gather_s), float(gather_bare_s)),
            hidden_reduction=_hidden(float(reduction_s), float(reduction_bare_s)),
            remote=statistics.mean(routed.remote for routed in ours),
            abroad=statistics.mean(routed.abroad for routed in ours),
            balance=statistics.mean(routed.balance for routed in ours),
            sent_bytes=sent / num_steps,
            replica_bytes=copied / num_steps,
            late_s=float(late_s) / len(table) / num_steps,
            reported=reported,
        )


def _hidden(seconds: float, bare_s: float) -> float | None:
    return 1 - bare_s / seconds if seconds else None


COLUMNS = (
    *("contender", "ms a step", "faster by", "rounds won", "at best"),
    *("gather hidden", "reduction hidden", "rows remote", "to other nodes"),
    *("max/mean", "MB sent", "of replicas", "late, ms"),
)


def markdown(results: Sequence[Result]) -> Iterator[str]:
    """One load's results as a table, and under it what the strategies say of their costs.

    The first contender is what the others are compared with. "At best" compares the fastest rounds:
    what else the machine does can only make one slower.
    """
    first = results[0]
    yield f"\n{first.load}\n"
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for each in results:
        yield f"| {' | '.join(_ep_ranks(each, first))} |"
    limit = statistics.median(first.seconds) / first.limit_s
    yield f"\nThe limit, even rows and all hidden: {1e3 * first.limit_s:.0f} ms, {limit:.3f}\n"
    for each in results:
        stated = [each.reported.line] if each.reported.line else []
        stated += [
            f"{term.name} {term.error:.0%} off ({1e3 * term.predicted_s:.3g} ms predicted, "
            f"{1e3 * term.found_s:.3g} found)"
            for term in each.reported.terms
        ]
        if stated:
            yield f"- {each.name}: {'; '.join(stated)}"


def _ep_ranks(each: Result, first: Result) -> tuple[str, ...]:
    return (
        each.name,
        f"{1e3 * statistics.median(each.seconds):.0f}",
        f"{statistics.median(each.faster):.3f}",
        f"{sum(ratio > 1 for ratio in each.faster)}/{len(each.faster)}",
        f"{min(first.seconds) / min(each.seconds):.3f}",
        "" if each.hidden_gather is None else f"{each.hidden_gather:.0%}",
        "" if each.hidden_reduction is None else f"{each.hidden_reduction:.0%}",
        f"{each.remote:.0%}",
        f"{each.abroad:.0%}",
        f"{each.balance:.2f}",
        f"{each.sent_bytes / 1e6:.1f}",
        f"{each.replica_bytes / 1e6:.1f}",
        f"{1e3 * each.late_s:.1f}",
    )


# Contenders.


@dataclass(frozen=True)
class Way:
    """One way to run the layers."""

    name: str  # in the table
    block: dict[str, Any]  # of the JSON
    # replicas are launched as a block begins; else where the layer is called, so that nothing hides
    # them
    is_early: bool = True


PLAIN = Way("ep", {"strategy": "ep"})


def fssdp_ways(replicas_per_rank: Sequence[int], overlap_degree: int) -> Iterator[Way]:
    """Replicas in growing numbers by either share, variants of the most, and t and m measured."""
    for replicas in replicas_per_rank:
        given = {"overlap_degree": overlap_degree, "replicas_per_rank": replicas}
        yield _fssdp(f"m = {replicas}", **given)
        yield _fssdp(f"m = {replicas}, paper share", **given, share="paper")
    if replicas_per_rank:
        yield _fssdp("the same, rematerialized", **given, rematerialize=True)
        yield replace(_fssdp("the same, late", **given), is_early=False)
    yield _fssdp("fssdp, t and m measured")
    yield _fssdp("the same, paper share", share="paper")


def _fssdp(name: str, **keys: Any) -> Way:
    return Way(name, {"strategy": "fssdp", "fssdp": {"reshard_interval": 0, **keys}})


def prophet_ways() -> Iterator[Way]:
    """As it comes; then with one thing changed; last as "own block", but kept and launched late."""
    yield _prophet("prophet")
    yield _prophet("prophet, kept", rematerialize=False)
    yield _prophet("prophet, paper share", share="paper")
    yield _prophet("prophet, shadow", planner="shadow")
    yield _prophet("prophet, own block", scheduler=False)
    bare = _prophet("prophet, not hidden", scheduler=False, rematerialize=False)
    yield replace(bare, is_early=False)


def _prophet(name: str, **keys: Any) -> Way:
    return Way(name, {"strategy": "prophet", "prophet": keys})


def esp_ways() -> Iterator[Way]:
    """Whole experts uncut, in one queue, in two; and so with experts split in the nodes; last the
    pipeline over copies."""
    for size, name in ((1, "esp"), (2, "esp, ETP groups of 2")):
        yield _esp(f"{name}, uncut", size, degree=1)
        yield _esp(f"{name}, tutel", size, schedule="tutel")
        yield _esp(f"{name}, fsmoe", size)
    for balance, keys in (("fssdp", {"reshard_interval": 0}), ("prophet", {})):
        way = _esp(f"esp over {balance}", 1)
        yield replace(way, block={**way.block, "balance": balance, balance: keys})


def _esp(name: str, etp_size: int, **keys: Any) -> Way:
    block = {"strategy": "esp", "expert_sharding_size": etp_size}
    return Way(name, {**block, "esp": {"slice_gradients": False, **keys}})


def auto_ways() -> Iterator[Way]:
    """What chooses, often; and each of those that it chooses from."""
    stays = {"fssdp": {"reshard_interval": 0}}
    yield Way("auto", {"strategy": "auto", "auto": {"interval": 10}, **stays})
    yield _fssdp("fssdp, t and m measured")
    yield _prophet("prophet")
    yield _esp("esp", 1)
    for balance, keys in (("fssdp", stays["fssdp"]), ("prophet", {})):
        way = _esp(f"esp over {balance}", 1)
        yield replace(way, block={**way.block, "balance": balance, balance: keys})


@dataclass(frozen=True)
class Sizes:
    """Of a model."""

    layers: int  # of the model
    experts: int  # of a layer
    expert_rows: int  # an expert has so many times a row's bytes
    rows: int  # of a rank and layer
    width: int  # floats of a row


class Contender:
    """A model with its layers replaced, trained without an optimizer. Collective."""

    def __init__(self, way: Way, pace: Pace, sizes: Sizes) -> None:
        self.name, self._pace = way.name, pace
        self._line = ""
        shape = (sizes.experts, sizes.expert_rows, sizes.width)
        self._blocks = nn.ModuleList([Block(pace, shape) for _ in range(sizes.layers)])
        model = nn.ModuleDict({"blocks": self._blocks})
        self._replaced = ReplacedLayers.of(model, way.block, is_early=way.is_early, log=self._log)
        self._layers = self._replaced.layers
        for layer in self._layers:
            layer.routed.tasks.is_wanted = True
        self._own_s, self._began_s = 0.0, time.perf_counter()
        self._replaced.planning.costs.times.clock = self._clock
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._x_TD = torch.rand(sizes.rows, sizes.width, generator=generator)

    def _log(self, line: str) -> None:
        self._line = line

    def _clock(self) -> float:
        """Seconds of its own turns."""
        return self._own_s + time.perf_counter() - self._began_s

    @property
    def reported(self) -> Reported:
        return Reported(self._line, self._replaced.planning.checks.terms)

    @property
    def _sent_bytes(self) -> int:
        replicas = (layer.routed.replicas for layer in self._layers)
        return sum((each.traffic for each in replicas if each), start=Traffic()).sent_bytes

    def step(self, number: int, rows_LE: np.ndarray) -> Seen:
        """One step whose gates choose as given. Collective."""
        self._began_s = time.perf_counter()
        plans = [layer.routed.layer_context.plan for layer in self._layers]
        before = self._sent_bytes
        self._blocks.zero_grad(set_to_none=True)
        x_TD = self._x_TD = self._x_TD.detach().requires_grad_()
        mixing = torch.Generator().manual_seed(number)  # as tokens of a text are
        for block, rows_E in zip(self._blocks, rows_LE):
            expert_T = torch.repeat_interleave(torch.from_numpy(rows_E))
            expert_T = expert_T[torch.randperm(len(expert_T), generator=mixing)]
            x_TD = block(x_TD, expert_T[:, None])
        x_TD.backward(torch.ones_like(x_TD))
        rows = self._replaced.after_step(number)
        self._own_s, self._began_s = self._clock(), time.perf_counter()
        rows_LCC = rows_between(plans, [each.routed_CE for each in rows])
        timed = (task for layer in self._layers for task in layer.routed.tasks.take())
        held = self._pace.take()
        return Seen(
            routed=Routed.of(rows_LCC, self._replaced.node_C, self._pace),
            travel=travel(timed, [(each.start_s, each.end_s) for each in held]),
            replica_bytes=self._sent_bytes - before,
            late_s=sum(each.late_s for each in held),
        )

    def gradients(self) -> list[Tensor]:
        """Of the input; and of the experts at their owners on this rank, if they are whole."""
        whole = (layer for layer in self._layers if layer.hosted.shard.is_whole)
        weights = (parameter for layer in whole for parameter in layer.parameters)
        grads = [parameter.grad for parameter in weights]
        return [grad for grad in (self._x_TD.grad, *grads) if grad is not None]


# The comparison.

TOLERANCE = 1e-5  # of the largest gradient: sums are taken in another order


def ways(given: argparse.Namespace) -> tuple[Way, ...]:
    """The contenders of the command line."""
    fssdp = fssdp_ways(given.replicas, given.overlap_degree)
    by_strategy = {
        "fssdp": fssdp,
        "prophet": prophet_ways(),
        "esp": esp_ways(),
        "auto": auto_ways(),
    }
    return PLAIN, *(way for name in given.strategies for way in by_strategy[name])


@dataclass(frozen=True, eq=False)
class Load:
    """Rows of all steps."""

    title: str  # for the table
    rows_ILCE: np.ndarray  # that each rank routes to each expert of each layer; the steps recur


def loads(given: argparse.Namespace, world_size: int) -> Iterator[Load]:
    """Those of the command line."""
    if given.trace is not None:
        yield Load(f"trace {given.trace.name}", traced(given, world_size))
        return
    num_steps = NUM_WARM_UPS + (given.rounds + 1) * given.steps_per_round
    shape = (num_steps, given.layers, world_size, given.experts)
    for skew in given.skews:
        rows_ILCE = zipf_loads(shape, rows=given.rows, skew=skew, seed=given.seed)
        yield Load(f"zipf, exponent {skew:g}", rows_ILCE)


def traced(given: argparse.Namespace, world_size: int) -> np.ndarray:
    """The last run of steps in a trace: layers evenly chosen, its ranks in groups of neighbours."""
    rows_ILCE = read_table(given.trace).runs()[-1]
    num_steps, num_layers, num_ranks, num_experts = rows_ILCE.shape
    if num_ranks % world_size or num_layers < given.layers:
        raise ValueError(
            f"{given.trace} has {num_layers} layers on {num_ranks} ranks, which do not give "
            f"{given.layers} layers on {world_size}; choose fewer layers, or ranks that divide"
        )
    chosen = np.linspace(0, num_layers - 1, given.layers).round().astype(int)
    shape = (num_steps, given.layers, world_size, num_ranks // world_size, num_experts)
    grouped_ILCE = rows_ILCE[:, chosen].reshape(shape).sum(axis=3)
    return np.apply_along_axis(scaled, 3, grouped_ILCE, given.rows)


def scaled(rows_E: np.ndarray, total: int) -> np.ndarray:
    """As many rows as given in the same proportions; the largest remainders are rounded up."""
    whole_E, rest_E = np.divmod(rows_E * total, rows_E.sum())
    up = np.argsort(-rest_E, kind="stable")[: total - int(whole_E.sum())]
    whole_E[up] += 1
    return whole_E


def contenders(given: argparse.Namespace, chosen: Sequence[Way], load: Load) -> list[Contender]:
    """One for each way. Collective."""
    pace = Pace(given.attention_ms / 1e3, given.row_us / 1e6)
    num_experts = load.rows_ILCE.shape[-1]
    sizes = Sizes(given.layers, num_experts, given.expert_rows, given.rows, given.width)
    return [Contender(way, pace, sizes) for way in chosen]


def compare(
    contenders: Sequence[Contender],
    load: Load,
    card: Card,
    *,
    num_rounds: int,
    steps_per_round: int,
) -> list[Result]:
    """Warm up, check that all agree, take turns on the links of a card. Collective."""
    own_ILE = load.rows_ILCE[:, :, dist.get_rank()]

    def step(contender: Contender, number: int) -> Seen:
        return contender.step(number, own_ILE[number % len(own_ILE)])

    for contender in contenders:
        for number in range(NUM_WARM_UPS):
            step(contender, number)
        check_agree(contenders[0], contender)
    tallies = [Tally() for _ in contenders]
    for number in range(num_rounds + 1):
        for contender, tally in rotated(list(zip(contenders, tallies)), number):
            dist.barrier()
            start_s, sent = time.perf_counter(), card.sent_bytes
            first = NUM_WARM_UPS + number * steps_per_round
            seen = [step(contender, first + i) for i in range(steps_per_round)]
            dist.barrier()
            if number:
                tally.seconds.append((time.perf_counter() - start_s) / steps_per_round)
                tally.sent_bytes += card.sent_bytes - sent
                tally.seen += seen
    return [
        tally.result(load.title, each.name, each.reported, tallies[0])
        for each, tally in zip(contenders, tallies)
    ]


def check_agree(first: Contender, other: Contender) -> None:
    """Their gradients after the same step are the same.

    Raises:
        RuntimeError: they are not.
    """
    for ours, theirs in zip(first.gradients(), other.gradients(), strict=False):
        error = float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-30))
        if error > TOLERANCE:
            raise RuntimeError(
                f"{other.name} has other gradients than {first.name}, by {error:.1e}"
            )


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--skews", type=float, nargs="+", default=[0.0, 0.6, 1.2], help="of Zipf loads")
    add("--trace", type=Path, help="of loads, instead; see planners_table.py")
    names = ["fssdp", "prophet", "esp", "auto"]
    add("--strategies", nargs="+", choices=names, default=names[:2], help="beside ep")
    add(
        "--replicas", type=int, nargs="*", default=[1, 2, 4], help="m of fssdp beside what it finds"
    )
    add("--overlap_degree", type=int, default=4, help="t of those")
    add("--layers", type=int, default=3)
    add("--experts", type=int, default=16, help="of a layer; a trace has its own number")
    add("--rows", type=int, default=2048, help="of a rank and layer")
    add("--width", type=int, default=256, help="floats of a row")
    add("--expert_rows", type=int, default=256, help="an expert has so many times a row's bytes")
    add("--attention_ms", type=float, default=20.0, help="forward, of a layer")
    add("--row_us", type=float, default=10.0, help="forward, of an expert on a row")
    add("--inter_mbit", type=float, default=400.0, help="of a rank's card, to other nodes")
    add("--start_us", type=float, default=100.0, help="of a transfer")
    add("--ranks_per_node", type=int, default=2, help="links within a node take no time")
    add("--rounds", type=int, default=11)
    add("--steps_per_round", type=int, default=2)
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="JSON file for the results")
    return parser.parse_args(words)


def compared(given: argparse.Namespace, chosen: Sequence[Way], load: Load) -> list[Result]:
    """Of ways on the links of the command line. Collective."""
    card = Card(given.inter_mbit * 1e6 / 8, given.start_us / 1e6)
    with paced_links(card, given.ranks_per_node):
        return compare(
            contenders(given, chosen, load),
            load,
            card,
            num_rounds=given.rounds,
            steps_per_round=given.steps_per_round,
        )


def main() -> None:
    """Build all contenders for each load, compare them, print."""
    given = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    results: list[Result] = []
    for load in loads(given, dist.get_world_size()):
        found = compared(given, ways(given), load)
        console.print("\n".join(markdown(found)), soft_wrap=True)
        results += found
    console.print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    if given.json is not None and dist.get_rank() == 0:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps([asdict(each) for each in results], indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
