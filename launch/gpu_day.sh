#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All figures that the GPUs of this machine can give, by one command that can be taken up again;
# without a GPU a rehearsal. docs/gpu_day.md: bash launch/gpu_day.sh --output runs/gpu_day --budget 8m
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH="$root/.venv/bin:$PATH" # where it is there
exec python3 "$root/launch/gpu_day/gpu_day.py" "$@"
