# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext``: what a person asks from a shell. A command loads torch where it needs it only."""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ds_moe_ext.commands.cluster_profile import add_profile
from ds_moe_ext.commands.compare import add_compare
from ds_moe_ext.commands.doctor import add_doctor
from ds_moe_ext.commands.loads_table import SIZES, add_loads
from ds_moe_ext.commands.plan import add_plan
from ds_moe_ext.commands.price import add_job
from ds_moe_ext.commands.report import add_report
from ds_moe_ext.commands.reproduce import add_reproduce
from ds_moe_ext.commands.verify import add_verify

FORMS = ("megatron", "deepspeed", "huggingface")
DTYPES = ("float32", "bfloat16", "float16", "float64")


class _Version(argparse.Action):
    """Asked of what is installed only where a person asks: other commands run without that."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"ds-moe-ext {version('ds-moe-ext')}")
        parser.exit()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="ds-moe-ext", description="Predict, verify and report what ds_moe_ext does and gains."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print it and end")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    added = (add_doctor, add_report, add_price, add_loads, add_reproduce, add_plan, add_profile)
    for add in (*added, add_compare, add_verify, add_convert, add_bench_planners):
        add(commands)
    given = parser.parse_args()
    try:
        raise SystemExit(given.run(given))
    except (ImportError, OSError, ValueError) as error:
        parser.exit(2, f"ds-moe-ext: {error}\n")


def add_price(commands: Any) -> None:
    """Add ``price``: what a job would take under every strategy."""
    parser = commands.add_parser(
        "price", help="predict step time and memory of a job under every strategy"
    )
    add = parser.add_argument
    add("job", type=Path, help="DeepSpeed's JSON, or a file of Megatron's flags")
    add_job(add)
    add("--strategies", default="all", help="names with commas between, or all; or module:Class")
    add("--grids", choices=("few", "all"), default="few", help="EP group sizes to try")
    add("--quick", action="store_true", help="skip other micro-batches and loads")
    add("--pays", action="store_true", help="also price other skews and token counts")
    add("--html", type=Path, metavar="FILE", help="a page: tables, memory, timelines")
    add("--trace", type=Path, metavar="FILE", help="a timeline, for ui.perfetto.dev")
    add("--json", type=Path, metavar="FILE", help="all numbers")
    parser.set_defaults(run=_price)


def _price(given: argparse.Namespace) -> int:
    from ds_moe_ext.commands.price.command import price

    return price(given)


def add_bench_planners(commands: Any) -> None:
    """Add ``bench-planners``: strategies of the user's own beside ours on the same loads."""
    parser = commands.add_parser(
        "bench-planners", help="compare strategies of your own with ep, fssdp and prophet on loads"
    )
    add = parser.add_argument
    add("strategies", nargs="+", metavar="MODULE:CLASS", help="of your own, or a name of ours")
    add("--loads", default="zipf:0.6", help="a workload's name or a file; see ds-moe-ext loads")
    add("--hardware", default="dgx_h100", help="a file, or a name of configs/hardware")
    add("--model", type=Path, default="qwen3_30b_a3b", help="has the widths; as that of price")
    for name, what in SIZES.items():
        add(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{what} of loads".strip())
    parser.set_defaults(run=_bench_planners)


def _bench_planners(given: argparse.Namespace) -> int:
    from ds_moe_ext.commands.bench_planners import bench_planners

    return bench_planners(given)


def add_convert(commands: Any) -> None:
    """Add ``convert``: a checkpoint's weights in the form of another host."""
    parser = commands.add_parser(
        "convert",
        help="convert the weights of a checkpoint between Megatron, DeepSpeed and Hugging Face",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path, help="folder of a checkpoint")
    add("target", metavar="TARGET", type=Path, help="folder to write, new or empty")
    add("--from", dest="given", choices=FORMS, help="form of SOURCE (default: detected)")
    add("--to", dest="goal", choices=FORMS, required=True, help="form of TARGET")
    add(
        "--model",
        dest="described",
        metavar="FILE",
        type=Path,
        help=(
            "a Hugging Face config.json (or its folder), a file like those of configs/models, "
            "or a name there; required for a deepspeed SOURCE"
        ),
    )
    add("--dtype", choices=DTYPES, help="of the weights (default: unchanged)")
    parser.set_defaults(run=_convert)


def _convert(given: argparse.Namespace) -> int:
    from rich.console import Console

    from ds_moe_ext.commands.conversion.conversion import Asked, Form, convert

    asked = Asked(
        source=given.source,
        target=given.target,
        goal=Form(given.goal),
        given=None if given.given is None else Form(given.given),
        described=given.described,
        dtype=given.dtype and resolve_name(f"torch:{given.dtype}"),
    )
    convert(asked, Console())
    return 0
