# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import ranks

# A busy machine is slow: that is no failure of what is tested.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")

ROOT = Path(__file__).parents[1]
SCRIPTS = ("launch", "launch/bench", "docs")
sys.path[:0] = [str(ROOT / folder) for folder in SCRIPTS]  # as when a script there runs


@pytest.fixture(scope="session", autouse=True)
def _pools() -> Iterator[None]:
    yield
    ranks.close_pools()
