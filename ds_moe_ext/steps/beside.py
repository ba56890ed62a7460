# SPDX-License-Identifier: Apache-2.0
"""What is made of a step's rows while the step goes on, in a thread of its own.

Rows are known when the last forward pass of a step has ordered them. The thread begins when they
have come to their experts: before, it would take Python's lock and the processor from what sends
them. Experts, backward and the optimizer's step hide it. What is made is a pure function of rows:
where it could not be begun early it is made when it is asked for, the same, so that ranks need not
agree on when.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from ds_moe_ext.moe.observation import RowsSeen
from ds_moe_ext.schedule.worker import worker

Made = TypeVar("Made")


class BesideStep(Generic[Made]):
    """Begins to make something when as many tables of rows were sent as in the step before.

    Args:
        layers: whose rows it is made of; of them all together, whatever their order.
        make: called in the thread, while no rows are counted. It only reads.
    """

    def __init__(self, layers: Sequence[RowsSeen], make: Callable[[], Made]) -> None:
        self._make = make
        self._lock = threading.Lock()  # layers may send rows in several lanes
        self._num_expected = self._num_sent = 0
        self._made: Future[Made] | None = None
        for layer in layers:
            layer.on_sent = self._sent

    def _sent(self) -> None:
        with self._lock:
            self._num_sent += 1
            is_all = self._num_sent == self._num_expected
        if is_all:
            self._made = worker().submit(self._make)

    def taken(self) -> Made | None:
        """What was made of the rows that were sent since the last call; None where it was not
        begun, or rows came after it had. Call it between steps: it waits for the thread, and raises
        what failed there."""
        made, self._made = self._made, None
        is_of_all = self._num_sent == self._num_expected
        self._num_expected, self._num_sent = self._num_sent, 0
        if made is None:
            return None
        found = made.result()
        return found if is_of_all else None
