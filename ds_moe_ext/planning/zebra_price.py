# SPDX-License-Identifier: Apache-2.0
"""Clusters of unlike devices: side by side as one, and what zebra would take on them. Pure.

``joined`` makes one cluster whose ranks are those of the first, then those of the next. All ranks
meet in every exchange, so that a link, a memory and what all devices compute alike are those of the
slowest. ``price_zebra`` gives one of two the attention and the other the experts, by the simulator
of zebra's planner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import TypeVar

import numpy as np

from ds_moe_ext.core.hardware import Collectives, Device, Hardware, Products
from ds_moe_ext.core.layout import Grid, divisors
from ds_moe_ext.planning.described_run import KEPT_DENSE, LOGIT_BYTES, RUNTIME, DescribedRun
from ds_moe_ext.planning.layer_costs import BACKWARD, FORWARD
from ds_moe_ext.planning.model_shape import MASTER_AND_STATES, ModelShape, OnItsWay, Training
from ds_moe_ext.planning.zebra_costs import LayerTimes, ZebraShape, card_of
from ds_moe_ext.planning.zebra_planner import Memory, Stripes, WeightBytes, ZebraGroup, choose_moved
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
        intra=_least((each.intra for each in clusters), attrgetter("bytes_per_s")),
        inter=_least((each.inter for each in clusters), attrgetter("bytes_per_s")),
        # What was measured within one of them says nothing of all together.
        intra_collectives=Collectives(),
        inter_collectives=Collectives(),
        copy=None,
    )


def _slowest_device(devices: Sequence[Device]) -> Device:
    speed = attrgetter("multiply_adds_per_s")
    lines = {
        each.name: _least((device.product(each.name) for device in devices), speed)
        for each in fields(Products)
    }
    return Device(
        name=" and ".join(dict.fromkeys(device.name for device in devices)),
        memory_bytes=_least((device.memory_bytes for device in devices), float),
        memory_bytes_per_s=_least((device.memory_bytes_per_s for device in devices), float),
        products=Products(**lines),
    )


def _least(values: Iterable[T | None], key: Callable[[T], float]) -> T | None:
    """None where it is not known of all."""
    known = list(values)
    found = [value for value in known if value is not None]
    return min(found, key=key) if len(found) == len(known) else None


@dataclass(frozen=True)
class ZebraPrice:
    """What a step takes."""

    shape: ZebraShape  # of a group
    num_groups: int  # of them
    moved_L: tuple[int, ...]  # experts that each expert rank leaves to attention ranks
    step_s: float  # seconds


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

    def run(hardware: Hardware, num_ep_ranks: int) -> DescribedRun:
        own = replace(training, num_ranks=hardware.num_ranks)
        grid = Grid(hardware.num_ranks, num_ep_ranks)
        return DescribedRun(hardware=hardware, shape=shape, training=own, grid=grid, passes=passes)

    fast, slow = sorted(clusters, key=lambda each: -run(each, 1).product.multiply_adds_per_s)
    group, num_groups = _largest_group(fast.num_ranks, slow.num_ranks, shape, training)
    new, old = run(fast, 1), run(slow, group.expert_ranks)  # with attention, and with experts
    # Of a stripe: tokens of an attention rank, and rows that an expert rank computes in a layer.
    samples = training.micro_batch * (group.attention_ranks + group.expert_ranks)
    tokens = group.stripe_samples(samples) * training.length
    rows = tokens * shape.top_k * (group.attention_ranks / group.expert_ranks)
    rows_LN = rows_LE.reshape(len(rows_LE), group.expert_ranks, -1).sum(axis=2)
    imbalance = float((rows_LN.max(axis=1) / rows_LN.mean(axis=1)).mean())
    rounds = FORWARD + new.backward_rounds
    dense_s = sum(new.window_s) / len(new.window_s) / training.tokens
    choice = choose_moved(
        ZebraGroup(
            num_experts=shape.num_experts,
            num_layers=len(shape.moe_layers),
            attention_ranks=group.attention_ranks,
            expert_ranks=group.expert_ranks,
        ),
        LayerTimes(
            attention_s=rounds * tokens * dense_s,
            expert_s=imbalance * rows * _row_s(old),
            expert_on_attention_s=imbalance * rows * _row_s(new),
        ),
        Stripes(
            num_stripes=group.num_stripes,
            num_tokens=tokens,
            head_s=(FORWARD + BACKWARD) * tokens * new.head_s / training.tokens,
            top_k=shape.top_k,
            row_bytes=on_its_way.row.between if on_its_way else new.row_bytes,
            link=card_of(joined(clusters)),
        ),
        _memory(new, old, num_groups, rows, tokens * group.num_stripes),
    )
    is_moved = choice.moved_L == choice.proposed_L
    pass_s = choice.after_s if is_moved else choice.before_s
    end_s = max(new.dense_end_s(0), old.expert_end_s)
    step_s = training.micro_batches * pass_s + end_s
    return ZebraPrice(group, num_groups, choice.moved_L, step_s)


def _largest_group(
    attention_ranks: int, expert_ranks: int, shape: ModelShape, training: Training
) -> tuple[ZebraShape, int]:
    """Whose expert ranks hold equally many experts, and how many such there are."""
    for num_groups in divisors(math.gcd(attention_ranks, expert_ranks)):
        attention, expert = attention_ranks // num_groups, expert_ranks // num_groups
        is_even = attention % expert == 0 or expert % attention == 0
        if is_even and shape.num_experts % expert == 0:
            samples = training.micro_batch * (attention + expert)
            stripes = default_stripes(attention, expert, samples)
            group = ZebraShape(attention_ranks=attention, expert_ranks=expert, num_stripes=stripes)
            return group, num_groups
    raise ValueError(
        f"{attention_ranks} attention ranks and {expert_ranks} expert ranks make no groups in "
        f"which {shape.num_experts} experts divide; take other numbers of nodes"
    )


def _row_s(run: DescribedRun) -> float:
    """Of one row in a whole expert on one rank, forward and backward."""
    rounds = FORWARD + run.backward_rounds
    work_s = run.shape.expert_weights / run.product.multiply_adds_per_s
    return rounds * (work_s + 4 * run.row_bytes / run.memory_rate)


def _memory(
    new: DescribedRun, old: DescribedRun, num_groups: int, rows: float, tokens: int
) -> Memory:
    """Of a rank of each side: rows of a stripe on an expert rank, tokens of an attention rank."""
    model, training = new.shape, new.training
    of_row, kept = 2 * model.width, 1
    if not training.recomputes:
        of_row, kept = of_row + model.products * model.expert_width, KEPT_DENSE
    trained = WeightBytes(
        weight=training.element_bytes,
        gradient=training.gradient_bytes,
        optimizer=MASTER_AND_STATES,
        zero_stage=training.zero_stage,
    )
    states = model.num_layers * kept * new.row_bytes + model.vocabulary.size * LOGIT_BYTES
    free_bytes = [
        max((run.hardware.device.memory_bytes or 2**62) - RUNTIME, 0) for run in (old, new)
    ]
    return Memory(
        expert_bytes=trained.of(model.expert_weights, 0, num_groups),
        rows_bytes=int(rows * of_row * training.element_bytes),
        dense_bytes=trained.of(model.all_dense_weights, 0, new.grid.world_size) + tokens * states,
        expert_free_bytes=free_bytes[0],
        attention_free_bytes=free_bytes[1],
    )
