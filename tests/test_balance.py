# SPDX-License-Identifier: Apache-2.0
"""What ``esp`` over another strategy answers itself, and what it asks that one: nothing is lost.

The stages of a balance are held against the dense reference in ``test_layer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.moe.codecs import Int8
from ds_moe_ext.moe.dispatch import Dispatch, Wire
from ds_moe_ext.moe.expert import Expert
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.hooks import Batch, Hooked, Hooks, Moe
from ds_moe_ext.moe.layer import LayerOptions, RoutedExperts
from ds_moe_ext.moe.observation import take_rows
from ds_moe_ext.planning.exchange_costs import Way
from ds_moe_ext.planning.strategy import (
    CostGroup,
    Forecast,
    Intervals,
    Job,
    Keys,
    LayerContext,
    Plan,
    Strategy,
    along_nodes,
)
from ds_moe_ext.schedule.orders import Beside
from ds_moe_ext.schedule.stages import Stage
from ds_moe_ext.schedule.task import COMBINE, DISPATCH, EXPERT, INTER, PARAM, RESTORE, Op, Stream
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.esp import KEY, ExpertSharding
from ds_moe_ext.strategies.settings import BLOCK, read_settings
from tests.ranks import pool_of
from tests.strategies_for_tests import Chunked, SineRestore

OWNERS = (Placement.block(4, 2),)
JOB = Job.at_start(OWNERS, np.zeros(2, dtype=np.int64))
LAYER_CONTEXT: Any = object()
FORECAST = Forecast(1.0, 2.0, 3.0, 4.0)
STAGE = SineRestore()


@dataclass(frozen=True, kw_only=True)
class Asked(Strategy):
    """Answers nothing as the base class does, but what a balance cannot answer."""

    @property
    def has_uneven_owners(self) -> bool:
        return True

    def with_owners_that_stay(self) -> Strategy:
        return ExpertParallel()

    def settled(self, devices: Callable[[], Sequence[str]], micro_batch: int | None) -> Strategy:
        assert (devices(), micro_batch) == (["a device"], 3)
        return ExpertParallel()

    def first_owners(
        self, num_experts: Sequence[int], cost_groups: Iterable[CostGroup], num_ep_ranks: int
    ) -> tuple[Placement, ...]:
        return OWNERS

    def owners(self, job: Job) -> tuple[Placement, ...]:
        return OWNERS

    def notices(self, job: Job) -> tuple[str, ...]:
        return ("a notice",)

    def forecast(self, job: Job, layer: int, plan: Plan, rows_CE: np.ndarray) -> Forecast | None:
        return FORECAST

    def beside(self, layer_context: LayerContext) -> Beside:
        return Beside(carries=True)

    def stages(self, layer_context: LayerContext) -> Mapping[Op, Stage]:
        return {RESTORE: STAGE}

    def uses(self) -> tuple[tuple[str, Stream], ...]:
        return (("ep", INTER), ("ep", PARAM))

    def intervals(self) -> Intervals:
        return Intervals(window=7, measures=True)

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(map(Plan.at_owner, OWNERS))

    def describe(self, job: Job) -> str:
        return "a balance"

    @property
    def keys(self) -> Keys:
        return Keys("not asked", "nor this", "a key")


ESP = ExpertSharding(degree=2, slice_gradients=False)


def test_the_balance_is_asked() -> None:
    over = ESP.over(Asked())
    assert over.has_uneven_owners
    assert over.with_owners_that_stay() == over.settled(lambda: ["a device"], 3) == ESP
    assert over.first_owners([4], [], 2) is over.owners(JOB) is OWNERS
    assert over.notices(JOB) == ("a notice",)
    assert over.forecast(JOB, 0, Plan.at_owner(OWNERS[0]), np.zeros((2, 4))) is FORECAST
    assert over.beside(LAYER_CONTEXT) == Beside(carries=True)
    assert over.stages(LAYER_CONTEXT) == {RESTORE: STAGE}
    assert over.keys == Keys(f"{KEY}.all_to_all", f"{KEY}.slice_gradients", "a key")


def test_a_member_that_a_strategy_gains_is_asked_of_the_balance() -> None:
    over = ESP.over(Asked())
    with (
        mock.patch.object(Strategy, "gained", lambda self: "a default", create=True),
        mock.patch.object(Asked, "gained", lambda self: "its own", create=True),
    ):
        assert over.gained() == "its own"  # type: ignore[attr-defined]
        assert ESP.gained() == "a default"  # type: ignore[attr-defined]
        with mock.patch.object(ExpertSharding, "gained", lambda self: "esp's", create=True):
            assert over.gained() == "esp's"  # type: ignore[attr-defined]


def test_what_the_balance_says_is_kept() -> None:
    over = replace(ESP, all_to_all="2dh").over(Asked())
    assert {("ep", INTER), ("ep", PARAM), *along_nodes(over.ways)} == set(over.uses())
    assert over.intervals() == Intervals(window=7, measures=True)
    (plan,) = over.plan(JOB)
    assert (plan.owner, plan.forward_degree, plan.way) == (OWNERS[0], 2, Way.BY_PLACES)
    job = Job.at_start(OWNERS, JOB.node_C, (CostGroup(layers=(0,), expert_bytes=1),))
    assert over.describe(job) == "a balance"
    assert replace(over, degree=3).placing == over.without_slices().placing == Asked()


def test_what_it_is_laid_over_is_no_key() -> None:
    with pytest.raises(ValueError, match="esp has no key 'placing'"):
        read_settings({BLOCK: {"enabled": True, "strategy": "esp", "esp": {"placing": {}}}})


class OtherWays(ExpertParallel):
    @property
    def ways(self) -> tuple[Way, ...]:
        return (Way.BY_PLACES,)


class Sliced(ExpertParallel):
    @property
    def slices_gradients(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("balance", "name"),
    [
        (Chunked(forward=1, backward=1), "schedules"),
        (OtherWays(), "ways"),
        (Sliced(), "slices_gradients"),
    ],
)
def test_a_balance_that_decides_how_rows_travel_is_refused(balance: Strategy, name: str) -> None:
    with pytest.raises(
        ValueError, match=(f"chooses itself how tokens are sent.*leave {name} to the")
    ):
        ExpertSharding().over(balance)


# Stages that cannot be right.


class HalfAStage:
    def forward(self, chunk_range: Any, *reads: Any) -> Any: ...

    def backward(self, chunk_range: Any, saved: Any, *grads: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Staged(ExpertParallel):
    op: Op
    stage: Any

    def stages(self, layer_context: LayerContext) -> Mapping[Op, Stage]:
        return {self.op: self.stage}


FUNCTION = FeedForwardExperts(silu_gated)


def refused(rank: int, world_size: int, case: dict[str, Any]) -> str:
    """What a layer of split experts says, if anything."""
    esp = ExpertSharding(degree=1, slice_gradients=False, all_to_all=case.get("way", "direct"))
    strategy = esp.over(Staged(op=case["op"], stage=case["stage"]))
    layout = ParallelLayout.build(Grid(world_size, 1, 2), (("ep", INTER),))
    owner = Placement.block(2, 1)
    (plan,) = strategy.plan(Job.at_start([owner], layout.node_C))
    hooks = case.get("hooks", Hooked())
    with pytest.raises(ValueError) as caught:
        layer_context = LayerContext(plan, layout, 0)
        RoutedExperts(strategy, layer_context, FUNCTION, options=LayerOptions(hooks=hooks))
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "stated"),
    [
        ({"op": RESTORE, "stage": HalfAStage()}, "'restore', lacks forward, backward or recut"),
        ({"op": EXPERT, "stage": Expert(FUNCTION)}, "needs whole experts, but expert_sharding"),
        ({"op": COMBINE, "stage": STAGE, "way": "2dh"}, "but ds_moe_ext.esp.all_to_all is '2dh'"),
        ({"op": COMBINE, "stage": STAGE, "hooks": Hooked(codecs=(Int8(),))}, "of hooks would have"),
    ],
)
def test_stages_that_cannot_be_right_are_refused(case: dict[str, Any], stated: str) -> None:
    for message in pool_of(2).run(refused, case):
        assert stated in message


# Hooks.


class Moved(ExpertParallel):
    """Rows are dispatched by a stage of its own."""

    def stages(self, layer_context: LayerContext) -> Mapping[Op, Stage]:
        wire = Wire.between(layer_context.layout, INTER, torch.device("cpu"))
        return {DISPATCH: Dispatch(wire, wire)}


@dataclass
class Sees(Hooks):
    num_rows: int = 0

    def after_dispatch_hook(self, moe: Moe, batch: Batch) -> None:
        self.num_rows += batch.data.shape[0]


def rows_seen(rank: int, world_size: int) -> int:
    layout = ParallelLayout.build(Grid(world_size, world_size), (("ep", INTER),))
    sees, plan = Sees(), Plan.at_owner(Placement.block(2, world_size))
    options = LayerOptions(hooks=Hooked(observers=(sees,)))
    strategy = ExpertSharding(degree=1, slice_gradients=False).over(Moved())
    routed = RoutedExperts(strategy, LayerContext(plan, layout, 0), FUNCTION, options=options)
    weights = (torch.ones(6, 4), torch.ones(4, 3))
    expert_TK = torch.tensor([[0], [1], [1]])
    routed(torch.ones(3, 4), expert_TK, torch.ones(3, 1), weights)
    return sees.num_rows


def test_observers_see_rows_that_a_stage_of_the_strategy_has_moved() -> None:
    assert pool_of(2).run(rows_seen) == [2, 4]


# A static capacity.


@dataclass(frozen=True, kw_only=True)
class PaddedChunks(Chunked):
    @property
    def static_capacity(self) -> int | None:
        return 3


def padded(rank: int, world_size: int, strategy: Strategy, options: LayerOptions) -> np.ndarray:
    """Rows that a layer says all ranks routed, where each knows its own alone."""
    layout = ParallelLayout.build(Grid(world_size, world_size), (("ep", INTER),))
    (plan,) = strategy.plan(Job.at_start([Placement.block(2, world_size)], layout.node_C))
    routed = RoutedExperts(strategy, LayerContext(plan, layout, 0), FUNCTION, options=options)
    expert_TK = torch.tensor([[0], [1], [1], [1], [-1]])[rank:]
    for _ in range(2):
        routed.rows.begin(is_training=True)
        x_TD, weights = torch.ones(5 - rank, 4), (torch.ones(6, 4), torch.ones(4, 3))
        routed(x_TD, expert_TK, torch.ones(5 - rank, 1), weights)
    (rows,) = take_rows([routed.rows])
    assert rows.computed_C.tolist() == rows.routed_CE.sum(axis=0).tolist()
    return rows.routed_CE


def test_rows_within_a_static_capacity_are_seen() -> None:
    strategy, options = ExpertParallel(static_capacity=2), LayerOptions(gate_may_drop=True)
    for routed_CE in pool_of(2).run(padded, strategy, options):
        assert routed_CE.tolist() == [[2, 4], [0, 4]]


def test_a_static_capacity_is_refused_where_rows_cannot_be_known() -> None:
    strategy = ExpertParallel(static_capacity=3)
    with pytest.raises(
        ValueError, match=r"static_capacity is 3, but strategy 'esp' cuts.*leave it"
    ):
        ESP.over(strategy)
    with pytest.raises(ValueError, match=r"ep\.static_capacity is 0"):
        ExpertParallel(static_capacity=0)
    with pytest.raises(ValueError, match=r'ep\.order is "one_hot".*static_capacity is null.*set'):
        ExpertParallel(order="one_hot")
    with pytest.raises(ValueError, match=r"ep\.order is 'one_hots'.*did you mean 'one_hot'"):
        ExpertParallel(order="one_hots", static_capacity=3)
    for asked, options, stated in (
        (strategy, LayerOptions(capacity_factor=1.5), r"capacity_factor is 1\.5.*one of them out"),
        (PaddedChunks(forward=2, backward=2), LayerOptions(), "PaddedChunks has a static capacity"),
    ):
        with pytest.raises(AssertionError, match=f"ValueError.*{stated}"):
            pool_of(1).run(padded, asked, options)
