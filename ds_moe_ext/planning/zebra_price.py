# SPDX-License-Identifier: Apache-2.0
"""Clusters of unlike devices side by side, as one. Pure.

Ranks are those of the first cluster, then those of the next. All ranks meet in every exchange, so
that a link, a memory and what all devices compute alike are those of the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from ds_moe_ext.core.hardware import Collectives, Device, Hardware, Link, Product, Products
from ds_moe_ext.core.layout import Grid, divisors
from ds_moe_ext.planning.described_run import KEPT_DENSE, LOGIT_BYTES, RUNTIME, DescribedRun
from ds_moe_ext.planning.layer_costs import BACKWARD, FORWARD
from ds_moe_ext.planning.model_shape import MASTER_AND_STATES, ModelShape, OnItsWay, Training
from ds_moe_ext.planning.zebra_costs import LayerTimes, ZebraShape, card_of
from ds_moe_ext.planning.zebra_planner import Memory, Stripes, ZebraGroup, choose_moved
from ds_moe_ext.schedule.stripes import default_stripes

T = TypeVar("T")


def joined(clusters: Sequence[Hardware]) -> Hardware:
    """One cluster with the slowest of all parts.

    Args:
        clusters: one or more, as they are reckoned with (``Reached.of``).

    Raises:
        ValueError: their nodes have different numbers of ranks.
    """
    first = clusters[0]
    if len(clusters) == 1:
        return first
    sizes = [each.ranks_per_node for each in clusters]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"nodes of {' and '.join(map(str, sizes))} ranks cannot be priced together; describe "
            "clusters whose nodes have equally many"
        )
    return replace(
        first,
        name=" + ".join(each.name for each in clusters),
        source="; ".join(each.source for each in clusters),
        num_nodes=sum(each.num_nodes for each in clusters),
        device=_slowest_device([each.device for each in clusters]),
        intra=_least((each.intra for each in clusters), _rate),
        inter=_least((each.inter for each in clusters), _rate),
        # What was measured within one of them says nothing of all together.
        intra_collectives=Collectives(),
        inter_collectives=Collectives(),
        copy=None,
    )


def _slowest_device(devices: Sequence[Device]) -> Device:
    lines = {
        each.name: _least((device.product(each.name) for device in devices), _speed)
        for each in fields(Products)
    }
    return Device(
        name=" and ".join(dict.fromkeys(device.name for device in devices)),
        memory_bytes=_least((device.memory_bytes for device in devices), float),
        memory_bytes_per_s=_least((device.memory_bytes_per_s for device in devices), float),
        products=Products(**lines),
    )


def _rate(link: Link) -> float:
    return link.bytes_per_s


def _speed(line: Product) -> float:
    return line.multiply_adds_per_s


def _least(values: Iterable[T | None], key: Callable[[T], float]) -> T | None:
    """None where it is not known of all."""
    known = list(values)
    found = [value for value in known if value is not None]
    return min(found, key=key) if len(found) == len(known) else None


# What zebra would take on clusters of unlike devices, by its planner's simulator. Pure.


@dataclass(frozen=True)
class ZebraPrice:
    """What a step takes."""

    shape: ZebraShape  # of a group
    num_groups: int  # of them
    moved_L: tuple[int, ...]  # experts that each expert rank leaves to attention ranks
    step_s: float  # seconds


@dataclass(frozen=True, kw_only=True)
class _Sides:
    """A group, and what each side runs: one rank of the new cluster, or of the old."""

    shape: ZebraShape
    num_groups: int
    new: DescribedRun
    old: DescribedRun

    @property
    def training(self) -> Training:
        return self.new.training

    @property
    def tokens(self) -> int:
        """Of a stripe, on one attention rank."""
        group = self.shape.attention_ranks + self.shape.expert_ranks
        samples = self.shape.stripe_samples(self.training.micro_batch * group)
        return samples * self.training.length

    @property
    def rows(self) -> float:
        """Of a stripe, that one expert rank computes in a layer."""
        arriving = self.shape.attention_ranks / self.shape.expert_ranks
        return self.tokens * self.new.shape.top_k * arriving

    def times(self, imbalance: float) -> LayerTimes:
        """Of a layer and a stripe, forward and backward."""
        rounds = FORWARD + self.new.backward_rounds
        dense_s = sum(self.new.window_s) / len(self.new.window_s) / self.training.tokens
        return LayerTimes(
            attention_s=rounds * self.tokens * dense_s,
            expert_s=imbalance * self.rows * _row_s(self.old),
            expert_on_attention_s=imbalance * self.rows * _row_s(self.new),
        )

    def memory(self) -> Memory:
        """Of a rank of each side."""
        model, training = self.new.shape, self.training
        state = model.width * training.element_bytes
        of_row = 2 * model.width
        if not training.recomputes:
            of_row += model.products * model.expert_width
        kept = 1 if training.recomputes else KEPT_DENSE
        tokens = self.tokens * self.shape.num_stripes
        dense = model.all_dense_weights
        return Memory(
            expert_bytes=model.expert_weights * _weight_bytes(training, self.num_groups),
            rows_bytes=int(self.rows * of_row * training.element_bytes),
            dense_bytes=dense * _weight_bytes(training, self.new.grid.world_size)
            + tokens * (model.num_layers * kept * state + model.vocabulary.size * LOGIT_BYTES),
            expert_free_bytes=_free_bytes(self.old),
            attention_free_bytes=_free_bytes(self.new),
        )


def price_zebra(
    clusters: Sequence[Hardware],
    shape: ModelShape,
    training: Training,
    rows_LE: np.ndarray,
    *,
    passes: int,
    on_its_way: OnItsWay | None = None,
) -> ZebraPrice:
    """A step in groups as large as can be.

    Args:
        clusters: two, as they are reckoned with.
        shape: of the model.
        training: how it is trained.
        rows_LE: rows of a pass, of all ranks.
        passes: as of ``Reached``.
        on_its_way: what rows weigh as they travel; None: what they do in memory.

    Raises:
        ValueError: no groups fit the ranks, or the model does not fit into memory.
    """
    sides = _sides(clusters, shape, training, passes)
    group, times = sides.shape, sides.times(_imbalance(rows_LE, sides.shape.expert_ranks))
    choice = choose_moved(
        ZebraGroup(
            num_experts=shape.num_experts,
            num_layers=len(shape.moe_layers),
            attention_ranks=group.attention_ranks,
            expert_ranks=group.expert_ranks,
        ),
        times,
        Stripes(
            num_stripes=group.num_stripes,
            num_tokens=sides.tokens,
            head_s=(FORWARD + BACKWARD) * sides.tokens * sides.new.head_s / training.tokens,
            top_k=shape.top_k,
            row_bytes=on_its_way.row.between if on_its_way else sides.new.row_bytes,
            link=card_of(joined(clusters)),
        ),
        sides.memory(),
    )
    is_moved = choice.moved_L == choice.proposed_L
    pass_s = choice.after_s if is_moved else choice.before_s
    end_s = max(sides.new.dense_end_s(0), sides.old.expert_end_s)
    step_s = training.micro_batches * pass_s + end_s
    return ZebraPrice(group, sides.num_groups, choice.moved_L, step_s)


def _sides(
    clusters: Sequence[Hardware], shape: ModelShape, training: Training, passes: int
) -> _Sides:
    """Of the largest groups whose expert ranks hold equally many experts."""

    def run(hardware: Hardware, num_cells: int) -> DescribedRun:
        own = replace(training, num_ranks=hardware.num_ranks)
        grid = Grid(hardware.num_ranks, num_cells)
        return DescribedRun(hardware=hardware, shape=shape, training=own, grid=grid, passes=passes)

    new, old = sorted(clusters, key=lambda each: -run(each, 1).product.multiply_adds_per_s)
    for num_groups in divisors(math.gcd(new.num_ranks, old.num_ranks)):
        attention, expert = new.num_ranks // num_groups, old.num_ranks // num_groups
        is_even = attention % expert == 0 or expert % attention == 0
        if is_even and shape.num_experts % expert == 0:
            stripes = default_stripes(
                attention, expert, training.micro_batch * (attention + expert)
            )
            group = ZebraShape(attention_ranks=attention, expert_ranks=expert, num_stripes=stripes)
            return _Sides(shape=group, num_groups=num_groups, new=run(new, 1), old=run(old, expert))
    raise ValueError(
        f"{new.num_ranks} attention ranks and {old.num_ranks} expert ranks make no groups in which "
        f"{shape.num_experts} experts divide; take other numbers of nodes"
    )


def _row_s(run: DescribedRun) -> float:
    """Of one row in a whole expert on one rank, forward and backward."""
    rounds = FORWARD + run.backward_rounds
    work_s = run.shape.expert_weights / run.product.multiply_adds_per_s
    return rounds * (work_s + 4 * run.row_bytes / run.memory_rate)


def _weight_bytes(training: Training, num_replicas: int) -> float:
    """Of a weight that so many ranks have: itself, its gradient, the optimizer's."""
    gradient = training.gradient_bytes / (num_replicas if training.zero_stage >= 2 else 1)
    optimizer = MASTER_AND_STATES / (num_replicas if training.zero_stage >= 1 else 1)
    return training.element_bytes + gradient + optimizer


def _free_bytes(run: DescribedRun) -> int:
    return max((run.hardware.device.memory_bytes or 2**62) - RUNTIME, 0)


def _imbalance(rows_LE: np.ndarray, num_cells: int) -> float:
    """Rows of the busiest rank over the mean, mean of the layers."""
    rows_LN = rows_LE.reshape(len(rows_LE), num_cells, -1).sum(axis=2)
    return float((rows_LN.max(axis=1) / rows_LN.mean(axis=1)).mean())
