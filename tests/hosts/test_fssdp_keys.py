# SPDX-License-Identifier: Apache-2.0
"""Keys of ``fssdp``: what is measured where they are null, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from torch import nn

from ds_moe_ext.hosts.steps.costs import STEPS
from ds_moe_ext.planning.bench import Bench
from ds_moe_ext.planning.prices import Prices
from tests.hosts import families
from tests.hosts.copied_runs import fssdp, num_copied, plain, run
from tests.hosts.jobs import Job, engine_of, loss_of, micro_batch
from tests.hosts.test_refusals import document_with, refuse
from tests.marks import slow
from tests.ranks import pool_of

# Measured.


class Measured(NamedTuple):
    """What one rank planned by after each step."""

    window_s: tuple[float, ...]
    free_bytes: int
    prices: Prices
    num_replicas: int


def measured(rank: int, world_size: int, job: Job, seconds: float | None) -> list[Measured]:
    """With each transfer of the quick look taking so many seconds, if given."""
    if seconds is None:
        return planned(rank, world_size, job)
    with mock.patch.object(Bench, "seconds", lambda _, works: np.full(len(works), seconds)):
        return planned(rank, world_size, job)


def planned(rank: int, world_size: int, job: Job) -> list[Measured]:
    """What was known after each step."""
    from ds_moe_ext.hosts.steps.training_run import run_of

    engine = engine_of(job, world_size)
    planning = run_of(engine).planning
    seen = []
    for step in range(job.steps):
        for number in range(rank, job.micro_batches, world_size):
            engine.backward(loss_of(engine, micro_batch(step, number)))
            engine.step()
        known = planning.job
        plans = [layer.routed.layer_context.plan for layer in planning.layers]
        replicas = sum(int((p.target.holds_EC & ~p.owner.holds_EC).sum()) for p in plans)
        prices = known.pools[0].prices
        seen.append(Measured(known.window_s, known.free_bytes, prices, replicas))
    return seen


JOB = fssdp(Job("mixtral", 1, steps=8))


@pytest.mark.parametrize(("world_size", "share"), [slow(2, "nearest"), (4, "priced")])
def test_t_and_m_are_measured_in_the_first_steps(world_size: int, share: str) -> None:
    """On all ranks alike, to the last bit, as whole prices of rows are made from that; and then
    experts are copied, also where a rank has one of a layer."""
    ranks = pool_of(world_size).run(measured, fssdp(JOB, overlap_degree=4, share=share), None)
    assert all(rank == ranks[0] for rank in ranks)
    before, after = ranks[0][: STEPS[-1]], ranks[0][STEPS[-1] :]
    assert all(known.num_replicas == 0 for known in before)
    assert sum(known.num_replicas for known in after) > 0
    assert all(
        min(known.window_s) > 0 and known.prices.copy_s > 0 < known.prices.row_s for known in after
    )
    assert all(known.free_bytes > 0 for known in after)


@pytest.mark.parametrize("seconds", [1e-9, slow(1e-4), slow(1e3)])
def test_any_measured_link_will_do(seconds: float) -> None:
    """All sizes as fast, faster than time can be reported, or slower than anything hides."""
    ranks = pool_of(2).run(measured, JOB, seconds)
    assert all(rank == ranks[0] for rank in ranks)
    last = ranks[0][-1]
    assert min(last.window_s) > 0
    assert seconds / 10 < last.prices.copy_s < seconds
    assert seconds > 1e-6 or last.num_replicas > 0
    assert seconds < 1 or last.num_replicas == 0


"""+"""

# Refused.

REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a mistyped key": ({"overlap_degre": 2}, ("'overlap_degre'", "did you mean 'overlap_degree'")),
    "a key of the paper": ({"t": 2}, ("ds_moe_ext.fssdp has no key 't'", "known")),
    "negative t": ({"overlap_degree": -1}, ("fssdp.overlap_degree is -1", "at least 0")),
    "half a t": ({"overlap_degree": 1.5}, ("fssdp.overlap_degree is 1.5", "an integer or null")),
    "t in words": ({"overlap_degree": "auto"}, ("overlap_degree is 'auto'", "write null")),
    "negative m": ({"replicas_per_rank": -2}, ("fssdp.replicas_per_rank is -2", "at least 0")),
    "m that is true": ({"replicas_per_rank": True}, ("replicas_per_rank is True", "an integer")),
    "no window": ({"window": 0}, ("fssdp.window is 0", "at least 1")),
    "a window in words": ({"window": "auto"}, ("fssdp.window is 'auto'", "write null")),
    "owners in other ways": ({"resharding": "pays"}, ("resharding is 'pays'", "gain", "paper")),
    "plans at no interval": ({"plan_interval": 0}, ("plan_interval is 0", "at least 1")),
    "calibrate as a number": ({"calibrate": 1}, ("fssdp.calibrate is 1", "true or false")),
    "rematerialize in words": ({"rematerialize": "yes"}, ("rematerialize is 'yes'", "true or")),
    "a negative interval": ({"reshard_interval": -1}, ("reshard_interval is -1", "at least 0")),
    "negative bytes": ({"replica_bytes": -1}, ("fssdp.replica_bytes is -1", "at least 0")),
    "bytes as a float": ({"replica_bytes": 1e9}, ("replica_bytes is 1000000000.0", "an integer")),
}


@pytest.mark.parametrize("strategy", ["fssdp", "ep"])
@pytest.mark.parametrize("name", REFUSED)
def test_malformed_keys(name: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another strategy is chosen: a mistake shows before it matters."""
    keys, expected = REFUSED[name]
    block = {"enabled": True, "strategy": strategy, "fssdp": keys}
    arguments = {"model": nn.Linear(2, 2), "config": document_with(block)}
    message = refuse(monkeypatch, 1, arguments)
    assert all(part in message for part in expected), message


NO_LINKS = {
    "name": "half known",
    "source": "a test",
    "num_nodes": 2,
    "ranks_per_node": 2,
    "device": {"name": "CPU"},
    "intra": {"bytes_per_s": 1e9},
}


def some_grids(folder: Path) -> tuple[int, dict[str, Any], tuple[str, ...]]:
    keys = {"expert_parallel_size": 2, "fssdp": {"reshard_interval": 9}}
    return 4, keys, ("reshard_interval is 9", "has 2 owners", "reshard_interval to 0 or null")


def too_few_experts(folder: Path) -> tuple[int, dict[str, Any], tuple[str, ...]]:
    """Two layers of eight on more ranks than that."""
    asked = {"expert_parallel_size": 32}
    return 32, asked, ("expert_parallel_size is 32", "only 16 experts", "choose one of [1, 2, 4")


def missing_file(folder: Path) -> tuple[int, dict[str, Any], tuple[str, ...]]:
    return 2, {"hardware": str(folder / "none.json")}, ("none.json", "cannot be read", "profile")


def unknown_link(folder: Path) -> tuple[int, dict[str, Any], tuple[str, ...]]:
    """Before the first step, not when the first plan wants it."""
    path = folder / "half.json"
    path.write_text(json.dumps(NO_LINKS))
    return 4, {"hardware": str(path)}, ("half.json", "between nodes", "add the key 'inter'")


@pytest.mark.parametrize(
    "case",
    [some_grids, too_few_experts, missing_file, unknown_link],
    ids=lambda case: case.__name__,
)
def test_what_cannot_work(
    case: Callable[[Path], tuple[int, dict[str, Any], tuple[str, ...]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world_size, keys, expected = case(tmp_path)
    block = {"enabled": True, "strategy": "fssdp", **keys}
    arguments = {"model": families.build("mixtral"), "config": document_with(block)}
    message = refuse(monkeypatch, world_size, arguments)
    assert all(part in message for part in expected), message


@pytest.mark.slow
def test_a_link_within_nodes_is_enough_there(tmp_path: Path) -> None:
    """The same file on the ranks of one node."""
    path = tmp_path / "half.json"
    path.write_text(json.dumps(NO_LINKS))
    job = Job("toy", 1, steps=6, hardware=str(path))
    ours, steps = run(2, fssdp(job, overlap_degree=8, replicas_per_rank=8))
    assert any(num_copied(steps))
    assert ours.losses == pytest.approx(plain(2, job).losses, rel=1e-5)


@pytest.mark.slow  # quick with the table of test_configurations.py
def test_grids_of_some_ranks_where_owners_stay() -> None:
    job = Job("toy", 1, steps=6, ep_ranks=2)
    ours, steps = run(4, fssdp(job, overlap_degree=8, replicas_per_rank=8, reshard_interval=0))
    assert any(num_copied(steps))
    assert ours.losses == pytest.approx(plain(4, job).losses, rel=1e-5)
