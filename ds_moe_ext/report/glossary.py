# SPDX-License-Identifier: Apache-2.0
"""Our words beside those that users of the hosts know; docs/glossary.md has more."""

from __future__ import annotations

from ds_moe_ext.report.markup import Html, joined

WORDS = (
    ("EP rank (cell)", "a rank of the expert-parallel group, or all that split experts"),
    ("routed token (row)", "one token for one of its top-k experts, as it is dispatched"),
    ("balance", "rows that the busiest EP rank computed over the mean; 1 is perfect"),
    ("owner (home)", "the EP rank with an expert's weights and optimizer state"),
    ("replica (copy)", "an expert's weights on another EP rank, for one step"),
    ("stream (lane)", "a queue of tasks: a CUDA stream, or a thread on a CPU"),
)
"""What is said on the page, and what it is."""


def legend() -> Html:
    """The words of the page, folded."""
    items = joined(Html("<dt>{}</dt><dd>{}</dd>").format(word, what) for word, what in WORDS)
    return Html('<details class="words"><summary>Words</summary><dl>{}</dl></details>').format(
        items
    )
