"""Loads: the window's prediction. Pure."""

from __future__ import annotations

import numpy as np
import pytest

from ds_moe_ext.load import LoadWindow, balance_L


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
