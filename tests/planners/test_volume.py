"""Volumes of the sparse collectives: the spec's golden tests. Pure."""

from __future__ import annotations

import numpy as np
import pytest

from ds_moe_ext.planners.materialize import materialize
from ds_moe_ext.planners.volume import all_reduce_bytes, gather_bytes, sparsity, step_bytes
from tests.planners.plainly import HOME, LOAD_E, NODE_C


@pytest.mark.parametrize("m", [1, 4], ids=["H2", "H1"])
def test_three_of_eight_experts_move(m: int) -> None:
    (target,) = materialize([HOME], [LOAD_E], overlap_degree=3, copies_per_cell=m, node_C=NODE_C)
    assert sparsity(HOME, target) == 3 / 8
    assert gather_bytes(HOME, target, 100.0) == 300
    assert step_bytes(HOME, target, 100.0, rematerializes=False) == 600
    assert step_bytes(HOME, target, 100.0, rematerializes=True) == 900


def test_h10_equation_2() -> None:
    """64 experts of 1 byte, 5 of them with copies: in large groups as much as 2 lambda S = 10."""
    volumes = [all_reduce_bytes([size] * 5, 1.0) for size in (2, 4, 8, 32)]
    assert volumes == pytest.approx([5, 7.5, 8.75, 9.6875])
    assert all_reduce_bytes([10**9] * 5, 1.0) == pytest.approx(10)
    assert all_reduce_bytes([], 1.0) == 0


def test_what_is_held_already_does_not_move() -> None:
    everywhere = HOME.with_copies(np.ones_like(HOME.holds_EC))
    assert sparsity(everywhere, everywhere) == 0
    assert sparsity(HOME, everywhere) == 1
