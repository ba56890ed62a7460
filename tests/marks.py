# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test are long runs, started by hand (``pytest -m slow``), and what some need."""

from __future__ import annotations

import shutil
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case for ``pytest.mark.parametrize`` that guards what a quicker one guards already."""
    return pytest.param(*values, marks=pytest.mark.slow)


needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None, reason="DeepSpeedCPUAdam is compiled, and there is no c++"
)
