# SPDX-License-Identifier: Apache-2.0
"""What a run comes to: its headline numbers, and its steps gathered into few enough columns.

Shape letters: I recorded steps, B bins of steps, L layers, E experts, C cells.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_moe_ext.report.record import BadScores, LooksRecord, RunRecord
from ds_moe_ext.report.units import EN_DASH, bytes_text, seconds_text, short_count


@dataclass(frozen=True)
class Moment:
    """Where and when the worst balance was seen."""

    ratio: float
    layer: str
    step: int


@dataclass(frozen=True)
class HotExpert:
    """The expert that drew most rows over the run, against the mean of its layer."""

    ratio: float
    layer: str
    expert: int


@dataclass(frozen=True)
class Drift:
    """Mean balance in the first and in the last quarter of the recorded steps."""

    first: float
    last: float


class Division(NamedTuple):
    """What was predicted of rows, and where they went, in some layers; nan where nobody knows.

    Attributes:
        home_balance: as in ``Outcome``, of the looks where something was predicted.
        predicted: balance of the rows that plans were made for, mean of these looks.
        balance: of the rows that came, as they were computed.
        by_paper: and by the paper's own rule, with the same copies; nan where no other was
            followed.
        left: part of all rows that another cell computed than they came from.
        crossed: and one on another node.
    """

    home_balance: float
    predicted: float
    balance: float
    by_paper: float
    left: float
    crossed: float


class Outcome(NamedTuple):
    """What copies and new homes came to, in one layer or in all.

    Attributes:
        home_balance: rows of the busiest cell over the mean, had every expert computed at its
            home only; mean over the recorded steps (and layers).
        balance: the same, as it was computed.
        copies: copies beside the homes, a step on average (all layers together).
        num_moved: experts that changed their homes, over the run.
    """

    home_balance: float
    balance: float
    copies: float
    num_moved: int


@dataclass(frozen=True, eq=False)
class Summary:
    """The headline numbers of a run; no record is made of a run without steps or layers.

    Attributes:
        balance_IL: rows of the busiest cell over the mean, float ``[I, L]``.
        mean_L: mean of it over the steps, float ``[L]``.
        mean: mean over steps and layers.
        worst_layer: index of the layer with the largest mean.
        moment: the largest entry.
        hot: the expert that drew most rows.
        drift: from the first to the last quarter; None for fewer than 8 steps.
        num_rows: rows computed in the recorded steps, all layers.
    """

    balance_IL: np.ndarray
    mean_L: np.ndarray
    mean: float
    worst_layer: int
    moment: Moment
    hot: HotExpert
    drift: Drift | None
    num_rows: int


@dataclass(frozen=True, eq=False)
class Bins:
    """Recorded steps gathered into columns of neighbours.

    Attributes:
        start_B: index of the first recorded step of each column, int64 ``[B]``.
        steps_I: optimizer step of each recorded step.
    """

    start_B: np.ndarray
    steps_I: tuple[int, ...]

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

    def column_of(self, step: int) -> int:
        """The column of the first recorded step from ``step`` on; the last one if none follows."""
        position = min(bisect_left(self.steps_I, step), len(self.steps_I) - 1)
        return int(np.searchsorted(self.start_B, position, side="right")) - 1

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
    """The headline numbers of ``record``, None when it has no steps or no layers. Pure."""
    if not record.steps_I or not record.layers:
        return None
    balance_IL = record.balance_IL()
    mean_L = balance_IL.mean(axis=0)
    return Summary(
        balance_IL=balance_IL,
        mean_L=mean_L,
        mean=float(mean_L.mean()),
        worst_layer=int(mean_L.argmax()),
        moment=_moment(record, balance_IL),
        hot=_hot_expert(record),
        drift=_drift(balance_IL),
        num_rows=int(record.rows_ILE.sum()),
    )


def outcome_of(record: RunRecord) -> Outcome:
    """Of all layers together; a run without steps is balanced. Pure."""
    of_layers = outcomes_by_layer(record)
    return Outcome(
        home_balance=_mean([outcome.home_balance for outcome in of_layers]),
        balance=_mean([outcome.balance for outcome in of_layers]),
        copies=sum(outcome.copies for outcome in of_layers),
        num_moved=sum(outcome.num_moved for outcome in of_layers),
    )


def outcomes_by_layer(record: RunRecord) -> tuple[Outcome, ...]:
    """Of each layer, in model order. Pure."""
    placements = record.placements
    home_IL, balance_IL = record.home_balance_IL(), record.balance_IL()
    copies_IL = (
        np.zeros(home_IL.shape) if placements is None else placements.all_copies_ILE.sum(axis=2)
    )
    num_moved_L = np.zeros(len(record.layers), dtype=np.int64)
    for move in () if placements is None else placements.moves:
        num_moved_L[move.layer] += move.num_experts
    return tuple(
        Outcome(
            home_balance=_mean(home_IL[:, index]),
            balance=_mean(balance_IL[:, index]),
            copies=float(copies_IL[:, index].mean()) if record.steps_I else 0.0,
            num_moved=int(num_moved_L[index]),
        )
        for index in range(len(record.layers))
    )


def division_of(record: RunRecord, looks: LooksRecord, layers: Sequence[int]) -> Division:
    """Of these layers together. Pure."""
    predicted_IL, by_paper_IL, left_IL, crossed_IL = (
        table_IL[:, layers]
        for table_IL in (looks.predicted_IL, looks.by_paper_IL, looks.left_IL, looks.crossed_IL)
    )
    home_IL, balance_IL = record.home_balance_IL()[:, layers], record.balance_IL()[:, layers]
    was_predicted, was_seen = ~np.isnan(predicted_IL), ~np.isnan(left_IL)
    has_rule = was_predicted & ~np.isnan(by_paper_IL)
    num_rows = record.rows_ILE.sum(axis=2)[:, layers][was_seen].sum() or np.nan
    return Division(
        home_balance=_known(home_IL[was_predicted]),
        predicted=_known(predicted_IL[was_predicted]),
        balance=_known(balance_IL[was_predicted]),
        by_paper=_known(by_paper_IL[has_rule]),
        left=float(left_IL[was_seen].sum() / num_rows),
        crossed=float(crossed_IL[was_seen].sum() / num_rows),
    )


def typical(values_G: np.ndarray) -> float:
    """Median of what is known; nan where nothing is. Pure."""
    known_G = values_G[~np.isnan(values_G)]
    return float(np.median(known_G)) if known_G.size else float("nan")


def step_s_of(record: RunRecord) -> float:
    """Median seconds of a step, on the slowest rank; nan where nobody knows. Pure."""
    return float("nan") if record.ranks is None else typical(record.ranks.pace.step_s_G)


def took_line(record: RunRecord) -> str:
    """What a step took, for a person; empty where that is not known. Pure."""
    if record.ranks is None or np.isnan(step_s := step_s_of(record)):
        return ""
    tokens = typical(record.ranks.pace.tokens_per_s_G)
    rate = "" if np.isnan(tokens) else f", {short_count(tokens)} tokens a second"
    last = record.ranks.pace.steps_G[-1]
    return f"a step took {seconds_text(step_s)}{rate} (median up to step {last:,}, measured)"


def bad_scores_line(bad: BadScores, names: Sequence[str]) -> str:
    """Where numbers went bad first, for a person; ``names`` of the layers. Pure."""
    return (
        f"scores of {names[bad.layer]} were no finite numbers in step {bad.step:,} (counted from "
        f"0) on rank {bad.rank}, the first of the run: what came to its router was none, or the "
        "router made them"
    )


def scores_line(record: RunRecord) -> str:
    """The same of a run; empty where all that is known were numbers. Pure."""
    bad = record.ranks and record.ranks.bad_scores
    return bad_scores_line(bad, [layer.name for layer in record.layers]) if bad else ""


def ranks_line(record: RunRecord) -> str:
    """What all ranks took and needed, for a person; empty before they told each other. Pure."""
    ranks = record.ranks
    if ranks is None or not ranks.pace.steps_G:
        return ""
    told = [line] if (line := took_line(record)) else []
    if known := [at for at, loss in enumerate(ranks.pace.loss_G) if not np.isnan(loss)]:
        first, last = (
            f"{ranks.pace.loss_G[at]:.4g} in step {ranks.pace.steps_G[at]:,}"
            for at in (known[0], known[-1])
        )
        both = first if known[0] == known[-1] else f"{first} -> {last}"
        told.append(f"loss {both}, counted from 0")
    exposed_s, waited_s, sent_s = (
        seconds_text(float(each_R.mean()))
        for each_R in (ranks.exposed_s_R, ranks.waited_s_R, ranks.sent_s_R)
    )
    if ranks.num_last_R.any():
        told.append(f"{exposed_s} of communication that nothing hides")
        told.append(f"exchanges of rows wait {waited_s} and send {sent_s}")
        latest = int(ranks.num_last_R.argmax())
        share = ranks.num_last_R[latest] / ranks.num_exchanges
        told.append(f"rank {ranks.ranks_R[latest]} comes last most often, to {100 * share:.0f} %")
    is_device = bool(ranks.allocated_R.any())
    most_R = ranks.allocated_R if is_device else ranks.resident_R
    where, most = "of its device" if is_device else "of the host's memory", int(most_R.argmax())
    told.append(f"rank {ranks.ranks_R[most]} needs most, {bytes_text(int(most_R[most]))} {where}")
    return "; ".join(told)


def _known(balances: np.ndarray) -> float:
    return float(balances.mean()) if balances.size else float("nan")


def _mean(balances: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(balances)) if len(balances) else 1.0


def _moment(record: RunRecord, balance_IL: np.ndarray) -> Moment:
    step, layer = np.unravel_index(balance_IL.argmax(), balance_IL.shape)
    return Moment(
        float(balance_IL[step, layer]), record.layers[int(layer)].name, record.steps_I[int(step)]
    )


def _hot_expert(record: RunRecord) -> HotExpert:
    rows_LE = record.rows_ILE.sum(axis=0)
    mean_L = rows_LE.sum(axis=1) / [max(layer.num_experts, 1) for layer in record.layers]
    ratio_LE = rows_LE / np.maximum(mean_L, 1e-12)[:, None]
    layer, expert = np.unravel_index(ratio_LE.argmax(), ratio_LE.shape)
    return HotExpert(float(ratio_LE[layer, expert]), record.layers[int(layer)].name, int(expert))


def _drift(balance_IL: np.ndarray) -> Drift | None:
    quarter = len(balance_IL) // 4
    if quarter < 2:
        return None
    return Drift(float(balance_IL[:quarter].mean()), float(balance_IL[-quarter:].mean()))
