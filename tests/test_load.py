# SPDX-License-Identifier: Apache-2.0
"""Loads: the window's prediction, and what planners take. Pure."""

from __future__ import annotations

import numpy as np
import pytest

from ds_moe_ext.planning.loads import (
    LoadWindow,
    Outcome,
    balance_L,
    check_loads,
    has_moved,
    hottest_first,
    per_layer,
)


def test_window_forgets_the_oldest() -> None:
    window = LoadWindow(2)
    for rows in (100, 4, 8):
        window.push(np.full((1, 1, 2), rows))
    assert len(window) == 2
    # (4 + 8) / 2: the 100 is forgotten.
    assert [rows_CE.tolist() for rows_CE in window.predicted()] == [[[6, 6]]]
    assert window.steps().tolist() == [[[[4, 4]]], [[[8, 8]]]]
    assert LoadWindow(2).steps().shape == (0, 0, 0, 0)


def test_prediction_rounds_to_whole_rows_halves_to_the_even() -> None:
    window = LoadWindow(4)
    for rows in (0, 2, 3, 5):
        window.push([np.array([[rows, rows - 1, 0]]), np.array([[2**52 + rows]])])
    # Means 2.5, 1.5 and 0; of the larger ones 2**52 + 2.5. The second layer has fewer experts.
    assert [rows_CE.tolist() for rows_CE in window.predicted()] == [[[2, 2, 0]], [[2**52 + 2]]]
    assert window.steps()[:, 1].tolist() == [[[2**52 + rows, 0, 0]] for rows in (0, 2, 3, 5)]


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


def test_hottest_first_breaks_ties_by_index_and_pads() -> None:
    order_LE, rows_LE = hottest_first([np.array([3, 7, 3, 7]), np.array([0, 5])])
    assert order_LE[0].tolist() == [1, 3, 0, 2]
    assert order_LE[1, :2].tolist() == [1, 0]
    assert rows_LE.tolist() == [[7, 7, 3, 3], [5, 0, -1, -1]]


@pytest.mark.parametrize(
    ("load_E", "expected"),
    [
        (np.array([1.0, 2.0, 3.0]), "float64, but planners count whole rows"),
        (np.array([True, False, True]), "are bool"),
        (np.array([1, -2, 3]), "go from -2 to 3"),
        (np.array([1, 2**62, 3]), f"from 0 to {(2**63 - 1) // 10}"),
        (np.array([1, 2]), "one load an expert"),
        (np.array([[1, 2, 3]]), "one load an expert"),
    ],
)
def test_loads_that_cannot_be_counted_with(load_E: np.ndarray, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        check_loads([np.array([1, 2, 3]), load_E], [3, 3], factor=10)


def test_one_number_for_all_layers_or_one_each() -> None:
    assert per_layer(2, 3).tolist() == [2, 2, 2]
    assert per_layer(np.array([0, 5]), 2).tolist() == [0, 5]
    with pytest.raises(ValueError, match="-1 experts cannot be copied"):
        per_layer(np.array([3, -1]), 2)


def window_of(steps: list[list[int]], num_steps: int | None = None) -> LoadWindow:
    window = LoadWindow(num_steps)
    for rows in steps:
        window.push([np.array([rows, rows])])  # of two senders
    return window


MOVING = [[10 * step, 100 - 10 * step] for step in range(8)]
NOISY = [[50 + 8 * (-1) ** step, 50 - 8 * (-1) ** step] for step in range(8)]


def test_a_window_that_chooses_takes_the_better_of_two_forecasts() -> None:
    assert window_of(MOVING).predicted()[0].tolist() == [MOVING[-1]] * 2
    # Of five steps three have 58 rows less 8: (42 * 3 + 58 * 2) / 5 = 48.4.
    assert window_of(NOISY).predicted()[0].tolist() == [[48, 52]] * 2
    for steps in (MOVING, NOISY):
        means = window_of(steps, 5).predicted()[0].tolist()
        assert means == [np.rint(np.mean(steps[-5:], axis=0)).tolist()] * 2


def test_what_a_window_chooses_depends_on_what_it_remembers_alone() -> None:
    """As after a checkpoint: a new window that is given what the old one remembered."""
    rng = np.random.default_rng(0)
    window, chosen = LoadWindow(None), set()
    drift_E = np.zeros(6)
    for step in range(60):
        drift_E += 9 * rng.standard_normal(6)
        rows = [rng.poisson(40 + np.abs(drift_E), (3, 6)), rng.poisson(20, (3, 4))]
        window = window.after(rows)
        again = LoadWindow(None)
        for rows_LCE in window.steps():
            again.push([rows_LCE[0], rows_LCE[1, :, :4]])
        for a, b in zip(window.predicted(), again.predicted(), strict=True):
            assert a.tolist() == b.tolist()
        chosen.add(window.predicted()[0].tolist() == rows[0].tolist())
        assert len(window) == min(step + 1, 5)
    assert chosen == {True, False}


def test_how_a_forecast_came_out() -> None:
    window = LoadWindow(None)
    assert window.outcome is None
    window.push([np.array([[8, 2]])])
    assert window.outcome is None
    window.push([np.array([[5, 5]])])
    assert window.outcome == Outcome(num_steps=1, astray=3, rows=10)
    window.push([np.array([[3, 7]])])  # of the mean, 6.5 and 3.5, which both forecasts were
    assert window.outcome == Outcome(num_steps=2, astray=3, rows=10)
    window.push([np.array([[1, 9]])])  # the last step stated 3, the mean of the two before 6.5
    assert window.outcome == Outcome(num_steps=1, astray=2, rows=10)
    assert window_of(NOISY, 2).outcome == Outcome(num_steps=2, astray=16, rows=200)


def test_drift_is_of_the_last_two_steps() -> None:
    window = LoadWindow(5)
    assert window.drift == 1.0
    window.push([np.array([[3, 1], [0, 0]])])
    assert window.drift == 1.0
    window.push([np.array([[1, 3], [4, 0]])])  # of eight rows two more went to the second expert
    assert window.drift == (abs(5 - 3) + abs(3 - 1)) / 16
    window.push([np.array([[5, 3], [0, 0]])])
    assert window.drift == 0.0


def test_loads_have_moved() -> None:
    """By more than the last two steps differ, or by three rows of a hundred at least."""

    def steps(*first: int) -> list[np.ndarray]:
        return [np.array([each, 1000 - each]) for each in first]

    assert not has_moved(*steps(500, 500, 500))
    assert not has_moved(*steps(500, 480, 501))
    assert has_moved(*steps(500, 510, 521))  # 21 rows since then, and 11 in the last step
    assert not has_moved(*steps(500, 560, 529))
    assert has_moved(*steps(500, 560, 530))

    window = LoadWindow(2)
    since_E, *others = steps(500, 510, 521)
    for rows_E in others:  # the first time it knows too little
        window.push([rows_E[None]])
        assert window.has_moved(since_E)
    window.push([others[-1][None]])
    assert window.newest_Y.tolist() == others[-1].tolist()
    assert not window.has_moved(window.newest_Y)
