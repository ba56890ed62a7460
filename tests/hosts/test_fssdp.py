"""Copies and homes that change from step to step change nothing that is learned: float64, Adam."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_moe_ext.hardware import Device, Hardware, Link
from tests.hosts.copied_runs import (
    check_equal,
    fssdp,
    num_copied,
    num_moved,
    plain,
    run,
    varied,
)
from tests.hosts.jobs import Job
from tests.marks import slow


def job_of(world_size: int, steps: int = 20) -> Job:
    """On two ranks each accumulates two micro-batches."""
    return Job("toy", 0, dtype="float64", steps=steps, clip=0.5, micro_batches=max(4, world_size))


def on_nodes(job: Job, ranks_per_node: int, folder: Path) -> Job:
    """The job on a described cluster with so many ranks on a node."""
    hardware = Hardware(
        name="of a test",
        source="made up",
        num_nodes=4,
        ranks_per_node=ranks_per_node,
        device=Device(name="CPU"),
        intra=Link(bytes_per_s=1e9),
        inter=Link(bytes_per_s=1e8),
    )
    path = folder / "hardware.json"
    path.write_text(hardware.to_json())
    return replace(job, hardware=str(path))


GRIDS = [
    (2, 1),
    (4, 2),
    *(slow(*grid) for grid in ((2, 2), (4, 1), (4, 4), (8, 1), (8, 2), (8, 4))),
]


@pytest.mark.parametrize(("world_size", "num_nodes"), GRIDS)
def test_any_plans_equal_expert_parallelism(
    world_size: int, num_nodes: int, tmp_path: Path
) -> None:
    """Copies, their calibration, rematerialization and homes are drawn anew, by layer and step."""
    job = job_of(world_size)
    ours, steps = run(
        world_size,
        varied(
            on_nodes(job, world_size // num_nodes, tmp_path),
            revised=0.3,
            rematerialized=0.3,
            carried=0.5,
            shard_every=6,
            seed=num_nodes,
        ),
    )
    check_equal(ours, plain(1 if world_size == 8 else world_size, job), job)
    plans = [plan for step in steps for plan in step.plans]
    assert len(set(num_copied(steps))) > 5
    assert num_moved(steps) > 10
    assert {plan.rematerialize for plan in plans} == {True, False}
    assert {plan.revise is None for plan in plans} == {True, False}
    assert {plan.has_copies for plan in plans} == {True, False}
    node_C = steps[0].plans[0].share.node_C
    assert len(set(node_C.tolist())) == num_nodes


KEYS: dict[str, dict[str, Any]] = {
    "some copies": {"overlap_degree": 3, "copies_per_rank": 2, "reshard_interval": 3},
    "all everywhere": {"overlap_degree": 8, "copies_per_rank": 8, "reshard_interval": 0},
    "rematerialized": {"overlap_degree": 2, "copies_per_rank": 2, "rematerialize": True},
    "calibrated": {
        "overlap_degree": 2,
        "copies_per_rank": 1,
        "calibrate": True,
        "reshard_interval": 4,
    },
    "all at once": {
        "overlap_degree": 4,
        "copies_per_rank": 3,
        "calibrate": True,
        "rematerialize": True,
        "reshard_interval": 5,
        "window": 2,
    },
    "even homes": {
        "overlap_degree": 4,
        "copies_per_rank": 2,
        "heterogeneous_sharding": False,
        "reshard_interval": 2,
    },
}


ON_FOUR = {"some copies", "calibrated", "all at once"}
CASES = [(4 if name in ON_FOUR else 2, name) for name in KEYS] + [
    slow(2 if name in ON_FOUR else 4, name) for name in KEYS
]


@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_keys_equal_expert_parallelism(world_size: int, name: str) -> None:
    job = job_of(world_size, steps=12)
    ours, steps = run(world_size, fssdp(job, **KEYS[name]))
    check_equal(ours, plain(world_size, job), job)
    assert any(num_copied(steps))
    moves = KEYS[name].get("reshard_interval", 100) in range(1, 12) and name != "even homes"
    assert (num_moved(steps) > 0) == moves


def test_new_homes_change_nothing() -> None:
    """Adam's states go with an expert; its gradient is the same wherever it lives."""
    job = job_of(4, steps=12)
    results = {}
    for interval in (0, 5, 100):
        keys = {"overlap_degree": 2, "copies_per_rank": 2, "reshard_interval": interval}
        results[interval], steps = run(4, fssdp(job, **keys))
        assert (num_moved(steps) > 0) == (interval == 5)
        check_equal(results[interval], results[0], job, tolerance=1e-13)
