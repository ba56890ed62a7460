# SPDX-License-Identifier: Apache-2.0
"""Pipelines of both classes: golden steps, the best split by hand, and what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from papers.hetermoe_pipelines import PipelinePlan, Pipelines, best_pipelines
from pytest import approx

from ds_moe_ext.core.hardware import Link
from ds_moe_ext.planning.zebra_costs import MoeModel, RankClass, TwoClasses
from tests.planners.plainly import PROPERTY


def ranks_of(num_layers: int, *, link: float = 1e30, old_room: int | None = None) -> TwoClasses:
    """A layer takes 2 s forward on a new rank, 4 s on an old one, and twice that in backward."""
    return TwoClasses(
        model=MoeModel(
            num_layers=num_layers, num_experts=3, top_k=1, width=1, expert_width=1, length=1
        ),
        new=RankClass(attention_s=1, expert_s=1),
        old=RankClass(attention_s=2, expert_s=2, room=old_room),
        link=Link(bytes_per_s=link),
        backward=2,
    )


def pipelines_of(new: int, old: int, count: int = 1) -> Pipelines:
    return Pipelines(num_pipelines=count, new_ranks=new, old_ranks=old)


def step_s(plan: PipelinePlan, num_samples: int) -> float:
    return num_samples / plan.tokens_per_s


def test_layers_balance_the_stages() -> None:
    """4 layers of 2 s and 2 of 4 s: 8 s each; 9 samples of 24 s, and one more to fill."""
    plan = best_pipelines(ranks_of(6), pipelines_of(1, 1), 9)
    assert (plan.layers, plan.is_new) == ((4, 2), (True, False))
    assert step_s(plan, 9) == approx(9 * 24 + 24)


def test_few_samples_would_rather_fill_soon() -> None:
    """10 s, 20 s back on the first stage, 4 s and 8 s on the second, for which it waits 2 s."""
    plan = best_pipelines(ranks_of(6), pipelines_of(1, 1), 3)
    assert (plan.layers, plan.is_new) == ((5, 1), (True, False))
    assert step_s(plan, 3) == approx(3 * 30 + 2)


def test_old_stages_with_one_layer_between() -> None:
    plan = best_pipelines(ranks_of(4), pipelines_of(1, 2), 4)
    assert sorted(zip(plan.is_new, plan.layers)) == [(False, 1), (False, 1), (True, 2)]
    assert step_s(plan, 4) == approx((4 + 2) * 12)


def test_one_stage_computes_all() -> None:
    plan = best_pipelines(ranks_of(5), pipelines_of(0, 1), 2)
    assert step_s(plan, 2) == approx(2 * 5 * 12)


def test_pipelines_share_samples_and_sum_gradients() -> None:
    """Two of 9 samples each; a stage of 4 layers with 3 experts of 3 weights sums 72 bytes."""
    plan = best_pipelines(ranks_of(6, link=10), pipelines_of(1, 1, count=2), 18)
    assert plan.layers == (4, 2)
    # Each stage hands on, or back, 2 bytes of each sample, and the first waits for both once.
    assert step_s(plan, 18) == approx(10 * (24 + 0.2) + 7.2)
    uneven = best_pipelines(ranks_of(6), pipelines_of(1, 1, count=2), 17)
    assert step_s(uneven, 17) == approx(10 * 24)


def test_memory_bounds_a_stage() -> None:
    """Room for 5 experts is room for one layer of 3."""
    plan = best_pipelines(ranks_of(6, old_room=5), pipelines_of(1, 1), 8)
    assert sorted(zip(plan.is_new, plan.layers)) == [(False, 1), (True, 5)]
    match = "no split of 6 layers of 3 experts fits stages with room for None experts on new"
    with pytest.raises(ValueError, match=match):
        best_pipelines(ranks_of(6, old_room=2), pipelines_of(1, 1), 8)


def test_the_head_is_with_the_last_stage() -> None:
    ranks = ranks_of(6)
    headed = replace(ranks, new=replace(ranks.new, head_s=8), old=replace(ranks.old, head_s=8))
    plan = best_pipelines(headed, pipelines_of(1, 1), 8)
    assert plan.layers[-1] * (2 if plan.is_new[-1] else 4) < 8


@pytest.mark.parametrize(
    ("new", "old", "count", "match"),
    [
        (2, 1, 1, "a pipeline has 3 stages, but the model 2 layers"),
        (0, 0, 1, "a pipeline has 0 stages"),
        (1, 1, 5, "num_pipelines is 5 for 4 samples"),
        (2, -1, 1, "new_ranks is 2 and old_ranks -1; both must be at least 0"),
    ],
)
def test_pipelines_that_cannot_be(new: int, old: int, count: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        best_pipelines(ranks_of(2), pipelines_of(new, old, count), 4)


@PROPERTY
@given(st.integers(1, 6), st.integers(0, 2), st.integers(0, 2), st.integers(1, 5))
def test_no_pipeline_beats_perfect_balance(layers: int, new: int, old: int, samples: int) -> None:
    if not 1 <= new + old <= layers:
        return
    plan = best_pipelines(ranks_of(layers), pipelines_of(new, old), samples)
    assert sum(plan.layers) == layers
    assert (sum(plan.is_new), len(plan.is_new)) == (new, new + old)
    layers_per_s = new / 6 + old / 12  # forward and backward
    assert step_s(plan, samples) >= samples * layers / layers_per_s * (1 - 1e-9)
    one_sample_s = sum(
        count * (6 if is_new else 12) for count, is_new in zip(plan.layers, plan.is_new)
    )
    assert step_s(plan, samples) >= one_sample_s * (1 - 1e-9)
