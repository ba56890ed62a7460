"""Tables of loads as benchmarks take them.

Shape letters: I steps, L layers, C senders, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ds_moe_ext.loads.count_tables import read_table
from ds_moe_ext.loads.loads import Loads
from ds_moe_ext.loads.sources import write_loads as write
from ds_moe_ext.loads.zipf import zipf_loads

__all__ = ["read_trace", "write_loads", "zipf_loads"]


def write_loads(path: Path, rows_ILCE: np.ndarray, steps_I: Iterable[int]) -> None:
    """Write rows and the numbers of their steps."""
    write(path, Loads(rows_ILCE, np.asarray(list(steps_I)), str(path)))


def read_trace(path: Path) -> list[np.ndarray]:
    """Rows ``[I, L, C, E]`` of each run of evenly spaced steps."""
    return read_table(path).runs()
