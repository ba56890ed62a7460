# SPDX-License-Identifier: Apache-2.0
"""All-to-alls by way of the nodes: fewer and larger messages between them, and the same rows.

Each brings exactly what the direct exchange brings, in its order. The adjoint of an all-to-all is
the one of the transposed counts: it takes gradients, or rows that were worked on, back.

Shape letters: P ranks that exchange rows, V nodes, G ranks of a node, C members of a group, B
blocks of rows, N rows sent, R rows received.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.core.comm import AllToAll, all_to_all_rows
from ds_moe_ext.core.layout import Nodes, Reach
from ds_moe_ext.core.rows import on_device, ranges, starts_of

# Planning, pure. A block is what one rank has for another; all of it is known to every rank.


@dataclass(frozen=True, eq=False)
class Hop:
    """One exchange with the members of a group."""

    reach: Reach  # the group
    member_C: tuple[int, ...]  # its ranks, ascending
    sent_C: tuple[int, ...]  # rows for each member
    received_C: tuple[int, ...]  # rows from each
    # row to take to each place before, int64; None where they lie so already
    taken_N: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        reach: Reach,
        member_C: np.ndarray,
        *,
        sent_C: np.ndarray,
        received_C: np.ndarray,
        taken_N: np.ndarray | None = None,
    ) -> Hop:
        member_ids, sent, received = member_C.tolist(), sent_C.tolist(), received_C.tolist()
        return cls(reach, tuple(member_ids), tuple(sent), tuple(received), taken_N)


@dataclass(frozen=True, eq=False)
class Itinerary:
    """How the rows of one rank travel: sent in the order of the receivers."""

    rank: int  # whose
    hops: tuple[Hop, ...]  # one after the other
    # row to take to each place in the end, int64, so that they lie in the order of their senders;
    # None where they lie so already
    taken_R: np.ndarray | None = None

    @property
    def num_sent(self) -> int:
        """Rows that the rank starts with."""
        return sum(self.hops[0].sent_C)


Planner = Callable[[Nodes, np.ndarray, int], Itinerary]
"""``(nodes, rows from each rank to each [P, P], rank) -> its itinerary``."""


def direct(nodes: Nodes, counts_PP: np.ndarray, rank: int) -> Itinerary:
    """One message from each rank to each. Pure.

    A rank sends ``P - G`` messages to other nodes, of one block each.

    Args:
        nodes: where the ranks are.
        counts_PP: rows from each rank (first) to each (second), int ``[P, P]``.
        rank: whose itinerary; they must be of the same counts on every rank.

    Raises:
        ValueError: the counts are of other ranks than the nodes'.
    """
    _check(nodes, counts_PP)
    everyone = np.arange(nodes.node_P.size)
    sent_P, received_P = counts_PP[rank], counts_PP[:, rank]
    return Itinerary(rank, (Hop.of(Reach.ALL, everyone, sent_C=sent_P, received_C=received_P),))


def by_leaders(nodes: Nodes, counts_PP: np.ndarray, rank: int) -> Itinerary:
    """1DH of HetuMoE: the first rank of each node sends and receives for all of them. Pure.

    A leader sends ``V - 1`` messages to other nodes, of ``G * G`` blocks each; the others none.
    Direct where a node has one rank or there is one node. Arguments and errors: see ``direct``.
    """
    _check(nodes, counts_PP)
    if nodes.is_flat:
        return direct(nodes, counts_PP, rank)
    own_G = nodes.ranks_VG[nodes.find(rank)[0]]
    leads_G = own_G == own_G[0]
    is_leader = rank == own_G[0]
    gather = Hop.of(
        Reach.WITHIN,
        own_G,
        sent_C=counts_PP[rank].sum() * leads_G,
        received_C=counts_PP[own_G].sum(axis=1) * is_leader,
    )
    scatter = Hop.of(
        Reach.WITHIN,
        own_G,
        sent_C=counts_PP[:, own_G].sum(axis=0) * is_leader,
        received_C=counts_PP[:, rank].sum() * leads_G,
        taken_N=_to_receivers(nodes, counts_PP, own_G) if is_leader else None,
    )
    if not is_leader:
        return Itinerary(rank, (gather, scatter))
    return Itinerary(rank, (gather, _between_leaders(nodes, counts_PP, own_G), scatter))


def by_places(nodes: Nodes, counts_PP: np.ndarray, rank: int) -> Itinerary:
    """2DH of Tutel and DeepSpeed-MoE: to the receiver's place in one's own node, then over. Pure.

    A rank sends ``V - 1`` messages to other nodes, of ``G`` blocks each. Direct where a node has
    one rank or there is one node. Arguments and errors: see ``direct``.
    """
    _check(nodes, counts_PP)
    if nodes.is_flat:
        return direct(nodes, counts_PP, rank)
    ranks_VG = nodes.ranks_VG
    row, place = nodes.find(rank)
    own_G = ranks_VG[row]
    # The nodes in the order of those of their ranks that this one meets.
    met_V = np.argsort(ranks_VG[:, place])
    relayed_GV = counts_PP[np.ix_(own_G, ranks_VG[:, place])]
    arrived_VG = counts_PP[ranks_VG[met_V], rank]
    within = Hop.of(
        Reach.WITHIN,
        own_G,
        sent_C=counts_PP[rank, ranks_VG].sum(axis=0),
        received_C=relayed_GV.sum(axis=1),
        taken_N=_taken(counts_PP[rank], ranks_VG.T),
    )
    between = Hop.of(
        Reach.BETWEEN,
        ranks_VG[met_V, place],
        sent_C=relayed_GV.sum(axis=0)[met_V],
        received_C=arrived_VG.sum(axis=1),
        taken_N=_taken(relayed_GV, _numbered(relayed_GV)[:, met_V].T),
    )
    by_sender = np.argsort(ranks_VG[met_V], axis=None)
    return Itinerary(rank, (within, between), _taken(arrived_VG, by_sender))


def _check(nodes: Nodes, counts_PP: np.ndarray) -> None:
    num_ranks = nodes.node_P.size
    if counts_PP.shape != (num_ranks, num_ranks):
        raise ValueError(
            f"counts of shape {counts_PP.shape} for {num_ranks} ranks; give the rows from each "
            f"rank to each, {(num_ranks, num_ranks)}"
        )


def _between_leaders(nodes: Nodes, counts_PP: np.ndarray, own_G: np.ndarray) -> Hop:
    """From (sender's place, receiver) to (receiver's node, receiver's place, sender's place)."""
    ranks_VG = nodes.ranks_VG
    gathered_GP = counts_PP[own_G]
    coming_VGG = counts_PP[:, own_G][ranks_VG]
    return Hop.of(
        Reach.BETWEEN,
        ranks_VG[:, 0],
        sent_C=gathered_GP[:, ranks_VG].sum(axis=(0, 2)),
        received_C=coming_VGG.sum(axis=(1, 2)),
        taken_N=_taken(gathered_GP, _numbered(gathered_GP)[:, ranks_VG].transpose(1, 2, 0)),
    )


def _to_receivers(nodes: Nodes, counts_PP: np.ndarray, own_G: np.ndarray) -> np.ndarray | None:
    """From (sender's node, receiver's place, sender's place) to (receiver's place, sender)."""
    ranks_VG = nodes.ranks_VG
    arrived_VGG = counts_PP[:, own_G][ranks_VG].transpose(0, 2, 1)
    by_receiver_GP = _numbered(arrived_VGG).transpose(1, 0, 2).reshape(own_G.size, -1)
    return _taken(arrived_VGG, by_receiver_GP[:, np.argsort(ranks_VG, axis=None)])


def _numbered(blocks: np.ndarray) -> np.ndarray:
    """The number of each block, in the order in which they lie."""
    return np.arange(blocks.size).reshape(blocks.shape)


def _taken(lengths: np.ndarray, order: np.ndarray) -> np.ndarray | None:
    """The rows of blocks in another order, int64; None if that is the order in which they lie."""
    lengths_B, order_B = lengths.ravel(), order.ravel()
    order_B = order_B[lengths_B[order_B] > 0]
    if (np.diff(order_B) > 0).all():
        return None
    return ranges(starts_of(lengths_B)[order_B], lengths_B[order_B])


# Running.


@dataclass(frozen=True)
class Channel:
    """A communicator and how rows are exchanged over it."""

    # that of ``Nodes.groups`` which has this rank; a communicator that only the calling stream uses
    group: dist.ProcessGroup
    all_to_all: AllToAll = all_to_all_rows  # ``all_to_all_by_pairs`` for gloo between hosts


@dataclass(frozen=True, eq=False)
class Relay:
    """An itinerary made ready for a device: for as many exchanges as have its counts."""

    itinerary: Itinerary  # what is done
    # what its arrays of rows are on the device: one for each hop and one for the end
    taken: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, itinerary: Itinerary, device: torch.device) -> Relay:
        """Copy the itinerary's arrays to the device; the host does not wait."""
        arrays = (*(hop.taken_N for hop in itinerary.hops), itinerary.taken_R)
        taken = (None if array is None else on_device(array, device) for array in arrays)
        return cls(itinerary, tuple(taken))

    def run(self, rows_N: Tensor, channels: Mapping[Reach, Channel]) -> Tensor:
        """Send the rows. Collective, in the same order on every rank.

        Args:
            rows_N: rows in the order of their receivers, ``[N, ...]``.
            channels: of every reach that the hops need; of flat nodes and the direct way, ``ALL``.

        Returns:
            Rows in the order of their senders, ``[R, ...]``; bit for bit those of the direct way.

        Raises:
            ValueError: there are more or fewer rows than the counts say.
        """
        if rows_N.shape[0] != self.itinerary.num_sent:
            raise ValueError(
                f"{rows_N.shape[0]} rows of rank {self.itinerary.rank}, whose counts say "
                f"{self.itinerary.num_sent}; plan with the counts of these rows"
            )
        for hop, taken in zip(self.itinerary.hops, self.taken):
            channel = channels[hop.reach]
            ready = _in_order(rows_N, taken)
            rows_N = channel.all_to_all(ready, hop.sent_C, hop.received_C, channel.group)
        return _in_order(rows_N, self.taken[-1])


class RowTransfer(Protocol):
    """Rows of certain counts there, and rows that were worked on back; as often as one likes."""

    def out(self, rows_N: Tensor) -> Tensor:
        """Rows in the order of their receivers to rows in that of their senders. Collective."""
        ...

    def take_back(self, rows_R: Tensor) -> Tensor:
        """And back. Collective; not before the first rows went out."""
        ...

    def tensors(self) -> tuple[Tensor, ...]:
        """What it holds on the device."""
        ...


class Carrier(Protocol):
    """One rank's part in exchanges that are more than a call of an all-to-all."""

    def transfer(self, counts_PP: np.ndarray, device: torch.device) -> RowTransfer:
        """Make ready for rows from each rank to each, int ``[P, P]`` on the host."""
        ...


@dataclass(frozen=True, eq=False)
class RoundTrip:
    """A ``RowTransfer`` by way of the nodes."""

    there: Relay  # of the counts
    back: Relay  # of the transposed counts
    channels: Mapping[Reach, Channel]  # of every reach that they need

    def out(self, rows_N: Tensor) -> Tensor:
        return self.there.run(rows_N, self.channels)

    def take_back(self, rows_R: Tensor) -> Tensor:
        return self.back.run(rows_R, self.channels)

    def tensors(self) -> tuple[Tensor, ...]:
        taken = (*self.there.taken, *self.back.taken)
        return tuple(rows for rows in taken if rows is not None)


@dataclass(frozen=True, eq=False)
class Relays:
    """A ``Carrier`` by way of the nodes."""

    planner: Planner  # which way
    nodes: Nodes  # where the ranks are that exchange rows
    rank: int  # this one's number among them
    channels: Mapping[Reach, Channel]  # of every reach that the way needs

    def transfer(self, counts_PP: np.ndarray, device: torch.device) -> RoundTrip:
        plans = (self.planner(self.nodes, counts, self.rank) for counts in (counts_PP, counts_PP.T))
        there, back = (Relay.of(itinerary, device) for itinerary in plans)
        return RoundTrip(there, back, self.channels)


def _in_order(rows: Tensor, taken: Tensor | None) -> Tensor:
    return rows if taken is None else rows.index_select(0, taken)
