# SPDX-License-Identifier: Apache-2.0
"""Which rank is what: roles, the grid of EP ranks and the ranks that split experts, and their
process groups."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ds_moe_ext.schedule.stripes import A2E
from ds_moe_ext.schedule.task import INTER, INTRA, Stream

if TYPE_CHECKING:  # what prices a grid needs none of torch, which takes long to load
    import torch.distributed as dist


@dataclass(frozen=True)
class Roles:
    """The roles in every ZP group."""

    # places in the group, ascending, whose ranks have attention, gates, embeddings and head
    attention_ep_ranks: tuple[int, ...]
    expert_ep_ranks: tuple[int, ...]  # those whose ranks have experts only
    # the ranks of the world, group by group and ascending in each; none: neighbours make a group
    order: tuple[int, ...] = ()

    @classmethod
    def first(cls, attention_size: int, expert_size: int) -> Roles:
        """Attention ranks first."""
        size = attention_size + expert_size
        return cls(tuple(range(attention_size)), tuple(range(attention_size, size)))

    def __str__(self) -> str:
        return (
            f"{len(self.attention_ep_ranks)} attention + {len(self.expert_ep_ranks)} expert ranks"
        )

    @property
    def size(self) -> int:
        return len(self.attention_ep_ranks) + len(self.expert_ep_ranks)

    @property
    def firsts(self) -> tuple[int, int]:
        """The first group's first attention rank and first expert rank."""
        first, last = self.attention_ep_ranks[0], self.expert_ep_ranks[0]
        return (self.order[first], self.order[last]) if self.order else (first, last)

    def place(self, rank: int) -> int:
        """Of a rank of the world, where those of a group follow each other."""
        return self.order.index(rank) if self.order else rank

    def is_attention(self, rank: int) -> bool:
        """Whether a rank of the world has attention."""
        return self.place(rank) % self.size in self.attention_ep_ranks

    def ranks_like(self, rank: int, world_size: int) -> list[int]:
        """The ranks of the world that have the role of a rank."""
        role = self.is_attention(rank)
        return [other for other in range(world_size) if self.is_attention(other) == role]


@dataclass(frozen=True)
class Striping:
    """How the micro-batches of attention ranks run."""

    # that the samples of an attention rank are cut into; None until it is settled
    num_stripes: int | None = None
    # expert ranks keep the rows that came in, and compute the rest again in backward
    recomputes: bool = False


class Reach(Enum):
    """Which ranks a group joins."""

    ALL = "all"
    WITHIN = "within"  # those of one node
    BETWEEN = "between"  # those of equal place in their nodes, one from each


@dataclass(frozen=True, eq=False)
class Nodes:
    """Where the ranks are. A rank's place is its number among those of its node.

    Raises:
        ValueError: the nodes have not equally many ranks.
    """

    node_P: np.ndarray  # node of each rank, int ``[P]``; any numbers, in any order

    def __post_init__(self) -> None:
        sizes = np.unique(self.node_P, return_counts=True)[1]
        if np.ptp(sizes):
            raise ValueError(
                f"nodes of {sizes.tolist()} ranks; an all-to-all by way of the nodes needs "
                "equally many in each; use the direct one"
            )

    @cached_property
    def ranks_VG(self) -> np.ndarray:
        """Ranks by node and place, int64 ``[V, G]``; nodes in the order of their first ranks."""
        num_nodes = np.unique(self.node_P).size
        ranks_VG = np.argsort(self.node_P, kind="stable").reshape(num_nodes, -1)
        return ranks_VG[np.argsort(ranks_VG[:, 0])]

    @property
    def is_flat(self) -> bool:
        """Whether there is one node, or one rank in each: then no way leads by the nodes."""
        return 1 in self.ranks_VG.shape

    def groups(self, reach: Reach) -> list[list[int]]:
        """The lists of ranks, ascending, that need a communicator each."""
        lists = {
            Reach.ALL: self.ranks_VG.reshape(1, -1),
            Reach.WITHIN: self.ranks_VG,
            Reach.BETWEEN: self.ranks_VG.T,
        }[reach]
        groups: list[list[int]] = np.sort(lists, axis=1).tolist()
        return groups

    def find(self, rank: int) -> tuple[int, int]:
        """Row and place of a rank in ``ranks_VG``."""
        row, place = np.argwhere(self.ranks_VG == rank)[0].tolist()
        return row, place


# Which ranks form the expert-parallel grid, and a communicator for each of its axes and streams.


AXES = ("edp", "ep", "esp")
GRID = "grid"  # the EP ranks of one grid and the ranks in them: two axes as one

WITHIN_NODES = "within nodes"  # of the EP ranks that exchange rows, those of one node
BETWEEN_NODES = "between nodes"  # and those of equal place in their nodes
NODE_AXES = {WITHIN_NODES: Reach.WITHIN, BETWEEN_NODES: Reach.BETWEEN}
"""What the axis of EP ranks falls into where ways lead by the nodes; see ``all_to_all.Nodes``."""


@contextmanager
def world(
    backend: str,
    rank: int = 0,
    world_size: int = 1,
    *,
    store: dist.Store | None = None,
    timeout: timedelta | None = None,
) -> Iterator[None]:
    """The world of all ranks inside the block: the one that is, or one made for it. Collective.

    Where there are several they meet at a store, or where a launcher's MASTER_ADDR and MASTER_PORT
    say. They wait for each other as long as the backend does, or until the timeout.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    if store is None and world_size == 1:
        store = dist.HashStore()
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    return [d for d in range(1, int(number) + 1) if number % d == 0]


@dataclass(frozen=True)
class Grid:
    """Rank arithmetic. Pure.

    Raises:
        ValueError: the axes do not fill the world.
    """

    world_size: int  # ranks that run the same layers
    num_ep_ranks: int  # EP ranks of a grid
    etp_size: int = 1  # ranks of an ETP group
    # these ranks in the order of the axes, where they are a part of all, as a pipeline stage is, or
    # groups are not of neighbours; none: all, in their own order
    members: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.world_size % (self.num_ep_ranks * self.etp_size):
            raise ValueError(
                f"{self.num_ep_ranks} EP ranks of {self.etp_size} rank(s) do not divide "
                f"{self.world_size} ranks; choose sizes whose product divides {self.world_size}"
            )

    @property
    def ranks(self) -> np.ndarray:
        """Ranks, int64 ``[edp, ep, esp]``."""
        shape = (self.world_size // self.size, self.num_ep_ranks, self.etp_size)
        return np.array(self.members or range(self.world_size)).reshape(shape)

    @property
    def size(self) -> int:
        """Ranks of one expert-parallel grid: together they hold every expert once."""
        return self.num_ep_ranks * self.etp_size

    def along(self, axis: str) -> list[list[int]]:
        """The lists of ranks that differ along one axis only."""
        if axis == GRID:
            whole: list[list[int]] = self.ranks.reshape(-1, self.size).tolist()
            return whole
        moved = np.moveaxis(self.ranks, AXES.index(axis), -1)
        lists: list[list[int]] = moved.reshape(-1, moved.shape[-1]).tolist()
        return lists

    def index(self, axis: str, rank: int) -> int:
        """Place of a rank along an axis."""
        return int(np.argwhere(self.ranks == rank)[0, AXES.index(axis)])


@dataclass(frozen=True)
class ParallelLayout:
    """The grid and its process groups.

    Two streams never share a communicator: collectives of one communicator must be issued in the
    same order on every rank, and streams are ordered only among their own tasks.
    """

    grid: Grid  # the ranks
    rank: int  # this one
    # number of each rank's node; a machine unless ``build`` was given others
    node_of: tuple[int, ...] = ()
    # the grids of all ranks, where they do not all run the same layers; else none
    beside: tuple[Grid, ...] = ()
    # the ranks of this grid; None where these are the world
    everyone: dist.ProcessGroup | None = None
    _groups: dict[tuple[str, Stream], dist.ProcessGroup] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        grid: Grid,
        uses: Iterable[tuple[str, Stream]],
        ranks_per_node: int | None = None,
        beside: Sequence[Grid] = (),
    ) -> ParallelLayout:
        """Make a communicator for each (axis, stream) in ``uses``, and where EP ranks have several
        ranks those that every strategy needs then. Collective, in the same order on every rank.

        Args:
            grid: of this rank.
            uses: by the strategy.
            ranks_per_node: ranks that share fast links; None for those of one machine.
            beside: the grids of all ranks, this one's among them, in the same order everywhere;
                none where all ranks run the same layers.
        """
        import torch.distributed as dist

        from ds_moe_ext.core.comm import begin_watch, gather_objects

        begin_watch()
        uses = tuple(uses)
        if ranks_per_node is None:
            hosts = gather_objects(socket.gethostname(), None)
            nodes = [hosts.index(host) for host in hosts]  # its first rank stands for a node
        else:
            nodes = [rank // ranks_per_node for rank in range(dist.get_world_size())]
        parts = [each.ranks.flatten().tolist() for each in beside]
        if not parts and any(stream is A2E for _, stream in uses):
            parts = [list(range(dist.get_world_size()))]  # a host's world may be that of a role
        everyone = group_among(parts) if parts else None
        layout = cls(grid, dist.get_rank(), tuple(nodes), tuple(beside), everyone)
        within = [(GRID, INTER), ("esp", INTRA)] if grid.etp_size > 1 else []
        for axis, stream in (*uses, *within):
            if lists := layout.lists_along(axis):
                layout._groups[axis, stream] = group_among(lists, is_urgent=True)
        return layout

    @property
    def _grids(self) -> tuple[Grid, ...]:
        return self.beside or (self.grid,)

    @property
    def num_hosts(self) -> int:
        """Nodes that the ranks run on."""
        return len(set(self.node_of))

    @property
    def node_C(self) -> np.ndarray:
        """Node of each EP rank of this rank's grid, 0 and up, int64: that of its first rank."""
        ranks_CS = self.grid.ranks[self.index("edp")]
        return np.unique(self._nodes_of(ranks_CS[:, 0]), return_inverse=True)[1]

    @property
    def nodes(self) -> Nodes:
        """Where the ranks are that this one exchanges rows with: one of each EP rank.

        Raises:
            ValueError: nodes have not equally many of them.
        """
        return Nodes(self.node_of_ep_ranks)

    @property
    def node_of_ep_ranks(self) -> np.ndarray:
        """Node of each rank that this one exchanges rows with, int64."""
        return self._nodes_of(next(row for row in self.grid.along("ep") if self.rank in row))

    @property
    def place(self) -> int:
        """This rank's among those that run the same layers."""
        return int(np.flatnonzero(self.grid.ranks == self.rank)[0])

    def _nodes_of(self, ranks: Iterable[int]) -> np.ndarray:
        return np.array([self.node_of[rank] if self.node_of else 0 for rank in ranks])

    @cached_property
    def why_flat(self) -> str:
        """Why no way between EP ranks leads by the nodes, the same on every rank; empty if some
        do."""
        for row in self._along("ep"):
            ep_ranks_V = np.unique(self._nodes_of(row), return_counts=True)[1]
            if ep_ranks_V.size == 1:
                return "all EP ranks are on one node"
            if ep_ranks_V.max() == 1:
                return "every node has an EP rank"
            if ep_ranks_V.min() < ep_ranks_V.max():
                return f"nodes have {', '.join(map(str, ep_ranks_V))} EP ranks: not equally many"
        return ""

    def lists_along(self, axis: str) -> list[list[int]]:
        """The lists of ranks along an axis, of all grids; none along those of the nodes where no
        way leads by the nodes."""
        if axis not in NODE_AXES:
            return self._along(axis)
        if self.why_flat:
            return []
        return [
            [row[ep_rank] for ep_rank in ep_ranks]
            for row in self._along("ep")
            for ep_ranks in Nodes(self._nodes_of(row)).groups(NODE_AXES[axis])
        ]

    def _along(self, axis: str) -> list[list[int]]:
        return [ranks for grid in self._grids for ranks in grid.along(axis)]

    def index(self, axis: str) -> int:
        """This rank's place along an axis."""
        return self._index[axis]

    @cached_property
    def _index(self) -> dict[str, int]:
        return {axis: self.grid.index(axis, self.rank) for axis in AXES}

    def close(self) -> None:
        """Close the communicators, when no pass will run any more. Collective."""
        import torch.distributed as dist

        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()

    def group(self, axis: str, stream: Stream) -> dist.ProcessGroup:
        """The communicator of a stream along an axis, made by ``build``. Where EP ranks have one
        rank, the whole grid is the axis of EP ranks."""
        is_row = axis == GRID and self.grid.etp_size == 1
        return self._groups["ep" if is_row else axis, stream]


def group_among(
    lists: list[list[int]], backend: str | None = None, *, is_urgent: bool = False
) -> dist.ProcessGroup:
    """A communicator of each of these lists of ranks, which share none: this rank's. Collective,
    with the same lists in the same order on every rank. They wait for other ranks as long as the
    world does, which a host may have been given.

    Args:
        backend: of the communicators; None takes that of the world.
        is_urgent: what travels is waited for by other work on the device, and goes before that.
    """
    import torch.distributed as dist

    from ds_moe_ext.core.comm import timeout_of, urgent

    rank, timeout = dist.get_rank(), timeout_of(None)
    groups = [
        (ranks, dist.new_group(ranks, timeout, backend, urgent() if is_urgent else None))
        for ranks in lists
    ]
    return next(group for ranks, group in groups if rank in ranks)
