# SPDX-License-Identifier: Apache-2.0
"""What zebra groups run: experts that move to attention ranks, and ranks of each class. Pure.

``assign_experts`` is HeterMoE's Asym-EA (spec 2.7); ``choose_moved`` takes what it says of a run
that was measured, within memory and if the simulator finds it to pay; ``price_shapes`` and
``best_shape`` find how many ranks of each class make a group, and into how many stripes it cuts.

``M`` attention ranks and ``N`` expert ranks of a zebra group work at once, on different
micro-batches. Where experts take longer than attention, each layer leaves the attention ranks idle
for the difference; it *gathers* a bubble. A *chunk* of experts, as many from each expert rank and
as many to each attention rank, *squeezes* it: one side saves, the other pays. A layer moves as many
chunks as its own bubble and what layers before it left are long. When they compute is a matter of
``schedule.stripes``.

Counts are taken from fractions, so that bounds are met to the chunk and ranks cannot differ. Times
are of forward; backward is taken as proportional (rule 32). Shape letter: L layers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from ds_moe_ext.core.hardware import Link
from ds_moe_ext.planning.zebra_costs import (
    LayerTimes,
    MoeModel,
    RankClass,
    StepPrice,
    TwoClasses,
    ZebraShape,
    price_step,
    stripe_times,
)

TIE = Fraction(1, 10**9)  # of a chunk: what rounding of the measured times may lack of a whole one


@dataclass(frozen=True)
class Chunk:
    """The fewest experts that keep the ranks of each role alike when they move."""

    per_attention_rank: int  # experts that each attention rank gains, the paper's ``n1``
    per_expert_rank: int  # experts that each expert rank loses, its ``n2``


@dataclass(frozen=True, kw_only=True)
class ZebraGroup:
    """Ranks of one group, and the experts that are divided among them."""

    num_experts: int  # of a layer, ``n``; the expert ranks hold equally many
    num_layers: int  # with experts, ``L``
    attention_ranks: int  # their number ``M``; it divides ``N`` or is a multiple (rule 28)
    expert_ranks: int  # their number ``N``

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.num_experts % self.expert_ranks:
            raise ValueError(
                f"num_experts is {self.num_experts}, which expert_ranks, {self.expert_ranks}, does "
                "not divide; all expert ranks must hold equally many"
            )
        if self.attention_ranks % self.expert_ranks and self.expert_ranks % self.attention_ranks:
            raise ValueError(
                f"attention_ranks is {self.attention_ranks} and expert_ranks {self.expert_ranks}, "
                "of which neither divides the other; move no experts, or change one of them"
            )

    @property
    def chunk(self) -> Chunk:
        gained = max(1, self.expert_ranks // self.attention_ranks)
        return Chunk(gained, gained * self.attention_ranks // self.expert_ranks)

    @property
    def chunk_experts(self) -> int:
        """Experts of one chunk, of all ranks together."""
        return self.chunk.per_expert_rank * self.expert_ranks

    @property
    def layer_chunks(self) -> int:
        """Chunks that a layer has to give; 0 if a rank's experts of a layer are fewer than one."""
        return self.num_experts // self.chunk_experts


def squeeze_seconds(group: ZebraGroup, times: LayerTimes) -> Fraction:
    """By how much one chunk shortens a bubble: what an expert rank saves, an attention rank pays.

    The listing of Algorithm 1, corrected (A2).
    """
    chunk = group.chunk
    return _squeezed(group, times, saved=chunk.per_expert_rank, paid=chunk.per_attention_rank)


def squeeze_seconds_as_printed(group: ZebraGroup, times: LayerTimes) -> Fraction:
    """The same with ``n1`` and ``n2`` exchanged, as the paper prints it; equal if M = N."""
    chunk = group.chunk
    return _squeezed(group, times, saved=chunk.per_attention_rank, paid=chunk.per_expert_rank)


def _squeezed(group: ZebraGroup, times: LayerTimes, *, saved: int, paid: int) -> Fraction:
    """Of so many experts; one has ``N/n`` of the rows that an expert rank computes."""
    both_s = saved * Fraction(times.expert_s) + paid * Fraction(times.expert_on_attention_s)
    return both_s * Fraction(group.expert_ranks, group.num_experts)


Squeeze = Callable[[ZebraGroup, LayerTimes], Fraction]
VARIANTS: Mapping[str, Squeeze] = {
    "corrected": squeeze_seconds,
    "printed": squeeze_seconds_as_printed,
}


@dataclass(frozen=True, kw_only=True)
class AsymmetricAssignment:
    """Chunks of experts that live on attention ranks, layer by layer."""

    chunk: Chunk  # how many experts of a rank one chunk is
    # chunks that a layer's bubble pays for, in the mean, within the bounds; times ``T_squeeze`` it
    # is the paper's ``alpha beta T_gather``
    rate: Fraction
    chunks_L: tuple[int, ...]  # chunks that each layer moves

    @property
    def moved_L(self) -> tuple[int, ...]:
        """Experts that each expert rank loses, the paper's ``o_l``."""
        return tuple(self.chunk.per_expert_rank * chunks for chunks in self.chunks_L)


def assign_experts(
    group: ZebraGroup,
    times: LayerTimes,
    *,
    min_moved: int = 0,
    max_moved: int | None = None,
    squeeze: Squeeze = squeeze_seconds,
) -> AsymmetricAssignment:
    """Move experts to attention ranks until both roles take equally long: Algorithm 1, rule 31.

    The first ``l`` layers move ``floor(l rate)`` chunks. The rate is what fills the bubbles, unless
    a bound is above or below: then that is spread over the layers, the paper's alpha or beta. It
    ends where a layer has no chunk left to give (A4), and is 0 where attention is slower (A3).
    Micro-batches are assumed to be many enough to hide what travels. Costs ``O(L)``.

    Args:
        group: ranks and experts.
        times: of a layer.
        min_moved: experts of all layers for which the expert ranks together have no memory.
        max_moved: experts of all layers for which each attention rank has memory; None: any.
        squeeze: one of ``VARIANTS``.
    """
    least, most = _bounds_in_chunks(group, min_moved, max_moved)
    gather_s = times.gather_s
    wanted = gather_s / squeeze(group, times) if gather_s > 0 else Fraction(0)
    rate = max(Fraction(least, group.num_layers), min(wanted, Fraction(most, group.num_layers)))
    moved = [math.floor(layer * rate + TIE) for layer in range(group.num_layers + 1)]
    chunks_L = tuple(after - before for before, after in pairwise(moved))
    return AsymmetricAssignment(chunk=group.chunk, rate=rate, chunks_L=chunks_L)


def _bounds_in_chunks(group: ZebraGroup, min_moved: int, max_moved: int | None) -> tuple[int, int]:
    """The fewest and the most chunks of all layers (A5)."""
    for name, value in (("min_moved", min_moved), ("max_moved", max_moved or 0)):
        if value < 0:
            raise ValueError(f"{name} is {value}; it must be at least 0")
    least = -(-min_moved // group.chunk_experts)
    most = group.num_layers * group.layer_chunks
    if least > most:
        raise ValueError(
            f"min_moved is {min_moved}, but {group.num_layers} layers can give "
            f"{most * group.chunk_experts} experts, {group.chunk_experts} at a time; the model "
            "does not fit: lower min_moved, or add expert ranks, which hold more"
        )
    if max_moved is None:
        return least, most
    room = max_moved // group.chunk.per_attention_rank
    if least > room:
        raise ValueError(
            f"min_moved is {min_moved}, for which {least * group.chunk_experts} experts must move, "
            f"{group.chunk_experts} at a time, but max_moved, {max_moved} on each of "
            f"{group.attention_ranks} attention ranks, has room for {room * group.chunk_experts}; "
            "the model does not fit: lower min_moved or raise max_moved, with ranks or memory"
        )
    return least, min(most, room)


USABLE = 0.9  # share of free memory; the rest is for buffers of links, and lost in fragments
BACKWARD = 2.0  # how the simulator divides what was measured together
NO_TRAVEL = Link(bytes_per_s=1e30)


@dataclass(frozen=True)
class Timed:
    """Median and standard deviation of repetitions, in seconds."""

    median_s: float
    std_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timed:
        return cls(statistics.median(seconds), statistics.pstdev(seconds))


@dataclass(frozen=True, kw_only=True)
class WeightBytes:
    """Bytes of a trained weight, as the host optimizes it."""

    weight: int  # itself, and so every rank has it
    gradient: int  # of its gradient
    optimizer: int  # of the optimizer's state, with weights in float32 beside those of 16 bits
    zero_stage: int  # DeepSpeed's: from 1 replicas divide the state, at 2 gradients too

    def of(self, num_trained: int, num_frozen: int, num_replicas: int) -> float:
        """Bytes of a rank's weights, of which other ranks have replicas."""
        gradient = self.gradient / (num_replicas if self.zero_stage > 1 else 1)
        optimizer = self.optimizer / (num_replicas if self.zero_stage > 0 else 1)
        return num_trained * (self.weight + gradient + optimizer) + num_frozen * self.weight


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank."""

    expert_bytes: float  # weights, gradients and optimizer state of one expert
    # kept for backward of the rows that one expert rank computes in one layer of one stripe,
    # however many experts they are of (rule 38)
    rows_bytes: int
    dense_bytes: float  # all that an attention rank needs in a step but for experts
    expert_free_bytes: int  # of the expert rank that has least
    attention_free_bytes: int  # of the attention rank that has least


@dataclass(frozen=True)
class MovedBounds:
    """How many experts, of all layers, may move."""

    least: int  # for which the expert ranks together have no memory, the paper's ``n_min``
    most: int  # for which each attention rank has, its ``n_max``


def moved_bounds(group: ZebraGroup, memory: Memory, num_stripes: int) -> MovedBounds:
    """What memory allows (rule 37).

    An expert rank keeps the rows of all layers and stripes until backward. An expert that an
    attention rank gains brings its rows with it, ``N/n`` of an expert rank's.
    """
    rows_bytes = group.num_layers * num_stripes * memory.rows_bytes
    held = _that_fit(memory.expert_free_bytes, rows_bytes, memory.expert_bytes)
    gained_rows_bytes = num_stripes * memory.rows_bytes * group.expert_ranks / group.num_experts
    return MovedBounds(
        least=max(0, group.num_layers * group.num_experts - group.expert_ranks * held),
        most=_that_fit(
            memory.attention_free_bytes,
            memory.dense_bytes,
            memory.expert_bytes + gained_rows_bytes,
        ),
    )


def used_bytes(
    group: ZebraGroup, memory: Memory, num_stripes: int, moved_L: Sequence[int]
) -> tuple[float, float]:
    """Bytes of an attention rank and of an expert rank, each expert with its share of the rows."""
    moved, rows_bytes = sum(moved_L), num_stripes * memory.rows_bytes
    held = group.num_layers * group.num_experts / group.expert_ranks - moved
    gained = moved * group.expert_ranks / group.attention_ranks
    each = memory.expert_bytes + rows_bytes * group.expert_ranks / group.num_experts
    return memory.dense_bytes + gained * each, held * each


def _that_fit(free_bytes: int, taken_bytes: float, one_bytes: float) -> int:
    """Experts that fit beside what is taken."""
    return max(0, int((USABLE * free_bytes - taken_bytes) // one_bytes))


@dataclass(frozen=True, kw_only=True)
class Stripes:
    """What a step is cut into."""

    num_stripes: int  # of an attention rank, ``R``
    num_tokens: int  # of a stripe, on one attention rank
    head_s: float  # of what is not in layers: embeddings, head and loss, of one stripe
    top_k: int  # rows of a token
    row_bytes: float  # of each on its way
    link: Link | None = None  # of a rank's network card; None: rows take no time
    once_to: int = 0  # as of ``TwoClasses``


@dataclass(frozen=True)
class Choice:
    """Experts that move, and what that is good for by the simulator."""

    moved_L: tuple[int, ...]  # experts that each expert rank leaves, layer by layer
    # by Algorithm 1; others than those that move where these make no step faster
    proposed_L: tuple[int, ...]
    bounds: MovedBounds  # of memory
    before_s: float  # seconds of a step if no expert moved
    after_s: float  # seconds by the proposal


def choose_moved(
    group: ZebraGroup,
    times: LayerTimes,
    stripes: Stripes,
    memory: Memory,
    squeeze: Squeeze = squeeze_seconds,
    *,
    is_megatron: bool = False,
) -> Choice:
    """Algorithm 1 within the bounds of memory and of what a host runs, if it pays.

    It takes micro-batches to be many enough to hide what travels. Where they are few, experts on
    attention ranks can make a step longer (spec G8): then none move, unless memory wants it. Of all
    experts one chunk stays, since expert ranks without experts are refused; and under Megatron none
    move where attention ranks do not divide those of a layer.

    All layers are alike; ``times`` are of one layer and stripe, forward and backward together. A
    model that does not fit is a ``ValueError``.
    """
    bounds = moved_bounds(group, memory, stripes.num_stripes)
    num_experts = group.num_layers * group.num_experts
    chunks = min(group.num_layers * group.layer_chunks, (num_experts - 1) // group.chunk_experts)
    why = f"expert ranks must keep some, and give {group.chunk_experts} at a time"
    room = bounds.most // group.chunk.per_attention_rank
    if room < chunks:
        chunks, why = room, f"{group.attention_ranks} attention ranks have memory for no more"
    if is_megatron and group.num_experts % group.attention_ranks:
        chunks = 0
        why = f"Megatron needs a layer's to divide by {group.attention_ranks} attention ranks"
    if bounds.least > chunks * group.chunk_experts:
        raise ValueError(
            f"the model does not fit: {group.expert_ranks} expert ranks lack memory for "
            f"{bounds.least} of {num_experts} experts beside the rows of a step, and at most "
            f"{chunks * group.chunk_experts} may move, since {why}; take more ranks, fewer "
            "samples, or recompute activations"
        )
    most = chunks * group.chunk.per_attention_rank
    plan = assign_experts(group, times, min_moved=bounds.least, max_moved=most, squeeze=squeeze)
    none_L = (0,) * group.num_layers
    before_s, after_s = (step_seconds(group, times, stripes, o_L) for o_L in (none_L, plan.moved_L))
    pays = bounds.least > 0 or after_s < before_s
    return Choice(plan.moved_L if pays else none_L, plan.moved_L, bounds, before_s, after_s)


def step_seconds(
    group: ZebraGroup,
    times: LayerTimes,
    stripes: Stripes,
    moved_L: Sequence[int],
    *,
    overlaps: bool = True,
) -> float:
    """A step by the simulator, which takes embeddings for a part of the head. ``overlaps`` as of
    ``price_step``."""
    attention, expert = group.attention_ranks, group.expert_ranks
    share = 1 / (1 + BACKWARD) / stripes.num_tokens  # of forward, and of one token
    arriving = attention / expert
    ranks = TwoClasses(
        model=MoeModel(
            num_layers=group.num_layers,
            num_experts=group.num_experts,
            top_k=stripes.top_k,
            width=1,  # what is computed is given in seconds, and rows in bytes
            expert_width=1,
            length=stripes.num_tokens,
            element_bytes=stripes.row_bytes,
        ),
        new=RankClass(
            attention_s=times.attention_s * share,
            expert_s=times.expert_on_attention_s * share / arriving,
            head_s=stripes.head_s * share,
        ),
        old=RankClass(attention_s=0.0, expert_s=times.expert_s * share / arriving),
        link=stripes.link or NO_TRAVEL,
        backward=BACKWARD,
        once_to=stripes.once_to,
    )
    shape = ZebraShape(
        attention_ranks=attention, expert_ranks=expert, num_stripes=stripes.num_stripes
    )
    num_stripes = attention * stripes.num_stripes
    return price_step(
        ranks, shape, num_samples=num_stripes, moved_L=moved_L, overlaps=overlaps
    ).step_s


@dataclass(frozen=True, kw_only=True)
class PricedShape:
    """A shape that fits, with the experts that serve it best."""

    shape: ZebraShape  # of the group
    moved_L: tuple[int, ...]  # experts that each expert rank loses to attention ranks, by layer
    price: StepPrice  # of its step


@dataclass(frozen=True)
class RefusedShape:
    """A shape that cannot be."""

    shape: ZebraShape  # of the group
    why: str  # the rule and the remedy


@dataclass(frozen=True, kw_only=True)
class Stock:
    """Ranks that a cluster has."""

    new_ranks: int  # of the class that attention is fast on
    old_ranks: int  # of the other

    def num_groups(self, shape: ZebraShape) -> int:
        """Groups of a shape that there are ranks for."""
        return min(self.new_ranks // shape.attention_ranks, self.old_ranks // shape.expert_ranks)


def price_shape(
    ranks: TwoClasses, shape: ZebraShape, samples_per_rank: int, *, moves: bool = True
) -> PricedShape:
    """A shape with its experts as Algorithm 1 moves them, or all at their owners if that is faster:
    with few stripes what it moves may not pay (spec G8)."""
    num_samples = samples_per_rank * shape.attention_ranks
    times = stripe_times(ranks, shape, num_samples)
    assignments = sorted(_assignments(ranks, shape, times, moves=moves))
    priced = [
        PricedShape(
            shape=shape, moved_L=moved_L, price=price_step(ranks, shape, num_samples, moved_L)
        )
        for moved_L in assignments
    ]
    return min(priced, key=lambda each: each.price.step_s)


def price_shapes(
    ranks: TwoClasses, shapes: Iterable[ZebraShape], samples_per_rank: int, *, moves: bool = True
) -> list[PricedShape | RefusedShape]:
    """Each shape priced, or why it cannot be."""
    found: list[PricedShape | RefusedShape] = []
    for shape in shapes:
        try:
            found.append(price_shape(ranks, shape, samples_per_rank, moves=moves))
        except ValueError as error:
            found.append(RefusedShape(shape, str(error)))
    return found


def best_shape(
    priced: Sequence[PricedShape | RefusedShape], stock: Stock | None = None
) -> PricedShape | None:
    """The best throughput of as many groups as there are ranks for, or of one where there is no
    ``stock``; None if no shape fits."""
    fitting = [each for each in priced if isinstance(each, PricedShape)]
    groups = [1 if stock is None else stock.num_groups(each.shape) for each in fitting]
    rates = [each.price.tokens_per_s * count for each, count in zip(fitting, groups)]
    best = max(rates, default=0.0)
    return fitting[rates.index(best)] if best else None


def _assignments(
    ranks: TwoClasses, shape: ZebraShape, times: LayerTimes, *, moves: bool
) -> set[tuple[int, ...]]:
    """Algorithm 1's, and all experts at their owners, of those that fit."""
    num_layers, num_experts = ranks.model.num_layers, ranks.model.num_experts
    if num_experts % shape.expert_ranks:
        raise ValueError(
            f"num_experts is {num_experts}, which {shape.expert_ranks} expert ranks do not divide; "
            "all must hold equally many: change one of them"
        )
    homeless = 0  # experts, of all layers, that expert ranks have no memory for
    if ranks.old.room is not None:
        homeless = max(0, num_layers * num_experts - shape.expert_ranks * ranks.old.room)
    at_owner = set() if homeless else {(0,) * num_layers}
    sizes = shape.attention_ranks, shape.expert_ranks
    # A chunk of experts can leave and reach all ranks alike (spec rule 28).
    if moves and max(sizes) % min(sizes) == 0:
        group = ZebraGroup(
            num_experts=num_experts,
            num_layers=num_layers,
            attention_ranks=shape.attention_ranks,
            expert_ranks=shape.expert_ranks,
        )
        plan = assign_experts(group, times, min_moved=homeless, max_moved=ranks.new.room)
        return at_owner | {plan.moved_L}
    if homeless:
        raise ValueError(
            f"{shape.expert_ranks} expert ranks with room for {ranks.old.room} experts each lack "
            f"room for {homeless} of {num_layers * num_experts}, and none may move to "
            f"{shape.attention_ranks} attention ranks; give more expert ranks or memory, or "
            "numbers of ranks of which one divides the other"
        )
    return at_owner
