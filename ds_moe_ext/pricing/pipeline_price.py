# SPDX-License-Identifier: Apache-2.0
"""What a step takes where pipeline stages pass micro-batches on to each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from statistics import fmean
from typing import NamedTuple

from ds_moe_ext.pricing.model_parallel import ModelParallel
from ds_moe_ext.pricing.pipeline_order import Pass, run_passes, sends
from ds_moe_ext.pricing.step_price import Passes, StepPrice


class ChunkPrice(NamedTuple):
    """What a stage runs in one piece.

    Attributes:
        passes: all of a step.
        end_s: behind them; as of ``Conditions``.
    """

    passes: Passes
    end_s: float


def pipeline_step(
    stages: Sequence[Sequence[ChunkPrice]],
    parallel: ModelParallel,
    micro_batches: int,
    send_s: float,
) -> StepPrice:
    """A step of all stages.

    The first forward pass of a chunk moves copies there, its last backward pass brings their
    gradients home. A step ends when the last stage has done what is behind its passes.

    Args:
        stages: ``[stage][chunk]``.
        parallel: sizes.
        micro_batches: of a step.
        send_s: from one stage to the next.
    """

    def seconds_of(stage: int, each: Pass) -> float:
        passes = stages[stage][each.chunk].passes
        if each.is_back:
            is_last = each.micro_batch == micro_batches - 1
            return (passes.first if is_last else passes.later).backward_s
        return (passes.later if each.micro_batch else passes.first).forward_s

    turns = run_passes(parallel, micro_batches, seconds_of, send_s)
    done_s = {turn.stage: turn.end_s for turn in turns}
    end_s = [sum(chunk.end_s for chunk in chunks) for chunks in stages]
    step_s = max(done_s[stage] + end_s[stage] for stage in range(len(stages)))

    def busy_s(stage: int) -> float:
        return sum(chunk.passes.seconds for chunk in stages[stage]) + sent_s(stage)

    def sent_s(stage: int) -> float:
        return micro_batches * sends(stage, parallel) * send_s

    busiest = max(range(len(stages)), key=busy_s)
    own = [chunk.passes for chunk in stages[busiest]]
    # In the order of the model: all first chunks, then all second ones.
    ordered = [chunk.passes for chunks in zip(*stages) for chunk in chunks]
    before = accumulate((len(each.balance_L) for each in ordered), initial=0)
    longest, layers_before = max(
        zip(ordered, before), key=lambda each: each[0].first.seconds if each[0].run else 0.0
    )
    assert longest.run is not None
    return StepPrice(
        step_s=step_s,
        computed_s=sum(each.computed_s for each in own),
        imbalance_s=sum(each.imbalance_s for each in own),
        exposed_s=sum(each.exposed_s for each in own) + sent_s(busiest),
        host_s=sum(each.host_s for each in own),
        end_s=end_s[busiest],
        balance=fmean(chain.from_iterable(each.balance_L for each in ordered)),
        schedule=longest.run.schedule,
        timeline=longest.run.timeline,
        bubble_s=max(step_s - busy_s(busiest) - end_s[busiest], 0.0),
        stage=busiest,
        turns=turns,
        layers_before=layers_before,
    )
