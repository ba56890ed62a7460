# SPDX-License-Identifier: Apache-2.0
"""What the user's model returns: its scalars, and what it looks like without them."""

from __future__ import annotations

import base64
import copy
import hashlib
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
"""Values that do not travel."""

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
        learnt: for each, whether it had a gradient.
        text: what templates that are alike have in common.
    """

    tree: Any
    dtypes: tuple[torch.dtype, ...]
    loss: int
    learnt: tuple[bool, ...]
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
        learnt = tuple(scalar.requires_grad for scalar in scalars.values())
        told = [
            f"{_name(path)}: {t.dtype}{' with a gradient' if has_gradient else ''}"
            for (path, t), has_gradient in zip(scalars.items(), learnt)
        ]
        told += [f"{_name(path)}: {value!r}" for path, value in kept.items()]
        template = Template(
            tree=_changed(output, lambda path, _: holes.get(path, kept.get(path))),
            dtypes=tuple(scalar.dtype for scalar in scalars.values()),
            loss=list(scalars).index(("loss",) if ("loss",) in losses else losses[0]),
            learnt=learnt,
            text=f"{type(output).__qualname__}({', '.join(told)})",
        )
        return cls(template, tuple(scalars.values()))


def _is_scalar(tensor: Tensor) -> bool:
    return tensor.dim() == 0 and tensor.is_floating_point()


def _name(path: Path) -> str:
    return ".".join(map(str, path)) or "itself"


def digest_of(text: str) -> int:
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
