"""Code of the package in C: compiled by the machine's own compiler when it is first asked for.

The library lies beside torch's extensions (``TORCH_EXTENSIONS_DIR``, or torch's own place), under a
name that tells source and compiler. Ranks that compile at once do so each for itself; the last one
that is done takes the place.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
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
        RuntimeError: there is no compiler, or it refuses.
    """
    source = Path(__file__).with_name(f"{name}.c")
    command = compiler()
    if command is None:
        raise RuntimeError(f"{source.name} needs a C compiler, and there is none; install gcc")
    told = (source.read_bytes(), command.encode(), platform.machine().encode())
    place = _folder() / f"{name}-{hashlib.sha256(b' '.join(told)).hexdigest()[:16]}.so"
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
        told = [command, *FLAGS, "-o", str(made), str(source)]
        done = subprocess.run(told, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command} does not compile {source.name}: {done.stderr.strip()}")
        made.replace(place)
