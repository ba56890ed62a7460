# SPDX-License-Identifier: Apache-2.0
"""When our patches could not be applied: nobody who asked for us trains without us unawares."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any


def refuse_if_asked(deepspeed: Any, error: Exception) -> None:
    """Let ``deepspeed.initialize`` fail where the JSON enables us; all else goes on as without us.

    Imports nothing of the package: it may be what is broken.
    """
    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        block = result[0]._config._param_dict.get("ds_moe_ext") or {}
        if block.get("enabled"):
            raise RuntimeError(
                f"ds_moe_ext is enabled, but could not attach to DeepSpeed: {error}; run "
                "'ds-moe-ext doctor', or set ds_moe_ext.enabled to false"
            ) from error
        return result

    deepspeed.initialize = initialize


# A lock that a killed compilation of DeepSpeed's CPU collectives has left behind.


OP = "deepspeed_shm_comm"

QUIET_S = 120.0
"""A compiler that writes nothing for so long is taken for dead; the whole takes 20 to 60 s."""


def old_lock() -> Path | None:
    """The lock of a compilation in whose folder nothing has changed for a while; else None."""
    for lock in extensions().glob(f"**/{OP}/lock"):
        try:
            latest_s = max(path.stat().st_mtime for path in lock.parent.iterdir())
        except (OSError, ValueError):
            continue  # it has just been released
        if time.time() - latest_s > QUIET_S:
            return lock
    return None


def extensions() -> Path:
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "torch_extensions"


def notice_of_old_lock() -> str:
    """What to do about it, before DeepSpeed waits for it; empty where there is none."""
    lock = old_lock()
    if lock is None:
        return ""
    return (
        f"{lock} was left by an interrupted compilation of DeepSpeed's CPU collectives, and "
        "every start waits for it: unless another process is compiling there now, delete it "
        f"(rm {lock}) and start again"
    )


def log_old_lock() -> None:
    if reported := notice_of_old_lock():
        print(f"ds_moe_ext: {reported}", flush=True)


def is_compiled() -> bool:
    """Whether a compilation has come to its end there."""
    return any(extensions().glob(f"**/{OP}/{OP}.so"))
