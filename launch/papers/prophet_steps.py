# SPDX-License-Identifier: Apache-2.0
"""A block of Pro-Prophet and of what it is compared with, by its own model of time (spec 2.3, 8.5).

Plans are made for the rows of the step before and priced on those that came; FasterMoE's for the
rows that came, by eq. (6), for its replicas wait for nothing and hide behind nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise

import numpy as np

from ds_moe_ext.core.hardware import Hardware, read_hardware
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.files.documents import CONFIGS
from ds_moe_ext.planning.layer_costs import (
    BlockPrices,
    BlockSeconds,
    copied_experts,
    ep_rank_rows,
    seconds_of_rows,
)
from ds_moe_ext.planning.prophet_planner import place_experts, shadow_experts
from papers.zipf_loads import ZipfLoads

ELEMENT_BYTES = 4
SEQUENCE = 256
BACKWARD = 2  # times forward
EXPONENT = 1.05  # top 3 of 16 have 56 %, the last 3 5.5 % (the paper: over 50, below 5)
SENDERS_ALIKE = 200.0
STEPS = 6  # of which the first only predicts


@dataclass(frozen=True)
class Model:
    """One of table III."""

    name: str
    num_layers: int
    width: int
    expert_width: int


MODELS = (
    Model("S", 12, 512, 1024),
    Model("M", 12, 1024, 2048),
    Model("L", 12, 2048, 4096),
    Model("DS", 24, 512, 1024),
    Model("DM", 24, 1024, 2048),
)
SMALL, MIDDLE = MODELS[0], MODELS[1]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal ranks, each with one expert of every layer.

    Attributes:
        name: in the paper.
        file: of ``configs/hardware``.
        num_nodes: of it.
        tokens: of all ranks, in a step.
        flops_per_s: effective, of a rank.
        has_levels: replicas enter each node once, and rows that stay in a node leave its card
            free; else both have a rank's share of the card.
    """

    name: str
    file: str
    num_nodes: int
    tokens: int
    flops_per_s: float
    has_levels: bool = True

    @cached_property
    def hardware(self) -> Hardware:
        return read_hardware(CONFIGS / "hardware" / self.file)

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.hardware.ranks_per_node

    @property
    def card_bytes_per_s(self) -> float:
        assert self.hardware.inter is not None, f"{self.file} has no inter"
        return self.hardware.inter.bytes_per_s

    @property
    def copy_bytes_per_s(self) -> float:
        """Of replicas."""
        return self.card_bytes_per_s if self.has_levels else self.bytes_per_s

    @property
    def bytes_per_s(self) -> float:
        """Of rows."""
        per_node = self.hardware.ranks_per_node
        abroad = (self.num_ranks - per_node) / (self.num_ranks - 1) if self.has_levels else 1.0
        return self.card_bytes_per_s / per_node / abroad


FLOPS_3090, FLOPS_2080 = 20e12, 9e12  # as the spec assumes
HPWNV = Cluster(
    name="HPWNV, 16 ranks",
    file="proprophet_hpwnv.json",
    num_nodes=4,
    tokens=16384,
    flops_per_s=FLOPS_3090,
)
HPWNV_32 = replace(HPWNV, name="HPWNV, 32 ranks", num_nodes=8, tokens=32768)
HPNV = replace(HPWNV, name="HPNV, 16 ranks", file="proprophet_hpnv.json")
LPWNV = Cluster(
    name="LPWNV, 8 ranks",
    file="proprophet_lpwnv.json",
    num_nodes=2,
    tokens=4096,
    flops_per_s=FLOPS_2080,
)


@dataclass(frozen=True, eq=False)
class Planned:
    """One layer in one step under a policy.

    Attributes:
        seconds: of the block.
        computed_C: rows that each rank computes.
    """

    seconds: BlockSeconds
    computed_C: np.ndarray


Policy = Callable[["Block", np.ndarray, np.ndarray], Planned]


@dataclass(frozen=True)
class Block:
    """A model's blocks on a cluster.

    Attributes:
        model: which.
        cluster: where.
        picks: experts of a token, ``k``.
    """

    model: Model
    cluster: Cluster
    picks: int

    @property
    def gap_s(self) -> float:
        """Forward of the non-MoE layer, ``T_FNEC``."""
        tokens, width = self.cluster.tokens / self.cluster.num_ranks, self.model.width
        work = tokens * (4 * width**2 + 2 * SEQUENCE * width)
        return 2 * work / self.cluster.flops_per_s

    @cached_property
    def prices(self) -> BlockPrices:
        """Of eq. (6)."""
        weights = 2 * self.model.width * self.model.expert_width
        return BlockPrices(
            row_s=2 * weights / self.cluster.flops_per_s,
            row_bytes=ELEMENT_BYTES * self.model.width,
            bytes_per_s=self.cluster.bytes_per_s,
            weight_bytes=ELEMENT_BYTES * weights,
            gradient_bytes=ELEMENT_BYTES * weights,
            copy_bytes_per_s=self.cluster.copy_bytes_per_s,
            forward_gap_s=self.gap_s,
            backward_gap_s=BACKWARD * self.gap_s,
        )

    @cached_property
    def owner(self) -> Placement:
        return Placement.block(self.cluster.num_ranks, self.cluster.num_ranks)

    def priced(self, target: Placement, rows_CE: np.ndarray, *, scheduled: bool) -> Planned:
        """What a placement takes for some rows."""
        rows = ep_rank_rows(self.owner, target, rows_CE)
        prices = replace(self.prices, is_scheduled=scheduled)
        return Planned(
            seconds_of_rows(rows, copied_experts(target), prices=prices), rows.computed_C
        )

    @cached_property
    def rows(self) -> Sequence[Sequence[np.ndarray]]:
        """Of each step and layer, int64 ``[C, E]``."""
        num_ranks = self.cluster.num_ranks
        loads = ZipfLoads(
            exponents=(EXPONENT,) * self.model.num_layers,
            num_experts=num_ranks,
            num_ep_ranks=num_ranks,
            rows=self.picks * self.cluster.tokens // num_ranks,
            picks=self.picks,
            own=SENDERS_ALIKE,
        )
        return list(loads.steps(range(STEPS)))

    def seconds(self, policy: Policy) -> np.ndarray:
        """With the non-MoE layer, of each step but the first and each layer, float ``[I, L]``."""
        return (
            np.array([[each.seconds.step_s for each in step] for step in planned(self, policy)])
            + (1 + BACKWARD) * self.gap_s
        )


@cache
def planned(block: Block, policy: Policy) -> Sequence[Sequence[Planned]]:
    """Of each step but the first, and each layer."""
    return [
        [policy(block, before_CE, now_CE) for before_CE, now_CE in zip(before, now)]
        for before, now in pairwise(block.rows)
    ]


def deepspeed(block: Block, before_CE: np.ndarray, now_CE: np.ndarray) -> Planned:
    """DeepSpeed-MoE: no replicas."""
    return block.priced(block.owner, now_CE, scheduled=False)


def faster_moe(block: Block, before_CE: np.ndarray, now_CE: np.ndarray) -> Planned:
    """Its released policy has one bandwidth for rows and replicas."""
    prices = replace(block.prices, copy_bytes_per_s=block.prices.bytes_per_s)
    plan = shadow_experts(block.owner, now_CE, prices=prices)
    return block.priced(plan.target, now_CE, scheduled=False)


def informed_faster_moe(block: Block, before_CE: np.ndarray, now_CE: np.ndarray) -> Planned:
    """The same policy, if it knew what replicas take."""
    plan = shadow_experts(block.owner, now_CE, prices=block.prices)
    return block.priced(plan.target, now_CE, scheduled=False)


def _prophet(block: Block, before_CE: np.ndarray, *, scheduled: bool) -> Placement:
    prices = replace(block.prices, is_scheduled=scheduled)
    return place_experts(block.owner, before_CE, prices=prices).target


def planner(block: Block, before_CE: np.ndarray, now_CE: np.ndarray) -> Planned:
    """Pro-Prophet's planner alone, by eq. (6)."""
    return block.priced(_prophet(block, before_CE, scheduled=False), now_CE, scheduled=False)


def scheduler(block: Block, before_CE: np.ndarray, now_CE: np.ndarray) -> Planned:
    """The same placement, its replicas hidden."""
    return block.priced(_prophet(block, before_CE, scheduled=False), now_CE, scheduled=True)


def prophet(block: Block, before_CE: np.ndarray, now_CE: np.ndarray) -> Planned:
    """All of it: planned by eq. (8)."""
    return block.priced(_prophet(block, before_CE, scheduled=True), now_CE, scheduled=True)


def _hottest(block: Block, before_CE: np.ndarray, now_CE: np.ndarray, count: int) -> Planned:
    holds_EC = block.owner.holds_EC.copy()
    holds_EC[np.argsort(-before_CE.sum(axis=0), kind="stable")[:count]] = True
    return block.priced(Placement(holds_EC), now_CE, scheduled=False)


def top_2(block: Block, before_CE: np.ndarray, now_CE: np.ndarray) -> Planned:
    """The heaviest two experts everywhere, blocking."""
    return _hottest(block, before_CE, now_CE, 2)


def top_3(block: Block, before_CE: np.ndarray, now_CE: np.ndarray) -> Planned:
    """The heaviest three."""
    return _hottest(block, before_CE, now_CE, 3)
