"""The collectives we use: no other file moves data between ranks.

Shape letters: N rows sent, R rows received, C members of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

AllToAll = Callable[[Tensor, Sequence[int], Sequence[int], dist.ProcessGroup], Tensor]
"""``(rows [N, ...], rows to each member, rows from each member, group) -> rows [R, ...]``."""


def all_to_all_rows(
    rows_N: Tensor, sent_C: Sequence[int], received_C: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send consecutive rows to each member; rows arrive in the order of the members. Collective.

    Args:
        rows_N: rows in the order of the members that they go to, ``[N, ...]``.
        sent_C: rows for each member.
        received_C: rows from each member; the members must agree, pair by pair.
        group: a communicator that only the calling lane uses.
    """
    if len(sent_C) == 1:
        return rows_N
    arrived_R = rows_N.new_empty(sum(received_C), *rows_N.shape[1:])
    dist.all_to_all_single(
        arrived_R, rows_N.contiguous(), list(received_C), list(sent_C), group=group
    )
    return arrived_R


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
    arrived_R = rows_N.new_empty(sum(received_C), *rows_N.shape[1:])
    here = dist.get_rank(group)
    outgoing = rows_N.contiguous().split(list(sent_C))
    incoming = arrived_R.split(list(received_C))
    peers = [(here + step) % len(sent_C) for step in range(1, len(sent_C))]
    works = [
        dist.irecv(incoming[peer], group=group, group_src=peer)
        for peer in peers
        if received_C[peer]
    ]
    works += [
        dist.isend(outgoing[peer], group=group, group_dst=peer) for peer in peers if sent_C[peer]
    ]
    incoming[here].copy_(outgoing[here])
    for work in works:
        if work is not None:  # torch gives None to ranks outside the group
            work.wait()
    return arrived_R


def all_gather_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The counts of every member, int ``[C, ...]``, in the order of the members. Collective."""
    num_members = dist.get_world_size(group)
    if num_members == 1:
        return counts.unsqueeze(0)
    gathered = counts.new_empty(num_members * counts.shape[0], *counts.shape[1:])
    dist.all_gather_single(gathered, counts.contiguous(), group=group)
    return gathered.view(num_members, *counts.shape)


def sum_in_place(total: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Add the members' tensors, in place. Collective."""
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
    dist.all_gather_single(gathered, padded, group=group)
    parts = gathered.split(longest)
    return torch.cat([part[:length] for part, length in zip(parts, num_slots_C)])


def gather_texts(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """Every member's text, in the order of the members. For set-up, not for steps. Collective."""
    texts = [""] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group=group)
    return texts


def take_first(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Overwrite a tensor with the first member's, in place. Collective."""
    dist.broadcast(tensor, group=group, group_src=0)
    return tensor
