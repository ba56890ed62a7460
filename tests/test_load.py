"""Loads: the window's prediction, files, synthetic loads. Pure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ds_moe_ext.load import LoadWindow, balance_L, read_loads, write_loads, zipf_loads


def test_window_forgets_the_oldest() -> None:
    window = LoadWindow(2)
    for rows in (100, 4, 8):
        window.push(np.full((1, 1, 2), rows))
    assert len(window) == 2
    # (4 + 8) / 2: the 100 is forgotten.
    assert window.predicted().tolist() == [[[6.0, 6.0]]]
    assert window.steps().tolist() == [[[[4, 4]]], [[[8, 8]]]]
    assert LoadWindow(2).steps().shape == (0, 0, 0, 0)


def test_window_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="give 1 or more"):
        LoadWindow(0)
    window = LoadWindow(3)
    with pytest.raises(ValueError, match="push a step"):
        window.predicted()
    window.push(np.ones((1, 2, 3)))
    with pytest.raises(ValueError, match="start a new window"):
        window.push(np.ones((1, 2, 4)))


def test_balance_worked_by_hand() -> None:
    # 6 and 2 rows: mean 4, busiest 1.5 times it. Nothing routed: 1.
    assert balance_L(np.array([[6, 2], [0, 0]])).tolist() == [1.5, 1.0]


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
