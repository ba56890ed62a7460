# SPDX-License-Identifier: Apache-2.0
"""Numbers and names as people read them. Pure."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Sequence

from rich.console import Console

TIMES = "\u00d7"
EN_DASH = "\u2013"
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS = ("", "K", "M", "G", "T", "P", "E")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def counted(number: int, noun: str) -> str:
    """A count and its noun, as ``1 layer`` and ``1,000 layers``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def short_count(number: float) -> str:
    """Three significant digits and a decimal prefix, as ``12.3 M``."""
    if number < 1000:
        return f"{number:,.0f}"
    power = min(int(math.log10(number) // 3), len(_COUNTS) - 1)
    return f"{number / 1000**power:.3g} {_COUNTS[power]}"


def bytes_text(num_bytes: float) -> str:
    """Whole bytes in binary units, as ``1.50 GiB``."""
    num_bytes = round(num_bytes)
    if num_bytes < 1024:
        return f"{num_bytes} B"
    power = min(int(math.log2(num_bytes) // 10), len(_BYTES) - 1)
    return f"{num_bytes / 1024**power:.3g} {_BYTES[power]}"


def seconds_text(seconds: float) -> str:
    """Seconds with three significant digits, as ``1.25 ms`` or ``3 min 20 s``."""
    if seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    for size, unit in _SECONDS:
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.2g} µs" if seconds > 0 else "0 s"


def ratio_text(ratio: float) -> str:
    """A load over the mean, as ``1.42×``."""
    return f"{ratio:.2f}{TIMES}"


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Dotted names without what all of them share at both ends, but for one part before.

    ``model.layers.3.mlp`` and ``model.layers.4.mlp`` become ``layers.3`` and ``layers.4``.
    """
    if len(set(names)) < 2:
        return {name: name for name in names}
    parts = [name.split(".") for name in names]
    head = _shared(parts)
    tail = _shared([part[head:][::-1] for part in parts])
    return {
        name: ".".join(part[max(head - 1, 0) : len(part) - tail])
        for name, part in zip(names, parts)
    }


def _shared(lists: Sequence[Sequence[str]]) -> int:
    """How many leading entries all lists share."""
    alike = (len(set(entries)) == 1 for entries in zip(*lists))
    return sum(itertools.takewhile(bool, alike))


# Where tables are printed: a terminal, or a file that a launcher writes.


WIDE = 180


def wide_console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; in a file or a pipe wide enough for our tables.

    ``Console()`` takes a file to have 80 columns, and cuts what is wider: a scheduler's log would
    have tables that nobody can read."""
    made = Console(stderr=stderr)
    width = shutil.get_terminal_size((WIDE, 0)).columns  # as COLUMNS says, if it does
    return made if made.is_terminal else Console(width=width, stderr=stderr)


def say(to: Console, line: str) -> None:
    """Print a line as it is: not wrapped, without markup and colours."""
    to.print(line, soft_wrap=True, markup=False, highlight=False)
