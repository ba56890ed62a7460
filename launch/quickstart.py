# SPDX-License-Identifier: Apache-2.0
"""Two steps of quickstart.sh, reported in words that need no glossary.

`compile`: DeepSpeed's CPU collectives are compiled before ranks wait for them. `summary FOLDER`:
what the quickstart's runs have shown, and where to look next.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ds_moe_ext.commands.compare import EQUAL, Finished, equal_steps, largest_difference
from ds_moe_ext.files.documents import read_document
from ds_moe_ext.hosts.deepspeed.guard import is_compiled, notice_of_old_lock
from ds_moe_ext.report.summary import ON_CPU

BUILD = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
LOG_EVERY_S = 15.0


def compile_collectives() -> None:
    """Compile, unless that was done, and say how long that goes on."""
    if reported := notice_of_old_lock():
        raise SystemExit(f"quickstart: {reported}")
    if is_compiled():
        return
    print(
        "quickstart: compiling DeepSpeed's CPU collectives (C++, the first time only): 20 to 60 s, "
        "minutes on a busy machine",
        flush=True,
    )
    start_s = time.monotonic()
    compiler = subprocess.Popen(
        [sys.executable, "-c", BUILD], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while True:
        try:
            compiler.wait(LOG_EVERY_S)
            break
        except subprocess.TimeoutExpired:
            print(f"quickstart: still compiling, {time.monotonic() - start_s:.0f} s", flush=True)
    if not is_compiled():  # DeepSpeed then says why, as it tries again on every rank
        print("quickstart: that failed; DeepSpeed tries again as it starts", flush=True)


WIDTH = 96
BUSY = 1.5  # load of a core: slow motion itself makes less
PUBLIC = "Mixtral 8x7B"  # what quickstart.sh prices: as many experts, and choices of a token


def learned(plain: Finished, copied: Finished) -> str:
    """Of losses."""
    ours, theirs = plain.reported.losses, copied.reported.losses
    alike, worst = equal_steps(ours, theirs), largest_difference(ours, theirs)
    if alike == len(ours):
        until = f"in each of {alike} steps (largest difference {worst.loss:.0e})"
    else:
        until = (
            f"in the first {alike} of {len(ours)} steps; after that, rounding changes an "
            "expert choice"
        )
    return (
        f"Training results are unchanged. Without replicas ({plain.name}) and with replicas of "
        f"hot experts ({copied.name}), losses agree within {EQUAL:.0e} {until}: from "
        f"{ours[0]:.3f} to {ours[-1]:.3f}. Only where each expert is computed differs."
    )


def levelled(plain: Finished, copied: Finished) -> str:
    """Of rows."""
    before, after = plain.outcome, copied.outcome
    assert before is not None and after is not None
    return (
        "The load is more even. Hot experts get far more tokens than others, and every rank "
        f"waits for the rank that holds them. That rank had {before.balance:.2f} times the "
        f"mean load; with {after.replicas:.0f} replicas of hot experts on less loaded ranks, "
        f"made for one step at a time, it had {after.balance:.2f} times."
    )


def timed(seen: Mapping[str, Any], training: Finished) -> str:
    """Of slow motion."""
    plain, *others = seen["results"]
    gains = " and ".join(f"{median(each['faster']):.2f} times ({each['name']})" for each in others)
    text = (
        "This shortens the step on a cluster. In slow motion (4 GPUs with a network between "
        f"them; compute and network time are simulated by sleeping), steps were {gains} as "
        f"fast as with {plain['name']}: the busiest rank computes and receives less, and "
        "replicas are prefetched while ranks compute."
    )
    if seen["load"] > BUSY * seen["cores"]:
        text += (
            f" (Other work kept this machine busy, load {seen['load']:.0f} on {seen['cores']} "
            "cores, which hides part of that.)"
        )
    if training.reported.device == ON_CPU:
        text += (
            " (The training above does not show speed: its ranks share the cores of this "
            "machine, where replicas cost time and waiting costs none.)"
        )
    return text


def priced(documents: Sequence[Mapping[str, Any]]) -> str:
    """Of clusters."""
    text = "; ".join(f"on {_cluster(each)} {_gains(each)}" for each in documents)
    return (
        f"Predicted gain on clusters, by `ds-moe-ext price`: if the expert load of {PUBLIC} "
        f"were as uneven as in this young model, {text}. (esp splits each expert over the GPUs "
        "of a node.) A router that was trained longer is often more balanced, with less to gain."
    )


def _cluster(document: Mapping[str, Any]) -> str:
    (cluster,) = document["clusters"]
    ranks = cluster["num_nodes"] * cluster["ranks_per_node"]
    return f"{ranks} {cluster['device']['name']}"


def _gains(document: Mapping[str, Any]) -> str:
    """Of each strategy on the best grid of ranks that fits into memory."""
    best: dict[str, float] = {}
    base = next(way["strategy"] for way in document["ways"] if way["is_base"])
    for way in document["ways"]:
        if way["fits"] and way["strategy"] != base:
            best[way["strategy"]] = max(way["gain"], best.get(way["strategy"], 0.0))
    text = ", ".join(f"{name} {gain:.2f}" for name, gain in best.items())
    return f"{text} times as fast as {base}"


def screen(root: Path) -> Iterator[str]:
    """Lines.

    Args:
        root: where quickstart.sh left everything.
    """
    runs = [Finished.read(root / name) for name in ("ep", "fssdp")]
    prices = sorted(root.glob("price_*.json"))
    stated = (
        learned(*runs),
        levelled(*runs),
        timed(read_document(root / "slow_motion.json"), runs[0]),
        priced([read_document(path) for path in prices]),
    )
    yield "Results"
    for number, text in enumerate(stated, start=1):
        yield textwrap.fill(text, WIDTH, initial_indent=f" {number}. ", subsequent_indent="    ")
    pages = [runs[1].folder / "report.html", *(path.with_suffix(".html") for path in prices)]
    yield "Next steps"
    yield f"    pictures           {pages[0]}"
    for page in pages[1:]:
        yield f"                       {page}"
    yield "    which strategy     docs/choosing.md"
    yield "    your own job       source .venv/bin/activate"
    yield "                       ds-moe-ext price YOUR_DEEPSPEED.json --model YOUR_CONFIG.json \\"
    yield "                         --hardware dgx_h100 --nodes 8"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["compile"]:
            compile_collectives()
        case ["report", folder]:
            print("\n".join(screen(Path(folder))))
        case _:
            sys.exit("usage: quickstart.py compile | report FOLDER")
