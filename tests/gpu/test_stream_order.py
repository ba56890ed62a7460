# SPDX-License-Identifier: Apache-2.0
"""Every strategy's layers on streams that keep books: nothing is read before it is written, and
no memory is handed out while somebody may still read it. One process stands for one of four ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fake_world import Batch, Ours, Sizes, Way, as_on_cuda, esp, fake_world, on_streams
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_moe_ext.hosts.steps.costs import STEPS
from ds_moe_ext.moe.expert import Expert
from tests.gpu.layers import CPU, Case, Runner
from tests.gpu.stream_order import BookedStreams, Books, Queue, QueuedStreams, Queues
from tests.gpu.way import copied_from_the_host
from tests.hosts.test_configurations import FREE
from tests.marks import slow

FSSDP = {"overlap_degree": 8, "replicas_per_rank": 2, "reshard_interval": 0}
FREED = {**FSSDP, "rematerialize": True}
PROPHET = {"planner": "shadow", "split": "half", "rematerialize": False}
SHARDED = {"expert_sharding_size": 2}
BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "esp, 2 chunks": esp(2),
    "esp, 3 chunks": esp(3),
    "esp, sharded": {**esp(2), **SHARDED},
    "fssdp": {"strategy": "fssdp", "fssdp": FSSDP},
    "fssdp, freed": {"strategy": "fssdp", "fssdp": FREED},
    "prophet": {"strategy": "prophet", "prophet": PROPHET},
    "prophet, freed": {"strategy": "prophet", "prophet": {**PROPHET, "rematerialize": True}},
    "esp over fssdp": esp(2, balance="fssdp", fssdp=FSSDP),
    "esp over fssdp, freed": esp(2, balance="fssdp", fssdp=FREED),
    "esp over fssdp, sharded": {**esp(2, balance="fssdp", fssdp=FSSDP), **SHARDED},
    "esp over prophet": esp(2, balance="prophet", prophet=PROPHET),
}
SIZES = Sizes(layers=3, experts=8, tokens=32, top_k=2)


def mistakes_of(
    block: Mapping[str, Any], num_steps: int = 4, *, recomputes: bool = False
) -> list[str]:
    """Of some steps."""
    queues = Queues()
    books = Books(queues)
    streams = BookedStreams(queues, books)
    with fake_world(4, rank=1), on_streams(streams), as_on_cuda(), copied_from_the_host():
        model = Ours(Way("", block, has_threads=True), SIZES)
        for number in range(num_steps):
            batch = Batch.of(SIZES, number)
            with books:
                model.model.zero_grad(set_to_none=True)
                y_TD = forward(model, batch, recomputes=recomputes)
                y_TD.backward(torch.ones_like(y_TD))
                del y_TD
            model.after_step(number)
        has_replicas = [
            layer.routed.layer_context.plan.has_replicas for layer in model.replaced.layers
        ]
    assert any(has_replicas) or not {"fssdp", "prophet"} & block.keys()
    return books.mistakes


def forward(model: Ours, batch: Batch, *, recomputes: bool) -> Tensor:
    if not recomputes:
        return model.forward(batch)
    y_TD: Tensor = checkpoint(model.forward, batch, use_reentrant=False)
    return y_TD


GUARDED = {"esp, 3 chunks", "fssdp", "prophet", "esp over fssdp"}
"""By sharded ones, and by replicas that are freed."""


@pytest.mark.parametrize("recomputes", [slow(False), True], ids=["", "recomputes"])
@pytest.mark.parametrize("name", [slow(name) if name in GUARDED else name for name in BLOCKS])
def test_streams_wait_for_what_they_read(name: str, recomputes: bool, tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_text(FREE.to_json())
    block, num_steps = BLOCKS[name], 4
    if "prophet" in name:
        block, num_steps = {**block, "hardware": str(path)}, STEPS.stop + 3
    assert mistakes_of(block, num_steps, recomputes=recomputes) == []


@pytest.mark.parametrize("degrees", [(3, 2), (2, 4), (1, 4), (4, 1)], ids=str)
def test_streams_wait_where_backward_is_cut_anew(degrees: tuple[int, int]) -> None:
    queues = Queues()
    books, case = Books(queues), Case(degrees=degrees, hot=1.0)
    runner = Runner.of(case, CPU, BookedStreams(queues, books))
    with books:
        for seed in range(3):
            runner.step(*case.tokens(seed))
    assert books.mistakes == []


def mistakes_of_two_callers(streams: type[BookedStreams]) -> list[str]:
    """Who run a layer by turns, each in a cuda_stream that does not wait for the other's."""
    queues = Queues()
    books, case = Books(queues), Case(degrees=(3, 2), hot=1.0)
    runner = Runner.of(case, CPU, streams(queues, books))
    callers = queues.current(), Queue("another")
    with books, torch.no_grad():
        for number in range(4):
            with queues.entered(callers[number % 2]):
                runner(case.tokens(number)[0])
    return books.mistakes


def test_streams_wait_for_who_called_before() -> None:
    class Forgetful(BookedStreams):
        _last_caller = property(lambda streams: None, lambda streams, caller: None)

    assert mistakes_of_two_callers(BookedStreams) == []
    assert mistakes_of_two_callers(Forgetful)


class Failed(Exception):
    """Of the test's experts."""


@pytest.mark.parametrize("method", ["forward", "backward"])
def test_who_catches_an_error_comes_behind_all_streams(method: str) -> None:
    """As trainers do that leave out a batch: they may get what was to be read."""
    queues = Queues()
    case, streams = Case(degrees=(3, 3), hot=1.0), QueuedStreams(queues)
    runner = Runner.of(case, CPU, streams)
    runner.step(*case.tokens(0))
    cuda_streams = [*streams._cuda_streams.values()]

    def fail(*given: Any) -> None:
        for cuda_stream in cuda_streams:
            cuda_stream.do()  # issued, and nobody has waited for it
        raise Failed

    with mock.patch.object(Expert, method, fail), pytest.raises(Failed):
        runner.step(*case.tokens(1))
    caller = queues.current()
    assert cuda_streams and all(caller.knows(each, each.known[each]) for each in cuda_streams)


@pytest.mark.parametrize("name", ["esp, 2 chunks", "esp over fssdp"])
def test_books_see_who_does_not_wait(name: str) -> None:
    with mock.patch.object(Queue, "wait_event", lambda queue, event: None):
        mistakes = mistakes_of(BLOCKS[name])
    assert any("does not wait for" in mistake for mistake in mistakes)


@pytest.mark.parametrize("name", ["esp, 2 chunks", "esp, sharded"])
def test_books_see_what_is_not_kept(name: str) -> None:
    with mock.patch.object(BookedStreams, "keep", lambda streams, reads: None):
        mistakes = mistakes_of(BLOCKS[name])
    assert any(" gets " in mistake for mistake in mistakes)
