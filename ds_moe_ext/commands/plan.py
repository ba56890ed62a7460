# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext plan``: plan a job, or many, given in JSON."""

from __future__ import annotations

import sys
from typing import Any

from ds_moe_ext.commands.plan_jobs.algorithms import ALGORITHMS, plan_text
from ds_moe_ext.files.documents import bytes_of

STANDARD_INPUT = "-"  # where a path is asked for


def add_plan(commands: Any) -> None:
    """Add ``plan`` to the commands of a parser."""
    parser = commands.add_parser("plan", help="plan a job, or many, given in JSON")
    parser.add_argument("algorithm", metavar="ALGORITHM", help=", ".join(ALGORITHMS))
    parser.add_argument(
        "--in",
        dest="path",
        required=True,
        metavar="FILE",
        help="a job or a list of jobs in JSON; - reads standard input",
    )
    parser.set_defaults(run=lambda given: print_plan(given.algorithm, given.path))


def print_plan(algorithm: str, path: str) -> int:
    """Print the plan of a job, or the plans of a list of jobs."""
    try:
        text = sys.stdin.buffer.read() if path == STANDARD_INPUT else bytes_of(path)
    except ValueError as error:
        raise ValueError(
            f"--in is {path!r}, which cannot be read ({error}); name a file, or - for standard "
            "input"
        ) from error
    print(plan_text(algorithm, text, f"--in {path!r}"))
    return 0
