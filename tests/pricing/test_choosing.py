# SPDX-License-Identifier: Apache-2.0
"""The prices of docs/choosing.md are those of the command that writes them."""

from __future__ import annotations

import pytest


def columns() -> dict[str, dict[str, str]]:
    """What the page says: of each column, by strategy."""
    import choosing

    text = choosing.PAGE.read_text("utf-8").partition(choosing.BEGIN)[2]
    lines = [line for line in text.partition(choosing.END)[0].splitlines() if line.strip()]
    names, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {
        name: {row[0].strip("`"): row[1 + place] for row in rows if row[1 + place]}
        for place, name in enumerate(names[1:])
    }


def test_the_page_has_all_columns_and_strategies() -> None:
    import choosing

    found = columns()
    assert list(found) == list(choosing.COLUMNS)
    assert all({*column} <= {*choosing.STRATEGIES} for column in found.values())
    # What is advised with skewed loads is never slower than ep.
    for column in found.values():
        gains = [float(cell.partition(";")[0]) for name, cell in column.items() if name != "ep"]
        assert max(gains) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mixtral 8x7B, 64 H100", "Qwen3-30B-A3B, 32 A100"])
def test_prices_of_the_page(name: str) -> None:
    import choosing

    assert choosing.cells(choosing.priced(*choosing.COLUMNS[name])) == columns()[name]
