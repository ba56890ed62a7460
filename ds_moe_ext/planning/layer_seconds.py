# SPDX-License-Identifier: Apache-2.0
"""Seconds of one layer's tasks in every EP rank, and of what the host takes to issue them. Pure.

``Flow`` says where the rows of a layer go under its plan, ``layer_seconds`` what each of its tasks
takes then, in a few classes of EP ranks. A device starts what the host has issued: a host that is
slower than the devices shows as a stream of its own that everything else waits for (``with_host``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ds_moe_ext.core.hardware import Hardware
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.planning.layer_costs import BACKWARD, FORWARD
from ds_moe_ext.planning.layer_pipelines import HostSeconds
from ds_moe_ext.planning.prices import FREE, AllReduce, Line, between_nodes, met_share
from ds_moe_ext.planning.strategy import CostGroup, Plan
from ds_moe_ext.schedule.task import (
    ATTENTION,
    COMBINE,
    DISPATCH,
    ETP_GATHER,
    ETP_SCATTER,
    EXPERT,
    GATHER,
    GRADIENTS,
    JOIN,
    LAUNCH,
    ORDER,
    RESTORE,
    START,
    ChunkRange,
    Op,
    Schedule,
    Stream,
    Task,
)

ISSUING = Stream("issuing")
ISSUE = Op("issue", ISSUING)
_OF_REPLICAS = (LAUNCH.name, JOIN.name, START.name)


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """Seconds that the host takes to issue one task, by the name of its op; others take none."""

    forward: Mapping[str, float] = field(default_factory=dict)  # in forward
    backward: Mapping[str, float] = field(default_factory=dict)  # in backward

    def seconds(self, task: Task) -> float:
        side = self.backward if task.adjoint_of else self.forward
        return side.get(task.op.name, 0.0)

    def with_forward_again(self) -> HostTimes:
        """Where layers run again in backward: all of forward but what is done about replicas, which
        are there."""
        again = {name: s for name, s in self.forward.items() if name not in _OF_REPLICAS}
        # Counts have no adjoint: their time goes with that of what the host computes itself.
        again[ATTENTION.name] = again.get(ATTENTION.name, 0.0) + again.pop(ORDER.name, 0.0)
        names = dict.fromkeys((*self.backward, *again))
        both = {name: self.backward.get(name, 0.0) + again.get(name, 0.0) for name in names}
        return replace(self, backward=both)

    def scaled(self, times: float) -> HostTimes:
        """Of a host that takes so many times as long."""
        sides = (self.forward, self.backward)
        forward, backward = ({name: times * s for name, s in side.items()} for side in sides)
        return HostTimes(forward=forward, backward=backward)

    @property
    def is_nothing(self) -> bool:
        """Whether no task takes any."""
        return not any((*self.forward.values(), *self.backward.values()))


NO_HOST = HostTimes(forward=MappingProxyType({}), backward=MappingProxyType({}))


def with_host(schedule: Schedule, host: HostTimes) -> tuple[Schedule, Mapping[int, float]]:
    """The same step with a task ISSUE before each that takes the host time, which waits for it, and
    seconds of these by their ``id``. The host waits once in each layer's forward: for the counts of
    its rows, which ORDER brings."""
    if host.is_nothing:
        return schedule, {}
    tasks: list[Task] = []
    after: list[tuple[int, ...]] = []
    moved: list[int] = []  # where each task now stands
    seconds: dict[int, float] = {}
    waits: tuple[int, ...] = ()
    for task, waited in zip(schedule.tasks, schedule.after):
        host_s = host.seconds(task)
        own = tuple(moved[place] for place in waited)
        if host_s:
            issue = Task(ISSUE, task.layer, ChunkRange(0, 1), (), ())
            seconds[id(issue)], own = host_s, (*own, len(tasks))
            tasks.append(issue)
            after.append(waits)
            waits = ()
        moved.append(len(tasks))
        if task.op == ORDER and not task.adjoint_of:
            waits = (len(tasks),)
        if task.adjoint_of:
            there = tuple(moved[place] for place in task.adjoint_of)
            task = Task(task.op, task.layer, task.chunk_range, task.reads, task.writes, there)  # noqa: PLW2901
        tasks.append(task)
        after.append(own)
    by_host = replace(schedule, tasks=tuple(tasks))
    vars(by_host)["after"] = tuple(after)  # known by now; no value says who waits for the host
    return by_host, seconds


_US = 1e-6

# A thread of a CPU that issues to no device; measured once, of all strategies.
CPU_HOST = HostTimes(
    forward={
        "attention": 320 * _US,
        "order": 350 * _US,
        "dispatch": 35 * _US,
        "expert": 35 * _US,
        "combine": 30 * _US,
        "restore": 25 * _US,
        "join": 350 * _US,
        "launch": 90 * _US,
        "start": 30 * _US,
        "etp_gather": 35 * _US,
        "etp_scatter": 35 * _US,
    },
    backward={
        "attention": 460 * _US,  # with what a pass of a layer takes in backward
        "dispatch": 20 * _US,
        "expert": 25 * _US,
        "combine": 20 * _US,
        "restore": 15 * _US,
        "join": 100 * _US,
        "send_to_owner": 90 * _US,
        "recall": 90 * _US,
        "have_again": 60 * _US,
        "etp_gather": 30 * _US,
        "etp_scatter": 30 * _US,
        "begin_gradients": 40 * _US,
    },
)

# The host of one H200, whose operations of torch take 9 us each to issue. Not measured task by
# task: sums of tasks are those of 28 November 2026 (docs/results.md, host time), forward and
# backward with attention: 5.48 ms a layer under ``ep``, 1.72 more for a chunk, 1.8 to 2.1 more with
# replicas; within these sums the parts are as in the table above.
GPU_LAUNCH_S = 9 * _US
GPU_HOST = HostTimes(
    forward={
        "attention": 1050 * _US,
        "order": 1150 * _US,
        "dispatch": 290 * _US,
        "expert": 290 * _US,
        "combine": 250 * _US,
        "restore": 170 * _US,
        "join": 870 * _US,
        "launch": 225 * _US,
        "start": 75 * _US,
        "etp_gather": 290 * _US,
        "etp_scatter": 290 * _US,
    },
    backward={
        "attention": 1560 * _US,
        "dispatch": 180 * _US,
        "expert": 220 * _US,
        "combine": 180 * _US,
        "restore": 140 * _US,
        "join": 250 * _US,
        "send_to_owner": 225 * _US,
        "recall": 225 * _US,
        "have_again": 150 * _US,
        "etp_gather": 260 * _US,
        "etp_scatter": 260 * _US,
        "begin_gradients": 100 * _US,
    },
)

CPU_NAME = "CPU"
"""How names of devices end, where ranks compute on their hosts."""


def host_of(hardware: Hardware) -> HostTimes:
    """What the host of a cluster's devices takes: as measured on one H200, scaled by what the file
    says that an operation takes to issue."""
    if hardware.device.name.endswith(CPU_NAME):
        return CPU_HOST
    times = (hardware.host_launch_s or GPU_LAUNCH_S) / GPU_LAUNCH_S
    return GPU_HOST.scaled(times)


_CHUNKS = ("dispatch", "expert", "combine", "restore")
_SPLIT = ("etp_gather", "etp_scatter")  # of EP ranks whose ranks split experts
OF_CHUNKS = (*_CHUNKS, *_SPLIT)
"""Tasks that each chunk has."""


def issued(
    host: HostTimes, *, is_split: bool, chunk_s: tuple[float, float] | None = None
) -> tuple[HostSeconds, HostSeconds]:
    """As planners of pipelines want it: forward, and backward.

    Args:
        host: of each task.
        is_split: the ranks of an ETP group split experts.
        chunk_s: what the tasks of a chunk took on the host that is planned for, forward and
            backward: it is slower by as much in all else. None: it is as quick.
    """
    names = OF_CHUNKS if is_split else _CHUNKS

    def side(times: Mapping[str, float], seen_s: float | None) -> HostSeconds:
        layer_s = times.get("attention", 0.0) + times.get("order", 0.0)
        of_chunk_s = sum(times.get(name, 0.0) for name in names)
        if seen_s is None:
            return HostSeconds(layer_s, of_chunk_s)
        return HostSeconds(layer_s * seen_s / of_chunk_s, seen_s)

    forward_s, backward_s = chunk_s or (None, None)
    return side(host.forward, forward_s), side(host.backward, backward_s)


NO_REDUCTION = AllReduce(0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class TaskCosts:
    """What tasks cost that a job's prices of rows and replicas leave out."""

    # of one exchange between EP ranks, however little travels, where links were not measured
    exchange_start_s: float = 0.0
    # to read the weights of one expert from memory: experts take no less, however few rows they
    # have
    weight_s: float = 0.0
    expert_start_s: float = 0.0  # of one call of a rank's experts
    row_move_s: float = 0.0  # to put one row in another place in memory
    etp_gather: Line = FREE  # inside an ETP group, by bytes of the rows that one rank ends up with
    etp_scatter: Line = FREE  # likewise, by bytes of the rows that one rank gives
    all_reduce: AllReduce = NO_REDUCTION  # of dense gradients
    # times of forward that backward takes in experts: one more where forward runs again there, its
    # exchanges with it
    backward_rounds: int = BACKWARD


@dataclass(frozen=True, eq=False)
class Flow:
    """Where the rows of one layer go in one pass."""

    target: Placement  # who holds what
    computed_C: np.ndarray  # rows that each EP rank computes, int64
    # seconds that each EP rank takes in one exchange of them all, but for its start, float64
    exchange_s_C: np.ndarray
    is_far_C: np.ndarray  # whether that is for its node's card, else for its own link
    all_stay: bool = False  # no row leaves its EP rank, whatever is routed, and none are exchanged
    added_s: float = 0.0  # of replicas that are sent once rows are known, there and back

    @classmethod
    def of(cls, plan: Plan, rows_CE: np.ndarray, node_C: np.ndarray, cost_group: CostGroup) -> Flow:
        """Of the rows that came, int64 ``[C, E]``, which may add replicas to the plan's. Tokens
        sent once count once for each EP rank, as if all sets of experts were as likely."""
        destination = plan.destination_of(rows_CE)
        (target, rule), all_stay = destination, destination.all_stay
        added_s = 0.0 if target is plan.target else cost_group.added_s(plan, target, node_C)
        sent_CC = rule.of_rows(rows_CE).rows_between(rows_CE[:, None, :])[0]
        computed_C = sent_CC.sum(axis=0)
        row_bytes, prices = cost_group.prices.row_bytes, cost_group.prices
        if plan.sends_once:
            rows_C1 = rows_CE.sum(axis=1, keepdims=True)
            share_CC = sent_CC / rows_C1.clip(1)
            met_CC = met_share(share_CC, rows_CE.shape[1], cost_group.top_k)
            sent_CC = rows_C1 / cost_group.top_k * met_CC
        if cost_group.links is not None:  # the last to come makes all wait
            busiest_s = cost_group.links.exchange_fit.factor * cost_group.links.link_s(
                row_bytes * sent_CC, node_C
            )
            all_C = np.ones(len(node_C), dtype=bool)
            return cls(target, computed_C, busiest_s * all_C, all_C, all_stay, added_s)
        leaving_CC = sent_CC - np.diag(np.diag(sent_CC))
        near_C = np.maximum(leaving_CC.sum(axis=0), leaving_CC.sum(axis=1))
        crossing_VV = between_nodes(sent_CC, node_C)
        far_V = np.maximum(crossing_VV.sum(axis=0), crossing_VV.sum(axis=1))
        far_C = far_V[np.unique(node_C, return_inverse=True)[1]]
        near_s_C = near_C * row_bytes / prices.intra_bytes_per_s
        far_s_C = far_C * row_bytes / prices.inter_bytes_per_s
        is_far_C = far_s_C > near_s_C
        slowest_s_C = np.maximum(near_s_C, far_s_C)
        return cls(target, computed_C, slowest_s_C, is_far_C, all_stay, added_s)


class Timing(NamedTuple):
    """Seconds of one kind of task in each class of EP ranks, by how much of a layer's rows it
    has."""

    start_s: float  # of any
    whole_s_K: Sequence[float]  # of all rows, besides
    least_s_K: Sequence[float] = ()  # of any, at least; none for 0

    def seconds(self, place: int, part: float) -> float:
        seconds = self.start_s + part * self.whole_s_K[place]
        return max(seconds, self.least_s_K[place]) if self.least_s_K else seconds

    def times(self, rounds: int) -> Timing:
        return Timing(
            rounds * self.start_s,
            [rounds * seconds for seconds in self.whole_s_K],
            [rounds * seconds for seconds in self.least_s_K],
        )


Side = tuple[str, bool]
"""An op by name, and whether it is backward's."""


@dataclass(frozen=True, eq=False)
class LayerSeconds:
    """Seconds of the tasks of one layer, by class of EP ranks."""

    by_rows: Mapping[Side, Timing]  # of tasks on rows
    # of tasks on replicas and on dense gradients, piece by piece
    by_piece: Mapping[Side, Sequence[float]]
    # in exchanges the node's card takes longest, else the EP rank's own link
    is_far_K: Sequence[bool]
    expert_s_K: Sequence[float]  # experts on all rows, forward
    mean_expert_s: float  # the mean of all EP ranks
    restore_s: float  # rows put back into the order of tokens, forward
    num_chunks: int  # finest chunks

    def seconds(self, place: int, task: Task) -> float:
        """Of one task in one class of EP ranks."""
        side = task.op.name, bool(task.adjoint_of)
        if side in self.by_rows:
            part = (task.chunk_range.stop - task.chunk_range.start) / self.num_chunks
            return self.by_rows[side].seconds(place, part)
        return sum(self.by_piece.get(side, ())[task.chunk_range.start : task.chunk_range.stop])


def layer_seconds(
    plan: Plan,
    flow: Flow,
    cost_group: CostGroup,
    costs: TaskCosts,
    *,
    node_C: np.ndarray,
    etp_size: int,
    classes: int,
) -> LayerSeconds:
    """Of one layer, whose rows flow so.

    EP ranks are put into ``classes`` where there are more of them, four or more: the busiest, the
    one that computes longest, the one whose rows travel longest, the idlest, and others between in
    even steps. Each stands in every layer for those that are as busy there, whichever they are.
    """
    row_s_C = np.array(cost_group.row_s_C) if cost_group.row_s_C else cost_group.prices.row_s
    forward_s_C = row_s_C / (FORWARD + costs.backward_rounds)
    by_rows_s_C = flow.computed_C * (forward_s_C + 2 * costs.row_move_s)
    least_s_C = costs.expert_start_s + flow.target.holds_EC.sum(axis=0) * costs.weight_s
    expert_s_C = np.maximum(by_rows_s_C, least_s_C)
    place_K = _places(expert_s_C, flow.exchange_s_C, classes)
    none = [0.0] * len(place_K)
    start_s = (
        costs.exchange_start_s if cost_group.links is None else cost_group.links.exchange_start_s
    )
    counts = Timing(start_s if len(node_C) > 1 else 0.0, none)
    exchange = Timing(0.0 if flow.all_stay else counts.start_s, flow.exchange_s_C[place_K].tolist())
    experts = [
        Timing(
            0.0, (rounds * by_rows_s_C[place_K]).tolist(), (rounds * least_s_C[place_K]).tolist()
        )
        for rounds in (FORWARD, costs.backward_rounds)
    ]
    # Back as often as there: forward's own once more where it runs again.
    sent_back = FORWARD + costs.backward_rounds - BACKWARD
    restore_s = float(flow.computed_C.mean()) / etp_size * costs.row_move_s
    restore = Timing(0.0, [restore_s] * len(place_K))
    bytes_K = flow.computed_C[place_K] * (cost_group.etp_row_bytes or cost_group.prices.row_bytes)
    gather, scatter = (
        Timing(line.alpha_s, (line.beta_s * bytes_K).tolist())
        for line in (costs.etp_gather, costs.etp_scatter)
    )
    copied, reduced = (
        _copied(plan, cost_group, node_C, is_back=is_back) for is_back in (False, True)
    )
    slices = (*plan.reductions.within_moe, *plan.reductions.dense)
    is_back = True
    by_rows = {
        (ORDER.name, not is_back): counts._replace(start_s=counts.start_s + flow.added_s),
        (EXPERT.name, not is_back): experts[0],
        (EXPERT.name, is_back): experts[1],
    }
    for op, there, back in (
        (DISPATCH, exchange, exchange),
        (COMBINE, exchange, exchange),
        (RESTORE, restore, restore),
        (ETP_GATHER, gather, scatter),
        (ETP_SCATTER, scatter, gather),
    ):
        by_rows[op.name, not is_back] = there
        by_rows[op.name, is_back] = back.times(sent_back)
    return LayerSeconds(
        by_rows=by_rows,
        by_piece={
            (GATHER.name, not is_back): copied,
            (GATHER.name, is_back): reduced,
            (GRADIENTS.name, not is_back): [costs.all_reduce.seconds(each) for each in slices],
        },
        is_far_K=flow.is_far_C[place_K].tolist(),
        expert_s_K=expert_s_C[place_K].tolist(),
        mean_expert_s=float(expert_s_C.mean()),
        restore_s=restore_s,
        num_chunks=plan.num_chunks,
    )


def _places(expert_s_C: np.ndarray, exchange_s_C: np.ndarray, classes: int) -> np.ndarray:
    """EP ranks that stand for all, the busiest first, int64 ``[K]``."""
    num_ep_ranks = len(expert_s_C)
    if num_ep_ranks <= classes:
        return np.arange(num_ep_ranks)
    by_busy_C = np.argsort(-(expert_s_C + 2 * exchange_s_C), kind="stable")
    longest = (by_busy_C[0], by_busy_C[-1], expert_s_C.argmax(), exchange_s_C.argmax())
    even = by_busy_C[np.linspace(0, num_ep_ranks - 1, classes).round().astype(int)]
    chosen = list(dict.fromkeys(map(int, (*longest, *even))))[:classes]
    kept: np.ndarray = by_busy_C[np.isin(by_busy_C, chosen)]
    return kept


def _copied(
    plan: Plan, cost_group: CostGroup, node_C: np.ndarray, *, is_back: bool
) -> tuple[float, ...]:
    """Seconds of each piece of the replicas that were planned."""
    if plan.carried is None:
        return (cost_group.replicas_s(plan.owner, plan.target, node_C), 0.0)
    pieces = plan.pieces_of(plan.carried.reductions if is_back else plan.carried.gathers)
    return tuple(cost_group.replicas_s(plan.owner, piece, node_C) for piece in pieces)
