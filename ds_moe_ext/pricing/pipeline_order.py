# SPDX-License-Identifier: Apache-2.0
"""In which order the stages of a pipeline run their passes, and when: Megatron's 1F1B. Pure.

A stage runs some forward passes, then a forward and a backward one by turns, then the backward
passes that are left. With several chunks a stage, passes through them interleave: as many
micro-batches as there are stages go through the first chunk, then the same ones through the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from ds_moe_ext.pricing.model_parallel import ModelParallel


class Pass(NamedTuple):
    """One micro-batch through one chunk of a stage."""

    chunk: int
    micro_batch: int
    is_back: bool


class Turn(NamedTuple):
    """When a stage runs a pass."""

    stage: int
    what: Pass
    start_s: float
    end_s: float


@lru_cache(maxsize=128)  # all ways and steps have the same
def order_of(stage: int, parallel: ModelParallel, micro_batches: int) -> tuple[Pass, ...]:
    """The passes of a stage.

    Args:
        stage: its number.
        parallel: sizes.
        micro_batches: of a step; stages that interleave divide them.
    """
    stages, chunks = parallel.pipeline, parallel.chunks
    forward = [
        (chunk, number)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for number in range(first, min(first + stages, micro_batches))
    ]
    ahead = stages - stage - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    ahead = min(ahead, len(forward))
    passes = [Pass(*each, is_back=False) for each in forward]
    back = [Pass(chunks - 1 - chunk, number, is_back=True) for chunk, number in forward]
    turns = [each for pair in zip(passes[ahead:], back) for each in pair]
    return (*passes[:ahead], *turns, *back[len(back) - ahead :])


def most_kept(order: Iterable[Pass], kept: Sequence[float]) -> float:
    """The most that a stage keeps at once between forward and backward.

    Args:
        order: its passes.
        kept: of one pass through each chunk.
    """
    most = now = 0.0
    for each in order:
        now += -kept[each.chunk] if each.is_back else kept[each.chunk]
        most = max(most, now)
    return most


def run_passes(
    parallel: ModelParallel,
    micro_batches: int,
    seconds_of: Callable[[int, Pass], float],
    send_s: float,
) -> list[Turn]:
    """When all stages run their passes.

    A stage sends what a pass gives before it goes on; where chunks interleave it goes on meanwhile,
    as Megatron does in both.

    Args:
        parallel: sizes.
        micro_batches: of a step.
        seconds_of: how long a stage takes for a pass, without sending.
        send_s: from one stage to the next.
    """
    stages = range(parallel.pipeline)
    left = [list(reversed(order_of(stage, parallel, micro_batches))) for stage in stages]
    free_s = [0.0] * parallel.pipeline
    come_s: dict[tuple[int, Pass], float] = {}  # when a pass has what it needs of another stage
    turns: list[Turn] = []
    while any(left):
        for stage in stages:
            while left[stage]:
                each = left[stage][-1]
                come = 0.0 if _begins(stage, each, parallel) else come_s.get((stage, each))
                if come is None:
                    break
                left[stage].pop()
                start_s = max(free_s[stage], come)
                free_s[stage] = end_s = start_s + seconds_of(stage, each)
                after = _next(stage, each, parallel)
                if after is not None:
                    come_s[after] = end_s + send_s
                    if parallel.chunks == 1:
                        free_s[stage] = end_s = end_s + send_s
                turns.append(Turn(stage, each, start_s, end_s))
    return turns


def sends(stage: int, parallel: ModelParallel) -> int:
    """How often a stage sends in a pass of one micro-batch, forward and backward, and waits for
    it."""
    if parallel.chunks > 1:
        return 0
    return (stage > 0) + (stage < parallel.pipeline - 1)


def _begins(stage: int, each: Pass, parallel: ModelParallel) -> bool:
    """Whether a pass needs nothing of another stage: forward's first, and backward's, which follows
    its own forward."""
    if each.is_back:
        return stage == parallel.pipeline - 1 and each.chunk == parallel.chunks - 1
    return stage == 0 and each.chunk == 0


def _next(stage: int, each: Pass, parallel: ModelParallel) -> tuple[int, Pass] | None:
    """The pass that goes on from one, and its stage; none behind the last."""
    step = -1 if each.is_back else 1
    place = each.chunk * parallel.pipeline + stage + step
    if not 0 <= place < parallel.chunks * parallel.pipeline:
        return None
    chunk, following = divmod(place, parallel.pipeline)
    return following, each._replace(chunk=chunk)
