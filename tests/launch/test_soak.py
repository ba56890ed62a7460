# SPDX-License-Identifier: Apache-2.0
"""The short form of ``launch/bench/soak.py``: what a step leaves behind would be seen in sixty."""

from __future__ import annotations

import pytest
from small_runs import made
from soak import Look, growth, looks_at

from tests.ranks import pool_of, preload

preload("deepspeed", "transformers")

NUM_STEPS = 60


def looks(rank: int, world_size: int, strategy: str) -> list[Look]:
    """Of a rank."""
    return looks_at(made("deepspeed", strategy), NUM_STEPS)


@pytest.mark.parametrize("strategy", ["fssdp", "esp over prophet", "zebra"])
def test_steps_leave_nothing_behind(strategy: str) -> None:
    for own in pool_of(2).run(looks, strategy):
        for name in ("threads", "files", "communicators", "tensors"):
            assert growth(own, name) == 0, (name, own)
        assert growth(own, "python_bytes") < 300e3, own
        assert growth(own, "rss_bytes") < 8e6, own
