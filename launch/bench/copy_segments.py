# SPDX-License-Identifier: Apache-2.0
"""What copies of experts and their gradients take, whole along trees and in segments along chains.

`python launch/bench/cluster.py --nodes 8 --ranks_per_node 1 --inter_mbit 200 \
    launch/bench/copy_segments.py --mib 1 8`
`python launch/bench/copy_segments.py --model`

On ranks with slow links one expert goes from the first rank to all others, and its gradients come
home; the contenders take turns, in an order that rotates, and ratios are paired by round. Copies
must have the same bits, and sums be right. ``--model`` needs no ranks: it prints what the rounds
take on a cluster of fast links. A rank's round ends when its messages have; a message starts when
both of its ranks have begun the round, and shares its link with the others of the round.

Shape letters: C cells, V nodes.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from cluster import SPEEDS
from rich.console import Console
from rich.table import Table
from rotation import Contender, measure

from ds_moe_ext.core.comm import sparse_all_gather, sparse_reduce_scatter
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.transfer import SMALL, Cargo, Part, Transfers, gather_rounds
from ds_moe_ext.schedule.executor import Steps, T, to_the_end

WAYS = ("whole", "segments")
MEGA = 1e6
MODELS = {  # three matrices of an expert, in 16 bits
    "Mixtral 8x7B": 2 * 3 * 4096 * 14336,
    "DeepSeek-V3": 2 * 3 * 7168 * 2048,
    "Qwen3 235B": 2 * 3 * 4096 * 1536,
    "Qwen3 30B": 2 * 3 * 2048 * 768,
}
CARDS = 8  # of a node, each with a link of its own to the other nodes


class Case(NamedTuple):
    """Which cells of a cluster get an expert.

    Attributes:
        name: in the table.
        num_experts: that move at once, from one node after another; None: as many as nodes.
        cells_per_node: that each goes to.
        apart: cards between the first of one expert and of the next.
    """

    name: str
    num_experts: int | None
    cells_per_node: int
    apart: int = 0


CASES = (
    Case("1 expert", 1, 1),
    Case("8 experts", 8, 2, apart=2),
    Case("1 everywhere", 1, CARDS),
    Case("1 a node, same cards", None, 1),
)


# By the model.


def placements(case: Case, num_nodes: int) -> tuple[Placement, Placement, np.ndarray]:
    """Who has the experts, who shall have them, and the node of each cell."""
    num_cells = num_nodes * CARDS
    numbers = np.arange(case.num_experts or num_nodes)
    home_card = numbers * case.apart % CARDS
    home = Placement.owned_by(numbers % num_nodes * CARDS + home_card, num_cells)
    wanted_EC = home.holds_EC.copy()
    cards = (numbers[:, None] * case.apart + np.arange(case.cells_per_node)) % CARDS
    for node in range(num_nodes):
        wanted_EC[numbers[:, None], node * CARDS + cards] = True
    return home, Placement(wanted_EC), np.arange(num_cells) // CARDS


class Fabric(NamedTuple):
    """What messages take.

    Attributes:
        inter_bytes_per_s: of a card, to and from other nodes.
        intra_bytes_per_s: within its node.
        start_s: until the first byte of a message arrives, and for the host to post it.
    """

    inter_bytes_per_s: float = 50e9
    intra_bytes_per_s: float = 400e9
    start_s: float = 40e-6


def model_s(transfers: Transfers, expert_bytes: int, fabric: Fabric) -> float:
    """Seconds until the last copy has arrived."""
    rounds: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
    columns = (transfers.round_N, transfers.sender_N, transfers.receiver_N)
    for number, sender, receiver, count in zip(
        *(column.tolist() for column in columns), transfers.num_segments_N.tolist()
    ):
        for segment in range(count):
            rounds[number + segment].append((sender, receiver, expert_bytes / count))
    node_C, free_C = transfers.node_C, np.zeros(transfers.node_C.size)
    for _, messages in sorted(rounds.items()):
        load_s: dict[tuple[int, bool, bool], float] = defaultdict(float)
        for sender, receiver, size in messages:
            is_near = bool(node_C[sender] == node_C[receiver])
            rate = fabric.intra_bytes_per_s if is_near else fabric.inter_bytes_per_s
            load_s[sender, True, is_near] += size / rate
            load_s[receiver, False, is_near] += size / rate
        then_C = free_C.copy()
        for sender, receiver, _ in messages:
            is_near = bool(node_C[sender] == node_C[receiver])
            busy_s = max(load_s[sender, True, is_near], load_s[receiver, False, is_near])
            end_s = max(free_C[sender], free_C[receiver]) + fabric.start_s + busy_s
            for cell in (sender, receiver):
                then_C[cell] = max(then_C[cell], end_s)
        free_C = then_C
    return float(free_C.max())


def show_model() -> None:
    """Print the table."""
    table = Table(title="ms until all copies are there, whole / in segments (how many)")
    for heading in ("expert", "MB", "nodes", *(case.name for case in CASES)):
        table.add_column(heading)
    for name, expert_bytes in MODELS.items():
        for num_nodes in (2, 4, 8):
            row = [name, f"{expert_bytes / MEGA:.1f}", str(num_nodes)]
            for case in CASES:
                grid = placements(case, num_nodes)
                both = [gather_rounds(*grid, cargo) for cargo in (SMALL, Cargo(expert_bytes))]
                whole_ms, ms = (1e3 * model_s(each, expert_bytes, Fabric()) for each in both)
                count = int(both[1].num_segments_N.max())
                row.append(f"{whole_ms:.2f} / {ms:.2f} ({count})")
            table.add_row(*row)
    Console(width=130).print(table)


# On ranks.


def ways(given: argparse.Namespace, expert_bytes: int) -> Iterator[tuple[str, Part]]:
    """What this rank does, by the name of a way."""
    num_ranks = dist.get_world_size()
    home = Placement.owned_by(np.zeros(1, dtype=np.int64), num_ranks)
    everywhere = Placement(np.ones((1, num_ranks), dtype=bool))
    node_C = np.arange(num_ranks) // int(os.environ["LOCAL_WORLD_SIZE"])
    start_bytes = round(float(os.environ[SPEEDS[0]]) * MEGA / 8 * given.start_us * 1e-6)
    for name, size in zip(WAYS, (0, expert_bytes)):
        cargo = Cargo(size, max(start_bytes, 1))
        transfers = gather_rounds(home, everywhere, node_C, cargo)
        if dist.get_rank() == 0:
            Console().print(f"{name}: {int(transfers.num_segments_N.max())} segments")
        yield name, transfers.part_of(dist.get_rank())


def compare(given: argparse.Namespace, mib: float) -> dict[str, list[float]]:
    """Seconds of both ways there and back, by round. Collective."""
    numel = round(mib * 2**20) // 12  # of each of three matrices of float32
    rank, group = dist.get_rank(), dist.distributed_c10d._get_default_group()
    generator = torch.Generator().manual_seed(0)
    expert = tuple(torch.randn(3, numel, generator=generator))
    room = {0: tuple(torch.zeros_like(weight) for weight in expert)}
    grads = {0: tuple((1 + rank) * weight for weight in expert)}
    contenders = []
    for name, part in ways(given, 12 * numel):
        there = _whole(partial(sparse_all_gather, part, {0: expert}, room, group))
        back = _whole(partial(sparse_reduce_scatter, part, grads, group))
        there()
        if rank and not all(map(torch.equal, room[0], expert)):
            raise RuntimeError(f"rank {rank} has got other bits, {name}")
        for ours, weight in zip(back().grads.get(0, ()), expert):
            factor = sum(range(2, 1 + dist.get_world_size()))
            torch.testing.assert_close(ours, factor * weight, rtol=1e-5, atol=1e-5)
        contenders += [Contender(f"{name}, there", _once(there))]
        contenders += [Contender(f"{name}, back", _once(back))]
    return measure(contenders, rounds=given.rounds, steps=1)


def _whole(work: Callable[[], Steps[T]]) -> Callable[[], T]:
    return lambda: to_the_end(work())


def _once(work: Callable[[], object]) -> Callable[[int], object]:
    return lambda step: work()


def show(seconds: dict[str, list[float]], title: str) -> None:
    """Medians, and the ratio paired by round."""
    table = Table(title=title, title_justify="left")
    for heading in ("", *(f"{name}, ms" for name in WAYS), "segments are faster by", "rounds won"):
        table.add_column(heading)
    for way in ("there", "back"):
        whole, cut = (seconds[f"{name}, {way}"] for name in WAYS)
        ratios = [theirs / ours for theirs, ours in zip(whole, cut)]
        medians = (f"{1e3 * statistics.median(each):.1f}" for each in (whole, cut))
        won = f"{sum(ratio > 1 for ratio in ratios)}/{len(ratios)}"
        table.add_row(way, *medians, f"{statistics.median(ratios):.2f}", won)
    Console().print(table)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", action="store_true", help="print what fast links would take")
    add("--mib", type=float, nargs="+", default=[1.0], help="sizes of the expert")
    add("--start_us", type=float, default=2000.0, help="that a message takes to start here")
    add("--rounds", type=int, default=11)
    return parser.parse_args()


def main() -> None:
    """Compare, or print the model's table."""
    given = parse_arguments()
    if given.model:
        show_model()
        return
    dist.init_process_group("gloo")
    for mib in given.mib:
        seconds = compare(given, mib)
        if dist.get_rank() == 0:
            show(seconds, f"an expert of {mib:g} MiB to {dist.get_world_size() - 1} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
