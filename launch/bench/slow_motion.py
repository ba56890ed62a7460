# SPDX-License-Identifier: Apache-2.0
"""What strategies gain where time is worth something: layers of a public model on a described
cluster, in slow motion, on any machine and without rights.

`torchrun --standalone --nproc_per_node 4 launch/bench/slow_motion.py`

Layers, streams, planners and what they measure in their first steps are the product's own, and rows
and replicas of experts are really sent. What devices would compute and how long links would take is
slept: at the rates of a file of `configs/hardware`, by the rules of `ds-moe-ext price`, slowed down
until the sleeps outweigh what this machine takes itself. A rank stands for one GPU on a node of its
own, a row for several. There is no optimizer.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from pace import Card, Pace, paced_links
from rich.console import Console
from rich.table import Table
from rotation import NUM_WARM_UPS
from slow_links import PLAIN, Contender, Load, Result, Sizes, Way, compare

from ds_moe_ext.commands.price.inputs import read_clusters, read_model
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.planning.candidates import Reached
from ds_moe_ext.planning.described_run import DescribedRun
from ds_moe_ext.planning.layer_costs import BACKWARD, FORWARD
from ds_moe_ext.planning.load_files import read_loads
from ds_moe_ext.planning.model_shape import Training

WAYS = (
    PLAIN,
    Way("fssdp", {"strategy": "fssdp", "fssdp": {"reshard_interval": 0}}),
    Way("prophet", {"strategy": "prophet"}),
)
WIDTH = 64  # floats of a row here
ROW_BYTES = 4 * WIDTH


@dataclass(frozen=True)
class Scene:
    """A model's layers on a cluster, as this machine acts them."""

    run: DescribedRun  # what is acted, on nodes of one rank
    rows_each: int  # that one row here stands for
    slower: float  # times as slow as there

    @classmethod
    def of(cls, given: argparse.Namespace, num_ranks: int) -> Scene:
        """That of the command line.

        Raises:
            ValueError: no such model or cluster, or tokens that rows do not divide.
        """
        (whole,) = read_clusters([given.hardware], None)
        if whole.inter is None:
            raise ValueError(
                f"--hardware {given.hardware} has no link between nodes (inter), which is what is "
                "shown; name a cluster that has one, as dgx_a100"
            )
        if given.tokens % given.rows_each:
            raise ValueError(
                f"--tokens {given.tokens} cannot be shown by rows that stand for "
                f"{given.rows_each} each; let --rows_each divide it"
            )
        card = replace(whole.inter, bytes_per_s=whole.inter.bytes_per_s / whole.ranks_per_node)
        cluster = replace(whole, num_nodes=num_ranks, ranks_per_node=1, intra=None, inter=card)
        run = DescribedRun(
            hardware=Reached().of(cluster),
            shape=read_model(Path(given.model)),
            training=Training(num_ranks=num_ranks, length=given.tokens),
            grid=Grid(num_ranks, num_ranks),
        )
        return cls(run, given.rows_each, given.slower)

    @property
    def pace(self) -> Pace:
        """Of dense parts and experts."""
        row_s = self.run.cost_group.prices.row_s / (FORWARD + BACKWARD)
        row_s += 2 * self.run.conditions().tasks.row_move_s
        return Pace(self.slower * self.run.window_s[0], self.slower * self.rows_each * row_s)

    @property
    def card(self) -> Card:
        """Of a rank."""
        link = self.run.hardware.inter
        assert link is not None
        bytes_each = self.rows_each * self.run.row_bytes / ROW_BYTES
        return Card(link.bytes_per_s / bytes_each / self.slower, self.slower * link.latency_s)

    def sizes(self, num_layers: int) -> Sizes:
        """Of the layers here."""
        run = self.run
        return Sizes(
            layers=num_layers,
            experts=run.shape.num_experts,
            expert_rows=max(round(run.expert_bytes / run.row_bytes / self.rows_each), 1),
            rows=run.training.tokens // self.rows_each * run.shape.top_k,
            width=WIDTH,
        )

    def load(self, name: str, num_layers: int, num_steps: int) -> Load:
        """Rows of all steps; see `ds-moe-ext loads`."""
        loads = read_loads(
            name,
            ranks=self.run.grid.world_size,
            experts=self.run.shape.num_experts,
            layers=num_layers,
            tokens=self.run.training.tokens // self.rows_each,
            top_k=self.run.shape.top_k,
            steps=num_steps,
        )
        return Load(name, loads.rows_ILCE.copy())  # torch wants to write to it

    def reported(self, load: Load, num_layers: int) -> str:
        """What is shown, and what of it is real."""
        run, link = self.run, self.run.hardware.inter
        assert link is not None
        return (
            f"In slow motion: {num_layers} layers of {run.shape.name} ({run.shape.num_experts} "
            f"experts, {run.shape.top_k} a token) on {run.grid.world_size} GPUs of "
            f"{run.hardware.name!r}, one per node, {run.training.tokens:,} tokens a GPU, loads "
            f"{load.title!r}. Simulated by sleeping, at the rates of that hardware file and "
            f"{self.slower:g} times as slow: attention, experts, and the network "
            f"({link.bytes_per_s / 1e9:.0f} GB/s a GPU). Real: layers, streams, plans, and "
            f"every transfer of tokens and replicas, one token sent for {self.rows_each}."
        )


def table_of(results: Sequence[Result]) -> Table:
    """A row for each strategy; the first is what the others are compared with."""
    table = Table()
    for heading in ("strategy", "a step", "faster", "of it exposed", "balance", "tokens sent"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    table.add_column("replicas hidden", justify="right")
    for each in results:
        table.add_row(*_ep_ranks(each))
    return table


def _ep_ranks(each: Result) -> Iterator[str]:
    step_s = statistics.median(each.seconds)
    yield each.name
    yield f"{1e3 * step_s:.0f} ms"
    yield f"{statistics.median(each.faster):.2f} x"
    yield f"{1e3 * (step_s - each.limit_s):.0f} ms"
    yield f"{each.balance:.2f}"
    yield f"{each.remote:.0%}"
    ways = (each.hidden_gather, each.hidden_reduction)
    yield ", ".join(f"{way:.0%}" for way in ways if way is not None) or "none made"


LEGEND = (
    "of it exposed: step time beyond even compute and a network that takes no time. balance: "
    "routed tokens of the busiest rank over the mean. tokens sent: share sent to other ranks. "
    "replicas hidden: share of the transfer time of replicas and of their gradients that "
    "overlaps with compute. All strategies give the same gradients (checked)."
)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="qwen3_30b_a3b", help="a config.json, or a name of configs/models")
    add("--hardware", default="dgx_a100", help="a file, or a name of configs/hardware")
    add("--loads", default="trained", help="see ds-moe-ext loads")
    add("--tokens", type=int, default=8192, help="of a GPU in a step")
    add("--layers", type=int, default=3)
    add("--rows_each", type=int, default=32, help="rows that one here stands for")
    add("--slower", type=float, default=2.5, help="times as slow as the cluster")
    add("--rounds", type=int, default=2)
    add("--steps_per_round", type=int, default=2)
    add("--json", type=Path, help="write the figures here")
    return parser.parse_args(words)


def show(given: argparse.Namespace) -> list[Result]:
    """Build the strategies, let them take turns, print. Collective."""
    scene = Scene.of(given, dist.get_world_size())
    sizes = scene.sizes(given.layers)
    num_steps = NUM_WARM_UPS + (given.rounds + 1) * given.steps_per_round
    load = scene.load(given.loads, given.layers, num_steps)
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    console.print(scene.reported(load, given.layers), markup=False)
    card = scene.card
    with paced_links(card):
        contenders = [Contender(way, scene.pace, sizes) for way in WAYS]
        rounds = {"num_rounds": given.rounds, "steps_per_round": given.steps_per_round}
        results = compare(contenders, load, card, **rounds)
    console.print(table_of(results))
    console.print(LEGEND, markup=False)
    load_average, cores = os.getloadavg()[0], os.cpu_count() or 1
    console.print(f"load {load_average:.1f} on {cores} cores: a busy machine hides gains")
    if given.json is not None and dist.get_rank() == 0:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        seen = {"load": load_average, "cores": cores, "results": list(map(asdict, results))}
        given.json.write_text(json.dumps(seen, indent=1))
    return results


def main() -> None:
    """Start."""
    given = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    show(given)
    gc.collect()  # layers lie in circles, and hold groups whose threads must end before Python does
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
