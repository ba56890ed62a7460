# SPDX-License-Identifier: Apache-2.0
"""The cost model: traffic by hand and against the shares, seconds by hand. Pure.

Shape letters: L layers, E experts, C cells, N nodes.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import NearestCopy
from ds_moe_ext.planning.prices import PARTS, Prices, nearest_copy_flow, step_seconds
from tests.planners.plainly import HOME, NODE_C, PROPERTY, ROWS_CE, small_models

PRICES = Prices(
    row_s=1e-3, row_bytes=100.0, copy_s=0.0, inter_bytes_per_s=1e4, intra_bytes_per_s=1e5
)


def test_seconds_by_hand() -> None:
    """Plain expert parallelism on the golden rows: 50 rows at the busiest cell; 30 enter node 0."""
    traffic = nearest_copy_flow([HOME], [ROWS_CE], NODE_C)
    assert traffic.computed_LC.tolist() == [[50, 10, 28, 12]]
    assert traffic.in_LN.tolist() == [[30, 20]]
    assert traffic.out_LN.tolist() == [[20, 30]]
    # Cell 0 keeps 10 + 3 of its 25 rows, and computes 50.
    assert traffic.sent_LC[0, 0] == 12
    assert traffic.received_LC[0, 0] == 37
    # 50 ms, and 4 trips of 30 rows of 100 bytes at 10 kB/s: 0.3 s each. (37 at 100 kB/s: 0.037 s.)
    seconds = step_seconds([HOME], [ROWS_CE], prices=PRICES, node_C=NODE_C)
    assert seconds.tolist() == pytest.approx([0.05 + 4 * 0.3])
    # On one node the cells' own links are the slowest.
    seconds = step_seconds([HOME], [ROWS_CE], prices=PRICES, node_C=np.zeros(4, dtype=np.int64))
    assert seconds.tolist() == pytest.approx([0.05 + 4 * 0.037])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("row_s", -1.0),
        ("row_bytes", float("nan")),
        ("copy_s", float("inf")),
        ("inter_bytes_per_s", 0.0),
        ("intra_bytes_per_s", -1.0),
    ],
)
def test_costs_that_no_cluster_has(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        Prices(**{**vars(PRICES), field: value})


@st.composite
def models(
    draw: st.DrawFn,
) -> tuple[tuple[Placement, ...], list[np.ndarray], np.ndarray]:
    """Targets with copies, rows of each layer, nodes."""
    homes, sizes, node_C, rng = draw(small_models())
    targets = tuple(home.with_copies(rng.random(home.holds_EC.shape) < 0.3) for home in homes)
    rows = [rng.integers(0, 500, (len(node_C), size)) for size in sizes]
    return targets, rows, node_C


@PROPERTY
@given(models())
def test_traffic_is_that_of_the_share(
    model: tuple[tuple[Placement, ...], list[np.ndarray], np.ndarray],
) -> None:
    """But for remainders: exactly what leaves, what comes within a row for each sender."""
    targets, rows, node_C = model
    traffic = nearest_copy_flow(targets, rows, node_C)
    nodes = np.unique(node_C)
    for layer, (target, rows_CE) in enumerate(zip(targets, rows)):
        share, cells = NearestCopy(target, node_C), range(len(node_C))
        moved_CEC = np.stack([share.rows_from(c, rows_CE[c][None])[0] for c in cells])
        moved_CC = moved_CEC.sum(axis=1)
        kept_C = moved_CC.diagonal()
        assert traffic.sent_LC[layer].tolist() == (moved_CC.sum(axis=1) - kept_C).tolist()
        slack = len(node_C) * target.num_experts
        assert np.allclose(traffic.computed_LC[layer], moved_CC.sum(axis=0), rtol=0, atol=slack)
        far_NN = np.array(
            [[moved_CC[node_C == a][:, node_C == b].sum() for b in nodes] for a in nodes]
        )
        np.fill_diagonal(far_NN, 0)
        assert traffic.out_LN[layer].tolist() == far_NN.sum(axis=1).tolist()
        assert np.allclose(traffic.in_LN[layer], far_NN.sum(axis=0), rtol=0, atol=slack)
        # What comes is what leaves, but for the rounding.
        lost = traffic.sent_LC[layer].sum() - traffic.received_LC[layer].sum()
        assert 0 <= lost <= 2 * target.holds_EC.sum() / PARTS
