# SPDX-License-Identifier: Apache-2.0
"""What a device is told, recorded: it is told all of it again by one call. On CUDA a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Tensors = tuple[Tensor | None, ...]


class Recorded(Protocol):
    """Work that a device can be told to do again."""

    @property
    def outputs(self) -> Tensors:
        """What it writes, each time into the same memory."""
        ...

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Records what a device is told."""

    def is_recording(self) -> bool:
        """Whether somebody does, around the caller."""
        ...

    def stream(self) -> object:
        """Where the caller's work goes."""
        ...

    def follow(self, stream: Any) -> None:
        """Let what the caller tells from now on come behind all that a stream was told."""
        ...

    def record(self, work: Callable[[], Tensors], after: Any = None) -> Recorded:
        """Record what a call tells the device. Nothing of it is done before a replay.

        Args:
            work: called once; returns what it writes.
            after: what was recorded of the same recorder, and is replayed before this each time:
                memory that it has freed may be taken.
        """
        ...


@dataclass(frozen=True, eq=False)
class CudaGraph:
    """A CUDA graph and what it writes."""

    graph: torch.cuda.CUDAGraph
    outputs: Tensors

    def replay(self) -> None:
        self.graph.replay()


@dataclass(frozen=True)
class CudaRecorder:
    """Records CUDA graphs.

    Attributes:
        device: of the work.
    """

    device: torch.device

    def is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def follow(self, stream: Any) -> None:
        self.stream().wait_stream(stream)

    def record(self, work: Callable[[], Tensors], after: Any = None) -> CudaGraph:
        graph = torch.cuda.CUDAGraph()
        pool = None if after is None else after.graph.pool()
        # Of this thread alone: NCCL's own asks events meanwhile, which is refused to all else.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = work()
        return CudaGraph(graph, outputs)


def recorder_for(device: torch.device) -> Recorder | None:
    """What records there; None where nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None
