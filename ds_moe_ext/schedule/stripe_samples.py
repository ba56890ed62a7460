# SPDX-License-Identifier: Apache-2.0
"""Which attention rank runs which samples of a ZP group, in which stripe. Pure.

HeterMoE cuts the batch of an attention rank into R micro-batches, here *stripes* (spec 2.1). All
ranks of the group bring batches, of which those of expert ranks are taken on by attention ranks.
Shape letter: C ranks of the group, those with attention first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples ``start`` to ``stop`` of one rank's batch, which run together.

    Attributes:
        sender: place in the ZP group of the rank whose batch it is.
        start: its first sample there.
        stop: the one after its last.
    """

    sender: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        return self.stop - self.start

    def weight(self, num_samples_C: Sequence[int]) -> float:
        """Its share of the batch that it is of."""
        return self.num_samples / num_samples_C[self.sender]


OwnStripes = tuple[tuple[Samples, ...], ...]
"""The pieces of each stripe of an attention rank."""

GroupStripes = tuple[OwnStripes, ...]
"""The stripes of each attention rank: ``[attention rank][stripe]``."""


def stripes_of(num_samples_C: Sequence[int], attention_size: int, num_stripes: int) -> GroupStripes:
    """Cut the batches of a group into stripes as equal as can be.

    All samples lie on one line, which is cut into intervals, ``num_stripes`` for each attention
    rank. On the line, an attention rank's own batch comes before the samples that it takes on, and
    only what it has no room for goes to others: nothing travels that need not. An interval that
    reaches into another batch has a piece of each. Of equal batches none does so if the number of
    intervals is a multiple of theirs, and if it divides theirs no batch is cut.

    Args:
        num_samples_C: samples of each rank, attention ranks first; a piece's ``sender`` is an
            index into it.
        attention_size: attention ranks of the group.
        num_stripes: stripes of each.

    Raises:
        ValueError: a rank has no samples, or there are fewer samples than stripes.
    """
    total, num_intervals = sum(num_samples_C), attention_size * num_stripes
    if min(num_samples_C) < 1:
        raise ValueError(
            f"the batches of a ZP group have {', '.join(map(str, num_samples_C))} samples; every "
            "rank needs one at least, or it has no loss"
        )
    check_stripes(total, attention_size, num_stripes)
    # Where equal batches end, one of these borders lies, whatever is left over.
    borders = [total * interval // num_intervals for interval in range(num_intervals + 1)]
    shares = [
        borders[(m + 1) * num_stripes] - borders[m * num_stripes] for m in range(attention_size)
    ]
    lines = _lines(num_samples_C, shares)
    sizes = [stop - start for start, stop in pairwise(borders)]
    return tuple(
        tuple(_cut(line, sizes[m * num_stripes : (m + 1) * num_stripes]))
        for m, line in enumerate(lines)
    )


def check_stripes(
    num_samples: int, attention_size: int, num_stripes: int, *, key: str = "the number of stripes"
) -> None:
    """Refuse more stripes than a group has samples.

    Args:
        num_samples: of all its ranks.
        attention_size: attention ranks of the group.
        num_stripes: of each.
        key: by which a person chose it.
    """
    if num_samples < attention_size * num_stripes:
        raise ValueError(
            f"{key} is {num_stripes}, so that {attention_size} "
            f"attention rank(s) run {attention_size * num_stripes} stripes, but the ZP group has "
            f"{num_samples} samples; set it to {num_samples // attention_size} or less, or raise "
            "train_micro_batch_size_per_gpu"
        )


def default_stripes(attention_size: int, expert_size: int, num_samples: int | None = None) -> int:
    """The least number of stripes that lets each be of one batch if all batches are equal.

    With an expert rank in the group it is two or more, as overlap needs.

    Args:
        attention_size: attention ranks of the group.
        expert_size: its other ranks.
        num_samples: of all its ranks; fewer stripes if they are too few; None: unknown.
    """
    num_stripes = (attention_size + expert_size) // math.gcd(attention_size, expert_size)
    return num_stripes if num_samples is None else min(num_stripes, num_samples // attention_size)


def _lines(num_samples_C: Sequence[int], shares: Sequence[int]) -> list[list[Samples]]:
    """What each attention rank runs, ``shares`` samples of it: its own first, then others."""
    kept = [min(share, own) for share, own in zip(shares, num_samples_C)]
    kept += [0] * (len(num_samples_C) - len(kept))
    rest = [
        Samples(sender, start, stop)
        for sender, (start, stop) in enumerate(zip(kept, num_samples_C))
        if start < stop
    ]
    taken = _cut(rest, [share - own for share, own in zip(shares, kept)])
    return [[Samples(m, 0, kept[m]), *pieces] for m, pieces in enumerate(taken)]


def _cut(line: Sequence[Samples], sizes: Sequence[int]) -> Iterator[tuple[Samples, ...]]:
    """Cut pieces that lie one behind the other into intervals of these sizes."""
    start = 0
    for size in sizes:
        yield tuple(_within(line, start, start + size))
        start += size


def _within(line: Sequence[Samples], start: int, stop: int) -> Iterator[Samples]:
    """The parts of the pieces that lie in an interval of the line."""
    begin = 0
    for piece in line:
        first, last = max(start, begin), min(stop, begin + piece.num_samples)
        if first < last:
            shift = piece.start - begin
            yield Samples(piece.sender, first + shift, last + shift)
        begin += piece.num_samples
