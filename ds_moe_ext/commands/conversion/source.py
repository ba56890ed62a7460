# SPDX-License-Identifier: Apache-2.0
"""What is read: stored tensors, and from them the pieces of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ds_moe_ext.commands.conversion.model import AnyModel, AnyPart, Part, Piece, Shape
from ds_moe_ext.commands.conversion.tables import Cell, Table, cells, split


class Stored(NamedTuple):
    """A stored tensor.

    Attributes:
        shape: of all of it.
        dtype: that it is given in.
        read: a box of it, by where it starts and its shape.
    """

    shape: Shape
    dtype: torch.dtype
    read: Callable[[Shape, Shape], Tensor]


@dataclass(frozen=True)
class Source:
    """A checkpoint that is read.

    Attributes:
        name: of its folder, for errors.
        tensors: that it has, by name.
        tables: ways to read it, of which the first that fits counts.
        may_pad: embedding and output may have more rows than the model has tokens.
        spare: names of tensors that are no weights of the model, or copies.
        zeros: parts that it does not have, for they are zero where it comes from; by each, the
            part whose type they take.
    """

    name: str
    tensors: Mapping[str, Stored]
    tables: Sequence[Table]
    may_pad: bool = False
    spare: Callable[[str], bool] = lambda _: False
    zeros: Mapping[AnyPart, AnyPart] = field(default_factory=dict)


_PADDED: set[AnyPart] = {Part.EMBEDDING, Part.OUTPUT}


class Pieces:
    """The pieces of a model, read from a source.

    Args:
        source: that has them.
        model: what it is said to be.

    Raises:
        ValueError: a weight is missing, unknown or of another shape.
    """

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
                    f"{self._source.name} has {cell.name} of shape {got}, but the model says "
                    f"{expected}; describe the model as it was trained (--model)"
                )
        known = {cell.name for cell in found}
        unknown = [n for n in self._source.tensors if n not in known and not self._source.spare(n)]
        if unknown:
            raise ValueError(
                f"{self._source.name} has {_some(unknown)}, of which a {self._model.family.value} "
                "model knows nothing; nothing is converted, so that nothing is lost"
            )

    def dtype(self, piece: Piece) -> torch.dtype:
        """That it is given in."""
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
    best: _Fit | None = None
    for table in source.tables:
        fit = _Fit.of(source, model, table)
        if not fit.lacking:
            return table
        if best is None or fit.num_there > best.num_there:
            best = fit
    assert best is not None
    raise ValueError(
        f"{source.name} has no {_some(best.lacking)}; is it a whole checkpoint of a "
        f"{model.family.value} model of {model.num_layers} layers and {model.num_experts} "
        "experts? Describe it with --model if not"
    )


class _Fit(NamedTuple):
    """How a table fits: names that are there, and those that are not."""

    num_there: int
    lacking: list[str]

    @classmethod
    def of(cls, source: Source, model: AnyModel, table: Table) -> _Fit:
        names = dict.fromkeys(cell.name for cell in cells(model, table))
        lacking = [name for name in names if name not in source.tensors]
        return cls(len(names) - len(lacking), lacking)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
