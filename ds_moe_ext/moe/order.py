# SPDX-License-Identifier: Apache-2.0
"""Order: which row goes where. One exchange of counts, from which every rank makes the same routes.

With a static capacity every rank sends as many rows to each expert, padded with zeros, and nothing
is exchanged; see ``Padding``. Shape letters: T tokens, K choices a token, F finest chunks, C EP
ranks, P places of an ETP group, E experts, N rows sent, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import one_hot

from ds_moe_ext.core.comm import all_gather_counts, counts_to_host
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.rows import RowSplits, in_32_bits, numbers, on_device, split
from ds_moe_ext.core.share import Share, pair_of
from ds_moe_ext.moe.deduplicated import ByNodes, Deduplicated, Goals
from ds_moe_ext.moe.gate import capacity_of, drop_over_capacity
from ds_moe_ext.moe.joined_passes import BatchSignature, HostLag
from ds_moe_ext.moe.route import Ahead, LayerRoute, Route, Splits, one_rank_route, tokens_of
from ds_moe_ext.moe.slot_rows import SlotRows, SlotSorting
from ds_moe_ext.planning.loads import MOST_ROWS
from ds_moe_ext.planning.strategy import Destination
from ds_moe_ext.schedule.graphs import remembered
from ds_moe_ext.schedule.stages import Done, SavesAlike
from ds_moe_ext.schedule.task import ChunkRange, Cut
from ds_moe_ext.schedule.watch import WATCH


class PassKind(IntEnum):
    """Of a pass. Ranks may mix the last with any other: nobody knows what comes of it."""

    TRAINING = 0
    EVALUATION = 1
    OTHER = 2


def kind_of(layer: int, *, is_training: bool, is_graded: bool) -> int:
    """The layer that a rank runs, and in what kind of pass, as one number."""
    if is_training != is_graded:
        kind = PassKind.OTHER
    else:
        kind = PassKind.TRAINING if is_training else PassKind.EVALUATION
    return layer * len(PassKind) + kind


def check_kinds(reported_C: np.ndarray) -> None:
    """Raises RuntimeError, on all ranks alike, where they are in passes that cannot be one."""
    if len(set(reported_C.tolist())) == 1:
        return
    layers, kinds = (
        set((reported_C // len(PassKind)).tolist()),
        set((reported_C % len(PassKind)).tolist()),
    )
    if len(layers) > 1 or {PassKind.TRAINING, PassKind.EVALUATION} <= kinds:
        reported = (divmod(int(reported), len(PassKind)) for reported in reported_C)
        each = [
            f"place {etp_rank}: layer {layer}, {PassKind(kind).name.lower()}"
            for etp_rank, (layer, kind) in enumerate(reported)
        ]
        raise RuntimeError(
            "the ranks of an EP group reached an MoE layer in different passes "
            f"({'; '.join(each)}): {WATCH.remedy}"
        )


def keys_of(expert_TK: Tensor, cut: Cut, width: int, *, may_drop: bool) -> Tensor:
    """Chunk and expert of each choice as one key, ``chunk * width + expert``, int64 ``[T * K]``;
    ``F * width`` where it was dropped."""
    key_N = expert_TK.flatten()
    dropped_N = key_N < 0 if may_drop else None
    if cut.num_chunks > 1:
        key_N = key_N + _first_keys(cut, expert_TK.shape[1], width, key_N.device)
    if dropped_N is not None:
        key_N = key_N.masked_fill(dropped_N, cut.num_chunks * width)
    return key_N


@lru_cache(maxsize=4)  # batches are often alike, and copies from the host cost it
def _first_keys(cut: Cut, top_k: int, width: int, device: torch.device) -> Tensor:
    """The first key of each choice's chunk, int64 ``[T * K]``."""
    lengths = np.diff(np.asarray(cut.bounds)) * top_k
    return on_device(np.repeat(np.arange(cut.num_chunks) * width, lengths), device)


def counted(
    key_N: Tensor, cut: Cut, num_experts: int, reported: tuple[int, ...], *, may_drop: bool
) -> Tensor:
    """Rows of each chunk for each expert, and behind them what else is reported, int32 ``[F, W]``.

    Args:
        key_N: by ``keys_of``, ``W`` keys a chunk.
        cut: of the tokens.
        num_experts: experts ``E``.
        reported: ``W - E`` numbers, the same for every chunk.
        may_drop: whether some keys may be ``F * W``.
    """
    width = num_experts + len(reported)
    rows = _reported_alone(cut.num_chunks, num_experts, reported, key_N.device, may_drop=may_drop)
    rows = rows.scatter_add(0, key_N, _ones(key_N.numel(), key_N.device))
    return (rows[:-1] if may_drop else rows).view(cut.num_chunks, width)


def sorted_by(key_N: Tensor, most: int) -> Tensor:
    """What brings keys into order, alike ones in their own, int64 ``[N]``. A radix sort goes as
    often over many as they have bytes."""
    if key_N.numel() > FEW:
        key_N = key_N.to(torch.int16 if most <= torch.iinfo(torch.int16).max else torch.int32)
    return key_N.argsort(stable=True)


FEW = 4096
"""Rows that sort as fast as they are."""


@lru_cache(maxsize=4)
def _ones(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, dtype=torch.int32, device=device)


@lru_cache(maxsize=1024)
def _reported_alone(
    num_chunks: int,
    num_experts: int,
    reported: tuple[int, ...],
    device: torch.device,
    *,
    may_drop: bool,
) -> Tensor:
    """Counts of no row, int32 ``[F * W]``; and where rows may be dropped one more, of those."""
    rows_F = [0] * num_experts + [*reported]
    return on_device(np.asarray(rows_F * num_chunks + [0] * may_drop, np.int32), device)


class RankCoordinates(NamedTuple):
    """Where a rank sits among those that hold a layer's experts."""

    ep_rank: int  # its EP rank
    etp_rank: int = 0  # its place there
    etp_size: int = 1  # places ``P`` of an ETP group


@dataclass(frozen=True, eq=False)
class Order(SavesAlike):
    """Reads expert ids ``[T, K]``, -1 where a row was dropped; writes the layer's route.

    One all-gather of counts for all chunks; every rank of the group learns the rows of every
    sender and expert, which is also what planners want to know.
    """

    destination: Destination  # where experts compute, and how their replicas divide rows
    coordinates: RankCoordinates  # this rank's
    group: dist.ProcessGroup | None  # the ranks of all EP ranks; None where there is one rank
    capacity_factor: float | None  # rows an expert takes from one rank, over the mean; None for all
    gate_may_drop: bool  # whether ids may be -1
    # given the rows of each sender and expert, int32 ``[C, E]``, on the host; or, where it does
    # not wait for them, where this rank's rows end, expert by expert; and choices a token, and
    # where rows go
    on_rows: Callable[[np.ndarray | SlotRows, int, Destination], None]
    # another destination once the rows are known
    revise: Callable[[np.ndarray], Destination] | None = None
    # of the pass; it goes with the counts, see ``kind_of``
    kind: Callable[[], int] = int  # 0
    # ranks of one side have no tokens: what rows are like goes with the counts, too
    has_sides: bool = False
    # where every rank sends as many rows to each expert; nothing is exchanged then
    padding: Padding | None = None
    # each token's row goes once to an EP rank: how many do, goes with the counts, too
    counts_pairs: bool = False
    by_nodes: ByNodes | None = None  # and once to a node
    lag: HostLag = field(default_factory=HostLag)  # of the host behind a device
    # rows are brought into send order while counts are on their way, where that order is known by
    # then; each finest chunk is then dispatched for itself, as it is read here
    packs: bool = False
    _places: dict[tuple[int, int, torch.device], Tensor] = field(
        default_factory=dict, init=False, repr=False
    )

    def forward(
        self, chunk_range: ChunkRange, expert_TK: Tensor, x_TD: Tensor | None = None
    ) -> Done:
        """Hidden states are None where there are two sides and this one has none."""
        if self.padding is not None:
            none_0D = None
            if self.has_sides:
                none_0D, none_0K, _ = self._signature(expert_TK, x_TD).nothing(expert_TK.device)
                expert_TK = none_0K if x_TD is None else expert_TK
            route, kept = self.padding.route(expert_TK)
            self.on_rows(kept, route.top_k, self.destination)
            return (replace(route, none_0D=none_0D),), ()
        cut = Cut.equal(expert_TK.shape[0], chunk_range.stop - chunk_range.start)
        num_experts = self.destination.target.num_experts
        if self.capacity_factor is not None:
            capacity = capacity_of(expert_TK.numel(), num_experts, self.capacity_factor)
            expert_TK = drop_over_capacity(expert_TK, num_experts, capacity)
        if self.group is None and cut.num_chunks == 1 and not self._may_drop:
            route = one_rank_route(expert_TK, self.destination.target)
            self.on_rows(route.on(chunk_range).slots, route.top_k, self.destination)
            return (route,), ()
        return (self._exchanged(expert_TK, cut, x_TD),), ()

    def backward(self, chunk_range: ChunkRange, saved: Any, *grads: Any) -> tuple[Any, ...]:
        return ()

    @property
    def _may_drop(self) -> bool:
        return self.gate_may_drop or self.capacity_factor is not None

    def _exchanged(self, expert_TK: Tensor, cut: Cut, x_TD: Tensor | None) -> LayerRoute:
        num_experts, top_k = self.destination.target.num_experts, expert_TK.shape[1]
        if expert_TK.numel() > MOST_ROWS:
            raise ValueError(
                f"{expert_TK.shape[0]} tokens of {top_k} choices make {expert_TK.numel()} rows in "
                f"one pass, but at most {MOST_ROWS} can be counted; use a smaller micro-batch"
            )
        reported = () if self.group is None else self._reported(x_TD, top_k)
        key_N = keys_of(expert_TK, cut, num_experts + len(reported), may_drop=self._may_drop)
        rows_FW = counted(key_N, cut, num_experts, reported, may_drop=self._may_drop)
        goals = None
        if self.counts_pairs:
            goals = Goals.of(expert_TK, self.destination.target, self.by_nodes)
            rows_FW = torch.cat((rows_FW, goals.by_chunk(cut).int()), dim=1)
        gathered = rows_FW[None] if self.group is None else all_gather_counts(rows_FW, self.group)
        counts = counts_to_host(gathered, self.group)
        width = num_experts + len(reported)
        key_bound = cut.num_chunks * width
        if self._place_E is not None:
            place_FW1 = self._places_of_keys(self._place_E, cut, width, key_N.device)
            key_N = place_FW1.index_select(0, key_N)
            key_bound = cut.num_chunks * self.destination.target.flat_N.size
        by_key_N = sorted_by(key_N, key_bound)  # while they are on their way
        if (is_idle := counts.has_landed) is not None:
            self.lag.add(is_idle)
        ahead = self._ahead(by_key_N, cut, top_k, x_TD)  # likewise
        # The one wait for the device: splits must be known.
        known = counts.ready().numpy()
        rows_CPFE = known[..., :num_experts].reshape(
            -1, self.coordinates.etp_size, cut.num_chunks, num_experts
        )
        if self.group is not None:
            check_kinds(known[:, 0, num_experts])
        deduplicated = none_0D = None
        if goals is not None:
            num_CFX = known[self.coordinates.etp_rank :: self.coordinates.etp_size, :, width:]
            deduplicated = Deduplicated(
                goals, cut, num_CFX, self.coordinates.ep_rank, self.by_nodes
            )
        if self.has_sides:
            like = BatchSignature(*known[:, 0, num_experts + 1 : width].max(axis=0).tolist())
            top_k, (none_0D, _, _) = like.top_k, like.nothing(expert_TK.device)
        route = self.routed(by_key_N, rows_CPFE, cut, top_k, ahead)
        return replace(route, none_0D=none_0D, deduplicated=deduplicated)

    def _ahead(self, by_key_N: Tensor, cut: Cut, top_k: int, x_TD: Tensor | None) -> Ahead | None:
        """What needs no counts, where rows are sent in the order of their keys."""
        may_differ = self._may_drop or self.counts_pairs or self.revise is not None
        if may_differ or not self._sorts_by_place:
            return None
        token_N = tokens_of(by_key_N, top_k)
        if not self.packs or x_TD is None:
            return Ahead(token_N, {})
        return Ahead(
            token_N, {ChunkRange(0, cut.num_chunks): x_TD.detach().index_select(0, token_N)}
        )

    def _reported(self, x_TD: Tensor | None, top_k: int) -> tuple[int, ...]:
        if not self.has_sides:
            return (self.kind(),)
        return self.kind(), *(BatchSignature() if x_TD is None else BatchSignature.of(x_TD, top_k))

    def _signature(self, expert_TK: Tensor, x_TD: Tensor | None) -> BatchSignature:
        """What rows are like that come padded: asked in the first pass of a kind, in which the host
        waits. Raises ValueError where they have become otherwise."""
        assert self.padding is not None
        signatures, device = self.padding.signatures, expert_TK.device
        kind, *own = self._reported(x_TD, expert_TK.shape[1])
        casts = torch.is_autocast_enabled(device.type)
        asked = kind, casts, torch.get_autocast_dtype(device.type)
        if asked not in signatures:
            own_1X = on_device(np.array([[kind, *own]], np.int32), device)
            gathered = counts_to_host(all_gather_counts(own_1X, self.group), self.group)
            known_CX = gathered.ready().numpy()[:, 0]
            check_kinds(known_CX[:, 0])
            signatures[asked] = BatchSignature(*known_CX[:, 1:].max(axis=0).tolist())
        known = signatures[asked]
        if x_TD is not None and known != BatchSignature(*own):
            raise ValueError(
                f"tokens of an MoE layer are {BatchSignature(*own)}, but were {known} in its first "
                "pass, which ranks without tokens go by under a static capacity; keep them alike, "
                "or leave the static capacity out"
            )
        return known

    @cached_property
    def _place_E(self) -> np.ndarray | None:
        """Where the rows of each expert lie among all that this rank sends, by holder and slot;
        None where that is their own order, or is known only when rows have been counted."""
        here, ep_rank = self._near(self.destination)
        order_N = here.by_holder_N
        if order_N is None or self.revise is not None:
            return None
        pair_E = None if here.is_single else pair_of(self.destination.share, here, ep_rank)
        if not here.is_single and pair_E is None:
            return None
        place_N = np.empty_like(order_N)
        place_N[order_N] = np.arange(order_N.size)
        return place_N if pair_E is None else place_N[pair_E]

    @cached_property
    def _sorts_by_place(self) -> bool:
        """Whether keys that are sorted are in the order in which rows are sent."""
        here, _ = self._near(self.destination)
        return here.by_holder_N is None or self._place_E is not None

    def _near(self, destination: Destination) -> tuple[Placement, int]:
        """Who holds what, of the EP ranks that exchange rows, and this one's number there: where no
        row leaves its EP rank, it is as if there were no other."""
        target, ep_rank = destination.target, self.coordinates.ep_rank
        return (target.alone(ep_rank), 0) if destination.all_stay else (target, ep_rank)

    def _places_of_keys(
        self, place_E: np.ndarray, cut: Cut, width: int, device: torch.device
    ) -> Tensor:
        """Chunk and place of each key of ``keys_of`` as one number, int64 ``[F * W + 1]``, once a
        plan; the last is for what was dropped."""
        made, num_chunks = (cut.num_chunks, width, device), cut.num_chunks
        if made not in self._places:
            stride = self.destination.target.flat_N.size
            place_FW1 = np.zeros(num_chunks * width + 1, dtype=np.int64)
            place_FW = place_FW1[:-1].reshape(num_chunks, width)
            place_FW[:, : place_E.size] = place_E
            if num_chunks > 1:
                place_FW += stride * np.arange(num_chunks)[:, None]
            place_FW1[-1] = num_chunks * stride
            self._places[made] = on_device(place_FW1, device)
        return self._places[made]

    def routed(
        self,
        by_key_N: Tensor,
        rows_CPFE: np.ndarray,
        cut: Cut,
        top_k: int,
        ahead: Ahead | None = None,
    ) -> LayerRoute:
        """The route, once the rows of every rank are known.

        Args:
            by_key_N: this rank's choices by chunk and expert, or place where that is known (see
                ``_place_E``), the dropped ones last.
            rows_CPFE: of every rank, on the host.
            cut: of this rank's tokens.
            top_k: choices ``K`` a token.
            ahead: what was worked out before.
        """
        etp_rank = self.coordinates.etp_rank
        is_whole = rows_CPFE.shape[1] == rows_CPFE.shape[2] == 1
        rows_CE = rows_CPFE[:, 0, 0] if is_whole else in_32_bits(rows_CPFE.sum(axis=(1, 2)))
        destination = self.destination if self.revise is None else self.revise(rows_CE)
        target, share = destination.target, destination.share.of_rows(rows_CE)
        if share is not destination.share:
            destination = Destination(target, share)
        self.on_rows(rows_CE, top_k, destination)
        here, ep_rank = self._near(destination)
        has_moves = here.by_holder_N is not None and self._place_E is None
        near_CPFE = rows_CPFE if here is target else rows_CPFE[self.coordinates.ep_rank][None]
        rows = split(share, here, ep_rank, near_CPFE, etp_rank, has_moves=has_moves)
        if self._may_drop:
            by_key_N = by_key_N[: int(rows.sent_FC.sum())]
        return LayerRoute(
            cut=cut,
            target=target,
            top_k=top_k,
            by_key_N=by_key_N,
            rows=rows,
            etp_rank=etp_rank,
            count_between=partial(_rows_between, share, rows_CPFE, etp_rank),
            ahead=ahead,
            num_firsts=here.num_firsts_of(ep_rank),
        )


def _rows_between(share: Share, rows_CPFE: np.ndarray, etp_rank: int) -> np.ndarray:
    """Rows of each chunk from each EP rank to each, int64 ``[F, C, C]``, of the ranks of a place.
    Each rank of an ETP group divides its own rows, as if they were chunks of the EP rank's."""
    num_ep_ranks, _, num_chunks, num_experts = rows_CPFE.shape
    own = slice(etp_rank * num_chunks, (etp_rank + 1) * num_chunks)
    return share.rows_between(rows_CPFE.reshape(num_ep_ranks, -1, num_experts))[own]


# Static capacity: every rank sends as many rows to each expert in every pass, padded with zeros.

WHOLE = ChunkRange(0, 1)


@dataclass(frozen=True, eq=False)
class Padding:
    """Of one layer on one rank."""

    capacity: int  # rows that each rank sends to each expert
    target: Placement  # where experts compute; one holder each
    coordinates: RankCoordinates  # this rank's
    by_masks: bool = False  # rows are put in place by products with a mask, and not by an index
    senders: Collection[int] | None = None  # the EP ranks that have tokens; None: all
    # what rows are like, for ranks without any, by the kind of pass and its autocast
    signatures: dict[tuple[Any, ...], BatchSignature] = field(default_factory=dict)
    _first_row: dict[torch.device, Tensor] = field(default_factory=dict)
    _sortings: dict[torch.device, SlotSorting] = field(default_factory=dict)

    def route(self, expert_TK: Tensor) -> tuple[LayerRoute, SlotRows]:
        """The route of a pass, and this rank's rows that travel, by expert. The host does not wait.

        Args:
            expert_TK: chosen experts, -1 where none is; of an expert's rows over the capacity the
                last in GShard's order are dropped.
        """
        (num_tokens, top_k), device = expert_TK.shape, expert_TK.device
        num_rows, num_choices = int(self._rows.sent_FC.sum()), expert_TK.numel()
        # Choice-major, GShard's priority: first choices of all tokens before second ones.
        expert_N, by_expert_N = expert_TK.T.flatten().sort(stable=True)
        expert_E1 = numbers(self.target.num_experts + 1, device)
        first_E1 = torch.searchsorted(expert_N, expert_E1)
        first_row_E = self._first_row_E(device)
        nth_N = numbers(num_choices, device) - first_E1.index_select(0, expert_N.clamp(min=0))
        row_N = first_row_E[expert_N] + nth_N
        # Those without an expert come before the first one.
        row_N = row_N.where((nth_N < self.capacity) & (nth_N >= 0), num_rows)
        choice_of_N = _choices(num_tokens, top_k, device).index_select(0, by_expert_N)
        choice_N = row_N.new_full((num_rows + 1,), num_choices)
        choice_N.scatter_(0, row_N, choice_of_N)
        choice_N = choice_N[:-1]
        padded_row_N = torch.empty_like(row_N).scatter_(0, choice_of_N, row_N)
        end_E = first_E1.diff().clamp(max=self.capacity).cumsum(dim=0)
        sorting, rows = self._sorting(device), self._rows
        kind = OneHotRoute if self.by_masks else Route
        route = kind(
            choice_N=choice_N,
            token_N=choice_N // top_k,
            splits=Splits.of(rows.sent_FC[0].tolist(), rows.received_FC[0].tolist()),
            sorting=sorting,
            slots=sorting.slots,
            num_tokens=num_tokens,
            top_k=top_k,
            padded_row_N=padded_row_N,
        )
        layer_route = LayerRoute(
            cut=Cut.equal(num_tokens, 1),
            target=self.target,
            top_k=top_k,
            by_key_N=choice_N,
            rows=rows,
            etp_rank=self.coordinates.etp_rank,
            count_between=lambda: self._between_CC[None],
            _routes={WHOLE: route},
        )
        return layer_route, SlotRows.ending(end_E, num_rows)

    @cached_property
    def _rows(self) -> RowSplits:
        ep_rank, capacity_C11 = self.coordinates.ep_rank, self._capacity_C[:, None, None]
        num_slots, between_CC = len(self.target.experts_of(ep_rank)), self._between_CC
        received_PC1S = np.tile(capacity_C11, (self.coordinates.etp_size, 1, 1, num_slots))
        return RowSplits(between_CC[ep_rank][None], between_CC[:, ep_rank][None], received_PC1S)

    @property
    def _between_CC(self) -> np.ndarray:
        """Rows from each EP rank to each, int64."""
        return np.outer(self._capacity_C, np.diff(self.target.held_C1))

    @cached_property
    def _capacity_C(self) -> np.ndarray:
        """Rows that each EP rank sends to each expert, int64."""
        has_tokens = [
            self.senders is None or c in self.senders for c in range(self.target.num_ep_ranks)
        ]
        return self.capacity * np.array(has_tokens, dtype=np.int64)

    def _first_row_E(self, device: torch.device) -> Tensor:
        """Where each expert's rows begin in send order, int64 ``[E]``; made once."""
        if device not in self._first_row:
            by_ep_rank = map(self.target.experts_of, range(self.target.num_ep_ranks))
            first_E = np.empty(self.target.num_experts, dtype=np.int64)
            first_E[np.concatenate([*by_ep_rank])] = np.arange(len(first_E)) * self.capacity
            with torch.inference_mode(False):
                self._first_row[device] = on_device(first_E, device)
        return self._first_row[device]

    def _sorting(self, device: torch.device) -> SlotSorting:
        """Rows that arrived, to their slots and back: the same in every pass, made once."""
        if device not in self._sortings:
            received_CS = self._rows.received_PCFS[self.coordinates.etp_rank, :, 0]
            with torch.inference_mode(False):
                sorting = self._sortings[device] = SlotSorting.of(received_CS, device)
                _ = sorting.slots.end_S  # made now, not in the mode of the first pass
        return self._sortings[device]


@remembered(4)  # batches are often alike
def _choices(num_tokens: int, top_k: int, device: torch.device) -> Tensor:
    """Of choices in choice-major order their places in ``[T, K]``, int64 ``[T * K]``."""
    return torch.arange(num_tokens * top_k, device=device).view(num_tokens, top_k).T.flatten()


@dataclass(frozen=True, eq=False)
class OneHotRoute(Route):
    """GShard's order: tokens are brought to their experts' buffers, and back, by products with a
    mask. The same rows in the same places as by an index (Tutel's way, ``Route``), for as many
    products as the mask has elements times the width (Lepikhin et al. 2021, Algorithm 2; FSMoE
    section 3.1). A row that is not finite makes all of a product so."""

    @cached_property
    def mask_NT(self) -> Tensor:
        """Which token each row is of, bool ``[N, T]``; padding is of none."""
        return one_hot(self.token_N, self.num_tokens + 1)[:, :-1].bool()

    @property
    def is_indexed(self) -> bool:
        return False

    def of_tokens(self, x_TD: Tensor) -> Tensor:
        return self.mask_NT.to(x_TD.dtype) @ x_TD

    def sum_by_token(self, rows_ND: Tensor, weight_TK: Tensor | None = None) -> Tensor:
        if weight_TK is None:
            return self.mask_NT.to(rows_ND.dtype).T @ rows_ND
        dtype = torch.promote_types(rows_ND.dtype, weight_TK.dtype)
        weight_NT = self.mask_NT * self.of_choices(weight_TK.to(dtype))[:, None]
        return (weight_NT.T @ rows_ND.to(dtype)).to(rows_ND.dtype)
