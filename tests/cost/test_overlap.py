# SPDX-License-Identifier: Apache-2.0
"""Overlap degree, copies that fit, memory: the spec's golden tests. Pure."""

from __future__ import annotations

import pytest

from ds_moe_ext.planning.prices import copies_that_fit, overlap_degree


@pytest.mark.parametrize(
    ("window_s", "latency_s", "degree"),
    [
        (5e-3, 0.0, 13),  # H7: 13.245
        (5e-3, 94e-6, 12),  # 12.996: the latency takes the 13th
        (1.0, 0.0, 64),  # no more than there are
        (0.0, 0.0, 0),
        (50e-6, 94e-6, 0),
    ],
)
def test_h7_overlap_degree(window_s: float, latency_s: float, degree: int) -> None:
    found = overlap_degree(
        window_s,
        bytes_per_s=12.5e9,
        expert_bytes=4 * 768**2 * 2,
        num_experts=64,
        latency_s=latency_s,
    )
    assert found == degree


def test_copies_that_fit() -> None:
    # 100 bytes free, experts of 3 bytes, 4 layers: 100 / 12.
    assert copies_that_fit(100, expert_bytes=3, layers_held=4) == 8
    # With room for the gradients of one layer: 100 / 15.
    assert copies_that_fit(100, expert_bytes=3, layers_held=4, layers_reduced=1) == 6
    # Released after forward: one layer's copies and their gradients: 100 / 6.
    assert copies_that_fit(100, expert_bytes=3, layers_held=1, layers_reduced=1) == 16
    assert copies_that_fit(-5, expert_bytes=3, layers_held=1) == 0
