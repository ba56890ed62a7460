# SPDX-License-Identifier: Apache-2.0
"""The report's two files, written while a run goes on: whole or not at all, and rarely enough.

Those that an earlier run left in the folder are kept under other names.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ds_moe_ext.files.whole_files import replacing
from ds_moe_ext.report.page import page_of
from ds_moe_ext.report.record import RunRecord

SHARE = 5e-4
"""Of a run's time that writing one of the two files may take: the next waits two thousand times as
long as the last took, as lists of millions of numbers take seconds."""

NAMES = ("report.json", "report.html")


def write_whole(path: Path, text: str) -> None:
    """Put a text in the place of a file: who reads it, or finds it behind a crash, has the old one
    or the new one.

    Raises:
        OSError: it cannot be written; what was there stays, and nothing else.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def keep_earlier(folder: Path) -> str:
    """Rename the files of an earlier run, so that those of this one do not take their place: a run
    that is resumed has the same folder.

    Returns:
        What to report of it; empty where there are none.

    Raises:
        OSError: they cannot be renamed.
    """
    found = [path for name in NAMES if (path := folder / name).exists()]
    if not found:
        return ""
    for number in itertools.count(1):
        kept = [path.with_name(f"{path.stem}.{number}{path.suffix}") for path in found]
        if not any((folder / f"report.{number}{Path(name).suffix}").exists() for name in NAMES):
            break
    for path, other in zip(found, kept):
        path.rename(other)
    names = " and ".join(path.name for path in kept)
    return f"the report of an earlier run in {str(folder)!r} was renamed to {names}"


@dataclass(eq=False)
class ReportFiles:
    """``report.json`` and ``report.html`` of a run."""

    folder: Path  # of both
    # seconds between two writings while the run goes on, at least; None for never
    every_s: int | None = None
    clock: Callable[[], float] = time.perf_counter  # seconds now
    _due_s: dict[str, float] = field(init=False)  # when each is written next

    def __post_init__(self) -> None:
        self._due_s = dict.fromkeys(NAMES, self.clock() + (self.every_s or 0))

    def write(self, record: RunRecord) -> None:
        """Write both.

        Raises:
            OSError: one cannot be written.
        """
        for name in NAMES:
            self._write(name, record)

    def _write(self, name: str, record: RunRecord) -> None:
        text = record.to_json() if name == NAMES[0] else page_of(record)
        write_whole(self.folder / name, text)

    def after_step(self, record: Callable[[], RunRecord]) -> None:
        """Write what is due. Between two steps, so that the run waits for no more than is measured;
        what encodes the lists would hold Python's lock in a thread too.

        Raises:
            OSError: it cannot be written; it is tried again when it is next due.
        """
        if self.every_s is None:
            return
        for name in NAMES:
            began_s = self.clock()
            if began_s < self._due_s[name]:
                continue
            try:
                self._write(name, record())
            finally:
                ended_s = self.clock()
                self._due_s[name] = ended_s + max(self.every_s, (ended_s - began_s) / SHARE)
