# SPDX-License-Identifier: Apache-2.0
"""What of a pass would make a GPU's host wait, copy or call its network: counted, without a GPU.

A tensor is the host's if it came from numpy or from Python's numbers, was fetched, or was computed
from such tensors alone; all others stand for the device's. Methods are changed for all threads.
What is the host's is followed by a torch function mode, which the product's lanes carry with them:
a thread without it may count too much, never too little.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ds_moe_ext.core import comm

FETCHES = (
    "item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__",
    "__complex__", "__contains__", "nonzero", "argwhere", "masked_select", "unique",
    "unique_consecutive", "bincount", "equal", "allclose", "is_nonzero",
)  # fmt: skip
"""Methods and functions for which the host waits: for values, or for how many there are."""

COPIES = ("tensor", "as_tensor")
"""Functions that copy what Python has, where they are told a device."""

COLLECTIVES = (
    "all_to_all_single", "alltoall_base", "alltoall", "all_gather_single", "_allgather_base",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_single", "_reduce_scatter_base", "barrier",
)  # fmt: skip
"""Of a process group."""

HERE = Path(__file__)
ROOT = HERE.parents[2]


class Place(NamedTuple):
    """A line of code.

    Attributes:
        what: was called there.
        file: below the repository, or below ``site-packages``.
        line: in it.
        function: around it.
    """

    what: str
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.what}"

    @classmethod
    def of_caller(cls, what: str, frame: FrameType | None = None) -> Place:
        """The innermost that is not torch's, numpy's or this file; from a frame on, if given."""
        frame = frame or sys._getframe(1)
        while frame.f_back is not None and _is_inner(frame.f_code.co_filename):
            frame = frame.f_back
        path, code = Path(frame.f_code.co_filename), frame.f_code
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            name = str(path.relative_to(ROOT))
        else:
            name = str(path).rpartition("site-packages/")[2]
        return cls(what, name, frame.f_lineno, code.co_name)


def _is_inner(file: str) -> bool:
    inner = ("/site-packages/torch/", "/site-packages/numpy/", "/unittest/mock.py", "<")
    return file == str(HERE) or file.startswith("<") or any(part in file for part in inner[:-1])


@dataclass
class HostCounts:
    """By place, since counting began.

    Attributes:
        waits: of the host for the device.
        copies: from the host to the device.
        collectives: calls of a communicator; one for all that is sent and received in pairs.
        parcels: tensors that went in pairs, of this rank.
    """

    waits: Counter[Place] = field(default_factory=Counter)
    copies: Counter[Place] = field(default_factory=Counter)
    collectives: Counter[Place] = field(default_factory=Counter)
    parcels: int = 0


class _State(threading.local):
    """Attributes: is_inside: this thread is in a call that counts as one."""

    is_inside = False


class _Counter:
    """Counts into a record; each call counts once, whatever it calls in turn."""

    def __init__(self, counts: HostCounts) -> None:
        self.counts, self._state, self._lock = counts, _State(), threading.Lock()

    def add(self, to: Counter[Place], what: str) -> None:
        """Count the call that is made."""
        if not self._state.is_inside:
            with self._lock:
                to[Place.of_caller(what)] += 1

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Nothing in it counts."""
        before, self._state.is_inside = self._state.is_inside, True
        try:
            yield
        finally:
            self._state.is_inside = before

    def fetch(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """A method or function for which the host waits."""

        def fetched(tensor: Any, *args: Any, **named: Any) -> Any:
            if not _is_hosts(tensor):
                self.add(self.counts.waits, name)
            with self.inside():
                out = stock(tensor, *args, **named)
                return _of_host(out) if name == "cpu" else out

        return fetched

    def to(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def to(tensor: Tensor, *args: Any, **named: Any) -> Any:
            given = (*args, *named.values())
            names_cpu = any(isinstance(each, str) and each == "cpu" for each in given)
            names_device = any(isinstance(each, str | torch.device | Tensor) for each in given)
            is_hosts = _is_hosts(tensor)
            if names_cpu and not is_hosts:
                self.add(self.counts.waits, "to")
            elif names_device and not names_cpu and is_hosts:
                self.add(self.counts.copies, "to")
            with self.inside():
                out = stock(tensor, *args, **named)
                if names_cpu:
                    return _of_host(out)
                return _of_device(out) if names_device and is_hosts else out

        return to

    def copy_(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def copy_(tensor: Tensor, source: Tensor, *args: Any, **named: Any) -> Any:
            if _is_hosts(source) and not _is_hosts(tensor):
                self.add(self.counts.copies, "copy_")
            elif _is_hosts(tensor) and not _is_hosts(source):
                self.add(self.counts.waits, "copy_")
            with self.inside():
                return stock(tensor, source, *args, **named)

        return copy_

    def index(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Of an index that is a mask the host must know how many are true; of one number, which."""

        def indexed(tensor: Tensor, index: Any, *value: Any) -> Any:
            if not _is_hosts(tensor) and any(map(_must_be_known, _parts(index))):
                self.add(self.counts.waits, name)
            with self.inside():
                return stock(tensor, index, *value)

        return indexed

    def repeat(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def repeat_interleave(tensor: Tensor, *args: Any, **named: Any) -> Any:
            tensors = [each for each in (*args, *named.values()) if isinstance(each, Tensor)]
            lengths = tensors[0] if tensors else tensor if not args and not named else None
            if lengths is not None and not _is_hosts(lengths) and "output_size" not in named:
                self.add(self.counts.waits, "repeat_interleave")
            with self.inside():
                return stock(tensor, *args, **named)

        return repeat_interleave

    def made(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """A function that copies what Python has."""

        def made(*args: Any, **named: Any) -> Any:
            if named.get("device") is not None:
                self.add(self.counts.copies, name)
            with self.inside():
                return stock(*args, **named)

        return made

    def new_tensor(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def new_tensor(tensor: Tensor, *args: Any, **named: Any) -> Any:
            if not _is_hosts(tensor):
                self.add(self.counts.copies, "new_tensor")
            with self.inside():
                return stock(tensor, *args, **named)

        return new_tensor

    def collective(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            self.add(self.counts.collectives, name)
            with self.inside():
                return stock(*args, **named)

        return called

    def pairs(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def batch_isend_irecv(ops: list[Any]) -> Any:
            self.add(self.counts.collectives, "batch_isend_irecv")
            with self._lock:
                self.counts.parcels += len(ops)
            with self.inside():
                return stock(ops)

        return batch_isend_irecv

    def post(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Ours, of what is sent and received in pairs."""

        def post(pairs: comm.Pairs, receives: Sequence[Any], sends: Sequence[Any]) -> Any:
            num_parcels = len(receives) + len(sends)
            if num_parcels:
                self.add(self.counts.collectives, "post")
            with self._lock:
                self.counts.parcels += num_parcels
            with self.inside():
                return stock(pairs, receives, sends)

        return post


class _Following(TorchFunctionMode):
    """What is computed from the host's tensors alone is the host's; so is what is made of nothing,
    unless for a device, which is never named: a layer has a ``torch.device``."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        out = func(*args, **named)
        read = [*_tensors(args), *_tensors(tuple(named.values()))]
        if all(map(_is_hosts, read)) if read else named.get("device") in (None, "cpu"):
            for tensor in _tensors(out):
                vars(tensor)[_MARK] = True
        return out


_MARK = "_is_on_host_of_bench"


def _is_hosts(value: Any) -> bool:
    return not isinstance(value, Tensor) or _MARK in vars(value)


def _of_host(tensor: Any) -> Any:
    """Another tensor of the same values, which is the host's."""
    alias = tensor.view(tensor.shape)
    vars(alias)[_MARK] = True
    return alias


def _of_device(tensor: Tensor) -> Tensor:
    alias = tensor.view(tensor.shape)
    vars(alias).pop(_MARK, None)
    return alias


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def _parts(index: Any) -> Iterator[Any]:
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, slice):
            yield from (part.start, part.stop, part.step)
        else:
            yield part


def _must_be_known(part: Any) -> bool:
    if not isinstance(part, Tensor) or _is_hosts(part):
        return False
    return part.dtype in (torch.bool, torch.uint8) or part.dim() == 0


@contextmanager
def counted() -> Iterator[HostCounts]:
    """Count, inside the block. What a batch is made of must be made outside."""
    counter = _Counter(HostCounts())
    with ExitStack() as changed:

        def change(owner: Any, name: str, around: Callable[..., Any], *told: Any) -> None:
            new = around(*told, getattr(owner, name))
            changed.enter_context(mock.patch.object(owner, name, new))

        for name in FETCHES:
            for owner in (Tensor, torch):
                if hasattr(owner, name):
                    change(owner, name, counter.fetch, name)
        for name in COPIES:
            change(torch, name, counter.made, name)
        for owner in (Tensor, torch):
            change(owner, "repeat_interleave", counter.repeat)
        for name in ("__getitem__", "__setitem__"):
            change(Tensor, name, counter.index, name)
        for name, around in {
            "to": counter.to,
            "copy_": counter.copy_,
            "new_tensor": counter.new_tensor,
        }.items():
            change(Tensor, name, around)
        change(torch, "from_numpy", _from_numpy)
        for name in COLLECTIVES:
            change(dist.ProcessGroup, name, counter.collective, name)
        for name in ("send", "recv"):
            change(dist.ProcessGroup, name, counter.collective, name)
        change(dist, "batch_isend_irecv", counter.pairs)
        change(comm.Pairs, "post", counter.post)
        changed.enter_context(_Following())
        yield counter.counts


def _from_numpy(stock: Callable[[np.ndarray], Tensor]) -> Callable[[np.ndarray], Tensor]:
    return lambda array: _of_host(stock(array))
