# SPDX-License-Identifier: Apache-2.0
"""Who sends which expert to whom, and in which round, so that a wider placement comes to hold.

An expert's weights go from a holder to one *leader* in each node that has no copy yet, and from the
copy in a node to the node's other targets: whole, along doubling trees, or, where they are large
(``Cargo``), in *segments* along chains, so that a cell passes one on while the next arrives. A tree
in segments would gain nothing: its root sends every one to each of its children. Gradients go home
the same way, backwards. Pure: every rank computes the same rounds, and acts on its part of them.

Shape letters: E experts, C cells, V nodes, N transfers.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

import numpy as np

from ds_moe_ext.core.placement import Placement

START_BYTES = 2 << 20
"""What 50 GB/s carry in 40 us: until a first byte arrives, and for the host to post a message."""
WITHIN = 8  # times as fast as links between nodes are those within one taken to be, as NVLinks are
MOST_SEGMENTS = 16  # each costs the host a round
GAP = 2  # experts more than another cell of its node, of which one takes another way out


@dataclass(frozen=True, slots=True)
class Cargo:
    """How large an expert is, from which follows how it travels. The same on all ranks."""

    expert_bytes: int = 0  # about what the weights of one take; 0 for experts that travel whole
    # what a link between nodes carries in the time that a message takes to start
    start_bytes: int = START_BYTES

    def num_segments(self, num_leaders: int, num_others: int) -> int:
        """In how many segments an expert goes along a chain; 1 if a tree has it there no later.

        Times are compared in bytes of a link between nodes. A message starts, then its bytes pass;
        a chain's first segment takes all hops, and the others follow one by one.
        """
        size, start = self.expert_bytes, self.start_bytes
        near = size // WITHIN
        slowest = size if num_leaders else near
        first = num_leaders * size + num_others * near - slowest
        if first < 4 * start:  # the best number is below two
            return 1
        count = min(isqrt(first // start), MOST_SEGMENTS)
        in_segments = (count + num_leaders + num_others - 1) * start + slowest + first // count
        out, within = num_leaders.bit_length(), num_others.bit_length()
        whole = (out + within) * start + out * size + within * near
        return count if in_segments < whole else 1


SMALL = Cargo()


class Segment(NamedTuple):
    """One of the even parts of all bytes of an expert, its tensors one after the other."""

    number: int  # of the part, from 0
    of: int  # parts in all


WHOLE = Segment(0, 1)


class Move(NamedTuple):
    """One expert, or a segment of it, that travels between this cell and another."""

    expert: int  # what travels
    cell: int  # the other end
    segment: Segment = WHOLE  # what of it


@dataclass(frozen=True, slots=True)
class Round:
    """What one cell does at once; both lists in the order of experts, on either side of a pair.

    A cell has what it sends from the start or from an earlier round.
    """

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]


class Run(NamedTuple):
    """Experts that travel as one, in their order."""

    root: int  # the cell that sends them
    experts: tuple[int, ...]  # they


@dataclass(frozen=True)
class Part:
    """One cell's own part of the transfers."""

    cell: int  # this one
    rounds: tuple[Round, ...]  # those in which this cell sends or receives
    # every expert that moves and its only holder, if all of them go to all cells, so that a
    # broadcast an expert does the same; else empty. Of ``star_of`` these are the way, and rounds
    # only say what is sent and received.
    everywhere: tuple[Move, ...]

    def prepare(self) -> None:
        """Work out beforehand what a pass asks for."""
        _ = self.runs, self.received, self.sent, self.cut

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Those that go everywhere, experts together that follow one another at one home: there and
        wherever they come to they lie side by side, if slots are in the order of experts."""
        runs: list[Run] = []
        for expert, root, _ in self.everywhere:
            if runs and runs[-1].root == root and runs[-1].experts[-1] == expert - 1:
                runs[-1] = Run(root, (*runs[-1].experts, expert))
            else:
                runs.append(Run(root, (expert,)))
        return tuple(runs)

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Experts that this cell lacks and gets, each once."""
        return tuple({move.expert: None for round_ in self.rounds for move in round_.receives})

    @cached_property
    def cut(self) -> frozenset[int]:
        """Experts that travel in segments."""
        moves = (move for each in self.rounds for move in (*each.sends, *each.receives))
        return frozenset({move.expert for move in moves if move.segment != WHOLE})

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """Experts that this cell sends, those among them that it gets before, each once."""
        return tuple({move.expert: None for round_ in self.rounds for move in round_.sends})


@dataclass(frozen=True, eq=False)
class Transfers:
    """The moves that turn one placement into a wider one, in the order round, expert, receiver."""

    held: Placement  # who holds what before
    wanted: Placement  # and after
    node_C: np.ndarray  # node of each cell, 0 to V - 1, int64
    # round of each transfer, of its first segment, int64. The others follow in the rounds after it.
    round_N: np.ndarray
    expert_N: np.ndarray  # what travels, int64
    sender_N: np.ndarray  # from which cell, int64
    receiver_N: np.ndarray  # to which cell, int64
    num_segments_N: np.ndarray  # in which it travels, int64

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

        At most twice rounds times ``num_moved``: in a tree a cell sends an expert once a round in
        its node, and once out of it. It pays for its few rounds with this logarithm, which eq. (1)
        does not have; in chains a cell sends an expert twice at most, once out of its node. All
        cells together send no more than they receive.
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
        columns = (
            self.round_N,
            self.expert_N,
            self.sender_N,
            self.receiver_N,
            self.num_segments_N,
        )
        rounds = _OwnRounds(cell)
        for transfer in zip(*(column[own].tolist() for column in columns)):
            rounds.add(*transfer)
        return Part(cell, rounds.done(), self.everywhere)


class _OwnRounds:
    """Rounds as one cell sees them."""

    def __init__(self, cell: int) -> None:
        self._cell = cell
        self._rounds: dict[int, tuple[list[Move], list[Move]]] = {}

    def add(self, number: int, expert: int, sender: int, receiver: int, num_segments: int) -> None:
        """A transfer of this cell's, whose first segment goes in the round of a number."""
        is_sent = sender == self._cell
        other = receiver if is_sent else sender
        for segment in range(num_segments):
            sends, receives = self._rounds.setdefault(number + segment, ([], []))
            move = Move(expert, other, Segment(segment, num_segments))
            (sends if is_sent else receives).append(move)

    def done(self) -> tuple[Round, ...]:
        """Those in which the cell takes part."""
        numbered = sorted(self._rounds.items())
        return tuple(
            Round(tuple(sorted(sends)), tuple(sorted(receives)))
            for _, (sends, receives) in numbered
        )


def part_of(
    held: Placement, wanted: Placement, node_C: np.ndarray, cell: int, cargo: Cargo = SMALL
) -> Part:
    """What one cell does of ``gather_rounds``. Where every expert has one holder before, the trees
    that the cell has no part in are not worked out, but for how often each of their cells sends.

    Arguments and errors as of ``gather_rounds``.
    """
    _check(held, wanted, node_C)
    targets = _new_holders(held, wanted)
    if (held.num_holders_E[list(targets)] > 1).any():
        return gather_rounds(held, wanted, node_C, cargo).part_of(cell)
    owners: list[int] = held.owner_E.tolist()
    node_of: list[int] = node_C.tolist()
    trees = _Trees(node_of, cell, cargo, _leaving(targets, owners, node_of))
    for expert, cells in targets.items():
        trees.grow(expert, owners[expert], cells)
    everywhere = all(len(cells) == held.num_cells - 1 for cells in targets.values())
    return Part(
        cell,
        trees.rounds.done(),
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
    """The trees and chains of ``gather_rounds``, as one cell sees them, of experts with one holder.

    In a round every cell that has the expert sends it, while cells lack it: those that have sent
    least first, in the last round not all. So a tree of ``n`` receivers takes ``log2(n + 1)`` full
    rounds, and who sends how often in these follows from the order of the receivers.
    """

    def __init__(self, node_of: list[int], cell: int, cargo: Cargo, num_leaving: list[int]) -> None:
        self._node_of, self._cell, self._size = node_of, cell, len(node_of)
        self._has_one_node, self._cargo = len(set(node_of)) == 1, cargo
        # Sends so far and cell as one number, by which cells are ordered.
        self._key = list(range(len(node_of)))
        self._num_led, self._num_leaving = [0] * len(node_of), num_leaving
        self._first_out = _first_out(num_leaving, node_of)
        self.rounds = _OwnRounds(cell)

    def grow(self, expert: int, root: int, targets: list[int]) -> None:
        """The tree of one more expert, from its holder to the leaders of other nodes, and there on.

        Args:
            targets: in any order.
        """
        targets = sorted(targets, key=self._key.__getitem__)
        nodes = [[root, *targets]]
        if not self._has_one_node:
            cells_of: dict[int, list[int]] = defaultdict(list, {self._node_of[root]: [root]})
            for cell in targets:
                cells_of[self._node_of[cell]].append(cell)
            nodes = list(cells_of.values())
            for cells in nodes[1:]:
                _lead(cells, self._num_led)
        num_segments = self._cargo.num_segments(len(nodes) - 1, max(map(len, nodes)) - 1)
        if num_segments == 1:
            self._tree(expert, nodes)
            return
        self._chain(expert, 0, [cells[0] for cells in nodes], num_segments)
        for number, cells in enumerate(nodes):
            self._chain(expert, number, cells, num_segments)

    def _chain(self, expert: int, number: int, cells: list[int], num_segments: int) -> None:
        """Count what each cell of a chain sends, with the moves of the cell."""
        for hop, (sender, receiver) in enumerate(pairwise(cells), start=number):
            self._key[sender] += self._size
            if self._cell in (sender, receiver):
                self.rounds.add(hop, expert, sender, receiver, num_segments)

    def _tree(self, expert: int, nodes: list[list[int]]) -> None:
        """The same of a tree. Args: nodes: cells of each; in front the one that has it first."""
        root, leaders = nodes[0][0], [cells[0] for cells in nodes[1:]]
        gate = _gate(nodes[0], self._num_leaving) if leaders else root
        first = self._first_out if leaders else 0
        if gate != root:
            nodes[0].remove(gate)
            self._moves(expert, 0, root, [gate])
        free = None  # the first round in which the head of this node has it and is free
        if not leaders:
            free = first
        elif self._cell == gate or self._cell in leaders:
            free = self._moves(expert, first, gate, leaders)
        else:
            full, last = self._count(gate, leaders)
        for cells in nodes:
            head, *rest = cells
            if rest and self._cell in cells:
                if head == root:
                    free = first
                elif free is None:  # only its first round is of interest
                    is_late = head in last or head in leaders[(1 << full) - 1 :]
                    free = first + full + is_late
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
        """The same, move by move, with those of the cell."""
        key, size, own = self._key, self._size, self._cell
        cells = [root, *targets]  # each sends from the round on that comes after it received
        num_ready, free = 1, number
        while num_ready < len(cells):
            receivers = cells[num_ready : 2 * num_ready]
            senders = sorted(cells[:num_ready], key=key.__getitem__)[: len(receivers)]
            for sender in senders:
                key[sender] += size
            if own in senders:
                self.rounds.add(number, expert, own, receivers[senders.index(own)], 1)
                free = number + 1
            elif own in receivers:
                self.rounds.add(number, expert, senders[receivers.index(own)], own, 1)
                free = number + 1
            number += 1
            num_ready += len(receivers)
        return free


def gather_rounds(
    held: Placement, wanted: Placement, node_C: np.ndarray, cargo: Cargo = SMALL
) -> Transfers:
    """Plan how the experts of one placement reach the cells of a wider one.

    An expert crosses into a node once at most, and a cell sends it in a round to one in its node
    and to one in another, by other links. Any holder serves, one in the receiver's node first;
    among equals the one that has sent least so far. Into a node the target leads that has
    led least; else targets that have sent least are served first, since those pass most on. Ties go
    to the lowest cell.

    Cost: ``O(E C + N log N)``.

    Args:
        held: who holds what: the homes, or several copies if copies exist already.
        wanted: who shall hold what, besides.
        node_C: node of each cell, 0 to V - 1, int64 ``[C]``.
        cargo: how large an expert is.

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
    node_of: list[int] = node_C.tolist()
    owners = held.holds_EC.argmax(axis=1).tolist()
    forest = _Forest(node_of, cargo, _leaving(target_cells, owners, node_of))
    transfers = sorted(
        (number, expert, receiver, sender, num_segments)
        for expert in moved
        for number, sender, receiver, num_segments in forest.grow(
            holder_cells[expert], target_cells[expert]
        )
    )
    table_N5 = np.array(transfers, dtype=np.int64).reshape(-1, 5)
    round_N, expert_N, receiver_N, sender_N, num_segments_N = table_N5.T
    return Transfers(held, wanted, node_C, round_N, expert_N, sender_N, receiver_N, num_segments_N)


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


def _leaving(
    targets: Mapping[int, Sequence[int]], owners: Sequence[int], node_of: Sequence[int]
) -> list[int]:
    """Experts of each cell that other nodes want. Args: targets: new cells of each that moves."""
    num_leaving = [0] * len(node_of)
    for expert, cells in targets.items():
        home = owners[expert]
        num_leaving[home] += any(node_of[cell] != node_of[home] for cell in cells)
    return num_leaving


def _first_out(num_leaving: Sequence[int], node_of: Sequence[int]) -> int:
    """The first round in which experts leave their nodes: the second one where some may have to
    come to another cell before (``_gate``), for a card that is busy in two rounds has both wait for
    the busiest in each."""
    of_node: dict[int, list[int]] = defaultdict(list)
    for node, number in zip(node_of, num_leaving):
        of_node[node].append(number)
    return int(any(max(numbers) - min(numbers) >= GAP for numbers in of_node.values()))


def _gate(cells: Sequence[int], num_leaving: list[int]) -> int:
    """Who takes an expert out of its node: its holder; or, if that has two more to take out than
    another who gets it, and takes it over, this one, so that the node's cards give alike."""
    holder, gate = cells[0], min(cells, key=num_leaving.__getitem__)
    if num_leaving[holder] - num_leaving[gate] < GAP:
        return holder
    num_leaving[holder] -= 1
    num_leaving[gate] += 1
    return gate


def _lead(cells: list[int], num_led: list[int]) -> None:
    """Bring to the front who takes the next expert into its node: it has led least, so that the
    node's cards take in alike. Args: cells: of the node, those that have sent least first."""
    leader = min(cells, key=num_led.__getitem__)
    num_led[leader] += 1
    cells.remove(leader)
    cells.insert(0, leader)


class _Forest:
    """The way of one expert after another, which share the work of sending evenly."""

    def __init__(self, node_of: Sequence[int], cargo: Cargo, num_leaving: list[int]) -> None:
        self._node_of, self._cargo = node_of, cargo
        self._num_sent, self._num_led = [0] * len(node_of), [0] * len(node_of)
        self._num_leaving = num_leaving
        self._first_out = _first_out(num_leaving, node_of)

    def grow(
        self, holders: Iterable[int], targets: Iterable[int]
    ) -> Iterator[tuple[int, int, int, int]]:
        """(round, sender, receiver, segments) of one expert, senders before their receivers."""
        ready = self._free_in(0, holders)
        served = {self._node_of[cell] for _, _, cell in ready}
        waiting: dict[int, list[int]] = {}
        for cell in self._least_sent_first(targets):
            waiting.setdefault(self._node_of[cell], []).append(cell)
        leaders = []
        for node, cells in waiting.items():
            if node not in served:
                _lead(cells, self._num_led)
                leaders.append(cells.pop(0))
        most = max(map(len, waiting.values()), default=0)
        num_segments = self._cargo.num_segments(len(leaders), most)
        spread = self._spread if num_segments == 1 else self._chain
        if leaders and num_segments == 1:
            holders = [cell for _, _, cell in ready]
            outward = holders
            if len(holders) == 1:
                mates = waiting.get(self._node_of[holders[0]], [])
                gate = _gate([*holders, *mates], self._num_leaving)
                if gate != holders[0]:
                    mates.remove(gate)
                    yield 0, holders[0], gate, 1
                    self._num_sent[holders[0]] += 1
                    outward = [gate]
            entries = self._free_in(self._first_out, outward)
            for move in spread(entries, leaders):
                yield *move, 1
            ready = self._free_in(self._first_out, holders)
            ready += [entry for entry in entries if entry[2] in leaders]
        else:
            for move in spread(ready, leaders):
                yield *move, num_segments
        for node, cells in waiting.items():
            here = [entry for entry in ready if self._node_of[entry[2]] == node]
            for move in spread(here, cells):
                yield *move, num_segments

    def _free_in(self, number: int, cells: Iterable[int]) -> list[tuple[int, int, int]]:
        """Of cells that have an expert, as ``_spread`` takes them: all can send in a round."""
        return [(number, self._num_sent[cell], cell) for cell in cells]

    def _spread(
        self, ready: list[tuple[int, int, int]], targets: Iterable[int]
    ) -> Iterator[tuple[int, int, int]]:
        """Serve the targets in their order: who is free first sends next."""
        heapq.heapify(ready)
        for receiver in targets:
            number, _, sender = ready[0]
            self._num_sent[sender] += 1
            heapq.heapreplace(ready, (number + 1, self._num_sent[sender], sender))
            heapq.heappush(ready, (number + 1, self._num_sent[receiver], receiver))
            yield number, sender, receiver

    def _chain(
        self, ready: list[tuple[int, int, int]], targets: Iterable[int]
    ) -> Iterator[tuple[int, int, int]]:
        """Serve each target by the one before it, the first by the holder that has sent least."""
        number, _, sender = min(ready)
        for receiver in targets:
            self._num_sent[sender] += 1
            yield number, sender, receiver
            number, sender = number + 1, receiver
            ready.append((number, self._num_sent[receiver], receiver))

    def _least_sent_first(self, cells: Iterable[int]) -> list[int]:
        return sorted(cells, key=lambda cell: (self._num_sent[cell], cell))
