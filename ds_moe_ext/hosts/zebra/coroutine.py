# SPDX-License-Identifier: Apache-2.0
"""Code that runs by turns with its caller, in a thread of its own.

So a model that knows nothing of micro-batches can pause in the middle of its forward, while other
micro-batches go on. Only one of the two threads runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from ds_moe_ext.hosts.zebra.random_state import RandomState, forked
from ds_moe_ext.schedule.executor import Carried


class Asked(NamedTuple):
    """What it paused with: it goes on with the answer."""

    question: Any


class Returned(NamedTuple):
    """What it ended with."""

    result: Any


class Abandoned(BaseException):
    """Ends code that nobody will resume; ``except Exception`` does not catch it."""


class Coroutine:
    """Code that has not begun, has paused, or has ended.

    Args:
        body: the code; it is given ``ask``, which pauses it with a question and returns the answer.
        threads: to run it in one of them, which is its own until it ends.
    """

    def __init__(self, body: Callable[[Ask], Any], threads: ThreadPoolExecutor) -> None:
        self._body, self._threads = body, threads
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._turns: SimpleQueue[Asked | Returned | BaseException] = SimpleQueue()
        self._is_running = False

    def resume(self, answer: Any = None) -> Asked | Returned:
        """Let it run until it pauses or ends, with the caller's autocast and stream.

        Raises:
            BaseException: what the code raised.
        """
        state = Carried.of_caller()
        if self._is_running:
            self._answers.put((answer, state))
        else:
            self._is_running = True
            self._threads.submit(self._run, state)
        turn = self._turns.get()
        if isinstance(turn, BaseException):
            self._is_running = False
            raise turn
        self._is_running = isinstance(turn, Asked)
        return turn

    def abandon(self) -> None:
        """End it where it has paused."""
        if self._is_running:
            self._is_running = False
            self._answers.put((Abandoned(), None))

    def _run(self, state: Carried) -> None:
        try:
            with state.entered():
                self._turns.put(Returned(self._body(self._ask)))
        except BaseException as error:
            self._turns.put(error)

    def _ask(self, question: Any) -> Any:
        self._turns.put(Asked(question))
        answer, state = self._answers.get()
        if isinstance(answer, Abandoned):
            self._answers.put((answer, None))  # for code that caught it, and asks again
            raise answer
        state.follow()
        return answer


class RandomNumbers:
    """Of a coroutine's own: it draws as if it never paused, whoever draws in between.

    Activation checkpointing relies on that: what it computes again it computes in one go.
    """

    def __init__(self) -> None:
        self._state: RandomState | None = None

    @contextmanager
    def own(self) -> Iterator[None]:
        """They are torch's inside the block, and are kept for the next one."""
        with self._begun() if self._state is None else self._state.again():
            yield
            self._state = RandomState.now()

    @contextmanager
    def _begun(self) -> Iterator[None]:
        seed = int(torch.randint(2**62, ()))
        with forked():
            torch.manual_seed(seed)
            yield


Ask = Callable[[Any], Any]
"""Pauses with a question; returns the answer."""
