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
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import Pace
from slow_ranks import Model, Shape, Simulator, balanced

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


def test_dist_ep_is_the_sum_of_both_sides():
    said = simulator(2.0, 3.0)
    tokens = 2 * SHAPE.tokens  # of a rank of either side, for it works for two
    assert said.dist_ep_s() == pytest.approx(4 * tokens * (2.0 + 3.0) * 3)


def test_ep_waits_for_the_slow_ranks():
    even, uneven = simulator(2.0, 3.0), simulator(2.0, 3.0, slower=2.5)
    assert even.ep_s() == pytest.approx(4 * SHAPE.tokens * 5.0 * 3)
    assert uneven.ep_s() == pytest.approx(4 * SHAPE.tokens * 8.0 * 3)


def test_zebra_nears_the_longer_side_as_stripes_get_many():
    said = simulator(3.0, 3.0)
    longer_s = 4 * 2 * SHAPE.tokens * 3.0 * 3
    found = [said.zebra_s(stripes) for stripes in (1, 2, 4, 8)]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(said.dist_ep_s())
    assert longer_s < found[-1] < 1.1 * longer_s


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    attention=st.floats(0.1, 10.0),
    expert=st.floats(0.1, 10.0),
    latency=st.floats(0.0, 1.0),
    stripes=st.sampled_from([1, 2, 4, 8]),
)
def test_zebra_is_never_said_to_beat_its_longer_side(attention, expert, latency, stripes):
    said = simulator(attention, expert, link=Link(bytes_per_s=1e18, latency_s=latency))
    assert said.zebra_s(stripes) >= 4 * 2 * SHAPE.tokens * 3 * max(attention, expert) * (1 - 1e-9)


def test_experts_move_only_where_they_take_longer():
    assert simulator(1.0, 2.0).moved(4) == (1, 1, 1, 1)
    assert simulator(2.0, 1.0).moved(4) == (0, 0, 0, 0)


# Contenders.


def test_contenders_have_moved_experts_only_where_some_move():
    few = [way.name for way in slow_ranks.ways([2, 4], simulator(2.0, 1.0))]
    many = list(slow_ranks.ways([2, 4], simulator(1.0, 2.0)))
    assert few == ["ep", "DistEP", "zebra, R = 2", "zebra, R = 4"]
    assert many[-1].name == "zebra, R = 4, moved 1 1 1 1"
    assert many[-1].block["zebra"]["moved"] == [1, 1, 1, 1]
    assert many[1].block["zebra"]["num_micro_batches"] == 1


# The model.


def test_every_expert_has_equally_many_rows_and_no_token_has_one_twice():
    expert_TK = balanced(12, 2, 8)
    assert torch.bincount(expert_TK.flatten()).tolist() == [3] * 8
    assert (expert_TK[:, 0] != expert_TK[:, 1]).all()


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


def result(name: str, *seconds: float, said: float = 1.0, losses=(2.0, 1.0)):
    return slow_ranks.Result(
        name=name,
        said_s=said,
        seconds=list(seconds),
        losses=list(losses),
    )


def test_ratios_are_paired_by_round():
    rivals = [result("ep", 4.0, 6.0, 8.0, said=3.0), result("DistEP", 5.0, 5.0, 5.0, said=5.0)]
    *_, last = slow_ranks.markdown([*rivals, result("zebra", 2.0, 2.0, 4.0)])
    assert "| 2.000 (2.000-3.000) | 3.000 (+50.0%) |" in last


def test_other_losses_are_refused():
    slow_ranks.check_agree(result("ep", 1.0), result("zebra", 1.0, losses=(2.0, 1.00001)))
    with pytest.raises(RuntimeError, match=r"zebra has loss 1\.1 in step 1, ep 1\.0"):
        slow_ranks.check_agree(result("ep", 1.0), result("zebra", 1.0, losses=(2.0, 1.1)))


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
