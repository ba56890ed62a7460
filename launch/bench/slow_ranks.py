# SPDX-License-Identifier: Apache-2.0
"""Zebra parallelism beside DistEP and `ep` where some ranks are slow, and beside the simulator.

`torchrun --nproc_per_node 4 launch/bench/slow_ranks.py --attention_us 100`
`chrt -r 10 torchrun ... --attention_us 50 --stripes 2 4 --rounds 7`: attention half as long as
experts; 100 as long, 150 half as long again. With paces of 0 it shows what stripes cost.
`torchrun ... --zipf 1.2 --attention_us 200 --expert_us 160`: experts are unevenly busy, and zebra
runs over `fssdp`, too.

The first half of the ranks are new, the others old: there attention takes 2.5 times as long and
experts 1.25 times. Both only take time, so that few cores stand for any number of devices; engines,
strategies and what travels are real. The contenders are DeepSpeed engines in the same processes
that take turns, a step each, in an order that rotates; ratios are paired by round. They have the
same batches, and must have the same losses. The simulator is given the same durations and the link
that was measured, and no other overhead. A token's experts follow from its place, the same in all
samples: all experts have equally many rows, or those that are drawn by `--zipf` with busy experts
of its own for each layer; the gate only weighs them. Shape letters: L layers, C ranks, B samples, T
tokens of a sample, K choices of a token, E experts, D model width.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from pace import BACKWARD, Pace, PacedAttention, PacedExperts
from rich.console import Console
from rotation import rotated
from torch import Tensor, nn
from torch.nn import functional

from ds_moe_ext.core.comm import all_gather_counts, all_to_all_by_pairs
from ds_moe_ext.core.hardware import Link
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.planning.bench import Bench, HostClock
from ds_moe_ext.planning.prices import Prices
from ds_moe_ext.planning.probe import levels_of, measure_pairs
from ds_moe_ext.planning.strategy import CostGroup, Job
from ds_moe_ext.planning.zebra_costs import (
    MoeModel,
    RankClass,
    TwoClasses,
    ZebraShape,
    price_step,
    stripe_times,
)
from ds_moe_ext.planning.zebra_planner import ZebraGroup, assign_experts
from ds_moe_ext.strategies.settings import BLOCK, read_settings

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script sees its own folder alone

from papers.hetermoe_rivals import EpGroup, ep_tokens_per_s, price_dist_ep

VOCABULARY = 64


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a model, and of what each rank brings to a step."""

    layers: int  # blocks, each with experts
    experts: int = 8  # of a layer
    top_k: int = 2  # experts of a token
    width: int = 128  # of the model
    expert_width: int = 16  # rows of an expert's weights
    length: int = 64  # tokens of a sample
    samples: int = 8  # of a rank's batch
    zipf: float = 0.0  # of the loads of experts; with 0 all are equal

    def chosen(self, layer: int) -> Tensor:
        """Experts of each place of a sample, int64 ``[T, K]``."""
        if not self.zipf:  # in turn: with no remainder all have equally many
            places = torch.arange(self.length * self.top_k).view(self.length, self.top_k)
            return places % self.experts
        drawn = np.random.default_rng(layer)
        part_E = drawn.permutation(np.arange(1.0, self.experts + 1) ** -self.zipf)
        part_E /= part_E.sum()
        choices = (
            drawn.choice(self.experts, self.top_k, replace=False, p=part_E)
            for _ in range(self.length)
        )
        return torch.from_numpy(np.stack(list(choices)))

    def loads(self, layer: int) -> np.ndarray:
        """Part of the rows that each expert has, ``[E]``."""
        counts_E = np.bincount(self.chosen(layer).flatten().numpy(), minlength=self.experts)
        parts_E: np.ndarray = counts_E / counts_E.sum()
        return parts_E

    @property
    def tokens(self) -> int:
        """Of a rank's batch."""
        return self.samples * self.length


class Block(nn.Module):
    """Attention that is paced, then experts that are, both beside a residual."""

    def __init__(self, pace: Pace, shape: Shape, layer: int) -> None:
        super().__init__()
        self.pace, self.shape = pace, shape
        self.chosen_TK = shape.chosen(layer)
        self.attention_norm, self.norm = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = nn.Linear(shape.width, shape.width, bias=False)
        self.gate = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts: nn.Module = PacedExperts(
            pace, (shape.experts, shape.expert_width, shape.width)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = PacedAttention.apply(self.pace, x_BTD, x_BTD.shape[0] / self.shape.samples)
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        x_TD = self.norm(x_BTD).flatten(0, 1)
        expert_TK = self.chosen_TK.repeat(len(x_BTD), 1)
        score_TK = self.gate(x_TD).gather(1, expert_TK).softmax(dim=-1)
        return x_BTD + self.experts(x_TD, expert_TK, score_TK).view_as(x_BTD)


class Output(NamedTuple):
    """Of the model."""

    loss: Tensor


class Model(nn.Module):
    """Embedding, blocks, head, loss."""

    def __init__(self, pace: Pace, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList([Block(pace, shape, n) for n in range(shape.layers)])
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        """Both int64 ``[B, T]``."""
        x_BTD = self.embedding(input_ids)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = self.head(x_BTD).flatten(0, 1)
        return Output(functional.cross_entropy(logits, labels.flatten()))


def batch_of(shape: Shape, step: int, rank: int) -> Tensor:
    """Tokens of a rank in a step, the same for all contenders, int64 ``[B, T]``."""
    generator = torch.Generator().manual_seed(1009 * step + rank)
    return torch.randint(0, VOCABULARY, (shape.samples, shape.length), generator=generator)


ELEMENT_BYTES = 4  # float32 travels
NO_BALANCE: Mapping[str, Any] = {}  # of the JSON
OVER = {"balance": "fssdp"}
TOLERANCE = 1e-4  # of a loss: sums are taken in another order, and steps multiply that


# What the simulator says.


class Placed(NamedTuple):
    """Where experts compute, as the simulator needs it."""

    loads_LN: tuple[tuple[float, ...], ...]  # rows of each expert rank over the mean, by layer
    copied_L: tuple[int, ...]  # replicas of the expert rank that has most


@dataclass(frozen=True)
class Simulator:
    """Seconds of a step: new ranks have attention under zebra, old ones experts; `ep` has both on
    all ranks."""

    shape: Shape
    new: RankClass  # seconds of computing, forward, for one token and layer
    old: RankClass
    attention_ranks: int  # new ones
    expert_ranks: int  # old ones
    link: Link  # of each rank's card, as measured

    @property
    def ranks(self) -> TwoClasses:
        model = MoeModel(
            num_layers=self.shape.layers,
            num_experts=self.shape.experts,
            top_k=self.shape.top_k,
            width=self.shape.width,
            expert_width=self.shape.expert_width,
            length=self.shape.length,
            element_bytes=ELEMENT_BYTES,
        )
        return TwoClasses(
            model=model, new=self.new, old=self.old, link=self.link, backward=BACKWARD
        )

    @property
    def sizes(self) -> dict[str, int]:
        return {"attention_ranks": self.attention_ranks, "expert_ranks": self.expert_ranks}

    @property
    def num_ranks(self) -> int:
        return self.attention_ranks + self.expert_ranks

    def ep_s(self) -> float:
        """Expert parallelism on all ranks, every layer in one piece: all wait for the slowest."""
        group = EpGroup(new_ranks=self.attention_ranks, old_ranks=self.expert_ranks)
        first, then = self.new.expert_s, self.old.expert_s
        row_s_C = np.repeat([first, then], [self.attention_ranks, self.expert_ranks])
        parts_LC = self._parts(Placement.block(self.shape.experts, self.num_ranks))
        slowest_s = float((self.num_ranks * parts_LC * row_s_C).max(axis=1).mean())
        ranks = replace(self.ranks, old=replace(self.old, expert_s=slowest_s))
        per_s = ep_tokens_per_s(ranks, group, self.shape.tokens, degrees=(1,))
        return self.num_ranks * self.shape.tokens / per_s

    def dist_ep_s(self) -> float:
        """The two sides in turn."""
        num_samples, placed = self.num_ranks * self.shape.samples, self.placed(NO_BALANCE)
        return price_dist_ep(
            self.ranks,
            **self.sizes,
            num_samples=num_samples,
            loads_LN=placed.loads_LN,
            degrees=(1,),
        ).step_s

    def zebra_s(
        self,
        num_stripes: int,
        moved_L: Sequence[int] | None = None,
        balance: Mapping[str, Any] = NO_BALANCE,
    ) -> float:
        """Zebra, with so many experts of each layer moved from each expert rank, or over a
        balance."""
        striped = ZebraShape(**self.sizes, num_stripes=num_stripes)
        num_samples, placed = self.num_ranks * self.shape.samples, self.placed(balance)
        return price_step(
            self.ranks,
            striped,
            num_samples,
            moved_L,
            copied_L=placed.copied_L,
            loads_LN=placed.loads_LN,
        ).step_s

    def _parts(self, placement: Placement) -> np.ndarray:
        """Of all rows of each layer those of each rank, ``[L, C]``."""
        layers = range(self.shape.layers)
        return np.stack([self.shape.loads(layer) @ placement.holds_EC for layer in layers])

    def placed(self, balance: Mapping[str, Any]) -> Placed:
        """Where the product's planner lets experts compute, once it knows loads and costs."""
        sizes = {"attention_size": self.attention_ranks, "expert_size": self.expert_ranks}
        block = {"enabled": True, "strategy": "zebra", "zebra": sizes, **balance}
        _, strategy = read_settings({BLOCK: block})
        assert strategy is not None
        shape, model = self.shape, self.ranks.model
        layers = tuple(range(shape.layers))
        owners = strategy.first_owners([shape.experts] * len(layers), (), self.num_ranks)
        job = Job.at_start(owners, np.zeros(self.num_ranks, dtype=np.int64))
        num_rows = shape.tokens * shape.top_k * self.num_ranks / self.attention_ranks
        senders_C1 = (np.arange(self.num_ranks) < self.attention_ranks)[:, None]
        rows = tuple(
            np.rint(num_rows * senders_C1 * shape.loads(layer)).astype(np.int64) for layer in layers
        )
        expert_bytes, bytes_per_s = model.expert_weights * ELEMENT_BYTES, self.link.bytes_per_s
        known = CostGroup(
            layers=layers,
            prices=Prices(
                row_s=(1 + BACKWARD) * self.old.expert_s / shape.top_k,
                row_bytes=shape.width * ELEMENT_BYTES,
                copy_s=expert_bytes / bytes_per_s,
                inter_bytes_per_s=bytes_per_s,
                intra_bytes_per_s=bytes_per_s,
            ),
            expert_bytes=expert_bytes,
        )
        attention_s = self.new.attention_s * num_rows / shape.top_k
        job = replace(
            job,
            rows=rows,
            cost_groups=(known,),
            window_s=(attention_s,) * len(layers),
            free_bytes=shape.experts * len(layers) * expert_bytes,
        )
        plans = strategy.plan(job)
        loads, copied = [], []
        for plan, rows_CE in zip(plans, rows):
            share = plan.destination_of(rows_CE).share.of_rows(rows_CE)
            computed_N = share.computed_C(rows_CE)[self.attention_ranks :]
            loads.append(tuple((computed_N / computed_N.mean()).tolist()))
            replicas_EC = plan.target.holds_EC & ~plan.owner.holds_EC
            copied.append(int(replicas_EC.sum(axis=0).max()))
        return Placed(tuple(loads), tuple(copied))

    def moved(self, num_stripes: int) -> tuple[int, ...]:
        """Experts of each layer that Algorithm 1 moves from each expert rank."""
        group = ZebraGroup(
            num_experts=self.shape.experts, num_layers=self.shape.layers, **self.sizes
        )
        striped = ZebraShape(**self.sizes, num_stripes=num_stripes)
        times = stripe_times(self.ranks, striped, self.num_ranks * self.shape.samples)
        return assign_experts(group, times).moved_L


# Contenders.


MEASURED = 6  # steps, after which it is known what rows and replicas cost


@dataclass(frozen=True)
class Way:
    """One way to train."""

    name: str  # in the table
    block: dict[str, Any]  # of the JSON
    predicted_s: float  # seconds of a step by the simulator


def ways(stripes: Sequence[int], simulator: Simulator) -> Iterator[Way]:
    """`ep`, DistEP, and zebra in its variants: experts move where loads are equal, and get replicas
    where not."""
    sizes = {
        "attention_size": simulator.attention_ranks,
        "expert_size": simulator.expert_ranks,
    }

    def zebra(name: str, predicted_s: float, **keys: Any) -> Way:
        return Way(name, {"strategy": "zebra", "zebra": {**sizes, **keys}}, predicted_s)

    yield Way("ep", {"strategy": "ep"}, simulator.ep_s())
    yield zebra("DistEP", simulator.dist_ep_s(), num_micro_batches=1)
    for number in stripes:
        name = f"zebra, R = {number}"
        stripes_of = {"num_micro_batches": number}
        yield zebra(name, simulator.zebra_s(number), **stripes_of)
        moved = simulator.moved(number)
        if simulator.shape.zipf:
            way = zebra(
                f"{name}, over fssdp", simulator.zebra_s(number, balance=OVER), **stripes_of
            )
            yield replace(way, block={**way.block, **OVER})
        elif any(moved):
            name = f"{name}, moved {' '.join(map(str, moved))}"
            predicted_s = simulator.zebra_s(number, moved)
            yield zebra(name, predicted_s, **stripes_of, moved=list(moved))


class Contender:
    """A DeepSpeed engine. Collective."""

    def __init__(self, way: Way, pace: Pace, shape: Shape) -> None:
        self.way, self._shape, self._number = way, shape, 0
        model = Model(pace, shape)
        block = {"enabled": True, **way.block, "report": {"enabled": False}}
        self._engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": shape.samples,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": 1.0,
                "zero_optimization": {"stage": 1},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
                "steps_per_print": 10**9,
                "ds_moe_ext": block,
            },
        )

    def step(self) -> tuple[float, float]:
        """Seconds of one optimizer step on the batches of the next step number, of the last rank;
        and the loss, mean over ranks. Collective."""
        tokens = batch_of(self._shape, self._number, dist.get_rank())
        self._number += 1
        dist.barrier()
        start_s = time.perf_counter()
        loss = self._engine(input_ids=tokens, labels=tokens.roll(-1, 1)).loss
        self._engine.backward(loss)
        self._engine.step()
        own = torch.tensor([time.perf_counter() - start_s, float(loss.detach())])
        seconds_C, loss_C = all_gather_counts(own.double(), None).T
        return float(seconds_C.max()), float(loss_C.mean())


def measured_link(shape: Shape) -> Link:
    """Of a rank's card, by exchanges of pairs: two sizes, of which one is that of a rank's batch of
    rows. Collective."""
    num_ranks = dist.get_world_size()
    level = levels_of(num_ranks, num_ranks, all_to_all_by_pairs).within
    bench = Bench(HostClock(), torch.device("cpu"), num_warm_ups=1, num_repeats=15)
    itself_CC = np.eye(num_ranks, dtype=bool)
    most = shape.tokens * shape.top_k * shape.width * ELEMENT_BYTES
    link = measure_pairs(level, bench, np.fliplr(itself_CC) & ~itself_CC, (most // 16, most))
    assert link is not None, "there are two ranks or more"
    return link


# The comparison.


@dataclass(frozen=True)
class Result:
    """One contender."""

    name: str
    predicted_s: float  # of a step, by the simulator
    seconds: list[float]  # of a step, by round
    losses: list[float]  # mean over ranks, by step


def compare(contenders: Sequence[Contender], num_rounds: int, num_warm_ups: int) -> list[Result]:
    """Take turns. Collective.

    Raises:
        RuntimeError: contenders have different losses.
    """
    seen: list[list[tuple[float, float]]] = [[] for _ in contenders]
    for number in range(num_warm_ups + num_rounds):
        for contender, steps in rotated(list(zip(contenders, seen)), number):
            steps.append(contender.step())
    results = []
    for contender, steps in zip(contenders, seen):
        seconds, losses = zip(*steps)
        way = contender.way
        results.append(
            Result(way.name, way.predicted_s, list(seconds[num_warm_ups:]), list(losses))
        )
        check_agree(results[0], results[-1])
    return results


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


def markdown(results: Sequence[Result]) -> Iterator[str]:
    """Seconds of `ep`, DistEP and zebra, which come first, over each one's, paired by round:
    median, range. Beside them what the simulator says, and by how much that is off."""
    columns = ["contender", "ms a step", "stated"]
    for rival in results[:3]:
        columns += [f"{rival.name} / it", "stated"]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for each in results:
        found_s = statistics.median(each.seconds)
        cells = [
            each.name,
            f"{1e3 * found_s:.0f}",
            f"{1e3 * each.predicted_s:.0f} ({each.predicted_s / found_s - 1:+.1%})",
        ]
        for rival in results[:3]:
            ratios = [theirs / ours for theirs, ours in zip(rival.seconds, each.seconds)]
            found, stated = statistics.median(ratios), rival.predicted_s / each.predicted_s
            cells += [
                f"{found:.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
                f"{stated:.3f} ({stated / found - 1:+.1%})",
            ]
        yield f"| {' | '.join(cells)} |"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--attention_us", type=float, default=100.0, help="forward, a token and layer, new rank")
    add("--expert_us", type=float, default=80.0, help="likewise, all experts of the token")
    add("--stripes", type=int, nargs="+", default=[4], help="R")
    add("--layers", type=int, default=4)
    add("--zipf", type=float, default=0.0, help="exponent of the loads of experts")
    add("--rounds", type=int, default=9)
    add("--warm_ups", type=int, default=2, help="rounds that are not counted")
    add("--json", type=Path, help="write the figures here")
    return parser.parse_args(words)


def main() -> None:
    """Build all contenders, compare them, print."""
    given = parse_arguments()
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    console = Console(quiet=rank != 0, highlight=False, soft_wrap=True)
    shape = Shape(layers=given.layers, zipf=given.zipf)
    link = measured_link(shape)
    attention_s, expert_s = given.attention_us / 1e6, given.expert_us / 1e6
    new = RankClass(attention_s=attention_s, expert_s=expert_s)
    old = RankClass(attention_s=2.5 * attention_s, expert_s=1.25 * expert_s)
    attention_size = num_ranks // 2
    simulator = Simulator(shape, new, old, attention_size, num_ranks - attention_size, link)
    own = new if rank < attention_size else old
    pace = Pace(own.attention_s * shape.tokens, own.expert_s / shape.top_k)
    console.print(
        f"load {os.getloadavg()[0]:.2f}; a card {link.bytes_per_s / 1e6:.0f} MB/s and "
        f"{1e3 * link.latency_s:.2f} ms"
    )
    contenders = [Contender(way, pace, shape) for way in ways(given.stripes, simulator)]
    num_warm_ups = given.warm_ups + (MEASURED if given.zipf else 0)
    results = compare(contenders, given.rounds, num_warm_ups)
    console.print("\n".join(markdown(results)))
    console.print(f"load at the end {os.getloadavg()[0]:.2f}")
    if given.json is not None and rank == 0:
        given.json.write_text(json.dumps([asdict(each) for each in results], indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
