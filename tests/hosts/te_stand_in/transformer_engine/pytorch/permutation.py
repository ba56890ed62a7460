# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens in the order of experts, and back. A map has the token of each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.signatures import takes


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[Tensor, Tensor]:
    tokens = routing_map.bool().t().nonzero()[:, 1]
    return inp[tokens], tokens


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    rows, tokens = moe_permute(inp, routing_map)
    return rows, probs.t()[routing_map.bool().t()], tokens


@takes("inp, row_id_map, merging_probs=None, restore_shape=None, map_type='mask', probs=None")
def moe_unpermute(asked: Any) -> Tensor:
    assert asked.merging_probs is None and asked.probs is None, "experts apply them here"
    return asked.inp.new_zeros(asked.restore_shape).index_add(0, asked.row_id_map, asked.inp)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    chunks = torch.split(inp, split_sizes.tolist())
    return torch.cat([chunks[number] for number in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    return (
        moe_sort_chunks_by_index(inp, split_sizes, sorted_index),
        moe_sort_chunks_by_index(probs, split_sizes, sorted_index),
    )
