# SPDX-License-Identifier: Apache-2.0
"""User-facing pages keep to the words of docs/style.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXCEPT = {"docs/style.md", "docs/known_limits.md"}  # lists the words; made of what the code says
REFUSED = {
    r"told|foretold": "log, report, warn, notify; predicted",
    r"who(so)?ever|whichever": "the one that, who or which",
    r"homes?(?= of (ranks?|experts?))|first homes|home ranks?": "owner",
    r"(?<!table )cells?(?! of (a|the|this|that) table)": "EP rank, ETP group",
    r"lanes?": "stream",
    r"trips?": "transfer, dispatch, combine, all-to-all",
    r"flights?|airfields?|cargos?": "transfer, prefetch",
    r"there is to know": "full reference",
    r"(go|goes|going|went|gone) on from": "resume from",
    r"learn(s|ed|t)? the same": "training results are unchanged",
    r"(is|are) said|goes by the name|as it was found": "is called, is set by, unchanged",
    r"reckon(s|ed|ing)?": "predict, count, price",
    r"slept": "simulated by sleeping",
    r"whereof|thereof|therein": "plain words",
}
"""Regular expressions of whole words, and what to write in place."""
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if str(path.relative_to(ROOT)) not in EXCEPT]


def violations(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, word and remedy; code, inline too, is not looked at."""
    prose = CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
    for words, remedy in REFUSED.items():
        for match in re.finditer(rf"\b(?:{words})\b".replace(" ", r"\s"), prose, re.IGNORECASE):
            yield prose.count("\n", 0, match.start()) + 1, match[0], remedy


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_keep_to_the_words(path: Path) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word!r}: write {remedy}"
        for line, word, remedy in sorted(violations(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def test_what_is_refused_and_what_is_not() -> None:
    refused = (
        "It is told so.",
        "Whoever waits",
        "homes of ranks",
        "the first\nhomes",
        "two lanes",
        "1 cell of 8 ranks",
        "all there is to know",
        "goes on from a checkpoint",
        "four trips",
    )
    assert all([*violations(text)] for text in refused)
    allowed = ("a table cell", "guests", "`told_after_s`", "```\ntold\n```", "planes", "home page")
    assert not any([*violations(text)] for text in allowed)
