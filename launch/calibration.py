# SPDX-License-Identifier: Apache-2.0
"""Published speeds of MoE pre-training beside what `price` says of the same jobs.

python launch/calibration.py                      # the Markdown table, as price is
python launch/calibration.py --fit                # fits two constants on every second row first
python launch/calibration.py --fit --send-once    # with dispatchers that send a node a token once
python launch/calibration.py --rows "Mixtral 8x7B" --products 0.5 --links 0.7 --parts

Rows are those of configs/calibration/published.json, priced for ``ep`` on the published grid with
balanced loads. Model FLOPs are Megatron's ``num_floating_point_operations``: three times a forward
pass of two operations a multiply-add, with attention of half of each sample (causal).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import log
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from ds_moe_ext.commands.price.inputs import read_model
from ds_moe_ext.commands.price.market import Case, chosen_strategies
from ds_moe_ext.core.hardware import Hardware, read_hardware
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.files.documents import read_document
from ds_moe_ext.planning.candidates import Priced, Reached, Way, price_way
from ds_moe_ext.planning.model_shape import (
    MASTER_AND_STATES,
    ModelParallel,
    ModelShape,
    OnItsWay,
    Training,
)
from ds_moe_ext.planning.prices import RowBytes

CONFIGS = Path(__file__).parents[1] / "configs"
PUBLISHED = CONFIGS / "calibration/published.json"
STRATEGY, LOADS, BF16 = "ep", "balanced", "bf16"
TERA = 1e12
FITTED = ("products", "links")
"""Constants of ``Reached`` that ``--fit`` fits: parts of a datasheet's rates."""
LEAST, MOST = 0.1, 1.0  # of each
FIRST_STEP, LAST_STEP = 0.2, 0.02
ONCE = ("deepep", "hybridep")  # dispatchers that send a token to a node once
FULL = "full"  # attention is counted without its causal half; or layers run again as a whole


@dataclass(frozen=True)
class Row:
    """A published speed."""

    keys: Mapping[str, Any]  # of the file

    @property
    def name(self) -> str:
        name: str = self.keys["name"]
        return name

    @property
    def link(self) -> str:
        """To the page that states it, in Markdown; the file says where on it."""
        url = str(self.keys["source"]).partition(", ")[0]
        parts = url.split("/")
        return f"[{parts[4] if 'github.com' in url else parts[2]}]({url})"

    @property
    def counts(self) -> bool:
        """Whether it fits or checks constants."""
        return "uncounted" not in self.keys

    @cached_property
    def shape(self) -> ModelShape:
        """The model, as it was trained."""
        named = CONFIGS / f"{self.keys['model']}.json"
        return read_model(named if named.exists() else Path(self.keys["model"]))

    @property
    def priced_shape(self) -> ModelShape:
        """The same with as many layers as divide over stages and chunks, where its own do not."""
        shape = self.shape
        layers = self.keys.get("priced_layers", shape.num_layers)
        first = shape.moe_layers[0]
        return replace(shape, num_layers=layers, moe_layers=tuple(range(first, layers)))

    @property
    def hardware(self) -> Hardware:
        """As many nodes as the job has; of a smaller NVLink domain where it says so."""
        hardware = read_hardware(self.keys["hardware"])
        on_node = self.keys.get("ranks_per_node", hardware.ranks_per_node)
        inter = hardware.inter
        assert inter is not None
        rate = inter.bytes_per_s * on_node / hardware.ranks_per_node
        return replace(
            hardware,
            num_nodes=-(-self.keys["gpus"] // on_node),
            ranks_per_node=on_node,
            inter=replace(inter, bytes_per_s=rate),
        )

    @property
    def training(self) -> Training:
        keys = self.keys
        parallel = ModelParallel(
            tensor=keys["tensor"],
            context=keys["context"],
            pipeline=keys["pipeline"],
            chunks=keys["chunks"],
            first_layers=keys.get("first_layers"),
            last_layers=keys.get("last_layers"),
        )
        at_once = keys["gpus"] // parallel.size * keys["micro_batch"]
        if keys["global_batch"] % at_once:
            raise ValueError(f"{self.name}: {at_once} samples at once do not divide a step")
        return Training(
            num_ranks=keys["gpus"],
            length=keys["length"],
            micro_batch=keys["micro_batch"],
            micro_batches=keys["global_batch"] // at_once,
            zero_stage=keys["zero_stage"],
            recomputes=keys["recompute"] == FULL,
            again=tuple(keys["recompute"]) if isinstance(keys["recompute"], list) else (),
            is_fused=True,  # all by Transformer Engine
            state_bytes=keys.get("state_bytes", MASTER_AND_STATES),
            hides_gradients=keys["overlaps_gradients"],
            sums_in_float32=keys["sums_in_float32"],
            parallel=parallel,
        )

    @property
    def published(self) -> float:
        """Model TFLOP/s of each GPU."""
        stated, length = self.keys["published"], self.keys["length"]
        flops = self.shape.flops(length)
        if "tokens_per_s" in stated:
            return float(stated["tokens_per_s"]) * flops / TERA
        if "step_s" in stated:
            tokens = self.keys["global_batch"] * length / self.keys["gpus"]
            return tokens / float(stated["step_s"]) * flops / TERA
        if stated.get("attention") == FULL:
            whole = flops + 6 * self.shape.num_layers * self.shape.attention_work(length)
            return float(stated["tflops"]) * flops / whole
        return float(stated["tflops"])

    @property
    def once(self) -> float:
        """Part of the tokens between nodes that are left where a node is sent each once, as the
        job's dispatcher does: experts of a token are taken as drawn alone, nodes as many as its
        EP ranks fill."""
        nodes = self.keys["expert"] // self.hardware.ranks_per_node
        if self.keys["dispatcher"] not in ONCE or nodes < 2:
            return 1.0
        top_k = self.shape.top_k
        return (1 - (1 - 1 / nodes) ** top_k) / (top_k / nodes)

    @cached_property
    def _loads(self) -> np.ndarray:
        return Case((self.hardware,), self.priced_shape, self.training).rows(LOADS).rows_ILCE

    def priced(self, reached: Reached, *, sends_once: bool = False) -> Priced:
        """Of the same job; ``sends_once``: with fewer bytes between EP ranks, see ``once``."""
        case = Case((self.hardware,), self.priced_shape, self.training, reached)
        (chosen,) = (each for each in chosen_strategies({}, STRATEGY) if each.name == STRATEGY)
        grid = Grid(case.training.stage_ranks, self.keys["expert"], self.keys["expert_tensor"])
        run = case.run(grid)
        if sends_once:
            row = RowBytes(self.once * run.row_bytes, run.row_bytes)
            run = replace(run, on_its_way=OnItsWay(row, run.expert_bytes))
        return price_way(Way(STRATEGY, chosen.strategy, grid), run, self._loads, num_priced=1)

    def ratio(self, reached: Reached, *, sends_once: bool = False) -> float:
        """What a price comes to over what was published."""
        return self.tflops_of(self.priced(reached, sends_once=sends_once)) / self.published

    def tflops_of(self, priced: Priced) -> float:
        """Model TFLOP/s of each GPU that a price comes to."""
        flops = self.priced_shape.flops(self.keys["length"])
        return priced.tokens_per_s / self.keys["gpus"] * flops / TERA


def rows_of(path: Path = PUBLISHED) -> list[Row]:
    """All of a file."""
    return [Row(keys) for keys in read_document(path)["rows"]]


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Those that fit, every second one from the first on, and those that check."""
    counted = [row for row in rows if row.counts]
    return counted[::2], counted[1::2]


def error(ratios: Sequence[float]) -> float:
    """Median of how far prices are off."""
    return median(abs(ratio - 1) for ratio in ratios)


def fitted(rows: Sequence[Row], *, sends_once: bool = False) -> Reached:
    """The constants under which the mean of how far logarithms of prices are off is least: by steps
    of one constant at a time, up or down, which halve until none helps."""

    def off(reached: Reached) -> float:
        return fmean(abs(log(row.ratio(reached, sends_once=sends_once))) for row in rows)

    best, step = Reached(), FIRST_STEP
    least = off(best)
    while step >= LAST_STEP:
        before = least
        for name, times in product(FITTED, (1 + step, 1 / (1 + step))):
            tried = min(max(vars(best)[name] * times, LEAST), MOST)
            other = replace(best, **{name: round(tried, 3)})
            if other != best and (of_other := off(other)) < least:
                best, least = other, of_other
        if least == before:
            step /= 2
    return best


def table(
    rows: Sequence[Row],
    reached: Reached,
    fits: Sequence[str],
    *,
    parts: bool = False,
    sends_once: bool = False,
) -> list[str]:
    """In Markdown, as price is and with ``reached``; ``fits`` are names of rows that fit."""
    headings = ["job", "source", "GPUs", "TP PP VP EP CP", "batch", "published", "price", "ratio"]
    headings += ["fitted", "ratio", "half", *["where the step goes"] * parts]
    lines = [_line(headings), _line(["---"] * len(headings))]
    ratios: dict[str, list[tuple[float, float]]] = {"fit": [], "check": []}
    for row in rows:
        keys = row.keys
        sizes = ("tensor", "pipeline", "chunks", "expert", "context")
        half = ("fit" if row.name in fits else "check") if row.counts else "no"
        device = keys["hardware"].replace("dgx_", "").split("_")[0].upper()
        cells = [
            row.name,
            row.link,
            f"{keys['gpus']:,} {device}{'' if keys['precision'] == BF16 else ', fp8'}",
            " ".join(str(keys[name]) for name in sizes),
            f"{keys['micro_batch']} of {keys['global_batch']:,}",
            f"{row.published:.0f}",
        ]
        where = ""
        if keys["precision"] == BF16:
            priced = row.priced(reached, sends_once=sends_once)
            both = row.tflops_of(row.priced(Reached())), row.tflops_of(priced)
            for tflops in both:
                cells += [f"{tflops:.0f}", f"{tflops / row.published:.2f}"]
            if row.counts:
                ratios[half].append((both[0] / row.published, both[1] / row.published))
            where = _where(priced)
        else:
            cells += [""] * 4
        lines.append(_line([*cells, half, *[where] * parts]))
    for name, each in ratios.items():
        if each:
            before, after = map(error, zip(*each))
            lines += [
                "",
                f"{name}: {len(each)} rows, median error {before:.1%}, fitted {after:.1%}",
            ]
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _where(priced: Priced) -> str:
    parts = {
        name: priced.mean(key) / priced.step_s
        for name, key in (
            ("computed", "computed_s"),
            ("imbalance", "imbalance_s"),
            ("sending", "exposed_s"),
            ("host", "host_s"),
            ("bubble", "bubble_s"),
            ("end", "end_s"),
        )
    }
    return ", ".join(f"{name} {part:.0%}" for name, part in parts.items() if part > 0.005)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--fit", action="store_true", help="fit constants on every second row first")
    add("--swap", action="store_true", help="let the other half fit")
    add("--send-once", action="store_true", help="with the dispatcher's fewer tokens between nodes")
    add("--rows", help="names of rows, or parts of them, separated by semicolons")
    add("--parts", action="store_true", help="say where priced steps go, too")
    for name in FITTED:
        add(f"--{name}", type=float, help=f"part of the peak rate of {name}")
    given = parser.parse_args()
    rows = rows_of()
    fits = halves(rows)[1 if given.swap else 0]
    reached = Reached(**{n: vars(given)[n] for n in FITTED if vars(given)[n] is not None})
    if given.fit:
        reached = fitted(fits, sends_once=given.send_once)
    said = ", ".join(f"{name} {vars(reached)[name]:.3f}" for name in FITTED)
    print(f"fitted on {len(fits)} rows: {said}" if given.fit else said, end="\n\n")
    if given.rows is not None:
        wanted = given.rows.split(";")
        rows = [row for row in rows if any(each in row.name for each in wanted)]
    names = [row.name for row in fits]
    lines = table(rows, reached, names, parts=given.parts, sends_once=given.send_once)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
