"""The experts of one layer down a drawing, those of a home cell together.

Shape letters: E experts, C cells, Y and X pixels.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.report.units import ratio_text

_GAP = 4  # pixels between cells
_LINE = 13  # pixels that a line of small text takes
_TALL = 640  # pixels that all experts may take


@dataclass(frozen=True, eq=False)
class Shelf:
    """The experts at home in one cell.

    Attributes:
        cell: its number.
        experts: their ids, ascending.
        load: rows drawn by the cell over the mean of all cells, over the run.
        top: pixels above the shelf.
    """

    cell: int
    experts: tuple[int, ...]
    load: float
    top: int


@dataclass(frozen=True)
class Shelves:
    """Args:
    of_cells: one for each cell that is home to an expert, in their order.
    num_empty: cells that are home to none.
    row_height: pixels of an expert, so that a layer is not too high, and an expert at least one.
    """

    of_cells: tuple[Shelf, ...]
    num_empty: int
    row_height: int

    @classmethod
    def of(cls, record: RunRecord, index: int) -> Shelves:
        """Those of one layer of a run."""
        layer = record.layers[index]
        row_height = int(np.clip(_TALL // max(layer.num_experts, 1), 1, 18))
        home_E = np.asarray(layer.home_E, dtype=np.int64)
        rows_E = record.rows_ILE[:, index, : layer.num_experts].sum(axis=0)
        mean = rows_E.sum() / max(record.num_cells, 1)
        shelves: list[Shelf] = []
        top = 0
        for cell in np.unique(home_E):
            experts = np.flatnonzero(home_E == cell)
            load = float(rows_E[experts].sum() / mean) if mean else 1.0
            shelves.append(Shelf(int(cell), tuple(map(int, experts)), load, top))
            top += len(experts) * row_height + _GAP
        return cls(tuple(shelves), record.num_cells - len(shelves), row_height)

    @property
    def height(self) -> int:
        """Pixels of the whole."""
        last = self.of_cells[-1]
        return last.top + len(last.experts) * self.row_height

    @property
    def held(self) -> str:
        """Cell, top and experts of each shelf, as JSON for the page's script."""
        rows = [[s.cell, s.top, *s.experts] for s in self.of_cells]
        return json.dumps(rows, separators=(",", ":"))

    def stacked(self, level_EX: np.ndarray) -> np.ndarray:
        """Palette indices ``[Y, X]``: one expert's as often as it has pixels, gaps are 0."""
        gap = np.zeros((_GAP, level_EX.shape[1]), dtype=np.uint8)
        parts = [
            part
            for shelf in self.of_cells
            for part in (level_EX[list(shelf.experts)].repeat(self.row_height, axis=0), gap)
        ]
        return np.concatenate(parts[:-1])

    def names(self) -> str:
        """HTML: cells, and experts where there is room, at their heights."""
        high = self.row_height
        names: list[str] = []
        free_from = 0
        for shelf in self.of_cells:
            middle = shelf.top + len(shelf.experts) * high // 2
            if middle - _LINE // 2 >= free_from or not names:
                free_from = middle + _LINE // 2
                names.append(
                    f'<span style="top:{middle}px"><b>cell {shelf.cell}</b> '
                    f"{ratio_text(shelf.load)}</span>"
                )
        if high >= _LINE - 2:
            names += [
                f'<i style="top:{shelf.top + k * high + high // 2}px">{expert}</i>'
                for shelf in self.of_cells
                for k, expert in enumerate(shelf.experts)
            ]
        return f'<div class="cells" style="height:{self.height}px">{"".join(names)}</div>'
