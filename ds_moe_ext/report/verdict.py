# SPDX-License-Identifier: Apache-2.0
"""Whether a run gained by its strategy, in one sentence: terminals and pages show the same."""

from __future__ import annotations

import math

from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.report.summary import Outcome, outcome_of, step_s_of
from ds_moe_ext.report.time_saved import BASE, Saved, expert_s_of, no_measure_of, saved_of
from ds_moe_ext.report.units import counted, seconds_text

OVER = " over "  # between the names of two strategies
NOTICED = 0.005  # part of a step, from which on it is called a gain
WORTH = 0.02  # likewise, from which on copies could be worth trying


def verdict(record: RunRecord) -> str:
    """The sentence, without a full stop; its first words say whether the run gained. Pure."""
    if not record.layers:
        return "nothing to compare: no layer was replaced"
    if not record.steps_I:
        return "nothing to compare: no step was recorded"
    outcome = outcome_of(record)
    if outcome.copies:
        text, has_seconds = _with_copies(record, outcome)
    elif record.strategy == BASE:
        text, has_seconds = _without_strategy(record, outcome)
    else:
        text, has_seconds = _without_copies(record, outcome), False
    why = no_measure_of(record) if has_seconds else ""
    return text + (f"; seconds on a CPU are no measure of a cluster: {why}" if why else "")


def _with_copies(record: RunRecord, outcome: Outcome) -> tuple[str, bool]:
    """And whether it is said by seconds."""
    balances = (
        f"the busiest rank had {outcome.home_balance:.2f} times the mean without copies and "
        f"{outcome.balance:.2f} with them"
    )
    saved = saved_of(record)
    if saved is None or not saved.travelled_s:
        steps = counted(len(record.steps_I), "recorded step")
        return f"gain not known, as no step with copies was timed in {steps}: {balances}", False
    gained_s, step_s = saved.saved_s - saved.copies_s, step_s_of(record)
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
    """Why copies gained nothing."""
    if saved.saved_s <= 0:
        return "copies did not relieve it"
    if saved.copies_s < saved.saved_s:
        return "that hardly counts in a step"
    return "copies cost more than that saved"


def _without_strategy(record: RunRecord, outcome: Outcome) -> tuple[str, bool]:
    """Of plain expert parallelism: what copies could gain. And whether it is said by seconds."""
    busiest = f"the busiest rank had {outcome.balance:.2f} times the mean"
    step_s, waits_s = step_s_of(record), expert_s_of(record) * (outcome.balance - 1)
    if not 0 <= waits_s < step_s:  # nobody knows one of them
        steps = counted(len(record.steps_I), "recorded step")
        return f"gain of copies not known, as no time was measured in {steps}: {busiest}", False
    most = f"{step_s / (step_s - waits_s):.2f} times as fast, estimated"
    if waits_s < WORTH * step_s:
        return f"little to gain by copies: {busiest}; without that a step would be {most}", True
    return f"copies could gain, a step at most {most}, if they cost nothing: {busiest}", True


def _without_copies(record: RunRecord, outcome: Outcome) -> str:
    """Of what gains otherwise, or found nothing to copy."""
    steps = counted(len(record.steps_I), "recorded step")
    return (
        f"no gain by copies, as none was made in {steps}: the busiest rank had "
        f"{outcome.balance:.2f} times the mean; what else {record.strategy} gained, a run with "
        f"{BASE} and ds-moe-ext compare tell"
    )
