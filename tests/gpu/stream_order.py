# SPDX-License-Identifier: Apache-2.0
"""Streams that keep books, on a CPU: whether what is read is written by then, by nothing but what
streams wait for, and whether memory is handed out while somebody may still read it.

A GPU shows such a mistake once in many runs, and then as numbers that are wrong. Here all that is
done to any tensor is held against what the cuda_stream that does it has waited for.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_moe_ext.schedule.executor import DeviceStreams, InlineStreams, _tensors
from ds_moe_ext.schedule.task import Stream

Moments = Mapping["Queue", int]
"""How many things of each queue are done, as far as somebody knows."""


@dataclass(eq=False)
class Queue:
    """A cuda_stream, as ``torch.cuda.Stream`` is one."""

    name: str
    known: dict[Queue, int] = field(default_factory=dict)

    def do(self) -> int:
        """One thing more; its number."""
        self.known[self] = self.known.get(self, 0) + 1
        return self.known[self]

    def knows(self, other: Queue, number: int) -> bool:
        return self.known.get(other, 0) >= number

    def wait_event(self, event: Moments) -> None:
        for queue, number in event.items():
            self.known[queue] = max(self.known.get(queue, 0), number)

    def wait_stream(self, cuda_stream: Queue) -> None:
        self.wait_event(cuda_stream.known)

    def record_event(self) -> Moments:
        return dict(self.known)


class Queues:
    """Where they come from. Threads have their own current one."""

    def __init__(self) -> None:
        self._of_caller = Queue("caller")
        self._of_thread = threading.local()

    def current(self) -> Queue:
        current: Queue = getattr(self._of_thread, "current", self._of_caller)
        return current

    def made_for(self, stream: Stream) -> Queue:
        return Queue(stream.name)

    @contextmanager
    def entered(self, cuda_stream: Any) -> Iterator[None]:
        before = self.current()
        self.enter(cuda_stream)
        try:
            yield
        finally:
            self.enter(before)

    def enter(self, cuda_stream: Any) -> None:
        self._of_thread.current = cuda_stream


@dataclass(eq=False)
class Block:
    """Memory of a tensor."""

    made_by: str
    of: Queue | None = None
    written: tuple[Queue, int] | None = None
    read: dict[Queue, int] = field(default_factory=dict)
    keepers: set[Queue] = field(default_factory=set)

    def __str__(self) -> str:
        at = "" if self.written is None else f" in {self.written[0].name}"
        return f"what {self.made_by} has made and was written last{at}"


class Books(TorchDispatchMode):
    """Of every tensor that is used inside the block."""

    def __init__(self, queues: Queues) -> None:
        super().__init__()
        self._queues = queues
        self._blocks: dict[StorageWeakRef, Block] = {}
        self._freed: list[Block] = []
        self.mistakes: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, queue, schema = kwargs or {}, self._queues.current(), func._schema
        result = func(*args, **kwargs)
        self._find_freed()
        given = {_block_of(tensor) for tensor in _tensors_in((args, kwargs))}
        made = [tensor for tensor in _tensors_in(result) if _block_of(tensor) not in given]
        if not made and not schema.is_mutable and func.namespace != "c10d":
            return result  # a view, which touches nothing
        number, name = queue.do(), f"{func} in {queue.name}"
        for place, (argument, value) in enumerate(zip(schema.arguments, args)):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if func.namespace == "c10d":  # its schemas do not say so
                is_written = place == 0 and _receives(func._opname, args)
            for tensor in _tensors_in(value):
                self._use(tensor, number, name, is_written=is_written)
        for tensor in _tensors_in(kwargs):  # out=
            self._use(tensor, number, name, is_written=True)
        for tensor in made:
            if _block_of(tensor) not in self._blocks:
                self._hand_out(queue)
                self._blocks[_block_of(tensor)] = Block(str(func), queue, (queue, number))
        return result

    def _use(self, tensor: Tensor, number: int, name: str, *, is_written: bool) -> None:
        """What the current queue does as its thing of a number reads a tensor, or writes it."""
        if not tensor.numel():
            return
        block = self._blocks.setdefault(_block_of(tensor), Block("the test"))
        queue = self._queues.current()
        if block.written is not None and not queue.knows(*block.written):
            self._complain(f"{name} does not wait for {block}")
        if is_written:
            for other, read in block.read.items():
                if not queue.knows(other, read):
                    self._complain(f"{name} writes {block} while {other.name} may read it")
            block.written = queue, number
        block.read[queue] = number

    def keep(self, tensor: Tensor) -> None:
        """``Tensor.record_stream`` of the current queue."""
        block = self._blocks.get(_block_of(tensor))
        if block is not None:
            block.keepers.add(self._queues.current())

    def _find_freed(self) -> None:
        for key in [key for key in self._blocks if key.expired()]:
            self._freed.append(self._blocks.pop(key))

    def _hand_out(self, queue: Queue) -> None:
        """It may get any block now that was allocated in it and is freed."""
        for block in self._freed:
            for other, number in block.read.items() if block.of is queue else ():
                if other not in block.keepers and not queue.knows(other, number):
                    self._complain(f"{queue.name} gets {block} while {other.name} may read it")
        self._freed = [block for block in self._freed if block.of not in (queue, None)]

    def _complain(self, mistake: str) -> None:
        calls = [call for call in traceback.extract_stack() if "/ds_moe_ext/" in call.filename]
        places = (f"{Path(call.filename).name}:{call.lineno}" for call in reversed(calls[-6:]))
        self.mistakes.append(f"{mistake} ({' < '.join(places)})")


_ROOT = {"broadcast_": 2, "reduce_": 3}
"""Which argument says whose it is."""


def _receives(name: str, args: Sequence[Any]) -> bool:
    """Whether a collective writes here what it is given first."""
    if name not in _ROOT:
        return name != "send"
    is_root = dist.ProcessGroup.unbox(args[1]).rank() == args[_ROOT[name]]
    return is_root == (name == "reduce_")


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _block_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


class QueuedStreams(DeviceStreams):
    """Those of CUDA, on such cuda_streams."""

    def __init__(self, queues: Queues) -> None:
        super().__init__(torch.device("cpu"), queues)

    keep, mark = InlineStreams.keep, InlineStreams.mark
    seconds_between = InlineStreams.seconds_between


class BookedStreams(QueuedStreams):
    """And what is kept there stands in the books."""

    def __init__(self, queues: Queues, books: Books) -> None:
        super().__init__(queues)
        self._books = books

    def keep(self, reads: Iterable[Any]) -> None:
        for tensor in _tensors(reads):
            self._books.keep(tensor)
