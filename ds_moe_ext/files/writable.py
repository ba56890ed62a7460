# SPDX-License-Identifier: Apache-2.0
"""Whether files can be written, tried before it matters."""

from __future__ import annotations

import os
from pathlib import Path


def why_unwritable(path: Path, *, makes_folders: bool) -> str:
    """Why a file cannot be written, tried without changing it; empty if it can.

    Args:
        path: of the file.
        makes_folders: those that it lies in; else they must be there.
    """
    try:
        if makes_folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        # A pipe that nobody reads would have an ordinary open wait for ever.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666))
        if is_new:
            path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # of a name that no file can have
        return str(error)
    return ""
