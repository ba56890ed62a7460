# SPDX-License-Identifier: Apache-2.0
"""What strategies say as a run starts, of keys that cannot do anything there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_moe_ext.core.placement import even_owners
from ds_moe_ext.planning.strategy import CostGroup, Job, Strategy
from ds_moe_ext.strategies.settings import read_settings


def strategy_of(**block: Any) -> Strategy:
    _, strategy = read_settings({"ds_moe_ext": {"enabled": True, **block}})
    assert strategy is not None
    return strategy


def job_of(*num_experts: int, **known: Any) -> Job:
    owners = even_owners(num_experts, 2)
    return replace(Job.at_start(owners, np.zeros(2, dtype=np.int64)), **known)


def stated(block: dict[str, Any], *num_experts: int) -> tuple[str, ...]:
    return strategy_of(**block).notices(job_of(*num_experts))


def fssdp(**keys: Any) -> dict[str, Any]:
    return {"strategy": "fssdp", "fssdp": keys}


@pytest.mark.parametrize(
    "block",
    [
        {},
        {"strategy": "prophet"},
        {"strategy": "esp", "balance": "prophet"},
        fssdp(),
        fssdp(calibrate=True, overlap_degree=2, replicas_per_rank=3),
        fssdp(overlap_degree=7),
        fssdp(overlap_degree=8, reshard_interval=0),
        fssdp(overlap_degree=8, heterogeneous_sharding=False),
        {"strategy": "zebra", "zebra": {"attention_size": 1, "expert_size": 1, "moved": [0, 1]}},
    ],
)
def test_keys_that_can_do_something_need_no_notice(block: dict[str, Any]) -> None:
    assert stated(block, 8, 8) == ()


@pytest.mark.parametrize(
    ("keys", "unknown"),
    [
        ({}, "overlap_degree and replicas_per_rank"),
        ({"replicas_per_rank": 2}, "overlap_degree"),
        ({"overlap_degree": 2}, "replicas_per_rank"),
    ],
)
@pytest.mark.parametrize("over", [{}, {"strategy": "esp", "balance": "fssdp"}])
def test_calibration_that_depends_on_measurements(
    keys: dict[str, int], unknown: str, over: dict[str, str]
) -> None:
    (line,) = stated({**fssdp(calibrate=True, **keys), **over}, 8, 8)
    assert f"measurements decide that (ds_moe_ext.fssdp has null {unknown})" in line
    assert "set overlap_degree below replicas_per_rank" in line


def test_calibration_without_room() -> None:
    (line,) = stated(fssdp(calibrate=True, overlap_degree=3, replicas_per_rank=3), 8, 8)
    assert line.startswith(
        "calibrate cannot add replicas: 3 of 8 experts are prefetched already (t)"
    )
    assert "set ds_moe_ext.fssdp.overlap_degree below replicas_per_rank" in line
    all_copied = fssdp(calibrate=True, overlap_degree=8, replicas_per_rank=9, reshard_interval=0)
    assert stated(all_copied, 8, 8)[0].startswith("calibrate cannot add replicas: 8 of 8")


def test_owners_of_layers_whose_experts_are_all_copied() -> None:
    """By the paper's algorithm, that is: where owners go by gain any expert may move."""
    (line,) = stated(fssdp(overlap_degree=9, resharding="paper"), 8, 4)
    assert line.startswith("heterogeneous_sharding moves no expert")
    assert "all 4 to 8 of a layer" in line
    assert stated(fssdp(overlap_degree=6, resharding="paper"), 8, 4) == ()
    assert stated(fssdp(overlap_degree=9), 8, 4) == ()


def test_what_is_measured_is_reported_when_it_has_been() -> None:
    strategy = strategy_of(**fssdp(calibrate=True, replica_bytes=1000, resharding="paper"))
    cost_group = CostGroup(layers=(0, 1), expert_bytes=100)
    cost_group = replace(cost_group, prices=replace(cost_group.prices, copy_s=1.0))
    none_left = strategy.describe(job_of(4, 4, cost_groups=(cost_group,), window_s=(9.0, 9.0)))
    assert "calibrate cannot add replicas: 4 of 4 experts are prefetched already" in none_left
    assert "replicas_per_rank; heterogeneous_sharding moves no expert" in none_left
    some_left = strategy.describe(job_of(4, 4, cost_groups=(cost_group,), window_s=(9.0, 1.0)))
    assert "calibrate" not in some_left and "heterogeneous" not in some_left


def test_zebra_without_asymmetric_experts() -> None:
    (line,) = stated({"strategy": "zebra", "zebra": {"attention_size": 1, "expert_size": 1}}, 8)
    assert "ds_moe_ext.zebra.moved and ds_moe_ext.zebra.profile are null" in line


def test_nothing_is_copied_by_a_key() -> None:
    (line,) = stated(fssdp(overlap_degree=0), 8, 8)
    assert line == "no replicas are made, because ds_moe_ext.fssdp.overlap_degree is 0"


@pytest.mark.parametrize(
    ("keys", "window_s", "expected"),
    [
        (
            {"replica_bytes": 1000},
            (0.5, 9.0),
            "for 1 of 2 layers: attention is too short to hide the transfer of an expert (t "
            'is 0); to make replicas anyway, set {"ds_moe_ext": {"fssdp": {"overlap_degree": '
            "1}}}",
        ),
        (
            {"replica_bytes": 299},
            (9.0, 9.0),
            "for any layer: a rank has no memory for one (m is 0); to free memory, set "
            '{"ds_moe_ext": {"fssdp": {"replica_bytes": 300}}}',
        ),
        ({}, (9.0, 9.0), '(m is 0); to free memory, set {"ds_moe_ext": {"fssdp": {"rematerialize"'),
        ({"rematerialize": True}, (9.0, 9.0), '{"fssdp": {"replicas_per_rank": 1}}'),
    ],
)
def test_nothing_is_copied_by_what_was_measured(
    keys: dict[str, Any], window_s: tuple[float, float], expected: str
) -> None:
    """Experts of 100 bytes travel for a second each; nothing is known of free memory."""
    cost_group = CostGroup(layers=(0, 1), expert_bytes=100)
    cost_group = replace(cost_group, prices=replace(cost_group.prices, copy_s=1.0))
    job = job_of(4, 4, cost_groups=(cost_group,), window_s=window_s)
    reported = strategy_of(**fssdp(**keys)).describe(job)
    assert reported.count("; no replicas ") == 1 and expected in reported
    given = strategy_of(**fssdp(overlap_degree=1, replicas_per_rank=1)).describe(job)
    assert "no replicas" not in given
