# SPDX-License-Identifier: Apache-2.0
"""Two steps of Mixtral 8x7B on 8 nodes of 8 H100, priced by hand, term by term (docs/price.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_moe_ext.commands.price.inputs import read_clusters
from ds_moe_ext.commands.price.market import Case
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.planning.candidates import Way, price_way
from ds_moe_ext.planning.layer_seconds import CPU_HOST
from ds_moe_ext.planning.model_shape import ModelParallel, Training, of_config
from ds_moe_ext.strategies.ep import ExpertParallel
from tests.pricing.test_model_shape import MIXTRAL

PRODUCTS = 0.6 * 989.4e12 / 2  # multiply-adds a second
MEMORY, NEAR, FAR = 0.8 * 3.35e12, 0.8 * 450e9, 0.8 * 400e9  # bytes a second
TOKENS, WIDTH, LAYERS, PASSES, OWNERS = 4096, 4096, 32, 8, 8
DENSE = 4096 * 128 * 2 * (32 + 8) + 4096 * 8 + 2 * 4096  # attention, router, norms
EXPERT = 3 * 4096 * 14336
ROWS = 2 * TOKENS  # of a rank, and of an EP rank where loads are even
STATE = 2 * WIDTH  # bytes of a row


def test_the_worked_example() -> None:
    training = Training(
        num_ranks=64, length=TOKENS, micro_batches=PASSES, zero_stage=1, recomputes=True
    )
    case = Case(tuple(read_clusters(["dgx_h100"], [8])), of_config(MIXTRAL, "it"), training)
    way = Way("ep", ExpertParallel(), Grid(64, 8))
    run = replace(case.run(way.grid), own_host=CPU_HOST)
    priced = price_way(way, run, case.rows("balanced").rows_ILCE)

    window_s = TOKENS * ((DENSE + TOKENS / 2 * 2 * WIDTH) / PRODUCTS + 16 * STATE / MEMORY)
    moved_s = 2 * STATE / MEMORY
    expert_s = ROWS * (EXPERT / PRODUCTS + 2 * moved_s)
    head_s = TOKENS * 32000 * (WIDTH / PRODUCTS + 8 / MEMORY)
    of_layer_s = 4 * window_s + 4 * expert_s + 3 * ROWS * moved_s
    computed_s = PASSES * (LAYERS * of_layer_s + 3 * head_s)
    assert priced.mean("computed_s") == pytest.approx(computed_s)
    assert priced.mean("imbalance_s") == pytest.approx(0, abs=1e-9)

    exchange_s = 15e-6 + ROWS * 7 / 8 * STATE / NEAR
    assert priced.mean("exposed_s") == pytest.approx(PASSES * LAYERS * (6 * exchange_s + 15e-6))
    assert priced.mean("host_s") == pytest.approx(PASSES * (320e-6 + LAYERS * 35e-6))

    all_dense, held = LAYERS * DENSE + 2 * 32000 * WIDTH, LAYERS * EXPERT
    dense_s = 15e-6 + 2 * all_dense * 2 * 7 / 8 / FAR
    owners_s = 15e-6 + 2 * held * 2 * 7 / 8 * 8 / FAR
    stepped = all_dense / 64 + held / OWNERS
    end_s = dense_s + owners_s + 30 * stepped / MEMORY
    assert priced.mean("end_s") == pytest.approx(end_s)

    assert priced.memory.weights == priced.memory.gradients == 2 * (all_dense + held)
    assert priced.memory.optimizer == pytest.approx(12 * stepped)
    rows = ROWS * (2 * WIDTH + 3 * 14336) * 2 + ROWS * STATE
    kept = LAYERS * TOKENS * STATE + 16 * TOKENS * STATE + rows + TOKENS * 32000 * 6
    assert priced.memory.activations == pytest.approx(kept)

    terms_s = (computed_s, priced.mean("exposed_s"), priced.mean("host_s"), end_s)
    assert [round(1e3 * seconds, 1) for seconds in terms_s] == [6207.9, 277.4, 11.5, 519.0]
    assert f"{1e3 * priced.step_s:,.1f}" == "7,015.8"
    assert f"{priced.tokens_per_s:,.0f}" == "298,917"


def test_the_worked_example_of_a_pipeline() -> None:
    """Tensor parallelism 2, two stages of 16 layers, experts in 4 owners."""
    training = Training(
        num_ranks=64,
        length=TOKENS,
        micro_batches=PASSES,
        zero_stage=1,
        recomputes=True,
        parallel=ModelParallel(tensor=2, pipeline=2),
    )
    case = Case(tuple(read_clusters(["dgx_h100"], [8])), of_config(MIXTRAL, "it"), training)
    way = Way("ep", ExpertParallel(), Grid(32, 8))
    run = replace(case.run(way.grid), own_host=CPU_HOST)
    priced = price_way(way, run, case.rows("balanced").rows_ILCE)

    layers, tokens, rows = LAYERS // 2, TOKENS // 2, ROWS // 2
    moved_s = 2 * STATE / MEMORY
    dense_s = tokens * ((DENSE + TOKENS / 2 * 2 * WIDTH) / PRODUCTS + 16 * STATE / MEMORY)
    expert_s = rows * (EXPERT / PRODUCTS + 2 * moved_s)
    ordered_s = rows * moved_s
    head_s = tokens * 32000 * (WIDTH / PRODUCTS + 8 / MEMORY)
    gather_s = 15e-6 + TOKENS / 2 * STATE / NEAR  # and a scatter
    exchange_s = 15e-6 + rows * 7 / 8 * STATE / NEAR
    send_s = 15e-6 + 8 * tokens * STATE / FAR
    host_s = 320e-6 + layers * 35e-6

    moved = 2 * gather_s + 2 * exchange_s  # forward, and each of backward's two
    forward_s = layers * (dense_s + expert_s + ordered_s + moved + 15e-6) + gather_s + host_s
    back_s = layers * (3 * dense_s + 3 * expert_s + 2 * ordered_s + 2 * moved) + gather_s
    held = layers * EXPERT
    own = layers * (DENSE - 4096 * 128 * (32 + 8)) + 32000 * WIDTH / 2
    sums_s = 2 * 15e-6 + 2 * 2 * 3 / 4 * (2 * own + 8 * held) / FAR
    end_s = sums_s + 30 * (own / 16 + held / 4) / MEMORY
    pass_s = forward_s + back_s + 3 * head_s + send_s
    step_s = forward_s + send_s + PASSES * pass_s + back_s + end_s

    assert priced.step_s == pytest.approx(step_s)
    computed_s = layers * (4 * dense_s + 4 * expert_s + 3 * ordered_s) + 3 * head_s
    assert priced.mean("computed_s") == pytest.approx(PASSES * computed_s)
    sent_s = layers * (3 * moved + 15e-6) + 2 * gather_s + send_s
    assert priced.mean("exposed_s") == pytest.approx(PASSES * sent_s)
    assert priced.mean("host_s") == pytest.approx(PASSES * host_s)
    assert priced.mean("end_s") == pytest.approx(end_s)
    assert priced.mean("bubble_s") == pytest.approx(forward_s + send_s + back_s)

    # Stage 1, with the logits of one pass; stage 0 keeps two passes, of one state a layer.
    assert priced.fullest == 1
    assert priced.memory.weights == priced.memory.gradients == 2 * (own + held)
    again = rows * (2 * WIDTH + 3 * 14336) * 2 + rows * STATE + 16 * tokens * STATE
    kept = layers * tokens * STATE + tokens * 32000 * 6
    assert priced.memory.activations == pytest.approx(kept + again)

    own_s = [dense_s, expert_s, ordered_s, head_s, gather_s, exchange_s, send_s]
    own_ms = " ".join(f"{1e3 * seconds:.4f}" for seconds in own_s)
    assert own_ms == "0.5056 2.4810 0.0250 1.1000 0.0616 0.0966 0.4344"
    ends_s = (forward_s, back_s, pass_s, sums_s, end_s - sums_s, end_s)
    ends_ms = " ".join(f"{1e3 * seconds:.1f}" for seconds in ends_s)
    assert ends_ms == "54.4 154.3 212.5 219.0 8.2 227.1"
    parts = ("computed_s", "exposed_s", "host_s", "bubble_s", "step_s")
    parts_ms = " ".join(f"{1e3 * priced.mean(part):,.1f}" for part in parts)
    assert parts_ms == "1,565.2 127.8 7.0 209.2 2,136.4"
    assert f"{priced.tokens_per_s:,.0f}" == "245,408"
