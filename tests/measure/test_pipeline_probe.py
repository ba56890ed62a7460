# SPDX-License-Identifier: Apache-2.0
"""Lines of a run's own ranks: what is sent at which size, by a clock of the test's own, and by a
real one. Four ranks, two ETP groups of two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.core import comm
from ds_moe_ext.core.all_to_all import Channel
from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.planning.bench import Bench
from ds_moe_ext.planning.exchange_costs import PipelineLines
from ds_moe_ext.planning.prices import FREE, Line
from ds_moe_ext.planning.probe import STEPS, Paths, Payload, measure_pipeline, quick_bench
from ds_moe_ext.schedule.task import INTER, INTRA
from tests.ranks import pool_of

CPU = torch.device("cpu")
PAYLOAD = Payload(
    num_rows=64, width=5, row_dtype=torch.bfloat16, num_elements=80, gradient_dtype=torch.float32
)
START_S, STEP_S = 3e-3, 1e-3


class SteadyClock:
    """Does the work; says a start and as many steps as the sweep's sizes have, in their order."""

    def __init__(self) -> None:
        self.expected = cycle(STEPS)

    def seconds(self, ready: Callable[[], object], work: Callable[[], object]) -> float:
        ready()
        work()
        return START_S + STEP_S * next(self.expected)


class Log:
    """An all-to-all that keeps what it was asked for."""

    def __init__(self) -> None:
        self.sizes: list[tuple[torch.Size, tuple[int, ...]]] = []

    def __call__(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        self.sizes.append((rows.shape, tuple(sent)))
        return comm.all_to_all_rows(rows, sent, received, group)


class Found(NamedTuple):
    """Of one rank."""

    lines: PipelineLines
    between: set[tuple[torch.Size, tuple[int, ...]]]
    inside: set[tuple[torch.Size, tuple[int, ...]]]
    computed: set[int]


def steady(rank: int, world_size: int) -> Found:
    layout = ParallelLayout.build(Grid(4, 2, 2), [("ep", INTER), ("esp", INTRA)])
    between, inside, computed = Log(), Log(), []

    def forward(num_rows: int) -> None:
        assert not torch.is_grad_enabled()
        computed.append(num_rows)

    paths = Paths(
        ep_ranks=Channel(layout.group("ep", INTER), between),
        ep_rank=Channel(layout.group("esp", INTRA), inside),
        dense=dist.group.WORLD,
    )
    bench = Bench(SteadyClock(), CPU, num_warm_ups=1, num_repeats=3)
    lines = measure_pipeline(paths, PAYLOAD, forward, bench)
    return Found(lines, set(between.sizes), set(inside.sizes), set(computed))


def assert_line(line: Line, least_units: float) -> None:
    assert line.alpha_s == pytest.approx(START_S)
    assert line.beta_s == pytest.approx(STEP_S / least_units)
    assert line.r_squared == pytest.approx(1)


def test_lines_go_by_the_units_that_they_say() -> None:
    """The least size is an eighth: 8 rows to send, 4 to each of two EP ranks; 16 in an ETP group of
    two."""
    found = pool_of(4).run(steady)
    assert [each.lines for each in found] == [found[0].lines] * 4
    lines, row_bytes = found[0].lines, 5 * 2
    assert_line(lines.all_to_all, 8 * row_bytes)
    assert_line(lines.all_gather, 16 * row_bytes)
    assert_line(lines.reduce_scatter, 16 * row_bytes)
    assert_line(lines.expert, 16)
    assert_line(lines.all_reduce, 10)
    for each in found:
        assert each.between == {(torch.Size((8 * n, 5)), (4 * n, 4 * n)) for n in STEPS}
        assert each.inside == {(torch.Size((16 * n, 5)), (8 * n, 8 * n)) for n in STEPS}
        assert each.computed == {16 * n for n in STEPS}


def alone(rank: int, world_size: int, has_groups: bool) -> PipelineLines:
    layout = ParallelLayout.build(Grid(2, 1), [("ep", INTER)])
    lone = layout.group("ep", INTER)
    paths = Paths(Channel(lone), Channel(lone), lone) if has_groups else Paths(None, None, None)
    bench = Bench(SteadyClock(), CPU, num_warm_ups=0, num_repeats=3)
    with mock.patch.object(dist, "all_to_all_single", side_effect=AssertionError("communicated")):
        return measure_pipeline(paths, PAYLOAD, lambda num_rows: None, bench)


@pytest.mark.parametrize("has_groups", [False, True])
def test_one_rank_sends_nothing(has_groups: bool) -> None:
    for lines in pool_of(2).run(alone, has_groups):
        shared = (lines.all_to_all, lines.all_gather, lines.reduce_scatter, lines.all_reduce)
        assert shared == (FREE,) * 4
        assert_line(lines.expert, 8)


def real(rank: int, world_size: int, num_rows: int) -> PipelineLines:
    layout = ParallelLayout.build(Grid(4, 2, 2), [("ep", INTER), ("esp", INTRA)])
    paths = Paths(
        Channel(layout.group("ep", INTER)), Channel(layout.group("esp", INTRA)), dist.group.WORLD
    )
    payload = Payload(num_rows, 64, torch.float32, 1000 * num_rows, torch.float32)
    weight = torch.randn(64, 256)

    def forward(most: int) -> Tensor:
        return torch.randn(most, 64) @ weight

    return measure_pipeline(paths, payload, forward, quick_bench(CPU))


@pytest.mark.parametrize("num_rows", [1, 512])
def test_all_ranks_find_the_same_by_their_own_clocks(num_rows: int) -> None:
    found = pool_of(4).run(real, num_rows)
    assert found == [found[0]] * 4
    for line in vars(found[0]).values():
        assert line.alpha_s + line.beta_s > 0
        assert line.r_squared is not None
        assert line.r_squared <= 1
