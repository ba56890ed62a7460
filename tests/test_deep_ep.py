# SPDX-License-Identifier: Apache-2.0
"""The adapter to DeepEP over a stand-in that keeps to its documented API, on gloo ranks: what the
adapter asks for, and refuses. DeepEP itself is not run.

Shape letters: C EP ranks, N rows sent, D model width.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.core.comm import all_gather_counts, all_to_all_rows
from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.moe.dispatch import DeepEp, buffer_of, why_not
from tests.ranks import pool_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Settings:
    """What ``get_*_config`` gives."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 2 * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """Stands in for ``deep_ep.Buffer``: tokens in the order of their sources, over gloo."""

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group = group
        self.num_bytes = num_nvl_bytes, num_rdma_bytes
        self.layouts = 0

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Settings:
        return Settings()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64 and topk_idx.dim() == 2 and topk_idx.is_contiguous()
        self.layouts += 1
        goes_NP = topk_idx == torch.arange(num_experts)
        per_rank = goes_NP.sum(dim=0).int()
        return per_rank, None, per_rank.clone(), goes_NP, None

    def dispatch(
        self,
        x: Tensor,
        *,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        is_first = handle is None
        if is_first:
            assert num_tokens_per_rank is not None and is_token_in_rank is not None
            assert torch.equal(is_token_in_rank.sum(dim=1), torch.ones(len(x), dtype=torch.long))
            counts = all_gather_counts(num_tokens_per_rank, self.group)
            here = self.group.rank()
            order_N = is_token_in_rank.int().argmax(dim=1).argsort(stable=True)
            handle = (order_N, counts[here].tolist(), counts[:, here].tolist())
        order_N, sent, received = handle
        arrived = all_to_all_rows(x[order_N], sent, received, self.group)
        return arrived, None, None, received if is_first else None, handle if is_first else None, ()

    def combine(self, x: Tensor, handle: tuple[Any, ...]) -> tuple[Any, ...]:
        order_N, sent, received = handle
        returned = all_to_all_rows(x, received, sent, self.group)
        return returned[order_N.argsort()], None, ()


class Reversed(Buffer):
    """Whose tokens arrive the other way around."""

    def dispatch(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        arrived, *others = super().dispatch(x, *args, **kwargs)
        return arrived.flip(0), *others


@contextmanager
def installed(buffer: type | None = Buffer) -> Iterator[None]:
    module = ModuleType("deep_ep")
    module.__spec__ = importlib.machinery.ModuleSpec("deep_ep", None)
    if buffer is not None:
        vars(module)["Buffer"] = buffer
    with mock.patch.dict(sys.modules, {"deep_ep": module}):
        yield


def _carried(rank: int, world_size: int) -> None:
    rng = np.random.default_rng(0)
    shape = (world_size, world_size)
    cases = [rng.integers(0, 5, shape), np.zeros(shape, np.int64), np.triu(np.ones(shape, int))]
    buffer_of.cache_clear()
    with installed():
        make_buffer = partial(buffer_of, dist.group.WORLD)
        carrier = DeepEp(make_buffer, rank)
        for counts_CC in cases:
            transfer = carrier.transfer(counts_CC, CPU)
            sent_C, received_C = counts_CC[rank].tolist(), counts_CC[:, rank].tolist()
            rows_ND = torch.randn(sum(sent_C), 8, dtype=torch.bfloat16)
            expected = all_to_all_rows(rows_ND, sent_C, received_C, dist.group.WORLD)
            for _ in range(2):  # by the handle of the first time
                arrived = transfer.out(rows_ND)
                assert torch.equal(arrived, expected)
            assert torch.equal(transfer.take_back(arrived), rows_ND)
            assert len(transfer.tensors()) == 2
        buffer = make_buffer(CPU, 16)
        assert buffer.layouts == 1 + len(cases), "one buffer, and one layout a trip and to try it"
        assert buffer.num_bytes == (2 * 16 * world_size, 0)
        with pytest.raises(ValueError, match=r"float32 of shape \(3, 8\), but DeepEP .*bfloat16"):
            carrier.transfer(counts_CC, CPU).out(torch.zeros(3, 8))
        with pytest.raises(ValueError, match="a multiple of 16 bytes"):
            carrier.transfer(counts_CC, CPU).out(torch.zeros(3, 7, dtype=torch.bfloat16))


def test_rows_are_carried_as_by_an_all_to_all() -> None:
    pool_of(4).run(_carried)


def _misordered(rank: int, world_size: int) -> None:
    buffer_of.cache_clear()
    with (
        installed(Reversed),
        pytest.raises(RuntimeError, match=(r"changes the order .*choose another")),
    ):
        buffer_of(dist.group.WORLD, CPU, 32)


def test_another_order_is_found_at_once() -> None:
    pool_of(2).run(_misordered)


def layout_of(num_ep_ranks: int, ranks_per_node: int) -> ParallelLayout:
    nodes = tuple(rank // ranks_per_node for rank in range(num_ep_ranks))
    return ParallelLayout(Grid(num_ep_ranks, num_ep_ranks), 0, nodes)


@pytest.mark.parametrize(
    ("num_ep_ranks", "ranks_per_node", "reason"),
    [
        (8, 8, ""),
        (4, 8, ""),
        (16, 8, ""),
        (6, 8, "6 EP ranks exchange tokens, but DeepEP has settings for 2, 4, 8"),
        (4, 2, "up to 8 EP ranks on one node, or 8 on each"),
        (16, 4, "up to 8 EP ranks on one node, or 8 on each"),
    ],
)
def test_layouts_that_it_knows(num_ep_ranks: int, ranks_per_node: int, reason: str) -> None:
    layout = layout_of(num_ep_ranks, ranks_per_node)
    with installed():
        found = why_not(layout, CUDA)
        assert reason in found and bool(found) == bool(reason)


def test_where_it_cannot_be() -> None:
    layout = layout_of(8, 8)
    assert why_not(layout, CUDA) == "the package deep_ep is not installed"
    with installed():
        assert why_not(layout, CPU) == "tokens are on cpu, but DeepEP needs CUDA"
    with installed(None):
        assert "has no Buffer; install 2.1 or an earlier one" in why_not(layout, CUDA)
