# SPDX-License-Identifier: Apache-2.0
"""Route: how a layer's rows travel. Order makes it, other stages read it, it dies with the pass.

``LayerRoute`` is of all tokens of a layer. It gives the ``Route`` of a span of them, made when it
is first asked for, and how its rows meet in a cell. Restore adds the rows that came back to their
tokens. Shape letters: T tokens, K choices a token, N rows sent, R rows received, G rows of a cell,
F finest chunks, C cells, P places of a cell, S expert slots, X blocks, D model width.
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
from ds_moe_ext.core.all_to_all import Carrier, Channel, Reach, Trip
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
from ds_moe_ext.moe.slot_rows import SlotRows, SlotSorting, SlotSortings
from ds_moe_ext.moe.visits import SpanVisits, Visits
from ds_moe_ext.schedule.executor import OnDevice
from ds_moe_ext.schedule.stages import Done, Saved
from ds_moe_ext.schedule.task import Cut, Span
from ds_moe_ext.schedule.task import spans as equal_spans


@dataclass(frozen=True, eq=False)
class SpanChoices:
    """Where the choices of several spans lie in send order; found for all of them at once."""

    choice_N: Tensor  # all choices, of one span after the other, in send order, int64
    place_N: Tensor  # of each choice, in order, its place among those of its span
    sizes: Sequence[int]  # choices of each span

    @cached_property
    def row_GN(self) -> Sequence[Tensor]:
        row_N = torch.empty_like(self.choice_N).scatter_(0, self.choice_N, self.place_N)
        return row_N.split_with_sizes(self.sizes)


class Splits(NamedTuple):
    sent_C: tuple[int, ...]  # to each cell; to this one alone where no row leaves its cell
    received_C: tuple[int, ...]  # from each cell; likewise

    @classmethod
    def of(cls, sent_C: Iterable[int], received_C: Iterable[int]) -> Splits:
        return cls(tuple(sent_C), tuple(received_C))

    @property
    def stays(self) -> bool:
        """Whether no row of any cell leaves it: there is nothing to exchange."""
        return len(self.sent_C) == 1


@dataclass(frozen=True, eq=False)
class Route(OnDevice):
    """How the rows of one span travel. Integers only: nothing here carries a gradient."""

    # position of each sent row in the span's flattened ``[T, K]`` choices, int64, in send order: by
    # cell, then chunk, slot and token; ``T * K`` of what is only padding
    choice_N: Tensor
    token_N: Tensor  # its token in the span; ``T`` of padding
    splits: Splits  # how many rows go to each cell and come from each
    # takes rows from arrival order (sender, chunk, slot) to slot order; None where all are this
    # rank's, in that order
    sorting: SlotSorting | None
    slots: SlotRows  # rows of each of this cell's slots
    num_tokens: int  # tokens ``T`` of the span
    top_k: int  # choices ``K``
    # where each choice lies in send order, ``N`` of those that do not travel, int64 ``[T * K]``;
    # None where nothing is padded
    padded_row_N: Tensor | None = None
    # what travels in place of rows, where each token's goes once to a cell; ``splits`` and what is
    # in send or arrival order are theirs then
    visits: SpanVisits | None = None
    # with other spans, and the number of this one; None where it is alone, or some choice does not
    # travel
    together: tuple[SpanChoices, int] | None = None

    @property
    def is_indexed(self) -> bool:
        """Whether ``row_of_choices`` brings rows home."""
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
        if self.visits is not None:
            return x_TD.index_select(0, self.visits.leaving.token_U)
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
        if self.visits is not None:
            return rows_RD.index_select(0, self.visits.visit_R)
        return rows_RD if self.sorting is None else self.sorting.to_slots(rows_RD)

    def to_arrival(self, rows_RD: Tensor, weight_R: Tensor | None = None) -> Tensor:
        """Slot order to arrival order; rows of one visit, times their weights, are added up."""
        if self.visits is not None:
            return self.visits.by_visit.sums(rows_RD, weight_R)
        return rows_RD if self.sorting is None else self.sorting.back(rows_RD)

    @cached_property
    def row_N(self) -> Tensor:
        """Where each choice lies in send order, int64 ``[T * K]``; only if the route is full."""
        if self.together is not None:
            spans, number = self.together
            return spans.row_GN[number]
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
        Visits come weighed.
        """
        if self.visits is not None:
            return self.visits.leaving.by_token.sums(rows_ND)
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
        return (*made, *(() if self.visits is None else self.visits.tensors()))


@lru_cache(maxsize=16)  # batches are often alike
def _first_choices(num_tokens: int, top_k: int) -> Tensor:
    """The first choice of each token, int64 ``[T]``, on a CPU."""
    return torch.arange(0, num_tokens * top_k, top_k, device="cpu")


@dataclass(frozen=True, eq=False)
class CellRoute:
    """How the rows of one span meet on the ranks of a cell, which split every expert."""

    rows_P: tuple[int, ...]  # rows that arrived at each place
    # takes gathered rows, place by place and there slot by slot, to slot order
    sorting: SlotSorting


class Ahead(NamedTuple):
    """What of a pass is worked out while its counts are on their way to the host."""

    token_N: Tensor  # tokens in the order of all rows that are sent, int64 ``[N]``
    rows: dict[Span, Tensor]  # of spans their rows ``[N, D]`` in send order, until they are sent


@dataclass
class _Tables:
    """What of spans has been asked for so far."""

    # choices in send order; one, once they are
    choice_N: list[Tensor] = field(default_factory=list)
    splits: dict[Span, Splits] = field(default_factory=dict)  # of rows
    # of spans that are alike, by the first of them
    sortings: dict[Span, SlotSortings] = field(default_factory=dict)
    cells: dict[Span, CellRoute] = field(default_factory=dict)  # how rows meet in the cell
    # how they travel otherwise than straight from cell to cell
    trips: dict[Span, Trip] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LayerRoute(OnDevice):
    """The routes of all spans of one layer's pass; each is made when first asked for."""

    cut: Cut  # where the finest chunks begin
    target: Placement  # where experts compute
    top_k: int  # choices ``K`` a token
    # sent choices by chunk, cell, slot and token, int64 ``[N]``; or as ``rows.moved`` says
    by_key_N: Tensor
    rows: RowSplits  # how many travel, on the host
    place: int = 0  # this rank's place in its cell
    # gives the rows of each chunk from each cell to each, of this rank's place, int64 ``[F, C,
    # C]``; asked once, and only where a carrier needs them
    count_between: Callable[[], np.ndarray] | None = None
    # rows as they travel, none of them, ``[0, D]``; where the order tells of it
    none_0D: Tensor | None = None
    visits: Visits | None = None  # where each token's row goes once to a cell
    # what was worked out of it before the host knew how many rows go where
    ahead: Ahead | None = None
    # slots of this cell that may be computed apart from those behind them, or 0
    num_firsts: int = 0
    _routes: dict[Span, Route] = field(default_factory=dict)
    _tables: _Tables = field(default_factory=_Tables)

    @property
    def whole(self) -> Span:
        return Span(0, self.cut.num_chunks)

    def on(self, span: Span) -> Route:
        # Two lanes that ask at once may both make it: they make the same, so no lock is needed.
        route = self._routes.get(span)
        if route is None:
            routes = self._routes_like(span)
            if self.visits is not None:
                routes = {own: self._visiting(own, each) for own, each in routes.items()}
            self._routes.update(routes)
            route = self._routes[span]
        return route

    def splits(self, span: Span) -> Splits:
        """What a span sends and receives: all that its exchange has to know, so that other tables
        are made while rows are on their way."""
        route = self._routes.get(span)
        if route is None and self.visits is None:
            return self._row_splits(span)
        return (route or self.on(span)).splits  # visits travel in place of rows

    def sent_rows(self, span: Span, x_TD: Tensor) -> Tensor:
        """Rows ``[N, D]`` in send order, of the span's tokens ``[T, D]``. Call it once a span: rows
        that are ready are given away."""
        if self.ahead is None or not self.ahead.rows:
            is_made = span in self._routes or self.visits is not None
            if is_made or self.cut.num_chunks > 1:
                return self.on(span).of_tokens(x_TD)
            return x_TD.index_select(0, self._token_N)
        rows_of = self.ahead.rows
        if span not in rows_of:
            sizes = self.rows.sent_FC.sum(axis=1).tolist()
            parts = rows_of.pop(self.whole).split_with_sizes(sizes)
            rows_of.update((Span(f, f + 1), part) for f, part in enumerate(parts))
        return rows_of.pop(span)

    def told(self, visit_R: Tensor) -> LayerRoute:
        """The same route, by which visits travel.

        Args:
            visit_R: of the rows at this cell's experts, as in ``Visits``.
        """
        assert self.visits is not None
        visits = replace(self.visits, visit_R=visit_R)
        told = replace(self, visits=visits, count_between=visits.between, _routes={})
        told._routes[self.whole] = told._visiting(self.whole, self.on(self.whole))
        return told

    def _visiting(self, span: Span, route: Route) -> Route:
        """The route of a span, by which visits travel once the cells know them."""
        assert self.visits is not None
        if self.visits.visit_R is None:
            return route
        visits = self.visits.on(span, self.of_span(span, self.visits.visit_R))
        splits = Splits(visits.sent_C, visits.received_C)
        return replace(route, splits=splits, visits=visits)

    def in_cell(self, span: Span) -> CellRoute:
        """How the rows of a span meet in the cell."""
        if span not in self._tables.cells:
            rows_PS = self.rows.received_PCFS[:, :, span.start : span.stop].sum(axis=(1, 2))
            sorting = SlotSorting.of(rows_PS, self.by_key_N.device, self.num_firsts)
            self._tables.cells[span] = CellRoute(tuple(rows_PS.sum(axis=1).tolist()), sorting)
        return self._tables.cells[span]

    @cached_property
    def _between_FCC(self) -> np.ndarray:
        assert self.count_between is not None, "one cell sends nothing"
        return self.count_between()

    def trip(self, span: Span, carrier: Carrier) -> Trip:
        """How the rows of a span travel by a carrier; the same one every time."""
        if span not in self._tables.trips:
            counts_CC = self._between_FCC[span.start : span.stop].sum(axis=0)
            self._tables.trips[span] = carrier.trip(counts_CC, self.by_key_N.device)
        return self._tables.trips[span]

    def node_trip(self, span: Span, channels: Mapping[Reach, Channel]) -> Trip:
        """How the visits of a span travel once to a node; the same one every time."""
        if span not in self._tables.trips:
            visits = self.on(span).visits
            assert self.visits is not None and visits is not None
            self._tables.trips[span] = self.visits.trip(span, visits.leaving, channels)
        return self._tables.trips[span]

    def computed(self, span: Span) -> SlotRows:
        """Rows of each slot that this rank computes with its part of the experts."""
        is_alone = self.rows.received_PCFS.shape[0] == 1
        return self.on(span).slots if is_alone else self.in_cell(span).sorting.slots

    def _row_splits(self, span: Span) -> Splits:
        """Made with those of the spans that are like it."""
        found = self._tables.splits.get(span)
        if found is None:
            spans = _alike(span, self.cut.num_chunks)
            chunks = slice(spans[0].start, spans[-1].stop)
            sent_FC, received_FC = self.rows.sent_FC[chunks], self.rows.received_FC[chunks]
            if span.stop - span.start > 1:
                sent_FC, received_FC = (
                    each.reshape(len(spans), -1, each.shape[1]).sum(axis=1)
                    for each in (sent_FC, received_FC)
                )
            of_spans = map(Splits.of, sent_FC.tolist(), received_FC.tolist())
            self._tables.splits.update(zip(spans, of_spans))
            found = self._tables.splits[span]
        return found

    def _sortings_of(self, spans: Sequence[Span]) -> SlotSortings:
        """Of spans that are alike. With what the first of these have on the device comes what
        brings all choices into send order."""
        found = self._tables.sortings.get(spans[0])
        if found is None:
            chunks, num_spans = slice(spans[0].start, spans[-1].stop), len(spans)
            received_CFS = self.rows.received_PCFS[self.place][:, chunks]
            num_cells, num_chunks, num_slots = received_CFS.shape
            width = num_chunks // num_spans
            rows_CGFS = received_CFS.reshape(num_cells, num_spans, width, num_slots)
            rows_GXS = rows_CGFS.swapaxes(0, 1).reshape(num_spans, num_cells * width, num_slots)
            moved = None if self._tables.choice_N else self.rows.moved
            found = SlotSortings(rows_GXS, self.by_key_N.device, moved, self.num_firsts)
            self._tables.sortings[spans[0]] = found
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

    def _routes_like(self, span: Span) -> dict[Span, Route]:
        """The routes of a span and of its like, where all tokens are cut into such: all that is
        worked out for one is for all at once."""
        spans = _alike(span, self.cut.num_chunks)
        sortings = self._sortings_of(spans)
        by_span = len(spans), span.stop - span.start, self.rows.sent_FC.shape[1]
        sent_GFC = self.rows.sent_FC[spans[0].start : spans[-1].stop].reshape(by_span)
        splits = map(self._row_splits, spans)
        tables = zip(spans, *self._choices(spans, sent_GFC), splits, sortings.each())
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
        self, spans: Sequence[Span], sent_GFC: np.ndarray
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[tuple[SpanChoices, int] | None]]:
        """Of each span: the places of its sent rows among its choices, in send order; and among its
        tokens; and what it has with other spans. ``sent_GFC`` are the rows of each for each cell,
        chunk by chunk."""
        (choice_N,) = self._tables.choice_N
        if len(spans) == 1 and len(sent_GFC[0]) < len(self.rows.sent_FC):
            before = int(self.rows.sent_FC[: spans[0].start].sum())
            choice_N = choice_N[before : before + int(sent_GFC.sum())]
        if sent_GFC.shape[1] > 1:  # by chunk and cell, to by cell and chunk
            choice_N = choice_N[transposed_blocks(sent_GFC, (0, 2, 1), choice_N.device)]
        if len(spans) > 1:
            choice_T, token_T = _places(self.cut, tuple(spans), self.top_k, choice_N.device)
            sizes = sent_GFC.sum(axis=(1, 2)).tolist()
            choice, token = (place_T.index_select(0, choice_N) for place_T in (choice_T, token_T))
            together: list[tuple[SpanChoices, int] | None] = [None] * len(spans)
            if choice_N.numel() == choice_T.numel():
                all_ = SpanChoices(choice_N, choice_T, sizes)
                together = [(all_, number) for number in range(len(spans))]
            return choice.split_with_sizes(sizes), token.split_with_sizes(sizes), together
        first = self.cut.first(spans[0]) * self.top_k
        choice_N = choice_N - first if first else choice_N
        if self.cut.num_chunks == 1:
            return (choice_N,), (self._token_N,), (None,)
        return (choice_N,), (tokens_of(choice_N, self.top_k),), (None,)

    def tensors(self) -> tuple[Tensor, ...]:
        routes = (route.tensors() for route in self._routes.values())
        of_routes = [route.sorting for route in self._routes.values()]
        of_cells = [route.sorting for route in self._tables.cells.values()]
        together = {s.together for s in (*of_routes, *of_cells) if s is not None}
        sorted_by = (sortings.made for sortings in together)
        trips = (trip.tensors() for trip in self._tables.trips.values())
        visits = () if self.visits is None else self.visits.tensors()
        own = (self.by_key_N, *self._tables.choice_N, *visits)
        return (*own, *chain.from_iterable(chain(routes, sorted_by, trips)))

    def rows_of(self, span: Span, pieces: Sequence[tuple[Span, Tensor]]) -> Tensor:
        """Computed rows of a span in slot order, from those of overlapping spans in slot order."""
        return _rows_of(self.rows.received_PCFS, span, pieces)

    def own_rows_of(self, span: Span, pieces: Sequence[tuple[Span, Tensor]]) -> Tensor:
        """The same of the rows that arrived at this rank of its cell."""
        return _rows_of(self.rows.received_PCFS[self.place][None], span, pieces)

    def of_span(self, span: Span, all_R: Tensor) -> Tensor:
        """What the rows of a span that arrived here have, of what all of the layer's have."""
        return all_R if span == self.whole else self.own_rows_of(span, [(self.whole, all_R)])

    def among_all(self, span: Span, own_R: Tensor) -> Tensor:
        """And back: zeros for the other rows."""
        if span == self.whole:
            return own_R
        num_rows = int(self.rows.received_PCFS[self.place].sum())
        place_R = self.of_span(span, torch.arange(num_rows, device=own_R.device))
        return own_R.new_zeros(num_rows).index_copy_(0, place_R, own_R)


def _rows_of(rows_PCFS: np.ndarray, span: Span, pieces: Sequence[tuple[Span, Tensor]]) -> Tensor:
    """See ``LayerRoute.rows_of``; of rows by place, sender, chunk and slot."""
    rows_SPCF = rows_PCFS.transpose(3, 0, 1, 2)
    starts_SPCF = np.zeros(rows_SPCF.shape, dtype=np.int64)
    before = 0
    for piece_span, rows in pieces:
        chunks = slice(piece_span.start, piece_span.stop)
        starts_SPCF[..., chunks] = before + starts_of(rows_SPCF[..., chunks])
        before += rows.shape[0]
    chunks = slice(span.start, span.stop)
    joined = torch.cat([rows for _, rows in pieces])
    index = block_index(starts_SPCF[..., chunks], rows_SPCF[..., chunks], joined.device)
    return joined.index_select(0, index)


def _alike(span: Span, num_chunks: int) -> Sequence[Span]:
    """All spans that are as long, from the first chunk to the last, where it is one of these; else
    the span alone."""
    width = span.stop - span.start
    if width == num_chunks or num_chunks % width or span.start % width:
        return (span,)
    return equal_spans(num_chunks, num_chunks // width)


def tokens_of(choice_N: Tensor, top_k: int) -> Tensor:
    # Of its names this one does not go by way of Python.
    return torch.floor_divide(choice_N, top_k) if top_k > 1 else choice_N


@lru_cache(maxsize=8)  # batches are often alike
def _places(
    cut: Cut, spans: tuple[Span, ...], top_k: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Of each choice of all tokens, in order, its place among the choices of its span, and its
    token's among the tokens of that, int64 ``[T * K]``."""
    length_G = np.array([cut.length(span) for span in spans])
    choice_T = ranges(np.zeros_like(length_G), length_G * top_k)
    choice, token = on_device(np.stack((choice_T, choice_T // top_k)), device)
    return choice, token


def transposed_blocks(lengths: np.ndarray, axes: tuple[int, ...], device: torch.device) -> Tensor:
    """Index that brings blocks of rows, stored in C order, into the order of transposed axes."""
    starts, moved = starts_of(lengths).transpose(axes), lengths.transpose(axes)
    return block_index(starts, moved, device)


def one_cell_route(expert_TK: Tensor, target: Placement) -> LayerRoute:
    """The route where one cell holds all experts: no exchange, and no wait for the device."""
    num_tokens, top_k = expert_TK.shape
    # 32 bits: a radix sort then needs half the passes.
    sorted_N, choice_N = expert_TK.flatten().int().sort(stable=True)
    slots_S = torch.arange(target.num_slots, dtype=torch.int32, device=expert_TK.device)
    end_S = torch.searchsorted(sorted_N, slots_S, right=True, out_int32=True)
    whole = Span(0, 1)
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
    # Spans other than the whole are never asked for.
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
        self, span: Span, returned_ND: Tensor, score_TK: Tensor, layer_route: LayerRoute
    ) -> Done:
        returned_ND, score_TK = returned_ND.detach(), score_TK.detach()
        y_TD = layer_route.on(span).sum_by_token(returned_ND, score_TK)
        return (y_TD,), (returned_ND, score_TK, layer_route)

    def backward(self, span: Span, saved: Saved, grad_TD: Tensor) -> tuple[Tensor, Tensor]:
        returned_ND, score_TK, layer_route = saved
        return weighing_grads(layer_route.on(span), returned_ND, score_TK, grad_TD)

    def recut(self, span: Span, pieces: Sequence[tuple[Span, Saved]]) -> Saved:
        layer_route: LayerRoute = pieces[0][1][2]
        cut, route = layer_route.cut, layer_route.on(span)
        start = cut.first(span) - cut.first(pieces[0][0])
        y = torch.cat([layer_route.on(other).spread(saved[0]) for other, saved in pieces])
        y_TKD = y.narrow(0, start, route.num_tokens)
        score = torch.cat([saved[1] for _, saved in pieces]).narrow(0, start, route.num_tokens)
        return y_TKD.flatten(0, 1).index_select(0, route.choice_N), score, layer_route


def weighing_grads(
    route: Route, returned_ND: Tensor, score_TK: Tensor, grad_TD: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``route.sum_by_token``: of rows ``[N, D]`` and of their weights ``[T, K]``."""
    is_indexed = route.is_indexed and route.visits is None
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
