# SPDX-License-Identifier: Apache-2.0
"""What is written: stored tensors, each made of pieces when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_moe_ext.commands.conversion.model import AnyModel
from ds_moe_ext.commands.conversion.source import Pieces
from ds_moe_ext.commands.conversion.tables import Cell, Table, cells, join


@dataclass(frozen=True)
class Maker:
    """Makes what a table asks for.

    Attributes:
        model: whose pieces they are.
        pieces: of the source.
        dtype: of all that is made; None leaves each as it is.
        told: called when one is made.
    """

    model: AnyModel
    pieces: Pieces
    dtype: torch.dtype | None
    told: Callable[[], None]

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
        self.told()
        made = join(self.model, cell.row, parts).contiguous()
        is_view = made.untyped_storage().nbytes() > made.nbytes
        return made.clone() if is_view else made  # a view would be written with all around it
