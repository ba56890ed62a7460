#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lint, types and tests; arguments go to pytest, for example: bash launch/test.sh -m slow
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh

failed=()
check() {
  echo "== $*"
  "$@" || failed+=("$*")
}

# DeepSpeed compiles its CPU collectives once, on one core; the first test of an engine waits for it.
python -c 'from deepspeed.comm.torch import build_shm_op; build_shm_op()' >/dev/null 2>&1 &

check ruff check
check ruff format --check
# Types are one core's work: found beside the tests, reported behind them.
types=(mypy ds_moe_ext patches launch docs examples)
reported=$(mktemp)
trap 'rm -f "$reported"' EXIT
"${types[@]}" >"$reported" 2>&1 &
typing=$!
# nproc alone would count what OMP_NUM_THREADS allows.
check pytest --numprocesses "$(nproc --all)" --maxprocesses 4 --dist worksteal "$@"
echo "== ${types[*]}"
wait "$typing" || failed+=("${types[*]}")
cat "$reported"

if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
