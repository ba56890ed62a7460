"""Traces of loads: files and synthetic ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from load_traces import read_loads, write_loads, zipf_loads


def test_loads_come_back_from_their_file(tmp_path: Path) -> None:
    loads = zipf_loads((3, 2, 4, 8), rows=100, skew=1.2)
    assert (loads.sum(axis=-1) == 100).all()
    write_loads(tmp_path / "a" / "loads.npz", loads, [5, 10, 15])
    rows, steps = read_loads(tmp_path / "a" / "loads.npz")
    assert np.array_equal(rows, loads) and steps.tolist() == [5, 10, 15]
    np.savez(tmp_path / "other.npz", rows=loads)
    with pytest.raises(ValueError, match="needs rows_ILCE"):
        read_loads(tmp_path / "other.npz")


def test_skewed_loads_are_skewed_and_uniform_ones_are_not() -> None:
    rows_E = [
        zipf_loads((1, 1, 8, 16), rows=1000, skew=skew).sum(axis=(0, 1, 2)) for skew in (0.0, 2.0)
    ]
    assert rows_E[0].max() < 1.2 * rows_E[0].mean()
    assert rows_E[1].max() > 5 * rows_E[1].mean()
