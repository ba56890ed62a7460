from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))  # as when a script there runs


@pytest.fixture(scope="session", autouse=True)
def _pools() -> Iterator[None]:
    yield
    ranks.close_pools()
