# SPDX-License-Identifier: Apache-2.0
"""How a form keeps the pieces of a model: a table of rows, the same for reading and for writing.

A row names a stored tensor and the parts that are joined in it. ``{layer}`` and ``{expert}`` stand
for numbers; where a name lacks one that its parts have, the stored tensor has a leading dim of
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_moe_ext.commands.conversion.model import AnyModel, AnyPart, Piece, Shape, Where


class Row(NamedTuple):
    """One kind of stored tensor.

    Attributes:
        name: pattern.
        parts: joined along their first dim, in this order.
        is_grouped: joined for each group of the attention by itself.
    """

    name: str
    parts: tuple[AnyPart, ...]
    is_grouped: bool = False


Table = tuple[Row, ...]


class Cell(NamedTuple):
    """What a row has of one layer or expert.

    Attributes:
        name: of the stored tensor.
        lead: numbers in its leading dims: none, layer, expert, or both.
        lead_shape: of those dims.
        row: that it is of.
        where: of its pieces.
    """

    name: str
    lead: tuple[int, ...]
    lead_shape: Shape
    row: Row
    where: Where

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """That are joined in it."""
        return tuple(Piece(part, self.where) for part in self.row.parts)

    def inner_shape(self, model: AnyModel) -> Shape:
        """Without the leading dims."""
        shape = model.shapes
        rest = shape[self.row.parts[0]][1:]
        return sum(shape[part][0] for part in self.row.parts), *rest

    def shape(self, model: AnyModel) -> Shape:
        """Of the stored tensor."""
        return *self.lead_shape, *self.inner_shape(model)


def of_model(model: AnyModel, table: Sequence[Row]) -> Table:
    """The rows whose parts a model has."""
    has = model.shapes.keys()
    return tuple(row for row in table if has >= set(row.parts))


def cells(model: AnyModel, table: Sequence[Row]) -> Iterator[Cell]:
    """All of a model, layer by layer, in each expert by expert: what is read at one place is needed
    at one place."""
    found = (
        (where, number, row)
        for number, row in enumerate(of_model(model, table))
        for where in model.places(row.parts[0].scope)
    )
    order = sorted(found, key=lambda each: (*(-1 if n is None else n for n in each[0]), each[1]))
    return (_cell(model, row, where) for where, _, row in order)


def _cell(model: AnyModel, row: Row, where: Where) -> Cell:
    lead, lead_shape = [], []
    if where.layer is not None and "{layer}" not in row.name:
        lead.append(where.layer)
        lead_shape.append(model.num_layers)
    if where.expert is not None and "{expert}" not in row.name:
        lead.append(where.expert)
        lead_shape.append(model.num_experts)
    name = row.name.format(layer=where.layer, expert=where.expert)
    return Cell(name, tuple(lead), tuple(lead_shape), row, where)


def join(model: AnyModel, row: Row, tensors: Sequence[Tensor]) -> Tensor:
    """What is stored of these parts."""
    if len(tensors) == 1:
        return tensors[0]
    groups = _num_groups(model, row)
    return torch.cat([tensor.unflatten(0, (groups, -1)) for tensor in tensors], 1).flatten(0, 1)


def split(model: AnyModel, row: Row, stored: Tensor) -> tuple[Tensor, ...]:
    """The parts of what is stored; undoes ``join``."""
    if len(row.parts) == 1:
        return (stored,)
    groups, shape = _num_groups(model, row), model.shapes
    sizes = [shape[part][0] // groups for part in row.parts]
    parts = stored.unflatten(0, (groups, -1)).split(sizes, 1)
    return tuple(part.flatten(0, 1) for part in parts)


def _num_groups(model: AnyModel, row: Row) -> int:
    return model.num_groups if row.is_grouped else 1
