# SPDX-License-Identifier: Apache-2.0
"""One number for every expert at every step: an indexed image, its names, and a colour scale.

The experts of a home cell stand together, on a shelf.

An image holds one pixel a column, and as many pixels a row as it is drawn high; so it stretches
sideways only. As vector boxes a large run would pass 20 MB. Shape letters: B bins of steps, E
experts, C cells, Y and X pixels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ds_moe_ext.report.charts import step_axis
from ds_moe_ext.report.colours import Ramp, load_level, load_ramp
from ds_moe_ext.report.markup import Html, joined
from ds_moe_ext.report.raster import data_uri
from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.report.summary import Bins
from ds_moe_ext.report.units import TIMES, counted, ratio_text

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

    def names(self) -> Html:
        """Cells, and experts where there is room, at their heights."""
        high = self.row_height
        names: list[Html] = []
        free_from = 0
        for shelf in self.of_cells:
            middle = shelf.top + len(shelf.experts) * high // 2
            if middle - _LINE // 2 >= free_from or not names:
                free_from = middle + _LINE // 2
                names.append(
                    Html('<span style="top:{}px"><b>EP rank {}</b> {}</span>').format(
                        middle, shelf.cell, ratio_text(shelf.load)
                    )
                )
        if high >= _LINE - 2:
            names += [
                Html('<i style="top:{}px">{}</i>').format(shelf.top + k * high + high // 2, expert)
                for shelf in self.of_cells
                for k, expert in enumerate(shelf.experts)
            ]
        cells = Html('<div class="cells" style="height:{}px">{}</div>')
        return cells.format(self.height, joined(names))


def heatmap(level_EB: np.ndarray, shelves: Shelves, ramp: Ramp, bins: Bins, *, what: str) -> Html:
    """Palette indices of the experts of one layer over the steps. ``what`` they are, for people."""
    empty = shelves.num_empty
    note = f" {counted(empty, 'EP rank')} hold no expert of this layer." if empty else ""
    return Html(
        '<figure class="heat" data-held="{held}" data-row="{row_height}" data-ramp="{ramp}">'
        '<div class="axes">{names}<img class="ramp" src="{image}" style="height:{height}px" '
        'alt="{what}">{steps}</div>'
        '<figcaption class="note">Down: experts, grouped by the EP rank that owns them (home), '
        "with its rows over the mean's. Across: recorded steps.{note}</figcaption></figure>"
    ).format(
        held=shelves.held,
        row_height=shelves.row_height,
        ramp=ramp.name,
        names=shelves.names(),
        image=data_uri(shelves.stacked(level_EB), ramp.palette_P3),
        height=shelves.height,
        what=what,
        steps=step_axis(bins, max_labels=5),
        note=note,
    )


def scale(ramp: Ramp, title: str, ticks: Mapping[str, float]) -> Html:
    """The legend of a ramp, for people and for the page's script.

    Args:
        ramp: the colours.
        title: what they stand for.
        ticks: where names stand below it, in percents.
    """
    colours = np.arange(1, len(ramp.palette_P3), dtype=np.uint8)[None, :]
    values = json.dumps([float(f"{value:.4g}") for value in ramp.value_P], separators=(",", ":"))
    names = joined(
        Html('<span style="left:{:.4g}%">{}</span>').format(at, name) for name, at in ticks.items()
    )
    return Html(
        '<div class="scale"><span>{title}</span><div><img class="ramp" id="{name}" '
        'data-values="{values}" data-unit="{unit}" src="{image}" alt="colour scale">'
        '<div class="steps">{names}</div></div></div>'
    ).format(
        title=title,
        name=ramp.name,
        values=values,
        unit=ramp.unit,
        image=data_uri(colours, ramp.palette_P3),
        names=names,
    )


def load_octaves(record: RunRecord, bins: Bins) -> int:
    """Doublings that the colour scale spans each way: 99 % of hot entries fit, 1 to 4."""
    hot = [
        ratio_BE[ratio_BE > 1]
        for index, layer in enumerate(record.layers)
        for ratio_BE in [_ratio(record.rows_ILE[:, index, : layer.num_experts], bins)]
    ]
    every = np.concatenate(hot) if hot else np.ones(0)
    high = float(np.percentile(every, 99)) if every.size else 1.0
    return int(np.clip(np.ceil(np.log2(high) - 1e-9), 1, 4))


def load_heatmap(record: RunRecord, index: int, *, bins: Bins, octaves: int) -> Html:
    """The loads of the experts of one layer."""
    layer = record.layers[index]
    ratio_BE = _ratio(record.rows_ILE[:, index, : layer.num_experts], bins)
    return heatmap(
        load_level(ratio_BE, octaves=octaves).T,
        Shelves.of(record, index),
        load_ramp(octaves),
        bins,
        what=f"loads of {layer.num_experts} experts over the steps",
    )


def load_scale(octaves: int) -> Html:
    """The legend of loads."""
    ticks = {
        (f"{2**k}" if k >= 0 else f"1/{2**-k}") + TIMES: 100 * (k + octaves) / (2 * octaves)
        for k in range(-octaves, octaves + 1)
    }
    title = Html(
        "rows of an expert over its layer's mean expert (log scale; the ends hold all beyond)"
    )
    return scale(load_ramp(octaves), title, ticks)


def _ratio(rows_IE: np.ndarray, bins: Bins) -> np.ndarray:
    """Rows of each expert over the mean expert, float ``[B, E]``; 1 where no rows came at all."""
    rows_BE = bins.total(rows_IE).astype(np.float64)
    mean_B1 = rows_BE.mean(axis=1, keepdims=True)
    return np.where(mean_B1 > 0, rows_BE / np.maximum(mean_B1, 1e-12), 1.0)
