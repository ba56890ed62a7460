# SPDX-License-Identifier: Apache-2.0
"""The order of a pipeline's passes, against Megatron-core's own; and when they run, by hand."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from ds_moe_ext.planning.model_shape import ModelParallel, Training
from ds_moe_ext.planning.step_price import Pass, most_kept, order_of, run_passes

PIPELINES = [(2, 1, 3), (4, 1, 8), (4, 1, 2), (2, 2, 4), (4, 2, 8), (3, 2, 3), (4, 3, 16)]


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), PIPELINES)
def test_the_order_is_megatron_s(stages: int, chunks: int, micro_batches: int) -> None:
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    parallel = ModelParallel(pipeline=stages, chunks=chunks)
    table = schedules.get_schedule_table(micro_batches, chunks, stages)
    for stage in range(stages):
        group = SimpleNamespace(size=lambda: stages, rank=lambda at=stage: at)
        reported = SimpleNamespace(
            pp_group=group,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        )
        total, _, warmup, left = schedules.get_pp_rank_microbatches(
            micro_batches, chunks, stages, p2p_communicator=reported
        )
        order = order_of(stage, parallel, micro_batches)
        forward = [(each.chunk, each.micro_batch) for each in order if not each.is_back]
        back = [(each.chunk, each.micro_batch) for each in order if each.is_back]
        assert forward == [(chunk, number) for number, chunk in table] and len(forward) == total
        assert back == [(chunks - 1 - chunk, number) for number, chunk in table]
        sides = [each.is_back for each in order]
        assert sides == [False] * warmup + [False, True] * left + [True] * warmup


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), PIPELINES)
def test_even_stages(stages: int, chunks: int, micro_batches: int) -> None:
    """As many passes as there are, and those of the stages before: a part of one where chunks
    interleave (Megatron-LM's formula)."""
    parallel = ModelParallel(pipeline=stages, chunks=chunks)

    def seconds(stage: int, each: Pass) -> float:
        return (20.0 if each.is_back else 10.0) / chunks

    stage_passes = run_passes(parallel, micro_batches, seconds, 0.0)
    assert len(stage_passes) == 2 * stages * chunks * micro_batches
    whole_s = 30.0 * (micro_batches + (stages - 1) / chunks)
    assert max(stage_pass.end_s for stage_pass in stage_passes) == pytest.approx(whole_s)
    for before, after in pairwise(stage_passes):
        assert after.stage != before.stage or after.start_s >= before.end_s


def test_unlike_stages_that_send() -> None:
    """Stage 1 starts at 1.5, runs two passes of 9, each of which sends half a second; its last
    gradients come to stage 0 at 20.5."""
    parallel = ModelParallel(pipeline=2)

    def seconds(stage: int, each: Pass) -> float:
        return (1.0, 3.0)[stage] * (2 if each.is_back else 1)

    stage_passes = {(stage, each): (start_s, end_s)
             for stage, each, start_s, end_s in run_passes(parallel, 2, seconds, 0.5)}  # fmt: skip
    assert stage_passes[0, Pass(0, 0, False)] == (0.0, 1.5)
    assert stage_passes[0, Pass(0, 1, False)] == (1.5, 3.0)
    assert stage_passes[1, Pass(0, 0, False)] == (1.5, 4.5)
    assert stage_passes[1, Pass(0, 0, True)] == (4.5, 11.0)
    assert stage_passes[0, Pass(0, 0, True)] == (11.0, 13.0)
    assert stage_passes[1, Pass(0, 1, True)] == (14.0, 20.5)
    assert stage_passes[0, Pass(0, 1, True)] == (20.5, 22.5)


def test_interleaved_stages_send_meanwhile() -> None:
    parallel = ModelParallel(pipeline=2, chunks=2)
    stage_passes = run_passes(parallel, 2, lambda stage, each: 1.0, 0.25)
    at = {(stage_pass.stage, stage_pass.what): stage_pass for stage_pass in stage_passes}
    assert at[0, Pass(0, 0, False)].end_s == at[0, Pass(0, 1, False)].start_s == 1.0
    assert at[1, Pass(0, 0, False)].start_s == 1.25


def test_what_a_stage_keeps() -> None:
    parallel = ModelParallel(pipeline=4)
    for micro_batches in (2, 8):
        kept = [most_kept(order_of(stage, parallel, micro_batches), [3.0]) for stage in range(4)]
        assert kept == [3.0 * min(micro_batches, 4 - stage) for stage in range(4)]
    # Of two stages in two chunks: the first runs 2 x 1 + 2 passes ahead, and one more.
    interleaved = ModelParallel(pipeline=2, chunks=2)
    assert most_kept(order_of(0, interleaved, 4), [1.0, 10.0]) == 2 + 2 * 10 + 1


def test_layers_of_stages() -> None:
    assert ModelParallel(pipeline=2, chunks=4).layers(8) == [
        [range(each, each + 1) for each in first] for first in ((0, 2, 4, 6), (1, 3, 5, 7))
    ]
    uneven = ModelParallel(pipeline=3, first_layers=1, last_layers=2)
    assert uneven.layers(7) == [[range(1)], [range(1, 5)], [range(5, 7)]]
    assert ModelParallel(pipeline=2, last_layers=1).layers(3) == [[range(2)], [range(2, 3)]]


@pytest.mark.parametrize(
    ("sizes", "layers", "error"),
    [
        ({"pipeline": 2}, 3, r"3 layers do not divide over 2 pipeline stages; give another"),
        ({"pipeline": 4}, 3, r"3 layers do not divide over 4"),
        (
            {"pipeline": 3, "last_layers": 1},
            6,
            r"over 3 pipeline stages but for those of its first and last",
        ),
        ({"pipeline": 2, "first_layers": 2, "last_layers": 2}, 5, r"5 layers do not divide"),
        ({"pipeline": 2, "chunks": 2}, 6, r"a pipeline stage's layers, 3, do not divide into 2"),
        ({"chunks": 2}, 4, r"each stage has 2 chunks, but there is one stage"),
        ({"tensor": 0}, 4, r"tensor of model parallelism is 0; give at least 1"),
    ],
)
def test_layers_that_do_not_divide(sizes: dict[str, int], layers: int, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ModelParallel(**sizes).layers(layers)


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ({"tensor": 3}, r"parallelism is 3 x 1 x 1, which does not divide 8 ranks; give other"),
        ({"context": 8}, r"samples of 24 tokens do not divide over context parallelism 8"),
        ({"tensor": 8, "context": 1}, None),
        ({"pipeline": 4, "chunks": 2}, r"has 6 micro-batches, which 4 interleaved"),
        ({"pipeline": 4}, None),
    ],
)
def test_sizes_that_do_not_divide(sizes: dict[str, int], error: str | None) -> None:
    def training() -> Training:
        return Training(num_ranks=8, length=24, micro_batches=6, parallel=ModelParallel(**sizes))

    if error is None:
        assert training().tokens_of_step == 24 * 6 * 8 // training().parallel.size
        return
    with pytest.raises(ValueError, match=error):
        training()
