# SPDX-License-Identifier: Apache-2.0
"""Code in turns with its caller: what it asks, how it ends, and that no thread is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_moe_ext.hosts.zebra.stripe_pass import Abandoned, Ask, Asked, Coroutine, Returned


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """That they can be shut down says that all have ended."""
    with ThreadPoolExecutor(4) as executor:
        yield executor


def _sums(ask: Ask) -> int:
    """Of the answers up to one that is zero."""
    total = 0
    while answer := ask(total):
        total += answer
    return total


def test_questions_and_answers(threads: ThreadPoolExecutor) -> None:
    coroutine = Coroutine(_sums, threads)
    assert coroutine.resume() == Asked(0)
    assert coroutine.resume(3) == Asked(3)
    assert coroutine.resume(4) == Asked(7)
    assert coroutine.resume(0) == Returned(7)


@given(st.lists(st.integers(0, 3), max_size=40))
@settings(deadline=None, derandomize=True, max_examples=50)
def test_any_turns(turns: list[int]) -> None:
    """Four at once, resumed in any order, and abandoned wherever they are."""
    with ThreadPoolExecutor(4) as threads:
        coroutines = [Coroutine(_sums, threads) for _ in range(4)]
        counts = [0] * 4
        for turn_around in turns:
            asked = coroutines[turn_around].resume(turn_around + 1)
            assert asked == Asked(max(counts[turn_around], 0) * (turn_around + 1))
            counts[turn_around] += 1
        for coroutine in coroutines:
            coroutine.abandon()


def test_one_runs_at_a_time(threads: ThreadPoolExecutor) -> None:
    """The caller waits while it runs."""
    seen: list[str] = []

    def body(ask: Ask) -> None:
        for word in ("first", "second"):
            seen.append(f"{word} in")
            ask(word)

    coroutine = Coroutine(body, threads)
    for word in ("first", "second"):
        coroutine.resume()
        seen.append(f"{word} out")
    coroutine.abandon()
    assert seen == ["first in", "first out", "second in", "second out"]


def test_it_stays_in_its_thread(threads: ThreadPoolExecutor) -> None:
    """Autograd numbers nodes by thread."""

    def body(ask: Ask) -> None:
        while True:
            ask(threading.get_ident())

    coroutines = [Coroutine(body, threads) for _ in range(2)]
    found = [[coroutine.resume() for coroutine in coroutines] for _ in range(3)]
    for coroutine in coroutines:
        coroutine.abandon()
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1] != Asked(threading.get_ident())


def test_an_error_reaches_the_caller(threads: ThreadPoolExecutor) -> None:
    def body(ask: Ask) -> None:
        ask(1)
        raise KeyError("of the user")

    coroutine = Coroutine(body, threads)
    coroutine.resume()
    with pytest.raises(KeyError, match="of the user"):
        coroutine.resume()
    coroutine.abandon()


def test_abandoned(threads: ThreadPoolExecutor) -> None:
    """It ends where it paused, and cleans up; to abandon it again, or early, does nothing."""
    ended: list[Any] = []

    def body(ask: Ask) -> None:
        try:
            ask(1)
        except Exception as error:
            ended.append(error)
        finally:
            ended.append("cleaned up")

    Coroutine(body, threads).abandon()
    coroutine = Coroutine(body, threads)
    coroutine.resume()
    coroutine.abandon()
    coroutine.abandon()
    threads.shutdown()
    assert ended == ["cleaned up"]


def test_abandoned_again_and_again(threads: ThreadPoolExecutor) -> None:
    """Code that catches everything and asks once more ends all the same."""
    caught: list[bool] = []

    def body(ask: Ask) -> None:
        for _ in range(3):
            try:
                ask(1)
            except BaseException as error:
                caught.append(isinstance(error, Abandoned))

    coroutine = Coroutine(body, threads)
    coroutine.resume()
    coroutine.abandon()
    threads.shutdown()
    assert caught == [True] * 3


def test_the_callers_autocast(threads: ThreadPoolExecutor) -> None:
    def body(ask: Ask) -> None:
        ask(torch.is_autocast_enabled("cpu"))
        ask(torch.get_autocast_dtype("cpu"))

    with torch.autocast("cpu", torch.float16):
        coroutine = Coroutine(body, threads)
        assert coroutine.resume() == Asked(True)
        assert coroutine.resume() == Asked(torch.float16)
    coroutine.abandon()
    other = Coroutine(body, threads)
    assert other.resume() == Asked(False)
    other.abandon()
