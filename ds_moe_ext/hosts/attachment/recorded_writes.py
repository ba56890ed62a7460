# SPDX-License-Identifier: Apache-2.0
"""What an initialiser writes into weights of all experts that have no elements, for one of them.

A model on the meta device has shapes alone. Its own initialiser runs on these all the same: what it
writes in place is recorded, with the shape and the place, and done again for those experts that a
rank has, one after the other. So no rank has all of them at any time, and what an initialiser takes
from the shape of a whole weight, as its fans, is what it would be.

Shape letters: E experts, F an expert's own first dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Names of torch's operations that do the same to each element, whichever others there are.
ELEMENT_BY_ELEMENT = frozenset(
    {
        *("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "random_", "geometric_"),
        *("zero_", "fill_", "clamp_", "clamp_min_", "clamp_max_", "erfinv_", "abs_", "neg_"),
        *("add_", "sub_", "mul_", "div_", "pow_", "exp_", "log_", "sqrt_", "bernoulli_"),
        "trunc_normal_",
    }
)
# Functions of ``torch.nn.init`` that look at what they have drawn, and leave at once where a tensor
# has no elements.
IDLE_WITHOUT_ELEMENTS = ("_no_grad_trunc_normal_", "orthogonal_", "dirac_", "sparse_")
PART = 2**24  # elements looked at together, so that the look takes little memory


class Unknown(Exception):
    """A write that cannot be done for one expert alone; says which."""


def key_of(tensor: Tensor) -> int:
    """Of the memory that a tensor lies in, whether it has any elements or not."""
    key: int = tensor.untyped_storage()._cdata
    return key


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in its memory, in elements."""

    shape: tuple[int, ...]  # of the tensor
    stride: tuple[int, ...]  # of each dim
    offset: int  # of its first element

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    @property
    def stop(self) -> int:
        """Behind its last element."""
        if 0 in self.shape:
            return self.offset
        return self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride)) + 1

    def within(self, part: Place) -> Place | None:
        """What of this place is the part's, of one expert, whose elements lie together: the place
        in a memory that has the part alone; None if nothing is. Raises Unknown where they are not a
        rectangle of the part."""
        if self.stop <= part.offset or part.stop <= self.offset:
            return None
        if part.offset <= self.offset and self.stop <= part.stop:
            return Place(self.shape, self.stride, self.offset - part.offset)
        length = part.stop - part.offset
        if self.stride and self.stride[0] == length:  # the first dim is of experts
            number = -((self.offset - part.offset) // length)
            own = Place(self.shape[1:], self.stride[1:], self.offset + number * length)
            if own.stop <= part.stop:  # else what is of one expert reaches into the next
                is_there = number in range(self.shape[0])
                own_offset = own.offset - part.offset
                return Place(own.shape, own.stride, own_offset) if is_there else None
        is_dense = torch.Size(self.shape).numel() == self.stop - self.offset  # has all in between
        if is_dense and self.offset <= part.offset and part.stop <= self.stop:
            return Place(part.shape, part.stride, 0)
        raise Unknown(f"a part {list(self.shape)} of weights, across experts")


class Operation(NamedTuple):
    """An operation in place."""

    name: str  # of it
    function: Any  # of torch
    args: tuple[Any, ...]  # behind the tensor that it writes to
    kwargs: Mapping[str, Any]  # by name

    def check(self) -> None:
        """Raises Unknown where elements depend on others, or on values that nobody has."""
        others = [*self.args, *self.kwargs.values()]
        is_known = self.name in ELEMENT_BY_ELEMENT
        if not is_known or any(isinstance(given, Tensor) for given in others):
            raise Unknown(f"what torch's {self.name} gives")

    def on(self, tensor: Tensor) -> Any:
        """Do it to a tensor."""
        return self.function(tensor, *self.args, **self.kwargs)

    def without_generator(self) -> Operation:
        """By torch's own random numbers: a generator of the initialiser's own would give each rank
        what it has come to."""
        kwargs = {name: value for name, value in self.kwargs.items() if name != "generator"}
        return self._replace(kwargs=kwargs)


class Write(NamedTuple):
    """An operation, and where it wrote, or is to write."""

    operation: Operation
    place: Place


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that a function of torch writes to."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (t for t in (given if isinstance(given, list) else [given]) if t is not None)


@dataclass(eq=False)
class Writes(TorchDispatchMode):
    """A block in which writes in place into some tensors are recorded, and into others left out."""

    empty: set[int]  # memory of weights without elements: recorded
    kept: set[int]  # memory of what is there already and stays as it is
    by_memory: dict[int, list[Write]] = field(default_factory=dict)  # what was written, in order
    # how often each other memory was written to
    counts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = [*_written(func, args, kwargs)] if func._schema.is_mutable else []
        name = func._schema.name.partition("::")[2]
        if len(written) == 1 and args and written[0] is args[0]:
            return self.written(args[0], Operation(name, func, tuple(args[1:]), kwargs))
        if self.empty.union(self.kept).isdisjoint(map(key_of, written)):
            self.counts.update((key_of(each), self.count(each) + 1) for each in written)
            return func(*args, **kwargs)
        for each in written:  # as ``out=`` of another function: what that gives is not done again
            self.written(each, Operation(name, func, (), {}), is_done=False)
        num_given = len(func._schema.returns)
        return written[0] if num_given == 1 else tuple(written)[:num_given] or None

    def written(self, tensor: Tensor, operation: Operation, is_done: bool = True) -> Any:
        """Record an operation in place, leave it out, or, where neither is right, do it if
        ``is_done``; what it gives."""
        key = key_of(tensor)
        if key in self.kept:
            return tensor
        self.counts[key] = self.counts.get(key, 0) + 1
        if key not in self.empty:
            return operation.on(tensor) if is_done else tensor
        write = Write(operation.without_generator(), Place.of(tensor))
        self.by_memory.setdefault(key, []).append(write)
        return tensor

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The block in which initialisers run."""
        names = [name for name in IDLE_WITHOUT_ELEMENTS if hasattr(torch.nn.init, name)]
        before = [(name, getattr(torch.nn.init, name)) for name in names]
        for name, function in before:
            setattr(torch.nn.init, name, self._reported(function))
        try:
            with self:
                yield
        finally:
            for name, function in before:
                setattr(torch.nn.init, name, function)

    def _reported(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """One of these functions, that records what it would have done."""
        name = function.__name__.removeprefix("_no_grad_")

        def reported(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if key_of(tensor) not in self.empty | self.kept:
                return function(tensor, *args, **kwargs)
            return self.written(tensor, Operation(name, function, args, kwargs))

        return reported

    def count(self, tensor: Tensor) -> int:
        """How often its memory was written to."""
        return self.counts.get(key_of(tensor), 0)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Leave these as they are from now on."""
        self.kept.update(map(key_of, tensors))

    def recipe(self, weight: Tensor, part: Tensor) -> Recipe:
        """How one expert's weight, a part ``[F, ...]`` of a weight of all experts or of this one,
        is initialised. Raises Unknown where that is by nothing that was recorded, or by what cannot
        be done for one alone."""
        whole, own = Place.of(weight), Place.of(part)
        steps: list[Write] = []
        for operation, written in self.by_memory.get(key_of(weight), ()):
            operation.check()
            if written == whole:
                steps.append(Write(operation, Place(own.shape, own.stride, 0)))
            elif (place := written.within(own)) is not None:
                steps.append(Write(operation, place))
        if not steps:
            raise Unknown("")
        return Recipe(own, part.dtype, tuple(steps))


@dataclass(frozen=True, eq=False)
class Recipe:
    """How one expert's weight is initialised."""

    place: Place  # of it
    dtype: torch.dtype  # of it
    steps: Sequence[Write]  # what is written, and where in the expert's own memory

    def made(self, device: torch.device) -> Tensor:
        """The weight ``[F, ...]``, by the present state of torch's random numbers."""
        own = torch.empty_strided(
            self.place.shape, self.place.stride, dtype=self.dtype, device=device
        )
        blank(own)
        with torch.no_grad():
            for operation, place in self.steps:
                operation.on(own.as_strided(place.shape, place.stride, place.offset))
        return own


def blank(tensor: Tensor) -> None:
    """Fill a tensor with what no initialiser would leave there."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).min)
        else:
            tensor.zero_()


def has_blanks(tensor: Tensor) -> bool:
    """Whether some of that is left; of truth values that cannot be known."""
    for part in tensor.detach().reshape(-1).split(PART):
        if tensor.is_floating_point() or tensor.is_complex():
            is_blank = part.isnan().any()
        elif tensor.dtype is not torch.bool:
            is_blank = (part == torch.iinfo(tensor.dtype).min).any()
        else:
            return False
        if bool(is_blank):
            return True
    return False
