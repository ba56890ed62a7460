# SPDX-License-Identifier: Apache-2.0
"""What slow_links.py shows of a contender: where rows go, what hides copies, and the table of it.

Shape letters: L layers, C ranks, E experts.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
import torch
from cluster import SPEEDS
from pace import BACKWARD, Moments, Pace, bare, union

from ds_moe_ext.core.comm import all_gather_counts
from ds_moe_ext.moe.observation import TimedTask
from ds_moe_ext.planning.loads import balance_L
from ds_moe_ext.planning.prices import TRIPS, Prices, RowFlow, flow_seconds
from ds_moe_ext.planning.strategy import Plan
from ds_moe_ext.report.record import TermRecord
from ds_moe_ext.schedule.task import ATTENTION, COMPUTE, PARAM

# Where rows go.


def rows_between(plans: Sequence[Plan], rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows that each rank sends to each one, itself too, by each plan's own share, ``[L, C, C]``.

    Args:
        plans: of each layer; none is revised once rows are known.
        rows: of each layer, that each sender routes to each expert, int64 ``[C, E]``.
    """
    each = zip(plans, rows)
    sent = [plan.share.of_rows(rows_CE).rows_between(rows_CE[:, None])[0] for plan, rows_CE in each]
    return np.array(sent)


def flow_of(rows_LCC: np.ndarray, node_C: np.ndarray) -> RowFlow:
    """What enters and leaves ranks and nodes.

    Args:
        rows_LCC: as of ``rows_between``.
        node_C: node of each rank.
    """
    others_LCC = rows_LCC * ~np.eye(len(node_C), dtype=bool)
    is_on_NC = np.unique(node_C)[:, None] == node_C
    rows_LNN = is_on_NC @ rows_LCC @ is_on_NC.T
    abroad_LNN = rows_LNN * ~np.eye(len(is_on_NC), dtype=bool)
    return RowFlow(
        computed_LC=rows_LCC.sum(axis=1),
        sent_LC=others_LCC.sum(axis=2),
        received_LC=others_LCC.sum(axis=1),
        out_LN=abroad_LNN.sum(axis=2),
        in_LN=abroad_LNN.sum(axis=1),
    )


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

    def seconds(self, rows_LCC: np.ndarray, node_C: np.ndarray) -> np.ndarray:
        """Of each layer's all-to-all, by its busiest card, float ``[L]``; see ``rows_between``."""
        is_near_CC = node_C[:, None] == node_C
        own_CC = np.eye(len(node_C), dtype=bool)
        far_L, near_L = (_busiest(rows_LCC * on) for on in (~is_near_CC, is_near_CC & ~own_CC))
        link_L = np.maximum(far_L / self.inter_bytes_per_s, near_L / self.intra_bytes_per_s)
        seconds_L: np.ndarray = self.row_bytes * link_L
        return seconds_L


def _busiest(rows_LCC: np.ndarray) -> np.ndarray:
    """Rows of the busiest sender or receiver, ``[L]``."""
    most_L: np.ndarray = np.maximum(rows_LCC.sum(axis=1), rows_LCC.sum(axis=2)).max(axis=1)
    return most_L


@dataclass(frozen=True)
class Routed:
    """Where the rows of one step go.

    Attributes:
        remote: share of all ranks' rows that leave their rank.
        abroad: share that leave their node.
        balance: rows of the busiest rank over the mean, mean over layers.
        model_s: seconds of the step by HECATE's model.
        cards_s: by the speed of each rank's card, if copies took no time.
        limit_s: if rows were even, and all that travels took no time.
    """

    remote: float
    abroad: float
    balance: float
    model_s: float
    cards_s: float
    limit_s: float

    @classmethod
    def of(
        cls, rows_LCC: np.ndarray, node_C: np.ndarray, *, pace: Pace, prices: Prices, cards: Cards
    ) -> Routed:
        """As the rows are shared and what computing and links are said to take."""
        flow, passes = flow_of(rows_LCC, node_C), 1 + BACKWARD
        computed_L = pace.attention_s + pace.row_s * flow.computed_LC.max(axis=1)
        model_L = flow_seconds(flow, prices=prices) + passes * pace.attention_s
        cards_L = TRIPS * cards.seconds(rows_LCC, node_C) + passes * computed_L
        even_L = pace.attention_s + pace.row_s * flow.computed_LC.mean(axis=1)
        return cls(
            remote=float(flow.sent_LC.sum() / rows_LCC.sum()),
            abroad=float(flow.out_LN.sum() / rows_LCC.sum()),
            balance=float(balance_L(flow.computed_LC).mean()),
            model_s=float(model_L.sum()),
            cards_s=float(cards_L.sum()),
            limit_s=float(passes * even_L.sum()),
        )


# What hides copies.


@dataclass(frozen=True)
class Travel:
    """Seconds of one rank in one step, all layers.

    Attributes:
        gather_s: copies travelled.
        gather_bare_s: and the rank computed nothing.
        reduction_s: gradients of copies travelled.
        reduction_bare_s: and the rank computed nothing.
    """

    gather_s: float = 0.0
    gather_bare_s: float = 0.0
    reduction_s: float = 0.0
    reduction_bare_s: float = 0.0

    def __add__(self, other: Travel) -> Travel:
        pairs = zip(vars(self).values(), vars(other).values())
        return Travel(*(mine + its for mine, its in pairs))


def travel(timed: Iterable[TimedTask], held: Iterable[Moments]) -> Travel:
    """What the tasks of all layers in a step say of its copies.

    Args:
        timed: of a CPU, whose marks are seconds of one clock. What it says of attention is not
            used: in backward that ends where autograd passes the block's input, which may wait for
            copies before.
        held: when attention and experts computed.
    """
    tasks = list(timed)
    worked = [
        (each.start, each.end)
        for each in tasks
        if each.task.lane == COMPUTE and each.task.op.is_work and each.task.op is not ATTENTION
    ]
    busy = union([*held, *worked])
    total = Travel()
    for each in tasks:
        if each.task.lane == PARAM:
            seconds, bare_s = each.end - each.start, bare(each.start, each.end, busy)
            seen = (0.0, 0.0, seconds, bare_s) if each.task.adjoint_of else (seconds, bare_s)
            total += Travel(*seen)
    return total


@dataclass(frozen=True)
class Seen:
    """One step of one contender on one rank.

    Attributes:
        routed: the rows.
        travel: of copies.
        copy_bytes: weights and gradients of copies that this rank sent.
        late_s: by how much its paced waits lasted longer.
    """

    routed: Routed
    travel: Travel
    copy_bytes: int
    late_s: float


# The table.


@dataclass(frozen=True)
class Told:
    """What a strategy says of its costs.

    Attributes:
        line: what it made of its measurements; empty if it measures none.
        terms: its model beside what was found; none if it has no model.
    """

    line: str
    terms: tuple[TermRecord, ...]


@dataclass(frozen=True)
class Result:
    """One contender under one load.

    Attributes:
        load: title.
        name: of the contender.
        seconds: of a step, by round.
        faster: expert parallelism's seconds over ours, by round.
        faster_by_model: likewise by HECATE's model, all steps.
        faster_by_cards: likewise by the speed of each rank's card, if copies took no time.
        limit_s: of a step, if rows were even, and all that travels took no time.
        hidden_gather: share of the gathers' time that their rank computed beside them; None without
            any.
        hidden_reduction: likewise of reductions.
        remote: see ``Routed``.
        abroad: see ``Routed``.
        balance: see ``Routed``.
        sent_bytes: of the busiest rank in a step, as the kernel counts them.
        copy_bytes: likewise, payload of copies and their gradients alone.
        late_s: a step's paced waits lasted longer by so much, mean over ranks.
        told: what its strategy says.
    """

    load: str
    name: str
    seconds: list[float]
    faster: list[float]
    faster_by_model: float
    faster_by_cards: float
    limit_s: float
    hidden_gather: float | None
    hidden_reduction: float | None
    remote: float
    abroad: float
    balance: float
    sent_bytes: float
    copy_bytes: float
    late_s: float
    told: Told


@dataclass
class Tally:
    """What one contender's counted steps add up to on this rank.

    Attributes:
        seconds: of a step, by round.
        seen: of every step.
        sent_bytes: of all steps, as the kernel counts them.
    """

    seconds: list[float] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    sent_bytes: int = 0

    @property
    def _routed(self) -> Iterator[Routed]:
        return (seen.routed for seen in self.seen)

    def result(self, load: str, name: str, told: Told, first: Tally) -> Result:
        """Over all ranks. Collective."""
        num_steps = len(self.seen)
        mine = [sum(column) for column in zip(*(astuple(seen.travel) for seen in self.seen))]
        mine += [sum(seen.late_s for seen in self.seen)]
        mine += [self.sent_bytes, sum(seen.copy_bytes for seen in self.seen)]
        table = all_gather_counts(torch.tensor(mine, dtype=torch.float64), None)
        gather_s, gather_bare_s, reduction_s, reduction_bare_s, late_s, *_ = table.sum(dim=0)
        *_, sent, copied = table.max(dim=0).values.tolist()
        ours, theirs = list(self._routed), list(first._routed)
        return Result(
            load=load,
            name=name,
            seconds=self.seconds,
            faster=[theirs / ours for theirs, ours in zip(first.seconds, self.seconds)],
            faster_by_model=sum(r.model_s for r in theirs) / sum(r.model_s for r in ours),
            faster_by_cards=sum(r.cards_s for r in theirs) / sum(r.cards_s for r in ours),
            limit_s=statistics.mean(routed.limit_s for routed in ours),
            hidden_gather=_hidden(float(gather_s), float(gather_bare_s)),
            hidden_reduction=_hidden(float(reduction_s), float(reduction_bare_s)),
            remote=statistics.mean(routed.remote for routed in ours),
            abroad=statistics.mean(routed.abroad for routed in ours),
            balance=statistics.mean(routed.balance for routed in ours),
            sent_bytes=sent / num_steps,
            copy_bytes=copied / num_steps,
            late_s=float(late_s) / len(table) / num_steps,
            told=told,
        )


def _hidden(seconds: float, bare_s: float) -> float | None:
    return 1 - bare_s / seconds if seconds else None


COLUMNS = (
    *("contender", "ms a step", "faster by", "rounds won", "at best", "by the cards"),
    *("by the model", "gather hidden", "reduction hidden", "rows remote", "to other nodes"),
    *("max/mean", "MB sent", "of copies", "late, ms"),
)


def markdown(results: Sequence[Result]) -> Iterator[str]:
    """One load's results as a table, and under it what the strategies say of their costs.

    The first contender is what the others are compared with. "At best" compares the fastest rounds:
    what else the machine does can only make one slower. "By the cards" is what links and paces let
    expect of copies that take no time; "by the model", what HECATE's model of rows does.
    """
    first = results[0]
    yield f"\n{first.load}\n"
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for each in results:
        yield f"| {' | '.join(_cells(each, first))} |"
    limit = statistics.median(first.seconds) / first.limit_s
    yield f"\nThe limit, even rows and all hidden: {1e3 * first.limit_s:.0f} ms, {limit:.3f}\n"
    for each in results:
        said = [each.told.line] if each.told.line else []
        said += [
            f"{term.name} {term.error:.0%} off ({1e3 * term.said_s:.3g} ms said, "
            f"{1e3 * term.found_s:.3g} found)"
            for term in each.told.terms
        ]
        if said:
            yield f"- {each.name}: {'; '.join(said)}"


def _cells(each: Result, first: Result) -> tuple[str, ...]:
    return (
        each.name,
        f"{1e3 * statistics.median(each.seconds):.0f}",
        f"{statistics.median(each.faster):.3f}",
        f"{sum(ratio > 1 for ratio in each.faster)}/{len(each.faster)}",
        f"{min(first.seconds) / min(each.seconds):.3f}",
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
