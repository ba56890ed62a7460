"""Colours of the page: one for each kind of task, and a diverging ramp for loads.

Under protanopia and deuteranopia the kinds of one lane, which touch, stay apart best. The ramp goes
from blue over a neutral to red and darkens evenly to both ends; in a dark scheme the page inverts
its lightness and keeps its hues.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

# Kind of task -> (fill, ink on it).
_KINDS = {
    "gate": ("#2fb573", "#111"),
    "order": ("#a5dbd6", "#111"),
    "dispatch": ("#e8a61c", "#111"),
    "expert": ("#2a62b5", "#fff"),
    "combine": ("#b03a2e", "#fff"),
    "restore": ("#c6a6ee", "#111"),
    "materialize": ("#d655b5", "#111"),
    "gather": ("#f2e660", "#111"),
    "scatter": ("#a98f3a", "#111"),
    "attention": ("#3b7f86", "#fff"),
    "slice": ("#7a4a99", "#fff"),
}
_OTHER = ("#a8a8a3", "#111")

# Lines that share a chart; (light scheme, dark scheme).
LINES = (
    ("#2a62b5", "#6ea2ea"),
    ("#d9541e", "#f0814f"),
    ("#1a8f63", "#3cc590"),
    ("#a64ca6", "#d68ad6"),
    ("#b07d00", "#e0b13c"),
    ("#4d5766", "#aab4c2"),
)

_COLD = ((242, 242, 239), (158, 198, 230), (62, 130, 195), (9, 46, 104))
_HOT = ((242, 242, 239), (247, 184, 141), (209, 78, 52), (98, 4, 30))
_LEVELS_A_SIDE = 20
NEUTRAL = _LEVELS_A_SIDE + 1
NUM_LEVELS = 2 * _LEVELS_A_SIDE + 1


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


def style_rules() -> str:
    """CSS for the classes ``k0`` … of kinds and ``s0`` … of lines."""
    kinds = "".join(
        f".k{slot}{{fill:{fill};background:{fill}}}.plot .t{slot}{{fill:{ink}}}"
        for slot, (fill, ink) in enumerate((*_KINDS.values(), _OTHER))
    )
    light = "".join(f".s{i}{{--line:{line}}}" for i, (line, _) in enumerate(LINES))
    dark = "".join(f".s{i}{{--line:{line}}}" for i, (_, line) in enumerate(LINES))
    return f"{kinds}{light}@media screen and (prefers-color-scheme:dark){{{dark}}}"


def load_palette() -> np.ndarray:
    """RGB of the gap (index 0, drawn transparent) and of the levels, uint8 ``[42, 3]``."""
    at = np.linspace(0, 1, _LEVELS_A_SIDE + 1)
    knots = np.linspace(0, 1, len(_HOT))
    cold, hot = (
        np.stack([np.interp(at, knots, channel) for channel in zip(*stops)], axis=1)
        for stops in (_COLD, _HOT)
    )
    ramp = np.concatenate([np.zeros((1, 3)), cold[:0:-1], hot])
    return ramp.round().astype(np.uint8)


def load_level(ratio: np.ndarray, *, octaves: int) -> np.ndarray:
    """Palette index of loads over the mean; a log scale, ``2**-octaves`` to ``2**octaves``."""
    octave = np.log2(np.clip(ratio, 2.0**-octaves, 2.0**octaves)) / octaves
    return (NEUTRAL + np.rint(octave * _LEVELS_A_SIDE)).astype(np.uint8)
