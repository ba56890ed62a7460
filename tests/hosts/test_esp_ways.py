# SPDX-License-Identifier: Apache-2.0
"""Rows by way of the nodes under a real DeepSpeed engine: trained as directly, and reported."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ds_moe_ext.core.hardware import Device, Flops, Hardware, Link
from ds_moe_ext.hosts.steps import host, training_run
from tests.hosts.copied_runs import check_equal, plain
from tests.hosts.jobs import Job, Result, engine_of, loss_of, micro_batch, train
from tests.marks import slow
from tests.ranks import pool_of

JOB = Job("mixtral", 0, dtype="float64", steps=3, clip=0.5)
CURVE = Job("mixtral", 1, steps=6)


def on_nodes(job: Job, ranks_per_node: int, folder: Path) -> Job:
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


@pytest.mark.slow  # test_relay.py has each way of a layer, and the fastest is chosen below
@pytest.mark.parametrize("way", ["1dh", "2dh"])
def test_relayed_rows_train_alike(way: str, tmp_path: Path) -> None:
    job = on_nodes(esp(JOB, all_to_all=way), 2, tmp_path)
    ours: Result = pool_of(4).run(train, job)[0]
    check_equal(ours, plain(4, JOB), JOB)


def _reported(
    rank: int, world_size: int, job: Job, ranks_per_host: int
) -> tuple[list[str], list[str]]:
    """What a person is notified, and the way of each layer once costs are known."""
    lines: list[str] = []
    with (
        mock.patch.object(host, "line_logger", lambda *_: lines.append),
        mock.patch.object(socket, "gethostname", lambda: f"host{rank // ranks_per_host}"),
    ):
        given = engine_of(job, world_size)
    for step in range(job.steps):
        given.backward(loss_of(given, micro_batch(step, rank)))
        given.step()
    ways = [
        layer.routed.layer_context.plan.way.value for layer in training_run.run_of(given).layers
    ]
    return lines, ways


@pytest.mark.parametrize(("name", "ranks_per_host"), [("1dh", 4), slow("2dh", 1), slow("2dh", 3)])
def test_flat_nodes_are_reported(name: str, ranks_per_host: int) -> None:
    why = {
        4: "all EP ranks are on one node",
        1: "every node has an EP rank",
        3: "nodes have 3, 1 EP ranks: not equally many",
    }[ranks_per_host]
    job = replace(esp(CURVE, all_to_all=name), steps=1)
    for lines, ways in pool_of(4).run(_reported, job, ranks_per_host):
        assert f"{name} all-to-alls are direct here: {why}" in lines
        assert set(ways) == {name}


def test_the_fastest_way_by_a_hardware_file(tmp_path: Path) -> None:
    """10 ms a message between nodes: two fewer are worth to carry rows over inside a node."""
    job = on_nodes(esp(CURVE, degree=None), 2, tmp_path)
    for lines, ways in pool_of(4).run(_reported, job, 4):
        assert any("between EP ranks by 2dh all-to-alls" in line for line in lines)
        assert ways == ["2dh", "2dh"]


def test_the_fastest_way_by_what_was_measured() -> None:
    job = esp(CURVE, degree=None)
    results = pool_of(4).run(_reported, job, 2)
    assert all(set(ways) <= {"direct", "1dh", "2dh"} for _, ways in results)
    assert all(ways == results[0][1] for _, ways in results), "the same on every rank"
    assert any("between EP ranks by" in line for line in results[0][0])
    assert not any("direct here" in line for line in results[0][0])


def _refused(rank: int, world_size: int, job: Job) -> str:
    with pytest.raises(ValueError) as caught:
        engine_of(job, world_size)
    return str(caught.value)


def test_deep_ep_is_refused_on_a_cpu() -> None:
    for text in pool_of(2).run(_refused, esp(JOB, all_to_all="deepep")):
        assert "ds_moe_ext.esp.all_to_all is 'deepep', but tokens are on cpu" in text
        assert text.endswith("choose another, or leave it out")
