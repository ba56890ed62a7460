"""The load of every expert over the steps: one indexed image for each layer.

An image holds one pixel a column, and as many pixels a row as it is drawn high, with a transparent
gap between cells; so it stretches sideways only. As vector boxes a large run would pass 20 MB.
Shape letters: B bins of steps, E experts, C cells, Y and X pixels.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from dataclasses import dataclass

import numpy as np

from ds_moe_ext.report.charts import step_axis
from ds_moe_ext.report.colours import NUM_LEVELS, load_level, load_palette
from ds_moe_ext.report.record import LayerRecord, RunRecord
from ds_moe_ext.report.summary import Bins
from ds_moe_ext.report.units import TIMES, counted, ratio_text

_GAP = 4  # pixels between cells
_LINE = 13  # pixels that a line of small text takes


@dataclass(frozen=True, eq=False)
class Group:
    """The experts at home in one cell.

    Attributes:
        cell: its number.
        experts: their ids, ascending.
        load: rows drawn by the cell over the mean of all cells, over the run.
        top: pixels above the group.
    """

    cell: int
    experts: tuple[int, ...]
    load: float
    top: int


def octaves_of(record: RunRecord, bins: Bins) -> int:
    """Doublings that the colour scale spans each way: 99 % of hot entries fit, 1 to 4."""
    hot = [
        ratio_BE[ratio_BE > 1]
        for index, layer in enumerate(record.layers)
        for ratio_BE in [_ratio(record.rows_ILE[:, index, : layer.num_experts], bins)]
    ]
    every = np.concatenate(hot) if hot else np.ones(0)
    high = float(np.percentile(every, 99)) if every.size else 1.0
    return int(np.clip(np.ceil(np.log2(high) - 1e-9), 1, 4))


def heatmap(record: RunRecord, index: int, *, bins: Bins, octaves: int) -> str:
    """The loads of one layer: an image, with the cells and experts named at its left."""
    layer = record.layers[index]
    rows_IE = record.rows_ILE[:, index, : layer.num_experts]
    row_height = _row_height(layer.num_experts)
    groups = _groups(layer, rows_IE, num_cells=record.num_cells, row_height=row_height)
    level_EB = load_level(_ratio(rows_IE, bins), octaves=octaves).T
    pixels_YX = _stacked(level_EB, groups, row_height)
    height = len(pixels_YX)
    held = json.dumps([[g.cell, g.top, *g.experts] for g in groups], separators=(",", ":"))
    empty = record.num_cells - len(groups)
    note = f" {counted(empty, 'cell')} hold no expert of this layer." if empty else ""
    return (
        f'<figure class="heat" data-held="{held}" data-row="{row_height}">'
        f'<div class="axes"><div class="cells" style="height:{height}px">'
        f"{_names(groups, row_height)}</div>"
        f'<img class="ramp" src="{_data_uri(pixels_YX)}" style="height:{height}px" '
        f'alt="loads of {layer.num_experts} experts over the steps">'
        f"{step_axis(bins, max_labels=5)}</div>"
        f'<figcaption class="note">Down: experts, grouped by home cell, with the cell\'s rows over '
        f"the mean cell. Across: recorded steps.{note}</figcaption></figure>"
    )


def legend(octaves: int) -> str:
    """The colour scale: rows of an expert over the mean expert of its layer."""
    ramp = np.arange(1, NUM_LEVELS + 1, dtype=np.uint8)[None, :]
    ticks = [(f"{2**k}" if k >= 0 else f"1/{2**-k}") + TIMES for k in range(-octaves, octaves + 1)]
    names = "".join(
        f'<span style="left:{100 * i / (2 * octaves):.4g}%">{tick}</span>'
        for i, tick in enumerate(ticks)
    )
    return (
        '<div class="scale"><span>rows of an expert over its layer\'s mean expert (log scale; the '
        f'ends hold all beyond)</span><div><img class="ramp" id="ramp" data-octaves="{octaves}" '
        f'src="{_data_uri(ramp)}" alt="colour scale">'
        f'<div class="steps">{names}</div></div></div>'
    )


def _ratio(rows_IE: np.ndarray, bins: Bins) -> np.ndarray:
    """Rows of each expert over the mean expert, float ``[B, E]``; 1 where no rows came at all."""
    rows_BE = bins.total(rows_IE).astype(np.float64)
    mean_B1 = rows_BE.mean(axis=1, keepdims=True)
    return np.where(mean_B1 > 0, rows_BE / np.maximum(mean_B1, 1e-12), 1.0)


def _row_height(num_experts: int) -> int:
    """Pixels a row, so that a layer is about 650 pixels high at most, and a row at least one."""
    return int(np.clip(640 // max(num_experts, 1), 1, 18))


def _groups(
    layer: LayerRecord, rows_IE: np.ndarray, *, num_cells: int, row_height: int
) -> list[Group]:
    home_E = np.asarray(layer.home_E, dtype=np.int64)
    rows_E = rows_IE.sum(axis=0)
    mean = rows_E.sum() / max(num_cells, 1)
    groups: list[Group] = []
    top = 0
    for cell in np.unique(home_E):
        experts = np.flatnonzero(home_E == cell)
        load = float(rows_E[experts].sum() / mean) if mean else 1.0
        groups.append(Group(int(cell), tuple(map(int, experts)), load, top))
        top += len(experts) * row_height + _GAP
    return groups


def _stacked(level_EB: np.ndarray, groups: list[Group], row_height: int) -> np.ndarray:
    """Palette indices ``[Y, X]``: rows as high as they are drawn, groups apart."""
    gap = np.zeros((_GAP, level_EB.shape[1]), dtype=np.uint8)
    parts = [
        part for g in groups for part in (level_EB[list(g.experts)].repeat(row_height, 0), gap)
    ]
    return np.concatenate(parts[:-1] or [gap])


def _names(groups: list[Group], row_height: int) -> str:
    """Cells, and experts where a row is high enough, at the heights of their rows."""
    names: list[str] = []
    free_from = 0
    for g in groups:
        height = len(g.experts) * row_height
        middle = g.top + height // 2
        if middle - _LINE // 2 >= free_from or not names:
            free_from = middle + _LINE // 2
            names.append(
                f'<span style="top:{middle}px"><b>cell {g.cell}</b> {ratio_text(g.load)}</span>'
            )
    if row_height >= _LINE - 2:
        names += [
            f'<i style="top:{g.top + k * row_height + row_height // 2}px">{expert}</i>'
            for g in groups
            for k, expert in enumerate(g.experts)
        ]
    return "".join(names)


def _data_uri(pixels_YX: np.ndarray) -> str:
    encoded = base64.b64encode(_png(pixels_YX, load_palette())).decode("ascii")
    return f"data:image/png;base64,{encoded}"


def _png(pixels_YX: np.ndarray, palette: np.ndarray) -> bytes:
    """An indexed PNG in which index 0 is transparent. Rows equal to the row above cost nothing."""
    height, width = pixels_YX.shape
    same_Y = np.zeros(height, dtype=bool)
    same_Y[1:] = (pixels_YX[1:] == pixels_YX[:-1]).all(axis=1)
    # A filter byte leads each row: 0 stores it as it is, 2 its difference from the row above.
    filter_Y1 = np.where(same_Y, 2, 0).astype(np.uint8)[:, None]
    rows = np.concatenate([filter_Y1, np.where(same_Y[:, None], 0, pixels_YX)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (
            _png_chunk(b"IHDR", header),
            _png_chunk(b"PLTE", palette.tobytes()),
            _png_chunk(b"tRNS", b"\0"),
            _png_chunk(b"IDAT", zlib.compress(rows.astype(np.uint8).tobytes(), 9)),
            _png_chunk(b"IEND", b""),
        )
    )


def _png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
