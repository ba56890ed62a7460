"""What planners take as loads. Pure."""

from __future__ import annotations

import numpy as np
import pytest

from ds_moe_ext.planners.loads import check_loads, hottest_first, per_layer


def test_hottest_first_breaks_ties_by_index_and_pads() -> None:
    order_LE, rows_LE = hottest_first([np.array([3, 7, 3, 7]), np.array([0, 5])])
    assert order_LE[0].tolist() == [1, 3, 0, 2]
    assert order_LE[1, :2].tolist() == [1, 0]
    assert rows_LE.tolist() == [[7, 7, 3, 3], [5, 0, -1, -1]]


@pytest.mark.parametrize(
    ("load_E", "says"),
    [
        (np.array([1.0, 2.0, 3.0]), "float64, but planners count whole rows"),
        (np.array([True, False, True]), "are bool"),
        (np.array([1, -2, 3]), "go from -2 to 3"),
        (np.array([1, 2**62, 3]), f"from 0 to {(2**63 - 1) // 10}"),
        (np.array([1, 2]), "one load an expert"),
        (np.array([[1, 2, 3]]), "one load an expert"),
    ],
)
def test_loads_that_cannot_be_counted_with(load_E: np.ndarray, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_loads([np.array([1, 2, 3]), load_E], [3, 3], factor=10)


def test_one_number_for_all_layers_or_one_each() -> None:
    assert per_layer(2, 3).tolist() == [2, 2, 2]
    assert per_layer(np.array([0, 5]), 2).tolist() == [0, 5]
    with pytest.raises(ValueError, match="-1 experts cannot be copied"):
        per_layer(np.array([3, -1]), 2)
