#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The site of docs/, into site/; arguments go to mkdocs, for example: bash launch/docs.sh serve
set -euo pipefail
cd "$(dirname "$0")/.."

# Apart from .venv: what trains needs none of it.
place=build/docs
wanted=$(sha256sum <docs/requirements.txt)
if [[ "$(cat "$place/installed.sha256" 2>/dev/null)" != "$wanted" ]]; then
  python3 -m venv "$place"
  "$place/bin/python" -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
  echo "$wanted" >"$place/installed.sha256"
fi
if (($# == 0)); then
  set -- build --strict
fi
NO_MKDOCS_2_WARNING=1 exec "$place/bin/mkdocs" "$@"
