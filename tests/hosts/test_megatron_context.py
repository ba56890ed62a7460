# SPDX-License-Identifier: Apache-2.0
"""Context parallelism under Megatron-core: ranks with parts of the same samples share experts.

Without Transformer Engine Megatron's attention takes no context parallelism. Here it is reported
none, so that each rank attends to its own part, with us and without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest

from tests.hosts.megatron_jobs import Training
from tests.hosts.megatron_skewed import Seen, assert_equal, num_replicas, train_skewed
from tests.hosts.megatron_toy import MegatronRun
from tests.hosts.test_megatron_features import SETTINGS, SKEW
from tests.marks import slow
from tests.ranks import pool_of

RUN = MegatronRun(
    dtype="float64",
    ep=2,
    num_microbatches=2,
    steps=2,
    clip=0.1,
    cp=2,
)
PER_TOKEN = replace(RUN, config=(("calculate_per_token_loss", True),))


@contextmanager
def in_parts(attention: Any = None) -> Iterator[None]:
    """Context parallel ranks, two, share samples; each has batches of its own in their place.
    ``attention`` is the class that attends: Megatron's local one if None."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    attention = attention or DotProductAttention
    attend = attention.__init__
    whole = {"with_context_parallel": True}
    rank = partial(parallel_state.get_data_parallel_rank, **whole)
    size = partial(parallel_state.get_data_parallel_world_size, **whole)
    batches = Training._batches

    def without(self: Any, config: Any, *given: Any, **named: Any) -> None:
        with mock.patch.object(config, "context_parallel_size", 1):
            attend(self, config, *given, **named)

    def own(self: Training, step: int) -> Iterator[Any]:
        with ExitStack() as stack:
            for name, asked in (("rank", rank), ("world_size", size)):
                stack.enter_context(
                    mock.patch.object(parallel_state, f"get_data_parallel_{name}", asked)
                )
            found = list(batches(self, step))
        return iter(found)

    shapes = schedules.get_tensor_shapes

    def of_whole(*, seq_length: int, **named: Any) -> Any:
        """Samples are twice as long as what a rank has of them."""
        return shapes(seq_length=2 * seq_length, **named)

    with ExitStack() as stack:
        for holder, name, put in (
            (schedules, "get_tensor_shapes", of_whole),
            (attention, "__init__", without),
            (Training, "_batches", own),
        ):
            stack.enter_context(mock.patch.object(holder, name, put))
        yield


def train_in_parts(
    rank: int, world_size: int, run: MegatronRun, settings: dict[str, Any] | None
) -> Seen:
    with in_parts():
        return train_skewed(rank, world_size, run, settings, SKEW)


@pytest.mark.parametrize(
    ("world_size", "run"),
    [
        (2, RUN),
        slow(2, PER_TOKEN),
        slow(4, replace(RUN, ep=4)),
        slow(4, replace(RUN, tp=2, etp=1)),
    ],
)
def test_context_parallel_ranks_share_experts(world_size: int, run: MegatronRun) -> None:
    settings = SETTINGS["varied"]
    ours, theirs = (pool_of(world_size).run(train_in_parts, run, s) for s in (settings, None))
    assert_equal(ours, theirs)
    assert num_replicas(ours) > 0
