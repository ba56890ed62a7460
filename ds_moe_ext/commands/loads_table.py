# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext loads``: look at loads by a name or from a file, and write them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from ds_moe_ext.planning.load_files import NAMES, check_ending, read_loads, write_loads
from ds_moe_ext.planning.loads import Loads, Sizes, figures_of
from ds_moe_ext.report.units import say, wide_console

SIZES = {
    "ranks": "EP ranks, which send tokens and own experts",
    "experts": "of each layer",
    "layers": "of experts",
    "tokens": "tokens of a rank in a step, on average",
    "top_k": "experts per token (top-k)",
    "steps": "",
}


def add_loads(commands: Any) -> None:
    parser = commands.add_parser("loads", help="show expert loads of a file, or generate some")
    parser.add_argument(
        "loads",
        metavar="NAME_OR_FILE",
        help=f"{', '.join(NAMES)}, with parameters as zipf:1.4,seed=3; a name "
        "of configs/loads; or .npz, .jsonl, .json",
    )
    defaults = Sizes()
    for name, what in SIZES.items():
        default = f"{what} (default: {vars(defaults)[name]}, of a file its own)".strip()
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=default)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of a generator (0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help=".npz or .jsonl to write")
    parser.set_defaults(run=show)


def show(given: argparse.Namespace) -> int:
    """Print what loads are like; write them where ``--out`` says."""
    if given.out is not None:
        check_ending(given.out)
    sizes = {name: vars(given)[name] for name in SIZES}
    loads = read_loads(given.loads, **sizes, seed=given.seed)
    console = wide_console()
    console.print(table_of(loads))
    if given.out is not None:
        write_loads(given.out, loads)
        say(console, f"wrote {given.out}")
    return 0


def table_of(loads: Loads) -> Table:
    """How uneven they are: mean, least and most over steps and layers."""
    num_steps, num_layers, num_ranks, num_experts = loads.rows_ILCE.shape
    choices = "" if loads.top_k is None else f", {loads.top_k} a token"
    title = (
        f"{loads.source}: {num_steps} steps, {num_layers} layers, {num_ranks} ranks of "
        f"{loads.tokens_ILC().mean():,.0f} "
        f"{'routed tokens' if loads.top_k is None else 'tokens'}, {num_experts} "
        f"experts{choices}"
    )
    table = Table("routed tokens of a layer in a step", title=escape(title), title_justify="left")
    for heading in ("mean", "least", "most"):
        table.add_column(heading, justify="right")
    figures = figures_of(loads)
    for what, values in (
        ("balance: busiest rank / mean, experts in index order", figures.by_rank_IL),
        ("hottest expert / mean", figures.hottest_IL),
        ("share of experts without tokens", figures.unused_IL),
        ("total variation to the next step", figures.moved_L),
    ):
        found = (values.mean(), values.min(), values.max()) if values.size else ()
        table.add_row(what, *(f"{value:.3f}" for value in found))
    return table
