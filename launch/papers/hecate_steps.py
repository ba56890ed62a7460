# SPDX-License-Identifier: Apache-2.0
"""A step of HECATE and of what it is compared with, by our planners and prices (spec 6.4).

A layer's forward and backward is its experts and four all-to-alls (``cost.prices``); replicas move
beside attention, and what attention does not hide is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache

import numpy as np

from ds_moe_ext.core.hardware import Hardware, read_hardware
from ds_moe_ext.core.placement import Placement, even_owners
from ds_moe_ext.files.documents import CONFIGS
from ds_moe_ext.planning.fssdp_planner import materialize, shard
from ds_moe_ext.planning.loads import LoadWindow
from ds_moe_ext.planning.prices import (
    Prices,
    busiest_link,
    flow_seconds,
    nearest_replica_flow,
    overlap_degree,
)
from papers.zipf_loads import ZipfLoads

ELEMENT_BYTES = 2
CHOICES = 2
EFFICIENCY = 0.35  # of the device's peak
REPLICAS = 9  # m, of a rank and layer (spec 2.11)
WINDOW = 5  # steps whose mean predicts
RESHARD = 100  # steps between two shardings
BACKWARD = 2  # times forward


@dataclass(frozen=True, kw_only=True)
class Model:
    """One of table 1; experts are two matrices, twice as wide as the model."""

    name: str
    width: int
    length: int
    num_layers: int
    vocabulary: int
    num_experts: int = 64

    @property
    def expert_bytes(self) -> int:
        return 4 * self.width**2 * ELEMENT_BYTES

    @property
    def attention_work(self) -> int:
        """Multiply-adds of a token in one layer, forward: four matrices, scores and sums."""
        return 4 * self.width**2 + 2 * self.length * self.width

    @property
    def dense_bytes(self) -> int:
        """Gradients of attention and embedding."""
        attention = 4 * self.num_layers * self.width**2
        return ELEMENT_BYTES * (attention + self.vocabulary * self.width)


GPT_S = Model(name="GPT-MoE-S", width=768, length=2048, num_layers=12, vocabulary=50257)
GPT_L = Model(name="GPT-MoE-L", width=1536, length=2048, num_layers=12, vocabulary=50257)
BERT = Model(name="BERT-MoE", width=1024, length=512, num_layers=12, vocabulary=30522)
BERT_DEEP = Model(name="BERT-MoE-Deep", width=1024, length=512, num_layers=24, vocabulary=30522)
MODELS = (GPT_S, GPT_L, BERT, BERT_DEEP)


class System(Enum):
    """What a step has of HECATE: owners that are chosen, copies."""

    EP = (False, False)
    SHARDING = (True, False)
    REPLICAS = (False, True)
    HECATE = (True, True)

    @property
    def shards(self) -> bool:
        return self.value[0]

    @property
    def replicas(self) -> bool:
        return self.value[1]


@dataclass(frozen=True, kw_only=True)
class Step:
    """Of one system; seconds of forward and backward together.

    Attributes:
        layer_L: each MoE layer, with what is not hidden of its replicas.
        exchange_L: its four all-to-alls.
        replicas_L: moving its replicas and their gradients, hidden or not.
        other_s: of attention, the head and the sum of dense gradients.
        targets: where experts compute.
        owners: where they live.
    """

    layer_L: np.ndarray
    exchange_L: np.ndarray
    replicas_L: np.ndarray
    other_s: float
    targets: Sequence[Placement]
    owners: Sequence[Placement]

    @property
    def seconds(self) -> float:
        """All of it."""
        return float(self.layer_L.sum() + self.other_s)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model on a cluster.

    Attributes:
        model: which.
        file: of ``configs/hardware``.
        exponent: of Zipf's law.
        tokens: of a rank, in a step.
        num_nodes: of the cluster that are used.
        age: steps since owners were chosen.
        gathers_again: replicas are released after forward (HECATE-RM).
        reached: part of the nodes' link that replicas reach, which ``t`` does not know.
        start_s: seconds until a collective of replicas begins, likewise.
    """

    model: Model
    file: str
    exponent: float
    tokens: int
    num_nodes: int = 4
    age: int = RESHARD
    gathers_again: bool = False
    reached: float = 1.0
    start_s: float = 0.0

    @cached_property
    def hardware(self) -> Hardware:
        return read_hardware(CONFIGS / "hardware" / self.file)

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.hardware.ranks_per_node

    @property
    def num_experts(self) -> int:
        """Two of a rank in each layer: weak scaling."""
        return self.model.num_experts * self.num_nodes // self.hardware.num_nodes

    @property
    def product_per_s(self) -> float:
        """Multiply-adds of a rank."""
        peak = self.hardware.device.product("fp16")
        assert peak is not None, f"{self.file} has no flops_per_s.fp16"
        return EFFICIENCY * peak.multiply_adds_per_s

    @property
    def attention_s(self) -> float:
        """Forward of a layer."""
        return self.tokens * self.model.attention_work / self.product_per_s

    @property
    def other_s(self) -> float:
        """Outside MoE layers; dense gradients leave and enter each node once."""
        head_s = self.tokens * self.model.vocabulary * self.model.width / self.product_per_s
        computed_s = (1 + BACKWARD) * (self.model.num_layers * self.attention_s + head_s)
        return computed_s + 2 * self.model.dense_bytes / self.prices.inter_bytes_per_s

    @cached_property
    def prices(self) -> Prices:
        intra, inter = self.hardware.intra, self.hardware.inter
        assert intra and inter, f"{self.file} lacks a link"
        return Prices(
            row_s=(1 + BACKWARD) * 4 * self.model.width**2 / self.product_per_s,
            row_bytes=self.model.width * ELEMENT_BYTES,
            copy_s=self.model.expert_bytes / inter.bytes_per_s,
            inter_bytes_per_s=inter.bytes_per_s,
            intra_bytes_per_s=intra.bytes_per_s,
        )

    @property
    def overlap_degree(self) -> int:
        """``t``."""
        return overlap_degree(
            self.attention_s,
            bytes_per_s=self.prices.inter_bytes_per_s,
            expert_bytes=self.model.expert_bytes,
            num_experts=self.num_experts,
        )

    @cached_property
    def loads(self) -> Loads:
        """What planners knew, and what came."""
        steps = ZipfLoads(
            exponents=(self.exponent,) * self.model.num_layers,
            num_experts=self.num_experts,
            num_ep_ranks=self.num_ranks,
            rows=CHOICES * self.tokens,
        ).steps([*range(WINDOW), *range(self.age, self.age + WINDOW + 1)])
        *known, now = steps
        before, window = LoadWindow(WINDOW), LoadWindow(WINDOW)
        for rows in known[:WINDOW]:
            before.push(rows)
        for rows in known[WINDOW:]:
            window.push(rows)
        return Loads(before.predicted(), window.predicted(), now)

    @lru_cache(maxsize=64)  # noqa: B019  figures share steps, and setups are few
    def step(self, system: System) -> Step:
        """Plan by what was known, and price what came."""
        node_C = self.hardware.node_of_ep_ranks(self.num_ranks)
        degree = self.overlap_degree if system.replicas else 0
        owners = even_owners([self.num_experts] * self.model.num_layers, self.num_ranks)
        if system.shards:
            owners = shard(
                [rows_CE.sum(axis=0) for rows_CE in self.loads.at_sharding],
                overlap_degree=degree,
                node_C=node_C,
                owners=owners,
            )
        targets = materialize(
            owners,
            [rows_CE.sum(axis=0) for rows_CE in self.loads.predicted],
            overlap_degree=degree,
            replicas_per_ep_rank=REPLICAS,
            node_C=node_C,
        )
        flow = nearest_replica_flow(targets, self.loads.now, node_C)
        computed_and_exchanged_L = flow_seconds(flow, prices=self.prices)
        exchange_L = flow_seconds(flow, prices=replace(self.prices, row_s=0.0))
        links_L = np.array(
            [busiest_link(owner, owner, target, node_C) for owner, target in zip(owners, targets)]
        )
        one_way_L = self.prices.copy_s / self.reached * links_L + self.start_s * (links_L > 0)
        back_L = one_way_L * (1 + self.gathers_again)
        exposed_L = np.maximum(one_way_L - self.attention_s, 0.0)
        exposed_L += np.maximum(back_L - BACKWARD * self.attention_s, 0.0)
        return Step(
            layer_L=computed_and_exchanged_L + exposed_L,
            exchange_L=exchange_L,
            replicas_L=one_way_L + back_L,
            other_s=self.other_s,
            targets=targets,
            owners=owners,
        )


@dataclass(frozen=True, eq=False)
class Loads:
    """Rows of each layer, int64 ``[C, E]``.

    Attributes:
        at_sharding: predicted as owners were chosen.
        predicted: as replicas were.
        now: of the step.
    """

    at_sharding: Sequence[np.ndarray]
    predicted: Sequence[np.ndarray]
    now: Sequence[np.ndarray]
