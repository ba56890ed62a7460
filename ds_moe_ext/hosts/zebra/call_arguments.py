# SPDX-License-Identifier: Apache-2.0
"""What a rank's model was called with: told to other ranks, cut, and put together for a piece."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ds_moe_ext.hosts.zebra.outcomes import PLAIN
from ds_moe_ext.schedule.stripes import Samples

NUM_ITEMS = "['num_items_in_batch']"
"""What Hugging Face divides a sum by, in the place of a mean over the items of one call."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the user's model.

    Attributes:
        piece: whose samples these are.
        weight: their share of the batch that they are of.
        args: by position.
        kwargs: by name.
    """

    piece: Samples
    weight: float
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Leaf(NamedTuple):
    """One value of a call, as other ranks are told of it.

    Attributes:
        what: it is; the same on every rank.
        shape: a tensor's; empty for anything else.
    """

    what: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> Leaf:
        if isinstance(value, Tensor):
            kind = f"{value.dtype} tensor of {value.dim()} dims on {value.device.type}"
            return cls(kind, tuple(value.shape))
        return cls(repr(value) if isinstance(value, PLAIN) else type(value).__qualname__, ())

    def __str__(self) -> str:
        return f"{self.what}, {list(self.shape)}" if self.shape else self.what


ABSENT = Leaf("missing", ())


class Batch(NamedTuple):
    """The tensors of a call, by name.

    Attributes:
        cut: those with a dim for samples, which comes first.
        whole: the others.
    """

    cut: Mapping[str, Tensor]
    whole: Mapping[str, Tensor]

    def part(self, start: int, stop: int) -> Batch:
        """Some samples, and what goes with them."""
        return Batch({name: x[start:stop] for name, x in self.cut.items()}, self.whole)

    def landing(self, num_samples: int, leaves: Mapping[str, Leaf]) -> Batch:
        """Where samples of another rank's batch go.

        Args:
            num_samples: how many.
            leaves: of that batch.
        """
        return Batch(
            {n: x.new_empty(num_samples, *leaves[n].shape[1:]) for n, x in self.cut.items()},
            {name: x.new_empty(x.shape) for name, x in self.whole.items()},  # contiguous
        )

    def tensors(self) -> list[Tensor]:
        """All, in the same order on every rank."""
        return [*self.cut.values(), *self.whole.values()]


@dataclass(frozen=True)
class Signature:
    """What a rank tells the others of its call.

    Attributes:
        mode: what the pass is for.
        fault: why the batch cannot be shared; empty if it can.
        num_samples: samples of the batch; 0 if there is none.
        leaves: the values by name.
    """

    mode: str
    fault: str
    num_samples: int
    leaves: Mapping[str, Leaf]

    def to_text(self) -> str:
        return json.dumps([self.mode, self.fault, self.num_samples, self.leaves])

    @classmethod
    def from_text(cls, text: str) -> Signature:
        mode, fault, num_samples, leaves = json.loads(text)
        named = {name: Leaf(what, tuple(shape)) for name, (what, shape) in leaves.items()}
        return cls(mode, fault, num_samples, named)


@dataclass(frozen=True, eq=False)
class Arguments:
    """A call's arguments, taken apart.

    Attributes:
        leaves: its values by name: ``['labels']``, or ``[0]`` by position.
        structure: how they lie in it.
    """

    leaves: Mapping[str, Any]
    structure: pytree.TreeSpec

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        found, structure = pytree.tree_flatten_with_path((args, kwargs))
        return cls({pytree.keystr(path[1:]): leaf for path, leaf in found}, structure)

    def signature(self, mode: str) -> Signature:
        leaves = {name: Leaf.of(value) for name, value in self.leaves.items()}
        sizes = [leaf.shape[0] for leaf in leaves.values() if leaf.shape]
        faults = [fault for name, value in self.leaves.items() if (fault := _fault(name, value))]
        if not sizes:
            faults.append("no argument is a tensor with a dim for samples; pass the batch")
        return Signature(mode, "; ".join(faults), sizes[0] if sizes else 0, leaves)

    def batch(self, names: Collection[str]) -> Batch:
        """Its tensors, of which those of these names are cut."""
        tensors = sorted(name for name, value in self.leaves.items() if isinstance(value, Tensor))
        found = {name: self.leaves[name].detach() for name in tensors}
        cut = {name: found.pop(name) for name in names}
        return Batch(cut, found)

    def call(self, piece: Samples, weight: float, here: Mapping[int, tuple[int, Batch]]) -> Call:
        """The call of a piece.

        Args:
            piece: of one of the batches that are here.
            weight: its share of the batch.
            here: for each sender, its first sample that is here, and what is here of its batch.
        """
        values = dict(self.leaves)
        first, batch = here[piece.sender]
        part = batch.part(piece.start - first, piece.stop - first)
        values.update({**part.cut, **part.whole})
        if values.get(NUM_ITEMS) is not None:
            # The sums of the pieces add up to the batch's; their mean would be too small.
            values[NUM_ITEMS] = values[NUM_ITEMS] * weight
        args, kwargs = pytree.tree_unflatten(values.values(), self.structure)
        return Call(piece, weight, args, kwargs)


def _fault(name: str, value: Any) -> str:
    if isinstance(value, Tensor):
        if value.requires_grad and torch.is_grad_enabled():
            return f"{name} requires a gradient, which cannot go back to its rank; detach it"
    elif not isinstance(value, PLAIN):
        return (
            f"{name} is a {type(value).__qualname__}, which cannot be cut; pass tensors in tuples, "
            "lists and dicts, or register it with torch.utils._pytree.register_pytree_node"
        )
    return ""


def names_of_batches(signatures: Sequence[Signature]) -> list[str]:
    """Names of the tensors that are cut."""
    return sorted(
        name
        for name in signatures[0].leaves
        if all(
            signature.leaves.get(name, ABSENT).shape[:1] == (signature.num_samples,)
            for signature in signatures
        )
    )


def check_alike(signatures: Sequence[Signature], names: Sequence[str]) -> None:
    """Raise what is wrong with the calls of a group, the same on every rank."""
    faults = [f"place {place}: {own.fault}" for place, own in enumerate(signatures) if own.fault]
    if faults:
        raise ValueError(f"the batches of a ZP group cannot be shared: {'; '.join(faults)}")
    unlike = [
        difference
        for place, other in enumerate(signatures)
        for difference in _differences(signatures[0], other, place, names)
    ]
    if unlike:
        raise ValueError(
            "the ranks of a ZP group must call the model together, in the same mode and with "
            f"arguments that differ in the size of the batch only: {'; '.join(unlike)}; attention "
            "ranks run the samples of all"
        )


def _differences(
    first: Signature, other: Signature, place: int, names: Sequence[str]
) -> Iterator[str]:
    if other.mode != first.mode:
        yield f"the mode is {first.mode!r} at place 0 and {other.mode!r} at place {place}"
    for name in sorted(first.leaves.keys() | other.leaves.keys()):
        ours, theirs = first.leaves.get(name, ABSENT), other.leaves.get(name, ABSENT)
        if ours.what != theirs.what or (name not in names and ours.shape != theirs.shape):
            yield f"{name} is {ours} at place 0 and {theirs} at place {place}"
