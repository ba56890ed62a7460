# SPDX-License-Identifier: Apache-2.0
"""Route: how a layer's rows travel. Order makes it, other stages read it, it dies with the pass.

``LayerRoute`` is of all tokens of a layer. It gives the ``Route`` of a chunk range of them, made
when it is first asked for, and how its rows meet in an ETP group. Restore adds the rows that came
back to their tokens. Shape letters: T tokens, K choices a token, N rows sent, R rows received, G
rows of an ETP group, F finest chunks, C EP ranks, P places of an ETP group, S expert slots, X
blocks, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext.core import kernels
from ds_moe_ext.core.all_to_all import Carrier, Channel, RowTransfer
from ds_moe_ext.core.layout import Reach
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.rows import (
    RowSplits,
    block_index,
    numbers,
    on_device,
    ranges,
    starts_of,
    sums_of_groups,
)
from ds_moe_ext.moe.deduplicated import ChunkPairs, Deduplicated, NodeTransfer
from ds_moe_ext.moe.slot_rows import SlotRows, SlotSorting, SlotSortings
from ds_moe_ext.schedule.executor import OnDevice
from ds_moe_ext.schedule.stages import Done, Saved
from ds_moe_ext.schedule.task import ChunkRange, Cut
from ds_moe_ext.schedule.task import chunk_ranges as equal_ranges


@dataclass(frozen=True, eq=False)
class ChunkChoices:
    """Where the choices of several chunk ranges lie in send order; found for all of them at
    once."""

    choice_N: Tensor  # all choices, of one chunk range after the other, in send order, int64
    place_N: Tensor  # of each choice, in order, its place among those of its chunk range
    sizes: Sequence[int]  # choices of each chunk range

    @cached_property
    def row_GN(self) -> Sequence[Tensor]:
        row_N = torch.empty_like(self.choice_N).scatter_(0, self.choice_N, self.place_N)
        return row_N.split_with_sizes(self.sizes)


class Splits(NamedTuple):
    sent_C: tuple[int, ...]  # to each EP rank; to this one alone where no row leaves its EP rank
    received_C: tuple[int, ...]  # from each EP rank; likewise

    @classmethod
    def of(cls, sent_C: Iterable[int], received_C: Iterable[int]) -> Splits:
        return cls(tuple(sent_C), tuple(received_C))

    @property
    def stays(self) -> bool:
        """Whether no row of any EP rank leaves it: there is nothing to exchange."""
        return len(self.sent_C) == 1


@dataclass(frozen=True, eq=False)
class Route(OnDevice):
    """How the rows of one chunk range travel. Integers only: nothing here carries a gradient."""

    # position of each sent row in the chunk range's flattened ``[T, K]`` choices, int64, in send
    # order: by EP rank, then chunk, slot and token; ``T * K`` of what is only padding
    choice_N: Tensor
    token_N: Tensor  # its token in the chunk range; ``T`` of padding
    splits: Splits  # how many rows go to each EP rank and come from each
    # takes rows from arrival order (sender, chunk, slot) to slot order; None where all are this
    # rank's, in that order
    sorting: SlotSorting | None
    slots: SlotRows  # rows of each of this EP rank's slots
    num_tokens: int  # tokens ``T`` of the chunk range
    top_k: int  # choices ``K``
    # where each choice lies in send order, ``N`` of those that do not travel, int64 ``[T * K]``;
    # None where nothing is padded
    padded_row_N: Tensor | None = None
    # what travels in place of rows, where each token's goes once to an EP rank; ``splits`` and what
    # is in send or arrival order are theirs then
    deduplicated: ChunkPairs | None = None
    # with other chunk ranges, and the number of this one; None where it is alone, or some choice
    # does not travel
    together: tuple[ChunkChoices, int] | None = None

    @property
    def is_indexed(self) -> bool:
        """Whether ``row_of_choices`` brings rows back."""
        return self.padded_row_N is not None or self.is_full

    @property
    def row_of_choices(self) -> Tensor:
        """Where each choice lies in send order, int64 ``[T * K]``; ``N`` of those that do not
        travel. Only if the route is full or padded."""
        return self.row_N if self.padded_row_N is None else self.padded_row_N

    @property
    def is_full(self) -> bool:
        """Whether every choice travels, and nothing else."""
        return self.padded_row_N is None and self.choice_N.numel() == self.num_tokens * self.top_k

    def of_tokens(self, x_TD: Tensor) -> Tensor:
        """What tokens have, for each sent row, ``[N, D]``; zeros for padding."""
        if self.deduplicated is not None:
            return x_TD.index_select(0, self.deduplicated.leaving.token_U)
        return self._with_padding(x_TD).index_select(0, self.token_N)

    def of_choices(self, value_TK: Tensor) -> Tensor:
        """What choices have, for each sent row, ``[N]``; zeros for padding."""
        return self._with_padding(value_TK.flatten()).index_select(0, self.choice_N)

    def _with_padding(self, values: Tensor) -> Tensor:
        """One more, of zeros, where sent rows are padded."""
        if self.padded_row_N is None:
            return values
        return torch.cat([values, values.new_zeros(1, *values.shape[1:])])

    def to_slots(self, rows_RD: Tensor) -> Tensor:
        if self.deduplicated is not None:
            return rows_RD.index_select(0, self.deduplicated.pair_R)
        return rows_RD if self.sorting is None else self.sorting.to_slots(rows_RD)

    def to_arrival(self, rows_RD: Tensor, weight_R: Tensor | None = None) -> Tensor:
        """Slot order to arrival order; rows of one pair, times their weights, are added up."""
        if self.deduplicated is not None:
            return self.deduplicated.by_pair.sums(rows_RD, weight_R)
        return rows_RD if self.sorting is None else self.sorting.back(rows_RD)

    @cached_property
    def row_N(self) -> Tensor:
        """Where each choice lies in send order, int64 ``[T * K]``; only if the route is full."""
        if self.together is not None:
            chunk_ranges, number = self.together
            return chunk_ranges.row_GN[number]
        numbers_N = numbers(self.choice_N.numel(), self.choice_N.device)
        return torch.empty_like(self.choice_N).scatter_(0, self.choice_N, numbers_N)

    def spread(self, rows_N: Tensor) -> Tensor:
        """Rows in send order to ``[T, K, ...]``; zeros where a choice was dropped."""
        num_tokens, top_k, shape = self.num_tokens, self.top_k, rows_N.shape[1:]
        if self.padded_row_N is not None:
            out = self._with_padding(rows_N).index_select(0, self.padded_row_N)
        elif self.is_full:
            out = rows_N.index_select(0, self.row_N)
        else:
            nothing = rows_N.new_zeros(num_tokens * top_k, *shape)
            out = nothing.index_copy_(0, self.choice_N, rows_N)
        return out.view(num_tokens, top_k, *shape)

    def sum_by_token(self, rows_ND: Tensor, weight_TK: Tensor | None = None) -> Tensor:
        """Add the rows of each token, times their weights, to ``[T, D]``.

        Sums in the weights' precision, over choices in order, so that the result is deterministic.
        Pairs come weighed.
        """
        if self.deduplicated is not None:
            return self.deduplicated.leaving.by_token.sums(rows_ND)
        weighed = (rows_ND,) if weight_TK is None else (rows_ND, weight_TK)
        if self.is_indexed and kernels.has_kernels(*weighed):
            return kernels.sums_by_token(rows_ND, self.row_of_choices, weight_TK, self.top_k)
        has_kernel = weight_TK is None or weight_TK.dtype == rows_ND.dtype
        if rows_ND.is_cpu and rows_ND.numel() and self.is_full and has_kernel:
            first_T = _first_choices(self.num_tokens, self.top_k)
            weight_N = None if weight_TK is None else weight_TK.flatten()
            return sums_of_groups(rows_ND, self.row_N, first_T, weight_N)
        y_TKD = self.spread(rows_ND)
        if weight_TK is None:
            return y_TKD[:, 0] if self.top_k == 1 else y_TKD.sum(dim=1)
        by_choice = zip(y_TKD.unbind(1), weight_TK.split_with_sizes([1] * self.top_k, 1))
        total_TD = torch.mul(*next(by_choice))
        for y_TD, weight_T1 in by_choice:
            total_TD.addcmul_(y_TD, weight_T1)
        return total_TD if total_TD.dtype == rows_ND.dtype else total_TD.to(rows_ND.dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        """All index tensors that were made so far, but for what sorts."""
        made = [x for x in vars(self).values() if isinstance(x, Tensor)]
        return (*made, *(() if self.deduplicated is None else self.deduplicated.tensors()))


@lru_cache(maxsize=16)  # batches are often alike
def _first_choices(num_tokens: int, top_k: int) -> Tensor:
    """The first choice of each token, int64 ``[T]``, on a CPU."""
    return torch.arange(0, num_tokens * top_k, top_k, device="cpu")


@dataclass(frozen=True, eq=False)
class EtpRoute:
    """How the rows of one chunk range meet on the ranks of an ETP group, which split every
    expert."""

    rows_P: tuple[int, ...]  # rows that arrived at each place
    # takes gathered rows, place by place and there slot by slot, to slot order
    sorting: SlotSorting


class Ahead(NamedTuple):
    """What of a pass is worked out while its counts are on their way to the host."""

    token_N: Tensor  # tokens in the order of all rows that are sent, int64 ``[N]``
    # of chunk ranges their rows ``[N, D]`` in send order, until they are sent
    rows: dict[ChunkRange, Tensor]


@dataclass
class _Tables:
    """What of chunk ranges has been asked for so far."""

    # choices in send order; one, once they are
    choice_N: list[Tensor] = field(default_factory=list)
    splits: dict[ChunkRange, Splits] = field(default_factory=dict)  # of rows
    # of chunk ranges that are alike, by the first of them
    sortings: dict[ChunkRange, SlotSortings] = field(default_factory=dict)
    # how rows meet in the ETP group
    ep_ranks: dict[ChunkRange, EtpRoute] = field(default_factory=dict)
    # how they travel otherwise than straight from EP rank to EP rank
    transfers: dict[ChunkRange, RowTransfer] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LayerRoute(OnDevice):
    """The routes of all chunk ranges of one layer's pass; each is made when first asked for."""

    cut: Cut  # where the finest chunks begin
    target: Placement  # where experts compute
    top_k: int  # choices ``K`` a token
    # sent choices by chunk, EP rank, slot and token, int64 ``[N]``; or as ``rows.moved`` says
    by_key_N: Tensor
    rows: RowSplits  # how many travel, on the host
    etp_rank: int = 0  # this rank's place in its ETP group
    # gives the rows of each chunk from each EP rank to each, of this rank's place, int64 ``[F, C,
    # C]``; asked once, and only where a carrier needs them
    count_between: Callable[[], np.ndarray] | None = None
    # rows as they travel, none of them, ``[0, D]``; where the order gives it
    none_0D: Tensor | None = None
    deduplicated: Deduplicated | None = None  # where each token's row goes once to an EP rank
    # what was worked out of it before the host knew how many rows go where
    ahead: Ahead | None = None
    # slots of this EP rank that may be computed apart from those behind them, or 0
    num_firsts: int = 0
    _routes: dict[ChunkRange, Route] = field(default_factory=dict)
    _tables: _Tables = field(default_factory=_Tables)

    @property
    def whole(self) -> ChunkRange:
        return ChunkRange(0, self.cut.num_chunks)

    def on(self, chunk_range: ChunkRange) -> Route:
        # Two streams that ask at once may both make it: they make the same, so no lock is needed.
        route = self._routes.get(chunk_range)
        if route is None:
            routes = self._routes_like(chunk_range)
            if self.deduplicated is not None:
                routes = {own: self._visiting(own, each) for own, each in routes.items()}
            self._routes.update(routes)
            route = self._routes[chunk_range]
        return route

    def splits(self, chunk_range: ChunkRange) -> Splits:
        """What a chunk range sends and receives: all that its exchange has to know, so that other
        tables are made while rows are on their way."""
        route = self._routes.get(chunk_range)
        if route is None and self.deduplicated is None:
            return self._row_splits(chunk_range)
        return (route or self.on(chunk_range)).splits  # pairs travel in place of rows

    def sent_rows(self, chunk_range: ChunkRange, x_TD: Tensor) -> Tensor:
        """Rows ``[N, D]`` in send order, of the chunk range's tokens ``[T, D]``. Call it once a
        chunk range: rows that are ready are given away."""
        if self.ahead is None or not self.ahead.rows:
            is_made = chunk_range in self._routes or self.deduplicated is not None
            if is_made or self.cut.num_chunks > 1:
                return self.on(chunk_range).of_tokens(x_TD)
            return x_TD.index_select(0, self._token_N)
        rows_of = self.ahead.rows
        if chunk_range not in rows_of:
            sizes = self.rows.sent_FC.sum(axis=1).tolist()
            parts = rows_of.pop(self.whole).split_with_sizes(sizes)
            rows_of.update((ChunkRange(f, f + 1), part) for f, part in enumerate(parts))
        return rows_of.pop(chunk_range)

    def reported(self, pair_R: Tensor) -> LayerRoute:
        """The same route, by which pairs travel.

        Args:
            pair_R: of the rows at this EP rank's experts, as in ``Deduplicated``.
        """
        assert self.deduplicated is not None
        deduplicated = replace(self.deduplicated, pair_R=pair_R)
        reported = replace(
            self, deduplicated=deduplicated, count_between=deduplicated.between, _routes={}
        )
        reported._routes[self.whole] = reported._visiting(self.whole, self.on(self.whole))
        return reported

    def _visiting(self, chunk_range: ChunkRange, route: Route) -> Route:
        """The route of a chunk range, by which pairs travel once the EP ranks know them."""
        assert self.deduplicated is not None
        if self.deduplicated.pair_R is None:
            return route
        deduplicated = self.deduplicated.on(
            chunk_range, self.of_chunk_range(chunk_range, self.deduplicated.pair_R)
        )
        splits = Splits(deduplicated.sent_C, deduplicated.received_C)
        return replace(route, splits=splits, deduplicated=deduplicated)

    def in_etp_group(self, chunk_range: ChunkRange) -> EtpRoute:
        """How the rows of a chunk range meet in the ETP group."""
        if chunk_range not in self._tables.ep_ranks:
            rows_PS = self.rows.received_PCFS[:, :, chunk_range.start : chunk_range.stop].sum(
                axis=(1, 2)
            )
            sorting = SlotSorting.of(rows_PS, self.by_key_N.device, self.num_firsts)
            self._tables.ep_ranks[chunk_range] = EtpRoute(
                tuple(rows_PS.sum(axis=1).tolist()), sorting
            )
        return self._tables.ep_ranks[chunk_range]

    @cached_property
    def _between_FCC(self) -> np.ndarray:
        assert self.count_between is not None, "with one EP rank nothing is sent"
        return self.count_between()

    def transfer(self, chunk_range: ChunkRange, carrier: Carrier) -> RowTransfer:
        """How the rows of a chunk range travel by a carrier; the same one every time."""
        if chunk_range not in self._tables.transfers:
            counts_CC = self._between_FCC[chunk_range.start : chunk_range.stop].sum(axis=0)
            self._tables.transfers[chunk_range] = carrier.transfer(counts_CC, self.by_key_N.device)
        return self._tables.transfers[chunk_range]

    def node_transfer(
        self, chunk_range: ChunkRange, channels: Mapping[Reach, Channel]
    ) -> RowTransfer:
        """How the pairs of a chunk range travel once to a node; the same one every time."""
        if chunk_range not in self._tables.transfers:
            deduplicated = self.on(chunk_range).deduplicated
            assert self.deduplicated is not None and deduplicated is not None
            self._tables.transfers[chunk_range] = self.deduplicated.transfer(
                chunk_range, deduplicated.leaving, channels
            )
        made = self._tables.transfers[chunk_range]
        assert isinstance(made, NodeTransfer)
        return replace(made, channels=channels)  # back in a stream of its own, between roles

    def computed(self, chunk_range: ChunkRange) -> SlotRows:
        """Rows of each slot that this rank computes with its part of the experts."""
        is_alone = self.rows.received_PCFS.shape[0] == 1
        return (
            self.on(chunk_range).slots if is_alone else self.in_etp_group(chunk_range).sorting.slots
        )

    def _row_splits(self, chunk_range: ChunkRange) -> Splits:
        """Made with those of the chunk ranges that are like it."""
        found = self._tables.splits.get(chunk_range)
        if found is None:
            chunk_ranges = _alike(chunk_range, self.cut.num_chunks)
            chunks = slice(chunk_ranges[0].start, chunk_ranges[-1].stop)
            sent_FC, received_FC = self.rows.sent_FC[chunks], self.rows.received_FC[chunks]
            if chunk_range.stop - chunk_range.start > 1:
                sent_FC, received_FC = (
                    each.reshape(len(chunk_ranges), -1, each.shape[1]).sum(axis=1)
                    for each in (sent_FC, received_FC)
                )
            of_chunk_ranges = map(Splits.of, sent_FC.tolist(), received_FC.tolist())
            self._tables.splits.update(zip(chunk_ranges, of_chunk_ranges))
            found = self._tables.splits[chunk_range]
        return found

    def _sortings_of(self, chunk_ranges: Sequence[ChunkRange]) -> SlotSortings:
        """Of chunk ranges that are alike. With what the first of these have on the device comes
        what brings all choices into send order."""
        found = self._tables.sortings.get(chunk_ranges[0])
        if found is None:
            chunks, num_ranges = (
                slice(chunk_ranges[0].start, chunk_ranges[-1].stop),
                len(chunk_ranges),
            )
            received_CFS = self.rows.received_PCFS[self.etp_rank][:, chunks]
            num_ep_ranks, num_chunks, num_slots = received_CFS.shape
            width = num_chunks // num_ranges
            rows_CGFS = received_CFS.reshape(num_ep_ranks, num_ranges, width, num_slots)
            rows_GXS = rows_CGFS.swapaxes(0, 1).reshape(num_ranges, num_ep_ranks * width, num_slots)
            moved = None if self._tables.choice_N else self.rows.moved
            found = SlotSortings(rows_GXS, self.by_key_N.device, moved, self.num_firsts)
            self._tables.sortings[chunk_ranges[0]] = found
            if not self._tables.choice_N:
                choice_N = self.by_key_N
                if moved is not None:
                    choice_N = choice_N.index_select(0, found.index_beside)
                self._tables.choice_N.append(choice_N)
        return found

    @cached_property
    def _token_N(self) -> Tensor:
        """Tokens of all rows in send order, where there is one chunk."""
        if self.ahead is not None:
            return self.ahead.token_N
        self._sortings_of((self.whole,))
        return tokens_of(self._tables.choice_N[0], self.top_k)

    def _routes_like(self, chunk_range: ChunkRange) -> dict[ChunkRange, Route]:
        """The routes of a chunk range and of its like, where all tokens are cut into such: all that
        is worked out for one is for all at once."""
        chunk_ranges = _alike(chunk_range, self.cut.num_chunks)
        sortings = self._sortings_of(chunk_ranges)
        by_chunk_range = (
            len(chunk_ranges),
            chunk_range.stop - chunk_range.start,
            self.rows.sent_FC.shape[1],
        )
        sent_GFC = self.rows.sent_FC[chunk_ranges[0].start : chunk_ranges[-1].stop].reshape(
            by_chunk_range
        )
        splits = map(self._row_splits, chunk_ranges)
        tables = zip(chunk_ranges, *self._choices(chunk_ranges, sent_GFC), splits, sortings.each())
        return {
            own: Route(
                choice_N=choice_N,
                token_N=token_N,
                splits=own_splits,
                sorting=sorting,
                slots=sorting.slots,
                num_tokens=self.cut.length(own),
                top_k=self.top_k,
                together=together,
            )
            for own, choice_N, token_N, together, own_splits, sorting in tables
        }

    def _choices(
        self, chunk_ranges: Sequence[ChunkRange], sent_GFC: np.ndarray
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[tuple[ChunkChoices, int] | None]]:
        """Of each chunk range: the places of its sent rows among its choices, in send order; and
        among its tokens; and what it has with other chunk ranges. ``sent_GFC`` are the rows of each
        for each EP rank, chunk by chunk."""
        (choice_N,) = self._tables.choice_N
        if len(chunk_ranges) == 1 and len(sent_GFC[0]) < len(self.rows.sent_FC):
            before = int(self.rows.sent_FC[: chunk_ranges[0].start].sum())
            choice_N = choice_N[before : before + int(sent_GFC.sum())]
        if sent_GFC.shape[1] > 1:  # by chunk and EP rank, to by EP rank and chunk
            choice_N = choice_N[transposed_blocks(sent_GFC, (0, 2, 1), choice_N.device)]
        if len(chunk_ranges) > 1:
            choice_T, token_T = _places(self.cut, tuple(chunk_ranges), self.top_k, choice_N.device)
            sizes = sent_GFC.sum(axis=(1, 2)).tolist()
            choice, token = (place_T.index_select(0, choice_N) for place_T in (choice_T, token_T))
            together: list[tuple[ChunkChoices, int] | None] = [None] * len(chunk_ranges)
            if choice_N.numel() == choice_T.numel():
                all_ = ChunkChoices(choice_N, choice_T, sizes)
                together = [(all_, number) for number in range(len(chunk_ranges))]
            return choice.split_with_sizes(sizes), token.split_with_sizes(sizes), together
        first = self.cut.first(chunk_ranges[0]) * self.top_k
        choice_N = choice_N - first if first else choice_N
        if self.cut.num_chunks == 1:
            return (choice_N,), (self._token_N,), (None,)
        return (choice_N,), (tokens_of(choice_N, self.top_k),), (None,)

    def tensors(self) -> tuple[Tensor, ...]:
        routes = (route.tensors() for route in self._routes.values())
        of_routes = [route.sorting for route in self._routes.values()]
        of_ep_ranks = [route.sorting for route in self._tables.ep_ranks.values()]
        together = {s.together for s in (*of_routes, *of_ep_ranks) if s is not None}
        sorted_by = (sortings.made for sortings in together)
        transfers = (transfer.tensors() for transfer in self._tables.transfers.values())
        deduplicated = () if self.deduplicated is None else self.deduplicated.tensors()
        own = (self.by_key_N, *self._tables.choice_N, *deduplicated)
        return (*own, *chain.from_iterable(chain(routes, sorted_by, transfers)))

    def rows_of(
        self, chunk_range: ChunkRange, pieces: Sequence[tuple[ChunkRange, Tensor]]
    ) -> Tensor:
        """Computed rows of a chunk range in slot order, from those of overlapping chunk ranges in
        slot order."""
        return _rows_of(self.rows.received_PCFS, chunk_range, pieces)

    def own_rows_of(
        self, chunk_range: ChunkRange, pieces: Sequence[tuple[ChunkRange, Tensor]]
    ) -> Tensor:
        """The same of the rows that arrived at this rank of its ETP group."""
        return _rows_of(self.rows.received_PCFS[self.etp_rank][None], chunk_range, pieces)

    def of_chunk_range(self, chunk_range: ChunkRange, all_R: Tensor) -> Tensor:
        """What the rows of a chunk range that arrived here have, of what all of the layer's
        have."""
        return (
            all_R
            if chunk_range == self.whole
            else self.own_rows_of(chunk_range, [(self.whole, all_R)])
        )

    def among_all(self, chunk_range: ChunkRange, own_R: Tensor) -> Tensor:
        """And back: zeros for the other rows."""
        if chunk_range == self.whole:
            return own_R
        num_rows = int(self.rows.received_PCFS[self.etp_rank].sum())
        place_R = self.of_chunk_range(chunk_range, torch.arange(num_rows, device=own_R.device))
        return own_R.new_zeros(num_rows).index_copy_(0, place_R, own_R)


def _rows_of(
    rows_PCFS: np.ndarray, chunk_range: ChunkRange, pieces: Sequence[tuple[ChunkRange, Tensor]]
) -> Tensor:
    """See ``LayerRoute.rows_of``; of rows by place, sender, chunk and slot."""
    rows_SPCF = rows_PCFS.transpose(3, 0, 1, 2)
    starts_SPCF = np.zeros(rows_SPCF.shape, dtype=np.int64)
    before = 0
    for piece_chunk_range, rows in pieces:
        chunks = slice(piece_chunk_range.start, piece_chunk_range.stop)
        starts_SPCF[..., chunks] = before + starts_of(rows_SPCF[..., chunks])
        before += rows.shape[0]
    chunks = slice(chunk_range.start, chunk_range.stop)
    joined = torch.cat([rows for _, rows in pieces])
    index = block_index(starts_SPCF[..., chunks], rows_SPCF[..., chunks], joined.device)
    return joined.index_select(0, index)


def _alike(chunk_range: ChunkRange, num_chunks: int) -> Sequence[ChunkRange]:
    """All chunk ranges that are as long, from the first chunk to the last, where it is one of
    these; else the chunk range alone."""
    width = chunk_range.stop - chunk_range.start
    if width == num_chunks or num_chunks % width or chunk_range.start % width:
        return (chunk_range,)
    return equal_ranges(num_chunks, num_chunks // width)


def tokens_of(choice_N: Tensor, top_k: int) -> Tensor:
    # Of its names this one does not go by way of Python.
    return torch.floor_divide(choice_N, top_k) if top_k > 1 else choice_N


@lru_cache(maxsize=8)  # batches are often alike
def _places(
    cut: Cut, chunk_ranges: tuple[ChunkRange, ...], top_k: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Of each choice of all tokens, in order, its place among the choices of its chunk range, and
    its token's among the tokens of that, int64 ``[T * K]``."""
    length_G = np.array([cut.length(chunk_range) for chunk_range in chunk_ranges])
    choice_T = ranges(np.zeros_like(length_G), length_G * top_k)
    choice, token = on_device(np.stack((choice_T, choice_T // top_k)), device)
    return choice, token


def transposed_blocks(lengths: np.ndarray, axes: tuple[int, ...], device: torch.device) -> Tensor:
    """Index that brings blocks of rows, stored in C order, into the order of transposed axes."""
    starts, moved = starts_of(lengths).transpose(axes), lengths.transpose(axes)
    return block_index(starts, moved, device)


def one_rank_route(expert_TK: Tensor, target: Placement) -> LayerRoute:
    """The route where one EP rank holds all experts: no exchange, and no wait for the device."""
    num_tokens, top_k = expert_TK.shape
    # 32 bits: a radix sort then needs half the passes.
    sorted_N, choice_N = expert_TK.flatten().int().sort(stable=True)
    slots_S = torch.arange(target.num_slots, dtype=torch.int32, device=expert_TK.device)
    end_S = torch.searchsorted(sorted_N, slots_S, right=True, out_int32=True)
    whole = ChunkRange(0, 1)
    num_rows = choice_N.numel()
    route = Route(
        choice_N=choice_N,
        token_N=tokens_of(choice_N, top_k),
        splits=Splits((num_rows,), (num_rows,)),
        sorting=None,
        slots=SlotRows.ending(end_S, num_rows),
        num_tokens=num_tokens,
        top_k=top_k,
    )
    # Chunk ranges other than the whole are never asked for.
    nothing = np.zeros((1, 1), dtype=np.int64)
    rows = RowSplits(nothing, nothing, nothing[..., None, None])
    cut, routes = Cut.equal(num_tokens, 1), {whole: route}
    return LayerRoute(cut, target, top_k, choice_N, rows, _routes=routes)


# Restore: the rows that came back, weighed by their scores, added to their tokens (I-Order).


@dataclass(frozen=True)
class Restore:
    """Weigh each returned row by its score and add it to its token.

    Reads rows ``[N, D]`` in send order, scores ``[T, K]`` and the route; writes ``[T, D]``.
    """

    def forward(
        self,
        chunk_range: ChunkRange,
        returned_ND: Tensor,
        score_TK: Tensor,
        layer_route: LayerRoute,
    ) -> Done:
        returned_ND, score_TK = returned_ND.detach(), score_TK.detach()
        y_TD = layer_route.on(chunk_range).sum_by_token(returned_ND, score_TK)
        return (y_TD,), (returned_ND, score_TK, layer_route)

    def backward(
        self, chunk_range: ChunkRange, saved: Saved, grad_TD: Tensor
    ) -> tuple[Tensor, Tensor]:
        returned_ND, score_TK, layer_route = saved
        return weighing_grads(layer_route.on(chunk_range), returned_ND, score_TK, grad_TD)

    def recut(self, chunk_range: ChunkRange, pieces: Sequence[tuple[ChunkRange, Saved]]) -> Saved:
        layer_route: LayerRoute = pieces[0][1][2]
        cut, route = layer_route.cut, layer_route.on(chunk_range)
        start = cut.first(chunk_range) - cut.first(pieces[0][0])
        y = torch.cat([layer_route.on(other).spread(saved[0]) for other, saved in pieces])
        y_TKD = y.narrow(0, start, route.num_tokens)
        score = torch.cat([saved[1] for _, saved in pieces]).narrow(0, start, route.num_tokens)
        return y_TKD.flatten(0, 1).index_select(0, route.choice_N), score, layer_route


def weighing_grads(
    route: Route, returned_ND: Tensor, score_TK: Tensor, grad_TD: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``route.sum_by_token``: of rows ``[N, D]`` and of their weights ``[T, K]``."""
    is_indexed = route.is_indexed and route.deduplicated is None
    if is_indexed and kernels.has_kernels(returned_ND, score_TK, grad_TD):
        places = route.token_N, route.choice_N
        return kernels.sums_by_token_grads(
            returned_ND, *places, score_TK, grad_TD, is_full=route.is_full
        )
    grad_ND = route.of_tokens(grad_TD)
    grad_score_N = torch.sum(returned_ND * grad_ND, dim=1, dtype=score_TK.dtype)
    # In place: the product is rounded once, and never there in the scores' precision.
    grad_ND *= route.of_choices(score_TK)[:, None]
    return grad_ND, route.spread(grad_score_N)
