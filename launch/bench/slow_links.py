# SPDX-License-Identifier: Apache-2.0
"""What strategies that copy experts gain over `ep` where links are slow and routing is skewed.

`python launch/bench/cluster.py --inter_mbit 400 launch/bench/slow_links.py --skews 0 1.2`
`... launch/bench/slow_links.py --trace loads.npz --copies`

Any launcher that sets RANK and the like will do; `cluster.py` brings the slow links. On a busy
machine put `chrt -r 10` before the command. Planners, layers and traffic are the product's own, and
every byte is sent; only what computes is stood in for, see `pace.py`. The contenders take turns, a
few steps each, in an order that rotates; ratios are paired by round. Before they are timed, they
must agree on the gradients of all experts.

Shape letters: I steps, L layers, C ranks, E experts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from pace import Pace
from rich.console import Console
from rotation import NUM_WARM_UPS, rotated
from slow_links_contenders import (
    PLAIN,
    Contender,
    Sizes,
    Way,
    auto_ways,
    esp_ways,
    fssdp_ways,
    prophet_ways,
)
from slow_links_figures import Result, Seen, Tally, markdown

from ds_moe_ext.planning.load_files import read_table
from ds_moe_ext.planning.load_models import zipf_loads

TOLERANCE = 1e-5  # of the largest gradient: sums are taken in another order


def ways(given: argparse.Namespace) -> tuple[Way, ...]:
    """The contenders of the command line."""
    fssdp = fssdp_ways(given.copies, given.overlap_degree)
    by_strategy = {
        "fssdp": fssdp,
        "prophet": prophet_ways(),
        "esp": esp_ways(),
        "auto": auto_ways(),
    }
    return PLAIN, *(way for name in given.strategies for way in by_strategy[name])


@dataclass(frozen=True, eq=False)
class Load:
    """Rows of all steps.

    Attributes:
        title: for the table.
        rows_ILCE: that each rank routes to each expert of each layer; the steps recur.
    """

    title: str
    rows_ILCE: np.ndarray


def loads(given: argparse.Namespace, world_size: int) -> Iterator[Load]:
    """Those of the command line."""
    if given.trace is not None:
        yield Load(f"trace {given.trace.name}", traced(given, world_size))
        return
    num_steps = NUM_WARM_UPS + (given.rounds + 1) * given.steps_per_round
    shape = (num_steps, given.layers, world_size, given.experts)
    for skew in given.skews:
        rows_ILCE = zipf_loads(shape, rows=given.rows, skew=skew, seed=given.seed)
        yield Load(f"zipf, exponent {skew:g}", rows_ILCE)


def traced(given: argparse.Namespace, world_size: int) -> np.ndarray:
    """The last run of steps in a trace: layers evenly chosen, its ranks in groups of neighbours."""
    rows_ILCE = read_table(given.trace).runs()[-1]
    num_steps, num_layers, num_ranks, num_experts = rows_ILCE.shape
    if num_ranks % world_size or num_layers < given.layers:
        raise ValueError(
            f"{given.trace} has {num_layers} layers on {num_ranks} ranks, which do not give "
            f"{given.layers} layers on {world_size}; choose fewer layers, or ranks that divide"
        )
    chosen = np.linspace(0, num_layers - 1, given.layers).round().astype(int)
    shape = (num_steps, given.layers, world_size, num_ranks // world_size, num_experts)
    grouped_ILCE = rows_ILCE[:, chosen].reshape(shape).sum(axis=3)
    return np.apply_along_axis(scaled, 3, grouped_ILCE, given.rows)


def scaled(rows_E: np.ndarray, total: int) -> np.ndarray:
    """As many rows as told in the same proportions; the largest remainders are rounded up."""
    whole_E, rest_E = np.divmod(rows_E * total, rows_E.sum())
    up = np.argsort(-rest_E, kind="stable")[: total - int(whole_E.sum())]
    whole_E[up] += 1
    return whole_E


def contenders(given: argparse.Namespace, chosen: Sequence[Way], load: Load) -> list[Contender]:
    """One for each way. Collective."""
    pace = Pace(given.attention_ms / 1e3, given.row_us / 1e6)
    num_experts = load.rows_ILCE.shape[-1]
    sizes = Sizes(given.layers, num_experts, given.expert_rows, given.rows, given.width)
    return [Contender(way, pace, sizes) for way in chosen]


def compare(
    contenders: Sequence[Contender], load: Load, *, num_rounds: int, steps_per_round: int
) -> list[Result]:
    """Warm up, check that all agree, take turns. Collective."""
    own_ILE = load.rows_ILCE[:, :, dist.get_rank()]

    def step(contender: Contender, number: int) -> Seen:
        return contender.step(number, own_ILE[number % len(own_ILE)])

    for contender in contenders:
        for number in range(NUM_WARM_UPS):
            step(contender, number)
        check_agree(contenders[0], contender)
    for contender in contenders:
        contender.prices = contenders[-1].measured
    tallies = [Tally() for _ in contenders]
    for number in range(num_rounds + 1):
        for contender, tally in rotated(list(zip(contenders, tallies)), number):
            dist.barrier()
            start_s, sent = time.perf_counter(), sent_bytes()
            first = NUM_WARM_UPS + number * steps_per_round
            seen = [step(contender, first + i) for i in range(steps_per_round)]
            dist.barrier()
            if number:
                tally.seconds.append((time.perf_counter() - start_s) / steps_per_round)
                tally.sent_bytes += sent_bytes() - sent
                tally.seen += seen
    return [
        tally.result(load.title, each.name, each.told, tallies[0])
        for each, tally in zip(contenders, tallies)
    ]


def check_agree(first: Contender, other: Contender) -> None:
    """Their gradients after the same step are the same.

    Raises:
        RuntimeError: they are not.
    """
    for ours, theirs in zip(first.gradients(), other.gradients(), strict=False):
        error = float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-30))
        if error > TOLERANCE:
            raise RuntimeError(
                f"{other.name} has other gradients than {first.name}, by {error:.1e}"
            )


def sent_bytes() -> int:
    """That this rank's network has sent, headers included."""
    card = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counts = next(line.partition(":")[2].split() for line in lines if line.strip().startswith(card))
    return int(counts[8])


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--skews", type=float, nargs="+", default=[0.0, 0.6, 1.2], help="of Zipf loads")
    add("--trace", type=Path, help="of loads, instead; see planners_table.py")
    names = ["fssdp", "prophet", "esp", "auto"]
    add("--strategies", nargs="+", choices=names, default=names[:2], help="beside ep")
    add("--copies", type=int, nargs="*", default=[1, 2, 4], help="m of fssdp beside what it finds")
    add("--overlap_degree", type=int, default=4, help="t of those")
    add("--layers", type=int, default=3)
    add("--experts", type=int, default=16, help="of a layer; a trace has its own number")
    add("--rows", type=int, default=2048, help="of a rank and layer")
    add("--width", type=int, default=256, help="floats of a row")
    add("--expert_rows", type=int, default=256, help="an expert has so many times a row's bytes")
    add("--attention_ms", type=float, default=20.0, help="forward, of a layer")
    add("--row_us", type=float, default=10.0, help="forward, of an expert on a row")
    add("--rounds", type=int, default=11)
    add("--steps_per_round", type=int, default=2)
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="write the figures here")
    return parser.parse_args(words)


def main() -> None:
    """Build all contenders for each load, compare them, print."""
    given = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    results: list[Result] = []
    for load in loads(given, dist.get_world_size()):
        found = compare(
            contenders(given, ways(given), load),
            load,
            num_rounds=given.rounds,
            steps_per_round=given.steps_per_round,
        )
        console.print("\n".join(markdown(found)), soft_wrap=True)
        results += found
    console.print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    if given.json is not None and dist.get_rank() == 0:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps([asdict(each) for each in results], indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
