# SPDX-License-Identifier: Apache-2.0
"""The MoE layer that all strategies share: Gate, Order, Dispatch, Expert, Combine, Restore.

``RoutedExperts`` starts after a gate of the host's; ``MoELayer`` has its own. How the parts of a
pass work together:

- The strategy's plan says where experts compute, and its schedules in which order the tasks run
  (``planning/strategy.py``, ``schedule/orders.py``). ``RoutedExperts.program`` gives each task a
  stage, and makes one autograd node of them (``schedule/program.py``), once for all plans that need
  the same stages.
- Order counts rows and makes their route (``order.py``, ``route.py``); dispatch and combine move
  them by it (``dispatch.py``), within ETP groups that split experts too (``sharding.py``); experts
  compute (``expert.py``, ``feed_forward.py``); restore adds up (``route.py``).
- Replicas are launched as the host's block begins and joined before the experts (``replicas.py``).
- Hooks look at rows, change and encode them (``hooks.py``, ``transforms.py``, ``codecs.py``).
- What was routed and how long it took goes to ``observation.py``, which planners read.

Between steps ``take`` is given the next plan. Shape letters: T tokens, K choices, E experts, D
model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.core.comm import all_gather_counts, can_broadcast
from ds_moe_ext.core.layout import GRID, ParallelLayout
from ds_moe_ext.moe.codecs import Codec
from ds_moe_ext.moe.deduplicated import ByNodes
from ds_moe_ext.moe.dispatch import Combine, CombineOnce, Dispatch, OrderOnce, RestoreOnce, Wire
from ds_moe_ext.moe.expert import Aside, Expert, ExpertFunction, Local, Present
from ds_moe_ext.moe.feed_forward import FeedForwardExperts
from ds_moe_ext.moe.gate import GateFunction
from ds_moe_ext.moe.hooked import row_bytes, watched
from ds_moe_ext.moe.hooks import NO_HOOKS, Batch, Hook, Hooked, Moe
from ds_moe_ext.moe.joined_passes import BatchSignature, HostLag, JoinedPasses
from ds_moe_ext.moe.observation import Meter, RowsSeen, TasksSeen, Windows, notify
from ds_moe_ext.moe.order import Order, Padding, RankCoordinates, kind_of
from ds_moe_ext.moe.refusals import MOVES_ROWS, check_layer, check_plan, check_schedules
from ds_moe_ext.moe.replica_memory import Codecs, LayerCoordinates, Weights
from ds_moe_ext.moe.replicas import HaveAgain, Join, Replicas, started
from ds_moe_ext.moe.route import Restore
from ds_moe_ext.moe.sharding import EtpGather, EtpScatter, EtpWire
from ds_moe_ext.moe.transforms import (
    BEFORE_DISPATCH,
    END,
    START,
    differentiably,
    placed,
    transformed,
)
from ds_moe_ext.planning.exchange_costs import BY_NODES, Way
from ds_moe_ext.planning.prices import RowBytes
from ds_moe_ext.planning.strategy import Destination, LayerContext, Plan, Strategy, layer_tasks
from ds_moe_ext.schedule.executor import Mark, ScheduleStreams, streams_for
from ds_moe_ext.schedule.graphs import Graphs, GraphUse, Replayed, recorder_for
from ds_moe_ext.schedule.orders import QUEUED, LayerTasks, block, reductions
from ds_moe_ext.schedule.program import Program, in_backward
from ds_moe_ext.schedule.stages import LayerStages, Stage
from ds_moe_ext.schedule.stripes import A2E, E2A
from ds_moe_ext.schedule.task import (
    BEGIN_GRADIENTS,
    COMBINE,
    DISPATCH,
    ETP_GATHER,
    ETP_SCATTER,
    EXPERT,
    GATE,
    GRADIENTS,
    HAVE_AGAIN,
    INTER,
    INTRA,
    JOIN,
    LAUNCH,
    ORDER,
    PARAM,
    PLAN,
    RECALL,
    RESTORE,
    SEND_TO_OWNER,
    ChunkRange,
    Op,
    Task,
)


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """What a user may ask of a layer beside its strategy."""

    # rows an expert takes from one rank, over the mean; None drops nothing
    capacity_factor: float | None = None
    gate_may_drop: bool = False  # the gate marks choices that it dropped with -1
    # what is done to its rows, who is notified of them, and what they travel as
    hooks: Hooked = NO_HOOKS
    name: str = ""  # dotted module name, for hooks


SawSlice = Callable[[Mark, ScheduleStreams], None]
"""Notified when a stream began to reduce a slice, as it ends that."""


class GradientSlices(Protocol):
    """Dense gradients of the host, reduced in slices: those that are ready, in order."""

    def reduce(self, elements: int) -> None:
        """So many, now, in the stream that calls."""
        ...

    def begin(self, elements: int, saw: SawSlice) -> None:
        """So many, beside what the host computes next; ``saw`` is notified of when."""
        ...


class RoutedExperts:
    """The program of one layer by the present plan. Not a module: it owns no parameters.

    Args:
        strategy: how.
        layer_context: the layer's plan and groups.
        function: what an expert computes.
        options: capacity and the like.
        gate: a gate of ours to run in the same program; None where the host has its own.

    Attributes:
        rows: what was routed.
        tasks: times for a person to see.
        meter: times for planners to know, the host's too.
        lag: of the host behind a device.
        graph_use: how many passes are replayed; none if the strategy has no CUDA graphs.
        row_width: elements of a row, in the latest pass.
        row_dtype: their type.
        row_bytes: of a row on its way.
        function: what an expert computes.
        replicas: of other ranks' experts; None where the strategy makes none.
        windows: times of what the host computes between this layer and the one before.
        slices: what reduces dense gradients beside this layer; None where the host does it alone.
        plans_in_stream: a plan that says which comes after it has that made in a stream of the
            host's.
        turns: by which ranks run what others run; None where there has been no such block.
        is_hosts: the host runs the layer itself, and this is what is known of it.
    """

    def __init__(
        self,
        strategy: Strategy,
        layer_context: LayerContext,
        function: ExpertFunction,
        *,
        options: LayerOptions | None = None,
        gate: GateFunction | None = None,
    ) -> None:
        self.layer_context = layer_context
        target = layer_context.plan.target
        self.rows = RowsSeen(target.num_experts, target.num_ep_ranks)
        self.tasks, self.meter = TasksSeen(rows=self.rows), Meter(rows=self.rows)
        self.lag = HostLag()
        self.graph_use = GraphUse()
        self.row_width, self.row_dtype, self.row_bytes = 0, torch.float32, RowBytes(0, 0)
        self.replicas: Replicas | None = None
        self.plans_in_stream = False
        self._planned: Plan | None = None  # the next one, where a pass made it
        self.windows = Windows(layer_context.layer, (self.tasks, self.meter))
        self.slices: GradientSlices | None = None
        self.joined_passes: JoinedPasses | None = None
        self.is_hosts = False
        self._strategy = strategy
        self.function = function
        self._options = options or LayerOptions()
        self._hooks = self._options.hooks
        if strategy.static_capacity is not None:
            self.rows.gather = partial(by_ep_rank, layer_context.layout)
        own = strategy.stages(layer_context)
        check_layer(
            own,
            strategy,
            layer_context,
            self._hooks,
            capacity_factor=self._options.capacity_factor,
            gate_may_drop=self._options.gate_may_drop,
        )
        self._moves_rows_itself = not own.keys().isdisjoint(MOVES_ROWS)
        self._computes_itself = EXPERT in own
        self._gate = gate
        self._padding: Padding | None = None  # by the present plan
        self._started: Weights | None = None  # of the pass that has begun
        self._was_graded = False  # when that was made
        self._program: dict[torch.device, Program] = {}
        self._graphs: dict[torch.device, Graphs] = {}  # of these programs
        self._made_by: tuple[Any, ...] = ()  # the programs; see ``_shape``
        self._present: dict[torch.device, Present] = {}  # what orders rows in each of them
        self._schedules: LayerTasks | None = None

    def rows_are_like(self, x_TD: Tensor) -> None:
        like = x_TD.shape[-1], x_TD.dtype
        if like != (self.row_width, self.row_dtype):
            self.row_width, self.row_dtype = like
            self.row_bytes = row_bytes(self._hooks, x_TD.new_zeros(1, like[0]))

    @property
    def name(self) -> str:
        """As the model has it; its number where it has none."""
        return self._options.name or f"MoE layer {self.layer_context.layer}"

    @property
    def ways(self) -> tuple[Way, ...]:
        """Ways of rows between the EP ranks; see ``Strategy.ways``."""
        ways = self._strategy.ways
        is_flat = self.layer_context.layout.why_flat and not BY_NODES.isdisjoint(ways)
        return (Way.DIRECT,) if is_flat or self._moves_rows_itself else ways

    def allow_replicas(
        self, like: Weights, learns: Weights | None = None, device: torch.device | None = None
    ) -> None:
        """Say what the weights of an expert are like. Needed before a plan with replicas.

        Args:
            like: of any one expert; their shapes, type and device are looked at, then and later.
            learns: what gradients of these reach, so that it is asked whether experts are trained;
                None: themselves.
            device: where they will be computed, if the host has yet to move them there.
        """
        layout = self.layer_context.layout
        group = layout.group("ep", PARAM)
        in_float32 = self._strategy.sums_replicas_in_float32
        codecs = Codecs(self._hooks.of_replicas, self._hooks.of_replica_gradients)
        # A reduction adds up where it likes, so that nothing can be encoded on the way.
        device = device or like[0].device
        broadcasts = can_broadcast(device) and codecs.gradients is None
        layer, ep_rank, node_C = self.layer_context.layer, layout.index("ep"), layout.node_C
        coordinates = LayerCoordinates(layer, ep_rank, node_C, group, in_float32, broadcasts)
        has_host_stream = streams_for(device, overlaps=True).has_threads
        self.layer_context = replace(self.layer_context, has_host_stream=has_host_stream)
        self.replicas = Replicas(
            coordinates, self.layer_context.plan, like, (self.tasks, self.meter), codecs
        )
        self.replicas.learns = learns

    # Between steps.

    def take(self, plan: Plan, following: Plan | None = None) -> None:
        """Run by a new plan from now on. Call it between steps, on every rank.

        Args:
            plan: of this layer.
            following: of the next one, if there is one.
        """
        self._planned = self._started = None
        if plan is self.layer_context.plan and following is self.layer_context.following:
            return
        self.layer_context = replace(self.layer_context, plan=plan, following=following)
        check_plan({}, self._strategy, self.layer_context, self._hooks)
        if self.replicas is not None:
            self.replicas.take(plan)
        plan.share.prepare(self.layer_context.layout.index("ep"))
        self._schedules = None
        self._graphs.clear()
        if not self._program:
            return
        if self._shape() != self._made_by or self._strategy.stages(self.layer_context):
            # Stages of the strategy's own may look at all of a plan.
            self._program.clear()
            self._present.clear()
        for present in self._present.values():
            present.stage = self._ordering()

    def _shape(self) -> tuple[Any, ...]:
        """What of the present plan a program is made by, beside where rows go: plans of one shape
        share programs."""
        plan = self.layer_context.plan
        return (
            self.schedules,
            plan.way,
            (plan.forward_degree, plan.backward_degree),
            plan.reductions,
            (plan.has_replicas, plan.is_joined, self.layer_context.frees_replicas),
            (self.function, self.replicas, self.slices),
        )

    def successor(self, routed_CE: np.ndarray) -> Plan:
        """The plan that follows the present one: as it was made while rows travelled, or from all
        rows of the step, int64 ``[C, E]``; the present one if none does."""
        plan = self.layer_context.plan
        if self._planned is not None:
            return self._planned
        return plan if plan.successor is None else plan.successor(routed_CE)

    def prepare(self, plan: Plan) -> None:
        """Work out beforehand what a plan asks for, so that it is soon taken. While a step goes on,
        in any one thread."""
        if self.replicas is not None:
            self.replicas.prepare(plan)
        plan.share.prepare(self.layer_context.layout.index("ep"))

    def _plan_ahead(self, replicas: Replicas) -> None:
        """Make the plan of the next step while the rows of this one travel, where the host has a
        stream of its own. Else that would take Python's lock from the thread that issues all
        streams, just as the device waits for it; ``hosts/steps/planning.py`` has it made behind the
        last rows."""
        if not self.plans_in_stream or not replicas.is_last_pass() or not self.rows.counts:
            return
        self._planned = None  # it was of fewer rows
        planned = self.successor(self.rows.so_far_CE)
        self.prepare(planned)
        self._planned = planned

    def start_anew(self) -> None:
        """Other weights have been put in, as from a checkpoint."""
        self._started = None
        if self.replicas is not None:
            self.replicas.discard()

    def after_step(self) -> None:
        self._started = None
        if self.replicas is not None:
            self.replicas.forget()

    # A pass.

    def begin(self, weights: Weights, *, is_training: bool) -> None:
        """Make ready for a pass through replicas, so that pieces of them can be launched.

        Args:
            weights: those of the call that follows.
            is_training: as the rows of the call will be counted.
        """
        is_training = is_training and self._joined_passes is None
        self.rows.begin(is_training=is_training)  # before anybody looks at what is launched
        if self.replicas is not None and self.layer_context.plan.is_joined:
            prefetch = self.replicas.begin(weights, is_training=is_training)
            if self.is_hosts:
                return
            self._started = started(prefetch, weights)
            self._was_graded = torch.is_grad_enabled()

    @property
    def is_begun(self) -> bool:
        """Whether the coming pass has begun, in the mode that it runs in, and has its weights."""
        return self._started is not None and self._was_graded == torch.is_grad_enabled()

    @property
    def takes_stacks(self) -> bool:
        """Whether weights may come as one tensor of all slots a name."""
        return isinstance(self.function, FeedForwardExperts) and not self._computes_itself

    def launch(self) -> None:
        """Launch what is not yet on its way of the replicas of the pass that has begun. Collective
        over the EP ranks.

        Not needed, but what is launched here is hidden behind what the host computes until the
        layer is called.
        """
        if self.replicas is not None and self.replicas.coming is not None:
            self.replicas.coming.launch_rest()

    def block_begins(self, block_input: Tensor | None) -> tuple[Task, ...]:
        """Call it before the host computes what comes before the layer.

        Args:
            block_input: what the host computes from: its gradient ends that in backward.

        Returns:
            What is to be done about replicas now: tasks ``start`` and ``launch``.
        """
        if self._joined_passes is not None:
            self._joined_passes.comes_to(self.layer_context.layer)
        self.windows.block_begins(block_input)
        if self.replicas is None:
            return ()
        tasks, beside = self.schedules, self.schedules.beside
        if in_backward():  # computed again, a block for itself
            return block(tasks.layer, beside._replace(carried=False, carries=False))
        if beside.carried and not self.is_begun:
            return block(tasks.layer, beside._replace(carried=False))
        return tasks.block

    @property
    def _joined_passes(self) -> JoinedPasses | None:
        return (
            self.joined_passes
            if self.joined_passes is not None and self.joined_passes.is_open
            else None
        )

    def __call__(
        self, x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor, weights: tuple[Tensor, ...]
    ) -> Tensor:
        """Rows through their experts, after the host's gate. Collective over the EP ranks.

        Args:
            x_TD: hidden states.
            expert_TK: chosen experts, int64.
            score_TK: weight of each choice.
            weights: of the experts that this rank owns, as the expert function wants them;
                none are looked at if the pass has begun.

        Returns:
            ``[T, D]``.
        """
        joined_passes = self._joined_passes
        if joined_passes is not None:
            joined_passes.comes_to(self.layer_context.layer)
            joined_passes.agree_on_rows(BatchSignature.of(x_TD, expert_TK.shape[1]))
            self.rows.begin(is_training=False)
        y_TD, *_ = self.run(x_TD, (expert_TK, score_TK), weights)
        if joined_passes is not None:
            joined_passes.ends()
        return y_TD

    def run(self, x_TD: Tensor, given: tuple[Any, ...], weights: Weights) -> tuple[Tensor, ...]:
        """The program's outputs; ``given`` is what it takes between x and the expert weights."""
        return self.shown(self._run, x_TD, given, weights)

    def shown(
        self, run: Callable[..., tuple[Tensor, ...]], x_TD: Tensor, *given: Any
    ) -> tuple[Tensor, ...]:
        """What ``run(x_TD, *given)`` makes of hidden states; hooks are notified before and behind,
        and change what they are between."""
        if not self._hooks.observers:
            return self._transformed(run, x_TD, *given)
        self._hooks.notify(Hook.BEFORE_MOE_START, self._moe, Batch(x_TD.detach()))
        outputs = self._transformed(run, x_TD, *given)
        self._hooks.notify(Hook.BEFORE_MOE_END, self._moe, Batch(outputs[0].detach()))
        return outputs

    def _transformed(
        self, run: Callable[..., tuple[Tensor, ...]], x_TD: Tensor, *given: Any
    ) -> tuple[Tensor, ...]:
        """The same, with transforms at the start and the end."""
        at_start, at_end = (
            placed(self._hooks.transforms, coordinates) for coordinates in (START, END)
        )
        if not at_start and not at_end:
            return run(x_TD, *given)
        inner = differentiably(at_start, x_TD) if at_start else x_TD
        if self._gate is None and len(inner) != len(x_TD):
            raise ValueError(
                f"hooks: {', '.join(map(str, at_start))} make {len(inner)} tokens of "
                f"{len(x_TD)}, but the model's own router has chosen experts for those before; let "
                "them keep how many there are"
            )
        y_TD, *others = run(inner, *given)
        y_TD = differentiably(at_end, y_TD) if at_end else y_TD
        if y_TD.shape != x_TD.shape:
            raise ValueError(
                f"hooks: by {', '.join(map(str, (*at_start, *at_end)))} the layer's output is "
                f"{tuple(y_TD.shape)} for an input of {tuple(x_TD.shape)}; the model wants them "
                "alike: add what makes it so at before_moe_end"
            )
        return y_TD, *others

    @property
    def _moe(self) -> Moe:
        return Moe(self.layer_context.layer, self._options.name)

    def _run(self, x_TD: Tensor, given: tuple[Any, ...], weights: Weights) -> tuple[Tensor, ...]:
        self.rows_are_like(x_TD)
        self.windows.layer_begins(x_TD)
        if self.replicas is None or not self.layer_context.plan.is_joined:
            return self._program_or_graphs(x_TD.device)(x_TD, *given, weights)
        if not self.is_begun:
            self.begin(weights, is_training=self.rows.is_training)
        joined, self._started, prefetch = self._started, None, self.replicas.coming
        assert joined is not None and prefetch is not None
        outputs = self.program(x_TD.device)(x_TD, *given, joined)
        # Computed again: its backward is next.
        if self.schedules.beside.freed and outputs[0].requires_grad and not in_backward():
            prefetch.release()
        return outputs

    def _program_or_graphs(self, device: torch.device) -> Program | Graphs:
        program = self.program(device)
        recorder = recorder_for(device) if self._strategy.cuda_graphs else None
        if recorder is None or not self.rows.is_training:
            return program
        if device not in self._graphs:
            key = self._strategy.keys.cuda_graphs
            replayed = Replayed(program, recorder, self.rows, key)
            self._graphs[device] = Graphs(replayed, self.graph_use)
        return self._graphs[device]

    # The program, and what it is made of.

    @property
    def schedules(self) -> LayerTasks:
        """All that runs of the layer by the present plan; made once a plan."""
        if self._schedules is None:
            is_gated = self._gate is not None
            self._schedules = layer_tasks(self._strategy, self.layer_context, gated=is_gated)
        return self._schedules

    def describe(self) -> str:
        """The plan and the issue orders as text: equal on all ranks, or they would wait for each
        other in vain."""
        plan = self.layer_context.plan
        _, *orders = self.schedules
        placements = plan.owner.expert_CS, plan.target.expert_CS
        tables = (str(table.tolist()) for table in placements)
        about = f"rematerialize {plan.rematerialize}, revise {plan.revise is not None}, "
        about += f"carried {plan.carried}, reductions {plan.reductions}, way {plan.way.value}, "
        about += f"sends once {plan.sends_once}, codecs {self._hooks.codecs}, "
        about += f"transforms {self._hooks.transforms}, "
        about += f"replicas summed in float32 {self._strategy.sums_replicas_in_float32}"
        return "\n".join((*map(str, orders), *tables, plan.share.describe(), about))

    def program(self, device: torch.device) -> Program:
        """The program of the present plan; made once for all plans of its shape."""
        if device not in self._program:
            layer_context = self.layer_context
            self._made_by = self._shape()
            _, forward, backward = self.schedules
            may_copy = self.replicas is not None
            check_schedules(self._strategy, layer_context, forward, backward, may_copy=may_copy)
            # On one rank nothing is sent, so there is nothing to hide behind anything.
            alone = layer_context.layout.grid.size == 1
            chain = forward.is_chain and backward.is_chain
            streams = streams_for(device, overlaps=not (alone or chain))
            stages = self._stages(device, streams)
            self._program[device] = Program(
                forward,
                backward,
                LayerStages(stages, (self.tasks, self.meter), self.name),
                streams,
                layer_context.plan.num_chunks,
            )
        return self._program[device]

    def stages_between_sides(
        self, device: torch.device, *, counts: bool, is_graded: bool
    ) -> LayerStages:
        """Who does the layer's tasks where ranks have roles; see ``schedule/stripes.py``. Its own
        weights and choices are given to them, and capacity was kept already.

        Args:
            device: of the rows.
            counts: the rows count for the report.
            is_graded: the pass has gradients.
        """
        self.rows.begin(is_training=counts)
        layout = self.layer_context.layout
        kind = kind_of(self.layer_context.layer, is_training=counts, is_graded=is_graded)
        order = replace(
            self._order(layout.group("ep", A2E)),
            capacity_factor=None,
            gate_may_drop=True,
            on_rows=self.rows.add if counts else lambda *rows: None,
            revise=self.layer_context.plan.revise,
            kind=lambda: kind,
            has_sides=True,
        )
        straight = [Wire.between(layout, stream, device) for stream in (A2E, E2A)]
        there, back = straight
        if self._way_by_nodes() is not None:
            way = self.layer_context.plan.way
            there, back = (Wire.between(layout, e, device, way).by_nodes() for e in (A2E, E2A))
        exchanges = self._exchanges(there, back, self.rows.are_sent if counts else lambda: None)
        once = self.layer_context.sends_once
        ordering = OrderOnce(order, *straight) if once else order
        common = {ORDER: ordering, **exchanges, EXPERT: Expert(self.function)}
        return LayerStages(self._with_own(common), (self.tasks, self.meter), self.name)

    def _stages(self, device: torch.device, streams: ScheduleStreams) -> Mapping[Op, Stage]:
        """Of each op: the strategy's own or the common one, as hooks see it, in either queue."""
        stages = self._with_own(self._common_stages(device, streams))
        return {queued: stages[op] for op, queued in QUEUED.items() if op in stages} | stages

    def _with_own(self, common: Mapping[Op, Stage]) -> dict[Op, Stage]:
        stages = {**common, **self._strategy.stages(self.layer_context)}
        stages |= transformed(stages, self._hooks.transforms)
        return {**stages, **watched(stages, self._hooks, self._moe)}

    def _order(self, group: dist.ProcessGroup | None) -> Order:
        plan, strategy, layout, padding = (
            self.layer_context.plan,
            self._strategy,
            self.layer_context.layout,
            self._padding,
        )
        coordinates = RankCoordinates(layout.index("ep"), layout.index("esp"), layout.grid.etp_size)
        capacity = strategy.static_capacity
        if capacity is not None and (padding is None or padding.target is not plan.target):
            by_masks, roles = strategy.orders_by_masks, strategy.roles
            senders = None if roles is None else roles.attention_ep_ranks
            padding = Padding(capacity, plan.target, coordinates, by_masks, senders)
            self._padding = padding
        return Order(
            destination=plan.destination,
            coordinates=coordinates,
            group=group,
            capacity_factor=self._options.capacity_factor,
            gate_may_drop=self._options.gate_may_drop,
            on_rows=self._came_to_order if self._moves_rows_itself else self.rows,
            revise=None if plan.revise is None else self._revised,
            kind=lambda: kind_of(
                self.layer_context.layer,
                is_training=self.rows.is_training,
                is_graded=self.rows.is_graded,
            ),
            padding=padding,
            counts_pairs=self.layer_context.sends_once,
            by_nodes=self._way_by_nodes(),
            lag=self.lag,
            packs=self._packs_ahead,
        )

    def _revised(self, rows_CE: np.ndarray) -> Destination:
        """Where the rows of a pass go, now that they are known."""
        destination = self.layer_context.plan.destination_of(rows_CE)
        if destination.target is self.layer_context.plan.target or self.replicas is None:
            return destination
        return self.replicas.serving(destination) if self.rows.is_training else destination

    def _came_to_order(self, *rows: Any) -> None:
        """Where the strategy sends rows by stages of its own, which do not say when."""
        self.rows(*rows)
        self.rows.sent()

    @property
    def _packs_ahead(self) -> bool:
        """Whether dispatch sends a layer's tokens as they come to it, chunk by chunk."""
        plan, transforms = self.layer_context.plan, self._hooks.transforms
        is_changed = bool(placed(transforms, BEFORE_DISPATCH))
        is_cut_otherwise = plan.forward_degree != plan.num_chunks
        return not (is_changed or is_cut_otherwise or self._moves_rows_itself)

    def _way_by_nodes(self) -> ByNodes | None:
        """Where a token's row goes once to a node. Codecs encode rows, not sums made on the way."""
        layer_context, codecs = self.layer_context, self._hooks.codecs
        is_flat = layer_context.plan.way is not Way.BY_PLACES or layer_context.layout.why_flat
        if is_flat or codecs or not layer_context.sends_once:
            return None
        return ByNodes(layer_context.layout.nodes, layer_context.layout.index("ep"))

    def _ordering(self) -> Order:
        """What orders the rows of a pass by the present plan."""
        layout = self.layer_context.layout
        return self._order(None if layout.grid.size == 1 else layout.group(GRID, INTER))

    def _exchanges(self, there: Wire, back: Wire, sent: Callable[[], None]) -> dict[Op, Stage]:
        """Rows to the experts and back. Gradients go against the direction of their rows; ``sent``
        is called when all rows are there."""
        of_dispatch, of_combine = self._hooks.of_dispatch, self._hooks.of_combine
        combine = CombineOnce if self.layer_context.sends_once else Combine
        return {
            DISPATCH: Dispatch(*_coded(there, back, of_dispatch), sent),
            COMBINE: combine(*_coded(back, there, of_combine)),
        }

    def _common_stages(self, device: torch.device, streams: ScheduleStreams) -> Mapping[Op, Stage]:
        """One stage for each op that strategies share."""
        plan, layout = self.layer_context.plan, self.layer_context.layout
        wire = Wire.between(layout, INTER, device, plan.way)
        if self._way_by_nodes() is not None:
            wire = wire.by_nodes()
        present = self._present[device] = Present(self._ordering())
        stages: dict[Op, Stage] = {
            ORDER: present,
            **self._exchanges(wire, wire, self.rows.sent),
            EXPERT: Expert(self.function, plan.pieces),
            RESTORE: Restore(),
        }
        if self.layer_context.sends_once:
            straight = Wire.between(layout, INTER, device)
            stages |= {ORDER: OrderOnce(present, straight, straight), RESTORE: RestoreOnce()}
        if layout.grid.etp_size > 1:
            ep_rank = EtpWire(layout.group("esp", INTRA), wire.all_to_all)
            of_gather, of_scatter = self._hooks.of_gather, self._hooks.of_scatter
            stages[ETP_GATHER] = EtpGather(*_coded(ep_rank, ep_rank, of_gather))
            stages[ETP_SCATTER] = EtpScatter(*_coded(ep_rank, ep_rank, of_scatter))
        if self.replicas is not None:
            replicas = self.replicas
            stages[JOIN] = Join(replicas)
            stages[HAVE_AGAIN] = HaveAgain()
            stages[LAUNCH] = Aside(lambda chunk_range: replicas.launch_following())
            stages[SEND_TO_OWNER] = Aside(
                lambda chunk_range: replicas.send_to_owner(chunk_range.start)
            )
            stages[RECALL] = Aside(lambda chunk_range: replicas.recall_before())
            self.plans_in_stream = streams.has_threads
            stages[PLAN] = Aside(lambda chunk_range: self._plan_ahead(replicas))
        if self.slices is not None:
            slices, (within_moe, dense) = self.slices, plan.reductions
            stages[GRADIENTS] = Aside(
                lambda chunk_range: slices.reduce(within_moe[chunk_range.start])
            )

            def begin_slice(chunk_range: ChunkRange) -> None:
                (task,) = reductions(self.layer_context.layer, chunk_range)
                saw = partial(notify, (self.tasks, self.meter), task)
                slices.begin(dense[chunk_range.start - len(within_moe)], saw)

            stages[BEGIN_GRADIENTS] = Aside(begin_slice)
        if self._gate is not None:
            stages[GATE] = Local(self._gate, graded=(False, True, True))
        return stages


def by_ep_rank(layout: ParallelLayout, rows_X: Tensor) -> Tensor:
    """Rows that all ranks of each ETP group have, ``[X]`` to ``[C, X]``. Collective over the
    grid."""
    grid = layout.grid
    if grid.size == 1:
        return rows_X[None]
    rows_WX = all_gather_counts(rows_X, layout.group(GRID, INTER))
    return rows_WX.view(grid.num_ep_ranks, grid.etp_size, -1).sum(dim=1)


W = TypeVar("W", Wire, EtpWire)


def _coded(wire: W, back: W, codec: Codec | None) -> tuple[W, W]:
    """Of rows, and of their gradients."""
    if codec is None:
        return wire, back
    return wire.through(codec.of_rows), back.through(codec.of_gradients)


class MoEOutput(NamedTuple):
    y: Tensor  # output, of x's shape
    balance_loss: Tensor  # scalar, unscaled; 1 when routing is uniform
    z_loss: Tensor  # scalar, unscaled


class MoELayer(nn.Module):
    """An MoE layer with a gate of ours, all six sub-modules in one program.

    Args:
        gate_weights: of the gate, for softmax top-k one ``[E, D]``.
        gate: how it chooses.
        expert_weights: of the experts that this rank owns, as the expert function wants them.
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
        layer_context = LayerContext(plan, layout, layer)
        self.routed = RoutedExperts(strategy, layer_context, function, options=options, gate=gate)

    def forward(self, x: Tensor) -> MoEOutput:
        """``[..., D]`` to ``[..., D]``. Collective over the EP ranks."""
        self.routed.rows.begin(is_training=self.training)
        weights = tuple(self.expert_weights)
        y_TD, losses = self.routed.run(x.flatten(0, -2), (tuple(self.gate_weights),), weights)
        return MoEOutput(y_TD.view_as(x), losses[0], losses[1])
