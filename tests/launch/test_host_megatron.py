# SPDX-License-Identifier: Apache-2.0
"""With replicas Megatron's own layer makes its host wait for the device no more than without."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

from fake_world import Sizes
from host_megatron import WAYS, Job, measure

from tests.ranks import forkserver

STOCK = next(iter(WAYS))


def test_replicas_do_not_make_the_host_wait() -> None:
    sizes = Sizes(layers=2, experts=8, tokens=32, top_k=2)
    job = Job(4, sizes, (STOCK, "ep", "fssdp"), rounds=1, is_settled=True, micro_batches=2)
    with ProcessPoolExecutor(1, forkserver()) as process:
        stock, *ours = process.submit(measure, job).result()
    assert stock.counts is not None and stock.counts.waits > 0
    for one in ours:
        assert one.counts is not None, one.skipped
        assert one.counts.waits_in_passes == stock.counts.waits_in_passes, one.name
        # Once a step, for all layers, the loads are fetched.
        assert one.counts.waits == stock.counts.waits + 1 / sizes.layers, one.name
        assert one.counts.copies <= 4, one.name  # of a new plan's tables, and none in a pass
    assert ours[1].counts.collectives > ours[0].counts.collectives  # replicas travel
