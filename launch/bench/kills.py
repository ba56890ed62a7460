# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed or stopped at random moments: how soon the others end, and what is left.

`python launch/bench/kills.py --cases 28`
`python launch/bench/kills.py --how save save_beside save_over --cases 60`
`python launch/bench/kills.py --how stop --cases 20 --at_once 3 --patience_s 100 --seed 2`

Cases take turns between hosts, strategies and what happens. No launcher ends the others, as
torchrun would: they end by themselves or are counted as hanging. Where a rank is stopped ("stop")
the others say so; with `waits.ends_after_s` ("end") they end. In cases of a save, ranks save after
every step until all are killed at once: under a new name, beside training, or always over the same
one. Then the last checkpoint must be loaded, as it was in one step on all ranks; one that was
overwritten may be refused in a line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore

STRATEGIES = ("ep", "fssdp", "prophet", "esp over fssdp", "zebra")
HOSTS = ("deepspeed", "megatron")
SHARED = Path("/dev/shm")
SAVES = ("save", "save_beside", "save_over")
HOW = ("kill", "stop", "end", *SAVES)
REFUSED = ("megatron", "zebra", "save_beside")
"""At start, by name."""

WHERE = r"layers\.\d|engine\.|a step's passes|the optimizer's step"
"""A layer, or a part of a step."""

START_S = 400.0
"""Of three steps, or of two saves, beside other work."""

ENDS_AFTER_S = 10
"""Of `waits`, in cases of "end"."""


@dataclass(frozen=True)
class Case:
    """What happens to whom."""

    host: str  # host, strategy: of the run
    strategy: str
    how: str  # "kill", "stop", "end", or of ``SAVES``
    victim: int  # the rank; in a save all are killed
    after_s: float  # seconds behind the third step; in a save, behind the first checkpoint


@dataclass(frozen=True)
class Outcome:
    """What became of it."""

    case: Case  # what happened
    # when the last of the others had ended; in a stop, when the first line was reported. None: not
    # in time
    ended_s: float | None
    # names_layer, names_rank: what the others reported says where they waited, and for whom
    names_layer: bool
    names_rank: bool
    is_loaded: bool | None  # of a save: the last checkpoint was loaded, whole
    is_refused: bool  # of a save: it was not, in one line that says why
    reported: str  # by the others, at the end


class NotStarted(RuntimeError):
    """Ranks did not come as far as to be killed."""


class Continued(RuntimeError):
    """A rank that had been stopped runs: by no signal of this script's."""


def train(rank: int, port: int, case: Case, folder: Path, loads: bool) -> None:
    """What each of two ranks does, in a process of its own."""
    os.setsid()  # with the processes that a host writes by, which outlive a kill
    output = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    from damage import made

    waits = {"ends_after_s": ENDS_AFTER_S if case.how == "end" else None}
    run = made(case.host, case.strategy, beside=case.how == "save_beside", waits=waits)
    if loads:
        try:
            run.load(folder / "saved")
        except Exception as error:
            print(f"refused: {type(error).__name__}: {error!s:.500}", flush=True)
        else:
            state = state_of(run)
            run.step()
            print("loaded", state, flush=True)
        dist.barrier()
        os._exit(0)  # nothing is asked of the end
    save = getattr(run, case.how, None)
    number = 0
    while True:
        run.step()
        number += 1
        print("step", number, flush=True)
        if save is not None and number > 1:
            print("state", number, state_of(run), flush=True)
            save(folder / "saved")
            print("saved", number, flush=True)


def state_of(run: Any) -> str:
    """Digests of a rank's weights and states, without the count of steps."""
    *tensors, _ = run.tensors()
    return " ".join(
        hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
        for tensor in tensors
    )


def step_of(loaded: Sequence[str], before: Sequence[str]) -> str:
    """Of which step the state was that ranks loaded, by what they had stated before; experts may
    have come to others. Empty: of none."""

    def together(reported: Sequence[str], what: str) -> list[str]:
        found = [re.search(rf"{what} ([0-9a-f ]+)$", text, re.MULTILINE) for text in reported]
        return sorted(word for each in found if each for word in each[1].split())

    own = together(loaded, "loaded")
    steps = re.findall(r"state (\d+) ", before[0])
    return next((n for n in steps if own and together(before, f"state {n}") == own), "")


@contextmanager
def started(case: Case, folder: Path, loads: bool = False) -> Iterator[list[ForkServerProcess]]:
    """The ranks, which end with the block."""
    context = multiprocessing.get_context("forkserver")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(2):
        given = (rank, store.port, case, folder, loads)
        ranks.append(context.Process(target=train, args=given, daemon=False))
        ranks[-1].start()
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            with suppress(ProcessLookupError):
                os.killpg(int(process.pid or 0), signal.SIGKILL)
            process.join()
        del store


def text_of(folder: Path, rank: int) -> str:
    """What a rank has printed."""
    path = folder / f"rank{rank}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def wait_for(done: Any, seconds: float) -> float | None:
    """Seconds until it is true; None where it did not come to that."""
    begun_s = time.monotonic()
    while not done():
        if time.monotonic() - begun_s > seconds:
            return None
        time.sleep(0.05)
    return time.monotonic() - begun_s


def is_stopped(process: int | None) -> bool:
    """Whether it has neither gone on nor ended."""
    return "(stopped)" in Path(f"/proc/{process}/status").read_text()


def outcome(case: Case, patience_s: float) -> Outcome:
    """Run one case."""
    folder = Path(tempfile.mkdtemp(prefix="kills_"))
    marks = "saved 3" if case.how in SAVES else "step 3"  # when one is surely there
    loaded, refused, names_layer, names_rank, text = None, False, False, False, ""
    with started(case, folder) as ranks:
        if wait_for(lambda: all(marks in text_of(folder, r) for r in range(2)), START_S) is None:
            raise NotStarted(f"{case} did not start: {text_of(folder, 0)[-3000:]}")
        time.sleep(case.after_s)
        if case.how in SAVES:
            for process in ranks:
                os.kill(int(process.pid or 0), signal.SIGKILL)
            ended_s = wait_for(lambda: not any(p.is_alive() for p in ranks), patience_s)
        else:
            victim, other = ranks[case.victim], ranks[1 - case.victim]
            length = len(text_of(folder, 1 - case.victim))
            word = signal.SIGKILL if case.how == "kill" else signal.SIGSTOP
            os.kill(int(victim.pid or 0), word)

            def is_reported() -> bool:
                return "ds_moe_ext:" in text_of(folder, 1 - case.victim)[length:]

            def has_ended() -> bool:
                return not other.is_alive()

            ended_s = wait_for(is_reported if case.how == "stop" else has_ended, patience_s)
            text = text_of(folder, 1 - case.victim)[length:]
            if case.how != "kill" and not is_stopped(victim.pid):
                raise Continued(f"not counted, for somebody let its victim go on: {case}")
            names_layer = re.search(WHERE, text) is not None
            names_rank = re.search(rf"rank {case.victim} ", text) is not None
    if case.how in SAVES:
        before = [text_of(folder, rank) for rank in range(2)]

        def after(rank: int) -> str:
            return text_of(folder, rank)[len(before[rank]) :]

        with started(case, folder, loads=True):
            wait_for(lambda: all(re.search("loaded|refused", after(r)) for r in range(2)), START_S)
        loaded = bool(step_of([after(0), after(1)], before))
        refused = all(re.search(r"refused: .*/saved/.*", after(rank)) for rank in range(2))
        text = "".join(f"rank {rank}: {after(rank)[-1000:]}\n" for rank in range(2))
        if not loaded and not refused:
            text += before[0][-1000:] + before[1][-1000:]
    shutil.rmtree(folder)
    return Outcome(case, ended_s, names_layer, names_rank, loaded, refused, text)


def files_there() -> set[str]:
    """Names in shared memory and among temporary files, without those of multiprocessing here."""
    names = {*os.listdir(SHARED), *os.listdir(tempfile.gettempdir())}
    return {name for name in names if not name.startswith("pymp-")}


def main() -> None:
    """Draw cases, run them, count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=len(HOSTS) * len(STRATEGIES) * 2)
    parser.add_argument("--how", nargs="+", choices=HOW, default=["kill"])
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=HOSTS)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--at_once", type=int, default=1, help="cases; their ranks share the cores")
    parser.add_argument("--patience_s", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all outcomes here")
    given = parser.parse_args()
    preload = ["deepspeed", "transformers.models.mixtral.modeling_mixtral", "damage"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    draw, begun_s, found = random.Random(given.seed), time.monotonic(), list[Outcome]()
    kinds = [(h, s, w) for w in given.how for s in given.strategies for h in given.hosts]
    kinds = [kind for kind in kinds if kind != REFUSED]
    cases = []
    for number in range(given.cases):
        host, strategy, how = kinds[number % len(kinds)]
        cases.append(Case(host, strategy, how, draw.randrange(2), draw.uniform(0, 2.0)))
    before = files_there()

    def tried(case: Case) -> None:
        if time.monotonic() - begun_s < given.seconds:
            try:
                found.append(outcome(case, given.patience_s))
            except (NotStarted, Continued) as error:
                print(error, flush=True)
            if given.json:
                given.json.write_text(json.dumps([asdict(each) for each in found], indent=1))

    with ThreadPoolExecutor(given.at_once) as workers:
        list(workers.map(tried, cases))
    print(
        "left in /dev/shm and the folder for temporary files:", *(files_there() - before or ["-"])
    )
    show(found)


def show(found: list[Outcome]) -> None:
    """A line for each kind of case."""
    table = Table(title=f"{len(found)} cases, two ranks")
    for name in ("host", "strategy", "what", "cases", "ended or reported", "seconds: median, most"):
        table.add_column(name)
    for name in ("names a layer", "names the rank", "loaded", "refused"):
        table.add_column(name)
    for kind in dict.fromkeys((o.case.host, o.case.strategy, o.case.how) for o in found):
        own = [o for o in found if (o.case.host, o.case.strategy, o.case.how) == kind]
        seconds = sorted(o.ended_s for o in own if o.ended_s is not None)
        typical = f"{seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f}" if seconds else ""
        counts = (len(own), len(seconds), typical, sum(o.names_layer for o in own))
        more = (sum(o.names_rank for o in own), sum(bool(o.is_loaded) for o in own))
        table.add_row(*kind, *map(str, (*counts, *more, sum(o.is_refused for o in own))))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
