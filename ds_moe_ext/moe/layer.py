"""The MoE layer that all strategies share: Gate, Order, Dispatch, Expert, Combine, Restore.

``RoutedExperts`` starts after a gate of the host's; ``MoELayer`` has its own. Shape letters: T
tokens, K choices, E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_moe_ext.layout import ParallelLayout
from ds_moe_ext.moe.copies import Copies, Join, Place
from ds_moe_ext.moe.dispatch import Combine, Dispatch, Wire
from ds_moe_ext.moe.expert import Expert, ExpertFunction
from ds_moe_ext.moe.gate import GateFunction
from ds_moe_ext.moe.local import Local
from ds_moe_ext.moe.observe import RowsSeen, TasksSeen
from ds_moe_ext.moe.order import Order, Restore
from ds_moe_ext.moe.slab import Weights
from ds_moe_ext.schedule.execute import Mark, lanes_for
from ds_moe_ext.schedule.program import Program, Stage
from ds_moe_ext.schedule.task import (
    ATTENTION,
    COMBINE,
    DISPATCH,
    EXPERT,
    GATE,
    INTER,
    JOIN,
    ORDER,
    PARAM,
    RESTORE,
    Op,
)
from ds_moe_ext.strategies.base import Destination, Plan, Site, Strategy


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """What a user may ask of a layer beside its strategy.

    Attributes:
        capacity_factor: rows an expert takes from one rank, over the mean; None drops nothing.
        gate_may_drop: the gate marks choices that it dropped with -1.
    """

    capacity_factor: float | None = None
    gate_may_drop: bool = False


class RoutedExperts:
    """The program of one layer by the present plan. Not a module: it owns no parameters.

    Args:
        strategy: how.
        site: the layer's plan and groups.
        function: what an expert computes.
        options: capacity and the like.
        gate: a gate of ours to run in the same program; None where the host has its own.

    Attributes:
        rows: what was routed.
        tasks: times for a person to see.
        meter: times for planners to know.
        row_bytes: of the latest pass.
        copies: of other ranks' experts; None where the strategy makes none.
    """

    def __init__(
        self,
        strategy: Strategy,
        site: Site,
        function: ExpertFunction,
        *,
        options: LayerOptions | None = None,
        gate: GateFunction | None = None,
    ) -> None:
        self.site = site
        target = site.plan.target
        self.rows = RowsSeen(target.num_experts, target.num_cells)
        self.tasks, self.meter = TasksSeen(), TasksSeen()
        self.row_bytes = 0
        self.copies: Copies | None = None
        self._strategy = strategy
        self._function = function
        self._options = options or LayerOptions()
        self._gate = gate
        self._started: Weights | None = None
        self._begun: Mark | None = None  # when attention began, if anybody asks
        self._program: dict[torch.device, Program] = {}

    def allow_copies(self, like: Weights) -> None:
        """Say what the weights of an expert are like. Needed before a plan with copies.

        Args:
            like: of any one expert; their shapes, type and device are looked at, then and later.
        """
        layout = self.site.layout
        group = layout.group("ep", PARAM)
        place = Place(self.site.layer, layout.index("ep"), layout.node_C, group)
        self.copies = Copies(place, self.site.plan, like, (self.tasks, self.meter))

    def take(self, plan: Plan) -> None:
        """Run by a new plan from now on. Call it between steps, on every rank."""
        self.site = replace(self.site, plan=plan)
        if self.copies is not None:
            self.copies.take(plan)
        plan.share.prepare(self.site.layout.index("ep"))
        self._program.clear()

    def start_anew(self) -> None:
        """Other weights have been put in, as from a checkpoint."""
        if self.copies is not None:
            self.copies.discard()

    def after_step(self) -> None:
        """The weights have changed."""
        if self.copies is not None:
            self.copies.forget()

    def start(self, weights: Weights, *, is_training: bool) -> None:
        """Launch what a pass needs beside its rows, before the host computes what comes before it.

        Not needed, but what is launched here is hidden behind what the host computes until the
        layer is called. Collective over the cells.

        Args:
            weights: those of the call that follows.
            is_training: as the rows of the call will be counted.
        """
        if self.copies is None:
            return
        if self.site.plan.is_joined:
            self._started = self.copies.start(weights, is_training=is_training)
        if self.copies.is_watched:
            self._begun = self.copies.lanes.mark()

    def __call__(
        self, x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor, weights: tuple[Tensor, ...]
    ) -> Tensor:
        """Rows through their experts, after the host's gate. Collective over the cells.

        Args:
            x_TD: hidden states.
            expert_TK: chosen experts, int64.
            score_TK: weight of each choice.
            weights: of the experts that this rank is home to, as the expert function wants them.

        Returns:
            ``[T, D]``.
        """
        y_TD, *_ = self.run(x_TD, (expert_TK, score_TK), weights)
        return y_TD

    def run(self, x_TD: Tensor, given: tuple[Any, ...], weights: Weights) -> tuple[Tensor, ...]:
        """The program's outputs; ``given`` is what it takes between x and the expert weights."""
        self.row_bytes = x_TD.shape[-1] * x_TD.element_size()
        if self.copies is not None and self._begun is not None:
            self.copies.saw(ATTENTION, self._begun)
            self._begun = None
        if self.copies is None or not self.site.plan.is_joined:
            return self.program(x_TD.device)(x_TD, *given, weights)
        if self._started is None:
            self._started = self.copies.start(weights, is_training=self.rows.is_training)
        weights, self._started = self._started, None
        flight = self.copies.flight
        y_TD, *others = self.program(x_TD.device)(x_TD, *given, weights)
        return self.copies.finish(flight, y_TD), *others

    def program(self, device: torch.device) -> Program:
        """The program of the present plan; made once a plan."""
        if device not in self._program:
            site = self.site
            forward, backward = self._strategy.schedules(
                site.plan, site.layer, gated=self._gate is not None
            )
            stages = {**self._common_stages(device), **self._strategy.stages(site)}
            # On one rank nothing is sent, so there is nothing to hide behind anything.
            alone = site.layout.grid.num_cells * site.layout.grid.cell_size == 1
            chain = forward.is_chain and backward.is_chain
            lanes = lanes_for(device, overlaps=not (alone or chain))
            self._program[device] = Program(
                forward, backward, stages, lanes, site.plan.num_chunks, (self.tasks, self.meter)
            )
        return self._program[device]

    def describe(self) -> str:
        """The plan and the issue orders as text: equal on all ranks, or they would wait for each
        other in vain."""
        plan = self.site.plan
        orders = self._strategy.schedules(plan, self.site.layer, gated=self._gate is not None)
        placements = plan.home.expert_CS, plan.target.expert_CS
        tables = (str(table.tolist()) for table in placements)
        about = f"rematerialize {plan.rematerialize}, revise {plan.revise is not None}"
        return "\n".join((*map(str, orders), *tables, plan.share.describe(), about))

    def _common_stages(self, device: torch.device) -> Mapping[Op, Stage]:
        """One stage for each op that strategies share."""
        plan, layout = self.site.plan, self.site.layout
        wire = Wire.between(layout, INTER, device)
        stages: dict[Op, Stage] = {
            ORDER: Order(
                destination=Destination(plan.target, plan.share),
                cell=layout.index("ep"),
                group=wire.group,
                capacity_factor=self._options.capacity_factor,
                gate_may_drop=self._options.gate_may_drop,
                on_rows=self.rows,
                revise=plan.revise,
            ),
            DISPATCH: Dispatch(wire, wire),
            EXPERT: Expert(self._function, recompute=plan.forward_degree != plan.backward_degree),
            COMBINE: Combine(wire, wire),
            RESTORE: Restore(),
        }
        if self.copies is not None:
            stages[JOIN] = Join(self.copies)
        if self._gate is not None:
            stages[GATE] = Local(self._gate, graded=(False, True, True))
        return stages


class MoEOutput(NamedTuple):
    """What ``MoELayer`` returns.

    Attributes:
        y: output, of x's shape.
        balance_loss: scalar, unscaled; 1 when routing is uniform.
        z_loss: scalar, unscaled.
    """

    y: Tensor
    balance_loss: Tensor
    z_loss: Tensor


class MoELayer(nn.Module):
    """An MoE layer with a gate of ours, all six sub-modules in one program.

    Args:
        gate_weights: of the gate, for softmax top-k one ``[E, D]``.
        gate: how it chooses.
        expert_weights: of the experts that this rank is home to, as the expert function wants them.
        function: what an expert computes.
        strategy: how the layer runs.
        plan: its present plan.
        layout: the ranks' grid and groups.
        layer: number of the layer, for names in schedules and traces.
        options: capacity and the like.
    """

    def __init__(
        self,
        gate_weights: nn.ParameterList,
        expert_weights: nn.ParameterList,
        *,
        gate: GateFunction,
        function: ExpertFunction,
        strategy: Strategy,
        plan: Plan,
        layout: ParallelLayout,
        layer: int = 0,
        options: LayerOptions | None = None,
    ) -> None:
        super().__init__()
        self.gate_weights = gate_weights
        self.expert_weights = expert_weights
        site = Site(plan, layout, layer)
        self.routed = RoutedExperts(strategy, site, function, options=options, gate=gate)

    def forward(self, x: Tensor) -> MoEOutput:
        """``[..., D]`` to ``[..., D]``. Collective over the cells."""
        self.routed.rows.begin(is_training=self.training)
        weights = tuple(self.expert_weights)
        y_TD, losses = self.routed.run(x.flatten(0, -2), (tuple(self.gate_weights),), weights)
        return MoEOutput(y_TD.view_as(x), losses[0], losses[1])
