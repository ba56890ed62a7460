# SPDX-License-Identifier: Apache-2.0
"""What a run took in seconds, what copies saved of that, and when a clock is no measure.

Shape letters: G points, R ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ds_moe_ext.report.exposure import TRAVELS, WAITS
from ds_moe_ext.report.record import ChoiceRecord, DeviceRecord, RanksRecord, RunRecord
from ds_moe_ext.report.summary import division_of, outcome_of, typical
from ds_moe_ext.report.units import seconds_text
from ds_moe_ext.schedule.task import EXPERT

BASE = "ep"  # computes every expert at its home
ON_CPU = "cpu"
NAN = float("nan")


def no_measure(device: DeviceRecord | None, num_ranks: int) -> str:
    """Why the speed of ranks there says nothing about copies; empty where it does. Pure."""
    if device is None or device.name != ON_CPU:
        return ""
    return "shared cores" if device.num_cores < num_ranks else "no network"


def no_measure_of(record: RunRecord) -> str:
    """Likewise, of a run. Pure."""
    ranks = record.ranks
    return "" if ranks is None else no_measure(ranks.device, record.world_size)


class Saved(NamedTuple):
    """What copies did for the waiting of an average rank, in seconds of a step.

    Attributes:
        expert_s: that a rank computed in experts, forward and backward, mean of those that have
            some (measured).
        home_balance: rows of the busiest cell over the mean, had there been no copies.
        balance: and as they were computed.
        travelled_s: that copies and their gradients were on their way, beside what is computed or
            not; mean of all ranks (measured).
        copies_s: that a rank waited for them in the layers, likewise. What it waits for gradients
            where the backward of a block of the host ends is not timed.
    """

    expert_s: float
    home_balance: float
    balance: float
    travelled_s: float
    copies_s: float

    @property
    def saved_s(self) -> float:
        """That ranks would have waited longer for the busiest without copies (estimated: seconds of
        experts scale with rows)."""
        return self.expert_s * (self.home_balance - self.balance)


def saved_of(record: RunRecord) -> Saved | None:
    """None where nothing was copied, or ranks have not told what they took. Pure."""
    ranks, outcome = record.ranks, outcome_of(record)
    if ranks is None or not outcome.copies:
        return None
    expert_s = expert_s_of(record)
    if np.isnan(expert_s):
        return None
    return Saved(
        expert_s,
        outcome.home_balance,
        outcome.balance,
        float(_seconds_R(ranks, TRAVELS).mean()),
        float(_seconds_R(ranks, WAITS).mean()),
    )


def expert_s_of(record: RunRecord) -> float:
    """Seconds of a step in experts, forward and backward, mean of the ranks that have some; nan
    where nobody knows. Pure."""
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
    """What copies saved and cost, for a person; empty where that is not known. Pure."""
    saved = saved_of(record)
    if saved is None:
        return ""
    by = (
        f"found, estimated from this run's own {seconds_text(saved.expert_s)} of experts a rank, "
        f"times balance {saved.home_balance:.2f} less {saved.balance:.2f}"
    )
    if saved.saved_s > 0:
        less = f"{seconds_text(saved.saved_s)} less in each step"
        told = f"ranks waited {less} than with every expert at its home, as under {BASE}"
    else:
        told = "copies saved no waiting for experts"
    told += f" ({by}{_foreseen(record, saved)}){_cost(saved)}"
    why = no_measure_of(record)
    return told + (f"; on a CPU neither is a measure of a cluster: {why}" if why else "")


def _foreseen(record: RunRecord, saved: Saved) -> str:
    """What plans predicted, by the same seconds; empty where they say nothing."""
    if record.looks is None:
        return ""
    whole = division_of(record, record.looks, range(len(record.layers)))
    if np.isnan(whole.predicted):
        return ""
    predicted_s = max(0.0, saved.expert_s * (whole.home_balance - whole.predicted))
    return f"; predicted: {seconds_text(predicted_s)}, by balance {whole.predicted:.2f}"


def _cost(saved: Saved) -> str:
    """Of copies, in the steps that were timed."""
    if not saved.travelled_s:
        return "; no step with copies was timed, so what they took is not known"
    told = (
        f"; copies and their gradients travelled for {seconds_text(saved.travelled_s)}, of which "
        f"ranks waited {seconds_text(saved.copies_s)} in the layers (measured)"
    )
    if saved.copies_s > max(saved.saved_s, 0.0):
        told += ": copying cost more than it saved"
    elif saved.travelled_s > saved.saved_s:
        told += ": were the rest not hidden, copying would have cost more than it saved"
    return told


def found_s(record: RunRecord, index: int) -> float:
    """Seconds of a step between a choice and the next, the median; nan where nobody knows. Pure.

    Args:
        record: of the run.
        index: of the choice.
    """
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
    """What the strategy of the last steps was expected to take, and took; empty where nobody chose.
    Pure."""
    latest = record.choices[-1] if record.choices else None
    if latest is None or latest.name not in latest.expected_s:
        return ""
    found = found_s(record, len(record.choices) - 1)
    took = "" if np.isnan(found) else f"; it took {seconds_text(found)} (median, measured)"
    return (
        f"from step {latest.step:,} on auto ran {latest.name}: a step was expected to take "
        f"{_expected(latest)} (estimated, but for the optimizer){took}"
    )


def _expected(choice: ChoiceRecord) -> str:
    own = f"{seconds_text(choice.expected_s[choice.name])} under {choice.name}"
    if choice.name == BASE or BASE not in choice.expected_s:
        return own
    return f"{seconds_text(choice.expected_s[BASE])} under {BASE} and {own}"
