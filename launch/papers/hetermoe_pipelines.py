# SPDX-License-Identifier: Apache-2.0
"""Pipelines of ranks of both classes, a rival of zebra: how many layers each stage has. Pure.

HeterMoE, section 6.3. A stage is one rank with whole layers, all their experts among them: no row
travels, but a layer has to fit. Micro-batches are single samples, one forward, one backward in turn
(1F1B). Several such pipelines share the samples, and sum their gradients at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from typing import NamedTuple

from ds_moe_ext.planning.zebra_costs import HEAD_BACKWARD, RankClass, TwoClasses
from ds_moe_ext.schedule.simulator import simulate
from ds_moe_ext.schedule.task import ChunkRange, Kind, Op, Schedule, Stream, Task, Value

HANDED_ON = Kind("handed_on")  # hidden states, to the next stage
HANDED_BACK = Kind("handed_back")  # their gradients


@dataclass(frozen=True, kw_only=True)
class Pipelines:
    """Equal pipelines, one rank a stage.

    Attributes:
        num_pipelines: their number.
        new_ranks: of each.
        old_ranks: of each.
    """

    num_pipelines: int
    new_ranks: int
    old_ranks: int

    def __post_init__(self) -> None:
        if min(self.new_ranks, self.old_ranks) < 0:
            raise ValueError(
                f"new_ranks is {self.new_ranks} and old_ranks {self.old_ranks}; both must be at "
                "least 0"
            )

    @property
    def num_stages(self) -> int:
        return self.new_ranks + self.old_ranks


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """How the layers of a pipeline are split.

    Attributes:
        layers: of each stage.
        is_new: of each stage, whether its rank is of the new class.
        tokens_per_s: of all pipelines.
    """

    layers: tuple[int, ...]
    is_new: tuple[bool, ...]
    tokens_per_s: float


def best_pipelines(ranks: TwoClasses, pipelines: Pipelines, num_samples: int) -> PipelinePlan:
    """The fastest split of layers and order of stages that fits, all of them tried.

    Args:
        ranks: both classes; their rooms bound the layers of a stage.
        pipelines: how many, and of which ranks.
        num_samples: of a step; a pipeline takes as many as any other, rounded up.

    Raises:
        ValueError: there are fewer layers or samples than they take, or no split fits.
    """
    _check(ranks, pipelines, num_samples)
    of_one = -(-num_samples // pipelines.num_pipelines)
    plans = [
        PipelinePlan(
            layers=layers,
            is_new=is_new,
            tokens_per_s=num_samples
            * ranks.model.length
            / _step_s(ranks, pipelines.num_pipelines, stages, of_one),
        )
        for is_new in _orders(pipelines)
        for layers in _splits(ranks.model.num_layers, pipelines.num_stages)
        if _fits(ranks.model.num_experts, stages := _stages(ranks, is_new, layers))
    ]
    if not plans:
        raise ValueError(
            f"no split of {ranks.model.num_layers} layers of {ranks.model.num_experts} experts "
            f"fits stages with room for {ranks.new.room} experts on new ranks and "
            f"{ranks.old.room} on old ones; give pipelines more ranks or memory"
        )
    return max(plans, key=lambda plan: plan.tokens_per_s)


class _Stage(NamedTuple):
    of: RankClass
    num_layers: int


def _check(ranks: TwoClasses, pipelines: Pipelines, num_samples: int) -> None:
    if not 1 <= pipelines.num_stages <= ranks.model.num_layers:
        raise ValueError(
            f"a pipeline has {pipelines.num_stages} stages, but the model "
            f"{ranks.model.num_layers} layers; give from 1 to as many ranks"
        )
    if not 1 <= pipelines.num_pipelines <= num_samples:
        raise ValueError(
            f"num_pipelines is {pipelines.num_pipelines} for {num_samples} samples; give from 1 to "
            "as many pipelines"
        )


def _orders(pipelines: Pipelines) -> Iterator[tuple[bool, ...]]:
    """New ranks first where nothing else decides."""
    for places in combinations(range(pipelines.num_stages), pipelines.new_ranks):
        yield tuple(stage in places for stage in range(pipelines.num_stages))


def _splits(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *cuts, num_layers)))


def _stages(ranks: TwoClasses, is_new: Sequence[bool], layers: Sequence[int]) -> tuple[_Stage, ...]:
    return tuple(
        _Stage(ranks.new if new else ranks.old, count) for new, count in zip(is_new, layers)
    )


def _fits(num_experts: int, stages: Sequence[_Stage]) -> bool:
    rooms = ((stage.of.room, stage.num_layers * num_experts) for stage in stages)
    return all(room is None or needed <= room for room, needed in rooms)


def _step_s(
    ranks: TwoClasses, num_pipelines: int, stages: Sequence[_Stage], num_samples: int
) -> float:
    """A stage pays for what it sends. Gradients of experts are summed by a ring, not hidden."""
    model = ranks.model
    last = len(stages) - 1
    sent_s = ranks.link.seconds(model.length * model.width * model.element_bytes)

    def seconds_of(rank: int, task: Task) -> float:
        of, num_layers = stages[task.layer]
        is_back = bool(task.adjoint_of)
        layers_s = num_layers * (of.attention_s + of.expert_s) * (ranks.backward if is_back else 1)
        head_s = of.head_s * (HEAD_BACKWARD if is_back else 1) if task.layer == last else 0.0
        sends = task.layer > 0 if is_back else task.layer < last
        return model.length * (layers_s + head_s) + sends * sent_s

    gradient_bytes = model.num_experts * model.expert_weights * model.element_bytes
    ring = 2 * (num_pipelines - 1) / num_pipelines
    most_layers = max(stage.num_layers for stage in stages)
    summed_s = ring * most_layers * gradient_bytes / ranks.link.bytes_per_s
    return simulate(_pipeline(len(stages), num_samples), seconds_of).makespan_s + summed_s


class _Turn(NamedTuple):
    stage: int
    sample: int
    is_back: bool


@cache
def _pipeline(num_stages: int, num_samples: int) -> Schedule:
    """1F1B: a stage is as many samples ahead as there are stages behind it."""
    queues = [_queue(num_stages - 1 - stage, stage, num_samples) for stage in range(num_stages)]
    stage_passes: dict[_Turn, int] = {}
    tasks: list[Task] = []
    while any(queues):
        for queue in queues:
            while queue and _is_ready(queue[0], stage_passes, num_stages):
                stage_pass = queue.pop(0)
                tasks.append(_task(stage_pass, stage_passes, num_stages))
                stage_passes[stage_pass] = len(stage_passes)
    return Schedule(tuple(tasks), (), ())


def _queue(ahead: int, stage: int, num_samples: int) -> list[_Turn]:
    forward = [_Turn(stage, sample, is_back=False) for sample in range(num_samples)]
    backward = [stage_pass._replace(is_back=True) for stage_pass in forward]
    first, rest = forward[:ahead], forward[ahead:]
    stage_passes = [stage_pass for pair in zip(rest, backward) for stage_pass in pair]
    return [*first, *stage_passes, *backward[len(rest) :]]


def _is_ready(stage_pass: _Turn, issued: Collection[_Turn], num_stages: int) -> bool:
    before = _before(stage_pass, num_stages)
    return before is None or before in issued


def _before(stage_pass: _Turn, num_stages: int) -> _Turn | None:
    """What hands a turn what it works on."""
    if not stage_pass.is_back:
        return stage_pass._replace(stage=stage_pass.stage - 1) if stage_pass.stage else None
    is_last = stage_pass.stage == num_stages - 1
    return (
        stage_pass._replace(is_back=False)
        if is_last
        else stage_pass._replace(stage=stage_pass.stage + 1)
    )


def _task(stage_pass: _Turn, issued: dict[_Turn, int], num_stages: int) -> Task:
    before = _before(stage_pass, num_stages)
    op = Op("stage", Stream(f"stage {stage_pass.stage}"))
    of = (issued[stage_pass._replace(is_back=False)],) if stage_pass.is_back else ()
    reads = () if before is None else (_handed(before),)
    chunk_range = ChunkRange(stage_pass.sample, stage_pass.sample + 1)
    return Task(op, stage_pass.stage, chunk_range, reads, (_handed(stage_pass),), of)


def _handed(stage_pass: _Turn) -> Value:
    kind = HANDED_BACK if stage_pass.is_back else HANDED_ON
    return Value(kind, stage_pass.stage, ChunkRange(stage_pass.sample, stage_pass.sample + 1))
