# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine: rows to the EP ranks of their experts and back, each the other's adjoint.

A ``Wire`` is one direction: its communicator, and the way that rows take on it, straight or by a
carrier. Where each token's row is sent once to an EP rank, other stages take the place of the
common ones. Last stands DeepEP as a carrier. Shape letters: T tokens, N rows sent, R rows received,
U pairs sent, P ranks that exchange rows, W numbers of a row.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.core.all_to_all import (
    Carrier,
    Channel,
    Planner,
    Relays,
    RowTransfer,
    by_leaders,
    by_places,
)
from ds_moe_ext.core.comm import AllToAll, all_to_all_by_pairs, all_to_all_rows
from ds_moe_ext.core.layout import BETWEEN_NODES, WITHIN_NODES, ParallelLayout, Reach
from ds_moe_ext.core.rows import on_device
from ds_moe_ext.moe.codecs import Coding
from ds_moe_ext.moe.route import LayerRoute
from ds_moe_ext.planning.exchange_costs import Way
from ds_moe_ext.schedule.stages import Done, Saved, SavesAlike, Stage
from ds_moe_ext.schedule.task import ChunkRange, Stream

Travel = Callable[[Tensor], Tensor]  # rows as they leave, to rows as they arrive

PLANNERS: Mapping[Way, Planner] = {Way.BY_LEADERS: by_leaders, Way.BY_PLACES: by_places}
"""Of ``BY_NODES``."""


def carrier_of(layout: ParallelLayout, stream: Stream, way: Way, direct: Channel) -> Carrier | None:
    """This rank's part in a way between the EP ranks; None where that is the direct one."""
    if way is Way.DEEP_EP:
        return DeepEp.of(direct.group)
    if way not in PLANNERS or layout.why_flat:
        return None
    channels = {
        Reach.WITHIN: Channel(layout.group(WITHIN_NODES, stream)),
        Reach.BETWEEN: replace(direct, group=layout.group(BETWEEN_NODES, stream)),
    }
    return Relays(PLANNERS[way], layout.nodes, layout.index("ep"), channels)


@dataclass(frozen=True)
class Wire:
    """The communicator and the algorithm of one direction."""

    # the EP ranks, in a communicator that only this stream uses; None where there is one EP rank
    group: dist.ProcessGroup | None
    all_to_all: AllToAll = all_to_all_rows  # how rows are exchanged
    # what they travel as; None: as they are. Where nothing travels nothing is encoded.
    coding: Coding | None = None
    # how they go another way than straight from each EP rank to each; None: so
    carrier: Carrier | None = None
    # within and between the nodes, where a token's row goes once to a node
    node_channels: Mapping[Reach, Channel] | None = None

    @classmethod
    def between(
        cls, layout: ParallelLayout, stream: Stream, device: torch.device, way: Way = Way.DIRECT
    ) -> Wire:
        """The wire of a stream between the EP ranks."""
        if layout.grid.num_ep_ranks == 1:
            return cls(None)
        by_pairs = layout.num_hosts > 1 and device.type == "cpu"
        all_to_all = all_to_all_by_pairs if by_pairs else all_to_all_rows
        direct = Channel(layout.group("ep", stream), all_to_all)
        return cls(direct.group, all_to_all, carrier=carrier_of(layout, stream, way, direct))

    def by_nodes(self) -> Wire:
        """The same wire, on which a row travels once to a node."""
        assert isinstance(self.carrier, Relays)
        return replace(self, carrier=None, node_channels=self.carrier.channels)

    def through(self, coding: Coding | None) -> Wire:
        """The same wire, on which rows travel encoded."""
        return replace(self, coding=coding)

    def out(self, rows_ND: Tensor, chunk_range: ChunkRange, layer_route: LayerRoute) -> Tensor:
        """Rows ``[N, D]`` in send order to ``[R, D]`` in slot order at their experts."""
        arrived_RD = rows_ND
        if not (splits := layer_route.splits(chunk_range)).stays:
            travel = self._straight(splits.sent_C, splits.received_C)
            if travel is None:
                travel = self._transfer(chunk_range, layer_route).out
            arrived_RD = self._coded(travel, rows_ND)
        return layer_route.on(chunk_range).to_slots(arrived_RD)

    def take_back(
        self,
        rows_RD: Tensor,
        chunk_range: ChunkRange,
        layer_route: LayerRoute,
        weight_R: Tensor | None = None,
    ) -> Tensor:
        """Rows ``[R, D]`` in slot order back to ``[N, D]`` in send order at their tokens.

        Args:
            weight_R: of rows that are added up before they travel.
        """
        splits = layer_route.splits(chunk_range)
        rows_RD = layer_route.on(chunk_range).to_arrival(rows_RD, weight_R)
        if splits.stays:
            return rows_RD
        travel = self._straight(splits.received_C, splits.sent_C)
        if travel is None:
            travel = self._transfer(chunk_range, layer_route).take_back
        return self._coded(travel, rows_RD)

    def _straight(self, sent_C: Sequence[int], received_C: Sequence[int]) -> Travel | None:
        """From each EP rank to each; None where rows go another way."""
        group = self.group
        if self.carrier is not None or self.node_channels is not None:
            return None
        assert group is not None, "with one EP rank nothing is exchanged"
        return lambda rows: self.all_to_all(rows, sent_C, received_C, group)

    def _transfer(self, chunk_range: ChunkRange, layer_route: LayerRoute) -> RowTransfer:
        if self.node_channels is not None:
            return layer_route.node_transfer(chunk_range, self.node_channels)
        assert self.carrier is not None
        return layer_route.transfer(chunk_range, self.carrier)

    def _coded(self, travel: Travel, rows: Tensor) -> Tensor:
        return travel(rows) if self.coding is None else self.coding.around(travel, rows)


@dataclass(frozen=True)
class Dispatch(SavesAlike):
    """Reads x ``[T, D]`` and the route; writes the rows that arrived, ``[R, D]`` in slot order."""

    wire: Wire  # there
    back_wire: Wire  # of the stream in which gradients return
    sent: Callable[[], None] = lambda: None  # called when all rows of a pass are sent

    def forward(self, chunk_range: ChunkRange, x_TD: Tensor, layer_route: LayerRoute) -> Done:
        sent_ND = layer_route.sent_rows(chunk_range, x_TD.detach())
        arrived_RD = self.wire.out(sent_ND, chunk_range, layer_route)
        if chunk_range.stop == layer_route.cut.num_chunks:
            self.sent()
        return (arrived_RD,), (layer_route,)

    def backward(self, chunk_range: ChunkRange, saved: Saved, grad_RD: Tensor) -> tuple[Any, ...]:
        returned_ND = self.back_wire.take_back(grad_RD, chunk_range, saved[0])
        return (saved[0].on(chunk_range).sum_by_token(returned_ND),)


@dataclass(frozen=True)
class Combine(SavesAlike):
    """Reads expert outputs ``[R, D]`` in slot order and the route; writes ``[N, D]``."""

    wire: Wire
    back_wire: Wire

    def forward(
        self, chunk_range: ChunkRange, computed_RD: Tensor, layer_route: LayerRoute
    ) -> Done:
        returned_ND = self.wire.take_back(computed_RD.detach(), chunk_range, layer_route)
        return (returned_ND,), (layer_route,)

    def backward(self, chunk_range: ChunkRange, saved: Saved, grad_ND: Tensor) -> tuple[Any, ...]:
        return (self.back_wire.out(grad_ND, chunk_range, saved[0]),)


# Each token's row is sent once to an EP rank: stages that take the place of the common ones.


@dataclass(frozen=True)
class OrderOnce(SavesAlike):
    """Reads expert ids and scores ``[T, K]``; writes the route, and the scores of the rows at this
    EP rank's experts, ``[R]`` in slot order."""

    order: Stage  # the common stage, set to count pairs
    wire: Wire  # straight from each EP rank to each, with rows as they are
    back_wire: Wire  # of the stream in which gradients return

    def forward(
        self,
        chunk_range: ChunkRange,
        expert_TK: Tensor,
        score_TK: Tensor,
        x_TD: Tensor | None = None,
    ) -> Done:
        """Hidden states as of ``Order``: only they say there what ranks without tokens expect."""
        (counted,), _ = self.order.forward(chunk_range, expert_TK, x_TD)
        dtype = score_TK.dtype
        if counted.none_0D is not None:
            score_TK = score_TK.to(torch.promote_types(counted.none_0D.dtype, torch.float32))
        parts = counted.deduplicated.number_TK(), score_TK.detach()
        reported_XB = torch.cat([_bytes(part) for part in parts], dim=1)
        reported_NB = reported_XB.index_select(0, counted.on(chunk_range).choice_N)
        reported_RB = self.wire.out(reported_NB, chunk_range, counted)
        sizes = [part.itemsize for part in parts]
        pair_R, score_R = map(_of_bytes, reported_RB.split(sizes, dim=1), parts)
        return (counted.reported(pair_R), score_R), (counted, dtype)

    def backward(self, chunk_range: ChunkRange, saved: Saved, grad_R: Tensor) -> tuple[Any, ...]:
        counted, dtype = saved
        grad_N1 = self.back_wire.take_back(grad_R[:, None], chunk_range, counted)
        return (counted.on(chunk_range).spread(grad_N1).squeeze(2).to(dtype),)


def _bytes(values: Tensor) -> Tensor:
    """uint8 ``[elements, bytes of each]``."""
    return values.contiguous().view(-1, 1).view(torch.uint8)


def _of_bytes(bytes_RB: Tensor, like: Tensor) -> Tensor:
    """What ``_bytes`` was made of, ``[R]``."""
    # A replica: a view of a part need not begin where a wider type may.
    own_RB = bytes_RB.clone(memory_format=torch.contiguous_format)
    return own_RB.view(like.dtype).squeeze(1)


@dataclass(frozen=True)
class CombineOnce:
    """Reads expert outputs ``[R, D]`` in slot order, the scores of the layer's rows, and the route;
    writes the weighed sum of each pair, ``[U, D]`` in send order."""

    wire: Wire
    back_wire: Wire

    def forward(
        self, chunk_range: ChunkRange, computed_RD: Tensor, score_R: Tensor, layer_route: LayerRoute
    ) -> Done:
        computed_RD, score_R = computed_RD.detach(), score_R.detach()
        own_R = layer_route.of_chunk_range(chunk_range, score_R)
        returned_UD = self.wire.take_back(computed_RD, chunk_range, layer_route, own_R)
        return (returned_UD,), (computed_RD, score_R, layer_route)

    def backward(
        self, chunk_range: ChunkRange, saved: Saved, grad_UD: Tensor
    ) -> tuple[Tensor, Tensor]:
        computed_RD, score_R, layer_route = saved
        grad_RD = self.back_wire.out(grad_UD, chunk_range, layer_route)
        grad_score_R = torch.sum(computed_RD * grad_RD, dim=1, dtype=score_R.dtype)
        # In place: the product is rounded once, and never there in the scores' precision.
        grad_RD *= layer_route.of_chunk_range(chunk_range, score_R)[:, None]
        return grad_RD, layer_route.among_all(chunk_range, grad_score_R)

    def recut(self, chunk_range: ChunkRange, pieces: Sequence[tuple[ChunkRange, Saved]]) -> Saved:
        _, score_R, layer_route = pieces[0][1]
        computed = [(other, saved[0]) for other, saved in pieces]
        return layer_route.own_rows_of(chunk_range, computed), score_R, layer_route


@dataclass(frozen=True)
class RestoreOnce(SavesAlike):
    """Add the pairs' sums, which came weighed, to their tokens: ``[U, D]`` to ``[T, D]``."""

    def forward(
        self, chunk_range: ChunkRange, returned_UD: Tensor, layer_route: LayerRoute
    ) -> Done:
        return (layer_route.on(chunk_range).sum_by_token(returned_UD.detach()),), (layer_route,)

    def backward(self, chunk_range: ChunkRange, saved: Saved, grad_TD: Tensor) -> tuple[Any, ...]:
        return (saved[0].on(chunk_range).of_tokens(grad_TD),)


# Rows between EP ranks by DeepEP, where that is installed: its legacy ``Buffer`` as a carrier.
# Written against deep_ep 2.1.0 (``deep_ep/buffers/legacy.py`` and ``docs/legacy.md`` of
# deepseek-ai/DeepEP at dd758ca) and never run with it. Each row is to DeepEP a token of one choice,
# and each rank has one expert.

PACKAGE = "deep_ep"
NODE_SIZE = 8  # LEGACY_NUM_MAX_NVL_PEERS: where there are more ranks, each eight share a node
NUM_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)  # that it has settings for
ROW_ALIGNMENT = 16  # bytes

MakeBuffer = Callable[[torch.device, int], Any]
"""``(device, bytes of a row) -> deep_ep.Buffer``, the same one every time. Collective."""


def why_not(layout: ParallelLayout, device: torch.device) -> str:
    """Why DeepEP cannot carry the rows of a layout; empty if it can."""
    node_P = layout.node_of_ep_ranks
    eights_P = np.arange(node_P.size) // NODE_SIZE
    if device.type != "cuda":
        return f"tokens are on {device.type}, but DeepEP needs CUDA"
    if importlib.util.find_spec(PACKAGE) is None:
        return f"the package {PACKAGE} is not installed"
    if its("Buffer") is None:
        return f"this version of {PACKAGE} has no Buffer; install 2.1 or an earlier one"
    if node_P.size not in NUM_RANKS:
        known = ", ".join(map(str, NUM_RANKS))
        return f"{node_P.size} EP ranks exchange tokens, but DeepEP has settings for {known}"
    if not np.array_equal(np.unique(node_P, return_inverse=True)[1], eights_P):
        return (
            f"DeepEP needs up to {NODE_SIZE} EP ranks on one node, or {NODE_SIZE} on each, in turn"
        )
    return ""


def its(name: str) -> Any:
    """What the installed package has by a name; None if nothing."""
    try:
        return pkgutil.resolve_name(f"{PACKAGE}:{name}")
    except AttributeError:
        return None


@dataclass(frozen=True, eq=False)
class DeepEp:
    """A ``Carrier`` by DeepEP."""

    make_buffer: MakeBuffer  # what moves rows
    rank: int  # this one's number among those that exchange rows

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> DeepEp:
        return cls(partial(buffer_of, group), group.rank())

    def transfer(self, counts_PP: np.ndarray, device: torch.device) -> DeepEpTransfer:
        sent_P = counts_PP[self.rank]
        receiver_N = np.repeat(np.arange(sent_P.size), sent_P)
        num_received = int(counts_PP[:, self.rank].sum())
        return DeepEpTransfer(
            self.make_buffer, on_device(receiver_N, device), sent_P.size, num_received
        )


@dataclass(frozen=True, eq=False)
class DeepEpTransfer:
    """A ``RowTransfer`` by DeepEP: there is its dispatch, back its combine, which copies single
    rows."""

    make_buffer: MakeBuffer  # what moves rows
    receiver_N: Tensor  # rank that each row goes to, int64
    num_ranks: int  # ranks that exchange rows
    num_received: int  # rows that arrive here
    _handle: list[tuple[Any, ...]] = field(default_factory=list)  # of the first dispatch

    def out(self, rows_N: Tensor) -> Tensor:
        buffer = self._buffer_for(rows_N)
        if self._handle:
            arrived_R, *_ = buffer.dispatch(rows_N.contiguous(), handle=self._handle[0])
        else:
            sent_N = rows_N.contiguous()
            arrived_R, handle = dispatched(buffer, sent_N, self.receiver_N, self.num_ranks)
            self._handle.append(handle)
        if arrived_R.shape[0] != self.num_received:
            raise RuntimeError(
                f"DeepEP brought {arrived_R.shape[0]} tokens, but {self.num_received} were "
                "expected; choose another all_to_all"
            )
        rows_R: Tensor = arrived_R
        return rows_R

    def take_back(self, rows_R: Tensor) -> Tensor:
        rows_N: Tensor
        rows_N, *_ = self._buffer_for(rows_R).combine(rows_R.contiguous(), self._handle[0])
        return rows_N

    def tensors(self) -> tuple[Tensor, ...]:
        handles = (part for handle in self._handle for part in handle)
        return (self.receiver_N, *(part for part in handles if isinstance(part, Tensor)))

    def _buffer_for(self, rows: Tensor) -> Any:
        row_bytes = rows.element_size() * rows.shape[-1]
        if rows.dtype != torch.bfloat16 or rows.dim() != 2 or row_bytes % ROW_ALIGNMENT:
            raise ValueError(
                f"rows are {rows.dtype} of shape {tuple(rows.shape)}, but DeepEP carries bfloat16 "
                f"of a multiple of {ROW_ALIGNMENT} bytes a row; choose another all_to_all, or "
                "train in bfloat16"
            )
        return self.make_buffer(rows.device, row_bytes)


def dispatched(
    buffer: Any, rows_N: Tensor, receiver_N: Tensor, num_ranks: int
) -> tuple[Tensor, tuple[Any, ...]]:
    """A first dispatch: the rows that arrived, and the handle for all that follow."""
    choice_N1 = receiver_N[:, None].to(index_type()).contiguous()
    per_rank, per_node, per_expert, goes_NP, _ = buffer.get_dispatch_layout(choice_N1, num_ranks)
    arrived_R, _, _, _, handle, _ = buffer.dispatch(
        rows_N,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=goes_NP,
        num_tokens_per_expert=per_expert,
    )
    return arrived_R, handle


def index_type() -> torch.dtype:
    """Of the choices of tokens; older versions have one only."""
    found: torch.dtype = its("topk_idx_t") or torch.int64
    return found


@lru_cache(maxsize=4)
def buffer_of(group: dist.ProcessGroup, device: torch.device, row_bytes: int) -> Any:
    """A buffer for rows of a width, shared by all layers. Collective."""
    buffer_class = its("Buffer")
    num_ranks = group.size()
    configs = [
        config_of(num_ranks)
        for config_of in (buffer_class.get_dispatch_config, buffer_class.get_combine_config)
    ]
    buffer = buffer_class(
        group,
        max(config.get_nvl_buffer_size_hint(row_bytes, num_ranks) for config in configs),
        max(config.get_rdma_buffer_size_hint(row_bytes, num_ranks) for config in configs),
    )
    check_order(buffer, group.rank(), num_ranks, row_bytes, device)
    return buffer


TRIED = 64  # rows for each rank: more than DeepEP has channels, and whole in bfloat16


def check_order(
    buffer: Any, rank: int, num_ranks: int, row_bytes: int, device: torch.device
) -> None:
    """Send numbered rows, and see in which order they arrive. Collective; see ``buffer_of``."""
    receiver_N = torch.arange(num_ranks, device=device).repeat_interleave(TRIED)
    rows_NW = torch.zeros(num_ranks * TRIED, row_bytes // 2, dtype=torch.bfloat16, device=device)
    rows_NW[:, 0] = rank
    rows_NW[:, 1] = torch.arange(TRIED, device=device).repeat(num_ranks)
    arrived_RW, _ = dispatched(buffer, rows_NW, receiver_N, num_ranks)
    wanted_RW = torch.stack((receiver_N.to(rows_NW), rows_NW[:, 1]), dim=1)
    if not torch.equal(arrived_RW[:, :2], wanted_RW):
        raise RuntimeError("DeepEP changes the order of tokens; choose another all_to_all")
