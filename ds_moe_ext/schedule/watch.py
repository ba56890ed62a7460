# SPDX-License-Identifier: Apache-2.0
"""What ranks report to each other when one of them fails, and when one waits for others in vain.

A rank that fails says so in the store of the launch. A rank that has waited for two seconds in an
exchange of ours looks there, and leaves the exchange if another one has failed; where none has, it
goes on waiting, and says so from time to time. One thread of each process does this; it wakes once
a second, and is in no collective. Another one looks whether the store answers the first.

A rank that is killed says nothing. So each counts in the store, every two seconds; whoever finds an
exchange broken without a reason listens for a moment, and names those that count no more. So does
one that began nothing of ours for a while: the host may wait where we do not see it. A rank that
ends as it should says so in its count. One that has stopped is waited for, unless a key says how
long.

An error that all ranks raise alike is nobody's failure: a rank that has failed itself takes no
other's for a reason, until a pass has gone through.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ds_moe_ext.strict import at_least

if TYPE_CHECKING:
    from torch.distributed import Store

PERIOD_S = 1.0
"""How often a process looks at its own waits."""

PATIENCE_S = 2.0
"""How long it waits before it looks whether another rank has failed."""

HOST_PATIENCE_S = 4.0
"""Likewise where it is in no exchange of ours, while no task of ours begins."""

BEAT_S = 2.0
"""How often a process says that it is there."""

MOST_UNHEARD_S = 3 * BEAT_S
"""As what a longer time between two looks counts."""

NEAREST = 64
"""Ranks of the world that each listens to, and all of those it waits for."""

LINGER_S = 5.0
"""How long rank 0, which may keep the store, stays for others to read what it failed of."""

_AS_OFTEN = "every rank must call the model the same number of times"

JOINED = (
    f"{_AS_OFTEN}; if ranks evaluate or generate different amounts, let all ranks do it in a "
    "block 'with ds_moe_ext.joined(engine):'"
)
"""What a person does where ranks call the model unequally, and may join."""

ALIKE = (
    f"{_AS_OFTEN}, in as many micro-batches a step, steps and evaluations; if the data of a "
    "rank end first, stop all ranks, or give it batches with a masked loss"
)
"""Where they may not."""

WHERE = "ds_moe_ext.waits"


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long waits for other ranks may last before something is logged or done."""

    log_after_s: int = 10  # when a wait for a rank that has not failed is logged
    log_every_s: int = 60  # when it is logged again, at least
    # when a rank that is not heard of is taken to have ended, where an exchange with it has failed
    silent_after_s: int = 6
    # when waits for others are ended, where a rank is not heard of all that time. None: never.
    ends_after_s: int | None = None

    def __post_init__(self) -> None:
        at_least(f"{WHERE}.log_after_s", self.log_after_s, 2)
        at_least(f"{WHERE}.log_every_s", self.log_every_s, 1)
        at_least(f"{WHERE}.silent_after_s", self.silent_after_s, 4)  # two beats
        at_least(f"{WHERE}.ends_after_s", self.ends_after_s, 10)  # a store may be late


class BrokenOff(RuntimeError):
    """An exchange with other ranks came to nothing, for one of them has failed or has ended."""


@dataclass(frozen=True, eq=False)
class Wires:
    """The launch, as a watch sees it."""

    store: Store  # a client of its own
    # the store by which the world met, whose client it is; None once that has ended
    met: Callable[[], object | None]
    rank: int  # of this process
    world_size: int  # ranks of the launch
    process: int  # its id
    ranks_of: Callable[[Any], Sequence[int]]  # the ranks of a communicator
    # makes all that wait in a communicator on this rank raise RuntimeError. It cannot be used any
    # more then, here or elsewhere.
    break_off: Callable[[Any], None]
    break_off_all: Callable[[], None]  # the same, of the host's communicators too


class Heard(NamedTuple):
    """What other ranks had counted to, at a time."""

    since_s: float
    beats: Mapping[int, bytes]


@dataclass(eq=False, slots=True)
class Silence:
    """For how long other ranks are not heard of, while this one waits."""

    beats: Mapping[int, bytes] = field(default_factory=dict)
    lasted_s: dict[int, float] = field(default_factory=dict)
    looked_s: float | None = None

    def look(self, beats: Mapping[int, bytes], now_s: float) -> None:
        """Take what others have counted to by now. Where this process itself stood still, nobody
        was silent all that time."""
        passed_s = 0.0 if self.looked_s is None else min(now_s - self.looked_s, MOST_UNHEARD_S)
        self.lasted_s = {
            rank: self.lasted_s.get(rank, 0.0) + passed_s for rank in _silent(self.beats, beats)
        }
        self.beats, self.looked_s = beats, now_s


@dataclass(eq=False, slots=True)
class Hearing:
    """How ranks hear of each other."""

    # of the store, which has one user at a time
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked_s: float | None = None  # since when it owes an answer
    unanswered: int = 0  # looks at that
    logged_s: float = 0.0  # when this rank has counted
    heard: Heard | None = None  # while nothing of ours began
    silence: Silence = field(default_factory=Silence)  # of others


def _nowhere() -> str:
    return "an exchange of ds_moe_ext"


@dataclass(eq=False)
class Watch:
    patience: Patience = field(default_factory=Patience)  # of the run that was attached last
    remedy: str = JOINED  # likewise, of ranks that call the model unequally
    has_failed: bool = False  # since a pass went through last
    waits: dict[int, Waiting] = field(default_factory=dict)  # by thread
    _places: dict[int, Callable[[], str]] = field(default_factory=dict)
    _latest: Callable[[], str] | None = None
    _wires: Wires | None = None
    _num_passes: int = 0  # of the host, that this process is in
    _pass_since_s: float = 0.0
    _reason: str = ""  # why exchanges were broken off
    _failed_s: float = 0.0
    _reported: bool = False  # a failure, to the others
    _posted: bool = False  # a wait, to the others
    _hearing: Hearing = field(default_factory=Hearing)

    @property
    def _launch(self) -> Wires:
        assert self._wires is not None, "there are no others"
        return self._wires

    @property
    def is_on(self) -> bool:
        return self._wires is not None

    def has_begun(self, met: object) -> bool:
        """Whether it watches by a store already, in this process."""
        wires = self._wires
        return wires is not None and wires.process == os.getpid() and wires.met() is met

    def start(self, wires: Wires) -> None:
        """Begin to watch; where it has begun, with other wires."""
        is_new = self._wires is None
        self._wires = wires
        if is_new:
            name, ends = "ds_moe_ext_watch", threading.Event()
            thread = threading.Thread(target=self._watch, args=[ends], name=name, daemon=True)
            thread.start()
            atexit.register(_end, ends, thread)
            name = "ds_moe_ext_watch_store"
            threading.Thread(target=self._watch_store, args=[ends], name=name, daemon=True).start()
            sys.excepthook = _after_hook(self, sys.excepthook)

    def at(self, place: Callable[[], str]) -> None:
        """What the calling thread does from now on; asked when somebody is notified of it."""
        self._places[threading.get_ident()] = self._latest = place

    @contextmanager
    def host_pass(self, where: str) -> Iterator[None]:
        """Inside the block the host runs a part of a step. Other ranks are notified of an error
        that leaves it, and what came of an error of theirs says so."""
        self._num_passes, self._pass_since_s = self._num_passes + 1, time.monotonic()
        try:
            yield
        except BaseException as error:
            is_plain = isinstance(error, RuntimeError) and not isinstance(error, BrokenOff)
            is_theirs = bool(self._reason) and is_plain
            if not self.has_failed and (
                is_theirs or (_is_of_network(error) and self._listen_for_ends())
            ):
                self._fails_now()
                raise BrokenOff(f"{self._reason} (this rank was in {where})") from error
            self.failed(error, where)
            raise
        finally:
            self._num_passes -= 1

    def place_of(self, thread: int) -> Callable[[], str]:
        return self._places.get(thread, _nowhere)

    # What failing ranks do.

    def failed(self, error: BaseException, where: str | None = None) -> None:
        """Say that this rank has failed; only the first error counts until a pass goes through.

        Args:
            where: in what, for a person; None: in what the calling thread does.
        """
        wires = self._wires
        if self.has_failed or wires is None:
            return
        self._fails_now()
        if isinstance(error, BrokenOff):
            return  # others have been notified
        if where is None:
            where = self.place_of(threading.get_ident())()
        elif self._latest is not None:
            where += f", after {self._latest()}"
        text = f"{type(error).__name__}: {error}"[:2000]
        self._notify_others(f"rank {wires.rank} failed in {where}: {text}")

    def _notify_others(self, reason: str) -> None:
        """Why their exchanges with this rank come to nothing."""
        self._reason = reason
        self._reported = self._with_store(
            lambda store: _post_failure(store, self._launch.rank, reason)
        )

    def _fails_now(self) -> None:
        self.has_failed, self._failed_s = True, time.monotonic()

    def went_through(self) -> None:
        """A pass of this rank went through, after it had failed: it goes on, and so do others."""
        self.has_failed, self._reason = False, ""
        if self._reported and self._wires is not None:
            self._reported = False
            key = _FAILURE.format(self._wires.rank)

            def take_back(store: Store) -> None:
                store.delete_key(key)
                store.add(_FAILURES, -1)

            self._with_store(take_back)

    def linger(self) -> None:
        """Stay for a moment, where others may need the store of this process to learn why it
        ends."""
        wires = self._wires
        if wires is None or not self._reported or wires.rank:
            return
        found, end_s = [0], time.monotonic() + LINGER_S
        while time.monotonic() < end_s and found[-1] < wires.world_size - 1:
            if not self._with_store(lambda store: found.append(store.add(_READERS, 0))):
                return
            time.sleep(0.1)

    # What waiting ranks do.

    def explained(self, wait: Waiting, error: RuntimeError) -> RuntimeError:
        """What is to be raised where an exchange failed with an error of the library's: the same,
        with a note, where no other rank says that it has failed.

        Where a peer closed the connection it may be about to say why.
        """
        end_s = time.monotonic() + PATIENCE_S
        while not self._reason and time.monotonic() < end_s and self._find_reason():
            time.sleep(0.1)
        if self._reason or self._listen_for_ends(wait.group):
            self._fails_now()
            return BrokenOff(f"{self._reason} (this rank waited in {wait.where()})")
        note = (
            f"ds_moe_ext: rank {self._launch.rank} was in {wait.where()} when the exchange "
            "with other ranks failed, and none of them gave a reason. If the connection was "
            "closed, one of them has ended; after a timeout, one of them did not arrive: "
            f"{self.remedy}"
        )
        error.args = (f"{error}\n{note}",)  # Python 3.10 has no add_note
        return error

    def _listen_for_ends(self, group: Any = None) -> bool:
        """Whether there is a reason: another rank has reported one, or some are heard of no more,
        of which others are notified then."""
        wires = self._wires
        if wires is None:
            return False
        if not self._find_reason():
            self._reason = (
                "the rendezvous store does not answer: the process that runs it (rank 0 or a "
                "launcher) has ended or stopped"
            )
            return True
        listen_s = self.patience.silent_after_s
        before, end_s = self._beats(group), time.monotonic() + listen_s
        if len(before) < wires.world_size - 1:  # others find those that this rank does not look at
            end_s += BEAT_S
        while before and time.monotonic() < end_s and not self._reason and self._find_reason():
            time.sleep(0.25)
        if self._reason:
            return True
        silent = _silent(before, self._beats(group))
        if not silent:
            return False
        self._notify_others(
            f"{_ranks(silent)} ended or stopped without a message: no heartbeat for {listen_s} "
            "s; see the logs of the launcher and of the system (such as its out-of-memory "
            "killer)"
        )
        return True

    def _beats(self, group: Any = None) -> dict[int, bytes]:
        """What other ranks have counted to: those of a communicator, and the next ones of the
        world, round it. In a large one nobody needs to look at all, which would be more than a
        store can bear: who has stopped has some before it that look, and who finds it notifies
        all."""
        wires, found = self._launch, dict[int, bytes]()
        size = wires.world_size
        nearest = [(wires.rank + step) % size for step in range(1, min(NEAREST + 1, size))]
        members = () if group is None else wires.ranks_of(group)
        others = sorted({*nearest, *members} - {wires.rank})

        def look(store: Store) -> None:
            keys = {rank: _BEAT.format(rank) for rank in others}
            if not store.check([*keys.values()]):
                keys = {rank: key for rank, key in keys.items() if store.check([key])}
            if keys:
                found.update(zip(keys, store.multi_get([*keys.values()])))

        return found if self._with_store(look) else {}

    def _beat(self, now_s: float) -> None:
        if now_s - self._hearing.logged_s >= BEAT_S:
            self._hearing.logged_s = now_s
            key, text = _BEAT.format(self._launch.rank), str(now_s)
            self._with_store(lambda store: store.set(key, text))

    def explain_last(self, error: BaseException) -> None:
        """Say why a collective that is not ours has failed, and with it this process."""
        if _is_of_network(error) and not self.has_failed and self._listen_for_ends():
            self._fails_now()
            _log_line(self._reason)

    def _watch(self, ends: threading.Event) -> None:
        latest, latest_s = self._latest, time.monotonic()
        self._beat(latest_s)
        while not ends.wait(PERIOD_S):
            now_s = time.monotonic()
            self._beat(now_s)
            if latest is not self._latest:
                latest, latest_s = self._latest, now_s
            late = [w for w in [*self.waits.values()] if now_s - w.since_s > PATIENCE_S]
            began_s = max(latest_s, self._pass_since_s)
            is_idle = not self.has_failed and now_s - began_s > HOST_PATIENCE_S
            if late:
                self._look_at(late, now_s)
            elif is_idle:
                self._look_for_host(now_s)
            if late or is_idle:
                self._look_for_ends(now_s)
            else:
                self._hearing.silence = Silence()
            if self._posted and not late:
                self._posted = False
                self._with_store(lambda store: store.delete_key(_WAIT.format(self._launch.rank)))
        self._reports_its_end()

    def _reports_its_end(self) -> None:
        self._with_store(lambda store: store.set(_BEAT.format(self._launch.rank), _ENDED.decode()))

    def _look_at(self, late: Sequence[Waiting], now_s: float) -> None:
        if self.has_failed:  # what is left of the pass that failed
            late = [w for w in late if w.since_s < self._failed_s < now_s - PATIENCE_S]
            self._break_off(late)
            return
        self._find_reason()
        if self._reason:
            self._break_off([*self.waits.values()])
            return
        for wait in late:
            if wait.heard is None:
                wait.heard = Heard(now_s, self._beats(wait.group))
            log_after_s = self.patience.log_after_s + wait.num_reported * self.patience.log_every_s
            if now_s - wait.since_s > log_after_s:
                wait.num_reported += 1
                self._log(wait, now_s)
                return

    def _look_for_host(self, now_s: float) -> None:
        """It may wait in a collective of its own, which is left in its passes alone: nobody knows
        what a script does between them."""
        if self._reason:
            return
        if self._num_passes:
            self._find_reason()
        if self._reason:
            self._launch.break_off_all()
        else:
            self._log_stops(now_s)

    def _look_for_ends(self, now_s: float) -> None:
        """End all waits where a rank is not heard of for as long as the key says, but for one that
        ended as it should and that no step needs."""
        ends_after_s = self.patience.ends_after_s
        if ends_after_s is None or self.has_failed or self._reason:
            return
        looked_s = self._hearing.silence.looked_s
        if looked_s is not None and now_s - looked_s < BEAT_S:  # nobody counts more often
            return
        self._hearing.silence.look(self._beats(), now_s)
        is_needed = bool(self._num_passes or self.waits)
        beats = self._hearing.silence.beats
        silent = [
            rank
            for rank, lasted_s in self._hearing.silence.lasted_s.items()
            if lasted_s > ends_after_s and (is_needed or beats[rank] != _ENDED)
        ]
        if not silent:
            return
        self._notify_others(
            f"{_ranks(silent)} stopped or ended without a message: no heartbeat for "
            f"{ends_after_s} s ({WHERE}.ends_after_s)"
        )
        self._break_off_all()

    def _log_stops(self, now_s: float) -> None:
        """Say which ranks are not heard of any more, but for those that ended as they should, of
        which a step alone has need."""
        heard = self._hearing.heard
        if heard is None:
            self._hearing.heard = Heard(now_s, self._beats())
        elif now_s - heard.since_s > self.patience.log_after_s:
            self._hearing.heard = None
            silent = _silent(heard.beats, self._beats())
            if not self._num_passes:
                silent = [rank for rank in silent if heard.beats[rank] != _ENDED]
            keys = [_STOP.format(rank, heard.beats[rank].decode()) for rank in silent]
            first: list[bool] = []  # of the ranks that find it, which one reports it
            self._with_store(lambda store: first.extend(store.add(key, 1) == 1 for key in keys))
            new = [rank for rank, is_first in zip(silent, first) if is_first]
            if new:
                _log_line(
                    f"{_ranks(new)} ended, stopped, or is in a long call that blocks its "
                    f"threads: no heartbeat for {now_s - heard.since_s:.0f} s. Rank "
                    f"{self._launch.rank} is in no exchange of MoE layers; if it needs them, "
                    "it keeps waiting"
                )

    def _break_off(self, waits: Iterable[Waiting]) -> None:
        wires = self._launch
        for wait in waits:
            if not wait.is_broken:
                wait.is_broken = True
                wires.break_off(wait.group)

    def _find_reason(self) -> bool:
        """Look whether another rank has failed; whether the store answers."""
        wires = self._launch

        def look(store: Store) -> None:
            if store.add(_FAILURES, 0) <= 0 or self.has_failed:
                return
            for rank in range(wires.world_size):
                key = _FAILURE.format(rank)
                if rank != wires.rank and store.check([key]):
                    self._reason = store.get(key).decode()
                    store.add(_READERS, 1)
                    return

        return self._with_store(look)

    def _log(self, wait: Waiting, now_s: float) -> None:
        """Say for whom this rank waits, unless a lower one that waits there too says so."""
        wires = self._launch
        own, where = wires.rank, wait.where()
        found: dict[int, str] = {}
        ranks = sorted(rank for rank in wires.ranks_of(wait.group) if rank != own)

        def look(store: Store) -> None:
            store.set(_WAIT.format(own), where)
            self._posted = True
            for rank in ranks:
                key = _WAIT.format(rank)
                if store.check([key]):
                    found[rank] = store.get(key).decode()
                    if rank < own and found[rank] == where:
                        return

        if self._with_store(look) and where not in [found.get(rank) for rank in range(own)]:
            heard, silent = wait.heard, list[int]()
            if heard is not None and now_s - heard.since_s >= 2 * BEAT_S:
                silent = _silent(heard.beats, self._beats(wait.group))
            lines = [
                f"rank {rank} sends no heartbeat: it has ended or stopped"
                if rank in silent
                else f"rank {rank} waits in {found[rank]}"
                if rank in found
                else f"rank {rank} is in none of them"
                for rank in ranks
            ]
            waited_s = now_s - wait.since_s
            _log_line(
                f"rank {own} has waited {waited_s:.0f} s in {where} for other ranks; of the "
                f"exchanges of MoE layers {', '.join(lines)}. It keeps waiting; if they do not "
                f"arrive: {self.remedy}"
            )

    def _with_store(self, work: Callable[[Store], object]) -> bool:
        """Whether the store answered: it ends with the process that keeps it."""
        wires = self._wires
        if wires is None or os.getpid() != wires.process:  # a fork has its parent's connection
            return False
        with self._hearing.lock:
            self._hearing.asked_s = time.monotonic()
            try:
                work(wires.store)
            except RuntimeError:  # torch's DistError is one
                return False
            finally:
                self._hearing.asked_s = None
        return True

    def _watch_store(self, ends: threading.Event) -> None:
        """Its process may have stopped: whoever asks it then waits for ever."""
        asked_s: float | None = None
        while not ends.wait(PERIOD_S):
            now_asked_s = self._hearing.asked_s
            is_same = now_asked_s is not None and now_asked_s == asked_s
            self._hearing.unanswered, asked_s = (
                self._hearing.unanswered + 1 if is_same else 0,
                now_asked_s,
            )
            if is_same:
                self._look_at_store()

    def _look_at_store(self) -> None:
        """Time is counted by looks: this process may have stood still itself."""
        wires, ends_after_s = self._wires, self.patience.ends_after_s
        waited_s = self._hearing.unanswered * PERIOD_S
        if wires is None or self._reason or self.has_failed:
            return
        what = (
            f"the rendezvous store has not answered rank {wires.rank} for {waited_s:.0f} s: "
            "the process that runs it (rank 0 or a launcher) has stopped"
        )
        if waited_s == self.patience.log_after_s:
            _log_line(what)
        if ends_after_s is not None and waited_s > ends_after_s:
            self._reason = f"{what} ({WHERE}.ends_after_s)"
            self._break_off_all()

    def _break_off_all(self) -> None:
        """Those of the host too, for another thread may wait there."""
        for wait in [*self.waits.values()]:
            wait.is_broken = True
        self._launch.break_off_all()


WATCH = Watch()
"""Of this process, as its process group is."""


class Waiting:
    """The calling thread is in an exchange, inside the block.

    Args:
        group: the communicator; None is that of the world, in which nobody is broken off.
        watch: who looks at it.

    Attributes:
        group: as given.
        since_s: when the thread came.
        where: what it does, for a person.
        is_broken: it was broken off.
        num_reported: how often its wait was reported.
        heard: when that was found to last.
    """

    __slots__ = ("_watch", "group", "heard", "is_broken", "num_reported", "since_s", "where")
    since_s: float
    where: Callable[[], str]
    is_broken: bool
    num_reported: int
    heard: Heard | None

    def __init__(self, group: Any, watch: Watch = WATCH) -> None:
        self.group, self._watch = group, watch

    def __enter__(self) -> None:
        if self.group is None:
            return
        here = threading.get_ident()
        self.since_s, self.where = time.monotonic(), self._watch.place_of(here)
        self.is_broken, self.num_reported, self.heard = False, 0, None
        self._watch.waits[here] = self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if self.group is None:
            return
        del self._watch.waits[threading.get_ident()]
        if (error is None and not self.is_broken) or not self._watch.is_on:
            return
        if isinstance(error, RuntimeError) and not isinstance(error, BrokenOff):
            explained = self._watch.explained(self, error)
            if explained is not error:
                raise explained from error
        if error is None:  # NCCL lets go of who waits, and says nothing
            raise self._watch.explained(self, RuntimeError("it was interrupted"))


def _after_hook(watch: Watch, before: Callable[..., Any]) -> Callable[..., None]:
    """In the place of ``sys.excepthook``: an error that nobody caught ends this process."""

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        watch.explain_last(error)
        watch.failed(error, "its script")
        before(kind, error, trace)
        if not isinstance(error, KeyboardInterrupt):  # which comes to all
            watch.linger()

    return hook


_FAILURES = "ds_moe_ext/failures"  # how many there are
_FAILURE = "ds_moe_ext/failure/{}"
_READERS = "ds_moe_ext/readers"  # how often one was read
_WAIT = "ds_moe_ext/wait/{}"
_BEAT = "ds_moe_ext/beat/{}"
_ENDED = b"ended"  # the last beat of a rank that ends as it should
_STOP = "ds_moe_ext/stop/{}/{}"  # of a rank, at a beat: how many have found it


def _end(ends: threading.Event, watching: threading.Thread) -> None:
    """This process ends, as its watch is to notify the others."""
    ends.set()
    watching.join(PATIENCE_S)


def _log_line(text: str) -> None:
    print(f"ds_moe_ext: {text}", file=sys.stderr, flush=True)


def _post_failure(store: Store, rank: int, reason: str) -> None:
    store.set(_FAILURE.format(rank), reason)
    store.set(_READERS, "0")
    store.add(_FAILURES, 1)


def _silent(before: Mapping[int, bytes], after: Mapping[int, bytes]) -> list[int]:
    return [rank for rank, beat in before.items() if after.get(rank) == beat]


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _is_of_network(error: BaseException) -> bool:
    """Whether a collective has failed: torch's own class of it, or gloo, which has none."""
    is_torchs = type(error).__module__.startswith("torch.distributed")
    return is_torchs or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
