# SPDX-License-Identifier: Apache-2.0
"""What a layer refuses: settings, stages and plans that cannot be right together.

``check_layer`` is asked when the layer is made, ``check_plan`` when it is given another plan, and
``check_schedules`` when a program is made of a plan. All raise ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from ds_moe_ext.moe.hooks import NO_HOOKS, Hooked
from ds_moe_ext.moe.transforms import AFTER_COMBINE, BEFORE_COMBINE
from ds_moe_ext.planning.exchange_costs import Way
from ds_moe_ext.planning.strategy import LayerContext, Plan, Strategy, replicates
from ds_moe_ext.schedule.orders import QUEUED, ROW_SCORES
from ds_moe_ext.schedule.stages import Stage
from ds_moe_ext.schedule.task import (
    COMBINE,
    DISPATCH,
    ETP_GATHER,
    EXPERT,
    HAVE_AGAIN,
    JOIN,
    ORDER,
    RESTORE,
    Op,
    Schedule,
)

MOVES_ROWS = frozenset((DISPATCH, COMBINE))
_OF_ROUTES = frozenset((ORDER, DISPATCH, COMBINE, RESTORE))
_OF_EP_RANKS = frozenset((ETP_GATHER, QUEUED[ETP_GATHER]))
_BETWEEN_SIDES = frozenset((ORDER, DISPATCH, EXPERT, COMBINE))


def check_layer(
    own: Mapping[Op, Stage],
    strategy: Strategy,
    layer_context: LayerContext,
    hooks: Hooked,
    *,
    capacity_factor: float | None,
    gate_may_drop: bool,
) -> None:
    """Args: own: the strategy's own stages. For the rest see ``LayerOptions``."""
    if strategy.static_capacity is not None:
        _check_static_capacity(strategy, capacity_factor)
    if strategy.cuda_graphs:
        may_drop = gate_may_drop or capacity_factor is not None
        _check_graphs(own, strategy, layer_context, hooks, may_drop=may_drop)
    _check_stages(own, strategy, layer_context, hooks)
    check_plan(own, strategy, layer_context, hooks)


def check_plan(
    own: Mapping[Op, Stage], strategy: Strategy, layer_context: LayerContext, hooks: Hooked
) -> None:
    """Args: own: the strategy's own stages, where they have not been looked at yet."""
    if strategy.static_capacity is not None and not _is_plain(layer_context.plan):
        raise ValueError(
            f"{type(strategy).__qualname__} has a static capacity "
            f"({strategy.keys.static_capacity} is {strategy.static_capacity}), but plans replicas "
            "of experts or cuts tokens, so token counts are not known in advance; leave that out"
        )
    if layer_context.plan.sends_once:
        _check_send_once(own, strategy, layer_context)
    if hooks.transforms:
        check_transforms(own, strategy, layer_context, hooks)
    if strategy.roles is not None:
        _check_roles(own, strategy, layer_context)


def check_schedules(
    strategy: Strategy,
    layer_context: LayerContext,
    forward: Schedule,
    backward: Schedule,
    *,
    may_copy: bool,
) -> None:
    """Whether what a strategy says itself leaves out what its plan asks for.

    Args:
        may_copy: the layer knows what replicas of its experts are like.
    """
    plan, ops = layer_context.plan, forward.once(_ops)
    who = type(strategy).__qualname__
    if strategy.cuda_graphs and not _is_plain(plan):
        raise ValueError(
            f"{strategy.keys.cuda_graphs} is true, but {who} plans replicas of experts or "
            "cuts tokens, so that passes differ; leave that out"
        )
    if plan.has_replicas and not may_copy:
        raise ValueError(_without_replicas(who))
    if may_copy and plan.is_joined and JOIN not in ops:
        raise ValueError(
            f"{who} plans replicas of experts, or ranks without any, but its schedules do not "
            "join these; let beside() say copied, or leave beside and schedules to the base "
            "class"
        )
    if may_copy and layer_context.frees_replicas and HAVE_AGAIN not in backward.once(_ops):
        raise ValueError(
            f"{who} plans to free replicas of experts after forward, but its schedules do not "
            "have them again in backward; let beside() say freed, or leave beside and "
            "schedules to the base class"
        )
    if layer_context.sends_once and not forward.once(_weighs_rows):
        raise ValueError(
            f"{who} sends each token once to an EP rank ({strategy.keys.sends_once} is true), "
            "but its schedules take no scores there; leave schedules to the base class, or "
            "say once in orders.routed_tasks"
        )
    if layer_context.layout.grid.etp_size > 1 and not _OF_EP_RANKS & ops:
        raise ValueError(
            f"the ranks of an ETP group split every expert, but the schedules of {who} have no "
            "exchange within ETP groups; set expert_sharding_size to 1, or leave schedules to "
            "the base class"
        )


def _is_plain(plan: Plan) -> bool:
    return plan.target.is_single and plan.num_chunks == 1 and plan.revise is None


def _ops(schedule: Schedule) -> frozenset[Op]:
    return frozenset(task.op for task in schedule.tasks)


def _weighs_rows(schedule: Schedule) -> bool:
    """Whether scores weigh rows before these come back."""
    return any(value.kind == ROW_SCORES for value in schedule.written)


def _without_replicas(name: str) -> str:
    return (
        f"{name} plans replicas of experts, but its uses() leaves out the communicator that "
        "they travel by; add ('ep', PARAM), or leave uses to the base class"
    )


def _names(ops: AbstractSet[Op]) -> str:
    return ", ".join(sorted(op.name for op in ops))


def _check_stages(
    own: Mapping[Op, Stage], strategy: Strategy, layer_context: LayerContext, hooks: Hooked
) -> None:
    """Raises ValueError where a strategy's own stages cannot be right."""
    for op, stage in own.items():
        name = f"{type(stage).__qualname__}, the strategy's own stage of {op.name!r},"
        if not isinstance(stage, Stage):
            raise ValueError(
                f"{name} lacks forward, backward or recut; give it all three "
                "(ds_moe_ext.schedule.stages.Stage)"
            )
        if op == EXPERT and layer_context.layout.grid.etp_size > 1:
            raise ValueError(
                f"{name} needs whole experts, but expert_sharding_size is "
                f"{layer_context.layout.grid.etp_size}; set it to 1"
            )
        if op in MOVES_ROWS and layer_context.plan.way is not Way.DIRECT:
            raise ValueError(
                f"{name} dispatches tokens itself, but {strategy.keys.ways} is "
                f"{layer_context.plan.way.value!r}; leave that out"
            )
        if op in MOVES_ROWS and hooks.codecs:
            raise ValueError(
                f"{name} dispatches tokens itself, so {', '.join(map(str, hooks.codecs))} of "
                "hooks would have no effect; leave that out"
            )


def _check_static_capacity(strategy: Strategy, capacity_factor: float | None) -> None:
    """Raises ValueError for what says otherwise which rows travel."""
    key, capacity = strategy.keys.static_capacity, strategy.static_capacity
    if capacity_factor is not None:
        raise ValueError(
            f"{key} is {capacity} and capacity_factor is {capacity_factor}; both limit the "
            "tokens of an expert from one rank: leave one of them out"
        )


def _check_graphs(
    own: Mapping[Op, Stage],
    strategy: Strategy,
    layer_context: LayerContext,
    hooks: Hooked,
    *,
    may_drop: bool,
) -> None:
    """Raises ValueError where a pass is not like the one before, or ranks meet in it."""
    key = strategy.keys.cuda_graphs
    if layer_context.layout.grid.size > 1:
        raise ValueError(
            f"{key} is true, but {layer_context.layout.grid.size} ranks exchange tokens, which "
            "our graphs cannot record; set ds_moe_ext.expert_parallel_size to 1, where every "
            f"rank can have all experts, or leave {key} out"
        )
    if strategy.static_capacity is None and may_drop:
        raise ValueError(
            f"{key} is true, but tokens may be dropped, and the number is known only in each "
            f"pass; set {strategy.keys.static_capacity}, or leave {key} out"
        )
    if strategy.has_roles or own:
        raise ValueError(
            f"{key} is true, but {type(strategy).__qualname__} gives ranks roles, or has "
            "stages of its own, which may differ from pass to pass; leave it out"
        )
    if hooks != NO_HOOKS:
        raise ValueError(
            f"{key} is true, but hooks must run in each pass, and a replayed pass runs no "
            "Python code; leave one of them out"
        )


def _check_send_once(
    own: Mapping[Op, Stage], strategy: Strategy, layer_context: LayerContext
) -> None:
    """Raises ValueError for what says otherwise which rows travel, or when they are weighed."""
    plan, names = layer_context.plan, _names(own.keys() & _OF_ROUTES)
    asked = (
        (
            strategy.static_capacity is not None,
            f"{strategy.keys.static_capacity} is {strategy.static_capacity}, which sends the "
            "same number of tokens to each expert, shared or not",
            "leave one of them out",
        ),
        (
            not plan.target.is_single or plan.revise is not None,
            "experts have replicas, which share the tokens of an expert one by one",
            "leave it out, or the replicas",
        ),
        (
            bool(names),
            f"the strategy has stages of its own for {names}, which expect one token per choice",
            "leave it out, or those stages",
        ),
    )
    for is_asked, why, remedy in asked:
        if is_asked:
            raise ValueError(
                f"{strategy.keys.sends_once} is true, so that {type(strategy).__qualname__} "
                f"sends each token once to an EP rank, but {why}; {remedy}"
            )


def check_transforms(
    own: Mapping[Op, Stage], strategy: Strategy, layer_context: LayerContext, hooks: Hooked
) -> None:
    """Raises ValueError where transforms cannot stand."""
    name, names = type(strategy).__qualname__, ", ".join(map(str, hooks.transforms))
    if strategy.has_roles:
        raise ValueError(
            f"hooks: {names}: {name} gives the ranks roles, whose stripes have no place for "
            "transforms; leave them out, or choose another strategy"
        )
    moving = _names(own.keys() & MOVES_ROWS)
    if moving:
        raise ValueError(
            f"hooks: {names}: {name} has stages of its own for {moving}, which know no "
            "transforms; leave these out, or those stages"
        )
    back = (BEFORE_COMBINE, AFTER_COMBINE)
    of_sums = ", ".join(str(each) for each in hooks.transforms if each.at in back)
    if layer_context.plan.sends_once and of_sums:
        raise ValueError(
            f"hooks: {of_sums}: {strategy.keys.sends_once} is true, so that rows are added up "
            "before they come back, and these would change sums; leave it out, or transform rows "
            "at before_dispatch and after_dispatch only"
        )


def _check_roles(own: Mapping[Op, Stage], strategy: Strategy, layer_context: LayerContext) -> None:
    """Raises ValueError for what stripes between ranks with roles cannot do."""
    name, plan = type(strategy).__qualname__, layer_context.plan
    if plan.has_replicas and not replicates(strategy):
        raise ValueError(_without_replicas(name))
    others = _names(own.keys() - _BETWEEN_SIDES)
    if others:
        raise ValueError(
            f"{name} has stages of its own for {others}, which ranks with roles do not "
            "run as tasks; give it none but of order, dispatch, expert and combine"
        )
