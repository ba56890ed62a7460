# SPDX-License-Identifier: Apache-2.0
"""Steps by the host of a GPU beside one H200's (docs/results.md, host time): 4 layers of
Qwen3-30B-A3B with attention, a rank of eight, collectives that return at once. The sums of the
host's table are from these figures; what waits for what is the simulator's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_moe_ext.commands.price.inputs import read_clusters, read_model
from ds_moe_ext.commands.price.market import Case
from ds_moe_ext.core.hardware import Link
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.planning.candidates import Reached, Way, price_way
from ds_moe_ext.planning.layer_seconds import GPU_HOST, NO_HOST, HostTimes
from ds_moe_ext.planning.model_shape import Training
from ds_moe_ext.strategies.settings import read_settings

LAYERS = 4
ESP: dict[str, Any] = {"expert_sharding_size": 1, "esp": {"degree": 2, "slice_gradients": False}}
FSSDP = {"fssdp": {"reshard_interval": 0, "overlap_degree": 8, "replicas_per_rank": 2}}
MEASURED_MS: dict[str, tuple[float, dict[str, Any]]] = {
    "ep": (6.97, {}),
    "esp": (8.02, ESP),
    "fssdp": (8.00, FSSDP),
    "prophet": (8.51, {"prophet": {"rematerialize": False}}),
}
PRODUCTS = 0.451  # part of the peak, by which kernels of ``ep`` take the 6.06 ms that were measured


def layer_ms(strategy: str, keys: dict[str, Any], host: HostTimes) -> float:
    """Forward and backward of a layer with attention."""
    at_once = Link(bytes_per_s=1e15)
    hardware = replace(read_clusters(["dgx_h100"], [1])[0], intra=at_once, inter=at_once)
    shape = read_model(Path("qwen3_30b_a3b"))
    shape = replace(shape, num_layers=LAYERS, moe_layers=tuple(range(LAYERS)))
    reached = Reached(products=PRODUCTS, links=1.0, start_s=1e-9)
    case = Case((hardware,), shape, Training(num_ranks=8, length=4096), reached)
    way = Way(strategy, _strategy(strategy, keys), Grid(8, 8))
    run = replace(case.run(way.grid), own_host=host)
    step = price_way(way, run, case.rows("zipf:0.6").rows_ILCE).steps[-1]
    return 1e3 * (step.step_s - step.end_s - 3 * run.head_s) / LAYERS


def _strategy(name: str, keys: dict[str, Any]) -> Any:
    return read_settings({"ds_moe_ext": {"enabled": True, "strategy": name, **keys}})[1]


def test_steps_are_within_a_tenth_of_what_one_h200_took() -> None:
    assert layer_ms("ep", {}, NO_HOST) == pytest.approx(6.06, rel=0.01)
    for name, (measured_ms, keys) in MEASURED_MS.items():
        assert layer_ms(name, keys, GPU_HOST) == pytest.approx(measured_ms, rel=0.1), name
