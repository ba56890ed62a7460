"""Who sends which expert to whom, and in which round, so that a wider placement comes to hold.

An expert's weights travel whole, along a tree: from a holder to one *leader* in each node that has
no copy yet, and from the copy in a node to the node's other targets. Gradients go home along the
same tree, backwards. Pure: every rank computes the same rounds, and acts on its own part of them.

Shape letters: E experts, C cells, V nodes, N transfers.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ds_moe_ext.placement import Placement


class Move(NamedTuple):
    """One expert that travels between this cell and another.

    Attributes:
        expert: what travels.
        cell: the other end.
    """

    expert: int
    cell: int


@dataclass(frozen=True, slots=True)
class Round:
    """What one cell does at once; both lists in the order of experts, on either side of a pair.

    A cell has what it sends from the start or from an earlier round.
    """

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]


@dataclass(frozen=True)
class Part:
    """One cell's own part of the transfers.

    Attributes:
        cell: this one.
        rounds: those in which this cell sends or receives.
        everywhere: every expert that moves and its only holder, if all of them go to all cells, so
            that a broadcast an expert does the same; else empty. Of ``star_of`` these are the way,
            and rounds only say what is sent and received.
    """

    cell: int
    rounds: tuple[Round, ...]
    everywhere: tuple[Move, ...]

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Experts that this cell lacks and gets."""
        return tuple([move.expert for round_ in self.rounds for move in round_.receives])

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """Experts that this cell sends, those among them that it gets before, each once."""
        return tuple({move.expert: None for round_ in self.rounds for move in round_.sends})


@dataclass(frozen=True, eq=False)
class Transfers:
    """The moves that turn one placement into a wider one, in the order round, expert, receiver.

    Attributes:
        held: who holds what before.
        wanted: and after.
        node_C: node of each cell, 0 to V - 1, int64.
        round_N: round of each transfer, int64.
        expert_N: what travels, int64.
        sender_N: from which cell, int64.
        receiver_N: to which cell, int64.
    """

    held: Placement
    wanted: Placement
    node_C: np.ndarray
    round_N: np.ndarray
    expert_N: np.ndarray
    sender_N: np.ndarray
    receiver_N: np.ndarray

    @cached_property
    def num_moved(self) -> int:
        """Distinct experts that cross cells, ``#C^`` of eq. (1): its bound on ``received_C``."""
        return int(np.unique(self.expert_N).size)

    @cached_property
    def received_C(self) -> np.ndarray:
        """Experts that each cell receives, int64 ``[C]``; gradients that it sends home."""
        return np.bincount(self.receiver_N, minlength=self.node_C.size)

    @cached_property
    def sent_C(self) -> np.ndarray:
        """Experts that each cell sends, int64 ``[C]``; gradients that it receives.

        At most rounds times ``num_moved``: a cell sends an expert once a round. A tree pays for its
        few rounds with this logarithm, which eq. (1) does not have; all cells together send no more
        than they receive.
        """
        return np.bincount(self.sender_N, minlength=self.node_C.size)

    @cached_property
    def everywhere(self) -> tuple[Move, ...]:
        """See ``Part``."""
        moved = np.unique(self.expert_N)
        held_MC = self.held.holds_EC[moved]
        if not self.wanted.holds_EC[moved].all() or (held_MC.sum(axis=1) != 1).any():
            return ()
        return tuple(map(Move, moved.tolist(), held_MC.argmax(axis=1).tolist()))

    def part_of(self, cell: int) -> Part:
        """What one cell does."""
        own = np.flatnonzero((self.sender_N == cell) | (self.receiver_N == cell))
        columns = (self.round_N, self.expert_N, self.sender_N, self.receiver_N)
        sends: dict[int, list[Move]] = {}
        receives: dict[int, list[Move]] = {}
        for number, expert, sender, receiver in zip(*(column[own].tolist() for column in columns)):
            if sender == cell:
                sends.setdefault(number, []).append(Move(expert, receiver))
            else:
                receives.setdefault(number, []).append(Move(expert, sender))
        rounds = tuple(
            Round(tuple(sends.get(number, ())), tuple(receives.get(number, ())))
            for number in sorted(sends.keys() | receives.keys())
        )
        return Part(cell, rounds, self.everywhere)


def part_of(held: Placement, wanted: Placement, node_C: np.ndarray, cell: int) -> Part:
    """What one cell does of ``gather_rounds``. Where every expert has one holder before, the trees
    that the cell has no part in are not worked out, but for how often each of their cells sends.

    Arguments and errors as of ``gather_rounds``.
    """
    _check(held, wanted, node_C)
    targets = _new_holders(held, wanted)
    if (held.num_holders_E[list(targets)] > 1).any():
        return gather_rounds(held, wanted, node_C).part_of(cell)
    owners: list[int] = held.owner_E.tolist()
    trees = _Trees(node_C.tolist(), cell)
    for expert, cells in targets.items():
        trees.grow(expert, owners[expert], cells)
    everywhere = all(len(cells) == held.num_cells - 1 for cells in targets.values())
    return Part(
        cell,
        trees.rounds(),
        tuple(Move(expert, owners[expert]) for expert in targets) if everywhere else (),
    )


def star_of(held: Placement, wanted: Placement, node_C: np.ndarray, cell: int) -> Part | None:
    """What one cell does where all that moves goes from one holder to all cells: all of it in one
    round, for who moves it by broadcasts and needs no trees. None where not all goes everywhere.

    Arguments and errors as of ``gather_rounds``.
    """
    _check(held, wanted, node_C)
    num_new_E = (wanted.holds_EC > held.holds_EC).sum(axis=1)
    moved = np.flatnonzero(num_new_E)
    if (num_new_E[moved] != held.num_cells - 1).any():
        return None
    everywhere = tuple(map(Move, moved.tolist(), held.owner_E[moved].tolist()))
    if not everywhere:
        return Part(cell, (), ())
    others = [other for other in range(held.num_cells) if other != cell]
    sends = (
        Move(each.expert, other) for each in everywhere if each.cell == cell for other in others
    )
    receives = (each for each in everywhere if each.cell != cell)
    return Part(cell, (Round(tuple(sends), tuple(receives)),), everywhere)


class _Trees:
    """The trees of ``gather_rounds``, as one cell sees them, of experts with one holder.

    In a round every cell that has the expert sends it, while cells lack it: those that have sent
    least first, in the last round not all. So a tree of ``n`` receivers takes ``log2(n + 1)`` full
    rounds, and who sends how often in these follows from the order of the receivers.
    """

    def __init__(self, node_of: list[int], cell: int) -> None:
        self._node_of, self._cell, self._size = node_of, cell, len(node_of)
        self._has_one_node = len(set(node_of)) == 1
        # Sends so far and cell as one number, by which cells are ordered.
        self._key = list(range(len(node_of)))
        self._rounds: dict[int, tuple[list[Move], list[Move]]] = {}

    def rounds(self) -> tuple[Round, ...]:
        """Those in which the cell takes part."""
        numbered = sorted(self._rounds.items())
        return tuple(Round(tuple(sends), tuple(receives)) for _, (sends, receives) in numbered)

    def grow(self, expert: int, root: int, targets: list[int]) -> None:
        """The tree of one more expert, from its holder to the leaders of other nodes, and there on.

        Args:
            targets: in any order.
        """
        targets = sorted(targets, key=self._key.__getitem__)
        if self._has_one_node:
            if self._cell == root or self._cell in targets:
                self._moves(expert, 0, root, targets)
            else:
                self._count(root, targets)
            return
        node_of, own = self._node_of, self._node_of[self._cell]
        nodes: dict[int, list[int]] = defaultdict(list, {node_of[root]: [root]})
        for cell in targets:
            nodes[node_of[cell]].append(cell)
        leaders = [cells[0] for cells in list(nodes.values())[1:]]
        free = None  # the first round in which the head of this node has it and is free
        if not leaders:
            free = 0
        elif self._cell == root or self._cell in leaders:
            free = self._moves(expert, 0, root, leaders)
        else:
            full, last = self._count(root, leaders)
        for node, (head, *rest) in nodes.items():
            if rest and node == own:
                if free is None:  # only its first round is of interest
                    is_late = head in last or head in leaders[(1 << full) - 1 :]
                    free = full + is_late
                self._moves(expert, free, head, rest)
            elif rest:
                self._count(head, rest)

    def _count(self, root: int, targets: list[int]) -> tuple[int, list[int]]:
        """Count what each cell sends; full rounds, and who sends in one that is not full."""
        key, size = self._key, self._size
        if len(targets) == 1:
            key[root] += size
            return 1, []
        full = (len(targets) + 1).bit_length() - 1
        num_served = (1 << full) - 1
        key[root] += full * size
        for place in range(num_served >> 1):
            key[targets[place]] += (full - (place + 1).bit_length()) * size
        num_left = len(targets) - num_served
        if not num_left:
            return full, []
        last = sorted((root, *targets[:num_served]), key=key.__getitem__)[:num_left]
        for cell in last:
            key[cell] += size
        return full, last

    def _moves(self, expert: int, number: int, root: int, targets: list[int]) -> int:
        """The same, move by move, with those of the cell.

        Returns:
            The first round in which the cell is free again.
        """
        key, size, own = self._key, self._size, self._cell
        cells = [root, *targets]  # each sends from the round on that comes after it received
        num_ready, free = 1, number
        while num_ready < len(cells):
            receivers = cells[num_ready : 2 * num_ready]
            senders = sorted(cells[:num_ready], key=key.__getitem__)[: len(receivers)]
            for sender in senders:
                key[sender] += size
            if own in senders:
                sends, _ = self._rounds.setdefault(number, ([], []))
                sends.append(Move(expert, receivers[senders.index(own)]))
                free = number + 1
            elif own in receivers:
                _, receives = self._rounds.setdefault(number, ([], []))
                receives.append(Move(expert, senders[receivers.index(own)]))
                free = number + 1
            number += 1
            num_ready += len(receivers)
        return free


def gather_rounds(held: Placement, wanted: Placement, node_C: np.ndarray) -> Transfers:
    """Plan how the experts of one placement reach the cells of a wider one.

    An expert crosses into a node once at most, and a cell sends it to one other in a round. Any
    holder serves, one in the receiver's node first; among equals the one that has sent least so
    far. Targets that have sent least are served first, since those pass most on. Ties go to the
    lowest cell.

    Cost: ``O(E C + N log N)``.

    Args:
        held: who holds what: the homes, or several copies if copies exist already.
        wanted: who shall hold what, besides.
        node_C: node of each cell, 0 to V - 1, int64 ``[C]``.

    Raises:
        ValueError: the placements are of different sizes, or ``wanted`` takes a copy away.
    """
    _check(held, wanted, node_C)
    target_cells = _new_holders(held, wanted)
    moved = list(target_cells)
    holder_cells: dict[int, list[int]] = {expert: [] for expert in moved}
    rows, holders = np.nonzero(held.holds_EC[moved])
    for row, cell in zip(rows.tolist(), holders.tolist()):
        holder_cells[moved[row]].append(cell)
    forest = _Forest(node_C.tolist())
    transfers = sorted(
        (number, expert, receiver, sender)
        for expert in moved
        for number, sender, receiver in forest.tree(holder_cells[expert], target_cells[expert])
    )
    table_N4 = np.array(transfers, dtype=np.int64).reshape(-1, 4)
    round_N, expert_N, receiver_N, sender_N = table_N4.T
    return Transfers(held, wanted, node_C, round_N, expert_N, sender_N, receiver_N)


def _check(held: Placement, wanted: Placement, node_C: np.ndarray) -> None:
    """Raises ValueError as ``gather_rounds`` says."""
    if held.holds_EC.shape != wanted.holds_EC.shape or len(node_C) != held.num_cells:
        raise ValueError(
            f"placements [experts, cells] {held.holds_EC.shape} and {wanted.holds_EC.shape} with "
            f"nodes of {len(node_C)} cells; all must be of one grid"
        )
    if (held.holds_EC > wanted.holds_EC).any():
        lost = np.argwhere(held.holds_EC & ~wanted.holds_EC)
        raise ValueError(
            f"(expert, cell) {lost.tolist()} is held and not wanted; a gather only adds copies"
        )


def _new_holders(held: Placement, wanted: Placement) -> dict[int, list[int]]:
    """Cells that come to hold an expert, ascending, of each that moves, ascending."""
    flat = np.flatnonzero(wanted.holds_EC > held.holds_EC)
    expert, cells = flat // held.num_cells, (flat % held.num_cells).tolist()
    starts = np.flatnonzero(np.diff(expert, prepend=-1))
    pairs = pairwise([*starts.tolist(), len(cells)])
    return {e: cells[start:stop] for e, (start, stop) in zip(expert[starts].tolist(), pairs)}


class _Forest:
    """Trees for one expert after another, which share the work of sending evenly."""

    def __init__(self, node_of: Sequence[int]) -> None:
        self._node_of = node_of
        self._num_sent = [0] * len(node_of)

    def tree(
        self, holders: Iterable[int], targets: Iterable[int]
    ) -> Iterator[tuple[int, int, int]]:
        """(round, sender, receiver) of one expert, senders before their receivers."""
        ready = [(0, self._num_sent[cell], cell) for cell in holders]
        served = {self._node_of[cell] for _, _, cell in ready}
        waiting: dict[int, list[int]] = {}
        for cell in self._least_sent_first(targets):
            waiting.setdefault(self._node_of[cell], []).append(cell)
        leaders = [cells.pop(0) for node, cells in waiting.items() if node not in served]
        yield from self._spread(ready, leaders)
        for node, cells in waiting.items():
            here = [entry for entry in ready if self._node_of[entry[2]] == node]
            yield from self._spread(here, cells)

    def _spread(
        self, ready: list[tuple[int, int, int]], targets: Iterable[int]
    ) -> Iterator[tuple[int, int, int]]:
        """Serve the targets in their order: who is free first sends next.

        Args:
            ready: (first free round, sends so far, cell) of every holder; targets join it.
        """
        heapq.heapify(ready)
        for receiver in targets:
            number, _, sender = ready[0]
            self._num_sent[sender] += 1
            heapq.heapreplace(ready, (number + 1, self._num_sent[sender], sender))
            heapq.heappush(ready, (number + 1, self._num_sent[receiver], receiver))
            yield number, sender, receiver

    def _least_sent_first(self, cells: Iterable[int]) -> list[int]:
        return sorted(cells, key=lambda cell: (self._num_sent[cell], cell))
