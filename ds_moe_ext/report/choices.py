"""Which strategy planned from which step on, where one chose between several, and why."""

from __future__ import annotations

from ds_moe_ext.report.parts import section, table
from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.report.units import escaped


def chosen(record: RunRecord) -> str:
    """A row for each change; nothing of a run that had no choice."""
    if not record.choices:
        return ""
    rows = [[f"{each.step:,}", escaped(each.name), escaped(each.told)] for each in record.choices]
    note = (
        "From this step on plans were those of this strategy. Before the first, until costs had "
        "been measured, experts computed at home."
    )
    body = f'<p class="note">{note}</p>{table(["from step", "strategy", "why"], rows)}'
    return section("What was chosen", body)
