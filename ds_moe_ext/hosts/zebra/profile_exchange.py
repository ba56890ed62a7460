# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a run tell each other of a profile, so that all know the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.planning.zebra_planner import Timed
from ds_moe_ext.strategies.zebra import WHERE

RecordT = TypeVar("RecordT")


@dataclass(frozen=True, kw_only=True)
class AllButExperts:
    """Of the first attention rank.

    Attributes:
        blocks: seconds of all of them and one stripe, forward and backward.
        head_s: of embeddings, head and loss.
        bytes: of weights and what belongs to them, and of all that a step keeps.
        top_k: rows of a token.
        width: elements of a row.
        row_dtype: their type.
    """

    blocks: Timed
    head_s: float
    bytes: float
    top_k: int
    width: int
    row_dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class RankHere:
    """What a rank tells first.

    Attributes:
        node: its name.
        free_bytes: of its device, or of its node, before anything was brought there.
        model_bytes: weights of the model that are there already.
        is_shared: the ranks of a node share that memory.
        dense: of the first attention rank.
    """

    node: str
    free_bytes: int
    model_bytes: int
    is_shared: bool
    dense: AllButExperts | None


@dataclass(frozen=True, kw_only=True)
class ExpertHere:
    """What a rank tells of an expert; nothing but of the first rank of each role.

    Attributes:
        seconds: forward and backward, of the rows of an expert rank.
        rows_bytes: that it keeps for backward.
    """

    seconds: Timed | None = None
    rows_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What all ranks know then.

    Attributes:
        dense: of the first attention rank.
        experts: an expert rank's rows on an expert rank.
        on_attention: the same rows on an attention rank.
        rows_bytes: that they keep for backward.
        attention_free_bytes: of the attention rank that has least.
        expert_free_bytes: of the expert rank that has least.
    """

    dense: AllButExperts
    experts: Timed
    on_attention: Timed
    rows_bytes: int
    attention_free_bytes: int
    expert_free_bytes: int


def agreed(measure: Callable[[], RecordT]) -> list[RecordT]:
    """What every rank has measured, in the order of the ranks. Collective.

    Raises:
        ValueError: on every rank, where one of them failed.
    """
    try:
        own: RecordT | str = measure()
    except Exception as error:
        own = f"{type(error).__name__}: {error}"
    told = gather_objects(own, None)
    faults = [f"rank {rank}: {each}" for rank, each in enumerate(told) if isinstance(each, str)]
    if faults:
        raise ValueError(
            f"{WHERE}.profile could not be measured ({'; '.join(faults)}); set {WHERE}.moved in "
            "its place, a number for each MoE layer"
        )
    return [each for each in told if not isinstance(each, str)]


def free_bytes_of(device: torch.device) -> int:
    """What the device could still give; of a CPU, what the node could."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free_bytes + cached)
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(line for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(available.split()[1])


def least_free_bytes(here: Sequence[RankHere]) -> list[int]:
    """Memory of each rank for training. The ranks of a node share that of a CPU; and the model
    leaves it what it takes there now."""
    nodes = [own.node for own in here]
    shares = [nodes.count(own.node) if own.is_shared else 1 for own in here]
    return [own.free_bytes // share + own.model_bytes for own, share in zip(here, shares)]
