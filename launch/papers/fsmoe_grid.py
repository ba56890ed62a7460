# SPDX-License-Identifier: Apache-2.0
"""The 1458 layers that FSMoE measures, and what their operations cost on its two clusters.

Tables 4 and 5 of the paper; spec 8.1 to 8.3, choices of section 5. Seconds, fp32 elements and
multiply-adds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ds_moe_ext.core.hardware import Collectives, Hardware, Link, read_hardware
from ds_moe_ext.files.documents import CONFIGS
from ds_moe_ext.planning.layer_costs import LayerCosts
from ds_moe_ext.planning.prices import AllReduce, LinearCost

ELEMENT_BYTES = 4
QUERY_HEADS = 32
ROUTE_S = 0.4e-3  # gate and order, in each direction


@dataclass(frozen=True)
class Shape:
    """One layer of the grid.

    Attributes:
        batch: samples of an EP rank.
        kv_heads: key-value heads for 32 query heads; the grid's heads (the authors' script).
        length: tokens of a sample.
        width: of the model.
        hidden_ratio: width of an expert, in widths of the model.
        capacity: factor; 1 where nothing is dropped and loads are even.
        num_products: matrix products of an expert: 2 of GPT's, 3 of Mixtral's.
    """

    batch: int
    kv_heads: float
    length: int
    width: int
    hidden_ratio: float
    capacity: float
    num_products: int

    @property
    def num_tokens(self) -> int:
        """Of an EP rank."""
        return self.batch * self.length

    @property
    def attention_weights(self) -> float:
        """Elements of attention's four matrices."""
        return (2 + 2 * self.kv_heads / QUERY_HEADS) * self.width**2

    @property
    def attention_work(self) -> float:
        """Multiply-adds of attention: its matrices, scores and sums."""
        return self.num_tokens * (self.attention_weights + 2 * self.length * self.width)


def grid(lengths: Sequence[int]) -> Iterator[Shape]:
    """All layers of a cluster."""
    axes = ((1, 2, 4), (8, 16, 32), lengths, (1024, 2048, 4096), (2, 3, 4), (1.2, 2.4, 1.0), (2, 3))
    for batch, kv_heads, length, width, ratio, capacity, products in itertools.product(*axes):
        yield Shape(batch, kv_heads, length, width, ratio, capacity, products)


@dataclass(frozen=True, kw_only=True)
class PricedLayer:
    """What a layer costs a rank: seconds. The dense part is attention between two collectives.

    Attributes:
        forward: the MoE part's operations in forward.
        dense_gather_s: the EP rank's all-gather, in each direction.
        attention_s: in forward; twice that in backward.
        dense_scatter_s: the EP rank's reduce-scatter, in each direction.
        all_reduce: of dense gradients.
        gradient_elements: of one attention, on a rank.
    """

    forward: LayerCosts
    dense_gather_s: float
    attention_s: float
    dense_scatter_s: float
    all_reduce: AllReduce
    gradient_elements: int

    @property
    def dense_s(self) -> float:
        """Outside the MoE part in forward, with gate and order."""
        return ROUTE_S + self.dense_gather_s + self.attention_s + self.dense_scatter_s

    @property
    def back_dense_s(self) -> float:
        """In backward."""
        return self.dense_s + self.attention_s


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One of the paper's.

    Attributes:
        name: A or B.
        file: of ``configs/hardware``: the collectives.
        lengths: of samples in the grid.
        experts: by number of products; units are multiply-adds of a rank.
        attention: likewise.
        paper: mean speed over Tutel of pipelines, by name (section 6.4).
        text: what is assumed, where the paper does not say.
        between_ep_ranks: collectives in place of the file's, for another number of ranks.
    """

    name: str
    file: str
    lengths: tuple[int, ...]
    experts: Mapping[int, LinearCost]
    attention: LinearCost
    paper: Mapping[str, float]
    text: str
    between_ep_ranks: Collectives | None = None

    @cached_property
    def hardware(self) -> Hardware:
        return read_hardware(CONFIGS / "hardware" / self.file)

    def priced(self, shape: Shape, choices: int) -> PricedLayer:
        """A layer on this cluster; every EP rank has its own tokens.

        Args:
            shape: of the layer.
            choices: experts of a token.
        """
        intra = self.hardware.intra_collectives
        inter = self.between_ep_ranks or self.hardware.inter_collectives
        ep_rank = self.hardware.ranks_per_node
        tokens = shape.num_tokens * shape.width
        rows = choices * shape.capacity * tokens
        work = rows * shape.hidden_ratio * shape.width * shape.num_products / ep_rank
        gather, scatter = linear(intra.all_gather), linear(intra.reduce_scatter)
        reduce = linear(inter.all_reduce)
        attention = replace(self.attention, n=shape.attention_work / ep_rank)
        return PricedLayer(
            forward=LayerCosts(
                all_to_all=replace(linear(inter.all_to_all), n=rows / ep_rank),
                all_gather=replace(gather, n=rows),
                reduce_scatter=replace(scatter, n=rows),
                expert=replace(self.experts[shape.num_products], n=work),
            ),
            dense_gather_s=seconds(replace(gather, n=tokens)),
            attention_s=seconds(attention),
            dense_scatter_s=seconds(replace(scatter, n=tokens)),
            all_reduce=AllReduce(reduce.alpha_s, reduce.beta_s),
            gradient_elements=round(shape.attention_weights / ep_rank),
        )


def linear(link: Link | None) -> LinearCost:
    """The cost of elements on a link, of none yet."""
    assert link is not None, "the paper measures all four collectives"
    return LinearCost(alpha_s=link.latency_s, beta_s=ELEMENT_BYTES / link.bytes_per_s, n=0)


def seconds(cost: LinearCost) -> float:
    """Of all units in one call."""
    return cost.alpha_s + cost.n * cost.beta_s


def per_unit(alpha_s: float, beta_s: float) -> LinearCost:
    """A cost of no units yet."""
    return LinearCost(alpha_s=alpha_s, beta_s=beta_s, n=0)


A = Cluster(
    name="A",
    file="fsmoe_a.json",
    lengths=(512, 1024, 2048),
    experts={2: per_unit(0.706e-3, 7.657e-14), 3: per_unit(0.957e-3, 1.586e-13 * 2 / 3)},
    attention=per_unit(0.82e-3, 1.27e-13),
    paper={"tutel_improved": 1.09, "fsmoe_no_iio": 1.12, "fsmoe": 1.18},
    text="experts by the fit in the authors' code (0.706 ms and 7.657e-11 ms a multiply-add of 2 "
    "products, 0.957 ms and 1.057e-10 ms of 3); attention fitted to table 2 (0.82 ms, 1.27e-10 ms)",
)
B = Cluster(
    name="B",
    file="fsmoe_b.json",
    lengths=(256, 512, 1024),
    experts={n: per_unit(n * 0.0924e-3, 1.35e-13) for n in (2, 3)},
    attention=per_unit(0.65e-3, 2.1e-13),
    paper={"tutel_improved": 1.08, "fsmoe_no_iio": 1.16, "fsmoe": 1.22},
    text="experts 1.35e-10 ms a multiply-add, fitted to table 2, and the printed 0.0924 ms a "
    "product; attention 0.65 ms and 2.1e-10 ms (assumed; the paper gives neither)",
)
CLUSTERS = {cluster.name: cluster for cluster in (A, B)}
