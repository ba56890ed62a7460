# SPDX-License-Identifier: Apache-2.0
"""The short form of ``launch/bench/soak.py``: what a step leaves behind would be seen in fifty."""

from __future__ import annotations

import pytest
from small_runs import made
from soak import Look, growth, looks_at

from tests.marks import slow
from tests.ranks import pool_of, preload

preload("deepspeed", "transformers")

NUM_STEPS = 50


def looks(rank: int, world_size: int, strategy: str) -> list[Look]:
    """Of a rank."""
    return looks_at(made("deepspeed", strategy), NUM_STEPS, num_looks=6)


@pytest.mark.parametrize(
    "strategy", ["fssdp", slow("zebra"), slow("esp over fssdp"), slow("esp over prophet")]
)
def test_steps_leave_nothing_behind(strategy: str) -> None:
    for own in pool_of(2).run(looks, strategy):
        for name in ("threads", "files", "communicators"):
            assert growth(own, name) == 0, (name, own)
        assert abs(growth(own, "tensors")) < 5, own  # some copies are under way
        assert growth(own, "python_bytes") < 300e3, own
        assert growth(own, "rss_bytes") < 8e6, own
