"""What strategy `fssdp` gains over `ep` where links are slow and routing is skewed.

`python launch/links.py --inter_mbit 400 launch/bench_links.py --skews 0 0.6 1.2 --copies 1 2 4`
`... launch/bench_links.py --trace loads.npz`

Any launcher that sets RANK and the like will do; `launch/links.py` brings the slow links. On a busy
machine put `chrt -r 10` before the command. Planners, layers and traffic are the product's own, and
every byte is sent; only what computes is stood in for, see `paced.py`. The contenders take turns, a
few steps each, in an order that rotates; ratios are paired by round. Before they are timed, they
must agree on the gradients of all experts.

Shape letters: I steps, L layers, C ranks, E experts, T rows of a rank, D width of a row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from links import SPEEDS
from paced import BACKWARD, Block, Pace
from rich.console import Console
from table_of_planners import read_trace
from torch import Tensor, nn

from ds_moe_ext.comm import Traffic, all_gather_counts
from ds_moe_ext.hosts.attach import build, draw
from ds_moe_ext.hosts.blocks import launch_with_blocks
from ds_moe_ext.hosts.checks import Checks
from ds_moe_ext.hosts.costs import STEPS, Costs
from ds_moe_ext.hosts.experts import find_registered
from ds_moe_ext.hosts.planning import Planning
from ds_moe_ext.load import balance_L, zipf_loads
from ds_moe_ext.moe.observe import TimedTask
from ds_moe_ext.placement import Placement
from ds_moe_ext.planners.prices import TRIPS, Prices, nearest_copy_flow, step_seconds
from ds_moe_ext.schedule.task import ATTENTION, GATHER, RESTORE, Op
from ds_moe_ext.settings import BLOCK, read_settings
from ds_moe_ext.strategies.base import ROWS_ALONE, Job, Plan

NUM_WARM_UPS = STEPS[-1] + 4  # costs are known, and the window has seen these loads
TOLERANCE = 1e-5  # of the largest gradient: sums are taken in another order


# What is compared.


@dataclass(frozen=True)
class Way:
    """One way to run the layers.

    Attributes:
        name: in the table.
        block: of the JSON.
        is_early: copies are launched as the block begins; else where the layer is called, so that
            nothing hides them.
    """

    name: str
    block: dict[str, Any]
    is_early: bool = True


def ways(given: argparse.Namespace) -> Iterator[Way]:
    """Expert parallelism, copies in growing numbers, variants of the most, and t and m measured."""
    yield Way("ep", {"strategy": "ep"})
    for copies in given.copies:
        yield copied(f"m = {copies}", given, copies_per_rank=copies)
    yield copied("the same, rematerialized", given, copies_per_rank=copies, rematerialize=True)
    yield replace(copied("the same, late", given, copies_per_rank=copies), is_early=False)
    yield copied("fssdp, t and m measured", given, overlap_degree=None)


def copied(name: str, given: argparse.Namespace, **keys: Any) -> Way:
    """A way of fssdp, with the command line's t unless told otherwise."""
    block = {"overlap_degree": given.overlap_degree, "reshard_interval": 0, **keys}
    return Way(name, {"strategy": "fssdp", "fssdp": block})


@dataclass(frozen=True)
class Travel:
    """Seconds of one rank in one step, all layers.

    Attributes:
        gather_s: copies travelled.
        gather_bare_s: when attention no longer ran beside it.
        reduction_s: gradients of copies travelled.
        reduction_bare_s: when attention no longer ran beside it.
    """

    gather_s: float = 0.0
    gather_bare_s: float = 0.0
    reduction_s: float = 0.0
    reduction_bare_s: float = 0.0

    def __add__(self, other: Travel) -> Travel:
        pairs = zip(vars(self).values(), vars(other).values())
        return Travel(*(mine + its for mine, its in pairs))


@dataclass(frozen=True)
class Seen:
    """One step of one contender on one rank.

    Attributes:
        travel: of copies.
        remote: share of all ranks' rows that leave their rank.
        abroad: share that leave their node.
        balance: rows of the busiest rank over the mean, mean over layers.
        model_s: seconds of the step by the planners' model.
        cards_s: by the speed of each rank's card, if copies took no time.
        copy_bytes: weights and gradients of copies that this rank sent.
    """

    travel: Travel
    remote: float
    abroad: float
    balance: float
    model_s: float
    cards_s: float
    copy_bytes: int


@dataclass(frozen=True)
class Cards:
    """What passes a rank's network card, in one direction.

    Attributes:
        row_bytes: of one row.
        inter_bytes_per_s: to or from other nodes.
        intra_bytes_per_s: to or from ranks of its node.
    """

    row_bytes: int
    inter_bytes_per_s: float
    intra_bytes_per_s: float

    @classmethod
    def told(cls, row_bytes: int) -> Cards:
        """As the launcher says; of any speed if it does not."""
        inter, intra = (float(os.environ.get(name, "inf")) for name in SPEEDS)
        return cls(row_bytes, inter * 1e6 / 8, intra * 1e6 / 8)

    def seconds(
        self, plans: Sequence[Plan], rows: Sequence[np.ndarray], node_C: np.ndarray
    ) -> np.ndarray:
        """Of each layer's all-to-all, by its busiest card, float ``[L]``."""
        is_near_CC = node_C[:, None] == node_C
        own_CC = np.eye(len(node_C), dtype=bool)
        seconds = []
        for plan, rows_CE in zip(plans, rows):
            sent = [plan.share.rows_from(c, own_E[None]) for c, own_E in enumerate(rows_CE)]
            rows_CC = np.concatenate(sent).sum(axis=1)
            far, near = (_busiest(rows_CC * used) for used in (~is_near_CC, is_near_CC & ~own_CC))
            link_s = max(far / self.inter_bytes_per_s, near / self.intra_bytes_per_s)
            seconds.append(self.row_bytes * link_s)
        return np.array(seconds)


def _busiest(rows_CC: np.ndarray) -> int:
    return int(max(rows_CC.sum(axis=0).max(), rows_CC.sum(axis=1).max()))


class Contender:
    """A model with its layers replaced, trained without an optimizer. Collective.

    Args:
        way: how its layers run.
        pace: of its computing.
        given: the command line.
        num_experts: experts ``E`` of a layer.

    Attributes:
        name: in the table.
        note: what the strategy made of its measurements.
        prices: by which the planners' model prices its steps.
    """

    def __init__(self, way: Way, pace: Pace, given: argparse.Namespace, num_experts: int) -> None:
        self.name, self._pace = way.name, pace
        self.note, self.prices = "", ROWS_ALONE
        self._cards = Cards.told(4 * given.width)
        shape = (num_experts, given.expert_rows, given.width)
        self._blocks = nn.ModuleList([Block(pace, shape) for _ in range(given.layers)])
        model = nn.ModuleDict({"blocks": self._blocks})
        settings, strategy = read_settings({BLOCK: {"enabled": True, **way.block}})
        assert strategy is not None
        world_size = dist.get_world_size()
        blueprint = draw(settings, strategy, model, [find_registered], world_size)
        self._layers = [layer for layer, _ in build(blueprint)]
        if way.is_early:
            launch_with_blocks(model, self._layers)
        for layer in self._layers:
            layer.routed.tasks.is_on = True
        homes = [layer.routed.site.plan.home for layer in self._layers]
        self._planning = Planning(
            strategy=strategy,
            layers=self._layers,
            job=Job.at_start(homes, self.node_C, blueprint.pools),
            costs=Costs(self._layers, blueprint.pools, None),
            checks=Checks(strategy, self._layers),
            mover=_stay,
            debug=False,
            rank=dist.get_rank(),
            tell=self._note,
        )
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._x_TD = torch.rand(given.rows, given.width, generator=generator)

    def _note(self, line: str) -> None:
        self.note = line

    @property
    def node_C(self) -> np.ndarray:
        return self._layers[0].routed.site.layout.node_C

    @property
    def _sent_bytes(self) -> int:
        copies = (layer.routed.copies for layer in self._layers)
        return sum((each.traffic for each in copies if each), start=Traffic()).sent_bytes

    def step(self, number: int, rows_LE: np.ndarray) -> Seen:
        """One step whose gates choose as told. Collective.

        Args:
            number: of the step, from 0.
            rows_LE: rows that this rank routes to each expert of each layer.
        """
        plans = [layer.routed.site.plan for layer in self._layers]
        before = self._sent_bytes
        self._blocks.zero_grad(set_to_none=True)
        x_TD = self._x_TD = self._x_TD.detach().requires_grad_()
        for block, rows_E in zip(self._blocks, rows_LE):
            expert_T = torch.repeat_interleave(torch.from_numpy(rows_E))
            x_TD = block(x_TD, expert_T[:, None])
        x_TD.backward(torch.ones_like(x_TD))
        rows = [layer.routed.rows.take() for layer in self._layers]
        self._planning.after_step(number, rows)
        timed = [layer.routed.tasks.take() for layer in self._layers]
        return self._seen(plans, [each.routed_CE for each in rows], timed, before)

    def _seen(
        self,
        plans: Sequence[Plan],
        rows: Sequence[np.ndarray],
        timed: Sequence[list[TimedTask]],
        before: int,
    ) -> Seen:
        targets, pace, passes = [plan.target for plan in plans], self._pace, 1 + BACKWARD
        traffic = nearest_copy_flow(targets, rows, self.node_C)
        num_rows = sum(int(rows_CE.sum()) for rows_CE in rows)
        model_L = step_seconds(targets, rows, prices=self.prices, node_C=self.node_C)
        exchange_L = self._cards.seconds(plans, rows, self.node_C)
        computed_L = pace.attention_s + pace.row_s * traffic.computed_LC.max(axis=1)
        return Seen(
            travel=travel(timed),
            remote=float(traffic.sent_LC.sum()) / num_rows,
            abroad=float(traffic.out_LN.sum()) / num_rows,
            balance=float(balance_L(traffic.computed_LC).mean()),
            model_s=float((model_L + passes * pace.attention_s).sum()),
            cards_s=float((TRIPS * exchange_L + passes * computed_L).sum()),
            copy_bytes=self._sent_bytes - before,
        )

    @property
    def measured(self) -> Prices:
        """Prices that its own first steps have shown."""
        return self._planning.job.pools[0].prices

    def gradients(self) -> list[Tensor]:
        """Of the experts at home on this rank, and of the input."""
        weights = (parameter for layer in self._layers for parameter in layer.parameters)
        grads = [parameter.grad for parameter in weights]
        return [grad for grad in (*grads, self._x_TD.grad) if grad is not None]


def _stay(old: Sequence[Placement], new: Sequence[Placement]) -> None:
    raise AssertionError("reshard_interval is 0: experts do not move")


def travel(timed: Sequence[list[TimedTask]]) -> Travel:
    """What a step's observed tasks say of its copies.

    A gather runs beside the attention of its own block; one in backward, and a reduction, beside
    that of the block whose backward comes first.
    """
    total = Travel()
    over_s = 0.0  # when attention of the block behind this one ended, in backward
    for tasks in reversed(timed):
        forward_s = max(_ends(tasks, ATTENTION, is_adjoint=False), default=0.0)
        back_s = max(_ends(tasks, ATTENTION, is_adjoint=True), default=over_s)
        restored_s = max(_ends(tasks, RESTORE, is_adjoint=False))
        for each in tasks:
            if each.task.op is GATHER and each.task.adjoint_of:
                total += Travel(
                    reduction_s=_after(each, 0.0), reduction_bare_s=_after(each, back_s)
                )
            elif each.task.op is GATHER:
                beside_s = forward_s if each.start < restored_s else over_s
                total += Travel(gather_s=_after(each, 0.0), gather_bare_s=_after(each, beside_s))
        over_s = back_s
    return total


def _ends(tasks: Sequence[TimedTask], op: Op, *, is_adjoint: bool) -> list[float]:
    of_op = (each for each in tasks if each.task.op is op)
    return [each.end for each in of_op if bool(each.task.adjoint_of) is is_adjoint]


def _after(each: TimedTask, moment_s: float) -> float:
    """Seconds of a task after a moment."""
    return max(each.end - max(each.start, moment_s), 0.0)


# What they are compared on.


@dataclass(frozen=True, eq=False)
class Load:
    """Rows of all steps.

    Attributes:
        title: for the table.
        rows_ILCE: that each rank routes to each expert of each layer; the steps recur.
    """

    title: str
    rows_ILCE: np.ndarray


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
    rows_ILCE = read_trace(given.trace)[-1]
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
    """As many rows as told in the same proportions; the largest remainders are rounded up."""
    whole_E, rest_E = np.divmod(rows_E * total, rows_E.sum())
    up = np.argsort(-rest_E, kind="stable")[: total - int(whole_E.sum())]
    whole_E[up] += 1
    return whole_E


# The comparison.


@dataclass(frozen=True)
class Result:
    """One contender under one load.

    Attributes:
        load: title.
        name: of the contender.
        seconds: of a step, by round.
        faster: expert parallelism's seconds over ours, by round.
        faster_by_model: likewise by the planners' model, all steps.
        faster_by_cards: likewise by the speed of each rank's card, if copies took no time.
        hidden_gather: share of the gathers' time that attention ran beside them; None without any.
        hidden_reduction: likewise of reductions.
        remote: see ``Seen``.
        abroad: see ``Seen``.
        balance: see ``Seen``.
        sent_bytes: of the busiest rank in a step, as the kernel counts them.
        copy_bytes: likewise, payload of copies and their gradients alone.
        late_s: a step's paced waits lasted longer by so much, mean over ranks.
    """

    load: str
    name: str
    seconds: list[float]
    faster: list[float]
    faster_by_model: float
    faster_by_cards: float
    hidden_gather: float | None
    hidden_reduction: float | None
    remote: float
    abroad: float
    balance: float
    sent_bytes: float
    copy_bytes: float
    late_s: float


@dataclass
class Tally:
    """What one contender's counted steps add up to on this rank."""

    seconds: list[float] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    sent_bytes: int = 0
    late_s: float = 0.0

    def result(self, load: str, name: str, first: Tally) -> Result:
        """Over all ranks. Collective."""
        num_steps = len(self.seen)
        mine = [sum(column) for column in zip(*(asdict(s.travel).values() for s in self.seen))]
        mine += [self.sent_bytes, sum(seen.copy_bytes for seen in self.seen), self.late_s]
        table = all_gather_counts(torch.tensor(mine, dtype=torch.float64), None)
        gather_s, gather_bare_s, reduction_s, reduction_bare_s, *_ = table.sum(dim=0).tolist()
        *_, sent, copied, _ = table.max(dim=0).values.tolist()
        return Result(
            load=load,
            name=name,
            seconds=self.seconds,
            faster=[theirs / ours for theirs, ours in zip(first.seconds, self.seconds)],
            faster_by_model=sum(s.model_s for s in first.seen) / sum(s.model_s for s in self.seen),
            faster_by_cards=sum(s.cards_s for s in first.seen) / sum(s.cards_s for s in self.seen),
            hidden_gather=1 - gather_bare_s / gather_s if gather_s else None,
            hidden_reduction=1 - reduction_bare_s / reduction_s if reduction_s else None,
            remote=statistics.mean(seen.remote for seen in self.seen),
            abroad=statistics.mean(seen.abroad for seen in self.seen),
            balance=statistics.mean(seen.balance for seen in self.seen),
            sent_bytes=sent / num_steps,
            copy_bytes=copied / num_steps,
            late_s=float(table[:, -1].mean()) / num_steps,
        )


def compare(
    contenders: Sequence[Contender], load: Load, given: argparse.Namespace, pace: Pace
) -> list[Result]:
    """Warm up, check that all agree, take turns. Collective."""
    own_ILE = load.rows_ILCE[:, :, dist.get_rank()]

    def step(contender: Contender, number: int) -> Seen:
        return contender.step(number, own_ILE[number % len(own_ILE)])

    for contender in contenders:
        for number in range(NUM_WARM_UPS):
            step(contender, number)
        check_agree(contenders[0], contender)
    for contender in contenders:
        contender.prices = contenders[-1].measured
    tallies = [Tally() for _ in contenders]
    for number in range(given.rounds + 1):
        turns = [(number + turn) % len(contenders) for turn in range(len(contenders))]
        for each in turns:
            tally, late = tallies[each], len(pace.late_s)
            dist.barrier()
            start_s, sent = time.perf_counter(), sent_bytes()
            first = NUM_WARM_UPS + number * given.steps_per_round
            seen = [step(contenders[each], first + i) for i in range(given.steps_per_round)]
            dist.barrier()
            if number:
                tally.seconds.append((time.perf_counter() - start_s) / given.steps_per_round)
                tally.sent_bytes += sent_bytes() - sent
                tally.seen += seen
                tally.late_s += sum(pace.late_s[late:])
    return [
        tally.result(load.title, each.name, tallies[0]) for each, tally in zip(contenders, tallies)
    ]


def check_agree(first: Contender, other: Contender) -> None:
    """Their gradients after the same step are the same.

    Raises:
        RuntimeError: they are not.
    """
    for ours, theirs in zip(first.gradients(), other.gradients(), strict=True):
        error = float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-30))
        if error > TOLERANCE:
            raise RuntimeError(
                f"{other.name} has other gradients than {first.name}, by {error:.1e}"
            )


def sent_bytes() -> int:
    """That this rank's network has sent, headers included."""
    card = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counts = next(line.partition(":")[2].split() for line in lines if line.strip().startswith(card))
    return int(counts[8])


# For a person.


COLUMNS = (
    *("contender", "ms a step", "faster by", "rounds won", "at best", "by the cards"),
    *("by the model", "gather hidden", "reduction hidden", "rows remote", "to other nodes"),
    *("max/mean", "MB sent", "of copies", "late, ms"),
)


def markdown(results: Sequence[Result]) -> Iterator[str]:
    """One load's results as a table; the first one is what the others are compared with.

    "At best" compares the fastest rounds: what else the machine does can only make one slower. "By
    the cards" is what links and paces let expect of copies that take no time; "by the model", what
    the planners expect.
    """
    yield f"\n{results[0].load}\n"
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for each in results:
        cells = (
            each.name,
            f"{1e3 * statistics.median(each.seconds):.0f}",
            f"{statistics.median(each.faster):.3f}",
            f"{sum(ratio > 1 for ratio in each.faster)}/{len(each.faster)}",
            f"{min(results[0].seconds) / min(each.seconds):.3f}",
            f"{each.faster_by_cards:.3f}",
            f"{each.faster_by_model:.3f}",
            "" if each.hidden_gather is None else f"{each.hidden_gather:.0%}",
            "" if each.hidden_reduction is None else f"{each.hidden_reduction:.0%}",
            f"{each.remote:.0%}",
            f"{each.abroad:.0%}",
            f"{each.balance:.2f}",
            f"{each.sent_bytes / 1e6:.1f}",
            f"{each.copy_bytes / 1e6:.1f}",
            f"{1e3 * each.late_s:.1f}",
        )
        yield f"| {' | '.join(cells)} |"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--skews", type=float, nargs="+", default=[0.0, 0.6, 1.2], help="of Zipf loads")
    add("--trace", type=Path, help="of loads, instead; see table_of_planners.py")
    add("--copies", type=int, nargs="+", default=[1, 2, 4], help="m")
    add("--overlap_degree", type=int, default=4, help="t")
    add("--layers", type=int, default=3)
    add("--experts", type=int, default=16, help="of a layer; a trace has its own number")
    add("--rows", type=int, default=2048, help="of a rank and layer")
    add("--width", type=int, default=256, help="floats of a row")
    add("--expert_rows", type=int, default=256, help="an expert has so many times a row's bytes")
    add("--attention_ms", type=float, default=20.0, help="forward, of a layer")
    add("--row_us", type=float, default=10.0, help="forward, of an expert on a row")
    add("--rounds", type=int, default=11)
    add("--steps_per_round", type=int, default=2)
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="write the figures here")
    return parser.parse_args(words)


def main() -> None:
    """Build all contenders, compare them under each load, print."""
    given = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    every = list(loads(given, dist.get_world_size()))
    pace = Pace(given.attention_ms / 1e3, given.row_us / 1e6)
    num_experts = every[0].rows_ILCE.shape[-1]
    contenders = [Contender(way, pace, given, num_experts) for way in ways(given)]
    results: list[Result] = []
    for load in every:
        found = compare(contenders, load, given, pace)
        console.print("\n".join(markdown(found)), soft_wrap=True)
        results += found
    console.print(f"load average at the end: {os.getloadavg()[0]:.2f}; {contenders[-1].note}")
    if given.json is not None and dist.get_rank() == 0:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps([asdict(each) for each in results], indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
