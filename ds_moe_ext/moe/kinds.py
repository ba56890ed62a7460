"""What kind of pass a rank is in: told with the counts of rows, so that ranks in passes that do not
belong together learn it at once, in place of waiting for each other in vain.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from ds_moe_ext.watch import REMEDY


class Kind(IntEnum):
    """Of a pass. Ranks may mix the last with any other: nobody knows what comes of it."""

    TRAINING = 0
    EVALUATION = 1
    OTHER = 2


def kind_of(layer: int, *, is_training: bool, is_graded: bool) -> int:
    """The layer that a rank runs, and in what kind of pass, as one number."""
    if is_training != is_graded:
        kind = Kind.OTHER
    else:
        kind = Kind.TRAINING if is_training else Kind.EVALUATION
    return layer * len(Kind) + kind


def check_kinds(told_C: np.ndarray) -> None:
    """Raises RuntimeError, on all ranks alike, where they are in passes that cannot be one.

    Args:
        told_C: by ``kind_of``, of every rank of the grid.
    """
    if (told_C == told_C[0]).all():
        return
    layers, kinds = set((told_C // len(Kind)).tolist()), set((told_C % len(Kind)).tolist())
    if len(layers) > 1 or {Kind.TRAINING, Kind.EVALUATION} <= kinds:
        told = (divmod(int(told), len(Kind)) for told in told_C)
        each = [
            f"place {place}: layer {layer}, {Kind(kind).name.lower()}"
            for place, (layer, kind) in enumerate(told)
        ]
        raise RuntimeError(
            "the ranks that share experts have come to an MoE layer in passes that do not belong "
            f"together ({'; '.join(each)}): {REMEDY}"
        )
