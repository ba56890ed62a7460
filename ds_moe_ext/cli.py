# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext``: what a person asks from a shell."""

from __future__ import annotations

import argparse
from importlib.metadata import version
from typing import Any

from ds_moe_ext.commands.cluster_profile import add_profile
from ds_moe_ext.commands.compare import add_compare
from ds_moe_ext.commands.convert import add_convert
from ds_moe_ext.commands.doctor import add_doctor
from ds_moe_ext.commands.loads_table import add_loads
from ds_moe_ext.commands.plan import add_plan
from ds_moe_ext.commands.price.command import add_price
from ds_moe_ext.commands.report import add_report
from ds_moe_ext.commands.reproduce import add_reproduce
from ds_moe_ext.commands.verify import add_verify


class _Version(argparse.Action):
    """Asked of what is installed only where a person asks: other commands run without that."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"ds-moe-ext {version('ds-moe-ext')}")
        parser.exit()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="ds-moe-ext", description="What a run with ds_moe_ext would do, would gain, and did."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print it and end")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    added = (add_doctor, add_report, add_price, add_loads, add_reproduce, add_plan, add_profile)
    for add in (*added, add_compare, add_verify, add_convert):
        add(commands)
    given = parser.parse_args()
    try:
        raise SystemExit(given.run(given))
    except (ImportError, OSError, ValueError) as error:
        parser.exit(2, f"ds-moe-ext: {error}\n")
