# SPDX-License-Identifier: Apache-2.0
"""Rank arithmetic, and how long communicators wait."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.core import comm, layout
from ds_moe_ext.core.comm import timeout_of
from ds_moe_ext.core.layout import AXES, Grid, ParallelLayout
from ds_moe_ext.schedule.task import INTRA
from ds_moe_ext.testing import TIMEOUT_S
from tests.ranks import pool_of

# Ranks [edp, ep, esp] of 8 ranks, the last axis fastest.
WORKED = {
    # One grid of 8 EP ranks: nobody shares an expert with anybody.
    Grid(8, 8): {
        "edp": [[0], [1], [2], [3], [4], [5], [6], [7]],
        "ep": [[0, 1, 2, 3, 4, 5, 6, 7]],
        "esp": [[0], [1], [2], [3], [4], [5], [6], [7]],
    },
    # Two grids of 4 EP ranks: ranks 0-3 and 4-7; rank r and r + 4 hold the same experts.
    Grid(8, 4): {
        "edp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "ep": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "esp": [[0], [1], [2], [3], [4], [5], [6], [7]],
    },
    # One grid of 4 EP ranks of 2 ranks: EP ranks 01, 23, 45, 67.
    Grid(8, 4, 2): {
        "edp": [[0], [1], [2], [3], [4], [5], [6], [7]],
        "ep": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "esp": [[0, 1], [2, 3], [4, 5], [6, 7]],
    },
    # Two grids of 2 EP ranks of 2 ranks: EP ranks 01, 23 and 45, 67.
    Grid(8, 2, 2): {
        "edp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "ep": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "esp": [[0, 1], [2, 3], [4, 5], [6, 7]],
    },
    # Every rank has all experts.
    Grid(8, 1): {
        "edp": [[0, 1, 2, 3, 4, 5, 6, 7]],
        "ep": [[0], [1], [2], [3], [4], [5], [6], [7]],
        "esp": [[0], [1], [2], [3], [4], [5], [6], [7]],
    },
}


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("grid", WORKED, ids=str)
def test_ranks_along_an_axis(grid: Grid, axis: str) -> None:
    assert grid.along(axis) == WORKED[grid][axis]


def test_place_of_a_rank() -> None:
    grid = Grid(8, 2, 2)
    # Rank 5 = 1 * 4 + 0 * 2 + 1.
    assert [grid.index(axis, 5) for axis in AXES] == [1, 0, 1]
    assert [grid.index("ep", rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert grid.ranks.shape == (2, 2, 2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((8, 3), "3 EP ranks of 1 rank(s) do not divide 8 ranks"),
        ((8, 4, 4), "4 EP ranks of 4 rank(s) do not divide 8 ranks"),
        ((4, 8), "8 EP ranks of 1 rank(s) do not divide 4 ranks"),
        ((1, 2), "choose sizes whose product divides 1"),
    ],
)
def test_sizes_that_do_not_fill_the_world(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Grid(*sizes)
    assert message in str(caught.value)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_every_axis_parts_the_ranks(num_grids: int, num_ep_ranks: int, etp_size: int) -> None:
    grid = Grid(num_grids * num_ep_ranks * etp_size, num_ep_ranks, etp_size)
    lengths = {"edp": num_grids, "ep": num_ep_ranks, "esp": etp_size}
    for axis, length in lengths.items():
        lists = grid.along(axis)
        assert sorted(rank for ranks in lists for rank in ranks) == list(range(grid.world_size))
        for ranks in lists:
            assert [grid.index(axis, rank) for rank in ranks] == list(range(length))
            others = [other for other in AXES if other != axis]
            places = {tuple(grid.index(other, rank) for other in others) for rank in ranks}
            assert len(places) == 1


def _timeout(rank: int, world_size: int) -> timedelta:
    built = ParallelLayout.build(Grid(world_size, world_size), [("ep", INTRA)])
    return timeout_of(built.group("ep", INTRA))


def test_communicators_wait_as_long_as_the_world() -> None:
    assert pool_of(2).run(_timeout) == [timedelta(seconds=TIMEOUT_S)] * 2


class _Nccl:
    """In place of ``ProcessGroupNCCL``, which torch for a CPU lacks."""

    class Options:
        """Of one communicator."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = timedelta(minutes=10)

    def __init__(self) -> None:
        self.options = _Nccl.Options()
        self.options._timeout = timedelta(seconds=77)


@pytest.mark.parametrize("has_nccl", [True, False])
def test_on_nccl_what_a_stream_sends_goes_first(has_nccl: bool) -> None:
    """With the timeout of the world; a communicator keeps its options, so that each has its own."""
    backend = _Nccl() if has_nccl else object()
    world = SimpleNamespace(
        _device_types=[torch.device("cuda")], _get_backend=lambda device: backend
    )
    fake = SimpleNamespace(
        group=SimpleNamespace(WORLD=world), is_nccl_available=lambda: True, ProcessGroupNCCL=_Nccl
    )
    with mock.patch.object(comm, "dist", fake):
        options, other = comm.urgent(), comm.urgent()
    if not has_nccl:
        assert options is None
        return
    assert options.is_high_priority_stream
    assert options._timeout == timedelta(seconds=77)
    assert options is not other


def _asked(rank: int, world_size: int) -> tuple[object, int, int]:
    asked: list[None] = []
    with mock.patch.object(comm, "urgent", lambda: asked.append(None)):
        ParallelLayout.build(Grid(world_size, 1), [("ep", INTRA), ("edp", INTRA)]).close()
        of_streams = len(asked)
        layout.group_among([list(range(world_size))])
    return comm.urgent(), of_streams, len(asked)


def test_communicators_of_streams_alone_go_first() -> None:
    # Two ranks, each a grid: two communicators along the axis of EP ranks, one between the grids.
    assert pool_of(2).run(_asked) == [(None, 3, 3)] * 2
