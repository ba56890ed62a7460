# SPDX-License-Identifier: Apache-2.0
"""The contenders of slow_links.py: paced layers under one strategy each, trained step by step.

Shape letters: L layers, C ranks, E experts, T rows of a rank, D width of a row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pace import Block, Pace
from replaced_layers import ReplacedLayers
from slow_links_figures import Cards, Routed, Seen, Told, rows_between, travel
from torch import Tensor, nn

from ds_moe_ext.core.comm import Traffic
from ds_moe_ext.planning.prices import Prices
from ds_moe_ext.planning.strategy import ROWS_ALONE


@dataclass(frozen=True)
class Way:
    """One way to run the layers.

    Attributes:
        name: in the table.
        block: of the JSON.
        is_early: copies are launched as a block begins; else where the layer is called, so that
            nothing hides them.
    """

    name: str
    block: dict[str, Any]
    is_early: bool = True


PLAIN = Way("ep", {"strategy": "ep"})


def fssdp_ways(copies_per_rank: Sequence[int], overlap_degree: int) -> Iterator[Way]:
    """Copies in growing numbers by either share, variants of the most, and t and m measured.

    Args:
        copies_per_rank: m of each; none leaves only what is measured.
        overlap_degree: t of those.
    """
    for copies in copies_per_rank:
        given = {"overlap_degree": overlap_degree, "copies_per_rank": copies}
        yield _fssdp(f"m = {copies}", **given)
        yield _fssdp(f"m = {copies}, paper share", **given, share="paper")
    if copies_per_rank:
        yield _fssdp("the same, rematerialized", **given, rematerialize=True)
        yield replace(_fssdp("the same, late", **given), is_early=False)
    yield _fssdp("fssdp, t and m measured")
    yield _fssdp("the same, paper share", share="paper")


def _fssdp(name: str, **keys: Any) -> Way:
    return Way(name, {"strategy": "fssdp", "fssdp": {"reshard_interval": 0, **keys}})


def prophet_ways() -> Iterator[Way]:
    """As it comes; then with one thing changed; last as "own block", but kept and launched late."""
    yield _prophet("prophet")
    yield _prophet("prophet, kept", rematerialize=False)
    yield _prophet("prophet, paper share", share="paper")
    yield _prophet("prophet, shadow", planner="shadow")
    yield _prophet("prophet, own block", scheduler=False)
    bare = _prophet("prophet, not hidden", scheduler=False, rematerialize=False)
    yield replace(bare, is_early=False)


def _prophet(name: str, **keys: Any) -> Way:
    return Way(name, {"strategy": "prophet", "prophet": keys})


def esp_ways() -> Iterator[Way]:
    """Whole experts uncut, in one queue, in two; and so with experts split in the nodes; last the
    pipeline over copies."""
    for size, name in ((1, "esp"), (2, "esp, cells of 2")):
        yield _esp(f"{name}, uncut", size, degree=1)
        yield _esp(f"{name}, tutel", size, schedule="tutel")
        yield _esp(f"{name}, fsmoe", size)
    for balance, keys in (("fssdp", {"reshard_interval": 0}), ("prophet", {})):
        way = _esp(f"esp over {balance}", 1)
        yield replace(way, block={**way.block, "balance": balance, balance: keys})


def _esp(name: str, cell_size: int, **keys: Any) -> Way:
    block = {"strategy": "esp", "expert_sharding_size": cell_size}
    return Way(name, {**block, "esp": {"slice_gradients": False, **keys}})


def auto_ways() -> Iterator[Way]:
    """What chooses, often; and each of those that it chooses from."""
    stays = {"fssdp": {"reshard_interval": 0}}
    yield Way("auto", {"strategy": "auto", "auto": {"interval": 10}, **stays})
    yield _fssdp("fssdp, t and m measured")
    yield _prophet("prophet")
    yield _esp("esp", 1)
    for balance, keys in (("fssdp", stays["fssdp"]), ("prophet", {})):
        way = _esp(f"esp over {balance}", 1)
        yield replace(way, block={**way.block, "balance": balance, balance: keys})


def _speeds(prices: Prices) -> str:
    """Of rows, as first steps have shown, for a person."""
    inter, intra = prices.inter_bytes_per_s / 1e6, prices.intra_bytes_per_s / 1e6
    return (
        f"rows leave a node at {inter:.0f} MB/s ({prices.cards:.2f} times as fast as one of its "
        f"ranks alone) and a rank at {intra:.0f} MB/s, and take {1e6 * prices.row_s:.1f} us to "
        "compute"
    )


@dataclass(frozen=True)
class Sizes:
    """Of a model.

    Attributes:
        layers: of the model.
        experts: of a layer.
        expert_rows: an expert has so many times a row's bytes.
        rows: of a rank and layer.
        width: floats of a row.
    """

    layers: int
    experts: int
    expert_rows: int
    rows: int
    width: int


class Contender:
    """A model with its layers replaced, trained without an optimizer. Collective.

    Args:
        way: how its layers run.
        pace: of its computing.
        sizes: of the model.

    Attributes:
        name: in the table.
        prices: by which HECATE's model prices its steps.
    """

    def __init__(self, way: Way, pace: Pace, sizes: Sizes) -> None:
        self.name, self._pace = way.name, pace
        self.prices, self._line = ROWS_ALONE, ""
        self._cards = Cards.told(4 * sizes.width)
        shape = (sizes.experts, sizes.expert_rows, sizes.width)
        self._blocks = nn.ModuleList([Block(pace, shape) for _ in range(sizes.layers)])
        model = nn.ModuleDict({"blocks": self._blocks})
        self._replaced = ReplacedLayers.of(model, way.block, is_early=way.is_early, tell=self._tell)
        self._layers = self._replaced.layers
        for layer in self._layers:
            layer.routed.tasks.is_wanted = True
        self._own_s, self._began_s = 0.0, time.perf_counter()
        self._replaced.planning.costs.times.clock = self._clock
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._x_TD = torch.rand(sizes.rows, sizes.width, generator=generator)

    def _tell(self, line: str) -> None:
        self._line = line

    def _clock(self) -> float:
        """Seconds of its own turns."""
        return self._own_s + time.perf_counter() - self._began_s

    @property
    def told(self) -> Told:
        line = self._line
        if line and self.measured is not ROWS_ALONE:
            line = f"{line}; {_speeds(self.measured)}"
        return Told(line, self._replaced.planning.checks.terms)

    @property
    def node_C(self) -> np.ndarray:
        return self._replaced.node_C

    @property
    def measured(self) -> Prices:
        """Prices that its own first steps have shown."""
        return self._replaced.planning.job.pools[0].prices

    @property
    def _sent_bytes(self) -> int:
        copies = (layer.routed.copies for layer in self._layers)
        return sum((each.traffic for each in copies if each), start=Traffic()).sent_bytes

    def step(self, number: int, rows_LE: np.ndarray) -> Seen:
        """One step whose gates choose as told. Collective.

        Args:
            number: of the step, from 0.
            rows_LE: rows that this rank routes to each expert of each layer.
        """
        self._began_s = time.perf_counter()
        plans = [layer.routed.site.plan for layer in self._layers]
        before = self._sent_bytes
        self._blocks.zero_grad(set_to_none=True)
        x_TD = self._x_TD = self._x_TD.detach().requires_grad_()
        mixing = torch.Generator().manual_seed(number)  # as tokens of a text are
        for block, rows_E in zip(self._blocks, rows_LE):
            expert_T = torch.repeat_interleave(torch.from_numpy(rows_E))
            expert_T = expert_T[torch.randperm(len(expert_T), generator=mixing)]
            x_TD = block(x_TD, expert_T[:, None])
        x_TD.backward(torch.ones_like(x_TD))
        rows = self._replaced.after_step(number)
        self._own_s, self._began_s = self._clock(), time.perf_counter()
        rows_LCC = rows_between(plans, [each.routed_CE for each in rows])
        timed = (task for layer in self._layers for task in layer.routed.tasks.take())
        held = self._pace.take()
        return Seen(
            routed=Routed.of(
                rows_LCC, self.node_C, pace=self._pace, prices=self.prices, cards=self._cards
            ),
            travel=travel(timed, [(each.start_s, each.end_s) for each in held]),
            copy_bytes=self._sent_bytes - before,
            late_s=sum(each.late_s for each in held),
        )

    def gradients(self) -> list[Tensor]:
        """Of the input; and of the experts at home on this rank, if they are whole."""
        whole = (layer for layer in self._layers if layer.hosted.shard.is_whole)
        weights = (parameter for layer in whole for parameter in layer.parameters)
        grads = [parameter.grad for parameter in weights]
        return [grad for grad in (self._x_TD.grad, *grads) if grad is not None]
