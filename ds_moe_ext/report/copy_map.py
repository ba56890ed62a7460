# SPDX-License-Identifier: Apache-2.0
"""Where the copies of experts were: over the steps, and on a map of the last one.

Shape letters: I recorded steps, B bins of them, L layers, E experts, C cells, Y and X pixels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from ds_moe_ext.report.charts import axis_labels
from ds_moe_ext.report.colours import (
    ADDED_INK,
    ADDED_PAPER,
    COPY_INK,
    COPY_PAPER,
    HOME,
    NOT_HELD,
    Ramp,
    copies_level,
    copies_ramp,
    map_palette,
)
from ds_moe_ext.report.heatmap import Shelves, heatmap, scale
from ds_moe_ext.report.markup import Html, joined
from ds_moe_ext.report.raster import data_uri
from ds_moe_ext.report.record import PlacementRecord, RunRecord
from ds_moe_ext.report.summary import Bins

_WIDE, _WIDEST_BOX = 560, 18  # pixels of a map, where they suffice, and of a box on it
_MARGIN_FROM = 6  # pixels a box must be high and wide to stand apart from its neighbours
_HATCH = 4  # pixels from line to line
_MOST_LABELS = 16
_HATCHED = {COPY_INK: (COPY_PAPER, 1), ADDED_INK: (ADDED_PAPER, -1)}  # colour between lines; slope


def ramp_of(placements: PlacementRecord) -> Ramp:
    """The colours of copies in a run: one ramp for all layers."""
    most = int(placements.all_copies_ILE.max(initial=0))
    return copies_ramp(max(most, 1))


def copies_scale(ramp: Ramp) -> Html:
    """The legend of numbers of copies."""
    most = round(float(ramp.value_P[-1]))
    step = -(-most // 8)
    ticks = {f"{number}": 100 * number / most for number in range(0, most + 1, step)}
    return scale(ramp, "copies of an expert beside its home", ticks)


def copies_of_layer(
    record: RunRecord, placements: PlacementRecord, index: int, *, ramp: Ramp, bins: Bins
) -> Html:
    """Copies over the steps, and at their side the map of the last one."""
    return Html('<h4>Copies</h4>{}<div class="beside">{}{}</div>').format(
        map_legend(has_added=placements.added is not None),
        copies_heatmap(record, placements, index, ramp=ramp, bins=bins),
        copies_map(record, placements, index),
    )


def copies_heatmap(
    record: RunRecord, placements: PlacementRecord, index: int, *, ramp: Ramp, bins: Bins
) -> Html:
    """The number of copies of each expert of one layer over the steps."""
    num_experts = record.layers[index].num_experts
    copies_BE = bins.mean(placements.all_copies_ILE[:, index, :num_experts])
    return heatmap(
        copies_level(copies_BE, ramp).T,
        Shelves.of(record, index),
        ramp,
        bins,
        what=f"copies of {num_experts} experts over the steps",
    )


def copies_map(record: RunRecord, placements: PlacementRecord, index: int) -> Html:
    """Experts by cells of one layer at the last step: homes filled, copies hatched; those that were
    made after the gate the other way round."""
    shelves, added = Shelves.of(record, index), placements.added
    added_to = () if added is None else added.to[index]
    num_cells, copied_to = record.num_cells, placements.copied_to[index]
    width = int(np.clip(_WIDE // num_cells, 3, _WIDEST_BOX))
    held_EC = np.full((len(copied_to), num_cells), NOT_HELD, dtype=np.uint8)
    held_EC[np.arange(len(copied_to)), record.layers[index].home_E] = HOME
    for expert, cells in enumerate(copied_to):
        held_EC[expert, list(cells)] = COPY_INK
    for expert, late in enumerate(added_to):
        held_EC[expert, [cell for cell, _ in late]] = ADDED_INK
    pixels_YX = _boxed(shelves.stacked(held_EC), shelves, width)
    step = -(-num_cells // _MOST_LABELS)
    named = range(0, num_cells, step)
    labels = axis_labels(
        [f"{cell}" for cell in named], [100 * (cell + 0.5) / num_cells for cell in named]
    )
    return Html(
        '<figure class="map" data-held="{held}" data-row="{row_height}" data-copied="{copied}" '
        'data-added="{added}" data-passes="{num_passes}" data-cells="{num_cells}">'
        '<div class="axes">{names}<div class="wide"><img class="ramp" src="{image}" '
        'width="{width}" height="{height}" alt="homes and copies of {num_experts} experts">'
        '<div style="width:{width}px">{labels}</div></div></div>'
        '<figcaption class="note">Across: EP ranks.</figcaption></figure>'
    ).format(
        held=shelves.held,
        row_height=shelves.row_height,
        copied=_json(copied_to),
        added=_json(added_to),
        num_passes=1 if added is None else added.num_passes,
        num_cells=num_cells,
        names=shelves.names(),
        image=data_uri(pixels_YX, map_palette()),
        width=width * num_cells,
        height=shelves.height,
        num_experts=len(copied_to),
        labels=labels,
    )


def _json(table: Sequence[object]) -> str:
    return json.dumps(table, separators=(",", ":"))


def told_of_added(placements: PlacementRecord) -> str:
    """What is counted as a copy, where some were made after the gate."""
    if placements.added is None:
        return ""
    return " Copies made after the gate are counted where any pass of the step had them."


def map_legend(*, has_added: bool) -> Html:
    """What the boxes of a map mean."""
    kinds = {"home": HOME, "copy": COPY_INK}
    if has_added:
        kinds = {"home": HOME, "planned copy": COPY_INK, "copy made after the gate": ADDED_INK}
    size = 14
    boxes = {
        name: data_uri(_box(np.full((size, size), kind, dtype=np.uint8)), map_palette())
        for name, kind in kinds.items()
    }
    items = joined(
        Html('<span><img class="ramp key" src="{}" alt="">{}</span>').format(uri, name)
        for name, uri in boxes.items()
    )
    return Html('<p class="legend">{}</p>').format(items)


def _boxed(kind_YC: np.ndarray, shelves: Shelves, width: int) -> np.ndarray:
    """Boxes ``width`` pixels wide in place of one pixel a cell."""
    pixels_YX = kind_YC.repeat(width, axis=1)
    high = shelves.row_height
    if high < _MARGIN_FROM or width < _MARGIN_FROM:
        return pixels_YX
    for shelf in shelves.of_cells:
        for top in range(shelf.top, shelf.top + len(shelf.experts) * high, high):
            for left in range(0, pixels_YX.shape[1], width):
                box = pixels_YX[top : top + high - 1, left : left + width - 1]
                box[:] = _box(box)
            pixels_YX[top + high - 1] = 0
    pixels_YX[:, width - 1 :: width] = 0
    return pixels_YX


def _box(kind_YX: np.ndarray) -> np.ndarray:
    """A box of one kind: a copy is hatched inside its outline."""
    ink = int(kind_YX[0, 0])
    if ink not in _HATCHED:
        return kind_YX
    paper, slope = _HATCHED[ink]
    drawn_YX = np.full_like(kind_YX, ink)
    y, x = np.indices(kind_YX.shape)
    is_paper = (y + slope * x) % _HATCH != 0
    drawn_YX[1:-1, 1:-1] = np.where(is_paper, paper, ink)[1:-1, 1:-1]
    return drawn_YX
