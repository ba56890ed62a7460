# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext reproduce``: starts what ``launch/papers`` of a clone works out."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

NAMES = ("hecate", "prophet", "fsmoe", "hetermoe")
FOLDER = Path(__file__).parents[2] / "launch"
"""Beside the package, where it runs from a clone."""


def add_reproduce(commands: Any) -> None:
    parser = commands.add_parser(
        "reproduce",
        help="compare tables and figures of the four papers with our planners and simulator",
    )
    parser.add_argument(
        "papers",
        nargs="+",
        choices=NAMES,
        metavar="PAPER",
        help=f"one or more of {', '.join(NAMES)}",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with charts")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=reproduce)


def reproduce(given: Namespace) -> int:
    """Work out and show the figures of the named papers.

    Raises:
        ValueError: the package is installed without its clone; or the page cannot be written.
    """
    if not (FOLDER / "papers").is_dir():
        raise ValueError(
            f"the papers' figures need launch/papers, but {FOLDER / 'papers'} does not exist: "
            "an installed package does not have it; clone the repository, run pip install -e "
            ". in it, and run this there"
        )
    for folder in (FOLDER, FOLDER / "bench"):  # rivals' planners are benched there
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    from papers.shown import reproduce as show

    return show(given.papers, given.html, as_json=given.json)
