# SPDX-License-Identifier: Apache-2.0
"""The page of known limits is what the rows say that refuse."""

from __future__ import annotations


def test_the_page_is_made_of_the_rows() -> None:
    import known_limits  # with Megatron-core, which would take all collecting workers seconds

    assert known_limits.PAGE.read_text() == known_limits.page(), "run: python docs/known_limits.py"


def test_every_row_says_why_and_what_to_do() -> None:
    import known_limits

    rows = [row for section in known_limits.SECTIONS for row in section.rows]
    assert rows and all(row.what and row.reason and row.remedy for row in rows)
