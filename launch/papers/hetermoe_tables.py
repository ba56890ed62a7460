"""What HeterMoE's zebra and its rivals take by the simulator, and the paper's figures, in markdown.

No device is needed. What is assumed is in ``hetermoe_setups`` and printed first::

    python launch/papers/hetermoe_tables.py > zebra.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import mean

from hetermoe_figures import (
    PAPER,
    Compared,
    Way,
    compared,
    figure_6,
    figure_10,
    figure_11,
    means,
    over_pipelines,
    table_3,
)
from hetermoe_setups import ASSUMED, FIGURE_7, FIGURE_8, FIGURE_9, KI, LENGTHS, LOST

from ds_moe_ext.cost.zebra_step import StepPrice


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def figure_6_lines() -> Iterator[str]:
    yield "## Figure 6\n"
    yield (
        "Forward of 3 layers in 3 stripes: attention 3, experts 4, sending 1; 6 experts. Seconds "
        "computed, of those between a side's first start and last end.\n"
    )
    paper = {(0, 0, 0): "", (0, 1, 1): "10 % faster", (1, 1, 1): "no faster"}
    yield from table(
        ("moved, by layer", "takes", "attention", "experts", "paper"),
        (
            (
                ", ".join(map(str, moved)),
                f"{forward.seconds:g}",
                f"{forward.attention_s:g} of {forward.attention_open_s:g}",
                f"{forward.expert_s:g} of {forward.expert_open_s:g}",
                said,
            )
            for moved, said in paper.items()
            for forward in [figure_6(*moved)]
        ),
    )


PAPER_USE = {8 * KI: ("55 / 89", "83 / 78", "33 / 51"), 16 * KI: ("77 / 89", "86 / 84", "40 / 45")}


def table_3_lines() -> Iterator[str]:
    yield "## Table 3\n"
    yield (
        f"Use of A40 / V100 in %, D1 on O1, two stripes, times {LOST} (a part of the step that is "
        "not simulated); beside it the paper's (DistEP's by its ratios).\n"
    )

    def use(price: StepPrice) -> str:
        return " / ".join(
            f"{100 * LOST * of:.0f}" for of in (price.attention_use, price.expert_use)
        )

    yield from table(
        (
            "length",
            "at home",
            "paper",
            "Algorithm 1",
            "paper",
            "one in each layer",
            "DistEP",
            "paper",
        ),
        (
            (f"{length // KI}K", use(of.off), off, use(of.on), on, use(of.many), use(of.dist), dist)
            for length, (off, on, dist) in PAPER_USE.items()
            for of in [table_3(length)]
        ),
    )


def comparison_lines(results: Sequence[Compared]) -> Iterator[str]:
    yield from table(
        (
            "model",
            "cluster",
            "length",
            "stripes",
            "moved",
            "over EP",
            "EP (Ideal)",
            "DistEP",
            "at home",
        ),
        (
            (
                of.model,
                of.cluster.name,
                f"{of.length // KI}K",
                str(of.zebra.shape.num_stripes),
                str(sum(of.zebra.moved_L)),
                *(f"{x:.2f}" for x in (of.over_ep, of.over_ideal, of.over_dist, of.over_itself)),
            )
            for of in results
            if of.length in (4 * KI, 8 * KI, 16 * KI, 20 * KI, 32 * KI)
        ),
    )


NAMES = (
    *("EP / zebra, 4K", "zebra / EP, 16K", "zebra / EP, 32K", "DistEP / zebra"),
    *("zebra / EP (Ideal)", "the most", "AWS: zebra / EP", "AWS: zebra / DistEP"),
    *("AWS: zebra / EP (Ideal)", "the most"),
)


def means_lines(first: Way) -> Iterator[str]:
    yield "## Means of figures 7 and 8, and what they hang on\n"
    few, many = replace(first, samples=2), replace(first, samples=4)
    hidden = replace(first, degrees=(1, 2, 4), repeats_exchange=False)
    columns = {
        "paper": PAPER,
        "here": means(first),
        "4 samples": means(many),
        "2 samples": means(few),
        "EP in up to 4 chunks, no exchange repeated": means(hidden),
    }
    rows = zip(NAMES, *(vars(of).values() for of in columns.values()))
    yield from table(("", *columns), ([name, *(f"{x:.2f}" for x in row)] for name, *row in rows))


def figure_9_lines(way: Way) -> Iterator[str]:
    yield "## Figure 9: zebra over pipelines of both kinds\n"
    speeds = {
        setup: [over_pipelines(*setup, length, way) for length in LENGTHS] for setup in FIGURE_9
    }
    yield from table(
        ("model", "cluster", *(f"{length // KI}K" for length in LENGTHS)),
        (
            (name, cluster.name, *(f"{speed:.2f}" for speed in row))
            for (name, cluster), row in zip(FIGURE_9, speeds.values())
        ),
    )
    every = [speed for row in speeds.values() for speed in row]
    yield f"Mean {mean(every):.2f} (paper 1.28), at most {max(every):.2f} (1.47).\n"


def figure_10_lines(way: Way) -> Iterator[str]:
    yield "## Figure 10: 4 A40s and so many V100s, zebra over EP (Ideal)\n"
    paper = {
        4 * KI: "4:7, 1.10; 0.76 at 4:3, 1.03 at 4:2",
        12 * KI: "4:5, 1.22",
        20 * KI: "4:4 is EP (Ideal) of 4:8 within 2 %",
        32 * KI: "4:4 is EP (Ideal) of 4:8 within 2 %",
    }
    rows = []
    for length, said in paper.items():
        ratios = figure_10(length, way)
        even = ratios[2].zebra / ratios[-1].ideal
        speeds = (f"{of.speed:.2f}" for of in ratios)
        rows.append((f"{length // KI}K", *speeds, f"{even:.2f}", said))
    heads = (f"4:{old}" for old in range(2, 9))
    yield from table(("length", *heads, "4:4 over ideal 4:8", "paper"), rows)


def figure_11_lines(way: Way) -> Iterator[str]:
    yield "## Figure 11: EP over zebra on 2 A40s and 2 V100s\n"
    figures = [figure_11(length, way) for length in LENGTHS]
    columns = {
        "4 A40": [of.four_a40 for of in figures],
        "4 V100": [of.four_v100 for of in figures],
        "2 A100": [of.two_a100 for of in figures],
    }
    paper = (
        "1.05 by the mean of zebra over it, 0.95; 1.01 to 1.02 at 12K to 20K",
        "0.60 by 1.66; 0.84 at 4K, 0.52 at 32K",
        "1.14, at most 1.20",
    )
    yield from table(
        (
            "EP on",
            *(f"{length // KI}K" for length in LENGTHS),
            "mean",
            "mean of zebra over it",
            "paper",
        ),
        (
            (
                name,
                *(f"{x:.2f}" for x in column),
                f"{mean(column):.2f}",
                f"{mean(1 / x for x in column):.2f}",
                said,
            )
            for (name, column), said in zip(columns.items(), paper)
        ),
    )


def lines(way: Way) -> Iterator[str]:
    yield "Assumed:\n"
    yield from (f"- {text}" for text in ASSUMED)
    yield (
        f"- {way.samples} samples a step on each attention rank, in the best of "
        f"{', '.join(map(str, way.stripes))} stripes; rivals have the same samples.\n"
    )
    yield from figure_6_lines()
    yield from table_3_lines()
    yield "## Figures 7, 8 and 12: zebra over its rivals\n"
    yield (
        "Moved: experts that each expert rank gives up, in all layers. At home: zebra with all "
        "experts on expert ranks (figure 12).\n"
    )
    yield from comparison_lines(compared((*FIGURE_7, *FIGURE_8), way))
    yield from means_lines(way)
    yield from figure_9_lines(way)
    yield from figure_10_lines(way)
    yield from figure_11_lines(way)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--samples", type=int, default=8, help="of a step, on each attention rank")
    add("--degrees", type=int, nargs="+", default=[1], help="chunks that EP may cut a layer into")
    add("--computes_only", action="store_true", help="EP repeats no exchange for backward")
    given = parser.parse_args()
    for name, values in (("samples", [given.samples]), ("degrees", given.degrees)):
        if min(values) < 1:
            parser.error(f"--{name} is {min(values)}; give 1 or more")
    way = Way(
        samples=given.samples,
        degrees=tuple(given.degrees),
        repeats_exchange=not given.computes_only,
    )
    for line in lines(way):
        print(line)


if __name__ == "__main__":
    main()
