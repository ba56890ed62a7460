# SPDX-License-Identifier: Apache-2.0
"""What it saves to send each token's row once to a rank, where links are slow.

`python launch/bench/cluster.py --nodes 2 --ranks_per_node 4 launch/bench/send_once.py --top_k 8`
`... launch/bench/send_once.py --top_k 8 --most_nodes 1`

Any launcher that sets RANK and the like will do; `cluster.py` brings the slow links. Layers and
traffic are the product's own; experts and attention only take time, see `pace.py`. Choices are
drawn, evenly or by a Zipf law, of all experts or of those of a few nodes. The contenders take
turns, and must agree on outputs and gradients before they are timed. Shape letters: T tokens, K
choices a token, E experts, C cells, V nodes, D model width.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pace import Block, Pace
from replaced_layers import ReplacedLayers
from rich.console import Console
from rich.table import Table
from rotation import rotated
from slow_links import sent_bytes
from torch import Tensor, nn

TOLERANCE = 1e-5  # of the largest value: sums are taken in another order


def esp(way: str) -> dict[str, Any]:
    """Whole experts, uncut, with rows by a way."""
    pipeline = {"degree": 1, "slice_gradients": False, "all_to_all": way}
    return {"strategy": "esp", "balance": "ep", "expert_sharding_size": 1, "esp": pipeline}


ONCE: Mapping[str, Any] = {"ep": {"send_once": True}}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "ep": {"strategy": "ep"},
    "ep, send once": {"strategy": "ep", **ONCE},
    "2dh": esp("2dh"),
    "2dh, send once": {**esp("2dh"), **ONCE},
}
"""By name; the first is what the others are compared with."""


@dataclass(frozen=True)
class Choosing:
    """How choices are drawn.

    Attributes:
        experts: of a layer.
        top_k: choices of a token.
        skew: exponent of the Zipf law.
        num_nodes: of the ranks.
        most_nodes: that a token's experts may be on.
    """

    experts: int
    top_k: int
    skew: float
    num_nodes: int
    most_nodes: int

    def drawn(self, tokens: int, generator: torch.Generator) -> Tensor:
        """Experts without repetition, int64 ``[T, K]``."""
        shares_E = torch.arange(1, self.experts + 1).pow(-self.skew).log()
        shares_E = shares_E[
            torch.randperm(self.experts, generator=torch.Generator().manual_seed(0))
        ]
        # The largest of these are a draw without repetition (Gumbel).
        noise_TE = -torch.empty(tokens, self.experts).exponential_(generator=generator).log()
        logit_TE = shares_E + noise_TE
        nodes_TVE = logit_TE.view(tokens, self.num_nodes, -1)
        best_TV = nodes_TVE.amax(dim=2)
        allowed_TV = best_TV >= best_TV.topk(self.most_nodes, dim=1).values[:, -1:]
        logit_TE = nodes_TVE.masked_fill(~allowed_TV[..., None], -torch.inf).flatten(1)
        return logit_TE.topk(self.top_k, dim=1).indices


class Contender:
    """A model with its layers replaced."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.name = name
        pace = Pace(given.attention_ms / 1e3, given.row_us / 1e6)
        shape = (given.experts, 4, given.width)
        self.blocks = nn.ModuleList([Block(pace, shape) for _ in range(given.layers)])
        self.replaced = ReplacedLayers.of(nn.ModuleDict({"blocks": self.blocks}), WAYS[name])

    def step(self, number: int, x_TD: Tensor, choices: Sequence[Tensor]) -> list[Tensor]:
        """Forward and backward; outputs and gradients. Collective."""
        self.blocks.zero_grad(set_to_none=True)
        x_TD = start_TD = x_TD.detach().requires_grad_()
        for block, expert_TK in zip(self.blocks, choices):
            x_TD = block(x_TD, expert_TK)
        x_TD.backward(torch.ones_like(x_TD))
        self.replaced.after_step(number)
        own = [p.grad for layer in self.replaced.layers for p in layer.parameters]
        return [x_TD.detach(), *(grad for grad in (start_TD.grad, *own) if grad is not None)]


def check_agree(ours: Sequence[Tensor], theirs: Sequence[Tensor], name: str) -> None:
    """Raises RuntimeError where results differ."""
    for one, other in zip(ours, theirs, strict=True):
        error = float((one - other).abs().max() / one.abs().max().clamp(min=1e-30))
        if error > TOLERANCE:
            raise RuntimeError(f"{name} has other results than the first, by {error:.1e}")


def rows_of(expert_TK: Tensor, experts: int, num_cells: int, num_nodes: int) -> list[float]:
    """Rows that a token has on the way to other cells: by choices, cells, nodes; these may be its
    own."""
    cells = expert_TK.numpy() // (experts // num_cells)
    nodes = cells // (num_cells // num_nodes)
    distinct = [np.mean([len(set(row)) for row in each.tolist()]) for each in (cells, nodes)]
    return [float(expert_TK.shape[1]), *map(float, distinct)]


def main() -> None:
    """Compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=list(WAYS), default=list(WAYS)[:2])
    add("--layers", type=int, default=2)
    add("--experts", type=int, default=64, help="of a layer")
    add("--top_k", type=int, default=8)
    add("--tokens", type=int, default=512, help="of a rank")
    add("--width", type=int, default=512, help="floats of a row")
    add("--skew", type=float, default=0.0, help="exponent of a Zipf law of experts")
    add("--most_nodes", type=int, help="that a token's experts may be on; all if left out")
    add("--attention_ms", type=float, default=5.0, help="forward, of a layer")
    add("--row_us", type=float, default=1.0, help="forward, of an expert on a row")
    add("--rounds", type=int, default=11)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_cells = dist.get_rank(), dist.get_world_size()
    num_nodes = num_cells // int(os.environ["LOCAL_WORLD_SIZE"])
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.rand(given.tokens, given.width, generator=generator)
    choosing = Choosing(
        given.experts, given.top_k, given.skew, num_nodes, given.most_nodes or num_nodes
    )
    choices = [choosing.drawn(given.tokens, generator) for _ in range(given.layers)]
    contenders = [Contender(name, given) for name in given.only]
    results = [[each.step(number, x_TD, choices) for number in range(3)] for each in contenders]
    for each, (*_, last) in zip(contenders, results):
        check_agree(results[0][-1], last, each.name)
    seconds: dict[str, list[float]] = {each.name: [] for each in contenders}
    sent = dict.fromkeys(seconds, 0)
    for number in range(given.rounds):
        for each in rotated(contenders, number):
            dist.barrier()
            start_s, before = time.perf_counter(), sent_bytes()
            each.step(3 + number, x_TD, choices)
            sent[each.name] += sent_bytes() - before
            dist.barrier()
            seconds[each.name].append(time.perf_counter() - start_s)
    by_choices, by_cells, by_nodes = rows_of(choices[0], given.experts, num_cells, num_nodes)
    table = Table("contender", "ms a step", "first is slower by", "rounds won", "MB sent, rank 0")
    for name, own in seconds.items():
        ratios = [first / its for first, its in zip(seconds[given.only[0]], own)]
        table.add_row(
            name,
            f"{1e3 * statistics.median(own):.0f}",
            f"{statistics.median(ratios):.3f}",
            f"{sum(ratio > 1 for ratio in ratios)}/{len(ratios)}",
            f"{sent[name] / given.rounds / 1e6:.2f}",
        )
    console = Console(quiet=rank != 0, highlight=False)
    console.print(
        f"rows of a token: {by_choices:.2f} by choices, {by_cells:.2f} by ranks, {by_nodes:.2f} by "
        "nodes; its own ones among them"
    )
    console.print(table)
    console.print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
