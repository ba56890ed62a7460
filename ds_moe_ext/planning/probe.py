# SPDX-License-Identifier: Apache-2.0
"""Measures the ranks at hand: what links, replicas of weights, devices and experts cost here.

``measure_cluster`` makes a hardware file's record of a cluster, level by level (``levels_of``);
``measure_pipeline`` takes a quick look at a run's own communicators and experts, and gives planners
their lines. Each operation is a sweep of sizes, and its line is laid by ``bench``. Shape letters: N
sizes, C members of a group, R rows, D model width.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.core.all_to_all import Carrier, Channel
from ds_moe_ext.core.comm import (
    AllToAll,
    Traffic,
    all_gather_rows,
    all_to_all_rows,
    connect,
    max_in_place,
    reduce_scatter_rows,
    sparse_all_gather,
    sum_in_place,
)
from ds_moe_ext.core.hardware import Collectives, Device, Flops, Hardware, Link, Product, Products
from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.transfer import Part, TransferSize, gather_rounds
from ds_moe_ext.planning.bench import Bench, Sweep, clock_of, fit_straight
from ds_moe_ext.planning.exchange_costs import PipelineLines
from ds_moe_ext.planning.prices import FREE, Line
from ds_moe_ext.schedule.executor import to_the_end
from ds_moe_ext.schedule.task import INTER, INTRA, PARAM

NUM_DIGITS = 5  # significant, of what is measured
LEAST_ROWS = 1024  # of the least matrix product of a sweep, ``[R, D]`` and ``[D, D]``
# Its D: 2^19 elements of rows, as of FSMoE, spec 4; 2^22, as smaller ones do not fill today's
# devices.
WIDTH_ON_CPU, WIDTH_ON_CUDA = 512, 4096
LEAST_COPY_ON_CPU, LEAST_COPY_ON_CUDA = 2**25, 2**28  # bytes: more than caches hold
STEPS = (1, 2, 4, 8)  # sizes of a pipeline's operations, as multiples of the least


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    bytes_per_peer_N: tuple[int, ...]  # of exchanges and sums; below 128 KiB buffers hide the link
    expert_bytes: int  # weights of one expert
    num_experts_N: tuple[int, ...]  # experts that are copied at once
    product_N: tuple[int, ...] = (1, 2, 3)  # sizes of matrix products, as multiples of the least

    def __post_init__(self) -> None:
        if self.expert_bytes < 1:
            raise ValueError(
                f"an expert has {self.expert_bytes} bytes; give the bytes of its weights"
            )


@dataclass(frozen=True, eq=False)
class Level:
    """Ranks that are measured together: those of a node, or one of each node, or all."""

    name: str  # for a person
    group: dist.ProcessGroup  # this rank's; all groups of a level are active at once
    here: int  # this rank's place in its group
    node_C: np.ndarray  # node of each member, from 0, int64 ``[C]``
    num_sharers: int  # ranks that send over one link
    exchange: AllToAll = all_to_all_rows  # how rows are exchanged
    # EP ranks lie in it, whose ranks gather rows and scatter sums of them
    has_ep_ranks: bool = False

    @property
    def num_members(self) -> int:
        return int(self.node_C.size)


@dataclass(frozen=True, eq=False)
class Levels:
    """All levels of a cluster."""

    between: Level  # ranks of the same place in each node
    within: Level  # ranks of one node
    whole: Level  # all ranks


def levels_of(num_ranks: int, ranks_per_node: int, exchange: AllToAll = all_to_all_rows) -> Levels:
    """The levels of a cluster of equal nodes, whose ranks are neighbours. Collective, over all
    ranks."""
    if not 0 < ranks_per_node <= num_ranks or num_ranks % ranks_per_node:
        raise ValueError(
            f"{ranks_per_node} rank(s) on a node do not divide {num_ranks} rank(s); give the "
            "number of ranks that each node has"
        )
    num_nodes = num_ranks // ranks_per_node
    ep_ranks_are_nodes = Grid(num_ranks, num_nodes, ranks_per_node)
    nodes = ParallelLayout.build(ep_ranks_are_nodes, [("ep", INTER), ("esp", INTRA)])
    ranks = ParallelLayout.build(Grid(num_ranks, num_ranks), [("ep", PARAM)])
    node_R = np.arange(num_ranks) // ranks_per_node
    between = Level(
        name="between nodes",
        group=nodes.group("ep", INTER),
        here=nodes.index("ep"),
        node_C=np.arange(num_nodes),
        num_sharers=ranks_per_node,
        exchange=exchange,
    )
    within = replace(
        between,
        name="within a node",
        group=nodes.group("esp", INTRA),
        here=nodes.index("esp"),
        node_C=node_R[:ranks_per_node],
        num_sharers=1,
        has_ep_ranks=True,
    )
    whole = replace(
        between,
        name="over all ranks",
        group=ranks.group("ep", PARAM),
        here=ranks.index("ep"),
        node_C=node_R,
        num_sharers=1,
    )
    return Levels(between, within, whole)


def measure_cluster(levels: Levels, bench: Bench, sizes: Sizes) -> Hardware:
    """The cluster; the same on every rank. Collective, over all ranks."""
    between, within = levels.between, levels.within
    device = measure_device(bench, sizes.product_N)
    inter, intra = (measure_level(level, bench, sizes) for level in (between, within))
    has_two = between.num_members > 1 and within.num_members > 1
    copy = measure_replicas(levels.whole, bench, sizes) if has_two else None
    return Hardware(
        name=f"{between.num_members} x {within.num_members} x {device.name}",
        source="measured",
        num_nodes=between.num_members,
        ranks_per_node=within.num_members,
        device=device,
        intra=wire_of(within, intra.all_to_all),
        inter=wire_of(between, inter.all_to_all),
        intra_collectives=intra,
        inter_collectives=inter,
        copy=copy,
    )


SweepOf = Callable[[Level, Sequence[int], Tensor], Sweep]
"""One collective of a level: the level, numbers of rows for each member, a row like these."""


def measure_level(level: Level, bench: Bench, sizes: Sizes) -> Collectives:
    """Lines through the times of a level's collectives; nothing for a lone member. Collective."""
    if level.num_members == 1:
        return Collectives()
    row = torch.zeros((), device=bench.device)
    num_rows_N = [num_bytes // row.itemsize for num_bytes in sizes.bytes_per_peer_N]

    def link(sweep_of: SweepOf) -> Link:
        return link_of(bench.fit(sweep_of(level, num_rows_N, row)))

    return Collectives(
        all_to_all=link(all_to_all_sweep),
        all_gather=link(all_gather_sweep) if level.has_ep_ranks else None,
        reduce_scatter=link(reduce_scatter_sweep) if level.has_ep_ranks else None,
        all_reduce=link(all_reduce_sweep),
        copy=measure_replicas(level, bench, sizes),
    )


def measure_replicas(level: Level, bench: Bench, sizes: Sizes) -> Link:
    """The link of replicas of experts; see ``copy_sweep``. Collective."""
    return link_of(bench.fit(copy_sweep(level, sizes, bench.device)), level.num_sharers)


def measure_pairs(
    level: Level, bench: Bench, pairs_CC: np.ndarray, bytes_per_peer_N: Sequence[int]
) -> Link | None:
    """What the members of some pairs give and take, all at once, as rows go. Collective.

    Args:
        level: the members.
        bench: times it.
        pairs_CC: who gives to whom, bool, symmetric; nobody to itself.
        bytes_per_peer_N: to each.

    Returns:
        The link of the level's sharers together, by the member with most peers; None where there
        are no pairs.
    """
    if not pairs_CC.any():
        return None
    sweep = pairs_sweep(level, pairs_CC, bytes_per_peer_N, bench.device)
    return link_of(bench.fit(sweep), level.num_sharers)


def least_exchange_s(level: Level, bench: Bench) -> float:
    """Seconds of an exchange in which each member gives each other one a byte. Collective."""
    others_CC = ~np.eye(level.num_members, dtype=bool)
    return float(bench.seconds(pairs_sweep(level, others_CC, [1], bench.device).works_N)[0])


def link_of(fit: Line, num_sharers: int = 1) -> Link:
    """The link of several alike that send at once, from a line over the bytes of one of them."""
    return Link(
        bytes_per_s=_rounded(num_sharers / fit.beta_s),
        latency_s=_rounded(fit.alpha_s),
        r_squared=_rounded(fit.r_squared or 0.0),
    )


def wire_of(level: Level, exchange: Link | None) -> Link | None:
    """What a level's link carries out of one rank or node, by what even exchanges took over it."""
    if exchange is None:
        return None
    leaving = level.num_sharers * (level.num_members - 1) / level.num_members
    return replace(exchange, bytes_per_s=_rounded(exchange.bytes_per_s * leaving))


def _rounded(value: float) -> float:
    return float(f"{value:.{NUM_DIGITS}g}")


def all_to_all_sweep(level: Level, num_rows_N: Sequence[int], row: Tensor) -> Sweep:
    """An even exchange, ``num_rows_N`` for each member; units are the bytes that a rank gives."""

    def work(rows: Tensor) -> Tensor:
        return level.exchange(rows, _even(rows, level), _even(rows, level), level.group)

    return _sweep("all-to-all", level, work, _rows(row, num_rows_N, level.num_members))


def reduce_scatter_sweep(level: Level, num_rows_N: Sequence[int], row: Tensor) -> Sweep:
    """Sums of ``num_rows_N`` to each member; units are the bytes that a rank gives."""

    def work(rows: Tensor) -> Tensor:
        return reduce_scatter_rows(rows, _even(rows, level), level.group, level.exchange)

    return _sweep("reduce-scatter", level, work, _rows(row, num_rows_N, level.num_members))


def all_gather_sweep(level: Level, num_rows_N: Sequence[int], row: Tensor) -> Sweep:
    """``num_rows_N`` of each member to all; units are the bytes that a rank ends up with."""

    def work(rows: Tensor) -> Tensor:
        return all_gather_rows(rows, [rows.shape[0]] * level.num_members, level.group)

    sweep = _sweep("all-gather", level, work, _rows(row, num_rows_N))
    return replace(sweep, units_N=[level.num_members * units for units in sweep.units_N])


def all_reduce_sweep(level: Level, num_rows_N: Sequence[int], row: Tensor) -> Sweep:
    """A sum of ``num_rows_N`` over the members; units are the bytes that a rank gives."""
    work = partial(sum_in_place, group=level.group)
    return _sweep("all-reduce", level, work, _rows(row, num_rows_N))


def _even(rows: Tensor, level: Level) -> list[int]:
    return [rows.shape[0] // level.num_members] * level.num_members


def _rows(row: Tensor, num_rows_N: Sequence[int], times: int = 1) -> list[Tensor]:
    return [row.new_zeros(num_rows * times, *row.shape) for num_rows in num_rows_N]


def _sweep(
    name: str, level: Level, work: Callable[[Tensor], object], rows_N: Sequence[Tensor]
) -> Sweep:
    works_N = [partial(work, rows) for rows in rows_N]
    return Sweep(f"{name} {level.name}", [rows.nbytes for rows in rows_N], works_N)


def pairs_sweep(
    level: Level, pairs_CC: np.ndarray, bytes_per_peer_N: Sequence[int], device: torch.device
) -> Sweep:
    """The exchange of ``measure_pairs``; units are the bytes that the member with most peers
    gives."""
    is_peer_C, most_peers = pairs_CC[level.here], int(pairs_CC.sum(axis=1).max())
    works_N = []
    for num_bytes in bytes_per_peer_N:
        counts_C = (num_bytes * is_peer_C).tolist()
        given = torch.zeros(sum(counts_C), dtype=torch.uint8, device=device)
        works_N.append(partial(level.exchange, given, counts_C, counts_C, level.group))
    units_N = [most_peers * num_bytes for num_bytes in bytes_per_peer_N]
    return Sweep(f"exchange of pairs {level.name}", units_N, works_N)


def copy_sweep(level: Level, sizes: Sizes, device: torch.device) -> Sweep:
    """Replicas of experts to all members, as materialization makes them (HECATE, spec rule 50).

    The owners of the experts are one member after another. Units are the bytes that the busiest
    member takes in. Collective.
    """
    connect(level.group, device)
    shape = (max(sizes.num_experts_N), sizes.expert_bytes)
    experts = torch.zeros(shape, dtype=torch.uint8, device=device)
    slots = {expert: (weights,) for expert, weights in enumerate(experts)}
    units_N, works_N = [], []
    for num_experts in sizes.num_experts_N:
        owners = Placement.owned_by(np.arange(num_experts) % level.num_members, level.num_members)
        everywhere = Placement(np.ones_like(owners.holds_EC))
        transfer_size = TransferSize(sizes.expert_bytes)
        transfers = gather_rounds(owners, everywhere, level.node_C, transfer_size)
        part = transfers.part_of(level.here)
        units_N.append(int(transfers.received_C.max()) * sizes.expert_bytes)
        works_N.append(partial(_copy, part, slots, level.group))
    return Sweep(f"replicas of experts {level.name}", units_N, works_N)


def _copy(part: Part, slots: Mapping[int, tuple[Tensor]], group: dist.ProcessGroup) -> Traffic:
    return to_the_end(sparse_all_gather(part, slots, slots, group))


def measure_device(bench: Bench, product_N: Sequence[int]) -> Device:
    """What this rank computes on, while all ranks compute. Collective."""
    is_cuda = bench.device.type == "cuda"
    num_rows_N = [LEAST_ROWS * multiple for multiple in product_N]

    def line(dtype: torch.dtype) -> Product:
        width = WIDTH_ON_CUDA if is_cuda else WIDTH_ON_CPU
        fit = bench.fit(matmul_sweep(num_rows_N, width, dtype, bench.device))
        return Product(
            multiply_adds_per_s=_rounded(1 / fit.beta_s),
            start_s=_rounded(fit.alpha_s),
            r_squared=_rounded(fit.r_squared or 0.0),
        )

    products = Products(
        fp32=line(torch.float32),
        fp16=line(torch.float16) if is_cuda else None,
        bf16=line(torch.bfloat16) if is_cuda else None,
    )
    known = {name: each for name, each in vars(products).items() if each is not None}
    flops = Flops(**{name: 2 * each.multiply_adds_per_s for name, each in known.items()})
    if not is_cuda:
        return Device(name=f"{platform.machine()} CPU", flops_per_s=flops, products=products)
    return Device(
        name=torch.cuda.get_device_name(bench.device),
        memory_bytes=torch.cuda.get_device_properties(bench.device).total_memory,
        flops_per_s=flops,
        products=products,
    )


def matmul_sweep(
    num_rows_N: Sequence[int], width: int, dtype: torch.dtype, device: torch.device
) -> Sweep:
    """Products of ``[R, D]`` and ``[D, D]``; units are multiply-adds."""
    weight_DD = torch.ones(width, width, dtype=dtype, device=device)
    rows_NRD = [torch.ones(rows, width, dtype=dtype, device=device) for rows in num_rows_N]
    works_N = [partial(torch.matmul, rows_RD, weight_DD) for rows_RD in rows_NRD]
    return Sweep(f"matmul {dtype}", [rows * width**2 for rows in num_rows_N], works_N)


LAUNCHES = 2000


def measure_launch(device: torch.device) -> float | None:
    """Seconds in which this host issues one operation to its device, of all ranks the slowest's;
    None where the host is what computes. Collective."""
    if device.type != "cuda":
        return None
    x = torch.zeros(8, device=device)
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        for _ in range(LAUNCHES):
            x.add_(1.0)  # few enough that the device's queue never stops the host
        seconds.append((time.perf_counter() - began_s) / LAUNCHES)
        torch.cuda.synchronize(device)
    own_ns = torch.tensor([round(1e9 * sorted(seconds)[len(seconds) // 2])], device=device)
    return _rounded(1e-9 * float(max_in_place(own_ns, None)))


def measure_memory(bench: Bench) -> float:
    """Bytes a second that copies within this rank's memory read and write, while all ranks copy.
    Collective."""
    least = LEAST_COPY_ON_CUDA if bench.device.type == "cuda" else LEAST_COPY_ON_CPU
    given_N = [torch.zeros(n * least, dtype=torch.uint8, device=bench.device) for n in (1, 2, 3)]
    works_N = [partial(torch.empty_like(given).copy_, given) for given in given_N]
    units_N = [2 * given.nbytes for given in given_N]  # read and written
    return _rounded(1 / bench.fit(Sweep("copies within memory", units_N, works_N)).beta_s)


def expert_sweep(
    forward: Callable[[Tensor], Tensor],
    weights: Sequence[Tensor],
    rows_RD: Tensor,
    *,
    num_steps: int = 4,
) -> Sweep:
    """Rows through one expert, forward and backward; units are rows.

    ``Bench.fit(...).beta_s`` is then the seconds that one row costs. No gradient is accumulated.

    Args:
        forward: rows ``[R, D]`` to rows ``[R, D]``.
        weights: those of ``forward`` that want gradients.
        rows_RD: as many rows as the largest size has; the others have the first of them.
        num_steps: sizes: equal steps up to all rows.
    """

    def work(num_rows: int) -> None:
        own_RD = rows_RD[:num_rows].detach().requires_grad_()
        with torch.enable_grad():
            out_RD = forward(own_RD)
        torch.autograd.grad(out_RD, (own_RD, *weights), torch.ones_like(out_RD))

    num_rows_N = [rows_RD.shape[0] * step // num_steps for step in range(1, num_steps + 1)]
    return Sweep("expert", num_rows_N, [partial(work, num_rows) for num_rows in num_rows_N])


def spare_bytes(device: torch.device) -> int | None:
    """What the driver and PyTorch's allocator had left at the fullest moment so far; None of a
    host's memory, which is shared with other ranks and programs."""
    if device.type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return int(free_bytes + reserved - torch.cuda.max_memory_allocated(device))


@dataclass(frozen=True, eq=False)
class Paths:
    """This rank's communicators; None where there is one rank, then on every rank."""

    ep_ranks: Channel | None  # one rank of each EP rank
    ep_rank: Channel | None  # the ranks of an ETP group
    dense: dist.ProcessGroup | None  # those that reduce the same dense gradients
    scatters: bool = False  # each of those keeps a part of the sums, else all


@dataclass(frozen=True)
class Payload:
    """What travels at most; the same on every rank."""

    num_rows: int  # rows that a rank sends in one dispatch; as many arrive if they are even
    width: int  # elements of a row
    row_dtype: torch.dtype  # of rows
    num_elements: int  # of one reduction of dense gradients
    gradient_dtype: torch.dtype  # of these


def quick_bench(device: torch.device, group: dist.ProcessGroup | None = None) -> Bench:
    """Few repetitions, by all ranks of a group, or of the run: all groups are active at once."""
    clock = clock_of(device)
    return Bench(clock, device, num_warm_ups=1, num_repeats=9, budget_s=0.15, group=group)


def measure_pipeline(
    paths: Paths, payload: Payload, forward: Callable[[int], object], bench: Bench
) -> PipelineLines:
    """The lines of a run. Collective, over all ranks.

    They are the same on every rank, by the slowest one's times: whoever needs rows waits for the
    rank that sends them last. Each is laid through sizes from an eighth of the payload up to all of
    it, since that is into how many chunks it may be cut.

    Args:
        paths: what rows and gradients travel over.
        payload: how much of them.
        forward: runs this rank's part of the experts on a number of rows; without gradients.
        bench: times it; ``quick_bench``.
    """
    row = torch.zeros(payload.width, dtype=payload.row_dtype, device=bench.device)
    element = torch.zeros((), dtype=payload.gradient_dtype, device=bench.device)
    ep_ranks, ep_rank = (
        _level("between EP ranks", paths.ep_ranks),
        _level("inside an ETP group", paths.ep_rank),
    )
    dense = _level("of gradients", Channel(paths.dense) if paths.dense else None)
    num_ep_ranks, etp_size, num_dense = (
        level.num_members if level else 1 for level in (ep_ranks, ep_rank, dense)
    )

    def shared(sweep_of: SweepOf, level: Level | None, most: int, like: Tensor) -> Line:
        return bench.fit(sweep_of(level, _steps(most), like), fit_straight) if level else FREE

    def run(num_rows: int) -> None:
        with torch.no_grad():
            forward(num_rows)

    num_rows_N = _steps(payload.num_rows * etp_size)
    experts = Sweep("experts forward", num_rows_N, [partial(run, rows) for rows in num_rows_N])
    if paths.scatters:
        sums = shared(reduce_scatter_sweep, dense, payload.num_elements // num_dense, element)
    else:
        sums = shared(all_reduce_sweep, dense, payload.num_elements, element)
    return PipelineLines(
        all_to_all=shared(all_to_all_sweep, ep_ranks, payload.num_rows // num_ep_ranks, row),
        all_gather=shared(all_gather_sweep, ep_rank, payload.num_rows, row),
        reduce_scatter=shared(reduce_scatter_sweep, ep_rank, payload.num_rows, row),
        expert=bench.fit(experts, fit_straight),
        all_reduce=replace(sums, beta_s=element.itemsize * sums.beta_s),
    )


def measure_carrier(carrier: Carrier, num_ep_ranks: int, payload: Payload, bench: Bench) -> Line:
    """The line of even all-to-alls by a carrier between the EP ranks; see ``measure_pipeline``.
    Collective."""
    row = torch.zeros(payload.width, dtype=payload.row_dtype, device=bench.device)
    num_rows_N = _steps(payload.num_rows // num_ep_ranks)
    transfers = [
        carrier.transfer(np.full((num_ep_ranks,) * 2, num), bench.device) for num in num_rows_N
    ]
    works = [
        partial(transfer.out, row.new_zeros(num_ep_ranks * num, *row.shape))
        for transfer, num in zip(transfers, num_rows_N)
    ]
    num_bytes_N = [num_ep_ranks * num * row.nbytes for num in num_rows_N]
    return bench.fit(Sweep("all-to-all by a carrier", num_bytes_N, works), fit_straight)


def _level(name: str, channel: Channel | None) -> Level | None:
    """None where there is one rank."""
    if channel is None or channel.group.size() == 1:
        return None
    group = channel.group
    node_C = np.zeros(group.size(), np.int64)
    return Level(name, group, group.rank(), node_C, num_sharers=1, exchange=channel.all_to_all)


def _steps(most: int) -> list[int]:
    """Growing sizes up to ``most``, or a few more where that is next to nothing."""
    return [max(1, most // STEPS[-1]) * step for step in STEPS]
