# SPDX-License-Identifier: Apache-2.0
"""The benchmark of zebra with slow ranks: its pure parts, its model, and one short run of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import slow_ranks
import torch
from pace import Pace
from slow_ranks import Model, Shape, Simulator

from ds_moe_ext.core.hardware import Link
from ds_moe_ext.planning.zebra_costs import RankClass

SHAPE = Shape(layers=4, experts=8, top_k=2, width=16, expert_width=4, length=8, samples=8)
FREE = Link(bytes_per_s=1e18)


def simulator(attention: float, expert: float, *, slower: float = 1.0, link: Link = FREE):
    """Two ranks of each kind; seconds a token and layer on a new one."""
    new = RankClass(attention_s=attention, expert_s=expert)
    old = RankClass(attention_s=slower * attention, expert_s=expert)
    return Simulator(SHAPE, new, old, 2, 2, link)


# What the simulator says.


def test_replicas_make_uneven_loads_even():
    even = replace(simulator(1.0, 1.0), shape=replace(SHAPE, length=64))
    uneven = replace(even, shape=replace(even.shape, zipf=1.2))
    alone, copied = uneven.placed(slow_ranks.NO_BALANCE), uneven.placed(slow_ranks.OVER)
    assert even.placed(slow_ranks.NO_BALANCE).loads_LN == ((1.0, 1.0),) * 4
    assert min(map(max, alone.loads_LN)) > 1.2 and not any(alone.copied_L)
    assert max(map(max, copied.loads_LN)) < 1.02 and all(copied.copied_L)
    assert uneven.zebra_s(4, balance=slow_ranks.OVER) < uneven.zebra_s(4) < uneven.dist_ep_s()
    assert uneven.zebra_s(4, balance=slow_ranks.OVER) == pytest.approx(even.zebra_s(4), rel=0.02)


# Contenders.


# The model.


class _Dense(torch.nn.Module):
    """In the place of paced experts, which only strategies run."""

    def forward(self, x_TD, expert_TK, score_TK):
        return x_TD * score_TK.sum(dim=-1, keepdim=True)


def test_blocks_take_their_share_of_the_pace_twice_as_long_in_backward():
    pace = Pace(attention_s=0.02, row_s=0.0)
    model = Model(pace, replace(SHAPE, layers=2))
    for block in model.blocks:
        block.experts = _Dense()
    tokens = slow_ranks.batch_of(SHAPE, 0, 0)[:4]
    model(tokens, tokens).loss.backward()
    took = [each.end_s - each.start_s - each.late_s for each in pace.take()]
    assert took == pytest.approx([0.01, 0.01, 0.02, 0.02])


# What was seen.


@pytest.mark.slow
def test_a_short_run():
    script = Path(slow_ranks.__file__)
    words = ["--rounds", "1", "--warm_ups", "1", "--layers", "2", "--attention_us", "10"]
    words += ["--expert_us", "20"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc_per_node", "4"]
    ran = subprocess.run(
        [*launcher, str(script), *words], capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "| zebra, R = 4, moved" in ran.stdout
