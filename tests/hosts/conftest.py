# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests under DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import preload

preload("deepspeed", "transformers", "setuptools")
preload("transformers.models.mixtral.modeling_mixtral", "deepspeed.runtime.zero.stage3")


@pytest.fixture(scope="module")
def checkpoints_removed() -> Iterator[None]:
    """What the module's tests have saved for each other is gone behind it."""
    from tests.hosts.checkpoints import remove_saved

    yield
    remove_saved()
