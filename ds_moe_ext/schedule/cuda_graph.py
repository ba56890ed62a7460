# SPDX-License-Identifier: Apache-2.0
"""What a device is told, recorded: it is told all of it again by one call. On CUDA a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_moe_ext.captured import is_captured

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
        return is_captured()

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def follow(self, stream: Any) -> None:
        self.stream().wait_stream(stream)

    def record(self, work: Callable[[], Tensors], after: Any = None) -> CudaGraph:
        graph = torch.cuda.CUDAGraph()
        pool = None if after is None else after.graph.pool()
        aside = _aside(self.device)
        aside.wait_stream(self.stream())
        # Not by ``torch.cuda.graph``, which waits for all of the device: other ranks may wait for
        # what this one sends behind it.
        with torch.cuda.stream(aside):
            # Of this thread alone: NCCL's own asks events meanwhile, which is refused to all else.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                outputs = work()
            except BaseException:
                with suppress(RuntimeError):  # that it is spoilt
                    graph.capture_end()
                raise
            graph.capture_end()
        return CudaGraph(graph, outputs)


@functools.cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """Where graphs of a device are captured."""
    return torch.cuda.Stream(device)


def recorder_for(device: torch.device) -> Recorder | None:
    """What records there; None where nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None
