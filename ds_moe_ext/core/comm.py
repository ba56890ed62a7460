# SPDX-License-Identifier: Apache-2.0
"""The collectives we use: no other file moves data between ranks.

Shape letters: N rows sent, R rows received, C members of the group. Inside an ETP group: P its
ranks, R rows of one of them, G rows of all.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceOptions,
    _get_default_store,
)

from ds_moe_ext.core.rows import restacked
from ds_moe_ext.core.transfer import WHOLE, Move, Part, Segment
from ds_moe_ext.schedule.executor import Steps, to_the_end
from ds_moe_ext.schedule.watch import WATCH, Waiting, Wires

try:
    from torch.distributed import _coalescing_manager
except ImportError:  # it is private; without it the trees do what broadcasts would
    _coalescing_manager = None  # type: ignore[assignment]

AllToAll = Callable[[Tensor, Sequence[int], Sequence[int], dist.ProcessGroup], Tensor]
"""``(rows [N, ...], rows to each member, rows from each member, group) -> rows [R, ...]``."""


# Of the stream that calls, whose work goes on behind them.
_ALL_TO_ALL, _ALL_GATHER = AllToAllOptions(), AllgatherOptions()
_ALL_TO_ALL.asyncOp = _ALL_GATHER.asyncOp = False
_BESIDE = AllToAllOptions()  # by a thread of gloo's


def all_to_all_rows(
    rows_N: Tensor, sent_C: Sequence[int], received_C: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send consecutive rows to each member; rows arrive in the order of the members. Collective.

    Args:
        rows_N: rows in the order of the members that they go to, ``[N, ...]``.
        sent_C: rows for each member.
        received_C: rows from each member; the members must agree, pair by pair.
        group: a communicator that only the calling stream uses.
    """
    if len(sent_C) == 1:
        return rows_N
    arrived_R = rows_N.new_empty(sum(received_C), *rows_N.shape[1:])
    with Waiting(group):
        # The group's own, as in ``Pairs``: what ``dist`` checks before takes the host as long. Of
        # its two names in torch 2.13 and later the one that torch before has, too.
        all_to_all: Any = group.alltoall_base  # its stub wants lists
        _end(all_to_all(arrived_R, rows_N.contiguous(), received_C, sent_C, _ALL_TO_ALL))
    return arrived_R


def _end(work: dist.Work | None) -> None:
    """On CUDA the current stream waits, and not the host."""
    if work is not None:
        work.wait()


def all_to_all_by_pairs(
    rows_N: Tensor, sent_C: Sequence[int], received_C: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """The same as ``all_to_all_rows``, for gloo between hosts. Collective.

    Gloo's own all-to-all is half-duplex on a slow link: each announcement that a receiver is ready
    queues behind the bulk data of the same socket. With every receive posted before any send, none
    does. Within one host gloo's own costs fewer system calls.
    """
    if len(sent_C) == 1:
        return rows_N
    return _by_pairs(rows_N.contiguous().split(list(sent_C)), received_C, group)


def all_gather_rows(rows_R: Tensor, num_rows_P: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The rows of every rank of an ETP group, ``[G, ...]``, in the order of the ranks. Collective.

    Its adjoint is ``reduce_scatter_rows``. Nothing is padded. On NCCL ``connect`` the group first:
    ranks that move no rows do not call it.

    Args:
        rows_R: this rank's, ``[num_rows_P[here], ...]``; a lone rank gets them back as they are.
        num_rows_P: rows of each rank, the same on all of them.
        group: the ranks of the ETP group; a communicator that only the calling stream uses.
    """
    if len(num_rows_P) == 1:
        return rows_R
    return _by_pairs([rows_R.contiguous()] * len(num_rows_P), num_rows_P, group)


def reduce_scatter_rows(
    rows_G: Tensor,
    num_rows_P: Sequence[int],
    group: dist.ProcessGroup,
    all_to_all: AllToAll = all_to_all_rows,
) -> Tensor:
    """The sum over an ETP group's ranks of the rows that are this rank's, ``[R, ...]``. Collective.

    Its adjoint is ``all_gather_rows``. Summands are added in the order of the ranks, so that the
    bits depend on nothing else; those of narrow types in float32, which is rounded once.

    Args:
        rows_G: this rank's summands for the rows of every rank, in the order of the ranks,
            ``[sum(num_rows_P), ...]``; a lone rank gets them back as they are.
        num_rows_P: rows of each rank, the same on all of them.
        group: see ``all_gather_rows``.
        all_to_all: how the summands travel.
    """
    num_ranks = len(num_rows_P)
    if num_ranks == 1:
        return rows_G
    num_rows = num_rows_P[group.rank()]
    arrived = all_to_all(rows_G, num_rows_P, [num_rows] * num_ranks, group)
    first, second, *others = arrived.view(num_ranks, num_rows, *rows_G.shape[1:])
    total_R = first.to(_wide(first)) + second
    for summand_R in others:
        total_R += summand_R
    return total_R.to(rows_G.dtype)


def all_gather_counts(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The counts of every member, int ``[C, ...]``, in the order of the members. Collective."""
    members: Any = group or dist.group.WORLD  # its stub wants lists
    if members is None or members.size() == 1:
        return counts.unsqueeze(0)
    size = members.size()
    gathered = counts.new_empty(size * counts.shape[0], *counts.shape[1:])
    with Waiting(group):
        if counts.is_cpu:
            # Gloo's all-gather goes round a ring, and takes twice as long as to send each its own.
            each = torch.cat([counts] * size)
            _end(members.alltoall_base(gathered, each, [], [], _ALL_TO_ALL))
        else:
            _end(members._allgather_base(gathered, counts.contiguous(), _ALL_GATHER))
    return gathered.view(size, *counts.shape)


def max_in_place(most: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The largest of the members' values, element by element, in place. Collective."""
    with Waiting(group):
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return most


def sum_in_place(total: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Add the members' tensors, in place. Collective."""
    with Waiting(group):
        dist.all_reduce(total, group=group)
    return total


def all_gather_slots(
    local_S: Tensor, num_slots_C: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Join the members' tensors along their first dim, which may differ in length. Collective.

    Args:
        local_S: this member's part, ``[num_slots_C[here], ...]``.
        num_slots_C: length of each member's part.
    """
    if len(num_slots_C) == 1:
        return local_S
    longest = max(num_slots_C)
    padded = local_S.new_zeros(longest, *local_S.shape[1:])
    padded[: local_S.shape[0]] = local_S
    gathered = local_S.new_empty(len(num_slots_C) * longest, *padded.shape[1:])
    with Waiting(group):
        _end(group._allgather_base(gathered, padded, _ALL_GATHER))
    parts = gathered.split(longest)
    return torch.cat([part[:length] for part, length in zip(parts, num_slots_C)])


T = TypeVar("T")


def gather_objects(thing: T, group: dist.ProcessGroup | None) -> list[T]:
    """What every member has, pickled on the way, in the order of the members. It takes about a
    millisecond. Collective."""
    things = [thing] * dist.get_world_size(group)
    with Waiting(group):
        dist.all_gather_object(things, thing, group=group)
    return things


def take_first(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Overwrite a tensor with the first member's, in place. Collective."""
    with Waiting(group):
        dist.broadcast(tensor, group=group, group_src=0)
    return tensor


def counts_to_host(counts: Tensor, group: dist.ProcessGroup | None) -> OnTheirWay:
    """Begin to bring counts to the host, in the stream that calls; on CUDA nobody waits yet. Who
    calls goes on with what needs no counts, and asks for them then."""
    if not counts.is_cuda:
        return OnTheirWay(counts, group)
    # Pinned, or the copy would wait. Torch keeps pinned blocks for the next who asks, and gives
    # none away before the copies in it have ended. A default device of the user's is not meant.
    landing = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
    landing.copy_(counts, non_blocking=True)
    landed = torch.cuda.current_stream(counts.device).record_event()
    return OnTheirWay(landing, group, landed)


@dataclass(frozen=True, eq=False)
class OnTheirWay:
    """Counts that come to the host."""

    counts: Tensor  # where they are, or will be
    group: dist.ProcessGroup | None  # of those who counted
    landed: torch.cuda.Event | None = None  # when they are there; None where nothing was begun

    @property
    def has_landed(self) -> bool | None:
        """Whether the device has done all that came before; None where none was asked."""
        return None if self.landed is None else self.landed.query()

    def ready(self) -> Tensor:
        """The counts, on the host. Waits for them, and so for the ranks that counted."""
        if self.landed is None and self.counts.is_cpu:
            return self.counts
        with Waiting(self.group):
            if self.landed is None:
                return self.counts.cpu()
            self.landed.synchronize()
        return self.counts


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """How long its collectives wait for other ranks; None asks about the world."""
    asked = group or dist.group.WORLD
    assert asked is not None, "torch.distributed is not initialized"
    (first, *_) = asked._device_types  # one backend serves all, or each was given the same
    return asked._get_backend(first).options._timeout


def urgent() -> Any:
    """Options for one new communicator whose kernels go before others that are ready too, as those
    of experts are; None where the world's backend has no such option, as gloo has none."""
    world, cuda = dist.group.WORLD, torch.device("cuda")
    if world is None or cuda not in world._device_types or not dist.is_nccl_available():
        return None
    if not isinstance(world._get_backend(cuda), dist.ProcessGroupNCCL):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout_of(None)
    return options


@dataclass(frozen=True, eq=False)
class KeyValueStore:
    """What ranks report to each other without a collective: keys in the store by which the world
    met."""

    rank: int  # this one
    size: int  # ranks of the world
    timeout_s: float  # how long the world's collectives wait for other ranks
    _store: dist.Store

    @classmethod
    def of_world(cls) -> KeyValueStore | None:
        """The world's; None where it has one rank, or none is made yet."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        store = _key_value_store()
        if store is None:
            return None
        return cls(dist.get_rank(), dist.get_world_size(), timeout_of(None).total_seconds(), store)

    def put(self, key: str, text: str) -> None:
        """Write, over what is there."""
        self._store.set(key, text)

    def put_first(self, key: str, text: str) -> str:
        """Write where nothing is there; what is there then."""
        return bytes(self._store.compare_set(key, "", text)).decode()

    def add(self, key: str, more: int) -> int:
        """Add to a number, 0 at first; what it is then."""
        return self._store.add(key, more)

    def read(self, key: str) -> str | None:
        """What is there; None for nothing."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def awaited(self, key: str, seconds: float) -> str | None:
        """What is there, once something is; None where nothing came. The store's own way of waiting
        keeps other threads from it, and writes warnings."""
        end_s, pause_s = time.monotonic() + seconds, 0.001
        while (text := self.read(key)) is None and time.monotonic() < end_s:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.25)
        return text


def _key_value_store() -> Any:
    """The store by which the world met; None where nobody can meet, as in a fake group, of which
    this process is all there is."""
    store = _get_default_store()
    try:
        store.add("ds_moe_ext/tries", 1)
    except RuntimeError:  # it has no methods
        return None
    return store


# Ranks that fail.

STORE_TIMEOUT = timedelta(seconds=5)


def begin_watch() -> None:
    """Let this process watch its exchanges with others from now on; see ``watch``. Wherever a
    process group has been made again, it must be called again."""
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return
    whole = _key_value_store()
    if whole is None or WATCH.has_begun(whole):
        return
    store = whole.clone()  # its own: another thread may wait in that
    store.set_timeout(STORE_TIMEOUT)
    WATCH.start(
        Wires(
            store,
            weakref.ref(whole),
            world.rank(),
            world.size(),
            os.getpid(),
            dist.get_process_group_ranks,
            break_off,
            break_off_all,
        )
    )


def break_off(group: dist.ProcessGroup) -> None:
    """Make all that wait in a communicator on this rank raise RuntimeError (on CUDA: stop waiting),
    and on other ranks whoever comes later. Nobody can use it any more."""
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        is_gloo = isinstance(backend, dist.ProcessGroupGloo)
        if is_gloo:
            # Its abort lets nobody go, but who gives up a receive closes all its connections.
            peer = (group.rank() + 1) % group.size()
            with suppress(RuntimeError):
                backend.recv([torch.zeros(1)], peer, NEVER_SENT).wait(timedelta(milliseconds=1))
        else:
            backend.abort()


def break_off_all() -> None:
    """The same, in every communicator that torch knows of, the host's too."""
    known: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    for group in [*known]:
        if isinstance(group, dist.ProcessGroup) and group.size() > 1:
            break_off(group)


NEVER_SENT = 2**30
"""A tag."""


# Between pairs.

PACKED = torch.contiguous_format


def as_bytes(tensor: Tensor) -> Tensor:
    """As any communicator takes it: NCCL knows no bool, for one. uint8 ``[bytes]``, of the same
    memory where that is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8)


Parcel = tuple[Tensor, int]
"""A contiguous tensor and the member at the other end."""

SMALL_BYTES = 64 << 10
"""Of a tensor that is sooner copied twice than sent alone by gloo: a bias, or tiny experts; of two
ranks, all that goes either way at once."""


def _messages(parcels: Sequence[Parcel]) -> list[tuple[list[Tensor], int]]:
    """What goes at once, all small tensors of a member and each other one, as flat views. Both ends
    have the parcels of a pair in one order, so that they come to the same."""
    at_once: list[tuple[list[Tensor], int]] = []
    small: dict[int, list[Tensor]] = {}
    for tensor, member in parcels:
        if tensor.nbytes > SMALL_BYTES:
            at_once.append(([tensor], member))
        elif member in small:
            small[member].append(tensor)
        else:
            small[member] = [tensor]
            at_once.append((small[member], member))
    return [(_flat(own), member) for own, member in at_once]


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of contiguous tensors as rows of one type, bytes where they are of several."""
    if len({tensor.dtype for tensor in tensors}) < 2:
        return [tensor.view(-1) for tensor in tensors]
    return [as_bytes(tensor) for tensor in tensors]


def _room_for(parts: Sequence[Tensor]) -> Tensor:
    """Where they arrive at once: a lone one in its own place."""
    if len(parts) < 2:
        return parts[0] if parts else _NOTHING
    return parts[0].new_empty(sum([part.numel() for part in parts]))


def _as_one(parts: list[Tensor]) -> Tensor:
    if len(parts) < 2:
        return parts[0] if parts else _NOTHING
    return torch.cat(parts)


def _take_apart(room: Tensor, parts: list[Tensor]) -> None:
    """Once all have arrived in the room for them."""
    if len(parts) > 1:
        torch._foreach_copy_(parts, room.split_with_sizes([part.numel() for part in parts]))


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


@dataclass(slots=True)
class Pairs:
    """Moves tensors between pairs of members, in one exchange, and counts their bytes."""

    group: dist.ProcessGroup  # whose members
    groups_calls: bool  # all that is posted at once is one call, as NCCL has it
    packs_small: bool  # small tensors between two members go as one
    sent_bytes: int = 0  # so far, of this rank
    received_bytes: int = 0  # likewise

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> Pairs:
        """Between members of a group, of tensors on a device."""
        backend: Any = group._get_backend(device)
        is_gloo = isinstance(backend, dist.ProcessGroupGloo)
        return cls(group, bool(backend.supports_coalescing), packs_small=is_gloo)

    def post(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> list[dist.Work]:
        """Start to move tensors.

        Every receive is posted before any send, see ``all_to_all_by_pairs``. Several tensors from
        one member to another match by their order, which both sides must keep. The group's own
        methods, which ``dist.batch_isend_irecv`` calls in the end: what it checks before takes the
        host three times as long as they do.
        """
        if not receives and not sends:
            return []
        if not self.groups_calls:
            return self._each(receives, sends)
        device = (receives or sends)[0][0].device
        if _coalescing_manager is None:
            group = self.group
            ops = [dist.P2POp(dist.irecv, into, None, group, 0, peer) for into, peer in receives]
            ops += [dist.P2POp(dist.isend, out, None, group, 0, peer) for out, peer in sends]
            works: list[dist.Work] = dist.batch_isend_irecv(ops)
            return works
        with _coalescing_manager(self.group, device, async_ops=True) as calls:
            self._each(receives, sends)
        return list(calls.works)

    def _each(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> list[dist.Work]:
        recv, send = self.group.recv, self.group.send
        works = [recv([into], peer, 0) for into, peer in receives]
        works += [send([out], peer, 0) for out, peer in sends]
        return works

    def move(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> Steps[None]:
        """Move tensors; it pauses while they are under way. On CUDA the current stream waits, and
        not the host."""
        sent_bytes = sum([tensor.nbytes for tensor, _ in sends])
        received_bytes = sum([tensor.nbytes for tensor, _ in receives])
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes
        if not self.packs_small:
            yield from self._under_way(receives, sends)
        elif self.group.size() == 2 and max(sent_bytes, received_bytes) <= SMALL_BYTES:
            yield from self._swap(receives, sends)
        else:
            yield from self._in_messages(receives, sends)

    def _under_way(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> Steps[None]:
        """The same, each tensor a message."""
        with Waiting(self.group):
            works = self.post(receives, sends)
        yield
        with Waiting(self.group):
            for work in works:
                work.wait()

    def _in_messages(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> Steps[None]:
        """The same, small tensors between two members as one."""
        arriving, leaving = _messages(receives), _messages(sends)
        rooms = [(_room_for(parts), member) for parts, member in arriving]
        sent = [(_as_one(parts), member) for parts, member in leaving]
        yield from self._under_way(rooms, sent)
        for (room, _), (parts, _) in zip(rooms, arriving):
            _take_apart(room, parts)

    def _swap(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> Steps[None]:
        """The same in a group of two, all of it small, as an all-to-all: a thread of gloo's does
        it, where sends and receives take more of the caller's time."""
        arriving, leaving = (_flat([tensor for tensor, _ in each]) for each in (receives, sends))
        room, sent = _room_for(arriving), _as_one(leaving)
        into, out = room.view(torch.uint8), sent.view(torch.uint8)
        from_C, to_C = [into.numel()] * 2, [out.numel()] * 2
        here = self.group.rank()
        from_C[here] = to_C[here] = 0
        all_to_all: Any = self.group.alltoall_base  # its stub wants lists
        work = all_to_all(into, out, from_C, to_C, _BESIDE)
        yield
        with Waiting(self.group):
            work.wait()
        _take_apart(room, arriving)

    @property
    def traffic(self) -> Traffic:
        """Of what has been begun so far."""
        return Traffic(self.sent_bytes, self.received_bytes)


def _by_pairs(
    outgoing_C: Sequence[Tensor], received_C: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send each member a contiguous tensor; rows arrive in their order, ``[R, ...]``.
    Collective."""
    num_members, here = len(outgoing_C), group.rank()
    arrived_R = outgoing_C[here].new_empty(sum(received_C), *outgoing_C[here].shape[1:])
    incoming_C = arrived_R.split(list(received_C))
    peers = [(here + step) % num_members for step in range(1, num_members)]
    with Waiting(group):
        works = Pairs.of(group, arrived_R.device).post(
            [(incoming_C[peer], peer) for peer in peers if received_C[peer]],
            [(outgoing_C[peer], peer) for peer in peers if outgoing_C[peer].shape[0]],
        )
        incoming_C[here].copy_(outgoing_C[here])
        for work in works:
            work.wait()
    return arrived_R


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make the communicator, so that some members may then call alone in pairs. Collective.

    NCCL makes it in the group's first call, and all members must be in that one.
    """
    with Waiting(group):
        dist.all_reduce(torch.zeros((), device=device), group=group)


def exchange(
    receives: Sequence[Parcel], sends: Sequence[Parcel], group: dist.ProcessGroup
) -> Traffic:
    """Move tensors between pairs of members; see ``Pairs.post``. For those who take part in it:
    what one sends to another in a call, that one receives in a call of its own.

    Args:
        receives: where to receive, contiguous, and from whom.
        sends: what to send, contiguous, and to whom.
    """
    if not receives and not sends:
        return Traffic()
    pairs = Pairs.of(group, (receives or sends)[0][0].device)
    to_the_end(pairs.move(receives, sends))
    return pairs.traffic


# Sparse collectives: experts to the EP ranks of a wider placement, and their gradients back.


@dataclass(frozen=True, slots=True)
class Traffic:
    """Payload of one rank."""

    # what it sent. A broadcast counts once at its root, however the library sends it.
    sent_bytes: int = 0
    received_bytes: int = 0  # what it received; a reduce likewise once at its root

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent_bytes + other.sent_bytes, self.received_bytes + other.received_bytes
        )


@dataclass(frozen=True, eq=False)
class Arrived:
    """What a sparse reduce-scatter brought to the owner."""

    # for each expert of this rank that has replicas, the sum of their gradients, without the
    # rank's own; it shares no memory with what was given
    grads: Mapping[int, tuple[Tensor, ...]]
    traffic: Traffic  # what it took


def sparse_all_gather(
    part: Part,
    chunks: Mapping[int, Sequence[Tensor]],
    buffers: Mapping[int, Sequence[Tensor]],
    group: dist.ProcessGroup,
) -> Steps[Traffic]:
    """Copy experts from the EP ranks that hold them to those that want them. Collective.

    Before: the holders' weights of an expert are bit-equal, and no buffer overlaps another or a
    chunk. After: every buffer named by ``part.received`` has the holders' bits; all else is as it
    was. A rank without a part returns at once.

    It pauses in each round, while what the rank sends and receives there is under way.

    On CUDA the host does not wait: the current stream does. What is given must be ready on that
    stream, and must be kept until the stream has passed. ``connect`` the group first.

    Args:
        part: what this rank does: ``transfers.part_of(its place in the group)``, of the same
            transfers on every rank. Segments of experts are views.
        chunks: tensors of the experts that this rank holds, at least those that it sends. An expert
            has the same shapes and dtypes, in the same order, on every rank.
        buffers: where to receive, of those shapes and dtypes, at least for ``part.received``.
        group: one member per EP rank; a communicator that only the calling stream uses.
    """
    if not part.rounds:
        return Traffic()
    have = {expert: _whole(buffers[expert]) for expert in part.received}
    have |= {expert: _whole(chunks[expert]) for expert in part.sent if expert not in have}
    device = _device_of(have)
    if by_broadcast(part, device):
        traffic = _broadcast(part, have, group)
    else:
        pairs = Pairs.of(group, device)
        for round_ in part.rounds:
            yield from pairs.move(_parcels(round_.receives, have), _parcels(round_.sends, have))
        traffic = pairs.traffic
    for expert in part.received:
        for buffer, arrived in zip(buffers[expert], have[expert]):
            if not buffer.is_contiguous():
                buffer.detach().copy_(arrived)
    return traffic


class Packing(Protocol):
    """What tensors travel as, where each hop adds its own to what arrived."""

    def pack(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Contiguous, of shapes and types that follow from those of the tensors."""
        ...

    def unpack(self, arrived: Sequence[Tensor], into: Sequence[Tensor]) -> None: ...


def sparse_reduce_scatter(
    part: Part,
    grads: Mapping[int, Sequence[Tensor]],
    group: dist.ProcessGroup,
    *,
    in_float32: bool = False,
    packing: Packing | None = None,
) -> Steps[Arrived]:
    """Sum the gradients of an expert's replicas at its owner. Collective.

    The same transfers as those of the gather from the owners, backwards: each must start from an
    expert's only holder. Before: every receiver of the gather has a gradient, zeros if no row came.
    After: the owner has the sum over the replicas, which is to be added to its own gradient; what
    was given is as it was. A rank without a part returns at once.

    Each node of the tree adds what arrives as it arrives, round by round and by ascending EP rank
    within a round, then its own: the same bits every time, segment by segment too. Pauses, streams
    and lifetimes: see ``sparse_all_gather``; the sums belong to the current stream.

    Args:
        part: see ``sparse_all_gather``.
        grads: the gradients of this rank's replicas; and for each expert owned here that has
            replicas any tensors of its shapes and dtypes, whose values are not read.
        group: see ``sparse_all_gather``.
        in_float32: keep sums of narrower types in float32 within a rank; what travels keeps its
            type.
        packing: what travels in place of sums, hop by hop; experts must then travel whole, and not
            by broadcasts. None: they themselves.
    """
    if not part.rounds:
        return Arrived({}, Traffic())
    device = _device_of(grads)
    if not in_float32 and packing is None and by_broadcast(part, device):
        return _reduce(part, grads, group)
    sums, pairs = _Sums(part, grads, in_float32), Pairs.of(group, device)
    for round_ in reversed(part.rounds):
        leaving, landing = sums.leaving(round_.receives), sums.landing(round_.sends)
        rooms = landing
        if packing is not None:
            rooms = [packing.pack(room) for room in landing]  # for their shapes
            leaving = [packing.pack(own) for own in leaving]
        yield from pairs.move(_addressed(rooms, round_.sends), _addressed(leaving, round_.receives))
        if packing is not None:
            for arrived, room in zip(rooms, landing):
                packing.unpack(arrived, room)
        sums.add(round_.sends, landing)
    return Arrived(sums.at_owner(), pairs.traffic)


def by_broadcast(part: Part, device: torch.device) -> bool:
    """Whether broadcasts and reduces move the experts, grouped into one call, instead of trees.

    Only on CUDA, where NCCL groups calls, and if every expert that moves goes to all EP ranks.
    """
    return bool(part.everywhere) and can_broadcast(device)


def can_broadcast(device: torch.device) -> bool:
    """Whether ``by_broadcast`` holds where every expert that moves goes to all EP ranks."""
    return device.type == "cuda" and _coalescing_manager is not None


def _broadcast(part: Part, have: Mapping[int, list[Tensor]], group: dist.ProcessGroup) -> Traffic:
    reported = BroadcastOptions()
    apart: list[tuple[Tensor, Sequence[Tensor]]] = []  # what came as one, and where it goes
    with _one_call(group, _device_of(have)):
        for root, experts in part.runs:
            reported.rootRank = root
            for rooms in zip(*(have[expert] for expert in experts)):
                sent = _together(rooms)
                if root != part.ep_rank and sent[0].data_ptr() != rooms[0].data_ptr():
                    apart.append((sent[0], rooms))
                for tensor in sent:  # before Hopper NCCL takes no numbers of 8 bits
                    own = as_bytes(tensor) if tensor.dtype.itemsize == 1 else tensor
                    group.broadcast([own], reported)
    for arrived, into in apart:
        torch._foreach_copy_(list(into), list(arrived.unbind()))
    received = sum(tensor.nbytes for expert in part.received for tensor in have[expert])
    return Traffic(_rooted_bytes(part, have), received)


def _reduce(part: Part, grads: Mapping[int, Sequence[Tensor]], group: dist.ProcessGroup) -> Arrived:
    arrived: dict[int, tuple[Tensor, ...]] = {}
    leaving: list[tuple[int, Sequence[Tensor]]] = []
    for root, experts in part.runs:
        each: list[Sequence[Tensor]]  # of a weight each, expert by expert
        if root == part.ep_rank:
            zeros = (grad.new_zeros(len(experts), *grad.shape) for grad in grads[experts[0]])
            each = [total.unbind() for total in zeros]
            arrived |= zip(experts, zip(*each))
        else:
            each = list(zip(*(_whole(grads[expert]) for expert in experts)))
        leaving += [(root, _together(own)) for own in each]
    reported = ReduceOptions()  # a sum
    with _one_call(group, _device_of(grads)):
        for root, totals in leaving:
            reported.rootRank = root
            for total in totals:
                group.reduce([total], reported)
    sent = sum(grad.nbytes for expert in part.received for grad in grads[expert])
    return Arrived(arrived, Traffic(sent, _rooted_bytes(part, grads)))


TOGETHER_BYTES = 16 * 2**20
"""Of a weight of one expert: by estimate a copy of so much, where one is needed, takes a GPU no
longer than a broadcast of its own takes the host."""


def _together(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """What a run of experts' contiguous tensors of one shape travels as: small ones as one, ``[N,
    ...]``, which is a view where they lie side by side, else a copy."""
    if len(tensors) == 1 or tensors[0].nbytes > TOGETHER_BYTES:
        return tensors
    return [restacked(tensors)]


def _rooted_bytes(part: Part, tensors: Mapping[int, Sequence[Tensor]]) -> int:
    roots = [expert for expert, root, _ in part.everywhere if root == part.ep_rank]
    return sum(tensor.nbytes for expert in roots for tensor in tensors[expert])


@contextmanager
def _one_call(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Group the collectives inside into one call of NCCL. They are the group's own, as in
    ``Pairs``."""
    with Waiting(group):
        with _coalescing_manager(group, device, async_ops=True) as calls:
            yield
        calls.wait()


class _Sums:
    """Gradients of replicas that have come to this rank and have not left.

    Arguments as of ``sparse_reduce_scatter``.
    """

    def __init__(self, part: Part, grads: Mapping[int, Sequence[Tensor]], in_float32: bool) -> None:
        self._grads = {**grads, **{expert: _whole(grads[expert]) for expert in part.cut}}
        self._widens = in_float32 and any(
            _wide(grad) != grad.dtype for tensors in grads.values() for grad in tensors
        )
        self._sums: dict[tuple[int, Segment], Sequence[Tensor]] = {}
        self._whole: dict[int, list[Tensor]] = {}  # of whole experts, where segments come to lie

    def leaving(self, moves: Sequence[Move]) -> list[Sequence[Tensor]]:
        """What goes to the owner by each move of the gather: what arrived from others, then this
        rank's."""
        both: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        totals: list[Tensor] = []
        more: list[Tensor] = []
        for expert, _, segment in moves:
            own = segment_of(self._grads[expert], segment)
            arrived = self._sums.pop((expert, segment), None)
            if arrived is not None:
                totals += arrived
                more += _apart(own)
            both.append((_whole(own) if arrived is None else arrived, own))
            if not segment.number:  # the last one to leave
                self._whole.pop(expert, None)
        add_each(totals, more)
        if not self._widens:
            return [each for each, _ in both]
        return [[t.to(grad.dtype) for t, grad in zip(each, own)] for each, own in both]

    def landing(self, moves: Sequence[Move]) -> list[Sequence[Tensor]]:
        """Where to receive what comes to the owner by each move of the gather."""
        rooms: list[Sequence[Tensor]] = []
        first: set[tuple[int, Segment]] = set()
        for expert, _, segment in moves:
            key = expert, segment
            if self._widens or key in self._sums or key in first:
                rooms.append(_like_each(segment_of(self._grads[expert], segment)))
            else:
                first.add(key)
                rooms.append(segment_of(self._room(expert), segment))
        return rooms

    def add(self, moves: Sequence[Move], landed: Sequence[Sequence[Tensor]]) -> None:
        """Take in what has landed, move by move."""
        adding: dict[tuple[int, Segment], Sequence[Tensor]] = {}
        for (expert, _, segment), tensors in zip(moves, landed):
            key = expert, segment
            if key in adding:  # a kernel for many must not add to one twice
                self._add(adding)
                adding.clear()
            if key in self._sums:
                adding[key] = tensors
            elif self._widens:
                self._sums[key] = [tensor.to(_wide(tensor)) for tensor in tensors]
            else:
                self._sums[key] = tensors
        self._add(adding)

    def _add(self, more: Mapping[tuple[int, Segment], Sequence[Tensor]]) -> None:
        totals = [total for key in more for total in self._sums[key]]
        add_each(totals, [tensor for tensors in more.values() for tensor in tensors])

    def at_owner(self) -> dict[int, tuple[Tensor, ...]]:
        """By expert, what has not left at the end; rounded to the types of the gradients."""
        if self._widens:
            for (expert, segment), totals in self._sums.items():
                for into, total in zip(segment_of(self._room(expert), segment), totals):
                    into.copy_(total)
        return {expert: tuple(self._whole[expert]) for expert, _ in self._sums}

    def _room(self, expert: int) -> list[Tensor]:
        if expert not in self._whole:
            self._whole[expert] = _like_each(self._grads[expert])
        return self._whole[expert]


def add_each(totals: list[Tensor], more: list[Tensor]) -> None:
    """Add to each tensor its own one, in place: on a GPU in one kernel for many."""
    if len(totals) > 1:
        torch._foreach_add_(totals, more)
    elif totals:
        totals[0].add_(more[0])


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def segment_of(tensors: Sequence[Tensor], segment: Segment) -> Sequence[Tensor]:
    """What is in a segment of contiguous tensors, as flat views; of the whole they themselves.

    A segment has an even part of the bytes, but for edges amid an element, and so of some tensors
    a part or nothing: it is at most a message more than it has tensors.
    """
    if segment == WHOLE:
        return tensors
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    start, stop = (num_bytes * edge // segment.of for edge in (segment.number, segment.number + 1))
    views = []
    for tensor in tensors:
        first, last = (
            min(max(edge, 0), tensor.nbytes) // tensor.element_size() for edge in (start, stop)
        )
        if first < last:
            views.append(tensor.view(-1)[first:last])
        start, stop = start - tensor.nbytes, stop - tensor.nbytes
    return views


def _parcels(moves: Sequence[Move], have: Mapping[int, Sequence[Tensor]]) -> list[Parcel]:
    return _addressed([segment_of(have[expert], segment) for expert, _, segment in moves], moves)


def _addressed(contents: Sequence[Sequence[Tensor]], moves: Sequence[Move]) -> list[Parcel]:
    return [(tensor, ep_rank) for each, (_, ep_rank, _) in zip(contents, moves) for tensor in each]


def _like_each(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor, memory_format=PACKED) for tensor in tensors]


def _whole(tensors: Iterable[Tensor]) -> list[Tensor]:
    """As transfers need them: apart from autograd and contiguous, copied only if they are not."""
    return [t if t.is_contiguous() else t.contiguous() for t in _apart(tensors)]


def _apart(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Apart from autograd."""
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


def _device_of(tensors: Mapping[int, Sequence[Tensor]]) -> torch.device:
    return next(iter(tensors.values()))[0].device
