"""What steps of several contenders add up to, and the table of them in markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field

import torch
from links_contenders import Told
from links_seen import Routed, Seen

from ds_moe_ext.comm import all_gather_counts


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
    yield f"\n{results[0].load}\n"
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for each in results:
        yield f"| {' | '.join(_cells(each, results[0]))} |"
    yield ""
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
