"""Rows by way of the nodes under a real DeepSpeed engine: trained as directly, and told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_moe_ext.hardware import Device, Flops, Hardware, Link
from ds_moe_ext.hosts import run as hosts_run
from ds_moe_ext.hosts.deepspeed.engine import run_of
from tests.hosts.copied_runs import check_equal, plain
from tests.hosts.jobs import Job, Result, engine_of, loss_of, micro_batch, train
from tests.ranks import pool_of

JOB = Job("mixtral", 0, dtype="float64", steps=3, clip=0.5)


def on_nodes(job: Job, ranks_per_node: int, folder: Path, **links: Link) -> Job:
    """The job on a described cluster of equal nodes."""
    hardware = Hardware(
        name="of a test",
        source="made up",
        num_nodes=4,
        ranks_per_node=ranks_per_node,
        device=Device(name="CPU", flops_per_s=Flops(fp32=1e9)),
        intra=Link(bytes_per_s=1e12, latency_s=1e-6),
        inter=Link(bytes_per_s=1e10, latency_s=1e-2),
    )
    path = folder / "hardware.json"
    path.write_text(hardware.to_json())
    return replace(job, hardware=str(path))


def esp(job: Job, **keys: Any) -> Job:
    given = {"degree": 2, "slice_gradients": False, **keys}
    return replace(job, strategy="esp", keys=tuple(given.items()))


@pytest.mark.parametrize("way", ["1dh", "2dh"])
def test_relayed_rows_train_alike(way: str, tmp_path: Path) -> None:
    job = on_nodes(esp(JOB, all_to_all=way), 2, tmp_path)
    ours: Result = pool_of(4).run(train, job)[0]
    check_equal(ours, plain(4, JOB), JOB)


def _told(rank: int, world_size: int, job: Job, steps: int) -> tuple[list[str], list[str]]:
    """What a person is told, and the way of each layer at the end."""
    lines: list[str] = []
    tell = hosts_run.teller
    hosts_run.teller = lambda *_: lines.append  # type: ignore[assignment]
    try:
        engine = engine_of(job, world_size)
    finally:
        hosts_run.teller = tell
    run = run_of(engine)
    assert run is not None
    run.planning.tell = lines.append
    for step in range(steps):
        engine.backward(loss_of(engine, micro_batch(step, rank)))
        engine.step()
    return lines, [layer.routed.site.plan.way.value for layer in run.layers]
