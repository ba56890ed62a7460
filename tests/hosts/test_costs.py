"""What planners know of a run's costs is the same on all ranks."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import pool_of


def _slowest(rank: int, world_size: int) -> tuple[float, float]:
    from ds_moe_ext.hardware import Link
    from ds_moe_ext.hosts.costs import slowest

    measured = Link(bytes_per_s=10.0 * (rank + 1), latency_s=0.25 * rank, r_squared=0.5)
    link = slowest(measured, torch.device("cpu"))
    return link.bytes_per_s, link.latency_s


def test_the_places_of_a_cell_reckon_with_one_link() -> None:
    found = pool_of(2).run(_slowest)
    assert found[0] == found[1] == (pytest.approx(10.0), 0.25)
