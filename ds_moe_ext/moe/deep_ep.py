# SPDX-License-Identifier: Apache-2.0
"""Rows between cells by DeepEP, where that is installed: its legacy ``Buffer`` as a carrier.

Written against deep_ep 2.1.0 (``deep_ep/buffers/legacy.py`` and ``docs/legacy.md`` of
deepseek-ai/DeepEP at dd758ca) and never run with it. Each row is to DeepEP a token of one choice,
and each rank has one expert. Shape letters: N rows sent, R rows received, P ranks that exchange
rows, W numbers of a row.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.layout import ParallelLayout
from ds_moe_ext.rows import on_device

PACKAGE = "deep_ep"
NODE_SIZE = 8  # LEGACY_NUM_MAX_NVL_PEERS: where there are more ranks, each eight share a node
NUM_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)  # that it has settings for
ROW_ALIGNMENT = 16  # bytes

MakeBuffer = Callable[[torch.device, int], Any]
"""``(device, bytes of a row) -> deep_ep.Buffer``, the same one every time. Collective."""


def why_not(layout: ParallelLayout, device: torch.device) -> str:
    """Why DeepEP cannot carry the rows of a layout; empty if it can."""
    node_P = layout.node_of_cells
    eights_P = np.arange(node_P.size) // NODE_SIZE
    if device.type != "cuda":
        return f"rows are on {device.type}, and DeepEP carries rows of CUDA devices"
    if importlib.util.find_spec(PACKAGE) is None:
        return f"the package {PACKAGE} is not installed"
    if its("Buffer") is None:
        return f"this version of {PACKAGE} has no Buffer; install 2.1 or an earlier one"
    if node_P.size not in NUM_RANKS:
        known = ", ".join(map(str, NUM_RANKS))
        return f"{node_P.size} cells exchange rows, and DeepEP has settings for {known}"
    if not np.array_equal(np.unique(node_P, return_inverse=True)[1], eights_P):
        return f"DeepEP wants up to {NODE_SIZE} cells on one node, or {NODE_SIZE} on each, in turn"
    return ""


def its(name: str) -> Any:
    """What the installed package has by a name; None if nothing."""
    try:
        return pkgutil.resolve_name(f"{PACKAGE}:{name}")
    except AttributeError:
        return None


@dataclass(frozen=True, eq=False)
class DeepEp:
    """A ``Carrier`` by DeepEP.

    Attributes:
        make_buffer: what moves rows.
        rank: this one's number among those that exchange rows.
    """

    make_buffer: MakeBuffer
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> DeepEp:
        """Over a communicator."""
        return cls(partial(buffer_of, group), group.rank())

    def trip(self, counts_PP: np.ndarray, device: torch.device) -> DeepTrip:
        sent_P = counts_PP[self.rank]
        receiver_N = np.repeat(np.arange(sent_P.size), sent_P)
        num_received = int(counts_PP[:, self.rank].sum())
        return DeepTrip(self.make_buffer, on_device(receiver_N, device), sent_P.size, num_received)


@dataclass(frozen=True, eq=False)
class DeepTrip:
    """A ``Trip`` by DeepEP: there is its dispatch, back its combine, which copies single rows.

    Attributes:
        make_buffer: what moves rows.
        receiver_N: rank that each row goes to, int64.
        num_ranks: ranks that exchange rows.
        num_received: rows that arrive here.
    """

    make_buffer: MakeBuffer
    receiver_N: Tensor
    num_ranks: int
    num_received: int
    _handle: list[tuple[Any, ...]] = field(default_factory=list)  # of the first dispatch

    def out(self, rows_N: Tensor) -> Tensor:
        buffer = self._buffer_for(rows_N)
        if self._handle:
            arrived_R, *_ = buffer.dispatch(rows_N.contiguous(), handle=self._handle[0])
        else:
            sent_N = rows_N.contiguous()
            arrived_R, handle = dispatched(buffer, sent_N, self.receiver_N, self.num_ranks)
            self._handle.append(handle)
        if arrived_R.shape[0] != self.num_received:
            raise RuntimeError(
                f"DeepEP brought {arrived_R.shape[0]} rows where {self.num_received} were counted; "
                "choose another all_to_all"
            )
        rows_R: Tensor = arrived_R
        return rows_R

    def home(self, rows_R: Tensor) -> Tensor:
        rows_N: Tensor
        rows_N, *_ = self._buffer_for(rows_R).combine(rows_R.contiguous(), self._handle[0])
        return rows_N

    def tensors(self) -> tuple[Tensor, ...]:
        handles = (part for handle in self._handle for part in handle)
        return (self.receiver_N, *(part for part in handles if isinstance(part, Tensor)))

    def _buffer_for(self, rows: Tensor) -> Any:
        row_bytes = rows.element_size() * rows.shape[-1]
        if rows.dtype != torch.bfloat16 or rows.dim() != 2 or row_bytes % ROW_ALIGNMENT:
            raise ValueError(
                f"rows are {rows.dtype} of shape {tuple(rows.shape)}, but DeepEP carries bfloat16 "
                f"of a multiple of {ROW_ALIGNMENT} bytes a row; choose another all_to_all, or "
                "train in bfloat16"
            )
        return self.make_buffer(rows.device, row_bytes)


def dispatched(
    buffer: Any, rows_N: Tensor, receiver_N: Tensor, num_ranks: int
) -> tuple[Tensor, tuple[Any, ...]]:
    """A first dispatch: the rows that arrived, and the handle for all that follow."""
    choice_N1 = receiver_N[:, None].to(index_type()).contiguous()
    per_rank, per_node, per_expert, goes_NP, _ = buffer.get_dispatch_layout(choice_N1, num_ranks)
    arrived_R, _, _, _, handle, _ = buffer.dispatch(
        rows_N,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=goes_NP,
        num_tokens_per_expert=per_expert,
    )
    return arrived_R, handle


def index_type() -> torch.dtype:
    """Of the choices of tokens; older versions have one only."""
    found: torch.dtype = its("topk_idx_t") or torch.int64
    return found


@lru_cache(maxsize=4)
def buffer_of(group: dist.ProcessGroup, device: torch.device, row_bytes: int) -> Any:
    """A buffer for rows of a width, shared by all layers. Collective.

    Raises:
        RuntimeError: rows do not arrive in the order of their senders, and of each as it sent them.
    """
    buffer_class = its("Buffer")
    num_ranks = group.size()
    configs = [
        config_of(num_ranks)
        for config_of in (buffer_class.get_dispatch_config, buffer_class.get_combine_config)
    ]
    buffer = buffer_class(
        group,
        max(config.get_nvl_buffer_size_hint(row_bytes, num_ranks) for config in configs),
        max(config.get_rdma_buffer_size_hint(row_bytes, num_ranks) for config in configs),
    )
    check_order(buffer, group.rank(), num_ranks, row_bytes, device)
    return buffer


TRIED = 64  # rows for each rank: more than DeepEP has channels, and whole in bfloat16


def check_order(
    buffer: Any, rank: int, num_ranks: int, row_bytes: int, device: torch.device
) -> None:
    """Send numbered rows, and see in which order they arrive. Collective; see ``buffer_of``."""
    receiver_N = torch.arange(num_ranks, device=device).repeat_interleave(TRIED)
    rows_NW = torch.zeros(num_ranks * TRIED, row_bytes // 2, dtype=torch.bfloat16, device=device)
    rows_NW[:, 0] = rank
    rows_NW[:, 1] = torch.arange(TRIED, device=device).repeat(num_ranks)
    arrived_RW, _ = dispatched(buffer, rows_NW, receiver_N, num_ranks)
    wanted_RW = torch.stack((receiver_N.to(rows_NW), rows_NW[:, 1]), dim=1)
    if not torch.equal(arrived_RW[:, :2], wanted_RW):
        raise RuntimeError(
            "DeepEP brings rows in another order than they were sent in; choose another all_to_all"
        )
