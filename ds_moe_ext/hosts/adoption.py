"""How attention ranks run the batches of a whole ZP group, and every rank has its own loss.

Expert ranks are given batches too, by samplers that know nothing of roles. Attention ranks adopt
them, in pieces; see ``ds_moe_ext.pieces``. What the model returns for a piece is weighted by its
samples and goes back to the rank whose batch it is of: a loss is taken to be a mean over samples.
Shape letters: C ranks of the group, in its order; V scalars of an output.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from ds_moe_ext.comm import (
    Parcel,
    Traffic,
    all_gather_counts,
    exchange,
    gather_texts,
    sum_in_place,
)
from ds_moe_ext.pieces import Piece, Pieces, Stripes, pieces_of
from ds_moe_ext.roles import Roles

PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
"""Values that do not travel."""

NUM_ITEMS = "['num_items_in_batch']"
"""What Hugging Face divides a sum by, in the place of a mean over the items of one call."""

Batch = Mapping[str, Tensor]
"""The tensors of a call that are cut, by name."""


# What moves.


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the user's model.

    Attributes:
        piece: whose samples these are.
        weight: their share of the batch that they are of.
        args: by position. Of another rank's batch, what is not cut is this rank's own.
        kwargs: by name.
    """

    piece: Piece
    weight: float
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Shared:
    """The batches of a group, shared among its attention ranks.

    Attributes:
        num_samples_C: samples of each rank's batch.
        pieces: those of all attention ranks, by their order in the group.
        calls: of this rank, for each stripe; every stripe of an expert rank is empty.
        traffic: what it took to bring the samples here.
    """

    num_samples_C: tuple[int, ...]
    pieces: Pieces
    calls: tuple[tuple[Call, ...], ...]
    traffic: Traffic


@dataclass(frozen=True, eq=False)
class Returned:
    """What the model says of a rank's own batch.

    Attributes:
        template: what an output looks like, the same on every rank.
        scalars: of this rank, ``[]`` each, of the types in which the model returned them.
    """

    template: Template
    scalars: tuple[Tensor, ...]

    @property
    def loss(self) -> Tensor:
        """The loss of this rank's batch, without a graph."""
        return self.scalars[self.template.loss]

    def output(self, loss: Tensor) -> Any:
        """The output in the user's type, with this tensor as its loss."""
        scalars = list(self.scalars)
        scalars[self.template.loss] = loss
        return self.template.rebuild(scalars)


class Adoption:
    """Moves the batches of a ZP group to its attention ranks, and what became of them back.

    Args:
        group: the ranks of the ZP group, for tensors on the device; ``connect`` it first.
        control: the same ranks over gloo, for what hosts must know.
        place: of this rank in both.
        roles: of the group's ranks.
        num_stripes: of each attention rank.
        device: where the model computes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        *,
        place: int,
        roles: Roles,
        num_stripes: int,
        device: torch.device,
    ) -> None:
        self.group = group
        self.control = control
        self.place = place
        self.roles = roles
        self.num_stripes = num_stripes
        self.device = device
        self._template: Template | None = None  # the last one, the same on every rank

    def share(self, args: tuple[Any, ...], kwargs: dict[str, Any], mode: str) -> Shared:
        """Bring every sample of the group to the attention rank that runs it. Collective.

        A tensor is cut along its first dim if that is, on every rank, as long as the first dim of
        the rank's first tensor; its other dims may differ between ranks. All else must be alike.

        Args:
            args: what this rank's model was called with, by position.
            kwargs: by name.
            mode: what the pass is for; the same on every rank.

        Raises:
            ValueError: on every rank: the calls are not alike, or cannot be cut.
        """
        own = Arguments.of(args, kwargs)
        told = gather_texts(own.signature(mode).to_text(), self.control)
        signatures = [Signature.from_text(text) for text in told]
        names = _names_of_batches(signatures)
        _check(signatures, names)
        num_samples_C = tuple(signature.num_samples for signature in signatures)
        pieces = self._pieces(num_samples_C)
        stripes = dict(zip(self.roles.attention_cells, pieces))
        here, traffic = self._bring(own, signatures, names, stripes)
        calls = tuple(
            tuple(own.call(piece, piece.weight(num_samples_C), here) for piece in stripe)
            for stripe in stripes.get(self.place, ((),) * self.num_stripes)
        )
        return Shared(num_samples_C, pieces, calls, traffic)

    def return_scalars(self, shared: Shared, outcomes: Sequence[Sequence[Outcome]]) -> Returned:
        """Give every rank the scalars of its own batch. Collective.

        Each is the sum over the batch's pieces of weight times value, in float64.

        Args:
            shared: what ``share`` returned.
            outcomes: of each of its calls, stripe by stripe.

        Raises:
            ValueError: on every rank: outputs differ in structure, or cannot be pickled.
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
        return Returned(template, scalars)

    def _pieces(self, num_samples_C: Sequence[int]) -> Pieces:
        """The pieces of every stripe; senders are places in the group."""
        order = (*self.roles.attention_cells, *self.roles.expert_cells)
        pieces = pieces_of(
            [num_samples_C[place] for place in order],
            len(self.roles.attention_cells),
            self.num_stripes,
        )
        return tuple(
            tuple(
                tuple(replace(piece, sender=order[piece.sender]) for piece in stripe)
                for stripe in stripes
            )
            for stripes in pieces
        )

    def _bring(
        self,
        own: Arguments,
        signatures: Sequence[Signature],
        names: Sequence[str],
        stripes: Mapping[int, Stripes],
    ) -> tuple[dict[int, tuple[int, Batch]], Traffic]:
        """Exchange what attention ranks adopt. Collective.

        Returns:
            For each sender, its first sample that is here now, and what is here of its batch.
        """
        batch = {name: own.leaves[name].detach() for name in names}
        landed: dict[Piece, Batch] = {
            span: {
                name: own.landing(name, span, signatures[span.sender].leaves[name])
                for name in names
            }
            for span in _spans(stripes.get(self.place, ()), self.place)
        }
        leaving = {
            cell: {name: tensor[span.start : span.stop] for name, tensor in batch.items()}
            for cell in stripes
            for span in _spans(stripes[cell], cell)
            if span.sender == self.place
        }
        traffic = self._exchange(landed, leaving)
        here = {span.sender: (span.start, parts) for span, parts in landed.items()}
        return here | {self.place: (0, batch)}, traffic

    def _exchange(self, landed: Mapping[Piece, Batch], leaving: Mapping[int, Batch]) -> Traffic:
        """Fill what is to land, by sender, with what leaves, by receiver. Collective."""
        receives = [
            (_bytes(tensor), span.sender)
            for span, batch in landed.items()
            for tensor in batch.values()
        ]
        sends = [
            (_bytes(tensor), cell) for cell, batch in leaving.items() for tensor in batch.values()
        ]
        traffic = Traffic()
        for group, on_host in ((self.group, False), (self.control, True)):
            traffic += exchange(_on(receives, on_host), _on(sends, on_host), group)
        return traffic

    def _agree(self, templates: Sequence[Template]) -> Template:
        """What an output looks like; the first attention rank tells when that changes."""
        texts = sorted({template.text for template in templates})
        digest = _digest(texts[0]) if len(texts) == 1 else 0
        digests_C = all_gather_counts(torch.tensor([digest]), self.control)[:, 0].tolist()
        first, *others = (digests_C[cell] for cell in self.roles.attention_cells)
        if first == 0 or any(other != first for other in others):
            told = gather_texts(" and ".join(texts), self.control)
            raise ValueError(
                "the model returned outputs that differ in more than the values of tensors: "
                + "; ".join(f"place {place}: {text}" for place, text in enumerate(told) if text)
                + "; let it return the same fields for all samples, and numbers as 0-dim tensors"
            )
        if self._template is None or _digest(self._template.text) != first:
            self._template = self._tell(templates)
        return self._template

    def _tell(self, templates: Sequence[Template]) -> Template:
        teller = self.roles.attention_cells[0]
        text = templates[0].to_text() if self.place == teller else ""
        return Template.from_text(gather_texts(text, self.control)[teller])


def _spans(stripes: Stripes, cell: int) -> list[Piece]:
    """What an attention rank runs of each other rank's batch, in one."""
    spans: dict[int, Piece] = {}
    for piece in chain.from_iterable(stripes):
        spans[piece.sender] = replace(spans.get(piece.sender, piece), stop=piece.stop)
    return [span for sender, span in spans.items() if sender != cell]


def _bytes(tensor: Tensor) -> Tensor:
    """As any communicator takes it: NCCL knows no bool, for one."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _on(parcels: Sequence[Parcel], on_host: bool) -> list[Parcel]:
    return [(part, peer) for part, peer in parcels if part.is_cpu == on_host and part.numel()]


# Arguments.


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

    def landing(self, name: str, span: Piece, leaf: Leaf) -> Tensor:
        """Where a part of another rank's tensor goes."""
        like: Tensor = self.leaves[name]
        return like.new_empty(span.num_samples, *leaf.shape[1:])

    def call(self, piece: Piece, weight: float, here: Mapping[int, tuple[int, Batch]]) -> Call:
        """The call of a piece.

        Args:
            piece: of one of the batches that are here.
            weight: its share of the batch.
            here: for each sender, its first sample that is here, and what is here of its batch.
        """
        values = dict(self.leaves)
        first, batch = here[piece.sender]
        for name, tensor in batch.items():
            values[name] = tensor[piece.start - first : piece.stop - first]
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


def _names_of_batches(signatures: Sequence[Signature]) -> list[str]:
    """Names of the tensors that are cut."""
    return sorted(
        name
        for name in signatures[0].leaves
        if all(
            signature.leaves.get(name, ABSENT).shape[:1] == (signature.num_samples,)
            for signature in signatures
        )
    )


def _check(signatures: Sequence[Signature], names: Sequence[str]) -> None:
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


# Outputs.

Path = tuple[Hashable, ...]
"""Names on the way to a value in an output."""


@dataclass(frozen=True)
class Hole:
    """The place of a scalar in an output."""

    index: int


@dataclass(frozen=True, eq=False)
class Template:
    """What an output of the user's model looks like, without its values.

    Attributes:
        tree: of the user's type: holes for its scalars, None for its other tensors.
        dtypes: types of the scalars.
        loss: which of them is the loss.
        text: what templates that are alike have in common.
    """

    tree: Any
    dtypes: tuple[torch.dtype, ...]
    loss: int
    text: str

    def rebuild(self, scalars: Sequence[Tensor]) -> Any:
        """The output with these scalars."""

        def fill(_: Path, leaf: Any) -> Any:
            return scalars[leaf.index] if isinstance(leaf, Hole) else leaf

        return _changed(self.tree, fill)

    def to_text(self) -> str:
        """For ``from_text`` on another rank; it raises there what is wrong here."""
        try:
            return base64.b64encode(pickle.dumps(self)).decode()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return f"!{error}"

    @classmethod
    def from_text(cls, text: str) -> Template:
        """What another rank's ``to_text`` told.

        Raises:
            ValueError: it could not be pickled there.
        """
        if text.startswith("!"):
            raise ValueError(
                f"the model's output cannot be sent to the expert ranks: {text[1:]}; let it return "
                "a tensor, a tuple, a dict, or a class defined at the top of a module"
            )
        template: Template = pickle.loads(base64.b64decode(text))
        return template


@dataclass(frozen=True, eq=False)
class Outcome:
    """What the user's model returned for one piece.

    Attributes:
        template: what it looks like.
        scalars: its floating-point tensors of no dims, ``[]`` each, with their graphs.
    """

    template: Template
    scalars: tuple[Tensor, ...]

    @property
    def loss(self) -> Tensor:
        return self.scalars[self.template.loss]

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
        scalars = {path: t for path, t in tensors.items() if _is_scalar(t)}
        learns = any(tensor.requires_grad for tensor in tensors.values())
        losses = [path for path, t in scalars.items() if t.requires_grad or not learns]
        if not losses:
            raise ValueError(
                f"the model returned a {type(output).__qualname__} without a loss, but under "
                "strategy zebra its attention ranks run the batches of all ranks, so that logits "
                "do not come back to these: let the model compute its loss (in Hugging Face's "
                "pass labels=...) and return it as a 0-dim floating-point tensor"
            )
        holes = {path: Hole(index) for index, path in enumerate(scalars)}
        kept = {path: v for path, v in leaves.items() if isinstance(v, PLAIN) and v is not None}
        told = [f"{_name(path)}: {t.dtype}" for path, t in scalars.items()]
        told += [f"{_name(path)}: {value!r}" for path, value in kept.items()]
        template = Template(
            tree=_changed(output, lambda path, _: holes.get(path, kept.get(path))),
            dtypes=tuple(scalar.dtype for scalar in scalars.values()),
            loss=list(scalars).index(("loss",) if ("loss",) in losses else losses[0]),
            text=f"{type(output).__qualname__}({', '.join(told)})",
        )
        return cls(template, tuple(scalars.values()))


def _is_scalar(tensor: Tensor) -> bool:
    return tensor.dim() == 0 and tensor.is_floating_point()


def _name(path: Path) -> str:
    return ".".join(map(str, path)) or "itself"


def _digest(text: str) -> int:
    """Tells texts apart; never 0."""
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
    return (
        thing._make(changed.values())
        if hasattr(thing, "_fields")
        else type(thing)(changed.values())
    )
