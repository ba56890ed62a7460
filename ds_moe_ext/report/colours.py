# SPDX-License-Identifier: Apache-2.0
"""Colours of the page: one for each kind of task, and ramps for loads and for copies.

Under protanopia and deuteranopia the kinds of one lane, which touch, stay apart best. The ramp of
loads goes from blue over a neutral to red and darkens evenly to both ends, that of copies from the
same neutral to green; in a dark scheme the page inverts their lightness and keeps their hues.
Shape letters: P colours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ds_moe_ext.report.markup import Html, joined
from ds_moe_ext.report.raster import blend
from ds_moe_ext.report.units import TIMES

# Kind of task -> (fill, ink on it).
_KINDS = {
    "gate": ("#2fb573", "#111"),
    "order": ("#a5dbd6", "#111"),
    "dispatch": ("#e8a61c", "#111"),
    "expert": ("#2a62b5", "#fff"),
    "combine": ("#b03a2e", "#fff"),
    "restore": ("#c6a6ee", "#111"),
    "gather": ("#f2e660", "#111"),
    "reduction": ("#d655b5", "#111"),
    "join": ("#d3d3cb", "#111"),
    "plan": ("#7b6bf2", "#111"),
    "cell_gather": ("#dae198", "#111"),
    "attention": ("#3b7f86", "#fff"),
    "gradients": ("#7a4a99", "#fff"),
    "cell_scatter": ("#4340e2", "#fff"),
}
_OTHER = ("#a8a8a3", "#111")
_OF_THE_MEAN = f"{TIMES} the mean expert"

# Lines that share a chart; (light scheme, dark scheme).
LINES = (
    ("#2a62b5", "#6ea2ea"),
    ("#d9541e", "#f0814f"),
    ("#1a8f63", "#3cc590"),
    ("#a64ca6", "#d68ad6"),
    ("#b07d00", "#e0b13c"),
    ("#4d5766", "#aab4c2"),
)

_NEUTRAL = (242, 242, 239)
_COLD = (_NEUTRAL, (158, 198, 230), (62, 130, 195), (9, 46, 104))
_HOT = (_NEUTRAL, (247, 184, 141), (209, 78, 52), (98, 4, 30))
_COPIED = (_NEUTRAL, (171, 217, 176), (44, 141, 105), (4, 61, 53))
_GAP = (0, 0, 0)  # is transparent
_LEVELS_A_SIDE = 20
_FEWEST_LEVELS, _MOST_LEVELS = 20, 250  # of numbers of copies
NEUTRAL = _LEVELS_A_SIDE + 1
NUM_LEVELS = 2 * _LEVELS_A_SIDE + 1


@dataclass(frozen=True, eq=False)
class Ramp:
    """The colours of a heatmap.

    Attributes:
        name: of its legend in the page.
        palette_P3: RGB, uint8; index 0 is the gap.
        value_P: what the colours after the first stand for.
        unit: said after a value.
    """

    name: str
    palette_P3: np.ndarray
    value_P: np.ndarray
    unit: str


def classes_of(kinds: Iterable[str]) -> dict[str, str]:
    """A CSS class for each kind of task; unknown kinds get the free colours, then grey."""
    kinds = set(kinds)
    free = [slot for slot, name in enumerate(_KINDS) if name not in kinds]
    unknown = sorted(kinds - _KINDS.keys())
    slots = {name: slot for slot, name in enumerate(_KINDS) if name in kinds}
    slots |= dict(zip(unknown, free))
    grey = len(_KINDS)
    ordered = sorted(kinds, key=lambda kind: (slots.get(kind, grey), kind))
    return {kind: f"k{slots.get(kind, grey)}" for kind in ordered}


def style_rules() -> Html:
    """CSS for the classes ``k0`` … of kinds and ``s0`` … of lines."""
    kind = Html(".k{slot}{{fill:{fill};background:{fill}}}.plot .t{slot}{{fill:{ink}}}")
    kinds = joined(
        kind.format(slot=slot, fill=fill, ink=ink)
        for slot, (fill, ink) in enumerate((*_KINDS.values(), _OTHER))
    )
    rule = Html(".s{}{{--line:{}}}")
    light = joined(rule.format(slot, line) for slot, (line, _) in enumerate(LINES))
    dark = joined(rule.format(slot, line) for slot, (_, line) in enumerate(LINES))
    return Html("{}{}@media screen and (prefers-color-scheme:dark){{{}}}").format(
        kinds, light, dark
    )


def file_rules() -> Html:
    """CSS of a drawing that is a file of its own, in the light scheme; some that draw know no
    variables."""
    kind = Html(".k{slot}{{fill:{fill}}}.t{slot}{{fill:{ink}}}")
    kinds = joined(
        kind.format(slot=slot, fill=fill, ink=ink)
        for slot, (fill, ink) in enumerate((*_KINDS.values(), _OTHER))
    )
    rule = Html("rect.s{i}{{fill:{line}}}.s{i} .line{{stroke:{line}}}.s{i} .band{{fill:{line}}}")
    lines = joined(rule.format(i=i, line=line) for i, (line, _) in enumerate(LINES))
    return _FILE_RULES + kinds + lines


_FILE_RULES = Html(
    "text{font:12px system-ui,sans-serif;fill:#1b1b19}.sheet{fill:#fff}.soft{fill:#5d5d58}"
    "line{stroke:#ecece7}line.floor{stroke:#b9b9b1}line.mark{stroke:#5d5d58;stroke-dasharray:2 3}"
    ".line{fill:none;stroke-width:2;stroke-linejoin:round;vector-effect:non-scaling-stroke}"
    ".band{opacity:.16}.kh,.pass-box{fill:#efefea;stroke:#e3e3dd}.task{stroke:#fff}"
)


def load_ramp(octaves: int) -> Ramp:
    """Loads over the mean; a log scale, ``2**-octaves`` to ``2**octaves``."""
    at = np.linspace(0, 1, _LEVELS_A_SIDE + 1)
    cold, hot = (blend(knots, at) for knots in (_COLD, _HOT))
    value_P = 2.0 ** (octaves * np.linspace(-1, 1, NUM_LEVELS))
    return Ramp("loads", _palette(np.concatenate([cold[:0:-1], hot])), value_P, _OF_THE_MEAN)


def load_level(ratio: np.ndarray, *, octaves: int) -> np.ndarray:
    """Palette index of loads over the mean."""
    octave = np.log2(np.clip(ratio, 2.0**-octaves, 2.0**octaves)) / octaves
    return (NEUTRAL + np.rint(octave * _LEVELS_A_SIDE)).astype(np.uint8)


def copies_ramp(most: int) -> Ramp:
    """Numbers of copies, from none to ``most``; whole ones have a level of their own."""
    num_levels = min(most * -(-_FEWEST_LEVELS // most), _MOST_LEVELS)
    at = np.linspace(0, 1, num_levels + 1)
    return Ramp("copies", _palette(blend(_COPIED, at)), most * at, " copies")


def copies_level(copies: np.ndarray, ramp: Ramp) -> np.ndarray:
    """Palette index of numbers of copies."""
    num_levels = len(ramp.value_P) - 1
    return (1 + np.rint(copies / ramp.value_P[-1] * num_levels)).astype(np.uint8)


NOT_HELD, HOME, COPY_PAPER, COPY_INK, ADDED_PAPER, ADDED_INK = 1, 2, 3, 4, 5, 6


def map_palette() -> np.ndarray:
    """Who holds an expert: nobody, its home, and the two colours of a hatched copy, planned or
    made after the gate."""
    return _palette(np.array([_NEUTRAL, _COLD[2], *_COPIED[1:3], *_HOT[1:3]]))


def _palette(colours_P3: np.ndarray) -> np.ndarray:
    palette_P3: np.ndarray = np.concatenate([[_GAP], colours_P3]).round().astype(np.uint8)
    return palette_P3
