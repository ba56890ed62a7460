# SPDX-License-Identifier: Apache-2.0
"""Which strategy planned from which step on, where one chose between several, and why."""

from __future__ import annotations

import math

from ds_moe_ext.report.markup import Html, joined
from ds_moe_ext.report.parts import note, section, table
from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.report.time_saved import BASE, NAN, found_s
from ds_moe_ext.report.units import EN_DASH, seconds_text


def chosen(record: RunRecord) -> Html:
    """A line for each change; nothing of a run that had no choice."""
    if not record.choices:
        return Html("")
    about = (
        "Plans were those of one strategy at a time. Before the first, until costs had been "
        "measured, experts computed at home."
    )
    lines = joined(
        Html("<li>From step {:,}: <strong>{}</strong>. {}</li>").format(
            each.step, each.name, each.told
        )
        for each in record.choices
    )
    body = Html("{}<ul>{}</ul>{}").format(note(about), lines, _held_against(record))
    return section("What was chosen", body)


def _held_against(record: RunRecord) -> Html:
    """What steps were expected to take beside what they took; nothing of a file of an earlier
    version."""
    if not any(each.expected_s for each in record.choices):
        return Html("")
    rows = [
        [
            f"{each.step:,}",
            each.name,
            *(_seconds(each.expected_s.get(name, NAN)) for name in (BASE, each.name)),
            _seconds(found_s(record, index)),
        ]
        for index, each in enumerate(record.choices)
    ]
    headings = ["from step", "ran", f"{BASE} (estimated)", "what ran (estimated)", "measured"]
    return table(headings, rows)


def _seconds(seconds: float) -> str:
    return EN_DASH if math.isnan(seconds) else seconds_text(seconds)
