# SPDX-License-Identifier: Apache-2.0
"""What a run comes to: its headline numbers, what replicas saved, and whether it gained. Pure.

Terminals and pages show the same lines. Shape letters: I recorded steps, B columns of them, L
layers, E experts, C EP ranks, G points, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ds_moe_ext.report.record import (
    BadScores,
    ChoiceRecord,
    DeviceRecord,
    LooksRecord,
    RanksRecord,
    RunRecord,
)
from ds_moe_ext.report.units import EN_DASH, bytes_text, counted, seconds_text, short_count
from ds_moe_ext.schedule.stripes import OFFLOADED_JOIN
from ds_moe_ext.schedule.task import EXPERT, GATHER, HAVE_AGAIN, JOIN, START

BASE = "ep"  # computes every expert at its owner
ON_CPU = "cpu"
NAN = float("nan")
REDUCTION = "reduction"  # a gather's adjoint is known by a name of its own
TRAVELS = frozenset((GATHER.name, REDUCTION))
"""Replicas of experts on their way, and their gradients."""
WAITS = frozenset(op.name for op in (START, JOIN, HAVE_AGAIN, OFFLOADED_JOIN))
"""Tasks that only wait for replicas of experts, or for their gradients."""

OVER = " over "  # between the names of two strategies
NOTICED = 0.005  # part of a step, from which on it is called a gain
WORTH = 0.02  # likewise, from which on replicas could be worth trying


class Division(NamedTuple):
    """What was predicted of rows, and where they went, in some layers; nan where nobody knows."""

    owner_balance: float  # as in Outcome, of the looks where something was predicted
    predicted: float  # balance of the rows that plans were made for, mean of these looks
    balance: float  # of the rows that came, as they were computed
    # and by the paper's own rule, with the same replicas; nan where no other was followed
    by_paper: float
    left: float  # part of all rows that another EP rank computed than they came from
    crossed: float  # and one on another node


class Outcome(NamedTuple):
    """What replicas and new owners came to, in one layer or in all."""

    # rows of the busiest EP rank over the mean, had every expert computed at its owner only; mean
    # over the recorded steps (and layers)
    owner_balance: float
    balance: float  # the same, as it was computed
    replicas: float  # replicas beside the owners, a step on average (all layers together)
    num_moved: int  # experts that changed their owners, over the run


class Largest(NamedTuple):
    """Of some numbers, and where it is."""

    ratio: float
    layer: str
    at: int  # step, or expert


@dataclass(frozen=True, eq=False)
class Summary:
    """The headline numbers of a run; no record is made of a run without steps or layers."""

    mean_L: np.ndarray  # rows of the busiest EP rank over the mean, mean of the steps, float [L]
    mean: float  # of it
    worst_layer: int  # index of the layer with the largest mean
    moment: Largest  # the worst balance, and its step
    hot: Largest  # rows of the busiest expert over the run, over the mean expert of its layer
    # mean balance in the first and in the last quarter; None for fewer than 8 steps
    drift: tuple[float, float] | None
    num_rows: int  # rows computed in the recorded steps, all layers


@dataclass(frozen=True, eq=False)
class Bins:
    """Recorded steps gathered into columns of neighbours."""

    start_B: np.ndarray  # index of the first recorded step of each column, int64 [B]
    steps_I: tuple[int, ...]  # optimizer step of each recorded step

    def __len__(self) -> int:
        return len(self.start_B)

    @property
    def is_thinned(self) -> bool:
        """Whether a column stands for more than one step."""
        return len(self) < len(self.steps_I)

    def labels(self) -> list[str]:
        """The optimizer steps of each column, as ``30`` or ``30–39``."""
        stop_B = [*self.start_B[1:], len(self.steps_I)]
        ends = [(self.steps_I[a], self.steps_I[b - 1]) for a, b in zip(self.start_B, stop_B)]
        return [f"{a}" if a == b else f"{a}{EN_DASH}{b}" for a, b in ends]

    @property
    def first_steps(self) -> list[int]:
        """The first optimizer step of each column."""
        return [self.steps_I[at] for at in self.start_B]

    def total(self, values: np.ndarray) -> np.ndarray:
        """Sums over the steps of each column: ``[I, ...]`` to ``[B, ...]``."""
        return np.add.reduceat(values, self.start_B, axis=0)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Means over the steps of each column: ``[I, ...]`` to ``[B, ...]``."""
        size_B = np.diff([*self.start_B, len(self.steps_I)])
        return self.total(values) / size_B.reshape(-1, *(1,) * (values.ndim - 1))

    def known_mean(self, values: np.ndarray) -> np.ndarray:
        """``mean`` of what is not nan; nan where all is."""
        is_known = ~np.isnan(values)
        number, total = self.total(is_known), self.total(np.where(is_known, values, 0.0))
        return np.where(number > 0, total / np.maximum(number, 1), np.nan)

    def lowest(self, values: np.ndarray) -> np.ndarray:
        """Smallest of the steps of each column."""
        return np.minimum.reduceat(values, self.start_B, axis=0)

    def highest(self, values: np.ndarray) -> np.ndarray:
        """Largest of the steps of each column."""
        return np.maximum.reduceat(values, self.start_B, axis=0)


def gather_steps(steps_I: tuple[int, ...], *, max_bins: int) -> Bins:
    """Cut the recorded steps into at most ``max_bins`` runs whose lengths differ by at most one."""
    num_bins = min(max_bins, len(steps_I))
    start_B = (np.arange(num_bins) * len(steps_I)) // max(num_bins, 1)
    return Bins(start_B, steps_I)


def summarize(record: RunRecord) -> Summary | None:
    """The headline numbers of ``record``, None when it has no steps or no layers."""
    if not record.steps_I or not record.layers:
        return None
    balance_IL, rows_LE = record.balance_IL(), record.rows_ILE.sum(axis=0)
    mean_L, mean_I = balance_IL.mean(axis=0), balance_IL.mean(axis=1)
    quarter = len(mean_I) // 4
    step, layer = np.unravel_index(balance_IL.argmax(), balance_IL.shape)
    mean_rows_L = rows_LE.sum(axis=1) / [max(each.num_experts, 1) for each in record.layers]
    hot_LE = rows_LE / np.maximum(mean_rows_L, 1e-12)[:, None]
    hot_layer, expert = np.unravel_index(hot_LE.argmax(), hot_LE.shape)
    names = [each.name for each in record.layers]
    return Summary(
        mean_L=mean_L,
        mean=float(mean_L.mean()),
        worst_layer=int(mean_L.argmax()),
        moment=Largest(float(balance_IL.max()), names[layer], record.steps_I[step]),
        hot=Largest(float(hot_LE.max()), names[hot_layer], int(expert)),
        drift=(mean_I[:quarter].mean(), mean_I[-quarter:].mean()) if quarter >= 2 else None,
        num_rows=int(record.rows_ILE.sum()),
    )


def outcome_of(record: RunRecord) -> Outcome:
    """Of all layers together; a run without steps is balanced."""
    of_layers = outcomes_by_layer(record)
    owner, balance, replicas, num_moved = zip(*of_layers) if of_layers else ((), (), (), ())
    return Outcome(_mean(owner), _mean(balance), sum(replicas), sum(num_moved))


def outcomes_by_layer(record: RunRecord) -> tuple[Outcome, ...]:
    """Of each layer, in model order."""
    placements = record.placements
    owner_IL, balance_IL = record.owner_balance_IL(), record.balance_IL()
    replicas_IL = (
        np.zeros(owner_IL.shape) if placements is None else placements.all_replicas_ILE.sum(axis=2)
    )
    num_moved_L = np.zeros(len(record.layers), dtype=np.int64)
    for move in () if placements is None else placements.moves:
        num_moved_L[move.layer] += move.num_experts
    return tuple(
        Outcome(
            owner_balance=_mean(owner_IL[:, index]),
            balance=_mean(balance_IL[:, index]),
            replicas=float(replicas_IL[:, index].mean()) if record.steps_I else 0.0,
            num_moved=int(num_moved_L[index]),
        )
        for index in range(len(record.layers))
    )


def division_of(record: RunRecord, looks: LooksRecord, layers: Sequence[int]) -> Division:
    """Of these layers together."""
    predicted_IL, by_paper_IL, left_IL, crossed_IL = (
        table_IL[:, layers]
        for table_IL in (looks.predicted_IL, looks.by_paper_IL, looks.left_IL, looks.crossed_IL)
    )
    owner_IL, balance_IL = record.owner_balance_IL()[:, layers], record.balance_IL()[:, layers]
    was_predicted, was_seen = ~np.isnan(predicted_IL), ~np.isnan(left_IL)
    has_rule = was_predicted & ~np.isnan(by_paper_IL)
    num_rows = record.rows_ILE.sum(axis=2)[:, layers][was_seen].sum() or np.nan
    return Division(
        owner_balance=_known(owner_IL[was_predicted]),
        predicted=_known(predicted_IL[was_predicted]),
        balance=_known(balance_IL[was_predicted]),
        by_paper=_known(by_paper_IL[has_rule]),
        left=float(left_IL[was_seen].sum() / num_rows),
        crossed=float(crossed_IL[was_seen].sum() / num_rows),
    )


def typical(values_G: np.ndarray) -> float:
    """Median of what is known; nan where nothing is."""
    known_G = values_G[~np.isnan(values_G)]
    return float(np.median(known_G)) if known_G.size else NAN


def step_s_of(record: RunRecord) -> float:
    """Median seconds of a step, on the slowest rank; nan where nobody knows."""
    return NAN if record.ranks is None else typical(record.ranks.pace.step_s_G)


def took_line(record: RunRecord) -> str:
    """What a step took, for a person; empty where that is not known."""
    if record.ranks is None or np.isnan(step_s := step_s_of(record)):
        return ""
    tokens = typical(record.ranks.pace.tokens_per_s_G)
    rate = "" if np.isnan(tokens) else f", {short_count(tokens)} tokens a second"
    last = record.ranks.pace.steps_G[-1]
    return f"a step took {seconds_text(step_s)}{rate} (median up to step {last:,}, measured)"


def bad_scores_line(bad: BadScores, names: Sequence[str]) -> str:
    """Where numbers went bad first, for a person; ``names`` of the layers."""
    return (
        f"router scores of {names[bad.layer]} were not finite (NaN or inf) in step "
        f"{bad.step:,} (counted from 0) on rank {bad.rank}, for the first time in the run: the "
        "input of the router was not finite, or the router produced them"
    )


def scores_line(record: RunRecord) -> str:
    """The same of a run; empty where all that is known were numbers."""
    bad = record.ranks and record.ranks.bad_scores
    return bad_scores_line(bad, [layer.name for layer in record.layers]) if bad else ""


def ranks_line(record: RunRecord) -> str:
    """What all ranks took and needed, for a person; empty before they exchanged reports."""
    ranks = record.ranks
    if ranks is None or not ranks.pace.steps_G:
        return ""
    lines = [line] if (line := took_line(record)) else []
    if known := [at for at, loss in enumerate(ranks.pace.loss_G) if not np.isnan(loss)]:
        first, last = (
            f"{ranks.pace.loss_G[at]:.4g} in step {ranks.pace.steps_G[at]:,}"
            for at in (known[0], known[-1])
        )
        both = first if known[0] == known[-1] else f"{first} -> {last}"
        lines.append(f"loss {both}, counted from 0")
    exposed_s, waited_s, sent_s = (
        seconds_text(float(each_R.mean()))
        for each_R in (ranks.exposed_s_R, ranks.waited_s_R, ranks.sent_s_R)
    )
    if ranks.num_last_R.any():
        lines.append(f"{exposed_s} of exposed communication")
        lines.append(f"token all-to-alls wait {waited_s} and send {sent_s}")
        latest = int(ranks.num_last_R.argmax())
        share = ranks.num_last_R[latest] / ranks.num_exchanges
        lines.append(f"rank {ranks.ranks_R[latest]} is last most often, in {100 * share:.0f} %")
    is_device = bool(ranks.allocated_R.any())
    most_R = ranks.allocated_R if is_device else ranks.resident_R
    where, most = "of its device" if is_device else "of the host's memory", int(most_R.argmax())
    lines.append(
        f"rank {ranks.ranks_R[most]} uses the most memory, {bytes_text(int(most_R[most]))} {where}"
    )
    return "; ".join(lines)


def _known(balances: np.ndarray) -> float:
    return float(balances.mean()) if balances.size else NAN


def _mean(balances: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(balances)) if len(balances) else 1.0


# Predicted and reached.


def whole_division(record: RunRecord) -> Division | None:
    """Of all layers; None where no rows were seen."""
    if record.looks is None:
        return None
    whole = division_of(record, record.looks, range(len(record.layers)))
    return None if np.isnan(whole.left) else whole


def division_line(record: RunRecord) -> str:
    """All layers in one line, for a person; empty where nothing was looked at."""
    whole, looks = whole_division(record), record.looks
    if whole is None or looks is None:
        return ""
    crossed = f", {100 * whole.crossed:.1f} % crossed nodes" if looks.num_nodes > 1 else ""
    went = f"{100 * whole.left:.1f} % of routed tokens left their EP rank{crossed}"
    if np.isnan(whole.predicted):
        return went
    by_paper = "" if np.isnan(whole.by_paper) else f" ({whole.by_paper:.2f} by the paper's rule)"
    return (
        f"balance {whole.owner_balance:.2f} without replicas -> {whole.predicted:.2f} predicted -> "
        f"{whole.balance:.2f} reached{by_paper}, in {predicted_steps(looks)}"
        f"{_no_gain(record, whole)}; {went}"
    )


def predicted_steps(looks: LooksRecord) -> str:
    """Which steps count: balances elsewhere are of all."""
    was_predicted_I = ~np.isnan(looks.predicted_IL).all(axis=1)
    number = int(was_predicted_I.sum())
    return (
        f"{number:,} of {counted(was_predicted_I.size, 'recorded step')}, those with a prediction"
    )


def _no_gain(record: RunRecord, whole: Division) -> str:
    """Why replicas did not help, where balances as they are shown have no gain; else empty."""
    reached, predicted, at_owner = (
        round(ratio, 2) for ratio in (whole.balance, whole.predicted, whole.owner_balance)
    )
    if reached < at_owner:
        return ""
    outcome = outcome_of(record)
    if not outcome.replicas:
        none = "; no replica was made: none would have paid, or there was no time or memory for it"
        return "" if outcome.num_moved else none
    if predicted < at_owner:
        return "; replicas did not help: the expert load differed from the prediction"
    return "; replicas did not help, and the plan predicted no gain"


# What replicas saved.


def no_measure(device: DeviceRecord | None, num_ranks: int) -> str:
    """Why the speed of ranks there says nothing about replicas; empty where it does."""
    if device is None or device.name != ON_CPU:
        return ""
    return "shared cores" if device.num_cores < num_ranks else "no network"


def no_measure_of(record: RunRecord) -> str:
    """Likewise, of a run."""
    ranks = record.ranks
    return "" if ranks is None else no_measure(ranks.device, record.world_size)


class Saved(NamedTuple):
    """What replicas did for the waiting of an average rank, in seconds of a step."""

    # that a rank computed in experts, forward and backward, mean of those that have some (measured)
    expert_s: float
    owner_balance: float  # rows of the busiest EP rank over the mean, had there been no replicas
    balance: float  # and as they were computed
    # that replicas and their gradients were on their way, beside what is computed or not; mean of
    # all ranks (measured)
    travelled_s: float
    # that a rank waited for them in the layers, likewise. What it waits for gradients where the
    # backward of a block of the host ends is not timed
    replicas_s: float

    @property
    def saved_s(self) -> float:
        """That ranks would have waited longer for the busiest without replicas (estimated: seconds
        of experts scale with rows)."""
        return self.expert_s * (self.owner_balance - self.balance)


def saved_of(record: RunRecord) -> Saved | None:
    """None where nothing was copied, or ranks have not reported what they took."""
    ranks, outcome = record.ranks, outcome_of(record)
    expert_s = expert_s_of(record)
    if ranks is None or not outcome.replicas or np.isnan(expert_s):
        return None
    return Saved(
        expert_s,
        outcome.owner_balance,
        outcome.balance,
        float(_seconds_R(ranks, TRAVELS).mean()),
        float(_seconds_R(ranks, WAITS).mean()),
    )


def expert_s_of(record: RunRecord) -> float:
    """Seconds of a step in experts, forward and backward, mean of the ranks that have some; nan
    where nobody knows."""
    if record.ranks is None:
        return NAN
    expert_s_R = _seconds_R(record.ranks, (EXPERT.name,))
    return float(expert_s_R[expert_s_R > 0].mean()) if expert_s_R.any() else NAN


def _seconds_R(ranks: RanksRecord, names: Collection[str]) -> np.ndarray:
    """Of tasks with these names, both ways."""
    is_one_K = [kind.rpartition(":")[2] in names for kind in ranks.kinds_K]
    seconds_R: np.ndarray = ranks.seconds_KR[is_one_K].sum(axis=0)
    return seconds_R


def saved_line(record: RunRecord) -> str:
    """What replicas saved and cost, for a person; empty where that is not known."""
    saved = saved_of(record)
    if saved is None:
        return ""
    by = (
        f"estimated from this run's own {seconds_text(saved.expert_s)} of expert time per "
        f"rank, times balance {saved.owner_balance:.2f} less {saved.balance:.2f}"
    )
    if saved.saved_s > 0:
        less = f"{seconds_text(saved.saved_s)} less in each step"
        text = f"ranks waited {less} than without replicas (strategy {BASE})"
    else:
        text = "replicas did not reduce waiting for experts"
    text += f" ({by}{_foreseen(record, saved)}){_cost(saved)}"
    why = no_measure_of(record)
    return text + (f"; on a CPU neither predicts a cluster: {why}" if why else "")


def _foreseen(record: RunRecord, saved: Saved) -> str:
    """What plans predicted, by the same seconds; empty where they say nothing."""
    whole = whole_division(record)
    if whole is None or np.isnan(whole.predicted):
        return ""
    predicted_s = max(0.0, saved.expert_s * (whole.owner_balance - whole.predicted))
    return f"; predicted: {seconds_text(predicted_s)}, by balance {whole.predicted:.2f}"


def _cost(saved: Saved) -> str:
    """Of replicas, in the steps that were timed."""
    if not saved.travelled_s:
        return "; no step with replicas was timed, so their cost is unknown"
    text = (
        f"; transfers of replicas and their gradients took {seconds_text(saved.travelled_s)}, "
        f"of which ranks waited {seconds_text(saved.replicas_s)} in the layers (measured)"
    )
    if saved.replicas_s > max(saved.saved_s, 0.0):
        text += ": replicas cost more than they saved"
    elif saved.travelled_s > saved.saved_s:
        text += ": if the rest were not hidden, replicas would have cost more than they saved"
    return text


def found_s(record: RunRecord, index: int) -> float:
    """Seconds of a step between the choice of this index and the next, the median; nan where nobody
    knows. Pure."""
    if record.ranks is None:
        return NAN
    pace, starts = record.ranks.pace, [choice.step for choice in record.choices]
    first, end = starts[index], ([*starts, float("inf")])[index + 1]
    seen = [
        seconds
        for (before, step), seconds in zip(pairwise(pace.steps_G), pace.step_s_G[1:])
        if first <= before + 1 and step < end
    ]
    return typical(np.array(seen))


def choice_line(record: RunRecord) -> str:
    """What the strategy of the last steps was expected to take and took; empty without a choice."""
    latest = record.choices[-1] if record.choices else None
    if latest is None or latest.name not in latest.expected_s:
        return ""
    found = found_s(record, len(record.choices) - 1)
    took = "" if np.isnan(found) else f"; measured {seconds_text(found)} (median)"
    return (
        f"from step {latest.step:,} on auto used {latest.name}: predicted step time "
        f"{_expected(latest)} (estimated, without the optimizer){took}"
    )


def _expected(choice: ChoiceRecord) -> str:
    own = f"{seconds_text(choice.expected_s[choice.name])} under {choice.name}"
    if choice.name == BASE or BASE not in choice.expected_s:
        return own
    return f"{seconds_text(choice.expected_s[BASE])} under {BASE} and {own}"


# Whether it gained.


def verdict(record: RunRecord) -> str:
    """The sentence, without a full stop; its first words say whether the run gained."""
    if not record.layers:
        return "nothing to compare: no layer was replaced"
    if not record.steps_I:
        return "nothing to compare: no step was recorded"
    outcome = outcome_of(record)
    if outcome.replicas:
        text, has_seconds = _with_replicas(record, outcome)
    elif record.strategy == BASE:
        text, has_seconds = _without_strategy(record, outcome)
    else:
        text, has_seconds = _without_replicas(record, outcome), False
    why = no_measure_of(record) if has_seconds else ""
    return text + (f"; seconds on a CPU do not predict a cluster: {why}" if why else "")


def _with_replicas(record: RunRecord, outcome: Outcome) -> tuple[str, bool]:
    """And whether it is stated by seconds."""
    balances = (
        f"the busiest EP rank had {outcome.owner_balance:.2f} times the mean without replicas "
        f"and {outcome.balance:.2f} with them"
    )
    saved = saved_of(record)
    if saved is None or not saved.travelled_s:
        steps = counted(len(record.steps_I), "recorded step")
        return (
            f"gain unknown, because no step with replicas was timed in {steps}: {balances}"
        ), False
    gained_s, step_s = saved.saved_s - saved.replicas_s, step_s_of(record)
    laid, over, _ = record.strategy.partition(OVER)
    base = laid if over else BASE
    ratio = 1 + gained_s / step_s if step_s > 0 else math.nan
    speed = f"{ratio:.2f} times as fast as {base} would have been, estimated"
    if not ratio > 0:  # nobody knows the step
        which = "less" if gained_s > 0 else "more"
        speed = f"{seconds_text(abs(gained_s))} {which} a step than {base} would have, estimated"
    if ratio >= 1 + NOTICED or (not ratio > 0 and gained_s > 0):
        return f"{speed}: {balances}", True
    return f"no gain here: {balances}; {_why(saved)} ({speed})", True


def _why(saved: Saved) -> str:
    """Why replicas gained nothing."""
    if saved.saved_s <= 0:
        return "replicas did not reduce its load"
    if saved.replicas_s < saved.saved_s:
        return "that is negligible in a step"
    return "replicas cost more than they saved"


def _without_strategy(record: RunRecord, outcome: Outcome) -> tuple[str, bool]:
    """Of plain expert parallelism: what replicas could gain. And whether it is stated by
    seconds."""
    busiest = f"the busiest EP rank had {outcome.balance:.2f} times the mean"
    step_s, waits_s = step_s_of(record), expert_s_of(record) * (outcome.balance - 1)
    if not 0 <= waits_s < step_s:  # nobody knows one of them
        steps = counted(len(record.steps_I), "recorded step")
        return (
            f"gain of replicas unknown, because no time was measured in {steps}: {busiest}"
        ), False
    most = f"{step_s / (step_s - waits_s):.2f} times as fast, estimated"
    if waits_s < WORTH * step_s:
        return (
            f"replicas have little to gain: {busiest}; with perfect balance a step would be at "
            f"most {most}"
        ), True
    return f"replicas could gain, a step at most {most}, if they cost nothing: {busiest}", True


def _without_replicas(record: RunRecord, outcome: Outcome) -> str:
    """Of what gains otherwise, or found nothing to copy."""
    steps = counted(len(record.steps_I), "recorded step")
    return (
        f"no gain from replicas, because none was made in {steps}: the busiest EP rank had "
        f"{outcome.balance:.2f} times the mean; to see what else {record.strategy} gained, run "
        f"with {BASE} and use ds-moe-ext compare"
    )
