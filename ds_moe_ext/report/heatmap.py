"""One number for every expert at every step: an indexed image, its names, and a colour scale.

An image holds one pixel a column, and as many pixels a row as it is drawn high; so it stretches
sideways only. As vector boxes a large run would pass 20 MB. Shape letters: B bins of steps, E
experts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from ds_moe_ext.report.charts import step_axis
from ds_moe_ext.report.colours import Ramp, load_level, load_ramp
from ds_moe_ext.report.raster import data_uri
from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.report.shelves import Shelves
from ds_moe_ext.report.summary import Bins
from ds_moe_ext.report.units import TIMES, counted


def heatmap(level_EB: np.ndarray, shelves: Shelves, ramp: Ramp, bins: Bins, *, what: str) -> str:
    """Palette indices of the experts of one layer over the steps. ``what`` they are, for people."""
    empty = shelves.num_empty
    note = f" {counted(empty, 'cell')} hold no expert of this layer." if empty else ""
    return (
        f'<figure class="heat" data-held="{shelves.held}" data-row="{shelves.row_height}" '
        f'data-ramp="{ramp.name}"><div class="axes">{shelves.names()}'
        f'<img class="ramp" src="{data_uri(shelves.stacked(level_EB), ramp.palette_P3)}" '
        f'style="height:{shelves.height}px" alt="{what}">'
        f"{step_axis(bins, max_labels=5)}</div>"
        '<figcaption class="note">Down: experts, grouped by home cell, with their rows over the '
        f"mean cell's. Across: recorded steps.{note}</figcaption></figure>"
    )


def scale(ramp: Ramp, title: str, ticks: Mapping[str, float]) -> str:
    """The legend of a ramp, for people and for the page's script.

    Args:
        ramp: the colours.
        title: what they stand for.
        ticks: where names stand below it, in percents.
    """
    colours = np.arange(1, len(ramp.palette_P3), dtype=np.uint8)[None, :]
    values = json.dumps([float(f"{value:.4g}") for value in ramp.value_P], separators=(",", ":"))
    names = "".join(f'<span style="left:{at:.4g}%">{name}</span>' for name, at in ticks.items())
    return (
        f'<div class="scale"><span>{title}</span><div><img class="ramp" id="{ramp.name}" '
        f'data-values="{values}" data-unit="{ramp.unit}" '
        f'src="{data_uri(colours, ramp.palette_P3)}" alt="colour scale">'
        f'<div class="steps">{names}</div></div></div>'
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


def load_heatmap(record: RunRecord, index: int, *, bins: Bins, octaves: int) -> str:
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


def load_scale(octaves: int) -> str:
    """The legend of loads."""
    ticks = {
        (f"{2**k}" if k >= 0 else f"1/{2**-k}") + TIMES: 100 * (k + octaves) / (2 * octaves)
        for k in range(-octaves, octaves + 1)
    }
    title = "rows of an expert over its layer's mean expert (log scale; the ends hold all beyond)"
    return scale(load_ramp(octaves), title, ticks)


def _ratio(rows_IE: np.ndarray, bins: Bins) -> np.ndarray:
    """Rows of each expert over the mean expert, float ``[B, E]``; 1 where no rows came at all."""
    rows_BE = bins.total(rows_IE).astype(np.float64)
    mean_B1 = rows_BE.mean(axis=1, keepdims=True)
    return np.where(mean_B1 > 0, rows_BE / np.maximum(mean_B1, 1e-12), 1.0)
