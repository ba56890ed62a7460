# SPDX-License-Identifier: Apache-2.0
"""Compile DeepSpeed's CPU collectives before ranks wait for them, and say how long that goes on."""

from __future__ import annotations

import subprocess
import sys
import time

from ds_moe_ext.hosts.deepspeed.op_lock import is_compiled, told_of_old_lock

BUILD = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
TOLD_EVERY_S = 15.0


def main() -> None:
    """Compile, unless that was done."""
    if told := told_of_old_lock():
        raise SystemExit(f"quickstart: {told}")
    if is_compiled():
        return
    print(
        "quickstart: compiling DeepSpeed's CPU collectives (C++, the first time only): 20 to 60 s, "
        "minutes on a busy machine",
        flush=True,
    )
    start_s = time.monotonic()
    compiler = subprocess.Popen(
        [sys.executable, "-c", BUILD], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while True:
        try:
            compiler.wait(TOLD_EVERY_S)
            break
        except subprocess.TimeoutExpired:
            print(f"quickstart: still compiling, {time.monotonic() - start_s:.0f} s", flush=True)
    if not is_compiled():  # DeepSpeed then says why, as it tries again on every rank
        print("quickstart: that failed; DeepSpeed tries again as it starts", flush=True)


if __name__ == "__main__":
    main()
