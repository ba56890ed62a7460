# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext plan``: planners as jobs in JSON.

A job is a dataclass, read by ``strict``: a field is a key, its type the rule. ``ALGORITHMS`` has
the function of each, from the job to its plan, an object of JSON. A new algorithm is a dataclass,
a function that takes it, and a row there; docs/planners.md says what the keys are.

Seconds may be any other unit of time, the same in a whole job. An EP rank is one rank here, but in
``priced-share``. Shape letter: C EP ranks.
"""

from __future__ import annotations

import argparse
import json
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from ds_moe_ext.commands.price import add_job
from ds_moe_ext.core.hardware import Hardware, Link, read_hardware
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import NearestReplica
from ds_moe_ext.files.documents import bytes_of, parsed
from ds_moe_ext.planning.fssdp_planner import materialize, shard
from ds_moe_ext.planning.layer_costs import BlockPrices, LayerCosts
from ds_moe_ext.planning.layer_pipelines import SOLVERS
from ds_moe_ext.planning.pipeline_degrees import BackwardLayer, best_degree, partition_gradients
from ds_moe_ext.planning.priced_plans import Routed, divide, in_whole_rows, sent_rows
from ds_moe_ext.planning.prices import AllReduce, LinearCost, RowPrices
from ds_moe_ext.planning.prophet_planner import BlockPlan, place_experts, shadow_experts
from ds_moe_ext.planning.zebra_costs import (
    MOST_STRIPES,
    LayerTimes,
    MoeModel,
    RankClass,
    TwoClasses,
    ZebraShape,
    card_of,
)
from ds_moe_ext.planning.zebra_planner import (
    VARIANTS,
    PricedShape,
    RefusedShape,
    Stock,
    ZebraGroup,
    assign_experts,
    best_shape,
    price_shapes,
)
from ds_moe_ext.strict import MOST, Bounds, nearest, one_of, read_record

MIXED_CLUSTER = "mixed-cluster"  # which takes files and names, no job in JSON
STANDARD_INPUT = "-"  # where a path is asked for

MOST_ROWS = 2**32
MOST_PAIRS = 2**20  # of expert and rank; rows in parts times these fit into 64 bits
MOST_COST = 1e18  # bytes, seconds, or either's rate: products of these stay finite
MOST_LAYERS = 2**10
MOST_SIZE = 2**24  # of a model, and of samples
MOST_SHAPES = 2**8
PARTS = 2**10  # of a row: loads that are no whole rows, as a mean of steps, are rounded to these
WEIGHT_BYTES = 16.0  # half-precision weight and gradient, and the optimizer's three in fp32

Whole = Annotated[int, Bounds(0, MOST)]
Number = Annotated[int, Bounds(1)]
Rows = Annotated[int, Bounds(0, MOST_ROWS)]
Load = Annotated[float, Bounds(0, MOST_ROWS)]  # may be a mean of steps
Cost = Annotated[float, Bounds(0, MOST_COST)]
Rate = Annotated[float, Bounds(1e-9, MOST_COST)]  # of bytes or rows in a second
Positive = Annotated[float, Bounds(1e-15, MOST_COST)]  # seconds of a token, or share of a rate
Degree = Annotated[int, Bounds(1, 2**12)]  # chunks of a layer
Elements = Annotated[int, Bounds(0, 2**40)]  # of gradients; quanta x layers x these fit in 64 bits
Size = Annotated[int, Bounds(1, MOST_SIZE)]
Experts = Annotated[int, Bounds(1, 2**20)]  # of a layer; or ranks
GroupRanks = Annotated[int, Bounds(1, 2**9)]

Plan = Mapping[str, Any]


def add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan", help="plan a job, or many, given in JSON; or a run on new and old GPUs"
    )
    parser.add_argument(
        "algorithm", metavar="ALGORITHM", help=", ".join((*ALGORITHMS, MIXED_CLUSTER))
    )
    parser.add_argument(
        "--in",
        dest="path",
        metavar="FILE",
        help="a job or a list of jobs in JSON; - reads standard input",
    )
    mixed = parser.add_argument_group(MIXED_CLUSTER, "attention on new GPUs, experts on old ones")
    add = mixed.add_argument
    add("job", nargs="?", type=Path, help="DeepSpeed's JSON, or a file of Megatron's flags")
    add_job(add, required=False)
    add("--hosts", nargs="+", help="host names of each cluster, with commas between")
    add("--out", type=Path, metavar="FILE", help="the job's JSON with its block, to write")
    add("--hostfile", type=Path, metavar="FILE", help="a DeepSpeed hostfile, to write")
    own = {action.dest: action.default for action in mixed._group_actions}
    parser.set_defaults(run=lambda given: _plan(given, own))


def _plan(given: argparse.Namespace, own: Mapping[str, Any]) -> int:
    """Plan by a job in JSON, or a mixed cluster by files and names; ``own`` are arguments of the
    latter."""
    if given.algorithm == MIXED_CLUSTER:
        from ds_moe_ext.commands.mixed_cluster import plan_mixed_cluster

        if given.path is not None:
            raise ValueError(
                f"--in is {given.path!r}, but {MIXED_CLUSTER} takes files and names, as ds-moe-ext "
                "price does; give --model and --hardware"
            )
        return plan_mixed_cluster(given)
    _check_known(given.algorithm)
    for name, default in own.items():
        if vars(given)[name] != default:
            raise ValueError(
                f"{name} is {str(vars(given)[name])!r}, which only {MIXED_CLUSTER} takes; give "
                f"{given.algorithm} its job by --in"
            )
    if given.path is None:
        raise ValueError(f"{given.algorithm} has no job; give its file by --in, or - there")
    return print_plan(given.algorithm, given.path)


def print_plan(algorithm: str, path: str) -> int:
    """Print the plan of a job, or the plans of a list of jobs."""
    try:
        text = sys.stdin.buffer.read() if path == STANDARD_INPUT else bytes_of(path)
    except ValueError as error:
        raise ValueError(
            f"--in is {path!r}, which cannot be read ({error}); name a file, or - for standard "
            "input"
        ) from error
    print(plan_text(algorithm, text, f"--in {path!r}"))
    return 0


def plan_text(name: str, text: bytes, source: str = "the input") -> str:
    """Plans in JSON of one job in JSON, or of a list of jobs; ``source`` says where from in
    errors."""
    _check_known(name)
    try:
        document = parsed(text, _no_constant)
    except ValueError as error:
        raise ValueError(f"{source} cannot be read as JSON: {error}; correct it") from error
    if not isinstance(document, list):
        return json.dumps(_planned(name, document, "job"))
    return json.dumps([_planned(name, job, f"job {i}") for i, job in enumerate(document)])


def _check_known(name: str) -> None:
    if name not in ALGORITHMS:
        remedy = nearest(name, (*ALGORITHMS, MIXED_CLUSTER))
        raise ValueError(f"there is no algorithm {name!r}; {remedy}")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _planned(name: str, values: Any, where: str) -> Plan:
    job, plan = ALGORITHMS[name]
    try:
        return plan(read_record(job, values, "input"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


# What several jobs check alike.


def _check_cluster(num_ranks: int, ranks_per_node: int, num_experts: int) -> None:
    if num_ranks % ranks_per_node:
        raise ValueError(
            f"num_ranks is {num_ranks}, which ranks_per_node, {ranks_per_node}, does not "
            "divide; all nodes must have the same number of ranks"
        )
    _check_pairs(num_ranks, num_experts)


def _check_pairs(num_ranks: int, num_experts: int) -> None:
    if num_ranks * num_experts > MOST_PAIRS:
        raise ValueError(
            f"{num_experts} experts times {num_ranks} ranks are more than {MOST_PAIRS}; plan for "
            "fewer ranks or layers at once"
        )


def _check_ranks(name: str, ranks: Sequence[int], num_ranks: int) -> None:
    for index, rank in enumerate(ranks):
        Bounds(0, num_ranks - 1).check(rank, f"{name}[{index}]")


def _check_loads(name: str, load: Sequence[float]) -> None:
    if not load:
        raise ValueError(
            f"{name} is {reprlib.repr(load)}; give a list of token counts for each expert"
        )


def _check_length(name: str, values: Sequence[Any], other: str, length: int) -> None:
    if len(values) != length:
        raise ValueError(
            f"{name} has {len(values)} numbers, but {other}; give both one for each expert"
        )


# HECATE.


@dataclass(frozen=True, kw_only=True)
class MaterializationJob:
    """Which experts of a layer are copied where: HECATE's Algorithm 1."""

    owner: list[int]  # rank that owns each expert
    load: list[Load]  # rows of each expert
    overlap_degree: Whole  # experts whose replicas can be sent behind attention
    replicas_per_rank: Whole  # that a rank has memory for
    num_ranks: Number
    ranks_per_node: Number  # neighbours in rank share a node

    def __post_init__(self) -> None:
        _check_cluster(self.num_ranks, self.ranks_per_node, len(self.owner))
        _check_ranks("owner", self.owner, self.num_ranks)
        _check_loads("load", self.load)
        _check_length("load", self.load, f"owner has {len(self.owner)} ranks", len(self.owner))


def sparse_materialization(job: MaterializationJob) -> Plan:
    """Ranks that hold each expert, ascending, its owner among them; replicas that each receives."""
    owner = Placement.owned_by(np.array(job.owner), job.num_ranks)
    (target,) = materialize(
        [owner],
        _whole([job.load]),
        overlap_degree=job.overlap_degree,
        replicas_per_ep_rank=job.replicas_per_rank,
        node_C=np.arange(job.num_ranks) // job.ranks_per_node,
    )
    received_C = target.holds_EC.sum(axis=0) - owner.holds_EC.sum(axis=0)
    return {"holders": _holders(target), "received_per_rank": received_C.tolist()}


def _holders(target: Placement) -> list[list[int]]:
    return [np.flatnonzero(holds_C).tolist() for holds_C in target.holds_EC]


def _whole(loads: Sequence[Sequence[float]]) -> list[np.ndarray]:
    """Loads as planners take them; only their ratios count."""
    return [np.rint(np.array(load) * float(PARTS)).astype(np.int64) for load in loads]


@dataclass(frozen=True, kw_only=True)
class ShardingJob:
    """Where experts of all layers live: HECATE's Algorithm 2."""

    load: list[list[Load]]  # rows of each expert of each layer
    overlap_degree: Whole
    num_ranks: Number
    ranks_per_node: Number

    def __post_init__(self) -> None:
        if not self.load:
            raise ValueError("load is []; give a list of loads for each layer")
        for index, load in enumerate(self.load):
            _check_loads(f"load[{index}]", load)
        _check_cluster(self.num_ranks, self.ranks_per_node, sum(map(len, self.load)))


def heterogeneous_sharding(job: ShardingJob) -> Plan:
    """Rank that owns each expert of each layer; hot ones go to those with most slots left."""
    owners = shard(
        _whole(job.load),
        overlap_degree=job.overlap_degree,
        node_C=np.arange(job.num_ranks) // job.ranks_per_node,
    )
    return {"home": [owner.owner_E.tolist() for owner in owners]}


# Pro-Prophet, and FasterMoE to compare with.


@dataclass(frozen=True, kw_only=True)
class ReplicationJob:
    """Which experts of a layer are copied where: Pro-Prophet's Algorithm 1, FasterMoE's shadowing.

    Shadowing copies to all ranks and has its own end: ``num_excluded`` and ``balance`` are not
    for it; what follows ``gradient_bytes`` only counts in the seconds that it reports.
    """

    rows: list[list[Rows]]  # that each rank routes to each expert
    owner: list[int]
    num_excluded: int | None  # ranks that get no replica of an expert; null is automatic
    balance: Cost  # spread of computed rows that is allowed, in mean rows of an expert
    bytes_per_row: Cost  # in one transfer
    bandwidth: Rate
    rows_per_second: Rate  # that an expert computes in forward
    parameter_bytes: Cost  # of one expert
    gradient_bytes: Cost
    forward_non_expert_s: Cost
    backward_non_expert_s: Cost
    scheduled: bool  # replicas move beside the computations

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("rows is []; give a list of token counts for each rank")
        _check_pairs(len(self.rows), len(self.owner))
        for rank, rows in enumerate(self.rows):
            _check_loads(f"rows[{rank}]", rows)
            _check_length(
                f"rows[{rank}]", rows, f"owner has {len(self.owner)} ranks", len(self.owner)
            )
        _check_ranks("owner", self.owner, len(self.rows))

    @property
    def placement(self) -> Placement:
        return Placement.owned_by(np.array(self.owner), len(self.rows))

    @property
    def prices(self) -> BlockPrices:
        return BlockPrices(
            row_s=1 / self.rows_per_second,
            row_bytes=self.bytes_per_row,
            bytes_per_s=self.bandwidth,
            weight_bytes=self.parameter_bytes,
            gradient_bytes=self.gradient_bytes,
            copy_bytes_per_s=self.bandwidth,
            forward_gap_s=self.forward_non_expert_s,
            backward_gap_s=self.backward_non_expert_s,
            is_scheduled=self.scheduled,
        )


def prophet(job: ReplicationJob) -> Plan:
    plan = place_experts(
        job.placement,
        np.array(job.rows),
        prices=job.prices,
        num_excluded=job.num_excluded,
        balance=job.balance,
    )
    return _replication(plan)


def shadow(job: ReplicationJob) -> Plan:
    """FasterMoE's shadowing; the seconds are by Pro-Prophet's model."""
    return _replication(shadow_experts(job.placement, np.array(job.rows), prices=job.prices))


def _replication(plan: BlockPlan) -> Plan:
    """Ranks that compute each expert, those that are copied in the order of selection, seconds of
    the layer's experts and transfers with and without replicas, rows of each rank."""
    return {
        "holders": _holders(plan.target),
        "selected": list(plan.selected),
        "time_s": plan.seconds.step_s,
        "time_without_s": plan.seconds_without.step_s,
        "rows_computed": plan.rows.computed_C.tolist(),
        "rows_received": plan.rows.received_C.tolist(),
    }


# FSMoE.


@dataclass(frozen=True, kw_only=True)
class LinearInput:
    """Costs of one operation; see ``LinearCost``."""

    alpha_s: Cost
    beta_s: Cost
    n: Cost


@dataclass(frozen=True, kw_only=True)
class LayerInput:
    """Costs of one MoE layer in one direction."""

    all_to_all: LinearInput  # of the whole layer, once: dispatch, or combine
    all_gather: LinearInput  # inside an ETP group, of what was dispatched
    reduce_scatter: LinearInput  # inside an ETP group, of what experts yield
    expert: LinearInput  # in backward twice what forward takes, for the same n

    @property
    def costs(self) -> LayerCosts:
        return LayerCosts(
            all_to_all=LinearCost(**vars(self.all_to_all)),
            all_gather=LinearCost(**vars(self.all_gather)),
            reduce_scatter=LinearCost(**vars(self.reduce_scatter)),
            expert=LinearCost(**vars(self.expert)),
        )


@dataclass(frozen=True, kw_only=True)
class DegreeJob(LayerInput):
    """Into how many chunks a layer is cut in one direction: FSMoE's Algorithm 1."""

    gradient_s: Cost  # of the all-reduce inside the layer; 0 in forward
    max_degree: Degree
    solver: str = "exact"  # or "paper" for SciPy's SLSQP

    def __post_init__(self) -> None:
        one_of("solver", self.solver, SOLVERS)


def pipeline_degree(job: DegreeJob) -> Plan:
    """Chunks, seconds, what bounds them (1 the slow links, with an all-reduce; 2 the experts; 3 the
    slow links but for one chunk inside an ETP group; 4 the fast links), seconds at degree 1, 2,
    ..."""
    plan = SOLVERS[job.solver].degree(job.costs, job.gradient_s, job.max_degree)
    return {
        "degree": plan.degree,
        "time_s": plan.time_s,
        "case": plan.case,
        "times_s": plan.times_R.tolist(),
    }


@dataclass(frozen=True, kw_only=True)
class BackwardInput(LayerInput):
    """One layer of a gradient partition, with its costs in backward."""

    dense_window_s: Cost  # of all-reduce that its dense part hides
    gradient_elements: Elements  # ready when its backward begins: of the layer before, or the head


@dataclass(frozen=True, kw_only=True)
class AllReduceInput:
    """Costs of reducing gradients; see ``AllReduce``."""

    alpha_s: Cost
    beta_s: Cost


@dataclass(frozen=True, kw_only=True)
class PartitionJob:
    """Which gradients are reduced beside which layer: FSMoE's partition."""

    layers: list[BackwardInput]  # in the order of backward
    all_reduce: AllReduceInput
    tail_elements: Elements  # of the last layer, which no layer is left to hide
    max_degree: Degree = 8
    solver: str = "exact"  # or "paper" for SciPy's differential evolution

    def __post_init__(self) -> None:
        if not 1 <= len(self.layers) <= MOST_LAYERS:
            raise ValueError(
                f"layers has {len(self.layers)} objects; give one for each layer, from 1 to "
                f"{MOST_LAYERS}"
            )
        one_of("solver", self.solver, SOLVERS)


def gradient_partition(job: PartitionJob) -> Plan:
    """Elements by layer: reduced beside the dense part; in the MoE part, hidden; and there besides,
    in one all-reduce. What is in none is reduced last. Seconds are without the dense parts."""
    all_reduce = AllReduce(**vars(job.all_reduce))
    layers = [
        BackwardLayer.of(
            layer.costs,
            max_degree=job.max_degree,
            dense_window_s=layer.dense_window_s,
            gradient_elements=layer.gradient_elements,
        )
        for layer in job.layers
    ]
    partition = partition_gradients(
        layers,
        all_reduce=all_reduce,
        tail_elements=job.tail_elements,
        step_2=SOLVERS[job.solver].step_2,
    )
    return {
        "dense": list(partition.dense),
        "moe": list(partition.moe),
        "extra": list(partition.extra),
        "degrees": [
            best_degree(layer.costs, all_reduce.seconds(elements), job.max_degree).degree
            for layer, elements in zip(job.layers, partition.within_moe)
        ],
        "time_s": partition.time_s,
    }


# HeterMoE.


@dataclass(frozen=True, kw_only=True)
class AsymmetricJob:
    """Which layers' experts move back to attention ranks: HeterMoE's Algorithm 1."""

    num_experts: Experts  # of a layer
    num_layers: Annotated[int, Bounds(1, MOST_LAYERS)]  # with experts
    attention_ranks: Experts  # divides expert_ranks or is a multiple
    expert_ranks: Experts  # divides num_experts
    attention_s: Cost  # forward of a layer but for its experts, one micro-batch, attention rank
    expert_s: Cost  # forward of an expert rank's experts in one layer, one micro-batch
    expert_on_attention_s: Cost  # the same rows on an attention rank
    min_moved: Annotated[int, Bounds()]  # experts, of all layers, that expert ranks cannot hold
    max_moved: Annotated[int, Bounds()] | None  # that an attention rank can hold; null: any
    variant: str = "corrected"  # or "printed" for the paper's listing as it stands

    def __post_init__(self) -> None:
        one_of("variant", self.variant, VARIANTS)


def asymmetric_assignment(job: AsymmetricJob) -> Plan:
    """Experts that each expert rank gives up, layer by layer, in chunks."""
    plan = assign_experts(
        ZebraGroup(
            num_experts=job.num_experts,
            num_layers=job.num_layers,
            attention_ranks=job.attention_ranks,
            expert_ranks=job.expert_ranks,
        ),
        LayerTimes(
            attention_s=job.attention_s,
            expert_s=job.expert_s,
            expert_on_attention_s=job.expert_on_attention_s,
        ),
        min_moved=job.min_moved,
        max_moved=job.max_moved,
        squeeze=VARIANTS[job.variant],
    )
    return {"moved_per_expert_rank": list(plan.moved_L), "chunk": asdict(plan.chunk)}


@dataclass(frozen=True, kw_only=True)
class ClassInput:
    """Ranks of one kind: seconds as measured, or a hardware file and what is reached of its rate.
    Seconds are forward of a token."""

    attention_s: Positive | None = None  # in one layer but for its experts
    expert_s: Positive | None = None  # in its experts of one layer
    head_s: Cost = 0.0  # behind the last layer
    room: Annotated[int, Bounds(0, MOST_SIZE)] | None = None  # experts; null: by memory, else any
    hardware: str | None = None  # path
    number_type: str = "fp16"  # whose rate is taken; or "bf16", "tf32", "fp32"
    attention_efficiency: Positive | None = None  # share of the rate
    expert_efficiency: Positive | None = None
    reserved_bytes: Cost = 0.0  # of the device's memory, for all but experts' weights

    def check(self, name: str) -> None:
        """Refuse neither way, and both at once; ``name`` is the key."""
        seconds = {"attention_s": self.attention_s, "expert_s": self.expert_s}
        shares = {
            "attention_efficiency": self.attention_efficiency,
            "expert_efficiency": self.expert_efficiency,
        }
        wanted, other = (seconds, shares) if self.hardware is None else (shares, seconds)
        for key, value in wanted.items():
            if value is None:
                raise ValueError(
                    f"{name}.{key} is missing; give {' and '.join(seconds)} in seconds, or "
                    f"hardware with {' and '.join(shares)}"
                )
        for key, value in other.items():
            if value is not None:
                raise ValueError(
                    f"{name}.{key} is {value} beside {' and '.join(wanted)}; remove the one or the "
                    "others"
                )

    @cached_property
    def file(self) -> Hardware | None:
        return None if self.hardware is None else read_hardware(self.hardware)

    def ranks(self, model: MoeModel, weight_bytes: float) -> RankClass:
        """What a token costs such a rank, and how many experts it holds."""
        if self.attention_s is not None and self.expert_s is not None:
            return RankClass(
                attention_s=self.attention_s,
                expert_s=self.expert_s,
                head_s=self.head_s,
                room=self.room,
            )
        assert self.file is not None
        assert self.attention_efficiency is not None and self.expert_efficiency is not None
        memory, room = self.file.device.memory_bytes, self.room
        if room is None and memory is not None:
            free_bytes = max(0.0, memory - self.reserved_bytes)
            room = int(free_bytes // (model.expert_weights * weight_bytes))
        of = RankClass.of(
            self.file.device,
            model,
            number_type=self.number_type,
            attention_efficiency=self.attention_efficiency,
            expert_efficiency=self.expert_efficiency,
            room=room,
        )
        return replace(of, head_s=self.head_s)


class Ratio(NamedTuple):
    """Ranks of a group."""

    attention_ranks: GroupRanks
    expert_ranks: GroupRanks


@dataclass(frozen=True, kw_only=True)
class ZebraRatioJob:
    """A group's shape, for a model and two kinds of devices: HeterMoE's simulator."""

    model: MoeModel
    attention: ClassInput  # ranks that attention is fast on
    expert: ClassInput  # the others
    samples_per_attention_rank: Size  # of a step
    ratios: list[Ratio]
    stripes: list[int]  # that an attention rank's tokens may be cut into: powers of two
    link: Link | None  # of a rank's network card, one direction; null: the slower of both files'
    attention_devices: Size | None = None  # of the cluster; null, as is the other: one group
    expert_devices: Size | None = None
    backward: Cost = 3.0  # times as long as forward computing takes in backward
    weight_bytes: Annotated[float, Bounds(1, MOST_COST)] = WEIGHT_BYTES  # a weight of an expert

    def __post_init__(self) -> None:
        for name, value in vars(self.model).items():
            Bounds(0, MOST_SIZE).check(value, f"model.{name}")
        self.attention.check("attention")
        self.expert.check("expert")
        if not 1 <= len(self.stripes) <= MOST_SHAPES:
            raise ValueError(
                f"stripes has {len(self.stripes)} numbers; give from 1 to {MOST_SHAPES}, such as "
                "[2, 4]"
            )
        most = min(self.samples_per_attention_rank, max(1, MOST_STRIPES // self.model.num_layers))
        for index, count in enumerate(self.stripes):
            Bounds(1, most).check(count, f"stripes[{index}]")
            if count & (count - 1):
                raise ValueError(
                    f"stripes[{index}] is {count}, which is not a power of two; give one"
                )
        most = MOST_SHAPES // len(self.stripes)
        if not 1 <= len(self.ratios) <= most:
            raise ValueError(
                f"ratios has {len(self.ratios)} pairs; give from 1 to {most}, with so many stripes"
            )
        if (self.attention_devices is None) != (self.expert_devices is None):
            raise ValueError(
                f"attention_devices is {self.attention_devices} and expert_devices "
                f"{self.expert_devices}; give both, or neither"
            )

    @property
    def card(self) -> Link:
        if self.link is not None:
            return self.link
        files = [file for file in (self.attention.file, self.expert.file) if file is not None]
        if len(files) < 2:
            raise ValueError(
                "link is null, but a class has no hardware file; give link with bytes_per_s"
            )
        return min(map(card_of, files), key=lambda card: card.bytes_per_s)


def zebra_ratio(job: ZebraRatioJob) -> Plan:
    """The shape with most tokens in a second, over all groups, or null; and all shapes, in the
    order of ``ratios`` and then ``stripes``."""
    classes = TwoClasses(
        model=job.model,
        new=job.attention.ranks(job.model, job.weight_bytes),
        old=job.expert.ranks(job.model, job.weight_bytes),
        link=job.card,
        backward=job.backward,
    )
    shapes = [
        ZebraShape(attention_ranks=attention, expert_ranks=expert, num_stripes=stripes)
        for attention, expert in job.ratios
        for stripes in job.stripes
    ]
    stock = None
    if job.attention_devices is not None and job.expert_devices is not None:
        stock = Stock(new_ranks=job.attention_devices, old_ranks=job.expert_devices)
    priced = price_shapes(classes, shapes, job.samples_per_attention_rank)
    best = best_shape(priced, stock)
    return {
        "best": None if best is None else _shape_plan(best, stock),
        "shapes": [_shape_plan(each, stock) for each in priced],
    }


def _shape_plan(priced: PricedShape | RefusedShape, stock: Stock | None) -> Plan:
    """A shape, and its price if ranks hold equally many experts and memory is enough for all."""
    refused = priced if isinstance(priced, RefusedShape) else None
    return {
        "attention_ranks": priced.shape.attention_ranks,
        "expert_ranks": priced.shape.expert_ranks,
        "stripes": priced.shape.num_stripes,
        "num_groups": 1 if stock is None else stock.num_groups(priced.shape),
        "fits": refused is None,
        "why": "" if refused is None else refused.why,
        "price": _shape_price(priced) if isinstance(priced, PricedShape) else None,
    }


def _shape_price(priced: PricedShape) -> Plan:
    """Uses are shares of the step in which such a rank computes, bubbles seconds of idling."""
    price = priced.price
    return {
        "tokens_per_s": price.tokens_per_s,
        "step_s": price.step_s,
        "attention_use": price.attention_use,
        "expert_use": price.expert_use,
        "attention_bubble_s": price.attention_bubble_s,
        "expert_bubble_s": price.expert_bubble_s,
        "moved_per_expert_rank": list(priced.moved_L),
    }


# The priced share.


@dataclass(frozen=True, kw_only=True)
class PricedShareJob:
    """Which rows go to which of an expert's replicas, for one layer.

    Shape letters: E experts, N (copied expert, holder) pairs.
    """

    rows: list[list[Rows]]  # of each sender, for each expert
    holders: list[list[int]]  # of each expert, the EP ranks that hold it
    node: list[Rows]  # of each EP rank
    row_s: list[Cost] | Cost  # to compute a row, of all EP ranks or of each
    local_row_s: Cost  # that a row takes of its EP ranks' own links, in either direction
    cross_row_s: Cost  # that a row between nodes takes of their cards, which their EP ranks share

    def __post_init__(self) -> None:
        num_ep_ranks, num_experts = len(self.rows), len(self.holders)
        if not num_ep_ranks or not num_experts:
            raise ValueError(
                f"rows are of {num_ep_ranks} senders and holders of {num_experts} experts; give at "
                "least one of both"
            )
        _check_pairs(num_ep_ranks, num_experts)
        for ep_rank, rows in enumerate(self.rows):
            _check_loads(f"rows[{ep_rank}]", rows)
            _check_length(
                f"rows[{ep_rank}]", rows, f"holders are of {num_experts} experts", num_experts
            )
        for expert, ep_ranks in enumerate(self.holders):
            name = f"holders[{expert}]"
            if not ep_ranks:
                raise ValueError(f"{name} is []; give a list of the EP ranks that hold the expert")
            _check_ranks(name, ep_ranks, num_ep_ranks)
            if len(set(ep_ranks)) < len(ep_ranks):
                raise ValueError(f"{name} is {ep_ranks}; name each EP rank once")
        for name, values in (("node", self.node), ("row_s", self.row_s)):
            if isinstance(values, list) and len(values) != num_ep_ranks:
                raise ValueError(
                    f"{name} has {len(values)} numbers, but rows are of {num_ep_ranks} EP ranks; "
                    "give one for each"
                )


def priced_share(job: PricedShareJob) -> Plan:
    """The share under which the layer takes least time: of each sender and expert the rows for each
    holder that gets some, rows that each EP rank computes, seconds of the busiest EP rank and the
    busiest link together; and the seconds if every row went to the nearest replica."""
    rows_CE, node_C = np.array(job.rows, dtype=np.int64), np.array(job.node, dtype=np.int64)
    num_ep_ranks, num_experts = rows_CE.shape
    holds_EC = np.zeros((num_experts, num_ep_ranks), dtype=bool)
    for expert, ep_ranks in enumerate(job.holders):
        holds_EC[expert, ep_ranks] = True
    row_s_C = np.broadcast_to(np.array(job.row_s, dtype=np.float64), num_ep_ranks)
    prices = RowPrices(row_s_C, job.local_row_s, job.cross_row_s)
    routed = Routed(rows_CE, Placement(holds_EC), node_C)
    nearest = NearestReplica(routed.target, node_C)
    nearest_CEC = np.stack(
        [nearest.rows_from(ep_rank, r[None])[0] for ep_rank, r in enumerate(rows_CE)]
    )
    priced_CEC = _priced_rows(routed, prices)
    time_s, nearest_s = (
        prices.seconds(sent_CEC.sum(axis=1), node_C) for sent_CEC in (priced_CEC, nearest_CEC)
    )
    # In whole rows the best parts may be worse, where an EP rank has but some rows.
    sent_CEC = priced_CEC if time_s <= nearest_s else nearest_CEC
    return {
        "sent": [[_by_holder(sent_C) for sent_C in sent_EC] for sent_EC in sent_CEC],
        "computed": sent_CEC.sum(axis=(0, 1)).tolist(),
        "time_s": min(time_s, nearest_s),
        "time_nearest_s": nearest_s,
    }


def _priced_rows(routed: Routed, prices: RowPrices) -> np.ndarray:
    """Rows from each sender for each expert to each holder, ``[C, E, C]``."""
    holders, rows_CE = routed.holders, routed.rows_CE
    sent_CEC = np.zeros((*rows_CE.shape, len(rows_CE)), dtype=np.int64)
    sent_CEC[:, holders.expert_A, holders.ep_rank_A] = rows_CE[:, holders.expert_A]
    sent_CN = sent_rows(in_whole_rows(divide(routed, prices), routed), routed)
    sent_CEC[:, holders.expert_X[holders.copied_N], holders.ep_rank_N] = sent_CN
    return sent_CEC


def _by_holder(sent_C: np.ndarray) -> dict[int, int]:
    return {ep_rank: int(sent_C[ep_rank]) for ep_rank in np.flatnonzero(sent_C).tolist()}


ALGORITHMS: Mapping[str, tuple[type, Callable[[Any], Plan]]] = {
    "asym-ea": (AsymmetricJob, asymmetric_assignment),
    "gradient-partition": (PartitionJob, gradient_partition),
    "heterogeneous-sharding": (ShardingJob, heterogeneous_sharding),
    "pipeline-degree": (DegreeJob, pipeline_degree),
    "priced-share": (PricedShareJob, priced_share),
    "prophet": (ReplicationJob, prophet),
    "shadow": (ReplicationJob, shadow),
    "sparse-materialization": (MaterializationJob, sparse_materialization),
    "zebra-ratio": (ZebraRatioJob, zebra_ratio),
}
"""The record of an algorithm's input, and the function from it to the plan."""
