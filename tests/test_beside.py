# SPDX-License-Identifier: Apache-2.0
"""What is made of a step's rows beside the step: when it begins, and when it counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.queues import Queue

import numpy as np
import pytest
import torch

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner
from ds_moe_ext.hosts.steps.planning import BesideStep
from ds_moe_ext.moe.dispatch import Dispatch, Wire
from ds_moe_ext.moe.observation import RowsSeen
from ds_moe_ext.moe.order import Order, RankCoordinates
from ds_moe_ext.planning.strategy import Destination
from ds_moe_ext.schedule.executor import worker
from ds_moe_ext.schedule.task import ChunkRange

OWNER = Placement.block(2, 2)


def counted(layers: list[RowsSeen], *numbers: int) -> None:
    """Rows of a micro-batch for each number of a layer."""
    for number in numbers:
        layers[number](
            np.ones((2, 2), dtype=np.int64), 1, Destination(OWNER, LocalElseOwner(OWNER, OWNER))
        )
        layers[number].sent()


def beside(make: Callable[[], str]) -> tuple[list[RowsSeen], BesideStep[str]]:
    layers = [RowsSeen(2, 2) for _ in range(2)]
    return layers, BesideStep(layers, make)


def test_it_begins_with_the_last_rows_of_a_step_like_the_one_before() -> None:
    threads: list[str] = []
    layers, step = beside(lambda: threads.append(threading.current_thread().name) or "made")
    counted(layers, 0, 1, 0, 1)
    assert step.taken() is None and not threads  # nobody knew how many there would be
    counted(layers, 0, 1, 0)
    assert not threads
    counted(layers, 1)
    assert step.taken() == "made"
    assert len(threads) == 1 and threads[0].startswith("planning")


def test_it_does_not_count_where_rows_came_after_it() -> None:
    layers, step = beside(lambda: "made")
    counted(layers, 0, 1)
    step.taken()
    counted(layers, 0, 1, 0, 1)  # twice as many as before
    assert step.taken() is None
    counted(layers, 0, 1)  # fewer: it has not begun
    assert step.taken() is None
    counted(layers, 0, 1)
    assert step.taken() == "made"
    assert step.taken() is None  # a step without any rows


def test_rows_that_do_not_count_begin_nothing() -> None:
    layers, step = beside(lambda: "made")
    counted(layers, 0, 1)
    step.taken()
    for layer in layers:
        layer.begin(is_training=False)
    counted(layers, 0, 1)
    assert step.taken() is None


def test_rows_are_sent_once_the_last_chunk_range_is() -> None:
    owner = Placement.block(4, 1)
    destination = Destination(owner, LocalElseOwner(owner, owner))
    order = Order(
        destination, RankCoordinates(0), None, None, gate_may_drop=False, on_rows=lambda *rows: None
    )
    expert_TK = torch.arange(12).remainder(4).view(6, 2)
    (route,), _ = order.forward(ChunkRange(0, 2), expert_TK)
    lines: list[int] = []
    dispatch = Dispatch(Wire(None), Wire(None), sent=lambda: lines.append(len(lines)))
    for chunk_range, times in ((ChunkRange(0, 1), 0), (ChunkRange(1, 2), 1), (ChunkRange(0, 2), 2)):
        x_TD = torch.ones(route.cut.length(chunk_range), 3)
        (arrived_RD,), _ = dispatch.forward(chunk_range, x_TD, route)
        assert arrived_RD.shape == (2 * len(x_TD), 3) and len(lines) == times


def test_what_fails_in_the_thread_is_raised_where_it_is_taken() -> None:
    def fail() -> str:
        raise ValueError("it broke")

    layers, step = beside(fail)
    counted(layers, 0, 1)
    step.taken()
    counted(layers, 0, 1)
    with pytest.raises(ValueError, match="it broke"):
        step.taken()


def _doubled(found: Queue[int]) -> None:
    found.put(worker().submit(lambda: 2 * 21).result(timeout=20))


def test_a_forked_process_has_a_thread_of_its_own() -> None:
    assert worker().submit(int).result() == 0
    fork = get_context("fork")
    found: Queue[int] = fork.Queue()
    child = fork.Process(target=_doubled, args=(found,))
    child.start()
    assert found.get(timeout=30) == 42
    child.join()
