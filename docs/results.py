# SPDX-License-Identifier: Apache-2.0
"""Write the results in docs/gpu_day.md, of each file of docs/results: what days on GPUs measured.

python docs/results.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "launch/gpu_day"))

from gpu_day import HEADINGS, SHARED, cells

ROOT = Path(__file__).parents[1]
FOLDER, PAGE = ROOT / "docs/results", ROOT / "docs/gpu_day.md"
BEGIN, END = "<!-- results: made by python docs/results.py of docs/results/*.json -->\n", "<!-- end"
INTRODUCTION = """\
## Results

To add yours, copy `gpu_day.json` to `docs/results/NAME.json`, run `python docs/results.py`,
and send both.
"""
NONE_YET = "There is no file yet; figures from before this command: [results.md](results.md).\n"


def page(folder: Path = FOLDER) -> str:
    """The page, with the results of all files of a folder between its marks."""
    head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    sections = "".join(map(of_file, sorted(folder.glob("*.json"))))
    return head + BEGIN + INTRODUCTION + (sections or NONE_YET) + END + tail


def of_file(path: Path) -> str:
    """A section.

    Raises:
        ValueError: it is no such file, or a rehearsal's.
    """
    document = json.loads(path.read_text("utf-8"))
    if document.get("format") != 1:
        raise ValueError(f"{path} is no file of a day on GPUs; name a gpu_day.json")
    if document["is_rehearsal"]:
        raise ValueError(
            f"{path} is a rehearsal without a GPU, which measures nothing; leave it out"
        )
    lines = [f"\n### {path.stem}\n"]
    for stage, rows in groupby(document["rows"], key=lambda row: row["stage"]):
        lines.append(f"\n#### {path.stem}: {stage}\n")
        lines += [line for row in rows for line in of_row(row)]
    return "".join(lines)


def of_row(row: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a command."""
    facts = [row["state"], f"{row['seconds']:.0f} s", row["where"], row["date"], row["why"]]
    facts += [SHARED] if row["is_shared"] else []
    yield f"\n**{plain(row['name'])}**: {plain('; '.join(filter(None, facts)))}\n"
    yield f"\n```bash\n{row['command']}\n```\n"
    if row["figures"]:
        yield f"\n{line_of(HEADINGS)}{line_of(['---'] * len(HEADINGS))}"
    for figure in row["figures"]:
        yield line_of(list(map(plain, cells(figure))))


def line_of(entries: Any) -> str:
    return f"| {' | '.join(entries)} |\n"


def plain(text: str) -> str:
    """Text of a file that anybody may have sent, as Markdown shows it."""
    return "".join(f"\\{c}" if c in r"\`*_{}[]<>|#" else c for c in " ".join(text.split()))


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
