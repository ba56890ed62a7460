# SPDX-License-Identifier: Apache-2.0
"""One rank fails under Megatron: the others learn it within seconds, and of what."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.hosts.megatron_jobs import Training, megatron
from tests.hosts.megatron_toy import MegatronRun
from tests.ranks import pool_of

RUN = MegatronRun(ep=2, num_microbatches=2)
SETTINGS = {"enabled": True, "strategy": "fssdp", "report": {"enabled": False}}
SOON_S = 30.0  # of a group that would wait for 120 s


def _broke(*args: Any) -> None:
    raise ValueError("it broke")


def fail(rank: int, world_size: int) -> tuple[float, str, str]:
    """What ends a step in which rank 1 fails in its second block, and after how many seconds."""
    with megatron(RUN, SETTINGS):
        training = Training(RUN)
        training.compute(0)
        training.update()
        if rank == 1:
            training.chunks[0].module.decoder.layers[1].register_forward_pre_hook(_broke)
        start = time.monotonic()
        with pytest.raises((RuntimeError, ValueError)) as caught:
            training.compute(1)
        return time.monotonic() - start, type(caught.value).__name__, str(caught.value)


def test_others_learn_of_a_failure() -> None:
    (seconds, kind, results), own = pool_of(2).run(fail)
    assert own[1:] == ("ValueError", "it broke")
    assert seconds < SOON_S
    assert kind == "BrokenOff"
    assert results.startswith("rank 1 failed in a step's passes, after decoder.layers.0.mlp"), (
        results
    )
    assert "ValueError: it broke" in results
