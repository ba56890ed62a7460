# SPDX-License-Identifier: Apache-2.0
"""How attention ranks run the batches of a whole ZP group, and every rank has its own loss.

Expert ranks are given batches too, by samplers that know nothing of roles. Attention ranks take
them, in pieces; see ``schedule/stripes.py``. What the model was called with is reported to other
ranks (``Arguments``), cut, and put together for a piece (``Call``). What it returns for a piece
(``Outcome``) is weighted by its samples and goes back to the rank whose batch it is of: a loss is
taken to be a mean over samples.

Shape letters: C ranks of the group, in its order; V scalars of an output.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from ds_moe_ext.core.comm import (
    Parcel,
    Traffic,
    all_gather_counts,
    as_bytes,
    exchange,
    gather_objects,
    sum_in_place,
)
from ds_moe_ext.core.layout import Roles
from ds_moe_ext.schedule.stripes import GroupStripes, OwnStripes, Samples, stripes_of


class Shared(NamedTuple):
    """The batches of a group, shared among its attention ranks."""

    num_samples_C: tuple[int, ...]  # samples of each rank's batch
    pieces: GroupStripes  # those of all attention ranks, by their order in the group
    calls: tuple[tuple[Call, ...], ...]  # of this rank, for each stripe; none of an expert rank
    traffic: Traffic  # what it took to bring the samples here
    cut: tuple[str, ...] = ()  # names of the arguments whose first dim is of samples


class BatchExchange:
    """Moves the batches of a ZP group to its attention ranks, and what became of them back."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        *,
        place: int,
        roles: Roles,
        num_stripes: int,
        device: torch.device,
        batch_size: int = 1,
    ) -> None:
        """Neighbouring ranks, ``batch_size`` of one role, may share a batch, or of each sample have
        a part of the sequence. Each exchanges with those at its place among such."""
        self.batch_size = batch_size
        self.group, self.control, self.place = group, control, place
        self.roles, self.num_stripes, self.device = roles, num_stripes, device
        self._template: Template | None = None  # the last one, the same on every rank

    def share(self, args: tuple[Any, ...], kwargs: dict[str, Any], mode: str) -> Shared:
        """Bring every sample of the group to the attention rank that runs it. Collective.

        A tensor is cut along its first dim if that is, on every rank, as long as the first dim of
        the rank's first tensor; its other dims may differ between ranks. Other tensors, of equal
        shapes, go with their batch. All else must be alike.

        Args:
            args: what this rank's model was called with, by position.
            kwargs: by name.
            mode: what the pass is for; the same on every rank.

        Raises:
            ValueError: on every rank: the calls are not alike, or cannot be cut.
        """
        own = Arguments.of(args, kwargs)
        signatures = gather_objects(own.signature(mode), self.control)
        names = sorted(
            name
            for name in signatures[0].leaves
            if all(each.shape_of(name)[:1] == (each.num_samples,) for each in signatures)
        )
        _check_alike(signatures, names, self.batch_size)
        num_samples_C = tuple(signature.num_samples for signature in signatures)
        pieces = self._pieces(num_samples_C)
        stripes = dict(zip(self._like_here(self.roles.attention_ep_ranks), pieces))
        here, traffic = self._bring(own.batch(names), signatures, stripes)
        calls = tuple(
            tuple(own.call(piece, piece.weight(num_samples_C), here) for piece in stripe)
            for stripe in stripes.get(self.place, ((),) * len(pieces[0]))
        )
        return Shared(num_samples_C, pieces, calls, traffic, tuple(names))

    def return_scalars(self, shared: Shared, outcomes: Sequence[Sequence[Outcome]]) -> Outcome:
        """Give every rank the scalars of its own batch, without a graph. Collective.

        Each is the sum over the batch's pieces of weight times value, in float64.
        """
        known = list(chain.from_iterable(outcomes))
        template = self._agree([outcome.template for outcome in known])
        num_ranks, num_scalars = len(shared.num_samples_C), len(template.dtypes)
        table_CV = torch.zeros(num_ranks, num_scalars, dtype=torch.float64, device=self.device)
        for call, outcome in zip(chain.from_iterable(shared.calls), known, strict=True):
            values_V = torch.stack([scalar.detach().double() for scalar in outcome.scalars])
            table_CV[call.piece.sender].add_(values_V, alpha=call.weight)
        sum_in_place(table_CV, self.group)
        own_V = table_CV[self.place].unbind()
        scalars = tuple(value.to(dtype) for value, dtype in zip(own_V, template.dtypes))
        return Outcome(template, scalars)

    def _like_here(self, ep_ranks: Sequence[int]) -> list[int]:
        """Those at this rank's place among the ranks that share a batch."""
        return [n for n in ep_ranks if (n - self.place) % self.batch_size == 0]

    def _pieces(self, num_samples_C: Sequence[int]) -> GroupStripes:
        """The pieces of every stripe; senders are places in the group, of ranks like this one."""
        order = self._like_here((*self.roles.attention_ep_ranks, *self.roles.expert_ep_ranks))
        attention_size = len(self._like_here(self.roles.attention_ep_ranks))
        num_samples = [num_samples_C[n] for n in order]
        num_stripes = min(self.num_stripes, sum(num_samples) // attention_size)
        pieces = stripes_of(num_samples, attention_size, num_stripes)
        return tuple(
            tuple(
                tuple(replace(piece, sender=order[piece.sender]) for piece in stripe)
                for stripe in stripes
            )
            for stripes in pieces
        )

    def _bring(
        self, batch: Batch, signatures: Sequence[Signature], stripes: Mapping[int, OwnStripes]
    ) -> tuple[dict[int, tuple[int, Batch]], Traffic]:
        """Exchange what attention ranks take on. Of each sender, its first sample that is here now,
        and what is here of its batch. Collective."""
        landed = {
            samples: batch.landing(samples.num_samples, signatures[samples.sender])
            for samples in _samples_of(stripes.get(self.place, ()), self.place)
        }
        leaving = {
            ep_rank: batch.part(samples.start, samples.stop)
            for ep_rank in stripes
            for samples in _samples_of(stripes[ep_rank], ep_rank)
            if samples.sender == self.place
        }
        receives = [
            (as_bytes(tensor), samples.sender)
            for samples, part in landed.items()
            for tensor in part
        ]
        sends = [
            (as_bytes(tensor), ep_rank) for ep_rank, part in leaving.items() for tensor in part
        ]
        traffic = Traffic()
        for group, on_host in ((self.group, False), (self.control, True)):
            traffic += exchange(_on(receives, on_host), _on(sends, on_host), group)
        here = {samples.sender: (samples.start, part) for samples, part in landed.items()}
        return here | {self.place: (0, batch)}, traffic

    def _agree(self, templates: Sequence[Template]) -> Template:
        """What an output looks like; the first attention rank reports when that changes."""
        texts = sorted({template.text for template in templates})
        digest = _digest_of(texts[0]) if len(texts) == 1 else 0
        digests_C = all_gather_counts(torch.tensor([digest]), self.control)[:, 0].tolist()
        first, *others = (digests_C[ep_rank] for ep_rank in self.roles.attention_ep_ranks)
        if first == 0 or any(other != first for other in others):
            gathered = gather_objects(" and ".join(texts), self.control)
            raise ValueError(
                "the model returned outputs that differ in more than the values of tensors: "
                + "; ".join(f"place {place}: {text}" for place, text in enumerate(gathered) if text)
                + "; let it return the same fields for all samples, and numbers as 0-dim tensors"
            )
        if self._template is None or _digest_of(self._template.text) != first:
            self._template = self._broadcast(templates)
        return self._template

    def _broadcast(self, templates: Sequence[Template]) -> Template:
        sender = self.roles.attention_ep_ranks[0]
        packed: bytes | str = ""
        if self.place == sender:
            try:
                packed = pickle.dumps(templates[0])
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                packed = str(error)
        packed = gather_objects(packed, self.control)[sender]
        if isinstance(packed, str):
            raise ValueError(
                f"the model's output cannot be sent to the expert ranks: {packed}; let it return "
                "a tensor, a tuple, a dict, or a class defined at the top of a module"
            )
        template: Template = pickle.loads(packed)
        return template


def _samples_of(stripes: OwnStripes, ep_rank: int) -> list[Samples]:
    """What an attention rank runs of each other rank's batch, in one."""
    samples_of: dict[int, Samples] = {}
    for piece in chain.from_iterable(stripes):
        samples_of[piece.sender] = replace(samples_of.get(piece.sender, piece), stop=piece.stop)
    return [samples for sender, samples in samples_of.items() if sender != ep_rank]


def _on(parcels: Sequence[Parcel], on_host: bool) -> list[Parcel]:
    return [(part, peer) for part, peer in parcels if part.is_cpu == on_host and part.numel()]


# What the model is called with.

PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
"""Values that do not travel."""

NUM_ITEMS = "['num_items_in_batch']"
"""What Hugging Face divides a sum by, in the place of a mean over the items of one call."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the user's model."""

    piece: Samples  # whose samples these are
    weight: float  # their share of the batch that they are of
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Leaf(NamedTuple):
    """One value of a call, as other ranks are notified of it."""

    what: str  # it is; the same on every rank
    shape: tuple[int, ...]  # a tensor's; empty for anything else

    @classmethod
    def of(cls, value: Any) -> Leaf:
        if isinstance(value, Tensor):
            kind = f"{value.dtype} tensor of {value.dim()} dims on {value.device.type}"
            return cls(kind, tuple(value.shape))
        return cls(repr(value) if isinstance(value, PLAIN) else type(value).__qualname__, ())

    def __str__(self) -> str:
        return f"{self.what}, {list(self.shape)}" if self.shape else self.what


ABSENT = Leaf("missing", ())


class Signature(NamedTuple):
    """What a rank reports to the others of its call."""

    mode: str  # what the pass is for
    fault: str  # why the batch cannot be shared; empty if it can
    num_samples: int  # of the batch; 0 if there is none
    leaves: Mapping[str, Leaf]  # the values by name

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.leaves.get(name, ABSENT).shape


@dataclass(frozen=True, eq=False)
class Batch:
    """The tensors of a call, by name: those that are cut, along their first dim, and the others.
    Iterated over, all, in the same order on every rank."""

    cut: Mapping[str, Tensor]
    whole: Mapping[str, Tensor]

    def __iter__(self) -> Iterator[Tensor]:
        return chain(self.cut.values(), self.whole.values())

    def part(self, start: int, stop: int) -> Batch:
        """Some samples, and what goes with them."""
        return Batch({name: x[start:stop] for name, x in self.cut.items()}, self.whole)

    def landing(self, num_samples: int, there: Signature) -> Batch:
        """Where so many samples of another rank's batch go."""
        shapes = {name: (num_samples, *there.shape_of(name)[1:]) for name in self.cut}
        return Batch(
            {name: x.new_empty(shapes[name]) for name, x in self.cut.items()},
            {name: x.new_empty(x.shape) for name, x in self.whole.items()},  # contiguous
        )


@dataclass(frozen=True, eq=False)
class Arguments:
    """A call's arguments, taken apart."""

    leaves: Mapping[str, Any]  # its values by name: ``['labels']``, or ``[0]`` by position
    structure: pytree.TreeSpec  # how they lie in it

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
        """The call of a piece, whose share of its batch is ``weight``. ``here`` has of each sender
        the first sample that is here, and what is here of its batch."""
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


def _check_alike(
    signatures: Sequence[Signature], names: Sequence[str], batch_size: int = 1
) -> None:
    """Raise what is wrong with the calls of a group, in which tensors of these names are cut, and
    so many neighbours share a batch; the same on every rank."""
    faults = [f"place {place}: {own.fault}" for place, own in enumerate(signatures) if own.fault]
    if faults:
        raise ValueError(f"the batches of a ZP group cannot be shared: {'; '.join(faults)}")
    first, unlike = signatures[0], []
    for place, other in enumerate(signatures):
        if other.mode != first.mode:
            unlike.append(
                f"the mode is {first.mode!r} at place 0 and {other.mode!r} at place {place}"
            )
        for name in sorted(first.leaves.keys() | other.leaves.keys()):
            ours, theirs = first.leaves.get(name, ABSENT), other.leaves.get(name, ABSENT)
            if ours.what != theirs.what or (name not in names and ours.shape != theirs.shape):
                unlike.append(f"{name} is {ours} at place 0 and {theirs} at place {place}")
        first_place = place - place % batch_size
        sizes = signatures[first_place].num_samples, other.num_samples
        if sizes[0] != sizes[1]:
            unlike.append(
                f"places {first_place} and {place} share a batch, but have {sizes[0]} and "
                f"{sizes[1]} samples"
            )
    if unlike:
        raise ValueError(
            "the ranks of a ZP group must call the model together, in the same mode and with "
            f"arguments that differ in the size of the batch only: {'; '.join(unlike)}; "
            "attention ranks run the samples of all ranks"
        )


# What the model returns.

Path = tuple[Hashable, ...]
"""Names on the way to a value in an output."""


@dataclass(frozen=True)
class Hole:
    """The place of a scalar in an output."""

    index: int


@dataclass(frozen=True, eq=False)
class Template:
    """What an output of the user's model looks like, without its values."""

    tree: Any  # of the user's type: holes for its scalars, None for its other tensors
    dtypes: tuple[torch.dtype, ...]  # of the scalars
    loss: int  # which of them is the loss
    learnt: tuple[bool, ...]  # for each, whether it had a gradient
    text: str  # what templates that are alike have in common


@dataclass(frozen=True, eq=False)
class Outcome:
    """What the user's model returned for one piece, or says of a rank's own batch."""

    template: Template  # what it looks like
    scalars: tuple[Tensor, ...]  # its floating-point tensors of no dims, ``[]`` each

    @property
    def loss(self) -> Tensor:
        return self.scalars[self.template.loss]

    def output(self, loss: Tensor, guarded: Callable[[Tensor], Tensor] = Tensor.detach) -> Any:
        """In the user's type, with this tensor for its loss; ``guarded`` is applied to the other
        scalars that had a gradient."""
        pairs = zip(self.scalars, self.template.learnt)
        scalars = [guarded(scalar) if learnt else scalar for scalar, learnt in pairs]
        scalars[self.template.loss] = loss
        return _changed(
            self.template.tree,
            lambda _, leaf: scalars[leaf.index] if isinstance(leaf, Hole) else leaf,
        )

    @classmethod
    def of(cls, output: Any) -> Outcome:
        """Take an output apart.

        The loss is the field ``loss``, else the first scalar; if anything in the output requires a
        gradient, of those that do.

        Raises:
            ValueError: it has no loss.
        """
        leaves = dict(_leaves(output))
        tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
        scalars = {p: t for p, t in tensors.items() if t.dim() == 0 and t.is_floating_point()}
        learns = any(tensor.requires_grad for tensor in tensors.values())
        losses = [path for path, t in scalars.items() if t.requires_grad or not learns]
        if not losses:
            raise ValueError(
                f"the model returned a {type(output).__qualname__} without a loss, but under "
                "strategy zebra attention ranks run the batches of all ranks, so logits are "
                "not returned: let the model compute its loss (in Hugging Face's pass "
                "labels=...) and return it as a 0-dim floating-point tensor"
            )
        holes = {path: Hole(index) for index, path in enumerate(scalars)}
        kept = {path: v for path, v in leaves.items() if isinstance(v, PLAIN) and v is not None}
        reported = {
            path: f"{t.dtype}{' with a gradient' if t.requires_grad else ''}"
            for path, t in scalars.items()
        } | {path: repr(value) for path, value in kept.items()}
        lines = (f"{'.'.join(map(str, p)) or 'itself'}: {text}" for p, text in reported.items())
        template = Template(
            tree=_changed(output, lambda path, _: holes.get(path, kept.get(path))),
            dtypes=tuple(scalar.dtype for scalar in scalars.values()),
            loss=list(scalars).index(("loss",) if ("loss",) in losses else losses[0]),
            learnt=tuple(scalar.requires_grad for scalar in scalars.values()),
            text=f"{type(output).__qualname__}({', '.join(lines)})",
        )
        return cls(template, tuple(scalars.values()))


def _digest_of(text: str) -> int:
    """Distinguish texts; never 0."""
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    return 1 + int.from_bytes(digest, "big")


def _children(thing: Any) -> dict[Hashable, Any] | None:
    """What lies in a container, by name; None if it is none."""
    if isinstance(thing, (Hole, type)):
        return None
    if is_dataclass(thing):
        return {field.name: getattr(thing, field.name) for field in fields(thing) if field.init}
    if isinstance(thing, Mapping):
        return dict(thing)
    if isinstance(thing, (tuple, list)):
        return dict(zip(getattr(thing, "_fields", range(len(thing))), thing))
    return None


def _leaves(thing: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    children = _children(thing)
    if children is None:
        yield path, thing
    else:
        for name, child in children.items():
            yield from _leaves(child, (*path, name))


def _changed(thing: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The same with changed leaves; None for a container in which all are None."""
    children = _children(thing)
    if children is None:
        return change(path, thing)
    changed = {name: _changed(child, change, (*path, name)) for name, child in children.items()}
    if all(child is None for child in changed.values()):
        return None
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{str(name): child for name, child in changed.items()})
    if isinstance(thing, Mapping):
        filled: Any = copy.copy(thing)
        filled.update(changed)
        return filled
    make = thing._make if hasattr(thing, "_fields") else type(thing)
    return make(changed.values())
