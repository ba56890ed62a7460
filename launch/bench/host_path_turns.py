# SPDX-License-Identifier: Apache-2.0
"""Host time of one MoE layer of two checkouts, or of two contenders, by turns on one core.

`git worktree add ../before COMMIT`
`python launch/bench/host_path_turns.py ../before:ep .:ep ".:DeepSpeed AutoEP" --slots 8`

A core of a shared machine may change its speed by half within seconds, and each for itself. So each
contender has a process, all on the last core; one of them takes a few steps, then the next. Ratios
to the first are paired by turn; a checkout beside itself says how far to trust them. What
`host_path.py` says of the measured span holds here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import IO

import torch
from fake_world import as_on_cuda, fake_world, products_at_once
from host_path import BUILDERS, lower_us, no_collector, take_step
from host_path_contenders import Batch, Sizes
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rotation import NUM_WARM_UPS, rotated

STEPS = 4  # of a turn
_WORKER = "--answers"


def answer(name: str, ranks: int, slots: int, asked: IO[str], told: IO[str]) -> None:
    """Take the steps of a turn for each line that is asked; tell the caller's mean seconds of a
    layer, forward and backward. In a process of its own."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    sizes = Sizes(layers=4, experts=ranks * slots, tokens=64, top_k=2)
    with fake_world(ranks), as_on_cuda(), products_at_once():
        contender = BUILDERS[name](sizes)
        steps = (take_step(contender, Batch.of(sizes, number), number) for number in count())
        for _ in range(NUM_WARM_UPS):
            next(steps)
        with no_collector():
            for _ in asked:
                turn = [next(steps) for _ in range(STEPS)]
                seconds = statistics.fmean(s.forward.caller_s + s.backward.caller_s for s in turn)
                print(seconds, file=told, flush=True)


class Turns:
    """One contender of one checkout, in a process.

    Args:
        where: ``CHECKOUT:CONTENDER``.
        ranks: of the world.
        slots: experts that a rank is home to.
    """

    def __init__(self, where: str, ranks: int, slots: int) -> None:
        folder, _, name = where.partition(":")
        self.where = where
        root = Path(folder).resolve()
        # This script, of which older checkouts have none, with all else of the checkout's own.
        script = Path(__file__).resolve()
        paths = os.pathsep.join((str(root / "launch" / "bench"), str(root)))
        self._process = subprocess.Popen(
            [sys.executable, str(script), _WORKER, name, str(ranks), str(slots)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def take(self) -> float:
        """Seconds of a layer in its next turn.

        Raises:
            RuntimeError: its process has ended.
        """
        asked, told = self._process.stdin, self._process.stdout
        assert asked is not None and told is not None
        print(file=asked, flush=True)
        line = told.readline()
        if not line:
            raise RuntimeError(f"{self.where} ended with {self._process.wait()}; see its output")
        return float(line)

    def end(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(all_turns: Sequence[Turns], rounds: int, console: Console) -> list[list[float]]:
    """Seconds of each, turn by turn; the first turn of all is not counted."""
    found: list[list[float]] = [[] for _ in all_turns]
    pairs = list(zip(all_turns, found))
    for number in track(range(rounds + 1), "turns", console=console):
        for turns, seconds in rotated(pairs, number):
            took_s = turns.take()
            if number:
                seconds.append(took_s)
    return found


def table_of(names: Sequence[str], found: Sequence[Sequence[float]]) -> Table:
    """Lower quartiles, and quartiles of the ratios to the first."""
    table = Table("contender", title="the caller's processor us a layer, forward and backward")
    for column in ("lower quartile", "x first", "quartiles"):
        table.add_column(column, justify="right")
    for name, seconds in zip(names, found):
        ratios = [own / first for own, first in zip(seconds, found[0])]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        table.add_row(
            name, f"{lower_us(iter(seconds)):,.0f}", f"{middle:.3f}", f"{low:.3f}-{high:.3f}"
        )
    return table


def main() -> None:
    """Start all, let them take turns, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("contenders", nargs="+", help="CHECKOUT:CONTENDER, as of host_path.py")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--slots", type=int, default=8, help="experts a rank")
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    for where in given.contenders:
        if where.partition(":")[2] not in BUILDERS:
            parser.error(f"{where} names no contender; give CHECKOUT: and {', '.join(BUILDERS)}")
    console = Console(stderr=True)
    all_turns = [Turns(where, given.ranks, given.slots) for where in given.contenders]
    found = compare(all_turns, given.rounds, console)
    for turns in all_turns:
        turns.end()
    Console(width=None if sys.stdout.isatty() else 120).print(table_of(given.contenders, found))


if __name__ == "__main__":
    if sys.argv[1:2] == [_WORKER]:
        told, sys.stdout = sys.stdout, sys.stderr  # what libraries print is not an answer
        answer(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.stdin, told)
    else:
        main()
