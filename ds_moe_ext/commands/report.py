# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext report``: draw the page of a report.json again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_moe_ext.files.documents import bytes_of
from ds_moe_ext.report.charts import chart_files
from ds_moe_ext.report.page import page_of
from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.report.report_files import write_whole
from ds_moe_ext.report.two_runs import Shown, page_beside
from ds_moe_ext.strict import shortened


def add_report(commands: Any) -> None:
    parser = commands.add_parser("report", help="draw the page of a report.json")
    parser.add_argument("json", type=Path, help="report.json of a run")
    parser.add_argument("--beside", type=Path, metavar="JSON", help="compare with another run")
    parser.add_argument("--charts", type=Path, metavar="DIR", help="also write each chart as SVG")
    parser.set_defaults(run=lambda given: draw(given.json, given.beside, given.charts))


UNFIT = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What values raise that no run has."""


def draw(path: Path, beside: Path | None = None, charts: Path | None = None) -> int:
    """Write report.html beside a report.json, or beside.html of two, and their charts into a
    folder."""
    paths = [path] if beside is None else [path, beside]
    records = [read_report(each) for each in paths]
    page_path = path.parent / ("report.html" if beside is None else "beside.html")
    try:
        if beside is None:
            page = page_of(records[0])
        else:
            page = page_beside(*map(Shown, _names(path, beside), records))
    except UNFIT as error:
        text = " and ".join(map(str, paths))
        raise ValueError(
            f"{text}: values that a report.json cannot have ({shortened(repr(error), 300)})"
        ) from error
    write_whole(page_path, page)
    print(f"wrote {page_path}")
    if charts is not None:
        files = chart_files(page)
        charts.mkdir(parents=True, exist_ok=True)
        for name, drawing in files.items():
            (charts / f"{name}.svg").write_text(drawing, "utf-8")
        print(f"wrote {len(files)} charts into {charts}")
    return 0


def _names(first: Path, second: Path) -> tuple[str, str]:
    """Of two runs: their folders', where these differ."""
    folders = [path.resolve().parent.name for path in (first, second)]
    return (folders[0], folders[1]) if folders[0] != folders[1] else (str(first), str(second))


def read_report(path: Path) -> RunRecord:
    """The record of a run; a ValueError says why it is none."""
    try:
        text = bytes_of(path).decode("utf-8")
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); name report.json of a run") from error
    try:
        return RunRecord.from_json(text)
    except UNFIT as error:
        reason = shortened(repr(error), 300)
        raise ValueError(f"{path} is not a report.json of a run ({reason})") from error
