# SPDX-License-Identifier: Apache-2.0
"""The example that docs/price.md follows by hand: Mixtral 8x7B on 8 nodes of 8 H100."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_moe_ext.commands.price_inputs import read_clusters
from ds_moe_ext.commands.price_record import Case
from ds_moe_ext.layout import Grid
from ds_moe_ext.pricing.candidates import Way, price_way
from ds_moe_ext.pricing.model_shape import of_config
from ds_moe_ext.pricing.training_shape import Training
from ds_moe_ext.strategies.ep import ExpertParallel
from tests.pricing.test_model_shape import MIXTRAL

PAGE = Path(__file__).parents[2] / "docs" / "price.md"

PRODUCTS = 0.6 * 989.4e12 / 2  # multiply-adds a second
MEMORY, NEAR, FAR = 0.8 * 3.35e12, 0.8 * 450e9, 0.8 * 400e9  # bytes a second
TOKENS, WIDTH, LAYERS, PASSES, HOMES = 4096, 4096, 32, 8, 8
DENSE = 4096 * 128 * 2 * (32 + 8) + 4096 * 8 + 2 * 4096  # attention, router, norms
EXPERT = 3 * 4096 * 14336
ROWS = 2 * TOKENS  # of a rank, and of a cell where loads are even
STATE = 2 * WIDTH  # bytes of a row


def test_the_worked_example() -> None:
    training = Training(
        num_ranks=64, length=TOKENS, micro_batches=PASSES, zero_stage=1, recomputes=True
    )
    case = Case(tuple(read_clusters(["dgx_h100"], [8])), of_config(MIXTRAL, "it"), training)
    way = Way("ep", ExpertParallel(), Grid(64, 8))
    priced = price_way(way, case.run(way.grid), case.rows("balanced").rows_ILCE)

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
    homes_s = 15e-6 + 2 * held * 2 * 7 / 8 * 8 / FAR
    stepped = all_dense / 64 + held / HOMES
    end_s = dense_s + homes_s + 30 * stepped / MEMORY
    assert priced.mean("end_s") == pytest.approx(end_s)

    assert priced.memory.weights == priced.memory.gradients == 2 * (all_dense + held)
    assert priced.memory.optimizer == pytest.approx(12 * stepped)
    rows = ROWS * (2 * WIDTH + 3 * 14336) * 2 + ROWS * STATE
    kept = LAYERS * TOKENS * STATE + 16 * TOKENS * STATE + rows + TOKENS * 32000 * 6
    assert priced.memory.activations == pytest.approx(kept)

    page = PAGE.read_text("utf-8")
    for text in ("6,207.9", "277.4", "11.5", "519.0", "7,015.8", "298,917"):
        assert text in page
    assert f"{1e3 * priced.step_s:,.1f}" == "7,015.8"
    assert f"{priced.tokens_per_s:,.0f}" == "298,917"
