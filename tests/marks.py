# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test are long runs, started by hand: ``pytest -m slow``."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case for ``pytest.mark.parametrize`` that guards what a quicker one guards already."""
    return pytest.param(*values, marks=pytest.mark.slow)
