# SPDX-License-Identifier: Apache-2.0
"""What a day on GPUs is measured with: devices, versions, this repository's commit."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script sees its own folder alone

from console import versions_of

PACKAGES = (
    *("torch", "triton", "deepspeed", "megatron-core", "transformers", "accelerate", "ds_moe_ext"),
    *("transformer-engine", "apex", "deep_ep", "grouped_gemm", "numpy"),
)


def told_by(*command: str) -> str:
    """What a program prints; empty where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def devices() -> dict[str, str]:
    """The GPUs, or the processor where there is none."""
    cores = {"cores": str(os.cpu_count()), "processor": platform.machine()}
    if not torch.cuda.is_available():
        return {"GPUs": "none", **cores}
    asked = "--query-gpu=name,memory.total,driver_version"
    listed = told_by("nvidia-smi", asked, "--format=csv,noheader").splitlines()
    return {
        "GPUs": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}",
        "listed": "; ".join(sorted(set(listed))),
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        **cores,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print, and write a JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args(arguments)
    root = Path(__file__).parents[2]
    commit = told_by("git", "-C", str(root), "describe", "--always", "--dirty")
    facts = {**devices(), **versions_of(PACKAGES), "commit": commit or "unknown"}
    for name, text in facts.items():
        print(f"{name}: {text}")
    print(told_by("nvidia-smi", "topo", "-m"))
    given.json.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
