# SPDX-License-Identifier: Apache-2.0
"""What all ranks took and needed, which they report to each other now and then.

When they do follows from the numbers of the steps alone, so that all come to it together. Between
that a rank reads its clock once a step, and keeps losses on their device.

Shape letters: R ranks, K kinds of task, N exchanges of rows.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext.report.record import BadScores, DeviceRecord, PaceRecord, RanksRecord, TracedTask
from ds_moe_ext.report.summary import WAITS
from ds_moe_ext.schedule.stripes import A2E, ATTENTION_SIDE, E2A, EXPERT_SIDE
from ds_moe_ext.schedule.task import COMBINE, COMPUTE, DISPATCH, GRADIENTS, INTER, INTRA

OFTEN, SELDOM = 10, 80
"""Steps between two tellings: until the second of these, and from then on. It is the first times a
power of two, so that points which are thinned lie evenly."""
MOST_POINTS = 128  # of ``PaceRecord``
_COMPUTING = frozenset(stream.name for stream in (COMPUTE, ATTENTION_SIDE, EXPERT_SIDE))
_SENDING = frozenset(stream.name for stream in (INTER, INTRA, A2E, E2A))
_EXCHANGES = frozenset(op.name for op in (DISPATCH, COMBINE))
NAN = float("nan")


def is_reported(step: int) -> bool:
    """Whether ranks report to each other behind this step, number 0 being the first. Pure."""
    number = step + 1
    return number % (OFTEN if number <= SELDOM else SELDOM) == 0


class Memory(NamedTuple):
    """Most bytes that a rank had so far: in tensors on its device, held there by torch's allocator,
    and of its process in the host's memory."""

    allocated: int
    reserved: int
    resident: int

    @classmethod
    def now(cls) -> Memory:
        """Of this process. The device is not waited for."""
        resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if not torch.cuda.is_initialized():
            return cls(0, 0, resident)
        return cls(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), resident)


@dataclass(frozen=True)
class RankFigures:
    """What one rank reports to the others. What it does not know is nan."""

    rank: int  # its number in the world
    step_s: float  # median seconds of its steps since the last time
    tokens: float  # that came from it in the latest step
    loss: float  # of the latest step, mean over its micro-batches
    memory: Memory  # that it needed
    seconds: Mapping[str, float]  # by phase:kind, mean of its timed steps
    exposed_s: float  # of the latest timed step, as exposure has it; likewise the next
    exchanges_s: tuple[float, ...]  # of that step
    bad_scores: BadScores | None = None  # since the last time; None where all were finite


class Exchanged(NamedTuple):
    """The exchanges of rows of one step, by rank: seconds until the last rank had come, seconds
    from then on, and how many this rank came to last."""

    waited_s_R: np.ndarray
    sent_s_R: np.ndarray
    num_last_R: np.ndarray

    @classmethod
    def of(cls, reported: Sequence[RankFigures], partners: Sequence[Sequence[int]]) -> Exchanged:
        """Who comes last waits for nobody: all leave an exchange together, so that it is shortest
        for that rank. No clocks of different ranks are compared; ``partners`` are lists of ranks
        that exchange rows with each other. Pure."""
        waited_s_R, sent_s_R = np.zeros((2, len(reported)))
        num_last_R = np.zeros(len(reported), dtype=np.int64)
        place = {figures.rank: at for at, figures in enumerate(reported)}
        for ranks in partners:
            at_P = [place[rank] for rank in ranks if rank in place]
            seen = [reported[at].exchanges_s for at in at_P]
            if len(seen) < 2 or len({len(one) for one in seen}) > 1:
                continue
            seconds_PN = np.array(seen)
            least_s_N = seconds_PN.min(axis=0)
            waited_s_R[at_P] = (seconds_PN - least_s_N).sum(axis=1)
            sent_s_R[at_P] = least_s_N.sum()
            num_last_R[at_P] = np.bincount(seconds_PN.argmin(axis=0), minlength=len(at_P))
        return cls(waited_s_R, sent_s_R, num_last_R)


class Point(NamedTuple):
    """One of ``PaceRecord``."""

    step: int
    step_s: float
    tokens_per_s: float
    loss: float
    exposed_s: float
    waited_s: float
    sent_s: float
    allocated: float = NAN
    reserved: float = NAN
    resident: float = NAN


@dataclass(eq=False)
class OwnSteps:
    """What this rank sees of its steps."""

    rank: int  # its number in the world
    clock: Callable[[], float] = time.perf_counter  # seconds now
    _ends_s: list[float] = field(default_factory=list, init=False)
    _losses: list[Tensor] = field(default_factory=list, init=False)  # of the present step
    _scores: list[tuple[int, Tensor]] = field(default_factory=list, init=False)  # by step, [L]
    _traced_tasks: Sequence[TracedTask] = field(default=(), init=False)  # of the latest timed step
    _apart: Container[str] = field(default=(), init=False)
    _seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float), init=False)
    _num_timed: int = field(default=0, init=False)

    def saw_loss(self, loss: Tensor) -> None:
        """Take the loss of a micro-batch, 0-dim. It is not read before ranks report to each
        other."""
        self._losses.append(loss.detach())

    def saw_scores(self, step: int, scores: Sequence[Tensor | None]) -> None:
        """Take what a step's scores sum to, a layer each, 0-dim; None where a layer had none. Read
        when ranks report to each other."""
        if known := [score for score in scores if score is not None]:
            zero = torch.zeros_like(known[0])
            self._scores.append((step, torch.stack([zero if s is None else s for s in scores])))

    def saw_tasks(self, traced_tasks: Sequence[TracedTask], apart: Container[str] = ()) -> None:
        """Take the tasks of a step that all ranks time."""
        self._traced_tasks, self._apart, self._num_timed = traced_tasks, apart, self._num_timed + 1
        for task in traced_tasks:
            self._seconds[f"{task.phase}:{task.name}"] += task.length_s

    def step_ended(self) -> None:
        self._ends_s.append(self.clock())

    def _bad_scores(self) -> BadScores | None:
        """The first since the last call. Waits for the device."""
        seen, self._scores = self._scores, []
        if not seen:
            return None
        bad_SL = ~torch.stack([sum_L for _, sum_L in seen]).isfinite().cpu().numpy()
        if not bad_SL.any():
            return None
        at, layer = np.argwhere(bad_SL)[0].tolist()
        return BadScores(seen[at][0], layer, self.rank)

    def forget_losses(self) -> None:
        """Of the step that has ended."""
        self._losses.clear()

    def reported(self, tokens: float) -> RankFigures:
        """What the others shall know, with the ``tokens`` that came from this rank in the latest
        step; steps are counted anew from here. Waits for the device."""
        steps_s = [after - before for before, after in pairwise(self._ends_s)]
        self._ends_s = self._ends_s[-1:]
        losses = torch.stack([loss.double() for loss in self._losses]) if self._losses else None
        return RankFigures(
            rank=self.rank,
            step_s=median(steps_s) if steps_s else NAN,
            tokens=tokens,
            loss=NAN if losses is None else float(losses.mean()),
            memory=Memory.now(),
            seconds={kind: total_s / self._num_timed for kind, total_s in self._seconds.items()},
            exposed_s=exposed_s(self._traced_tasks),
            exchanges_s=exchanges_s(self._traced_tasks, self._apart),
            bad_scores=self._bad_scores(),
        )


@dataclass(eq=False)
class RanksSeen:
    """The ranks that run the same layers."""

    own: OwnSteps  # this one's steps
    partners: Sequence[Sequence[int]]  # lists of ranks that exchange rows with each other
    # what every rank reports. Collective over these ranks
    gather: Callable[[RankFigures], Sequence[RankFigures]]
    device: DeviceRecord | None = None  # what they compute on; None: nobody knows
    is_on: bool = True  # they report to each other; the same on all of them
    # called with the first that any of them had
    on_bad_scores: Callable[[BadScores], None] = lambda _: None
    latest: Point | None = field(default=None, init=False)  # the last point; None before the first
    _reported: Sequence[RankFigures] = field(default=(), init=False)
    _sums_4R: np.ndarray | None = field(default=None, init=False)  # exposed, and of ``Exchanged``
    _num_reported: int = field(default=0, init=False)
    _num_exchanges: int = field(default=0, init=False)
    _points: list[Point] = field(default_factory=list, init=False)
    _bad_scores: BadScores | None = field(default=None, init=False)
    _every: int = field(default=OFTEN, init=False)  # steps between points that are kept

    def after_step(self, step: int, tokens: float) -> None:
        """Take a step that has ended, by its number from 0. Collective in some steps, by their
        numbers."""
        if self.is_on:
            self.own.step_ended()
        if self.is_on and is_reported(step):
            self._take(
                step, sorted(self.gather(self.own.reported(tokens)), key=lambda one: one.rank)
            )
        self.own.forget_losses()

    def _take(self, step: int, reported: Sequence[RankFigures]) -> None:
        exposed_s_R = np.array([one.exposed_s for one in reported])
        exchanged = Exchanged.of(reported, self.partners)
        sums_4R = np.stack([exposed_s_R, *exchanged])
        self._sums_4R = sums_4R if self._sums_4R is None else self._sums_4R + sums_4R
        self._reported, self._num_reported = reported, self._num_reported + 1
        self._num_exchanges += max(len(one.exchanges_s) for one in reported)
        if self._bad_scores is None:
            self._bad_scores = min(
                (one.bad_scores for one in reported if one.bad_scores), default=None
            )
            if self._bad_scores is not None:
                self.on_bad_scores(self._bad_scores)
        step_s = max(one.step_s for one in reported)
        losses = [one.loss for one in reported if np.isfinite(one.loss)]
        self.latest = Point(
            step,
            step_s,
            tokens_per_s=sum(one.tokens for one in reported) / step_s,
            loss=float(np.mean(losses)) if losses else NAN,
            exposed_s=float(exposed_s_R.mean()),
            waited_s=float(exchanged.waited_s_R.mean()),
            sent_s=float(exchanged.sent_s_R.mean()),
            **_most(reported),
        )
        if (step + 1) % self._every == 0:
            self._points.append(self.latest)
        if len(self._points) > MOST_POINTS:
            self._every *= 2
            self._points = [one for one in self._points if (one.step + 1) % self._every == 0]

    def record(self) -> RanksRecord | None:
        """Up to the last point; None before the first."""
        reported = self._reported
        if self._sums_4R is None:
            return None
        exposed_s_R, waited_s_R, sent_s_R, num_last_R = self._sums_4R
        kinds_K = tuple(sorted({kind for one in reported for kind in one.seconds}))
        seconds_KR = np.array(
            [[one.seconds.get(kind, 0.0) for one in reported] for kind in kinds_K]
        )
        steps_G, *columns = zip(*self._points)
        place = {rank: at for ranks in self.partners for at, rank in enumerate(ranks)}
        allocated_R, reserved_R, resident_R = np.array([one.memory for one in reported]).T
        return RanksRecord(
            ranks_R=tuple(one.rank for one in reported),
            allocated_R=allocated_R,
            reserved_R=reserved_R,
            resident_R=resident_R,
            kinds_K=kinds_K,
            seconds_KR=seconds_KR.reshape(len(kinds_K), len(reported)),
            exposed_s_R=exposed_s_R / self._num_reported,
            waited_s_R=waited_s_R / self._num_reported,
            sent_s_R=sent_s_R / self._num_reported,
            num_last_R=num_last_R.astype(np.int64),
            num_exchanges=self._num_exchanges,
            pace=PaceRecord(steps_G, *(np.array(column) for column in columns)),
            ep_rank_R=tuple(place[one.rank] for one in reported),
            device=self.device,
            bad_scores=self._bad_scores,
        )


def _most(reported: Sequence[RankFigures]) -> dict[str, float]:
    """Bytes of the fullest rank, of each kind of memory; nan of a device that is not there."""
    most_3 = np.max([one.memory for one in reported], axis=0)
    return {name: float(most) or NAN for name, most in zip(Memory._fields, most_3)}


# What exchanges took, of the tasks of a timed step.


def exposed_s(traced_tasks: Iterable[TracedTask]) -> float:
    """Seconds in which rows were exchanged or replicas waited for, and nothing was computed. Pure.

    What else the stream ``param`` does is hidden, or waited for; slices of dense gradients go on
    beside what the host computes, which nobody times.
    """
    computed, sent = [], []
    for task in traced_tasks:
        if task.stream in _COMPUTING and task.name not in WAITS:
            computed.append(task)
        elif task.name in WAITS or (task.stream in _SENDING and task.name != GRADIENTS.name):
            sent.append(task)
    return _covered_s([*computed, *sent]) - _covered_s(computed)


def _covered_s(traced_tasks: Sequence[TracedTask]) -> float:
    """Seconds in which one of them ran, at least."""
    if not traced_tasks:
        return 0.0
    times = np.array([(task.start_s, task.end_s) for task in traced_tasks])
    start_N, end_N = times[np.argsort(times[:, 0])].T
    reached_N = np.maximum.accumulate(end_N)
    gaps_s = np.maximum(start_N[1:] - reached_N[:-1], 0.0).sum()
    return float(reached_N[-1] - start_N[0] - gaps_s)


def exchanges_s(
    traced_tasks: Iterable[TracedTask], apart: Container[str] = ()
) -> tuple[float, ...]:
    """Seconds of each exchange of rows, waiting included, in the order that a stream has them,
    which is the same on all ranks that exchange. Pure."""
    found = [task for task in traced_tasks if task.name in _EXCHANGES and task.layer not in apart]
    found.sort(key=lambda task: (task.stream, task.start_s))
    return tuple(task.length_s for task in found)
