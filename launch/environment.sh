# SPDX-License-Identifier: Apache-2.0
# Sourced by quickstart.sh and test.sh from the repository's root: makes .venv as
# launch/requirements.txt pins it (once, and again when that changes) and puts it on PATH.
# shellcheck shell=bash

fail() {
  echo "environment: $*" >&2
  exit 1
}

find_python() {
  local candidate
  for candidate in python3.11 python3 python3.12 python3.13; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer on PATH; install python3.11 with its venv module"
}

install() {
  # pip compiles all on one core, of which most is never imported; what is, mostly, is compiled
  # below, and the rest where it is first imported.
  local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile)
  echo "environment: installing launch/requirements.txt into .venv (minutes, the first time)"
  # DeepSpeed looks for torch while it is being built, so torch comes first; a torch that is
  # there already may be the CPU or CUDA build that the user chose.
  if ! .venv/bin/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; then
    "${pip[@]}" "$(grep '^torch==' launch/requirements.txt)"
  fi
  "${pip[@]}" -r launch/requirements.txt
  "${pip[@]}" --no-deps -e .
  (cd .venv/lib/python3*/site-packages && ../../../bin/python -m compileall -qq -j 0 \
    torch sympy deepspeed megatron || true)
}

# DeepSpeed compiles small C++ extensions at run time.
command -v g++ >/dev/null || fail "no g++ on PATH; install it (Debian: apt install g++)"

if [[ ! -x .venv/bin/python ]]; then
  python=$(find_python) || exit 1
  "$python" -m venv .venv || fail "$python -m venv failed; install Python's venv module"
fi

stamp=.venv/installed.sha256
wanted=$(cat launch/requirements.txt setup.cfg pyproject.toml | sha256sum)
if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
  install
  echo "$wanted" >"$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"

unset PYTHONDONTWRITEBYTECODE # with it each of some hundred processes compiles all modules anew

num_gpus=0
if [[ "${CUDA_VISIBLE_DEVICES-all}" != "" ]] && command -v nvidia-smi >/dev/null; then
  num_gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
fi
if [[ "$num_gpus" == 0 ]]; then
  # Several ranks share few cores: threads of their own would only get in each other's way.
  export OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu
fi
