# SPDX-License-Identifier: Apache-2.0
"""Code of the package in C: compiled by the machine's own compiler when it is first asked for.

The library lies beside torch's extensions (``TORCH_EXTENSIONS_DIR``, or torch's own place), under a
name that shows source and compiler. Ranks that compile at once do so each for itself; the last
one that is done takes the place. Where nothing can be kept there, a process compiles for itself
alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

FLAGS = ("-O3", "-shared", "-fPIC")


def compiler() -> str | None:
    """The C compiler that ``CC`` names, or else the machine's; None where it has none."""
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")


@cache
def library(name: str) -> ctypes.CDLL:
    """The library of ``name.c``, compiled where it is not yet.

    Raises:
        RuntimeError: there is no compiler, it refuses, or what it makes cannot be loaded.
    """
    source = Path(__file__).with_name(f"{name}.c")
    command = compiler()
    if command is None:
        raise RuntimeError(f"{source.name} needs a C compiler, and there is none; install gcc")
    reported = (
        source.read_bytes(),
        *(word.encode() for word in (command, platform.machine(), *FLAGS)),
    )
    file = f"{name}-{hashlib.sha256(b' '.join(reported)).hexdigest()[:16]}.so"
    try:
        return _kept(command, source, _folder() / file)
    except (OSError, RuntimeError) as error:  # no folder, no right to write, no room, no loading
        why = error
    try:
        # A folder of this process: nobody else can put a library there. Loaded, it needs no file.
        with tempfile.TemporaryDirectory() as folder:
            return _kept(command, source, Path(folder) / file)
    except (OSError, RuntimeError) as error:
        raise RuntimeError(
            f"{source.name} can be compiled and loaded neither beside torch's extensions ({why}) "
            f"nor in a temporary folder ({error}); let TORCH_EXTENSIONS_DIR name a folder with "
            "room, from which libraries may be loaded"
        ) from error


NUMBER, PLACE = ctypes.c_int64, ctypes.c_void_p
"""What functions are given: an ``int64_t``, and where something lies in memory."""


def quick(
    name: str, *reported: type[ctypes.c_int64 | ctypes.c_void_p]
) -> Callable[..., int] | None:
    """The function of a name in the library of that name, or None where it can be neither found nor
    compiled. It keeps Python's lock: for a few us nobody else needs to have it, who might not give
    it back for milliseconds."""
    try:
        code = library(name)
    except RuntimeError:
        return None
    return ctypes.PYFUNCTYPE(ctypes.c_int, *reported)((name, code))


def _kept(command: str, source: Path, place: Path) -> ctypes.CDLL:
    """From its place; compiled where it does not lie there."""
    if not place.exists():
        _compile(command, source, place)
    return ctypes.CDLL(str(place))


def _folder() -> Path:
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = Path(given) if given else Path.home() / ".cache" / "torch_extensions"
    return folder / "ds_moe_ext"


def _compile(command: str, source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        made = Path(folder) / place.name
        lines = [command, *FLAGS, "-o", str(made), str(source)]
        done = subprocess.run(lines, check=False, capture_output=True, text=True)
        if done.returncode:
            stated = done.stderr.strip()
            raise RuntimeError(f"{command} does not compile for {place.parent}: {stated}")
        made.replace(place)
