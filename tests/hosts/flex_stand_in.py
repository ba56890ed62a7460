# SPDX-License-Identifier: Apache-2.0
"""What DeepEP and HybridEP do for Megatron's flex dispatcher, in plain torch on any backend.

A token travels once to each rank that has some of its experts. Shape letters: T tokens, K choices,
W ranks, R tokens that came, L experts of a rank, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor


class Sent(NamedTuple):
    """What a way back needs to know."""

    token_R: Tensor  # of each token that was sent its number
    sent: list[int]  # tokens to each rank
    came: list[int]  # and from each
    num_tokens: int
    expert_N: Tensor  # HybridEP: of each row the token that it is of
    num_came: int


def _exchanged(x: Tensor, group: Any, came: list[int], sent: list[int]) -> Tensor:
    from megatron.core.tensor_parallel.mappings import all_to_all

    moved: Tensor = all_to_all(group, x.contiguous(), came, sent)
    return moved


def fused_dispatch(
    x: Tensor, expert_TK: Tensor, prob_TK: Tensor, num_experts: int, group: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Sent]:
    """As ``megatron.core.transformer.moe.fused_a2a.fused_dispatch``."""
    num_ranks = group.size()
    num_local = num_experts // num_ranks
    rank_TK = expert_TK.div(num_local, rounding_mode="floor")
    tokens = [(rank_TK == rank).any(1).nonzero()[:, 0] for rank in range(num_ranks)]
    sent = [len(own) for own in tokens]
    lines = [torch.empty(num_ranks, dtype=torch.long) for _ in range(num_ranks)]
    dist.all_gather(lines, torch.tensor(sent), group=group)
    came = [int(row[group.rank()]) for row in lines]
    token_R = torch.cat(tokens)
    to_R = torch.cat([torch.full((num,), rank) for rank, num in enumerate(sent)])
    is_there_RK = rank_TK[token_R] == to_R[:, None]
    slot_RK = torch.where(is_there_RK, expert_TK[token_R] - to_R[:, None] * num_local, -1)
    slots = _exchanged(slot_RK, group, came, sent)
    probs = _exchanged(prob_TK[token_R] * is_there_RK, group, came, sent)
    rows = _exchanged(x[token_R], group, came, sent)
    counts = torch.bincount(slots[slots >= 0], minlength=num_local)
    handle = Sent(token_R, sent, came, len(x), token_R, len(rows))
    return rows, slots, probs, counts, handle


def fused_combine(x: Tensor, group: Any, handle: Sent, **options: Any) -> tuple[Tensor, None]:
    """As ``fused_a2a.fused_combine``."""
    back = _exchanged(x, group, handle.sent, handle.came)
    return x.new_zeros(handle.num_tokens, x.shape[1]).index_add(0, handle.token_R, back), None


_GROUPS: list[Any] = []  # the one that HybridEP has a buffer for


def hybrid_ep_dispatch(  # noqa: PLR0917
    x: Tensor,
    routing_map: Tensor,
    probs: Tensor,
    group: Any,
    num_local_experts: int,
    pad_multiple: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, None, Tensor, Sent]:
    """As ``fused_a2a.hybrid_ep_dispatch``: rows come in the order of experts, and behind those of
    each zeros, up to a multiple."""
    _GROUPS[:] = [group]
    top_k = int(routing_map.sum(1).max())
    expert_TK = routing_map.byte().topk(top_k, dim=1).indices
    chosen_TK = torch.where(routing_map.gather(1, expert_TK), expert_TK, -1)
    prob_TK = probs.gather(1, expert_TK)
    rows, slot_RK, prob_RK, counts, sent = fused_dispatch(
        x, chosen_TK, prob_TK, routing_map.shape[1], group
    )
    places = [(slot_RK == slot).nonzero() for slot in range(num_local_experts)]
    padded = [-len(place) % (pad_multiple or 1) for place in places]
    nowhere = [slot_RK.new_full((num, 2), len(rows)) for num in padded]
    row_N, choice_N = torch.cat([x for pair in zip(places, nowhere) for x in pair]).unbind(1)
    rows_and_zero = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    probs_and_zero = torch.cat([prob_RK, prob_RK.new_zeros(1, prob_RK.shape[1])])
    choice_N = choice_N.clamp(max=top_k - 1)
    handle = sent._replace(expert_N=row_N)
    counts = counts + torch.tensor(padded)
    return rows_and_zero[row_N], probs_and_zero[row_N, choice_N], None, counts, handle


def hybrid_ep_combine(x: Tensor, handle: Sent, **options: Any) -> Tensor:
    """As ``fused_a2a.hybrid_ep_combine``."""
    summed = x.new_zeros(handle.num_came + 1, x.shape[1]).index_add(0, handle.expert_N, x)
    return fused_combine(summed[:-1], _GROUPS[0], handle)[0]


@contextmanager
def flex() -> Iterator[None]:
    """Both are there, inside the block."""
    from megatron.core.transformer.moe import token_dispatcher

    made = (fused_dispatch, fused_combine, hybrid_ep_dispatch, hybrid_ep_combine)
    named: dict[str, Any] = {each.__name__: each for each in made}
    named["set_deepep_num_sms"] = lambda num: None
    with mock.patch.multiple(token_dispatcher, create=True, **named):
        yield
