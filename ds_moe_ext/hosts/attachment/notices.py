# SPDX-License-Identifier: Apache-2.0
"""What a person is notified of at the start and at the end: refusals, defaults that are left out,
and the files that a run leaves behind."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.files.whole_files import why_unwritable
from ds_moe_ext.planning.strategy import Keys, Strategy
from ds_moe_ext.strategies.settings import BLOCK, Settings

ENABLED = f"{BLOCK} is enabled"


@dataclass(frozen=True)
class Refusal:
    """One thing that does not work."""

    what: str  # as a user writes it: a key with its value, a flag, an argument
    # from what was given to how an error says that this was asked for; empty, if it was not
    asked: Callable[[Any], str]
    reason: str  # why not
    remedy: str  # what to do


def refuse(
    refusals: Iterable[Refusal], given: Any, context: str = ENABLED, or_else: str = ""
) -> None:
    """Raise ValueError by the first that was asked for: what is given is as their ``asked`` takes
    it, ``context`` is what makes it impossible, ``or_else`` another remedy for all."""
    for refusal in refusals:
        asked = refusal.asked(given)
        if asked:
            other = or_else and f", or {or_else}"
            raise ValueError(f"{context}, but {asked}: {refusal.reason}; {refusal.remedy}{other}")


Log = Callable[[str], object]  # takes a line for a person


@dataclass(frozen=True)
class Default:
    """Something that a strategy does where its host can, unless a key says otherwise."""

    key: Callable[[Keys], str]  # which one, of a strategy's
    is_on: Callable[[Strategy], bool]  # whether a strategy does it
    # the strategy without it; the same where the key asks for it
    without: Callable[[Strategy], Strategy]
    value: Callable[[Strategy], str]  # that the key has, where it asks for it
    left_out: str  # how a line says that it is not done
    off: str  # what a person sets the key to, to have it left out


OWNERS = Default(
    key=lambda keys: keys.owners,
    is_on=lambda strategy: strategy.intervals().shard_every > 0,
    without=lambda strategy: strategy.with_owners_that_stay(),
    value=lambda strategy: str(strategy.intervals().shard_every),
    left_out="experts keep their owners",
    off="0 or null",
)
SLICES = Default(
    key=lambda keys: keys.slices_gradients,
    is_on=lambda strategy: strategy.slices_gradients,
    without=lambda strategy: strategy.with_gradients_left(),
    value=lambda strategy: "true",
    left_out="dense gradients are not reduced in slices",
    off="false or null",
)


def settle(
    default: Default, strategy: Strategy, refusals: Iterable[Refusal], given: Any, log: Log
) -> Strategy:
    """The strategy as it can be had: without the default, by the first reason why it could not do
    that, and a line reports so. Pure but for logging. Raises ValueError where a key asks for what
    cannot be done."""
    found = ((row, asked) for row in refusals if (asked := row.asked(given)))
    if not default.is_on(strategy) or (first := next(found, None)) is None:
        return strategy
    (row, asked), key, settled = first, default.key(strategy.keys), default.without(strategy)
    if default.is_on(settled):
        context = f"{key} is {default.value(strategy)}"
        refuse((row,), given, context=context, or_else=f"set {key} to {default.off}")
    log(f"{key} is null: {default.left_out}, because {asked}: {row.reason}; {row.remedy}")
    return settled


# That the main thread has to answer a signal, before it is taken to wait for other ranks.
PATIENCE_S = 0.5
LIMIT_S = 20.0  # that writing may take behind a signal; launchers kill after thirty seconds


def check_outputs(settings: Settings, *, writes: bool) -> None:
    """Try the paths of the settings. Collective, over the world."""
    gathered = gather_objects(_why_not(settings) if writes else "", None)
    if wrong := next(filter(None, gathered), ""):
        raise ValueError(wrong)


def _why_not(settings: Settings) -> str:
    """What is wrong with the paths, in one sentence; else empty."""
    report, trace = settings.report, settings.trace
    named = []
    if report.enabled and report.path is not None:
        names = ("report.json", "report.html")
        named += [("report", report.path, Path(report.path) / name) for name in names]
    if trace.path is not None:
        named.append(("trace", trace.path, Path(trace.path)))
    for block, given, path in named:
        if reason := why_unwritable(path, makes_folders=True):
            return (
                f"{BLOCK}.{block}.path is {given!r}, but {str(path)!r} cannot be written "
                f"({reason}); name another, or leave it out"
            )
    return ""


@contextmanager
def or_warn(what: str) -> Iterator[None]:
    """Nothing that cannot be written, or drawn, ends a training."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"ds_moe_ext: {what} could not be written: {error}", stacklevel=3)
    except Exception as error:  # of ours, but the model is the user's
        warnings.warn(f"ds_moe_ext: {what} could not be made: {error!r}", stacklevel=3)


class Endings:
    """Handles SIGTERM: writes what is left to write, and lets the process end by the signal.

    Python calls a handler in the main thread, between two of its instructions. While that waits
    for other ranks, which have been ended too, there may be no next instruction (as in a kernel of
    NCCL). So Python also wakes a thread of ours, which does the same where the main thread has not
    begun to.
    """

    def __init__(self) -> None:
        self._writers: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._has_begun = threading.Event()
        self._pipe: tuple[int, int] | None = None

    def add(self, write: Callable[[], None]) -> None:
        """Call this, too, before the process ends by SIGTERM; nothing where the user has a handler
        of his own, or this is not the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self)
        self._wake()
        self._writers.append(write)

    def remove(self, write: Callable[[], None]) -> None:
        """It has been done, or need not be."""
        if write in self._writers:
            self._writers.remove(write)
        is_main = threading.current_thread() is threading.main_thread()
        if not self._writers and is_main and signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """As ``signal.signal`` calls it. A handler of the user's that calls it does the rest."""
        is_last = signal.getsignal(signal.SIGTERM) is self
        if is_last:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
            self._has_begun.set()
        self._write()
        if is_last:
            _end()

    def _write(self) -> None:
        with self._lock:
            for write in list(self._writers):
                try:
                    write()
                except Exception as error:  # the process shall end, whatever happens
                    log_line(f"nothing was written after SIGTERM: {error!r}")

    def _wake(self) -> None:
        """Have a thread notified of signals, unless somebody else is."""
        if self._pipe is None:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            os.register_at_fork(after_in_child=self._forget)
            threading.Thread(target=self._watch, args=self._pipe[:1], daemon=True).start()
        before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if before not in (-1, self._pipe[1]):
            signal.set_wakeup_fd(before)

    def _watch(self, reported: int) -> None:
        while True:
            if signal.SIGTERM not in os.read(reported, 64):
                continue
            if signal.getsignal(signal.SIGTERM) is not self and not self._has_begun.is_set():
                continue  # the user's own, since then
            if self._has_begun.wait(PATIENCE_S):
                time.sleep(LIMIT_S)  # that does it
            else:
                self._write()
            _end()

    def _forget(self) -> None:
        """In a process that was forked, which has nothing to write, and shares the pipe."""
        self._writers.clear()
        self._lock, self._has_begun = threading.RLock(), threading.Event()
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._pipe is not None:
            before = signal.set_wakeup_fd(-1)
            if before not in (-1, self._pipe[1]):
                signal.set_wakeup_fd(before)
            self._pipe = None  # nor a thread that reads it


ENDINGS = Endings()  # of this process


def log_line(line: str) -> None:
    """To a person, from within a handler, where Python's own streams may be in use."""
    os.write(2, f"ds_moe_ext: {line}\n".encode(errors="replace"))


def _end() -> None:
    """By SIGTERM, as without us; from any thread, which ``signal.signal`` does not allow."""
    reset = ctypes.pythonapi.PyOS_setsig
    reset.argtypes, reset.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    reset(signal.SIGTERM, None)  # SIG_DFL is a null pointer
    os.kill(os.getpid(), signal.SIGTERM)
