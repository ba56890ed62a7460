# SPDX-License-Identifier: Apache-2.0
"""What the strategy's model of costs said of the layers, beside what they took."""

from __future__ import annotations

from ds_moe_ext.report.charts import key, thin_bars
from ds_moe_ext.report.markup import Html
from ds_moe_ext.report.parts import note, section, table
from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.report.units import seconds_text


def expected(record: RunRecord) -> Html:
    """A row and two bars for each term; nothing of a run whose model was not checked."""
    if not record.terms:
        return Html("")
    longest_s = max(max(term.said_s, term.found_s) for term in record.terms)
    headings = ["term", "", key(0, "expected"), key(1, "took"), "mean error"]
    rows = [
        [
            term.name,
            thin_bars(term.name, [(0, term.said_s), (1, term.found_s)], longest_s),
            seconds_text(term.said_s),
            seconds_text(term.found_s),
            f"{100 * term.error:,.1f} %",
        ]
        for term in record.terms
    ]
    about = (
        f"{_steps(record.terms[0].steps)} Expected is what measured costs say of the rows that "
        "came and of who sends them, copies and gradients to whom. Seconds are of one layer in one "
        "step, forward and backward, on average. Each exchange of rows is counted as its last rank "
        "saw it, which waits for nobody; experts, where they took longest; copies and gradients, "
        "as the mean rank saw them. The paper on Pro-Prophet claims a mean error of less than 5 % "
        "on its cluster."
    )
    body = Html('{}<div class="terms">{}</div>').format(note(about), table(headings, rows))
    return section("What the plan expected", body)


def _steps(steps: tuple[int, ...]) -> str:
    if not steps:
        return "A few early steps were checked."
    first, last = steps[0], steps[-1]
    which = f"Steps {first:,} to {last:,} were" if last > first else f"Step {first:,} was"
    return f"{which} checked, soon after costs had been measured."
