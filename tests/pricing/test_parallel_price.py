# SPDX-License-Identifier: Apache-2.0
"""Tensor, context and pipeline parallelism, against seconds and bytes added up by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_moe_ext.core.hardware import Hardware, Link
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.planning.candidates import Priced, Way, price_way
from ds_moe_ext.planning.described_run import DescribedRun
from ds_moe_ext.planning.layer_seconds import NO_HOST
from ds_moe_ext.planning.model_shape import ModelParallel, Training, of_config
from ds_moe_ext.strategies.ep import ExpertParallel
from tests.pricing.models import cluster, tiny
from tests.pricing.test_model_shape import DEEPSEEK

# As in test_described_run.py: attention 4 x 4 x 4, router 4 x 4, norms 2 x 4; an expert 3 x 4 x 8.
ATTENTION, WHOLE, EXPERT, TABLE = 64, 16 + 8, 96, 10 * 4
TOKENS = 8
START_S, NEAR, FAR, STATE = 0.25, 500.0, 200.0, 4 * 2


def linked(**given: Any) -> Hardware:
    links = {
        "intra": Link(bytes_per_s=NEAR, latency_s=START_S),
        "inter": Link(bytes_per_s=FAR, latency_s=START_S),
    }
    return cluster(**{**links, **given})


def run_on(
    grid: Grid, hardware: Hardware | None = None, model: Any = None, **given: Any
) -> DescribedRun:
    parallel = ModelParallel(**given.pop("parallel", {}))
    num_ranks = grid.world_size * parallel.pipeline
    training = Training(num_ranks=num_ranks, length=TOKENS, parallel=parallel, **given)
    return DescribedRun(
        hardware=hardware or linked(),
        shape=model or tiny(),
        training=training,
        grid=grid,
        own_host=NO_HOST,
    )


TENSOR: Any = {"parallel": {"tensor": 2}}


def test_tensor_parallel_ranks_divide_dense_parts_and_gather_tokens() -> None:
    alone, run = run_on(Grid(4, 4)), run_on(Grid(4, 4), **TENSOR)
    assert run.dense_s([0]) == alone.dense_s([0]) / 2
    assert run.training.tokens == TOKENS / 2
    each_s = START_S + TOKENS * STATE / 2 / NEAR  # half of the tokens is there
    sent_s = [2 * each_s + each_s, 2 * each_s]  # the first layer's with the embedding's
    assert run.window_s == pytest.approx([run.dense_s([0]) + s for s in sent_s])
    assert run.back_window_s == pytest.approx([2 * run.dense_s([0]) + s for s in sent_s])
    assert run.head_sent_s == pytest.approx((each_s, each_s))
    again = run_on(Grid(4, 4), recomputes=True, **TENSOR)
    twice = [2 * 2 * each_s + each_s, 2 * 2 * each_s]
    assert again.back_window_s == pytest.approx([3 * run.dense_s([0]) + s for s in twice])


def test_shared_experts_and_dense_mlps_gather_too() -> None:
    each_s = START_S + TOKENS * STATE / 2 / NEAR
    shared = tiny(shared_expert_intermediate_size=8)
    run = run_on(Grid(4, 4), model=shared, **TENSOR)
    assert run.window_s[1] - run.dense_s([1]) == pytest.approx(4 * each_s)
    first = tiny(num_hidden_layers=3, first_k_dense_replace=1)
    run = run_on(Grid(4, 4), model=first, **TENSOR)
    assert run.window_s[0] - run.dense_s([0, 1]) == pytest.approx((1 + 4 + 2) * each_s)


def test_latent_attention_gathers_latent_vectors_by_weights_that_all_have() -> None:
    model = of_config({**DEEPSEEK, "num_hidden_layers": 4}, "it")
    run = run_on(Grid(4, 4), model=model, **TENSOR)
    sent_s = run.window_s[0] - run.dense_s(range(4))
    attention = 4 * START_S + TOKENS * 2 / 2 / NEAR * (1536 + 512 + 64 + 7168)
    mlp = 2 * START_S + 2 * TOKENS * 2 / 2 / NEAR * 7168
    embedding = START_S + TOKENS * 2 / 2 / NEAR * 7168
    assert sent_s == pytest.approx(4 * (attention + mlp) + embedding)
    down = 7168 * (1536 + 512 + 64)
    router, norms = 7168 * 256, 2 * 7168
    whole, half = model.dense_weights(3), model.dense_weights(3, 2)
    assert half - (down + router + norms) == (whole - (down + router + norms)) / 2


def test_dense_gradients_and_memory_are_those_of_a_part() -> None:
    """Each of a node's two ranks has another half, so that both sums cross its cards."""
    run = run_on(Grid(4, 4), recomputes=True, **TENSOR)
    held = 2 * (ATTENTION / 2 + WHOLE) + 2 * TABLE / 2
    assert run.shape.held_dense_weights(2) == held
    dense_s = START_S + held * 2 * 2 * 0.5 * 2 / FAR
    stepped = held / 2 + 2 * EXPERT
    assert run.end_s(0) == pytest.approx(dense_s + 30 * stepped / 1e4)
    use = run.memory(5)
    assert use.weights == use.gradients == 2 * (held + 2 * EXPERT)
    assert use.optimizer == 12 * stepped
    tokens = TOKENS / 2
    rows = 5 * (8 + 3 * 8) * 2 + tokens * 2 * STATE
    assert use.activations == 2 * tokens * STATE + 16 * tokens * STATE + rows + tokens * 10 * 6
    assert use.total < run_on(Grid(4, 4), recomputes=True).memory(5).total


@pytest.mark.parametrize(
    ("multiply_adds_per_s", "forward_s", "backward_s"),
    [
        # A turn: 4 tokens' keys and values, 8 wide; attention to 4 of 8 tokens takes none.
        (1e12, 0.25 + 4 * 8 * 2 / 500, 0.25 + 2 * 4 * 8 * 2 / 500),
        (1.0, 0.0, 0.0),  # all is hidden
        (400.0, 0.25 + 0.128 - 0.16, 0.25 + 2 * (0.128 - 0.16)),
    ],
)
def test_a_ring_hides_behind_attention(
    multiply_adds_per_s: float, forward_s: float, backward_s: float
) -> None:
    hardware = replace(linked(), device=cluster(multiply_adds_per_s).device)
    run = run_on(Grid(4, 4), hardware, parallel={"context": 2})
    assert run.training.tokens == 4
    computed_s = run.dense_s([0])
    assert run.window_s[0] == pytest.approx(computed_s + forward_s)
    assert run.back_window_s[0] == pytest.approx(2 * computed_s + backward_s)
    # Dense weights are whole, and all four ranks sum their gradients.
    alone = run_on(Grid(4, 4), hardware)
    assert run.end_s(0) == alone.end_s(0)


def test_a_ring_beyond_a_node() -> None:
    """Its two tensor parallel ranks cross the node's card together."""
    hardware = replace(linked(), device=cluster(1e12).device)
    run = run_on(Grid(4, 4), hardware, parallel={"context": 2, "tensor": 2})
    gathers_s = 2 * (START_S + 4 * STATE / 2 / NEAR)
    turn_s = START_S + 2 * (TOKENS / 4 * 8 * 2) / FAR
    assert run.window_s[1] == pytest.approx(run.dense_s([1]) + gathers_s + turn_s)


# Pipelines.


def rows_of(run: DescribedRun, num_layers: int = 2) -> np.ndarray:
    """Even, of four steps."""
    each = run.training.tokens * run.shape.top_k // run.shape.num_experts
    return np.full((4, num_layers, run.grid.world_size, run.shape.num_experts), each)


def priced(run: DescribedRun, num_layers: int = 2) -> Priced:
    return price_way(Way("ep", ExpertParallel(), run.grid), run, rows_of(run, num_layers))


PARTS = ("computed_s", "imbalance_s", "exposed_s", "host_s", "end_s", "bubble_s")


@pytest.mark.parametrize("micro_batches", [1, 2, 6])
def test_even_stages_take_a_pass_more_each(micro_batches: int) -> None:
    """Two stages of a layer each, without embedding and head: a pass is that of one layer, a send
    takes ``send_s``."""
    model = tiny(vocab_size=0)
    run = run_on(Grid(2, 2), model=model, micro_batches=micro_batches, parallel={"pipeline": 2})
    one = run_on(Grid(2, 2), model=tiny(vocab_size=0, num_hidden_layers=1))
    alone = priced(one, 1)
    pass_s = alone.step_s - alone.mean("end_s")
    send_s = START_S + TOKENS * STATE * 2 / FAR
    price = priced(run)
    # There is a send before stage 1 starts, then one behind each of its passes.
    whole_s = (micro_batches + 1) * (pass_s + send_s)
    assert price.step_s == pytest.approx(whole_s + alone.mean("end_s"))
    assert price.mean("bubble_s") == pytest.approx(pass_s + send_s)
    assert price.mean("exposed_s") == pytest.approx(
        micro_batches * (alone.mean("exposed_s") + send_s)
    )
    assert sum(map(price.mean, PARTS)) == pytest.approx(price.step_s)
    assert len(price.plans) == 2 and price.tokens == 2 * TOKENS * micro_batches


def test_the_head_makes_the_last_stage_the_busiest_and_passes_ahead_the_first_the_fullest() -> None:
    run = run_on(Grid(2, 2), micro_batches=4, parallel={"pipeline": 2})
    price = priced(run)
    first, last = (chunks[0].run for chunks in run.stages)
    assert first.head_s == 0 and last.head_s == run.head_s
    assert first.shape.all_dense_weights == last.shape.all_dense_weights
    assert price.steps[-1].stage == 1
    rows = TOKENS * 2 * (8 + 3 * 8) * 2 + TOKENS * 2 * STATE
    kept = 16 * TOKENS * STATE + rows
    logits = TOKENS * 10 * 6
    assert [each.activations(2 * TOKENS).kept for each in (first, last)] == [kept, kept + logits]
    assert price.fullest == 0 and price.memory.activations == 2 * kept
    held = ATTENTION + WHOLE + TABLE + 2 * EXPERT
    assert price.memory.weights == 2 * held


def test_stages_without_experts_and_interleaved_chunks() -> None:
    """The first two of four layers have none: with two chunks each stage has one of them, with one
    chunk the first stage has both."""
    model = tiny(num_hidden_layers=4, first_k_dense_replace=2)
    for chunks in (1, 2):
        parallel = {"pipeline": 2, "chunks": chunks}
        run = run_on(Grid(2, 2), model=model, micro_batches=4, recomputes=True, parallel=parallel)
        price = priced(run)
        assert len(price.plans) == 2 and price.mean("bubble_s") > 0
        assert sum(map(price.mean, PARTS)) == pytest.approx(price.step_s)
        experts = [[len(chunk.run.shape.moe_layers) for chunk in stage] for stage in run.stages]
        assert experts == ([[0], [2]] if chunks == 1 else [[0, 1], [0, 1]])
    # Layers run again wherever they are.
    first = run_on(
        Grid(2, 2), model=model, recomputes=True, parallel={"pipeline": 2}
    ).stages[0][0].run  # fmt: skip
    conditions = first.conditions()
    assert conditions.head_computed_s == pytest.approx(4 * first.dense_s([0, 1]))


def test_one_of_each_is_none() -> None:
    """Sizes of 1 are what is priced without them, to the last digit."""
    sizes: Any = {"tensor": 1, "context": 1, "pipeline": 1}
    one, none = (priced(run_on(Grid(4, 4), **given)) for given in ({"parallel": sizes}, {}))
    assert [one.mean(part) for part in PARTS] == [none.mean(part) for part in PARTS]
    assert one.memory == none.memory and one.mean("bubble_s") == 0


def test_more_tensor_parallelism_takes_less_memory_and_less_dense_computing() -> None:
    hardware = linked(num_nodes=1, ranks_per_node=4)
    runs = [run_on(Grid(4, 4), hardware, parallel={"tensor": size}) for size in (1, 2, 4)]
    totals = [run.memory(0).total for run in runs]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 3
    dense_s = [run.dense_s([0, 1]) for run in runs]
    assert dense_s == [dense_s[0], dense_s[0] / 2, dense_s[0] / 4]
