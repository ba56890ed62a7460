# SPDX-License-Identifier: Apache-2.0
"""Zebra parallelism beside DistEP and `ep` where some ranks are slow, and beside the simulator.

`torchrun --nproc_per_node 4 launch/bench/slow_ranks.py --attention_us 100`
`python launch/bench/cluster.py --nodes 4 --ranks_per_node 1 launch/bench/slow_ranks.py`

The first ranks are new, the others old: there attention and experts take longer, by two factors.
Attention and experts only take time, see ``slow_ranks_model.py``, so that few cores stand for any
number of devices; engines, strategies and what travels are real. The contenders are DeepSpeed
engines in the same processes that take turns, a step each, in an order that rotates; ratios are
paired by round. They have the same batches, and must have the same losses. The simulator is given
the same durations and the link that was measured, and no other overhead.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from pace import Pace
from rich.console import Console
from rotation import rotated
from slow_ranks_figures import ELEMENT_BYTES, Durations, Group, Shared, Simulator, Step
from slow_ranks_model import Model, Shape, batch_of

from ds_moe_ext.core.comm import all_gather_counts, all_to_all_by_pairs
from ds_moe_ext.core.hardware import Link

TOLERANCE = 1e-4  # of a loss: sums are taken in another order, and steps multiply that


# Contenders.


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        name: in the table.
        block: of the JSON.
        said_s: seconds of a step by the simulator.
    """

    name: str
    block: dict[str, Any]
    said_s: float


def ways(given: argparse.Namespace, simulator: Simulator) -> Iterator[Way]:
    """`ep`, DistEP, and zebra in its variants."""
    yield Way("ep", {"strategy": "ep"}, simulator.ep_s())
    yield _zebra("DistEP", simulator, simulator.dist_ep_s(), num_micro_batches=1)
    for stripes in given.stripes:
        yield _zebra(
            f"zebra, R = {stripes}",
            simulator,
            simulator.zebra_s(stripes),
            num_micro_batches=stripes,
        )
        moved = simulator.moved(stripes)
        if any(moved):
            name = f"zebra, R = {stripes}, moved {' '.join(map(str, moved))}"
            said_s = simulator.zebra_s(stripes, moved)
            yield _zebra(name, simulator, said_s, num_micro_batches=stripes, moved=list(moved))


def _zebra(name: str, simulator: Simulator, said_s: float, **keys: Any) -> Way:
    group = simulator.group
    sizes = {"attention_size": group.attention_ranks, "expert_size": group.expert_ranks}
    return Way(name, {"strategy": "zebra", "zebra": {**sizes, **keys}}, said_s)


class Contender:
    """A DeepSpeed engine. Collective.

    Args:
        way: how it trains.
        pace: of this rank.
        shape: of its model.
        trace: folder for a trace and a report of its steps; None for none.
    """

    def __init__(self, way: Way, pace: Pace, shape: Shape, trace: Path | None) -> None:
        self.way, self._pace, self._shape = way, pace, shape
        self._number = 0
        model = Model(pace, shape)
        self._engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=_document(way, shape, trace),
        )

    def step(self) -> Step:
        """One optimizer step on the batches of the next step number. Collective."""
        tokens = batch_of(self._shape, self._number, dist.get_rank())
        self._number += 1
        self._pace.take()
        dist.barrier()
        start_s = time.perf_counter()
        loss = self._engine(input_ids=tokens, labels=tokens.roll(-1, 1)).loss
        self._engine.backward(loss)
        self._engine.step()
        end_s = time.perf_counter()
        held = self._pace.take()
        return Step(
            start_s=start_s,
            end_s=end_s,
            computed=tuple((each.start_s, each.end_s) for each in held),
            late_s=sum(each.late_s for each in held),
            loss=float(loss.detach()),
        )


def _document(way: Way, shape: Shape, trace: Path | None) -> dict[str, Any]:
    report: dict[str, Any] = {"report": {"enabled": False}}
    if trace is not None:
        folder = trace / way.name.replace(", ", "_").replace(" ", "")
        report = {
            "report": {"path": str(folder), "trace_step": 2},
            "trace": {"path": str(folder / "trace.json"), "first_step": 2, "num_steps": 1},
        }
    return {
        "train_micro_batch_size_per_gpu": shape.samples,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 10**9,
        "ds_moe_ext": {"enabled": True, **way.block, **report},
    }


def measured_link(shape: Shape, repeats: int = 15) -> Link:
    """Of a rank's card, by exchanges in which each rank sends to one other. Collective.

    Two sizes, of which one is that of a rank's batch of rows; the medians of the slowest rank.
    """
    group, here, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None, "torchrun makes it"
    most = shape.tokens * shape.top_k
    sizes = (max(1, most // 16), most)

    def seconds(num_rows: int) -> float:
        rows_ND = torch.zeros(num_rows, shape.width)
        sent_C = [num_rows * (peer == (here + 1) % size) for peer in range(size)]
        received_C = [num_rows * (peer == (here - 1) % size) for peer in range(size)]
        found = []
        for _ in range(repeats):
            dist.barrier()
            start_s = time.perf_counter()
            all_to_all_by_pairs(rows_ND, sent_C, received_C, group)
            found.append(time.perf_counter() - start_s)
        mine = torch.tensor([statistics.median(found)], dtype=torch.float64)
        return float(all_gather_counts(mine, group).max())

    short_s, long_s = map(seconds, sizes)
    row_s = max((long_s - short_s) / (sizes[1] - sizes[0]), 1e-12)
    row_bytes = shape.width * ELEMENT_BYTES
    return Link(bytes_per_s=row_bytes / row_s, latency_s=max(short_s - row_s * sizes[0], 0.0))


# The comparison.


@dataclass(frozen=True)
class Result:
    """One contender.

    Attributes:
        name: see ``Way``.
        said_s: see ``Way``.
        seconds: of a step, by round.
        idle_s: see ``Shared``, by round.
        use_C: see ``Shared``, mean over rounds.
        late_s: see ``Shared``, mean over rounds.
        losses: mean over ranks, by step.
    """

    name: str
    said_s: float
    seconds: list[float]
    idle_s: list[float]
    use_C: list[float]
    late_s: float
    losses: list[float]


def compare(contenders: Sequence[Contender], num_rounds: int, num_warm_ups: int) -> list[Result]:
    """Take turns. Collective.

    Raises:
        RuntimeError: contenders have different losses.
    """
    seen: list[list[Step]] = [[] for _ in contenders]
    for number in range(num_warm_ups + num_rounds):
        for contender, steps in rotated(list(zip(contenders, seen)), number):
            steps.append(contender.step())
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, seen)
    results = [
        _result(contender.way, list(zip(*steps)), num_warm_ups)
        for contender, steps in zip(contenders, zip(*everywhere))
    ]
    for other in results[1:]:
        check_agree(results[0], other)
    return results


def _result(way: Way, steps: Sequence[Sequence[Step]], num_warm_ups: int) -> Result:
    shared = [Shared.of(ranks) for ranks in steps[num_warm_ups:]]
    return Result(
        name=way.name,
        said_s=way.said_s,
        seconds=[each.seconds for each in shared],
        idle_s=[each.idle_s for each in shared],
        use_C=[statistics.mean(uses) for uses in zip(*(each.use_C for each in shared))],
        late_s=statistics.mean(each.late_s for each in shared),
        losses=[statistics.mean(step.loss for step in ranks) for ranks in steps],
    )


def check_agree(first: Result, other: Result) -> None:
    """Their losses are the same.

    Raises:
        RuntimeError: they are not.
    """
    for step, (ours, theirs) in enumerate(zip(first.losses, other.losses, strict=True)):
        if abs(ours - theirs) > TOLERANCE * abs(ours):
            raise RuntimeError(
                f"{other.name} has loss {theirs} in step {step}, {first.name} {ours}; they train "
                "the same model on the same batches"
            )


# The table.

NUM_RIVALS = 2  # `ep` and DistEP come first
COLUMNS = (
    *("contender", "ms a step", "said", "`ep` / it", "said", "DistEP / it", "said"),
    *("use of new / old ranks", "nobody computes, ms", "late, ms"),
)


def markdown(results: Sequence[Result], group: Group) -> Iterator[str]:
    """Seconds of the rivals over each one's, paired by round: median, range. Beside them what the
    simulator says, and by how much that is off."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for each in results:
        yield f"| {' | '.join(_cells(each, results[:NUM_RIVALS], group))} |"


def _cells(each: Result, rivals: Sequence[Result], group: Group) -> tuple[str, ...]:
    found_s = statistics.median(each.seconds)
    new = statistics.mean(each.use_C[: group.attention_ranks])
    old = statistics.mean(each.use_C[group.attention_ranks :])
    return (
        each.name,
        f"{1e3 * found_s:.0f}",
        f"{1e3 * each.said_s:.0f} ({each.said_s / found_s - 1:+.1%})",
        *(cell for rival in rivals for cell in _ratio(each, rival)),
        f"{new:.0%} / {old:.0%}",
        f"{1e3 * statistics.median(each.idle_s):.0f}",
        f"{1e3 * each.late_s:.1f}",
    )


def _ratio(each: Result, rival: Result) -> tuple[str, str]:
    """As found, and as said."""
    if each is rival:
        return "", ""
    ratios = [theirs / ours for theirs, ours in zip(rival.seconds, each.seconds)]
    found, said = statistics.median(ratios), rival.said_s / each.said_s
    return (
        f"{found:.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
        f"{said:.3f} ({said / found - 1:+.1%})",
    )


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--attention_us", type=float, default=100.0, help="forward, a token and layer, new rank")
    add("--expert_us", type=float, default=80.0, help="likewise, all experts of the token")
    add("--attention_slower", type=float, default=2.5, help="on an old rank, so many times")
    add("--expert_slower", type=float, default=1.25)
    add("--attention_size", type=int, help="new ranks; half of all if left out")
    add("--stripes", type=int, nargs="+", default=[4], help="R")
    add("--layers", type=int, default=4)
    add("--experts", type=int, default=8, help="of a layer")
    add("--top_k", type=int, default=2)
    add("--width", type=int, default=128)
    add("--length", type=int, default=64, help="tokens of a sample")
    add("--samples", type=int, default=8, help="of a rank and step")
    add("--rounds", type=int, default=9)
    add("--warm_ups", type=int, default=2, help="rounds that are not counted")
    add("--trace", type=Path, help="folder for reports and traces of all contenders")
    add("--json", type=Path, help="write the figures here")
    return parser.parse_args(words)


def shape_of(given: argparse.Namespace) -> Shape:
    """Of the model of the command line."""
    return Shape(
        layers=given.layers,
        experts=given.experts,
        top_k=given.top_k,
        width=given.width,
        expert_width=16,
        length=given.length,
        samples=given.samples,
    )


def simulator_of(given: argparse.Namespace, world_size: int, link: Link) -> Simulator:
    """What the command line asks for, on a link."""
    attention_size = given.attention_size or world_size // 2
    return Simulator(
        shape_of(given),
        Durations(
            attention_s=given.attention_us / 1e6,
            expert_s=given.expert_us / 1e6,
            attention_slower=given.attention_slower,
            expert_slower=given.expert_slower,
        ),
        Group(attention_ranks=attention_size, expert_ranks=world_size - attention_size),
        link,
    )


def pace_of(simulator: Simulator, rank: int) -> Pace:
    """Of a rank: attention on its own batch, an expert on a row."""
    durations, shape = simulator.durations, simulator.shape
    of = durations.new if rank < simulator.group.attention_ranks else durations.old
    return Pace(of.attention_s * shape.tokens, of.expert_s / shape.top_k)


def main() -> None:
    """Build all contenders, compare them, print."""
    given = parse_arguments()
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    console = Console(quiet=rank != 0, highlight=False, soft_wrap=True)
    link = measured_link(shape_of(given))
    simulator = simulator_of(given, dist.get_world_size(), link)
    pace = pace_of(simulator, rank)
    console.print(
        f"load {os.getloadavg()[0]:.2f}; a card {link.bytes_per_s / 1e6:.0f} MB/s and "
        f"{1e3 * link.latency_s:.2f} ms"
    )
    contenders = [
        Contender(way, pace, shape_of(given), given.trace) for way in ways(given, simulator)
    ]
    results = compare(contenders, given.rounds, given.warm_ups)
    console.print("\n".join(markdown(results, simulator.group)))
    console.print(f"load at the end {os.getloadavg()[0]:.2f}")
    if given.json is not None and rank == 0:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps([asdict(each) for each in results], indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
