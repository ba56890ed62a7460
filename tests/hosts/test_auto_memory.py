# SPDX-License-Identifier: Apache-2.0
"""``auto`` where one rank has less memory than others: all ranks leave out what does not fit."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import NamedTuple
from unittest import mock

import pytest
import torch

import ds_moe_ext
from ds_moe_ext.hosts.steps import costs
from tests.hosts import jobs
from tests.ranks import pool_of

INTERVAL, STEPS = 8, 20
PLENTY = 10**9


class Reported(NamedTuple):
    """Of one rank."""

    free_bytes: int
    choices: list[str]
    printed: str


def reported(
    rank: int, world_size: int, spare: tuple[int, ...], later: tuple[int, ...]
) -> Reported:
    """With so many bytes left on each rank, and others once replicas have been made."""
    left = [spare[rank]]
    block = {
        "enabled": True,
        "strategy": "auto",
        "auto": {"interval": INTERVAL, "candidates": ["fssdp"]},
        "fssdp": {"overlap_degree": 8, "replicas_per_rank": 8, "reshard_interval": 0},
    }
    torch.manual_seed(0)
    model = jobs.model_of(jobs.Job("toy"))
    planted = mock.patch.object(costs, "spare_bytes", lambda device: left[0])
    with planted, redirect_stdout(StringIO()) as printed:
        moe = ds_moe_ext.attach(model, block)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        moe.watch(optimizer)
        planning, choices, free_bytes = moe.ds_moe_ext.run.planning, list[str](), 0
        generator = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            ids = torch.randint(0, 8, (2, 8), generator=generator)
            model(ids, ids).loss.backward()
            optimizer.step()
            choice = planning.layers[0].routed.layer_context.plan.choice
            choices.append("" if choice is None else choice.name)
            free_bytes = free_bytes or planning.job.free_bytes
            if choice is not None and choice.name == "fssdp":
                left[0] = later[rank]
    return Reported(free_bytes, choices, printed.getvalue())


def test_the_tightest_rank_counts() -> None:
    few = 10
    ranks = pool_of(2).run(reported, (PLENTY, few), (PLENTY, few))
    assert [rank.free_bytes for rank in ranks] == [int(0.7 * few)] * 2
    assert ranks[0].choices == ranks[1].choices
    assert set(ranks[0].choices) == {"", "ep"}
    assert ranks[0].printed.count("; fssdp is left out: its replicas need ") == 1
    assert not ranks[1].printed


def test_what_replicas_were_seen_to_take_on_one_rank_counts_at_the_next_choice() -> None:
    ranks = pool_of(2).run(reported, (PLENTY, PLENTY), (PLENTY, PLENTY // 5))
    assert ranks[0].choices == ranks[1].choices
    names = ranks[0].choices
    assert names.index("fssdp") < names.index("ep")
    assert names[-1] == "ep"
    assert (
        "; fssdp is left out: its replicas need 800 MB on a rank, but only 700 MB are free"
    ) in ranks[0].printed


@pytest.mark.slow
def test_plenty_is_plenty() -> None:
    first, second = pool_of(2).run(reported, (PLENTY, PLENTY), (PLENTY, PLENTY // 2))
    assert first.choices == second.choices
    assert set(first.choices) == {"", "fssdp"}
    assert "left out" not in first.printed
