from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import ranks


@pytest.fixture(scope="session", autouse=True)
def _pools() -> Iterator[None]:
    yield
    ranks.close_pools()
