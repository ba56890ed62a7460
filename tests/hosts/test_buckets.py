# SPDX-License-Identifier: Apache-2.0
"""ZeRO's buckets smaller than a model, where ranks hold unequal numbers of a layer's experts, or
have gradients of them at unlike moments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_moe_ext.testing import relative_error
from tests.hosts.jobs import Job, train
from tests.hosts.jobs import zero as zero_of
from tests.hosts.varied import IN_SLOTS, VARIED
from tests.marks import slow
from tests.ranks import pool_of


@pytest.mark.parametrize(
    "stage, overlap", [(1, False), slow(1, True), slow(2, False), slow(2, True)]
)
def test_ranks_reduce_in_step(stage: int, overlap: bool) -> None:
    """Each rank has other experts in each step: owners are shuffled after every one."""
    zero = {"stage": stage, "reduce_bucket_size": 6000, "overlap_comm": overlap}
    plain = Job(steps=4, stage=stage, extra=(("zero_optimization", zero),))
    keys = (("replicas", 0.3), ("shard_every", 1))
    moving = Job(**{**vars(plain), "strategy": VARIED, "keys": keys})
    (expected, _), (got, _) = (pool_of(2).run(train, job) for job in (plain, moving))
    assert got.losses == pytest.approx(expected.losses, abs=1e-6)
    assert got.norms == pytest.approx(expected.norms, rel=1e-5)
    for name, tensor in expected.state.items():
        assert relative_error(got.state[name], tensor) <= 1e-4


@pytest.mark.parametrize(
    "stage, overlap", [slow(1, True), slow(2, True), slow(2, False), slow(3, True)]
)
def test_grids_reduce_in_step(stage: int, overlap: bool) -> None:
    """Each of two grids replicas by plans of its own; their gradients are summed."""
    zero = {**zero_of(stage), "reduce_bucket_size": 6000, "overlap_comm": overlap}
    plain = Job(steps=4, stage=stage, ep_ranks=2, extra=(("zero_optimization", zero),))
    copying = replace(plain, strategy=IN_SLOTS, keys=(("replicas", 0.5),))
    (expected, *_), (got, *_) = (pool_of(4).run(train, job) for job in (plain, copying))
    assert got.losses == pytest.approx(expected.losses, abs=1e-6)
    assert got.norms == pytest.approx(expected.norms, rel=1e-5)
