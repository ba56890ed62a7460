# SPDX-License-Identifier: Apache-2.0
"""Write docs/results.md: what days on GPUs have measured, of each file of docs/results.

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
FOLDER, PAGE = ROOT / "docs/results", ROOT / "docs/results.md"
INTRODUCTION = """\
# Results of days on GPUs

Each section is one file of `docs/results/`, as [`launch/gpu_day.sh`](gpu_day.md) wrote it on
somebody's GPUs: every figure with its command and its spread. To add yours, copy your
`gpu_day.json` to `docs/results/NAME.json`, run `python docs/results.py`, and send both. A rehearsal
is refused. Figures from before there was such a command are in
[measurements.md](measurements.md#on-one-h200).
"""
NONE_YET = "\nThere is no file yet.\n"


def page(folder: Path = FOLDER) -> str:
    """The page of all files of a folder."""
    paths = sorted(folder.glob("*.json"))
    return INTRODUCTION + ("".join(map(of_file, paths)) or NONE_YET)


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
    lines = [f"\n## {path.stem}\n"]
    for stage, rows in groupby(document["rows"], key=lambda row: row["stage"]):
        lines.append(f"\n### {path.stem}: {stage}\n")
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
