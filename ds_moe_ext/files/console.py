# SPDX-License-Identifier: Apache-2.0
"""Where tables are printed: a terminal, or a file that a launcher writes."""

from __future__ import annotations

import shutil

from rich.console import Console

WIDE = 180


def wide_console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; in a file or a pipe wide enough for our tables.

    ``Console()`` takes a file to have 80 columns, and cuts what is wider: a scheduler's log would
    have tables that nobody can read.

    Args:
        stderr: there, in place of stdout.
    """
    made = Console(stderr=stderr)
    width = shutil.get_terminal_size((WIDE, 0)).columns  # as COLUMNS says, if it does
    return made if made.is_terminal else Console(width=width, stderr=stderr)
