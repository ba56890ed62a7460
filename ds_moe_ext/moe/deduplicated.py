# SPDX-License-Identifier: Apache-2.0
"""Pairs: a token's row goes once to each EP rank that has some of its experts.

A *pair* is one (token, EP rank) pair: the row that travels for all choices of the token there.
Which pair each row at the experts is of is sent to that EP rank; the rest is index work, on the
device. By way of the nodes one row goes to each node, to the EP rank of the sender's own place
there, which hands it on. Shape letters: T tokens, K choices a token, F finest chunks, C EP ranks, V
nodes, G EP ranks of a node, X EP ranks and then nodes, U pairs that leave this rank, R rows at the
experts, J groups, D model width; of a node's transfer, H pairs of its node that come to this EP
rank, to be handed on, and W pairs of this EP rank that arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext.core.all_to_all import Channel
from ds_moe_ext.core.layout import Nodes, Reach
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.rows import block_index, on_device, starts_of, sums_of_groups
from ds_moe_ext.schedule.task import ChunkRange, Cut


@dataclass(frozen=True, eq=False)
class ByNodes:
    """The way by the nodes, of an EP rank: its rows go over to the EP ranks of its own place, and
    from there on within the node."""

    nodes: Nodes  # of the EP ranks
    ep_rank: int  # which
    _on: dict[torch.device, Tensor] = field(default_factory=dict)

    @cached_property
    def _seat(self) -> tuple[int, int]:
        return self.nodes.find(self.ep_rank)

    @cached_property
    def ep_rank_VG(self) -> np.ndarray:
        """The EP ranks by node and place, nodes in the order of the EP ranks of one's own place."""
        _, place = self._seat
        ranks_VG = self.nodes.ranks_VG
        return ranks_VG[np.argsort(ranks_VG[:, place])]

    def on(self, device: torch.device) -> Tensor:
        """``ep_rank_VG``, flat, int64; made once."""
        if device not in self._on:
            self._on[device] = on_device(self.ep_rank_VG.ravel(), device)
        return self._on[device]

    @cached_property
    def sender_C(self) -> np.ndarray:
        """The EP ranks in the order in which their pairs arrive: place by place."""
        return np.sort(self.nodes.ranks_VG, axis=0).ravel(order="F")

    def numbers(self, num_CX: np.ndarray) -> tuple[np.ndarray, ...]:
        """Pairs as in ``NodeTransfer``, of those from each EP rank to each, and then to each node
        as its own place has these in order."""
        _, place = self._seat
        num_ep_ranks, relay_V = len(num_CX), self.ep_rank_VG[:, place]
        here = int(np.flatnonzero(relay_V == self.ep_rank)[0])
        return (
            num_CX[self.ep_rank, num_ep_ranks:],
            num_CX[relay_V, num_ep_ranks + here],
            num_CX[np.ix_(relay_V, self.ep_rank_VG[here])].sum(axis=0),
            num_CX[self.ep_rank_VG, self.ep_rank].sum(axis=0),
        )


class Goals(NamedTuple):
    """Where the tokens of a rank go; known before the ranks have counted."""

    ep_rank_TK: Tensor  # EP rank of each choice, int64; ``C`` of those that were dropped
    # whether a token has a choice in an EP rank; one column more, of those that were dropped
    goes_TC1: Tensor
    # the same by node and place, nodes in the order in which one's own place sends to them; None
    # where no row goes by the nodes
    goes_TVG: Tensor | None

    @classmethod
    def of(cls, expert_TK: Tensor, target: Placement, by_nodes: ByNodes | None = None) -> Goals:
        """Of chosen experts, -1 where there is none, with one holder each."""
        device = expert_TK.device
        ep_rank_TK = _ep_rank_E1(target, device)[expert_TK]
        shape = len(expert_TK), target.num_ep_ranks + 1
        goes_TC1 = torch.zeros(shape, dtype=torch.bool, device=device).scatter_(1, ep_rank_TK, 1)
        if by_nodes is None:
            return cls(ep_rank_TK, goes_TC1, None)
        goes_TVG = goes_TC1.index_select(1, by_nodes.on(device))
        return cls(ep_rank_TK, goes_TC1, goes_TVG.view(-1, *by_nodes.ep_rank_VG.shape))

    def by_chunk(self, cut: Cut) -> Tensor:
        """Pairs of each chunk to each EP rank, and node if rows go there, int64 ``[F, X]``."""
        goes_TX = self.goes_TC1[:, :-1]
        if self.goes_TVG is not None:
            goes_TX = torch.cat((goes_TX, self.goes_TVG.any(dim=2)), dim=1)
        if cut.num_chunks == 1:
            return goes_TX.sum(dim=0, keepdim=True)
        lengths = np.diff(np.asarray(cut.bounds)).tolist()
        return torch.stack([part.sum(dim=0) for part in goes_TX.split(lengths)])


@lru_cache(maxsize=1024)  # a placement a layer
def _ep_rank_E1(target: Placement, device: torch.device) -> Tensor:
    """The EP rank of each expert, and of no expert ``C``, which -1 finds."""
    return on_device(np.append(target.owner_E, target.num_ep_ranks), device)


class Groups(NamedTuple):
    """Rows that are added up: in the order in which they are listed, so that the bits are always
    the same."""

    row_N: Tensor  # rows of the first group, of the second, and so on, int64
    start_J: Tensor  # where each group begins, int64

    @classmethod
    def of(cls, group_N: Tensor, num_groups: int) -> Groups:
        group_N, row_N = group_N.sort(stable=True)
        number_J = torch.arange(num_groups, dtype=group_N.dtype, device=group_N.device)
        return cls(row_N, torch.searchsorted(group_N, number_J))

    def sums(self, rows_ND: Tensor, weight_N: Tensor | None = None) -> Tensor:
        """The sum of each group, ``[J, D]``; zeros of an empty one.

        Args:
            rows_ND: all rows.
            weight_N: of each; sums are then in the wider type of both, and rounded once.
        """
        if not rows_ND.shape[0]:
            return rows_ND.new_zeros(len(self.start_J), rows_ND.shape[1])
        wide_ND = rows_ND
        if weight_N is not None:
            dtype = torch.promote_types(rows_ND.dtype, weight_N.dtype)
            wide_ND, weight_N = rows_ND.to(dtype), weight_N.to(dtype).index_select(0, self.row_N)
        sum_JD = sums_of_groups(wide_ND, self.row_N, self.start_J, weight_N)
        return sum_JD.to(rows_ND.dtype)


@dataclass(frozen=True, eq=False)
class Leaving:
    """Pairs that leave: goal by goal, which are EP ranks or nodes, and there token by token."""

    goes_TC: Tensor  # whether a token goes to a goal
    num_pairs: int  # in all

    @cached_property
    def place_U(self) -> Tensor:
        """Where each pair is in the flattened ``[C, T]``, int32."""
        goes_N = self.goes_TC.T.flatten()
        place_N = torch.arange(goes_N.numel(), dtype=torch.int32, device=goes_N.device)
        # Numbers of pairs, from 1 on; what does not go, goes to 0.
        number_N = goes_N.cumsum(dim=0) * goes_N
        return place_N.new_empty(1 + self.num_pairs).scatter_(0, number_N, place_N)[1:]

    @cached_property
    def token_U(self) -> Tensor:
        return self.place_U % max(1, len(self.goes_TC))

    @cached_property
    def by_token(self) -> Groups:
        """Pairs token by token, in the order of goals."""
        return Groups.of(self.token_U, len(self.goes_TC))

    def tensors(self) -> list[Tensor]:
        return _tensors(self)


@dataclass(frozen=True, eq=False)
class ChunkPairs:
    """Pairs of the tokens of one chunk range."""

    leaving: Leaving  # of this rank's tokens
    sent_C: tuple[int, ...]  # pairs to each EP rank
    received_C: tuple[int, ...]  # pairs from each EP rank
    # pair of each row at the experts, in the order of arrival, int32; rows in slot order
    pair_R: Tensor

    @cached_property
    def by_pair(self) -> Groups:
        """Rows at the experts, pair by pair, in the order of slots."""
        return Groups.of(self.pair_R, sum(self.received_C))

    def tensors(self) -> list[Tensor]:
        return [*self.leaving.tensors(), *_tensors(self)]


def _tensors(record: Leaving | ChunkPairs) -> list[Tensor]:
    made = (own if isinstance(own, Groups) else (own,) for own in vars(record).values())
    return [x for own in made for x in own if isinstance(x, Tensor)]


@dataclass(frozen=True, eq=False)
class NodeTransfer:
    """A ``RowTransfer`` of pairs by way of the nodes: over to a node, on to its EP ranks, and their
    sums back."""

    channels: Mapping[Reach, Channel]  # within the nodes and between them
    goes_UG: Tensor  # to which places of its node each pair goes on, as it leaves
    # pairs to each node, to the EP rank of one's own place there; in the order of EP ranks
    over_V: tuple[int, ...]
    came_V: tuple[int, ...]  # and from each
    on_G: tuple[int, ...]  # pairs that this EP rank hands on to each of its node
    arrived_G: tuple[int, ...]  # and those that arrive from each
    _on: list[Leaving] = field(default_factory=list)  # what is handed on, once it is known

    def out(self, rows_U: Tensor) -> Tensor:
        """Rows in the order of nodes to rows in that of arrival. Collective."""
        if not self._on:
            goes_HG = self._move(Reach.BETWEEN, self.goes_UG.byte(), self.over_V, self.came_V)
            self._on.append(Leaving(goes_HG.bool(), sum(self.on_G)))
        rows_H = self._move(Reach.BETWEEN, rows_U, self.over_V, self.came_V)
        handed = rows_H.index_select(0, self._on[0].token_U)
        return self._move(Reach.WITHIN, handed, self.on_G, self.arrived_G)

    def take_back(self, rows_W: Tensor) -> Tensor:
        """And back: of each row the sum of what comes from the node. Collective; not before the
        first rows went out."""
        handed = self._move(Reach.WITHIN, rows_W, self.arrived_G, self.on_G)
        sums_H = self._on[0].by_token.sums(handed)
        return self._move(Reach.BETWEEN, sums_H, self.came_V, self.over_V)

    def _move(
        self, reach: Reach, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...]
    ) -> Tensor:
        channel = self.channels[reach]
        return channel.all_to_all(rows, sent, received, channel.group)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.goes_UG, *(tensor for on in self._on for tensor in on.tensors()))


@dataclass(frozen=True, eq=False)
class Deduplicated:
    """Of one layer's pass."""

    goals: Goals  # of this rank's tokens
    cut: Cut  # of them
    # pairs from each EP rank, of each chunk, to each EP rank, and to each node if rows go there, of
    # this rank's place, on the host
    num_CFX: np.ndarray
    ep_rank: int  # this rank's
    by_nodes: ByNodes | None = None  # their way, if rows go so
    # as in ``ChunkPairs``, of all tokens; None until the EP ranks have exchanged these
    pair_R: Tensor | None = None

    def between(self) -> np.ndarray:
        """Pairs of each chunk from each EP rank to each, int64 ``[F, C, C]``."""
        return self.num_CFX[..., : len(self.num_CFX)].swapaxes(0, 1)

    def number_TK(self) -> Tensor:
        """Each choice's pair, in the order in which all pairs of its EP rank arrive there,
        int32."""
        goes_TC1, device = self.goals.goes_TC1, self.goals.goes_TC1.device
        num_ep_ranks, sender_C = len(self.num_CFX), self._sender_C
        before = sender_C[: np.flatnonzero(sender_C == self.ep_rank)[0]]
        before_C = self.num_CFX[before, :, :num_ep_ranks].sum(axis=(0, 1))
        number_TC1 = goes_TC1.cumsum(dim=0) + on_device(np.append(before_C, 0) - 1, device)
        return number_TC1.gather(1, self.goals.ep_rank_TK).int()

    def on(self, chunk_range: ChunkRange, pair_R: Tensor) -> ChunkPairs:
        """Those of a chunk range, whose rows are of these among all pairs."""
        chunks = slice(chunk_range.start, chunk_range.stop)
        received_CF = self.num_CFX[self._sender_C, :, self.ep_rank]
        if chunk_range.stop - chunk_range.start < self.cut.num_chunks:
            starts_CF = starts_of(received_CF)[:, chunks]
            own_V = block_index(starts_CF, received_CF[:, chunks], pair_R.device)
            place = pair_R.new_empty(int(received_CF.sum()))
            nth_V = torch.arange(len(own_V), dtype=place.dtype, device=place.device)
            place.scatter_(0, own_V.long(), nth_V)
            pair_R = place.index_select(0, pair_R)
        sent_X = self.num_CFX[self.ep_rank, chunks].sum(axis=0)
        sent_C, sent_V = np.split(sent_X, [len(self.num_CFX)])
        if self.by_nodes is None:
            leaving = Leaving(
                self._of_chunk_range(chunk_range, self.goals.goes_TC1)[:, :-1], int(sent_C.sum())
            )
        else:
            goes_TV = self._of_chunk_range(chunk_range, self.goals.goes_TVG).any(dim=2)
            leaving = Leaving(goes_TV, int(sent_V.sum()))
        return ChunkPairs(
            leaving,
            sent_C=tuple(sent_C.tolist()),
            received_C=tuple(received_CF[:, chunks].sum(axis=1).tolist()),
            pair_R=pair_R,
        )

    def transfer(
        self, chunk_range: ChunkRange, leaving: Leaving, channels: Mapping[Reach, Channel]
    ) -> NodeTransfer:
        """How those of a chunk range that leave travel by the nodes."""
        assert self.by_nodes is not None
        goes_VTG = self._of_chunk_range(chunk_range, self.goals.goes_TVG).swapaxes(0, 1)
        goes_UG = goes_VTG.flatten(0, 1).index_select(0, leaving.place_U)
        numbers = self.by_nodes.numbers(
            self.num_CFX[:, chunk_range.start : chunk_range.stop].sum(axis=1)
        )
        over_V, came_V, on_G, arrived_G = (tuple(num.tolist()) for num in numbers)
        return NodeTransfer(channels, goes_UG, over_V, came_V, on_G, arrived_G)

    def _of_chunk_range(self, chunk_range: ChunkRange, of_tokens: Tensor | None) -> Tensor:
        assert of_tokens is not None
        return of_tokens.narrow(0, self.cut.first(chunk_range), self.cut.length(chunk_range))

    @property
    def _sender_C(self) -> np.ndarray:
        """The EP ranks, in the order in which their pairs arrive."""
        return np.arange(len(self.num_CFX)) if self.by_nodes is None else self.by_nodes.sender_C

    def tensors(self) -> list[Tensor]:
        held = *self.goals, self.pair_R
        return [tensor for tensor in held if tensor is not None]
