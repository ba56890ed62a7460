# SPDX-License-Identifier: Apache-2.0
"""What is read, stored tensors and from them the pieces of a model; and what is written, stored
tensors that are each made of pieces when their turn comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_moe_ext.commands.conversion.model import AnyModel, AnyPart, Part, Piece, Shape, Table
from ds_moe_ext.commands.conversion.tables import Cell, cells, join, split
from ds_moe_ext.files.unpickle import damaged


class Stored(NamedTuple):
    """A stored tensor."""

    shape: Shape  # of all of it
    dtype: torch.dtype  # that it is given in
    read: Callable[[Shape, Shape], Tensor]  # a box of it, by where it starts and its shape


@dataclass(frozen=True)
class Source:
    """A checkpoint that is read."""

    name: str  # of its folder, for errors
    tensors: Mapping[str, Stored]  # that it has, by name
    tables: Sequence[Table]  # ways to read it, of which the first that fits counts
    may_pad: bool = False  # embedding and output may have more rows than the model has tokens
    # names of tensors that are no weights of the model, or copies
    spare: Callable[[str], bool] = lambda _: False
    # parts that it does not have, for they are zero where it comes from; by each, the part whose
    # type they take
    zeros: Mapping[AnyPart, AnyPart] = field(default_factory=dict)


_PADDED: set[AnyPart] = {Part.EMBEDDING, Part.OUTPUT}


class Pieces:
    """The pieces of a model, read from a source; all is there, known and of the right shape."""

    def __init__(self, source: Source, model: AnyModel) -> None:
        self._source, self._model = source, model
        found = tuple(cells(model, _fitting(source, model)))
        self._check(found)
        self._cells = {piece: cell for cell in found for piece in cell.pieces}
        self._last: tuple[Cell, dict[Piece, Tensor]] | None = None

    def _check(self, found: Sequence[Cell]) -> None:
        for cell in found:
            got, expected = self._source.tensors[cell.name].shape, cell.shape(self._model)
            pads = self._source.may_pad and not _PADDED.isdisjoint(cell.row.parts)
            is_longer = pads and got[0] >= expected[0] and got[1:] == expected[1:]
            if got != expected and not is_longer:
                raise ValueError(
                    f"{self._source.name} has {cell.name} of shape {got}, but the model needs "
                    f"{expected}; describe the model as it was trained (--model)"
                )
        known = {cell.name for cell in found}
        unknown = [n for n in self._source.tensors if n not in known and not self._source.spare(n)]
        if unknown:
            raise ValueError(
                f"{self._source.name} has {_some(unknown)}, which a {self._model.family.value} "
                "model does not have; nothing was converted"
            )

    def dtype(self, piece: Piece) -> torch.dtype:
        piece = piece._replace(part=self._source.zeros.get(piece.part, piece.part))
        return self._source.tensors[self._cells[piece].name].dtype

    def read(self, piece: Piece) -> Tensor:
        """It. What is stored in one tensor with it is kept until another is read."""
        if piece.part in self._source.zeros:
            return torch.zeros(self._model.shapes[piece.part], dtype=self.dtype(piece))
        cell = self._cells[piece]
        if self._last is None or self._last[0] is not cell:
            self._last = None  # before there is room for the next
            start = (*cell.lead, *(0 for _ in cell.inner_shape(self._model)))
            shape = (*(1 for _ in cell.lead), *cell.inner_shape(self._model))
            stored = self._source.tensors[cell.name]
            box = stored.read(start, shape).reshape(shape[len(cell.lead) :]).to(stored.dtype)
            parts = split(self._model, cell.row, box)
            self._last = cell, dict(zip(cell.pieces, parts, strict=True))
        return self._last[1][piece]


def _fitting(source: Source, model: AnyModel) -> Table:
    """The first table all of whose names are there."""
    tried = list[tuple[int, list[str]]]()  # names that are there, and those that are not
    for table in source.tables:
        names = dict.fromkeys(cell.name for cell in cells(model, table))
        lacking = [name for name in names if name not in source.tensors]
        if not lacking:
            return table
        tried.append((len(names) - len(lacking), lacking))
    _, lacking = max(tried, key=lambda each: each[0])
    raise ValueError(
        f"{source.name} has no {_some(lacking)}; is it a whole checkpoint of a "
        f"{model.family.value} model of {model.num_layers} layers and {model.num_experts} "
        "experts? Describe it with --model if not"
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


@dataclass(frozen=True)
class Maker:
    """Makes what a table asks for."""

    model: AnyModel  # whose pieces they are
    pieces: Pieces  # of the source
    dtype: torch.dtype | None  # of all that is made; None leaves each as it is
    reported: Callable[[], None]  # called when one is made

    def cells(self, table: Table) -> Iterator[Cell]:
        """All that is to be made."""
        return cells(self.model, table)

    def dtype_of(self, cell: Cell) -> torch.dtype:
        """It will be made in; parts of several types are widened."""
        if self.dtype is not None:
            return self.dtype
        first, *rest = map(self.pieces.dtype, cell.pieces)
        for other in rest:
            first = torch.promote_types(first, other)
        return first

    def make(self, cell: Cell) -> Tensor:
        """What is stored of one layer or expert, without leading dims."""
        dtype = self.dtype_of(cell)
        parts = [self.pieces.read(piece).to(dtype) for piece in cell.pieces]
        self.reported()
        made = join(self.model, cell.row, parts).contiguous()
        is_view = made.untyped_storage().nbytes() > made.nbytes
        return made.clone() if is_view else made  # a view would be written with all around it


# Small files of text beside tensors.


def text_of(path: Path) -> str:
    """What a file of one word has."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error
    if not text.isprintable() or not text or len(text) > 255:
        raise damaged(path, ValueError("it does not name a folder"))
    return text


def object_of(path: Path, *keys: str) -> Mapping[str, Any]:
    """What a file of JSON has."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from error
    lacking = [key for key in keys if not isinstance(document, Mapping) or key not in document]
    if lacking or not isinstance(document, Mapping):
        raise damaged(path, ValueError(f"it has no {' and '.join(lacking) or 'keys'}"))
    return document
