# SPDX-License-Identifier: Apache-2.0
"""How many experts of each layer move back to attention ranks: HeterMoE's Asym-EA (spec 2.7). Pure.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from ds_moe_ext.cost.zebra_step import LayerTimes

TIE = Fraction(1, 10**9)  # of a chunk: what rounding of the measured times may lack of a whole one


@dataclass(frozen=True)
class Chunk:
    """The fewest experts that keep the ranks of each role alike when they move.

    Attributes:
        per_attention_rank: experts that each attention rank gains, the paper's ``n1``.
        per_expert_rank: experts that each expert rank loses, its ``n2``.
    """

    per_attention_rank: int
    per_expert_rank: int


@dataclass(frozen=True, kw_only=True)
class ZebraGroup:
    """Ranks of one group, and the experts that are divided among them.

    Attributes:
        num_experts: of a layer, ``n``; the expert ranks hold equally many.
        num_layers: with experts, ``L``.
        attention_ranks: their number ``M``; it divides ``N`` or is a multiple (rule 28).
        expert_ranks: their number ``N``.
    """

    num_experts: int
    num_layers: int
    attention_ranks: int
    expert_ranks: int

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
    """Chunks of experts that live on attention ranks, layer by layer.

    Attributes:
        chunk: how many experts of a rank one chunk is.
        rate: chunks that a layer's bubble pays for, in the mean, within the bounds; times
            ``T_squeeze`` it is the paper's ``alpha beta T_gather``.
        chunks_L: chunks that each layer moves.
    """

    chunk: Chunk
    rate: Fraction
    chunks_L: tuple[int, ...]

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

    Raises:
        ValueError: a bound below 0, or one that cannot be kept: the model does not fit.
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
