# SPDX-License-Identifier: Apache-2.0
"""Who sends which expert to whom, and in which round, so that a wider placement comes to hold.

An expert's weights go from a holder to one *leader* in each node that has no copy yet, and from the
copy in a node to the node's other targets: whole, along doubling trees, or, where they are large
(``TransferSize``), in *segments* along chains, so that an EP rank passes one on while the next
arrives. A tree in segments would gain nothing: its root sends every one to each of its children.
Gradients go to the owner the same way, backwards. Pure: every rank computes the same rounds, and
acts on its part of them.

Shape letters: E experts, C EP ranks, V nodes, N transfers.
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
GAP = 2  # experts more than another EP rank of its node, of which one takes another way out


@dataclass(frozen=True, slots=True)
class TransferSize:
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


SMALL = TransferSize()


class Segment(NamedTuple):
    """One of the even parts of all bytes of an expert, its tensors one after the other."""

    number: int  # of the part, from 0
    of: int  # parts in all


WHOLE = Segment(0, 1)


class Move(NamedTuple):
    """One expert, or a segment of it, that travels between this EP rank and another."""

    expert: int  # what travels
    ep_rank: int  # the other end
    segment: Segment = WHOLE  # what of it


@dataclass(frozen=True, slots=True)
class Round:
    """What an EP rank does at once; both lists in the order of experts, on either side of a pair.

    An EP rank has what it sends from the start or from an earlier round.
    """

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]


class Run(NamedTuple):
    """Experts that travel as one, in their order."""

    root: int  # the EP rank that sends them
    experts: tuple[int, ...]  # they


@dataclass(frozen=True)
class Part:
    """An EP rank's own part of the transfers."""

    ep_rank: int  # this one
    rounds: tuple[Round, ...]  # those in which this EP rank sends or receives
    # every expert that moves and its only holder, if all of them go to all EP ranks, so that a
    # broadcast an expert does the same; else empty. Of ``star_of`` these are the way, and rounds
    # only say what is sent and received.
    everywhere: tuple[Move, ...]

    def prepare(self) -> None:
        """Work out beforehand what a pass asks for."""
        _ = self.runs, self.received, self.sent, self.cut

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Those that go everywhere, experts together that follow one another at one owner: there
        and wherever they come to they lie side by side, if slots are in the order of experts."""
        runs: list[Run] = []
        for expert, root, _ in self.everywhere:
            if runs and runs[-1].root == root and runs[-1].experts[-1] == expert - 1:
                runs[-1] = Run(root, (*runs[-1].experts, expert))
            else:
                runs.append(Run(root, (expert,)))
        return tuple(runs)

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Experts that this EP rank lacks and gets, each once."""
        return tuple({move.expert: None for round_ in self.rounds for move in round_.receives})

    @cached_property
    def cut(self) -> frozenset[int]:
        """Experts that travel in segments."""
        moves = (move for each in self.rounds for move in (*each.sends, *each.receives))
        return frozenset({move.expert for move in moves if move.segment != WHOLE})

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """Experts that this EP rank sends, those among them that it gets before, each once."""
        return tuple({move.expert: None for round_ in self.rounds for move in round_.sends})


@dataclass(frozen=True, eq=False)
class Transfers:
    """The moves that turn one placement into a wider one, in the order round, expert, receiver."""

    held: Placement  # who holds what before
    wanted: Placement  # and after
    node_C: np.ndarray  # node of each EP rank, 0 to V - 1, int64
    # round of each transfer, of its first segment, int64. The others follow in the rounds after it.
    round_N: np.ndarray
    expert_N: np.ndarray  # what travels, int64
    sender_N: np.ndarray  # from which EP rank, int64
    receiver_N: np.ndarray  # to which EP rank, int64
    num_segments_N: np.ndarray  # in which it travels, int64

    @cached_property
    def num_moved(self) -> int:
        """Distinct experts that cross EP ranks, ``#C^`` of eq. (1): its bound on ``received_C``."""
        return int(np.unique(self.expert_N).size)

    @cached_property
    def received_C(self) -> np.ndarray:
        """Experts that each EP rank receives, int64 ``[C]``; gradients that it sends to the
        owner."""
        return np.bincount(self.receiver_N, minlength=self.node_C.size)

    @cached_property
    def sent_C(self) -> np.ndarray:
        """Experts that each EP rank sends, int64 ``[C]``; gradients that it receives.

        At most twice rounds times ``num_moved``: in a tree an EP rank sends an expert once a round
        in its node, and once out of it. It pays for its few rounds with this logarithm, which eq.
        (1) does not have; in chains an EP rank sends an expert twice at most, once out of its node.
        All EP ranks together send no more than they receive.
        """
        return np.bincount(self.sender_N, minlength=self.node_C.size)

    @cached_property
    def everywhere(self) -> tuple[Move, ...]:
        moved = np.unique(self.expert_N)
        held_MC = self.held.holds_EC[moved]
        if not self.wanted.holds_EC[moved].all() or (held_MC.sum(axis=1) != 1).any():
            return ()
        return tuple(map(Move, moved.tolist(), held_MC.argmax(axis=1).tolist()))

    def part_of(self, ep_rank: int) -> Part:
        own = np.flatnonzero((self.sender_N == ep_rank) | (self.receiver_N == ep_rank))
        columns = (
            self.round_N,
            self.expert_N,
            self.sender_N,
            self.receiver_N,
            self.num_segments_N,
        )
        rounds = _OwnRounds(ep_rank)
        for transfer in zip(*(column[own].tolist() for column in columns)):
            rounds.add(*transfer)
        return Part(ep_rank, rounds.done(), self.everywhere)


class _OwnRounds:
    """Rounds as an EP rank sees them."""

    def __init__(self, ep_rank: int) -> None:
        self._ep_rank = ep_rank
        self._rounds: dict[int, tuple[list[Move], list[Move]]] = {}

    def add(self, number: int, expert: int, sender: int, receiver: int, num_segments: int) -> None:
        """A transfer of this EP rank's, whose first segment goes in the round of a number."""
        is_sent = sender == self._ep_rank
        other = receiver if is_sent else sender
        for segment in range(num_segments):
            sends, receives = self._rounds.setdefault(number + segment, ([], []))
            move = Move(expert, other, Segment(segment, num_segments))
            (sends if is_sent else receives).append(move)

    def done(self) -> tuple[Round, ...]:
        """Those in which the EP rank takes part."""
        numbered = sorted(self._rounds.items())
        return tuple(
            Round(tuple(sorted(sends)), tuple(sorted(receives)))
            for _, (sends, receives) in numbered
        )


def part_of(
    held: Placement,
    wanted: Placement,
    node_C: np.ndarray,
    ep_rank: int,
    transfer_size: TransferSize = SMALL,
) -> Part:
    """What an EP rank does of ``gather_rounds``. Where every expert has one holder before, the
    trees that the EP rank has no part in are not worked out, but for how often each of their EP
    ranks sends.

    Arguments and errors as of ``gather_rounds``.
    """
    _check(held, wanted, node_C)
    targets = _new_holders(held, wanted)
    if (held.num_holders_E[list(targets)] > 1).any():
        return gather_rounds(held, wanted, node_C, transfer_size).part_of(ep_rank)
    owners: list[int] = held.owner_E.tolist()
    node_of: list[int] = node_C.tolist()
    trees = _Trees(node_of, ep_rank, transfer_size, _leaving(targets, owners, node_of))
    for expert, ep_ranks in targets.items():
        trees.grow(expert, owners[expert], ep_ranks)
    everywhere = all(len(ep_ranks) == held.num_ep_ranks - 1 for ep_ranks in targets.values())
    return Part(
        ep_rank,
        trees.rounds.done(),
        tuple(Move(expert, owners[expert]) for expert in targets) if everywhere else (),
    )


def star_of(held: Placement, wanted: Placement, node_C: np.ndarray, ep_rank: int) -> Part | None:
    """What an EP rank does where all that moves goes from one holder to all EP ranks: all of it in
    one round, for who moves it by broadcasts and needs no trees. None where not all goes
    everywhere.

    Arguments and errors as of ``gather_rounds``.
    """
    _check(held, wanted, node_C)
    num_new_E = (wanted.holds_EC > held.holds_EC).sum(axis=1)
    moved = np.flatnonzero(num_new_E)
    if (num_new_E[moved] != held.num_ep_ranks - 1).any():
        return None
    everywhere = tuple(map(Move, moved.tolist(), held.owner_E[moved].tolist()))
    if not everywhere:
        return Part(ep_rank, (), ())
    others = [other for other in range(held.num_ep_ranks) if other != ep_rank]
    sends = (
        Move(each.expert, other)
        for each in everywhere
        if each.ep_rank == ep_rank
        for other in others
    )
    receives = (each for each in everywhere if each.ep_rank != ep_rank)
    return Part(ep_rank, (Round(tuple(sends), tuple(receives)),), everywhere)


class _Trees:
    """The trees and chains of ``gather_rounds``, as an EP rank sees them, of experts with one
    holder.

    In a round every EP rank that has the expert sends it, while EP ranks lack it: those that have
    sent least first, in the last round not all. So a tree of ``n`` receivers takes ``log2(n + 1)``
    full rounds, and who sends how often in these follows from the order of the receivers.
    """

    def __init__(
        self, node_of: list[int], ep_rank: int, transfer_size: TransferSize, num_leaving: list[int]
    ) -> None:
        self._node_of, self._ep_rank, self._size = node_of, ep_rank, len(node_of)
        self._has_one_node, self._transfer_size = len(set(node_of)) == 1, transfer_size
        # Sends so far and EP rank as one number, by which EP ranks are ordered.
        self._key = list(range(len(node_of)))
        self._num_led, self._num_leaving = [0] * len(node_of), num_leaving
        self._first_out = _first_out(num_leaving, node_of)
        self.rounds = _OwnRounds(ep_rank)

    def grow(self, expert: int, root: int, targets: list[int]) -> None:
        """The tree of one more expert, from its holder to the leaders of other nodes, and there on.

        Args:
            targets: in any order.
        """
        targets = sorted(targets, key=self._key.__getitem__)
        nodes = [[root, *targets]]
        if not self._has_one_node:
            ep_ranks_of: dict[int, list[int]] = defaultdict(list, {self._node_of[root]: [root]})
            for ep_rank in targets:
                ep_ranks_of[self._node_of[ep_rank]].append(ep_rank)
            nodes = list(ep_ranks_of.values())
            for ep_ranks in nodes[1:]:
                _lead(ep_ranks, self._num_led)
        num_segments = self._transfer_size.num_segments(len(nodes) - 1, max(map(len, nodes)) - 1)
        if num_segments == 1:
            self._tree(expert, nodes)
            return
        self._chain(expert, 0, [ep_ranks[0] for ep_ranks in nodes], num_segments)
        for number, ep_ranks in enumerate(nodes):
            self._chain(expert, number, ep_ranks, num_segments)

    def _chain(self, expert: int, number: int, ep_ranks: list[int], num_segments: int) -> None:
        """Count what each EP rank of a chain sends, with the moves of the EP rank."""
        for hop, (sender, receiver) in enumerate(pairwise(ep_ranks), start=number):
            self._key[sender] += self._size
            if self._ep_rank in (sender, receiver):
                self.rounds.add(hop, expert, sender, receiver, num_segments)

    def _tree(self, expert: int, nodes: list[list[int]]) -> None:
        """The same of a tree. Args: nodes: EP ranks of each; in front the one that has it first."""
        root, leaders = nodes[0][0], [ep_ranks[0] for ep_ranks in nodes[1:]]
        gate = _gate(nodes[0], self._num_leaving) if leaders else root
        first = self._first_out if leaders else 0
        if gate != root:
            nodes[0].remove(gate)
            self._moves(expert, 0, root, [gate])
        free = None  # the first round in which the head of this node has it and is free
        if not leaders:
            free = first
        elif self._ep_rank == gate or self._ep_rank in leaders:
            free = self._moves(expert, first, gate, leaders)
        else:
            full, last = self._count(gate, leaders)
        for ep_ranks in nodes:
            head, *rest = ep_ranks
            if rest and self._ep_rank in ep_ranks:
                if head == root:
                    free = first
                elif free is None:  # only its first round is of interest
                    is_late = head in last or head in leaders[(1 << full) - 1 :]
                    free = first + full + is_late
                self._moves(expert, free, head, rest)
            elif rest:
                self._count(head, rest)

    def _count(self, root: int, targets: list[int]) -> tuple[int, list[int]]:
        """Count what each EP rank sends; full rounds, and who sends in one that is not full."""
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
        for ep_rank in last:
            key[ep_rank] += size
        return full, last

    def _moves(self, expert: int, number: int, root: int, targets: list[int]) -> int:
        """The same, move by move, with those of the EP rank."""
        key, size, own = self._key, self._size, self._ep_rank
        ep_ranks = [root, *targets]  # each sends from the round on that comes after it received
        num_ready, free = 1, number
        while num_ready < len(ep_ranks):
            receivers = ep_ranks[num_ready : 2 * num_ready]
            senders = sorted(ep_ranks[:num_ready], key=key.__getitem__)[: len(receivers)]
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
    held: Placement, wanted: Placement, node_C: np.ndarray, transfer_size: TransferSize = SMALL
) -> Transfers:
    """Plan how the experts of one placement reach the EP ranks of a wider one.

    An expert crosses into a node once at most, and an EP rank sends it in a round to one in its
    node and to one in another, by other links. Any holder serves, one in the receiver's node first;
    among equals the one that has sent least so far. Into a node the target leads that has
    led least; else targets that have sent least are served first, since those pass most on. Ties go
    to the lowest EP rank.

    Cost: ``O(E C + N log N)``.

    Args:
        held: who holds what: the owners, or several holders if replicas exist already.
        wanted: who shall hold what, besides.
        node_C: node of each EP rank, 0 to V - 1, int64 ``[C]``.
        transfer_size: how large an expert is.

    Raises:
        ValueError: the placements are of different sizes, or ``wanted`` takes a replica away.
    """
    _check(held, wanted, node_C)
    target_ep_ranks = _new_holders(held, wanted)
    moved = list(target_ep_ranks)
    holder_ep_ranks: dict[int, list[int]] = {expert: [] for expert in moved}
    rows, holders = np.nonzero(held.holds_EC[moved])
    for row, ep_rank in zip(rows.tolist(), holders.tolist()):
        holder_ep_ranks[moved[row]].append(ep_rank)
    node_of: list[int] = node_C.tolist()
    owners = held.holds_EC.argmax(axis=1).tolist()
    forest = _Forest(node_of, transfer_size, _leaving(target_ep_ranks, owners, node_of))
    transfers = sorted(
        (number, expert, receiver, sender, num_segments)
        for expert in moved
        for number, sender, receiver, num_segments in forest.grow(
            holder_ep_ranks[expert], target_ep_ranks[expert]
        )
    )
    table_N5 = np.array(transfers, dtype=np.int64).reshape(-1, 5)
    round_N, expert_N, receiver_N, sender_N, num_segments_N = table_N5.T
    return Transfers(held, wanted, node_C, round_N, expert_N, sender_N, receiver_N, num_segments_N)


def _check(held: Placement, wanted: Placement, node_C: np.ndarray) -> None:
    """Raises ValueError as ``gather_rounds`` says."""
    if held.holds_EC.shape != wanted.holds_EC.shape or len(node_C) != held.num_ep_ranks:
        raise ValueError(
            f"placements [experts, EP ranks] {held.holds_EC.shape} and {wanted.holds_EC.shape} "
            f"with nodes of {len(node_C)} EP ranks; all must be of one grid"
        )
    if (held.holds_EC > wanted.holds_EC).any():
        lost = np.argwhere(held.holds_EC & ~wanted.holds_EC)
        raise ValueError(
            f"(expert, EP rank) {lost.tolist()} is held and not wanted; a gather only adds replicas"
        )


def _new_holders(held: Placement, wanted: Placement) -> dict[int, list[int]]:
    """EP ranks that come to hold an expert, ascending, of each that moves, ascending."""
    flat = np.flatnonzero(wanted.holds_EC > held.holds_EC)
    expert, ep_ranks = flat // held.num_ep_ranks, (flat % held.num_ep_ranks).tolist()
    starts = np.flatnonzero(np.diff(expert, prepend=-1))
    pairs = pairwise([*starts.tolist(), len(ep_ranks)])
    return {e: ep_ranks[start:stop] for e, (start, stop) in zip(expert[starts].tolist(), pairs)}


def _leaving(
    targets: Mapping[int, Sequence[int]], owners: Sequence[int], node_of: Sequence[int]
) -> list[int]:
    """Experts of each EP rank that other nodes want. Args: targets: new EP ranks of each that
    moves."""
    num_leaving = [0] * len(node_of)
    for expert, ep_ranks in targets.items():
        owner = owners[expert]
        num_leaving[owner] += any(node_of[ep_rank] != node_of[owner] for ep_rank in ep_ranks)
    return num_leaving


def _first_out(num_leaving: Sequence[int], node_of: Sequence[int]) -> int:
    """The first round in which experts leave their nodes: the second one where some may have to
    come to another EP rank before (``_gate``), for a card that is busy in two rounds has both wait
    for the busiest in each."""
    of_node: dict[int, list[int]] = defaultdict(list)
    for node, number in zip(node_of, num_leaving):
        of_node[node].append(number)
    return int(any(max(numbers) - min(numbers) >= GAP for numbers in of_node.values()))


def _gate(ep_ranks: Sequence[int], num_leaving: list[int]) -> int:
    """Who takes an expert out of its node: its holder; or, if that has two more to take out than
    another who gets it, and takes it over, this one, so that the node's cards give alike."""
    holder, gate = ep_ranks[0], min(ep_ranks, key=num_leaving.__getitem__)
    if num_leaving[holder] - num_leaving[gate] < GAP:
        return holder
    num_leaving[holder] -= 1
    num_leaving[gate] += 1
    return gate


def _lead(ep_ranks: list[int], num_led: list[int]) -> None:
    """Bring to the front who takes the next expert into its node: it has led least, so that the
    node's cards take in alike. Args: ep_ranks: of the node, those that have sent least first."""
    leader = min(ep_ranks, key=num_led.__getitem__)
    num_led[leader] += 1
    ep_ranks.remove(leader)
    ep_ranks.insert(0, leader)


class _Forest:
    """The way of one expert after another, which share the work of sending evenly."""

    def __init__(
        self, node_of: Sequence[int], transfer_size: TransferSize, num_leaving: list[int]
    ) -> None:
        self._node_of, self._transfer_size = node_of, transfer_size
        self._num_sent, self._num_led = [0] * len(node_of), [0] * len(node_of)
        self._num_leaving = num_leaving
        self._first_out = _first_out(num_leaving, node_of)

    def grow(
        self, holders: Iterable[int], targets: Iterable[int]
    ) -> Iterator[tuple[int, int, int, int]]:
        """(round, sender, receiver, segments) of one expert, senders before their receivers."""
        ready = self._free_in(0, holders)
        served = {self._node_of[ep_rank] for _, _, ep_rank in ready}
        waiting: dict[int, list[int]] = {}
        for ep_rank in sorted(targets, key=lambda each: (self._num_sent[each], each)):
            waiting.setdefault(self._node_of[ep_rank], []).append(ep_rank)
        leaders = []
        for node, ep_ranks in waiting.items():
            if node not in served:
                _lead(ep_ranks, self._num_led)
                leaders.append(ep_ranks.pop(0))
        most = max(map(len, waiting.values()), default=0)
        num_segments = self._transfer_size.num_segments(len(leaders), most)
        spread = self._spread if num_segments == 1 else self._chain
        if leaders and num_segments == 1:
            holders = [ep_rank for _, _, ep_rank in ready]
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
        for node, ep_ranks in waiting.items():
            here = [entry for entry in ready if self._node_of[entry[2]] == node]
            for move in spread(here, ep_ranks):
                yield *move, num_segments

    def _free_in(self, number: int, ep_ranks: Iterable[int]) -> list[tuple[int, int, int]]:
        """Of EP ranks that have an expert, as ``_spread`` takes them: all can send in a round."""
        return [(number, self._num_sent[ep_rank], ep_rank) for ep_rank in ep_ranks]

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
