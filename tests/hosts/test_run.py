"""What a person is told at the start of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_moe_ext.hosts.run import start_table
from ds_moe_ext.layout import Grid
from ds_moe_ext.settings import read_settings


@pytest.mark.parametrize(
    ("block", "grid", "title"),
    [
        ({}, Grid(4, 2), "strategy ep, 4 ranks = 2 x 2 cells, dropless"),
        ({"capacity_factor": 1.5}, Grid(4, 4), "strategy ep, 4 ranks = 1 x 4 cells, x1.5"),
        (
            {"strategy": "esp", "balance": "fssdp", "gate": {"type": "sigmoid_top_k", "top_k": 1}},
            Grid(8, 2, 2),
            "strategy esp over fssdp, 8 ranks = 2 x 2 cells of 2 ranks, dropless, gate "
            "SigmoidTopK(top_k=1)",
        ),
    ],
)
def test_the_title_says_how_layers_run(block: dict[str, Any], grid: Grid, title: str) -> None:
    settings, _ = read_settings({"ds_moe_ext": block})
    run: Any = SimpleNamespace(blueprint=SimpleNamespace(settings=settings, grid=grid), layers=())
    assert start_table(run).title == f"ds_moe_ext: {title}"
