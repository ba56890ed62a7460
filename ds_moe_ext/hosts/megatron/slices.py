# SPDX-License-Identifier: Apache-2.0
"""Dense gradients under Megatron-core, reduced where backward leaves the network idle.

Megatron's DDP puts gradients into buckets and, with ``overlap_grad_reduce``, starts to reduce a
bucket group as soon as the last of its gradients is ready. Here, while plans have slices, a dense
group that is ready waits, and MoE layers say how many elements are to be reduced: a group goes when
the elements granted cover it. So a slice is a bucket group, and ``--ddp-bucket-size`` says how fine
slices are. What no layer took goes when Megatron finishes gradients. What Megatron does to a group
is its own: checks, scaling, reduce-scatter or all-reduce; only the moment is ours. Groups of
experts, and the first step, in which Megatron reduces after backward, are left alone.

**Order.** All ranks that share dense weights must start their groups in one order. Groups become
ready in one order on all of them, which Megatron relies on too; and they go by counts that plans
give to all alike, never by time.

**Communicators.** The groups travel over Megatron's own data parallel communicator, in our stream
between EP ranks. Megatron's thread uses it in backward for dense groups alone, which wait here;
what runs meanwhile (gradients of experts, tensor and pipeline parallelism) has communicators of its
own. ``finish`` waits for the stream before Megatron's thread uses it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch import nn

from ds_moe_ext.hosts.attachment.replacement import AttachedLayer
from ds_moe_ext.hosts.steps.optimizers import Reduced, check_slice
from ds_moe_ext.hosts.steps.pipeline_costs import DenseGradients
from ds_moe_ext.moe.layer import SawSlice
from ds_moe_ext.planning.strategy import Keys
from ds_moe_ext.schedule.executor import Event, ScheduleStreams, streams_for
from ds_moe_ext.schedule.task import INTER


class Waiting(NamedTuple):
    """A bucket group of Megatron's that is ready, and what starts to reduce it as Megatron does."""

    group: Any
    start: Callable[[], None]

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.group.params)


class BucketSlices:
    """Ready bucket groups on their way; a ``moe.layer.GradientSlices``. Plans of the layers say how
    many elements go where.

    ``reduce`` and ``begin`` are called by the thread of backward, or while it waits: by the streams
    of an MoE layer's program.
    """

    def __init__(self, layers: Sequence[AttachedLayer], device: torch.device) -> None:
        self.reduced = Reduced()  # elements that have been, in steps that were planned so
        self._layers = layers
        self._device = device
        self._waiting: deque[Waiting] = deque()
        # groups that a stream reduces meanwhile
        self._begun: list[tuple[Event, ScheduleStreams]] = []
        self._granted = 0  # elements that layers asked for and no group has covered yet

    @property
    def is_planned(self) -> bool:
        """Whether any layer will ask for elements."""
        return any(map(any, (layer.routed.layer_context.plan.reductions for layer in self._layers)))

    def add(self, waiting: Waiting) -> None:
        """Let a group wait that is ready."""
        self._waiting.append(waiting)

    def reduce(self, elements: int) -> None:
        """Grant so many elements, or as many as are ready, and reduce the groups that are covered,
        in the caller's stream. Collective."""
        self._land_begun()
        covered = self._covered(elements)
        _run(covered)
        self.reduced += Reduced(within_moe=_sum(covered), num_slices=len(covered))

    def begin(self, elements: int, saw: SawSlice | None = None) -> None:
        """Grant so many elements, begin to reduce the groups that are covered in the stream between
        EP ranks, and return at once. ``saw`` is notified as the stream ends, of when it began.
        Collective."""
        self._land_begun()
        covered = self._covered(elements)
        if not covered:
            return
        streams = streams_for(self._device, overlaps=True)

        def work() -> None:
            start = streams.mark()
            _run(covered)
            if saw is not None:
                saw(start, streams)

        self._begun.append((streams.submit(INTER, work, ()), streams))
        self.reduced += Reduced(beside_dense=_sum(covered), num_slices=len(covered))

    def finish(self) -> None:
        """Start what no layer took, all of it; for Megatron's thread. Collective."""
        self._land_begun()
        self.reduced += Reduced(tail=_sum(self._waiting))
        while self._waiting:
            self._waiting.popleft().start()
        self._granted = 0

    def _covered(self, elements: int) -> list[Waiting]:
        """The first groups, as many as all that was granted covers."""
        check_slice(elements)
        self._granted = min(self._granted + elements, _sum(self._waiting))
        covered = []
        while self._waiting and self._waiting[0].elements <= self._granted:
            covered.append(self._waiting.popleft())
            self._granted -= covered[-1].elements
        return covered

    def _land_begun(self) -> None:
        """Make the caller's stream see what was begun: a communicator is used in one at a time."""
        while self._begun:
            event, streams = self._begun.pop()
            streams.join([event])


class SlicedGroup(_ParamAndGradBucketGroup):
    """A dense bucket group of Megatron's that waits for its turn in ``slices``."""

    slices: BucketSlices

    def start_grad_sync(self, *args: Any, **named: Any) -> None:
        """Called when all its gradients are ready; in the first step, when they are finished."""
        start = partial(super().start_grad_sync, *args, **named)
        is_first = getattr(self, "is_first_batch", False)  # not known to versions before 0.15
        if self.slices.is_planned and not is_first:
            self.slices.add(Waiting(self, start))
        else:
            start()

    def finish_grad_sync(self, *args: Any, **named: Any) -> None:
        """Called for each group before the optimizer's step."""
        self.slices.finish()
        super().finish_grad_sync(*args, **named)


class _Landed:
    """In the place of what Megatron waits for: a stream has waited, and backward for the stream."""

    def wait(self) -> None:
        return None


def why_unsliced(chunks: Sequence[Any], key: str = Keys().slices_gradients) -> str | None:
    """Why gradients of a model's parts, in Megatron's DDP, cannot be sliced, for a person who asked
    by this key; empty where there is nothing to report; None where they can."""
    config, groups = chunks[0].ddp_config, _dense_groups(chunks)
    left = f"{key} has no effect, and dense gradients are left to Megatron: "
    if not config.overlap_grad_reduce:
        return (
            f"{left}it reduces them after backward; add --overlap-grad-reduce, and the "
            "--ddp-bucket-size that slices are to have"
        )
    if config.num_distributed_optimizer_instances > 1:
        return (
            f"{left}it reduces them in two stages with --num-distributed-optimizer-instances "
            f"{config.num_distributed_optimizer_instances}; leave that out"
        )
    if getattr(config, "reduce_scatter_with_fp32_accumulation", False):
        return (
            f"{left}a bucket waits for the one before it with "
            "--ddp-reduce-scatter-with-fp32-accumulation; leave that out"
        )
    if not groups or _communicator(groups[0]).size() == 1:
        return ""
    if len(groups) == 1:
        is_bucketed = chunks[0].bucket_size is not None
        remedy = "give a smaller --ddp-bucket-size"
        reported = remedy if is_bucketed else "it makes no more on pipeline stages after the first"
        return f"{left}they are one bucket, which is ready when backward ends; {reported}"
    return None


def slice_gradients(chunks: Sequence[Any], layers: Sequence[AttachedLayer]) -> BucketSlices:
    """Let a model's layers say when its dense gradients are reduced, where ``why_unsliced`` has
    nothing against it."""
    slices = BucketSlices(layers, next(chunks[0].parameters()).device)
    for group in _dense_groups(chunks):
        group.__class__ = SlicedGroup
        group.slices = slices
    for layer in layers:
        layer.routed.slices = slices
    return slices


def dense_gradients(
    model: nn.Module, chunks: Sequence[Any], layers: Sequence[AttachedLayer], *, is_sliced: bool
) -> DenseGradients:
    """What Megatron reduces beside the layers.

    Slices are planned by what Megatron does: gradients are ready bucket by bucket, and with a
    distributed optimizer each rank keeps a part of the sums, which takes about half as long. A
    hardware file knows all-reduces alone, so by that they are thought to take twice as long.
    """
    config, groups = chunks[0].ddp_config, _dense_groups(chunks)
    dtype = groups[0].buckets[0].grad_data.dtype if groups else torch.float32
    return DenseGradients.of(
        model,
        layers,
        dtype,
        _communicator(groups[0]) if is_sliced else None,
        buckets=[group.params for group in groups],
        scatters=config.use_distributed_optimizer,
    )


def _dense_groups(chunks: Sequence[Any]) -> list[Any]:
    return [group for chunk in chunks for group in chunk.bucket_groups]


def _communicator(group: Any) -> dist.ProcessGroup:
    """That a bucket group is reduced over."""
    communicator: dist.ProcessGroup = (
        group.intra_distributed_optimizer_instance_group
        if group.ddp_config.use_distributed_optimizer
        else group.data_parallel_group
    )
    return communicator


def _run(covered: Sequence[Waiting]) -> None:
    """Reduce groups in the caller's stream, all at once, and wait for them there."""
    for waiting in covered:
        waiting.start()
    for waiting in covered:
        waiting.group.grad_reduce_handle.wait()
        waiting.group.grad_reduce_handle = _Landed()


def _sum(groups: Sequence[Waiting] | deque[Waiting]) -> int:
    return sum(waiting.elements for waiting in groups)
