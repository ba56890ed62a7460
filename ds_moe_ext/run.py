# SPDX-License-Identifier: Apache-2.0
"""``python -m ds_moe_ext.run train.py ...``: run a script with the hosts attached.

For machines where torch's autoloading of extensions is off. Anything after the script is its own.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from ds_moe_ext import _autoload


def main() -> None:
    """Run the script in ``sys.argv[1]`` as ``__main__``."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m ds_moe_ext.run SCRIPT [ARGUMENT ...]")
    if not Path(sys.argv[1]).exists():  # python says so in a line too, runpy in twenty
        raise SystemExit(
            f"python -m ds_moe_ext.run: there is no script {sys.argv[1]!r}; give the path of one"
        )
    _autoload.install()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))  # as python does with a script
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
