# SPDX-License-Identifier: Apache-2.0
"""Loads with Zipf shares, and those fitted to a real run."""

from __future__ import annotations

import numpy as np
import pytest

from ds_moe_ext.planning.load_files import read_loads
from ds_moe_ext.planning.load_models import zipf_loads
from ds_moe_ext.planning.loads import figures_of


@pytest.mark.parametrize("name", ["zipf:0", "zipf:1.2", "zipf:3,drift=0.3", "trained", "zipf:10"])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_tokens_choose_different_experts(name: str, top_k: int) -> None:
    loads = read_loads(name, ranks=4, experts=16, layers=2, tokens=50, top_k=top_k, steps=3)
    assert (loads.rows_ILCE.sum(axis=-1) == 50 * top_k).all()
    assert loads.rows_ILCE.max() <= 50  # which the record holds them to, too
    if name == "zipf:10":
        hottest_ILCE = np.sort(loads.rows_ILCE, axis=-1)[..., -top_k:]
        assert (hottest_ILCE[..., 1:] == 50).all() and (hottest_ILCE[..., 0] >= 25).all()


def test_trained_is_near_what_it_was_fitted_to() -> None:
    """A run of 16 ranks, 24 layers and 32 experts, two a token; docs/loads.md has its figures."""
    loads = read_loads("trained", ranks=16, experts=32, layers=24, tokens=8192, top_k=2, steps=24)
    figures = figures_of(loads)
    assert figures.by_rank_IL.mean() == pytest.approx(6.36, abs=0.15)
    assert figures.hottest_IL.mean() == pytest.approx(12.1, abs=0.3)
    assert figures.unused_IL.mean() == pytest.approx(0.25, abs=0.01)
    assert figures.moved_L.mean() == pytest.approx(0.0213, abs=0.001)
    rows_ILE = loads.rows_ILCE.sum(axis=2)
    far = np.abs(rows_ILE[-1] - rows_ILE[0]).sum(axis=1) / rows_ILE[0].sum(axis=1) / 2
    assert far.mean() == pytest.approx(0.0265, abs=0.004)


def test_drift_goes_on_and_jitter_comes_back() -> None:
    def moved(name: str, apart: int) -> float:
        rows_ILE = read_loads(name, steps=40).rows_ILCE.sum(axis=2)
        return float(np.abs(rows_ILE[apart:] - rows_ILE[:-apart]).mean())

    assert moved("zipf:1.2,drift=0.1", 20) > 2.5 * moved("zipf:1.2,drift=0.1", 1)
    assert moved("zipf:1.2,drift=0,jitter=0.1", 20) < 1.1 * moved("zipf:1.2,drift=0,jitter=0.1", 1)


def test_skewed_rows_are_skewed_and_uniform_ones_are_not() -> None:
    """Those of benchmarks, where rows choose each for itself."""
    rows_E = [
        zipf_loads((1, 1, 8, 16), rows=1000, skew=skew).sum(axis=(0, 1, 2)) for skew in (0.0, 2.0)
    ]
    assert rows_E[0].max() < 1.2 * rows_E[0].mean()
    assert rows_E[1].max() > 5 * rows_E[1].mean()
