# SPDX-License-Identifier: Apache-2.0
"""Which strategy planned from which step on, where one chose between several, and why."""

from __future__ import annotations

from ds_moe_ext.report.parts import section
from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.report.units import escaped


def chosen(record: RunRecord) -> str:
    """A line for each change; nothing of a run that had no choice."""
    if not record.choices:
        return ""
    note = (
        "Plans were those of one strategy at a time. Before the first, until costs had been "
        "measured, experts computed at home."
    )
    lines = "".join(
        f"<li>From step {each.step:,}: <strong>{escaped(each.name)}</strong>. "
        f"{escaped(each.told)}</li>"
        for each in record.choices
    )
    return section("What was chosen", f'<p class="note">{note}</p><ul>{lines}</ul>')
