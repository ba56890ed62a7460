# SPDX-License-Identifier: Apache-2.0
"""Print docs/reproduce.md: the four papers' tables and figures beside ours, in a minute or two.

python docs/reproduce.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

from papers.figure import Figure, Paper, Row, met_of
from papers.shown import PAPERS

PAGE = Path(__file__).parents[1] / "docs/reproduce.md"
FEW = 6  # values of a figure that are all named

INTRODUCTION = """\
# The papers' figures

`ds-moe-ext reproduce PAPER...` works out tables and figures of `hecate`, `prophet`, `fsmoe` and
`hetermoe` by the product's own planners, prices and simulator, and prints each beside the paper's
values: what was taken from the paper and from where, what is assumed, what was fitted, how far off
ours is, and why what is missed is. No device is needed; the four take 3, 2, 28 and 10 s of one
core of an AMD EPYC. `--html FILE` writes one page with charts that needs no other file, `--json`
prints a document.

```
ds-moe-ext reproduce hecate prophet fsmoe hetermoe --html figures.html
```

Nothing is tuned for a row. Tolerances are those of the specs that the planners were built by:
HECATE's ratios within 15 %, FSMoE's means within 0.05 and its count of layers within 150,
HeterMoE's means within 10 %; Pro-Prophet's orders alone, since no one bandwidth meets all of its
tables. A claim is an order, or a sentence, of the paper that ours must share. A figure is met where
all its held values and all its claims are. Below are held values, the paper's / ours, in italics
where beyond the tolerance; of many, those beyond it. All others, and curves, are in what the
command prints and draws.

The models of the papers are in [configs/models](../configs/models/README.md), their clusters in
`configs/hardware` ([known clusters](hardware.md#known-clusters)); the code is `launch/papers`,
so that the command runs where the repository is cloned.
HeterMoE's misses at length: [the simulator of zebra
groups](zebra_simulator.md#what-is-met-and-what-is-missed). This page is made by `python
docs/reproduce.py`, and a slow test compares the two.
"""


def page() -> str:
    return "\n\n".join((INTRODUCTION.rstrip(), *(section(p) for p in PAPERS.values()))) + "\n"


def section(paper: Paper) -> str:
    figures = [make() for make in paper.figures]
    lists = {"Taken from the paper": paper.inputs, "Assumed": paper.assumed}
    lists |= {"Fitted": paper.fitted, "Left out": paper.left_out}
    lines = [f"## {paper.name}", "", f"{met_of(figures)}.", ""]
    lines += ["| | what | paper / ours | verdict |", "|---|---|---|---|", *map(line, figures)]
    for name, texts in lists.items():
        lines += ["", f"{name}:", "", *(f"- {text};" for text in texts)]
    return "\n".join(lines)


def line(figure: Figure) -> str:
    cells = (figure.name, figure.title, values(figure), "; ".join(verdict(figure)))
    return f"| {' | '.join(cells)} |"


def values(figure: Figure) -> str:
    rows = figure.held or tuple(row for row in figure.rows if row.paper is not None)
    shown = rows if len(rows) <= FEW else figure.missed
    parts = [value(figure, row) for row in shown[:FEW]]
    if len(rows) > FEW:
        parts.append(f"{len(rows)} values, {chunk_range(rows)} off")
    return "; ".join(parts)


def value(figure: Figure, row: Row) -> str:
    text = f"{row.name} {row.paper:.4g} / {row.ours:.3g}"
    return f"*{text}*" if figure.is_beyond(row) else text


def chunk_range(rows: Sequence[Row]) -> str:
    misses = [100 * row.miss for row in rows if row.miss is not None]
    return f"{min(misses):+.0f} to {max(misses):+.0f} %"


def verdict(figure: Figure) -> Iterator[str]:
    yield figure.verdict
    yield from (f"not so: {claim.text}" for claim in figure.broken)
    if not figure.is_met:
        yield figure.because


if __name__ == "__main__":
    PAGE.write_text(page())
