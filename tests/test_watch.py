# SPDX-License-Identifier: Apache-2.0
"""What a watch takes for a failure of another rank, and what it says of a wait: time is set by
hand, and the store is a dict."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from torch.distributed import TCPStore

from ds_moe_ext.schedule import watch
from ds_moe_ext.schedule.watch import BrokenOff, Patience, Waiting, Watch, Wires

GROUP = "a communicator"


@dataclass
class Store:
    """As torch's, in one process."""

    values: dict[str, bytes] = field(default_factory=dict)

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


@dataclass
class Rank:
    """A watch that nobody runs, and what it broke off."""

    watch: Watch
    broken: list[str]

    def late(self, seconds: float) -> None:
        """It looks at its waits, which have lasted so long."""
        waits = [*self.watch.waits.values()]
        self.watch._look_at(waits, max(wait.since_s for wait in waits) + seconds)


def comes(by: Watch, group: str = GROUP) -> None:
    """The calling thread enters an exchange."""
    Waiting(group, by).__enter__()


def leaves(by: Watch) -> Waiting:
    """It has left it."""
    return by.waits.pop(threading.get_ident())


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    ticks = count(start=0.0, step=0.001)
    monkeypatch.setattr(watch.time, "monotonic", lambda: 900.0 + next(ticks))
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: [next(ticks) for _ in range(500)])
    store, found = Store(), []
    for rank in range(2):
        broken: list[str] = []
        wires = Wires(
            *(store, lambda: store, rank, 2, os.getpid()),
            *(lambda group: (0, 1), broken.append, lambda: None),
        )
        found.append(Rank(Watch(_wires=wires), broken))
    yield found


def test_who_waits_leaves_when_another_has_failed(ranks: list[Rank]) -> None:
    waiting, failing = ranks
    waiting.watch.at(lambda: "layer 1")
    comes(waiting.watch)
    waiting.late(3.0)
    assert waiting.broken == []
    failing.watch.at(lambda: "layer 0")
    failing.watch.failed(ValueError("no"), None)
    failing.watch.failed(KeyError("what came of it"), "elsewhere")
    waiting.late(4.0)
    assert waiting.broken == [GROUP]
    error = waiting.watch.explained(leaves(waiting.watch), RuntimeError("closed"))
    assert isinstance(error, BrokenOff)
    assert str(error) == ("rank 1 failed in layer 0: ValueError: no (this rank waited in layer 1)")


def test_an_error_of_all_ranks_is_no_reason_to_leave(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.watch.failed(ValueError("no"), "a step")
    first, second = ranks
    comes(first.watch)  # both go on, the second later
    first.late(5.0)
    assert first.broken == []
    for rank in ranks:
        rank.watch.went_through()
    first.late(5.0)
    assert first.broken == []
    assert not second.watch.has_failed


def test_what_is_left_of_a_failed_pass_is_let_go(ranks: list[Rank]) -> None:
    first, _ = ranks
    comes(first.watch)  # a stream
    first.watch.failed(ValueError("no"), "another stream")
    first.late(105.0)  # it came before the failure
    assert first.broken == [GROUP]


def test_an_exchange_that_failed_by_itself_says_where(ranks: list[Rank]) -> None:
    """Another rank may then learn of it as of any failure."""
    first, second = ranks
    first.watch.at(lambda: "layer 1")
    comes(first.watch)
    error = RuntimeError("connection closed")
    assert first.watch.explained(leaves(first.watch), error) is error
    assert "rank 0 was in layer 1" in str(error)
    first.watch.failed(error, "engine.forward")
    comes(second.watch)
    second.late(3.0)
    assert second.broken == [GROUP]


def test_a_stall_is_reported_and_no_more(
    ranks: list[Rank], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = ranks
    first.watch.at(lambda: "layer 1")
    comes(first.watch)
    first.late(9.0)
    assert capsys.readouterr().err == ""
    first.late(11.0)
    printed = capsys.readouterr().err
    assert printed.startswith("ds_moe_ext: rank 0 has waited 11 s in layer 1 for other ranks")
    assert "rank 1 is in none of them" in printed and "ds_moe_ext.joined(engine)" in printed
    first.late(30.0)
    assert capsys.readouterr().err == ""  # once a minute
    second.watch.at(lambda: "layer 0")
    comes(second.watch, "another communicator")
    second.late(11.0)
    assert "rank 0 waits in layer 1" in capsys.readouterr().err
    first.late(71.0)
    assert "rank 1 waits in layer 0" in capsys.readouterr().err
    assert first.broken == second.broken == []


def test_a_rank_that_was_killed_is_named(
    ranks: list[Rank], capsys: pytest.CaptureFixture[str]
) -> None:
    """It has counted, and does no more; who finds that reports the others."""
    first, second = ranks
    first.watch.at(lambda: "layer 1")
    second.watch._beat(1000.0)
    comes(first.watch)
    first.late(3.0)
    first.late(11.0)
    assert "rank 1 sends no heartbeat: it has ended or stopped" in capsys.readouterr().err
    error = first.watch.explained(leaves(first.watch), RuntimeError("closed"))
    assert isinstance(error, BrokenOff)
    assert str(error).startswith("rank 1 ended or stopped without a message: no heartbeat")
    assert str(error).endswith("(this rank waited in layer 1)")
    other = Watch(_wires=replace(second.watch._wires, rank=2, world_size=3))  # type: ignore[type-var]
    comes(other)
    reported = other.explained(leaves(other), RuntimeError("closed"))
    assert str(reported).startswith("rank 1 ended")


def test_a_stop_in_a_wait_of_the_host_is_reported_once(
    ranks: list[Rank], capsys: pytest.CaptureFixture[str]
) -> None:
    """By one of those that find it, also where nobody is in an exchange of ours."""
    first, second = ranks
    third = Watch(_wires=replace(first.watch._wires, rank=2, world_size=3))  # type: ignore[type-var]
    second.watch._beat(1000.0)
    for each in (first.watch, third):
        each._look_for_host(1000.0)
        each._look_for_host(1009.0)
    assert capsys.readouterr().err == ""
    for each in (first.watch, third):
        each._look_for_host(1011.0)
    printed = capsys.readouterr().err
    assert printed.startswith("ds_moe_ext: rank 1 ended, stopped")
    assert "no heartbeat for 11 s. Rank 0 is in no exchange" in printed
    assert printed.count("\n") == 1
    for seconds in (1012.0, 1023.0):
        first.watch._look_for_host(seconds)
    assert capsys.readouterr().err == ""
    second.watch._beat(1024.0)  # it goes on, and stops again
    for seconds in (1025.0, 1036.0, 1047.0):
        first.watch._look_for_host(seconds)
    assert "rank 1 ended" in capsys.readouterr().err


def test_a_rank_that_ended_is_missed_in_a_step_alone(
    ranks: list[Rank], capsys: pytest.CaptureFixture[str]
) -> None:
    """Elsewhere ranks may have more or less to do than others, at the end of a script."""
    first, second = ranks
    second.watch._reports_its_end()
    for seconds in (1000.0, 1011.0, 1022.0):
        first.watch._look_for_host(seconds)
    assert capsys.readouterr().err == ""
    with first.watch.host_pass("engine.step"):
        for seconds in (1033.0, 1044.0):
            first.watch._look_for_host(seconds)
    assert "rank 1 ended" in capsys.readouterr().err


def test_a_failure_elsewhere_is_left_to_the_script_between_steps(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranks
    broken: list[str] = []
    wires = replace(first.watch._wires, break_off_all=lambda: broken.append("all"))  # type: ignore[type-var]
    first.watch._wires = wires
    second.watch.failed(ValueError("no"), "a step")
    first.watch._look_for_host(1000.0)
    assert broken == []
    with pytest.raises(BrokenOff), first.watch.host_pass("engine.step"):
        first.watch._look_for_host(1001.0)
        raise RuntimeError("gloo: closed")
    assert broken == ["all"]


def look(rank: Rank, *seconds_s: float) -> None:
    for now_s in seconds_s:
        rank.watch._look_for_ends(now_s)


def test_a_wait_for_a_stopped_rank_ends_when_the_key_says(
    ranks: list[Rank], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not one for a rank that is slow, and still counts."""
    first, second = ranks
    broken: list[str] = []
    wires = replace(first.watch._wires, break_off_all=lambda: broken.append("all"))  # type: ignore[type-var]
    first.watch._wires = wires
    first.watch.at(lambda: "layer 1")
    comes(first.watch)
    second.watch._beat(1000.0)
    look(first, *range(1000, 1100, 5))
    assert broken == []  # the key is null
    first.watch.patience = Patience(ends_after_s=20)
    for now_s in range(1100, 1200, 5):
        second.watch._beat(now_s)
        look(first, now_s)
    look(first, *range(1200, 1220, 5))
    assert broken == []
    look(first, 1220)
    assert broken == ["all"]
    error = first.watch.explained(leaves(first.watch), RuntimeError("closed"))
    assert isinstance(error, BrokenOff)
    assert str(error).startswith("rank 1 stopped or ended without a message: no heartbeat")
    assert str(error).endswith("(ds_moe_ext.waits.ends_after_s) (this rank waited in layer 1)")
    other = Watch(_wires=replace(wires, rank=2, world_size=3))
    comes(other)
    assert "rank 1 stopped" in str(other.explained(leaves(other), RuntimeError("closed")))


def test_a_store_that_does_not_answer_is_reported_and_ends_waits(
    ranks: list[Rank], capsys: pytest.CaptureFixture[str]
) -> None:
    """As where rank 0 keeps it, and has stopped."""
    waiting = ranks[1].watch
    broken: list[str] = []
    waiting._wires = replace(waiting._wires, break_off_all=lambda: broken.append("all"))  # type: ignore[type-var]
    waiting.patience = Patience(ends_after_s=20)
    waiting.at(lambda: "layer 1")
    comes(waiting)
    for looks in range(21):
        waiting._hearing.unanswered = looks
        waiting._look_at_store()
    printed = capsys.readouterr().err
    assert printed.startswith("ds_moe_ext: the rendezvous store has not answered rank 1 for 10")
    assert printed.count("\n") == 1
    assert broken == []
    waiting._hearing.unanswered = 21
    waiting._look_at_store()
    assert broken == ["all"]
    error = waiting.explained(leaves(waiting), RuntimeError("closed"))
    assert isinstance(error, BrokenOff)
    assert "has stopped (ds_moe_ext.waits.ends_after_s) (this rank waited in layer 1)" in str(error)


def test_nobody_is_silent_while_one_stands_still_itself(ranks: list[Rank]) -> None:
    """As where all of a machine was suspended."""
    first, second = ranks
    first.watch.patience = Patience(ends_after_s=20)
    comes(first.watch)
    second.watch._beat(1000.0)
    look(first, 1000.0, 1002.0, 4000.0)
    assert not first.watch._reason
    look(first, *range(4002, 4016, 2))
    assert first.watch._reason


def test_a_rank_that_ended_as_it_should_ends_no_wait_of_a_script(ranks: list[Rank]) -> None:
    first, second = ranks
    first.watch.patience = Patience(ends_after_s=20)
    second.watch._reports_its_end()
    look(first, *range(1000, 1100, 5))
    assert not first.watch._reason
    with first.watch.host_pass("engine.step"):
        look(first, 1105)
    assert first.watch._reason


AT_ITS_END = """
import sys

import torch.distributed as dist

from ds_moe_ext.core.comm import begin_watch
from ds_moe_ext.schedule.watch import WATCH

rank, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
begin_watch()
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    while WATCH._beats()[1] != b"ended":
        pass
    print("reported")
"""


def test_a_process_says_that_it_ends() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", AT_ITS_END, str(rank), str(store.port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["reported\n", ""]


def test_a_script_that_ends_by_a_killed_rank_says_so(
    ranks: list[Rank], capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a collective of the host's optimizer."""
    first, second = ranks
    second.watch._beat(1000.0)
    first.watch.explain_last(ValueError("a mistake"))
    assert capsys.readouterr().err == ""
    first.watch.explain_last(RuntimeError("gloo: connection reset"))
    assert capsys.readouterr().err.startswith("ds_moe_ext: rank 1 ended or stopped")
    assert first.watch.has_failed


def test_a_store_that_is_gone_is_reported(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where rank 0 keeps it, and was killed."""
    first, _ = ranks
    monkeypatch.setattr(first.watch, "_with_store", lambda work: False)
    comes(first.watch)
    error = first.watch.explained(leaves(first.watch), RuntimeError("closed"))
    assert str(error).startswith("the rendezvous store does not answer")


def test_who_counts_on_is_not_named(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's collective that fails, while the other rank is there."""
    first, second = ranks
    second.watch._beat(1000.0)
    beats = iter([{1: b"1"}, {1: b"2"}])
    monkeypatch.setattr(first.watch, "_beats", lambda _: next(beats))
    with (
        pytest.raises(RuntimeError, match="gloo says") as caught,
        first.watch.host_pass("engine.step"),
    ):
        raise RuntimeError("gloo says something")
    assert not isinstance(caught.value, BrokenOff)


def of_many(size: int, group: Sequence[int]) -> tuple[Store, Callable[[int], Watch]]:
    """A store, and the watches of a large world by their ranks."""
    store = Store()

    def watch_of(rank: int) -> Watch:
        wires = Wires(
            *(store, lambda: store, rank, size, os.getpid()),
            *(lambda _: group, lambda _: None, lambda: None),
        )
        return Watch(_wires=wires)

    return store, watch_of


def test_in_a_large_world_each_listens_to_some(ranks: list[Rank]) -> None:
    """All to all would be millions of keys. Every rank has those that listen to it, and who waits
    in an exchange listens to all that take part."""
    _, watch_of = of_many(1000, group=(3, 500, 900))
    for rank in range(1000):
        watch_of(rank)._beat(1000.0)
    assert [*watch_of(3)._beats()] == [*range(4, 68)]
    assert [*watch_of(990)._beats()] == [*range(54 + 1), *range(991, 1000)]
    assert [*watch_of(900)._beats(GROUP)] == [3, 500, *range(901, 965)]


IN_A_FAKE_GROUP = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_moe_ext.core.comm import KeyValueStore, begin_watch
from ds_moe_ext.schedule.watch import WATCH

dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
begin_watch()
print(KeyValueStore.of_world(), WATCH.is_on)
"""


@pytest.mark.slow
def test_a_fake_group_has_nobody_to_tell() -> None:
    """Host time is measured in one, by one process that stands for a rank of many."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FAKE_GROUP], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["None", "False"]
