# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext report``: draw the page of a report.json again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_moe_ext.files.documents import bytes_of
from ds_moe_ext.report.page import write_report
from ds_moe_ext.report.record import RunRecord


def add_report(commands: Any) -> None:
    """Add ``report`` to the commands of a parser."""
    parser = commands.add_parser("report", help="draw the page of a report.json again")
    parser.add_argument("json", type=Path, help="report.json of a run")
    parser.set_defaults(run=lambda given: draw(given.json))


def draw(path: Path) -> int:
    """Write report.html beside a report.json."""
    write_report(read_report(path), path.parent)
    print(f"wrote {path.parent / 'report.html'}")
    return 0


def read_report(path: Path) -> RunRecord:
    """What is in a report.json.

    Raises:
        ValueError: it cannot be read, or is none.
    """
    try:
        text = bytes_of(path).decode("utf-8")
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); name report.json of a run") from error
    try:
        return RunRecord.from_json(text)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a report.json of a run ({error!r})") from error
