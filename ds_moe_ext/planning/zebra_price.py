# SPDX-License-Identifier: Apache-2.0
"""Clusters of unlike devices: side by side as one, and what zebra would take on them. Pure.

``joined`` makes one cluster whose ranks are those of the first, then those of the next. All ranks
meet in every exchange, so that a link, a memory and what all devices compute alike are those of the
slowest. ``price_zebra`` gives one of two the attention and the other the experts, in the groups and
stripes that are fastest by the simulator of zebra's planner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from operator import attrgetter
from typing import TypeVar

import numpy as np

from ds_moe_ext.core.hardware import Collectives, Device, Hardware, Products
from ds_moe_ext.core.layout import Grid, divisors
from ds_moe_ext.planning.described_run import KEPT_DENSE, LOGIT_BYTES, RUNTIME, DescribedRun
from ds_moe_ext.planning.layer_costs import BACKWARD, FORWARD
from ds_moe_ext.planning.model_shape import (
    ALONE,
    MASTER_AND_STATES,
    ModelParallel,
    ModelShape,
    OnItsWay,
    Training,
)
from ds_moe_ext.planning.zebra_costs import MOST_STRIPES, LayerTimes, ZebraShape, card_of, once_to
from ds_moe_ext.planning.zebra_planner import (
    USABLE,
    Memory,
    Stripes,
    WeightBytes,
    ZebraGroup,
    choose_moved,
    step_seconds,
    used_bytes,
)
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


@dataclass(frozen=True, kw_only=True)
class ZebraPrice:
    """What a step takes."""

    shape: ZebraShape  # of a group
    num_groups: int  # of them
    attention: int  # which of the clusters has the attention ranks
    moved_L: tuple[int, ...]  # experts that each expert rank leaves to attention ranks
    step_s: float  # seconds
    dist_s: float  # seconds by DistEP: the sides take turns, one stripe, no expert moved
    attention_bytes: float  # memory of an attention rank
    expert_bytes: float  # memory of an expert rank
    # ranks that a token's row reaches together, where ``ep.send_once`` is faster; 0: it is not
    once_to: int


def price_zebra(
    clusters: Sequence[Hardware],
    shape: ModelShape,
    training: Training,
    rows_LE: np.ndarray,
    *,
    passes: int,
    on_its_way: OnItsWay | None = None,
    is_megatron: bool = False,
    sends_once: Sequence[bool] = (False,),
) -> ZebraPrice:
    """The fastest step, of all ways to divide the ranks into groups and samples into stripes.

    Groups of whole nodes come first: neighbouring ranks make a group, and a launcher gives those of
    a node to neighbours. Others are tried where there are none.

    Args:
        clusters: two, as they are reckoned with.
        shape: of the model.
        training: how it is trained.
        rows_LE: rows of a pass, of all ranks.
        passes: as of ``Reached``.
        on_its_way: what rows weigh as they travel; None: what they do in memory.
        is_megatron: whether Megatron runs it. There experts move only where attention ranks divide
            those of a layer, and stripes, its micro-batches, are of equally many samples.
        sends_once: values of ``ep.send_once`` to choose from; the first where both are as fast.

    Raises:
        ValueError: no groups fit the ranks, or the model does not fit into memory.
    """

    def run(hardware: Hardware, num_ep_ranks: int, parallel: ModelParallel = ALONE) -> DescribedRun:
        own = replace(training, num_ranks=hardware.num_ranks, parallel=parallel)
        grid = Grid(hardware.num_ranks, num_ep_ranks)
        return DescribedRun(hardware=hardware, shape=shape, training=own, grid=grid, passes=passes)

    fast, slow = sorted(clusters, key=lambda each: -run(each, 1).product.multiply_adds_per_s)
    new = run(fast, 1, training.parallel)  # with attention
    link = min(map(card_of, clusters), key=attrgetter("bytes_per_s"))
    row_bytes = on_its_way.row.between if on_its_way else new.row_bytes
    window_s = (*new.window_s, *new.back_window_s)
    dense_s = sum(window_s) / len(new.window_s) / training.tokens

    def price(
        attention: int, expert: int, num_groups: int, num_stripes: int, once: bool
    ) -> ZebraPrice:
        _check_divided(training, attention, expert, num_stripes, is_megatron=is_megatron)
        old = run(slow, expert)  # with experts
        samples = training.micro_batch * (attention + expert)  # of a group, times sharers
        # Codecs encode rows, not sums that nodes make of them.
        sizes = {1 if on_its_way else each.ranks_per_node for each in clusters}
        near = once_to(max(sizes), attention, expert) if len(sizes) == 1 else 1
        rows_LN = rows_LE.reshape(len(rows_LE), expert, -1).sum(axis=2)
        imbalance = float((rows_LN.max(axis=1) / rows_LN.mean(axis=1)).mean())
        # The busiest expert rank's card, over that of an attention rank where it is busier.
        busiest = max(1.0, imbalance * min(1.0, attention / expert))
        group = ZebraGroup(
            num_experts=shape.num_experts,
            num_layers=len(shape.moe_layers),
            attention_ranks=attention,
            expert_ranks=expert,
        )

        def cut(num_stripes: int) -> tuple[LayerTimes, Stripes]:
            """Of a stripe: tokens of an attention rank, rows that an expert rank computes."""
            tokens = -(-samples // (attention * num_stripes)) * training.length
            tokens //= training.parallel.sharers
            rows = imbalance * tokens * shape.top_k * (attention / expert)
            return LayerTimes(
                attention_s=tokens * dense_s,
                expert_s=rows * _row_s(old),
                expert_on_attention_s=rows * _row_s(new),
            ), Stripes(
                num_stripes=num_stripes,
                num_tokens=tokens,
                head_s=tokens
                * ((FORWARD + BACKWARD) * new.head_s + sum(new.head_sent_s))
                / training.tokens,
                top_k=shape.top_k,
                row_bytes=busiest * row_bytes,
                link=link,
                once_to=once * near,
            )

        times, stripes = cut(num_stripes)
        rows = stripes.num_tokens * shape.top_k * (attention / expert)
        memory = _memory(new, old, num_groups, rows, stripes)
        if memory.dense_bytes > USABLE * memory.attention_free_bytes:
            raise ValueError(
                f"the model does not fit: an attention rank wants {memory.dense_bytes:,.0f} bytes "
                f"besides experts and has {USABLE * memory.attention_free_bytes:,.0f}; take more "
                "ranks, fewer samples, or recompute activations"
            )
        choice = choose_moved(group, times, stripes, memory, is_megatron=is_megatron)
        is_moved = choice.moved_L == choice.proposed_L
        none_L = (0,) * group.num_layers
        dist_s = step_seconds(group, *cut(1), none_L, overlaps=False)
        end_s = max(new.dense_end_s(0), old.expert_end_s)
        pass_s = choice.after_s if is_moved else choice.before_s
        used = used_bytes(group, memory, num_stripes, choice.moved_L)
        return ZebraPrice(
            shape=ZebraShape(
                attention_ranks=attention, expert_ranks=expert, num_stripes=num_stripes
            ),
            num_groups=num_groups,
            attention=next(i for i, each in enumerate(clusters) if each is fast),
            moved_L=choice.moved_L,
            step_s=training.micro_batches * pass_s + end_s,
            dist_s=training.micro_batches * dist_s + end_s,
            attention_bytes=RUNTIME + used[0],
            expert_bytes=RUNTIME + used[1],
            once_to=stripes.once_to,
        )

    found, refused = [], []
    for attention, expert, num_groups in _groups(fast, slow, shape.num_experts):
        cuts = _stripes(attention, expert, training.micro_batch, new)
        for num_stripes, once in product(cuts, sends_once):
            try:
                found.append(price(attention, expert, num_groups, num_stripes, once))
            except ValueError as error:
                refused.append(error)
    if not found:
        raise refused[0]
    return min(found, key=lambda each: each.step_s)


def _check_divided(
    training: Training, attention: int, expert: int, num_stripes: int, *, is_megatron: bool
) -> None:
    """Raises ValueError where ranks of a group do not share samples as the host needs."""
    sharers, samples = training.parallel.sharers, training.micro_batch * (attention + expert)
    if attention % sharers:
        raise ValueError(
            f"tensor x context parallelism of {sharers} ranks does not divide {attention} "
            "attention ranks; give other sizes, or other --nodes"
        )
    stripe, rest = divmod(samples, attention * num_stripes)
    if is_megatron and (rest or samples * training.micro_batches % (stripe * expert * sharers)):
        raise ValueError(
            f"Megatron's micro-batches are stripes, and {num_stripes} of them on each of "
            f"{attention} attention ranks, and {expert} expert ranks, do not both divide the "
            f"{samples * training.micro_batches // sharers} samples of a group; give another "
            "--micro-batch"
        )


def _groups(fast: Hardware, slow: Hardware, num_experts: int) -> list[tuple[int, int, int]]:
    """Attention ranks, expert ranks and number of groups that use all ranks, and whose expert ranks
    hold equally many experts; those of whole nodes, if there are any. The largest come first."""
    found = []
    for num_groups in divisors(math.gcd(fast.num_ranks, slow.num_ranks)):
        attention, expert = fast.num_ranks // num_groups, slow.num_ranks // num_groups
        is_even = attention % expert == 0 or expert % attention == 0
        if is_even and num_experts % expert == 0:
            found.append((attention, expert, num_groups))
    if not found:
        raise ValueError(
            f"{fast.num_ranks} attention ranks and {slow.num_ranks} expert ranks make no groups in "
            f"which {num_experts} experts divide; take other numbers of nodes"
        )
    whole = [
        (attention, expert, num_groups)
        for attention, expert, num_groups in found
        if attention % fast.ranks_per_node == 0 and expert % slow.ranks_per_node == 0
    ]
    return whole or found


def _stripes(attention: int, expert: int, micro_batch: int, run: DescribedRun) -> list[int]:
    """What a run takes by itself, and powers of two up to the samples of an attention rank."""
    samples = micro_batch * (attention + expert)
    most = min(samples // attention, MOST_STRIPES // len(run.shape.moe_layers))
    powers = {2**power for power in range(1, max(most, 1).bit_length())}
    return sorted({default_stripes(attention, expert, samples)} | powers)


def _row_s(run: DescribedRun) -> float:
    """Of one row in a whole expert on one rank, forward and backward."""
    rounds = FORWARD + run.backward_rounds
    work_s = run.shape.expert_weights / run.product.multiply_adds_per_s
    return rounds * (work_s + 4 * run.row_bytes / run.memory_rate)


def _memory(
    new: DescribedRun, old: DescribedRun, num_groups: int, rows: float, stripes: Stripes
) -> Memory:
    """Of a rank of each side; ``rows`` of a stripe come to an expert rank."""
    model, training = new.shape, new.training
    num_stripes, of_row = stripes.num_stripes, 2 * model.width
    kept = num_stripes * model.num_layers + KEPT_DENSE  # one layer runs again
    if not training.recomputes:
        of_row += model.products * model.expert_width
        kept = num_stripes * model.num_layers * KEPT_DENSE
    trained = WeightBytes(
        weight=training.element_bytes,
        gradient=training.gradient_bytes,
        optimizer=MASTER_AND_STATES,
        zero_stage=training.zero_stage,
    )
    states = kept * new.row_bytes + num_stripes * model.vocabulary.size * LOGIT_BYTES
    free_bytes = [
        max((run.hardware.device.memory_bytes or 2**62) - RUNTIME, 0) for run in (old, new)
    ]
    return Memory(
        expert_bytes=trained.of(model.expert_weights, 0, num_groups),
        rows_bytes=int(rows * of_row * training.element_bytes),
        dense_bytes=stripes.num_tokens * states
        + trained.of(
            model.held_dense_weights(training.parallel.tensor), 0, training.dense_replicas
        ),
        expert_free_bytes=free_bytes[0],
        attention_free_bytes=free_bytes[1],
    )
