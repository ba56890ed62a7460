# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext price``: what a job would take under every strategy, before a GPU hour is spent."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_price(commands: Any) -> None:
    """Add ``price`` to the commands of a parser."""
    parser = commands.add_parser(
        "price", help="what a job would take under every strategy, before a GPU hour is spent"
    )
    add = parser.add_argument
    add("job", type=Path, help="DeepSpeed's JSON, or a file of Megatron's flags")
    add("--model", type=Path, help="a Hugging Face config.json, or a name of configs/models")
    add(
        "--hardware",
        required=True,
        nargs="+",
        help="a file, or a name of configs/hardware, as dgx_h100; several stand side by side",
    )
    add("--nodes", type=int, nargs="+", help="of each cluster, where not those of its file")
    add("--loads", default="zipf:0.6", help="a workload's name or a file; see ds-moe-ext loads")
    add("--strategies", default="all", help="names with commas between, or all; or module:Class")
    add("--grids", choices=("few", "all"), default="few", help="of ranks that are tried")
    add("--length", type=int, help="tokens of a sample")
    add("--micro-batch", type=int, help="samples of a rank in one pass")
    add("--micro-batches", type=int, help="passes of a step")
    add("--recomputes", action=argparse.BooleanOptionalAction, help="activations, in backward")
    add("--pays", action="store_true", help="price other skews and token counts, too")
    add("--html", type=Path, metavar="FILE", help="a page: tables, memory, timelines")
    add("--trace", type=Path, metavar="FILE", help="a timeline, for ui.perfetto.dev")
    add("--json", type=Path, metavar="FILE", help="all numbers")
    parser.set_defaults(run=_price)


def _price(given: argparse.Namespace) -> int:
    from ds_moe_ext.commands.price.market import price  # loads torch, with the strategies

    return price(given)
