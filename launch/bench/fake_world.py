# SPDX-License-Identifier: Apache-2.0
"""One process that stands for one rank of many, and layers that it runs.

Torch's fake process group takes every call and hands back what this rank has sent: gathered counts
are those of ranks that all route alike. What is left of a pass is what its host does. Here are also
a model's experts replaced by a JSON block without a host, and tiny layers of every strategy. Shape
letters: L layers, T tokens, K choices a token, E experts, D model width, F expert width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_moe_ext.core import comm
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.hosts.attachment.block_hooks import launch_with_blocks
from ds_moe_ext.hosts.attachment.experts import (
    ExpertsDescription,
    HostedExperts,
    find_registered,
    register_experts,
)
from ds_moe_ext.hosts.attachment.replacement import AttachedLayer, build, draw, stays_in_slots
from ds_moe_ext.hosts.steps.costs import Costs
from ds_moe_ext.hosts.steps.pipeline_costs import DenseGradients, Pipelines
from ds_moe_ext.hosts.steps.planning import Checks, Planning
from ds_moe_ext.moe import dispatch, layer
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.observation import Rows
from ds_moe_ext.planning.strategy import Job
from ds_moe_ext.schedule import executor
from ds_moe_ext.schedule.executor import InlineStreams, ScheduleStreams
from ds_moe_ext.strategies.settings import BLOCK, read_settings

RANKS_PER_NODE = 8


@contextmanager
def fake_world(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """The world of all ranks inside the block, of which this process is one."""
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    with ExitStack() as changed:

        def change(owner: object, name: str, new: object) -> None:
            changed.enter_context(mock.patch.object(owner, name, new))

        def hosts(thing: object, group: dist.ProcessGroup | None) -> list[str]:
            return [f"node {rank // RANKS_PER_NODE}" for rank in range(num_ranks)]

        for name in ("alltoall_base", "all_to_all_single"):  # the second since torch 2.13
            if name in vars(dist.ProcessGroup):
                change(dist.ProcessGroup, name, _all_to_all)
        change(dist.ProcessGroup, "_allgather_base", _all_gather)
        change(comm, "timeout_of", lambda group: timedelta(minutes=1))  # a fake group has none
        change(comm, "gather_objects", hosts)
        # As NCCL does: by pairs is for gloo between hosts.
        change(dispatch, "all_to_all_by_pairs", comm.all_to_all_rows)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _all_to_all(
    group: dist.ProcessGroup, arrived: Tensor, sent: Tensor, arrived_C: Sequence[int], *rest: object
) -> None:
    """In place of the fake group's own, which refuses to make rows of none: what comes in equal
    parts are counts, and ranks that route alike send what this one sends itself; else zeros
    arrive."""
    if len(arrived_C):  # a list or an array
        if arrived.is_cuda:  # products of zeros would take a device less time than others
            arrived.fill_(0.5)
        else:
            arrived.zero_()
    else:
        own = sent.unflatten(0, (group.size(), -1))[group.rank()]
        arrived.unflatten(0, (group.size(), -1)).copy_(own)


def _all_gather(group: dist.ProcessGroup, gathered: Tensor, given: Tensor, *rest: object) -> None:
    """In place of the fake group's own, which makes a copy for each rank: a device is reported
    once."""
    gathered.view(group.size(), *given.shape).copy_(given)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Layers go the way of a GPU inside the block: grouped GEMMs, sums without the CPU's kernels,
    counts that must be fetched, broadcasts of what goes everywhere."""
    is_cpu = property(lambda tensor: False)
    with ExitStack() as changed:
        changed.enter_context(mock.patch.object(torch.Tensor, "is_cpu", is_cpu, create=True))
        for module in (comm, layer):
            changed.enter_context(mock.patch.object(module, "can_broadcast", lambda device: True))
        yield


@contextmanager
def products_at_once() -> Iterator[None]:
    """A grouped GEMM returns at once inside the block, with zeros, as one launch does for the host
    of a GPU: torch's for CPUs computes slot by slot, which is most of what a tiny one takes."""
    with torch.library._scoped_library("aten", "IMPL") as kernels:
        kernels.impl("_grouped_mm", _no_product, "CPU", allow_override=True)
        yield


def _no_product(
    one: Tensor, other: Tensor, offs: Tensor, bias: object = None, out_dtype: object = None
) -> Tensor:
    """Of rows by slots' matrices, ``[R, D] x [S, D, F]``, or of slots' rows, ``[D, R] x [R, F]``,
    as ``aten._grouped_mm`` takes them."""
    num_slots = () if other.dim() == 3 else (offs.shape[0],)
    return one.new_zeros(*num_slots, one.shape[0], other.shape[-1])


INLINE = InlineStreams()


@contextmanager
def on_streams(streams: ScheduleStreams) -> Iterator[None]:
    """Layers run there inside the block, where anything overlaps; programs must be made inside."""
    real = executor.streams_for

    def chosen(device: torch.device, overlaps: bool) -> ScheduleStreams:
        return streams if overlaps else INLINE

    _put(chosen, real)
    try:
        yield
    finally:
        _put(real, chosen)  # also where it was imported inside


def _put(chooses: Callable[..., ScheduleStreams], before: Callable[..., ScheduleStreams]) -> None:
    """In all modules that have the one before."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("ds_moe_ext.") and vars(module).get("streams_for") is before:
            vars(module)["streams_for"] = chooses


def inline() -> AbstractContextManager[None]:
    """One thread issues all streams inside the block, as on CUDA; programs must be made inside."""
    return on_streams(INLINE)


# A model's experts, replaced by a JSON block without a host.

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class ReplacedLayers:
    """Of one model."""

    layers: Sequence[AttachedLayer]  # in model order
    planning: Planning  # of their steps

    @classmethod
    def of(
        cls,
        model: nn.Module,
        block: Mapping[str, Any],
        *,
        is_early: bool = True,
        device: torch.device = CPU,
        log: Callable[[str], None] = lambda line: None,
    ) -> ReplacedLayers:
        """Replace them. Collective."""
        settings, strategy = read_settings({BLOCK: {"enabled": True, **block}})
        assert strategy is not None
        world_size = dist.get_world_size()
        if strategy.has_uneven_owners:  # one grid over all nodes: what travels between them counts
            num_ep_ranks = world_size // (settings.expert_sharding_size or 1)
            settings = replace(settings, expert_parallel_size=num_ep_ranks)
        blueprint = draw(settings, strategy, model, (find_registered,), world_size)
        layers = [layer for layer, _ in build(blueprint, device)]
        if stays_in_slots(blueprint):  # as a host does where they stay
            for layer in layers:
                assert isinstance(layer.hosted, HostedExperts)
                layer.hosted.stack()
        measures = strategy.intervals().measures
        if is_early:
            launch_with_blocks(model, layers, measures=measures)
        pipelines = None
        if measures:
            none = DenseGradients((0,) * len(layers), 0, torch.float32, None)
            pipelines = Pipelines(layers, blueprint.cost_groups, None, none, 1, device)
        owners = [layer.routed.layer_context.plan.owner for layer in layers]
        node_C = layers[0].routed.layer_context.layout.node_C
        planning = Planning(
            strategy=strategy,
            layers=layers,
            job=Job.at_start(owners, node_C, blueprint.cost_groups),
            costs=Costs(
                layers, blueprint.cost_groups, blueprint.hardware, strategy.intervals(), pipelines
            ),
            checks=Checks(strategy, layers),
            mover=_stay,
            debug=False,
            rank=dist.get_rank(),
            log=log,
        )
        return cls(layers, planning)

    @property
    def node_C(self) -> np.ndarray:
        """Node of each EP rank."""
        return self.layers[0].routed.layer_context.layout.node_C

    def after_step(self, number: int) -> list[Rows]:
        """Plan the next step; what each layer routed in the one of a number. Collective."""
        rows = self.planning.take_rows()
        self.planning.after_step(number, rows)
        return rows


def _stay(old: Sequence[Placement], new: Sequence[Placement]) -> None:
    raise AssertionError("reshard_interval is 0: experts do not move")


# Tiny layers of every strategy.

WIDTH = 8
"""Of tokens and of experts: what is computed takes no time beside what issues it."""


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch."""

    layers: int  # ``L``
    experts: int  # ``E`` of a layer
    tokens: int  # ``T`` of a rank
    top_k: int  # ``K``
    width: int = WIDTH  # ``D``
    expert_width: int = WIDTH  # ``F``
    dtype: torch.dtype = torch.float32  # of weights and tokens
    device: torch.device = CPU  # where they are


@dataclass(frozen=True, eq=False)
class Batch:
    """What one step computes, and what gates would have chosen."""

    x_TD: Tensor  # tokens; their gradient is asked for
    expert_LTK: Sequence[Tensor]  # choices, different ones of each token, int64
    score_LTK: Sequence[Tensor]  # their weights; a leaf each, as routers are trained

    @classmethod
    def of(cls, sizes: Sizes, number: int, *, is_settled: bool = False) -> Batch:
        """The batch of a step. What experts are liked is of the layer and stays; who likes them is
        drawn anew in each step, or, where the run has settled, changes places with others: loads
        of many ranks that are drawn differ by less than those of one, which stands for all."""
        liked = torch.Generator().manual_seed(0)
        drawn = torch.Generator().manual_seed(number + 1)
        chosen = torch.Generator().manual_seed(0) if is_settled else drawn
        places_E = 1.0 + torch.arange(sizes.experts)
        experts, scores = [], []
        for _ in range(sizes.layers):
            weight_E = places_E[torch.randperm(sizes.experts, generator=liked)] ** -0.6
            weight_TE = weight_E.expand(sizes.tokens, -1)
            expert_TK = torch.multinomial(weight_TE, sizes.top_k, generator=chosen)
            if is_settled:
                expert_TK = expert_TK[torch.randperm(sizes.tokens, generator=drawn)]
            experts.append(expert_TK.to(sizes.device))
            score_TK = torch.rand(sizes.tokens, sizes.top_k, generator=drawn)
            scores.append(score_TK.to(sizes.device).requires_grad_())
        x_TD = torch.rand(sizes.tokens, sizes.width, generator=drawn)
        return cls(x_TD.to(sizes.device, sizes.dtype).requires_grad_(), experts, scores)


@dataclass(frozen=True)
class Way:
    """How layers of ours run."""

    name: str  # in the table
    block: Mapping[str, Any] = field(hash=False)  # of the JSON
    # streams are threads, as on a CPU; else one thread issues all, as on CUDA
    has_threads: bool = False


_FSSDP = {"overlap_degree": 8, "replicas_per_rank": 2, "reshard_interval": 0}
_EVERYWHERE = {**_FSSDP, "overlap_degree": 1024, "replicas_per_rank": 1024, "share": "paper"}
_PROPHET = {"rematerialize": False}
"""As where a GPU has room; a rank of a CPU does as if it had little."""


def esp(degree: int, **keys: Any) -> dict[str, Any]:
    """The block of whole experts in so many chunks."""
    pipeline = {"degree": degree, "slice_gradients": False}
    return {"strategy": "esp", "expert_sharding_size": 1, "esp": pipeline, **keys}


WAYS = (
    Way("ep", {"strategy": "ep"}),
    Way("ep, static capacity", {"strategy": "ep", "ep": {"static_capacity": 16}}),
    Way("ep, send once", {"strategy": "ep", "ep": {"send_once": True}}),
    *(Way(f"esp, degree {degree}", esp(degree)) for degree in (1, 2, 4, 8)),
    Way("fssdp", {"strategy": "fssdp", "fssdp": _FSSDP}),
    Way("fssdp, all everywhere", {"strategy": "fssdp", "fssdp": _EVERYWHERE}),
    Way(
        "fssdp, nothing copied", {"strategy": "fssdp", "fssdp": {**_FSSDP, "replicas_per_rank": 0}}
    ),
    Way("fssdp, paper share", {"strategy": "fssdp", "fssdp": {**_FSSDP, "share": "paper"}}),
    Way("prophet", {"strategy": "prophet", "prophet": _PROPHET}),
    Way("prophet, freed", {"strategy": "prophet", "prophet": {"rematerialize": True}}),
    Way("prophet, paper share", {"strategy": "prophet", "prophet": {**_PROPHET, "share": "paper"}}),
    Way("esp, degree 2, over fssdp", esp(2, balance="fssdp", fssdp=_FSSDP)),
    Way("esp, degree 2, over prophet", esp(2, balance="prophet", prophet=_PROPHET)),
    Way("esp, degree 2, threads", esp(2), has_threads=True),
    Way("fssdp, threads", {"strategy": "fssdp", "fssdp": _FSSDP}, has_threads=True),
    Way("prophet, threads", {"strategy": "prophet", "prophet": _PROPHET}, has_threads=True),
)
"""The first is what the others are compared with."""


class Experts(nn.Module):
    """SwiGLU experts as a host would have them; the product replaces them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, inner = sizes.width, sizes.expert_width

        def drawn(*shape: int) -> nn.Parameter:
            scaled = torch.rand(sizes.experts, *shape, dtype=sizes.dtype, device=sizes.device)
            return nn.Parameter(scaled * (WIDTH / shape[-1]) ** 0.5)

        self.gate_up, self.down = drawn(2 * inner, width), drawn(width, inner)


@register_experts(Experts)
def describe(experts: nn.Module) -> ExpertsDescription:
    """What the product has to know of them."""
    assert isinstance(experts, Experts)
    function = FeedForwardExperts(silu_gated)
    return ExpertsDescription(len(experts.down), ("gate_up", "down"), function)


class Block(nn.Module):
    """A transformer's block of which only the experts are left, if nobody lets it attend."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.attention: nn.Module | None = None
        self.experts = experts

    def forward(self, x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor) -> Tensor:
        if self.attention is not None:
            x_TD = x_TD + self.attention(x_TD)
        y_TD: Tensor = self.experts(x_TD, expert_TK, score_TK)
        return y_TD if self.attention is None else x_TD + y_TD


class Ours:
    """Layers of ours under a way, whose gradients are freed before each step. Collective."""

    def __init__(self, way: Way, sizes: Sizes) -> None:
        self.name = way.name
        self._blocks = nn.ModuleList([Block(Experts(sizes)) for _ in range(sizes.layers)])
        self.model = nn.ModuleDict({"blocks": self._blocks})
        # A device has streams of its own, which one thread issues.
        self._has_own_streams = way.has_threads or sizes.device.type == "cuda"
        with self.turn():
            self.replaced = ReplacedLayers.of(self.model, way.block, device=sizes.device)

    def turn(self) -> AbstractContextManager[None]:
        """In which all of a step happens."""
        return nullcontext() if self._has_own_streams else inline()

    def forward(self, batch: Batch) -> Tensor:
        """Tokens through all layers, ``[T, D]``."""
        x_TD = batch.x_TD
        for block, expert_TK, score_TK in zip(self._blocks, batch.expert_LTK, batch.score_LTK):
            x_TD = block(x_TD, expert_TK, score_TK)
        return x_TD

    def after_step(self, number: int) -> None:
        """What happens between the step of a number and the next."""
        self.replaced.after_step(number)

    def attend(self, attentions: Sequence[nn.Module]) -> None:
        """Let these, ``[T, D] -> [T, D]``, stand before the experts of each block, and let tokens
        go past both, too."""
        for block, attention in zip(self._blocks, attentions):
            block.attention = attention
