# SPDX-License-Identifier: Apache-2.0
"""Gradients between DeepSpeed's backward and its optimizer, and our one record of an engine.

Each gradient comes by here when it is ready, on its way into ZeRO's buckets (stage 1 to 3) or into
what the engine averages behind backward (stage 0).

*Experts last*: DeepSpeed puts gradients of dense weights and of experts into one bucket and reduces
it when it is full. With unequal experts, or grids of ranks that copy by plans of their own, it
would be full at other moments on other ranks, which would wait for each other for ever. So such
experts wait until the others have been reduced.

*Slices*: where an engine has ``GradientSlices``, dense gradients wait for them. An averaged one
goes through ZeRO's own code in a bucket of its own, where its mean takes the place of what ZeRO
would have received: so ZeRO keeps what this rank needs, in the form that it needs. But slices are
all-reduced even where ``use_multi_rank_bucket_allreduce`` is false, by which ZeRO reduces its own
buckets to the ranks that keep them. At stage 0 a mean is written where the gradient was.

Shape letters: N elements.
"""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, IPGBucket
from deepspeed.utils import groups
from torch import Tensor, nn

from ds_moe_ext.core.comm import max_in_place, sum_in_place
from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.hosts.attachment.modules import during
from ds_moe_ext.hosts.attachment.replacement import AttachedLayer
from ds_moe_ext.hosts.deepspeed.rank_groups import TensorParallel
from ds_moe_ext.hosts.steps.host import Schedules
from ds_moe_ext.hosts.steps.optimizers import Reduced, check_slice
from ds_moe_ext.hosts.steps.training_run import RECORD, Record
from ds_moe_ext.moe.layer import SawSlice
from ds_moe_ext.moe.replica_memory import Accumulation, KeptInGrad, KeptMeanwhile
from ds_moe_ext.planning.strategy import Keys
from ds_moe_ext.schedule.executor import Event, ScheduleStreams, streams_for
from ds_moe_ext.schedule.task import INTER

# Slices (FSMoE, section 5; spec section 3, runtime). DeepSpeed reduces a bucket of gradients when
# it is full, or all after backward. Here dense gradients wait in the order in which they become
# ready, and an MoE layer says when to average how many elements of them, where backward leaves the
# network idle. One that is whole goes back to DeepSpeed, and what no layer took DeepSpeed reduces
# as ever.


class Averaging(Protocol):
    """How DeepSpeed averages a gradient; equal ones may travel together."""

    def mean(self, flat_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Over the ranks, in the type that travels; ``flat_N`` may be overwritten. Collective."""
        ...


@dataclass(eq=False)
class Gradient:
    """A gradient on its way."""

    parameter: nn.Parameter  # whose it is
    flat_N: Tensor  # its elements
    averaging: Averaging  # how to average it
    keep: Callable[[Tensor], None]  # gives its mean to DeepSpeed, flat
    leave: Callable[[], None]  # leaves it to DeepSpeed to average
    taken: int = 0  # elements that slices took, from the first on
    landed: int = 0  # those of them that have been averaged
    means: list[Tensor] = field(default_factory=list)  # what came of them, in order

    @property
    def left(self) -> int:
        return self.flat_N.numel() - self.taken

    @property
    def is_whole(self) -> bool:
        return self.landed == self.flat_N.numel()


class _Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of a gradient, in a slice."""

    gradient: Gradient
    start: int
    stop: int


_Slice = list[_Piece]


class GradientSlices:
    """The dense gradients of one engine on their way through slices.

    ``reduce`` and ``begin`` are called by the thread of backward, or while it waits: by the streams
    of an MoE layer's program. Every rank takes the same elements, for gradients become ready in the
    same order on all.

    Args:
        engine: whose gradients; it is not kept alive.
        group: a communicator of the ranks that reduce dense gradients, which nobody else uses.
        piece_elements: what travels has this size, and what does not fill a piece waits (Lina);
            None cuts at the elements asked for.
        key: what a person sets to false to have none.

    Attributes:
        group: as given.
        key: likewise.
        reduced: what has been, since the start.
    """

    def __init__(
        self,
        engine: Any,
        group: dist.ProcessGroup,
        piece_elements: int | None = None,
        key: str = Keys().slices_gradients,
    ) -> None:
        self.group, self.key = group, key
        self.reduced = Reduced()
        self._engine = weakref.ref(engine)
        self._piece_elements = piece_elements
        self._known: set[int] = set()  # ids of parameters whose gradients were ready
        self._ready: deque[Gradient] = deque()  # with elements that no slice took
        # That a stream averages while backward goes on.
        self._begun: list[tuple[Event, ScheduleStreams, list[_Slice]]] = []
        self._whole: deque[Gradient] = deque()  # that DeepSpeed may have back

    @classmethod
    def of(
        cls, engine: Any, piece_bytes: int | None = None, *, key: str = Keys().slices_gradients
    ) -> GradientSlices:
        """Slices of an engine under construction, which is given its gradients when it has an
        optimizer. Collective."""
        # Ranks that share dense weights are neighbours; the others reduce those of one place.
        grid = Grid(dist.get_world_size(), TensorParallel.of(engine.mpu).size)
        group = ParallelLayout.build(grid, [("edp", INTER)], ranks_per_node=1).group("edp", INTER)
        piece_elements = None
        if piece_bytes is not None:
            piece_elements = max(1, piece_bytes // engine.communication_data_type.itemsize)
        return cls(engine, group, piece_elements, key)

    @property
    def ready_elements(self) -> int:
        """Elements that are ready and that no slice took."""
        return sum(gradient.left for gradient in self._ready)

    def reduce(self, elements: int) -> None:
        """Average so many elements, or as many as are ready, in the caller's stream. Collective."""
        self._land_begun()
        slices = self._cut(elements)
        self._average(slices)
        self._land(slices)
        self.reduced += Reduced(within_moe=_elements(slices), num_slices=len(slices))

    def begin(self, elements: int, saw: SawSlice | None = None) -> None:
        """Begin to average so many elements, or as many as are ready, in the stream between EP
        ranks, and return at once. Collective.

        The slices begun before have ended by then if the layer's own exchanges ran in that stream;
        else they are waited for.
        """
        self._land_begun()
        slices = self._cut(elements)
        if slices:
            streams = streams_for(slices[0][0].gradient.flat_N.device, overlaps=True)

            def work() -> None:
                start = streams.mark()
                self._average(slices)
                if saw is not None:
                    saw(start, streams)

            event = streams.submit(INTER, work, ())
            self._begun.append((event, streams, slices))
            self.reduced += Reduced(beside_dense=_elements(slices), num_slices=len(slices))

    # For the thread of backward, which alone touches what DeepSpeed keeps.

    def is_awaited(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient that is ready is dense and about to be reduced."""
        engine = self._engine()
        return (
            engine is not None
            and engine.enable_backward_allreduce
            and not engine.inside_no_sync_ctxt
            and not is_moe_param(parameter)
            and parameter.numel() > 0
        )

    def knows(self, parameter: nn.Parameter) -> bool:
        """Whether its gradient became ready in this backward."""
        return id(parameter) in self._known

    def add(self, gradient: Gradient) -> None:
        """Take a gradient that is ready, and give back those that are whole."""
        if self.knows(gradient.parameter):
            raise RuntimeError(
                f"a gradient of shape {tuple(gradient.parameter.shape)} became ready twice in one "
                "backward pass, as when reentrant activation checkpoints share a weight, but may "
                "have been reduced after the first time; set use_reentrant to false, or "
                f"{self.key}"
            )
        self._known.add(id(gradient.parameter))
        self._ready.append(gradient)
        self._give_back()

    def finish(self) -> None:
        """Average the rest of a gradient that a slice cut, and leave the others. Collective."""
        self._land_begun()
        self.reduced += Reduced(tail=self.ready_elements)
        if self._ready and self._ready[0].taken:
            rest = [self._take(self._ready[0].left)]
            self._average(rest)
            self._land(rest)
        self._give_back()
        while self._ready:
            self._ready.popleft().leave()
        self._known.clear()

    def drop(self) -> None:
        """Forget what a backward pass that failed has left; the host's users drop gradients then,
        or add to them."""
        self._land_begun()
        self._ready.clear()
        self._whole.clear()
        self._known.clear()

    def _give_back(self) -> None:
        while self._whole:
            gradient = self._whole.popleft()
            gradient.keep(torch.cat(gradient.means))

    # Slices.

    def _cut(self, elements: int) -> list[_Slice]:
        """Slices of the first elements that are ready."""
        check_slice(elements)
        elements = min(elements, self.ready_elements)
        if self._piece_elements is None:
            return [self._take(elements)] if elements else []
        return [self._take(self._piece_elements) for _ in range(elements // self._piece_elements)]

    def _take(self, elements: int) -> _Slice:
        pieces = []
        while elements:
            gradient = self._ready[0]
            start = gradient.taken
            gradient.taken += min(elements, gradient.left)
            elements -= gradient.taken - start
            pieces.append(_Piece(gradient, start, gradient.taken))
            if not gradient.left:
                self._ready.popleft()
        return pieces

    def _average(self, slices: list[_Slice]) -> None:
        """Average each over the ranks: in one collective, or one for each way of averaging."""
        for pieces in slices:
            for averaging, run in groupby(pieces, key=lambda piece: piece.gradient.averaging):
                own = list(run)
                parts = [piece.gradient.flat_N[piece.start : piece.stop] for piece in own]
                mean_N = averaging.mean(torch.cat(parts), self.group)
                for piece, part in zip(own, mean_N.split([len(part) for part in parts])):
                    piece.gradient.means.append(part)

    def _land_begun(self) -> None:
        """Make the caller's stream see what was begun: a group is used in one stream at a time."""
        for event, streams, slices in self._begun:
            streams.join([event])
            self._land(slices)
        self._begun.clear()

    def _land(self, slices: list[_Slice]) -> None:
        for gradient, start, stop in (piece for pieces in slices for piece in pieces):
            gradient.landed += stop - start
            if gradient.is_whole:
                self._whole.append(gradient)


def _elements(slices: Iterable[_Slice]) -> int:
    return sum(stop - start for pieces in slices for _, start, stop in pieces)


@dataclass(eq=False)
class EngineRecord(Record):
    """What we know of an engine."""

    # of its dense gradients; None where DeepSpeed reduces them alone
    slices: GradientSlices | None = None
    # parameter groups of a user's own optimizer, while DeepSpeed wraps it
    users_groups: list[dict[str, Any]] | None = None
    # gradients of these are reduced when all others have been
    last: set[nn.Parameter] = field(default_factory=set)
    # those of them that are ready, at stage 1 and 2 with the number of their group
    waiting: list[tuple[Any, ...]] = field(default_factory=list)
    # of the gradients that ZeRO is about to sum, flat, while it takes one back
    means: Tensor | None = None
    # addresses of gradients that slices averaged at ZeRO 0
    averaged: set[int] = field(default_factory=set)
    # gradients of experts that the engine averaged in the present step at ZeRO 0, in lists, with
    # the factor by which another average leaves them as they are
    averaged_experts: list[tuple[list[Tensor], float]] = field(default_factory=list)
    # numbers of the weights whose gradients slices were shown at ZeRO 0
    order: list[int] = field(default_factory=list)
    drops: int = 0  # times that its optimizer of ZeRO dropped what it had accumulated
    has_linked: bool = False  # its weights know where their states are
    # of a pipeline, what its engine is about to do
    schedules: Schedules = field(default_factory=Schedules)
    is_saving: bool = False  # a checkpoint is written while training goes on
    save_group: dist.ProcessGroup | None = None  # of all ranks, for the thread that does so

    def take_averaged(self) -> list[tuple[list[Tensor], float]]:
        """Gradients of experts that were averaged, which are about to be others."""
        averaged, self.averaged_experts = self.averaged_experts, []
        return averaged


NOTHING = EngineRecord()
"""Of an engine that does not run by us; nobody writes to it."""


def record_of(carrier: Any) -> EngineRecord:
    """Of an engine, or of its optimizer of ZeRO."""
    record: EngineRecord = getattr(carrier, RECORD, NOTHING)
    return record


def begin_record(engine: Any) -> EngineRecord:
    """The record of an engine that runs by us, from now on if it did not before."""
    if record_of(engine) is NOTHING:
        setattr(engine, RECORD, EngineRecord())
    return record_of(engine)


def share_record(engine: Any) -> None:
    """Let an engine's optimizer of ZeRO, which knows of no engine, carry its record too."""
    if record_of(engine) is not NOTHING and engine.zero_optimization():
        setattr(engine.optimizer, RECORD, record_of(engine))


# What ``zero_grad`` drops of an accumulation: it depends on where the optimizer sums gradients.


class EngineAccumulation:
    """What an engine has of one layer's experts; a ``moe.replicas.accumulation.Accumulation``.

    At ZeRO 0 and mostly at 1 gradients are summed in ``.grad``. At ZeRO 2 nothing drops them, and
    elsewhere ``zero_grad`` of the optimizer alone.
    """

    def __init__(self, engine: Any, layer: AttachedLayer) -> None:
        alive = weakref.ref(engine)
        self._engine = alive
        self._in_grad = KeptInGrad(layer.routed.layer_context.layer, lambda: layer.parameters)
        self._elsewhere = KeptMeanwhile(lambda: record_of(alive()).drops)

    def begin(self) -> None:
        self._own.begin()

    def is_kept(self) -> bool:
        return self._own.is_kept()

    @property
    def _own(self) -> Accumulation:
        """By the engine's optimizer, which comes after its layers. At ZeRO 0, too, not ``.grad``
        alone may have sums: a pipeline in bfloat16 has BF16_Optimizer, which empties it."""
        optimizer = getattr(self._engine(), "optimizer", None)
        is_elsewhere = isinstance(optimizer, BF16_Optimizer | DeepSpeedZeroOptimizer_Stage3)
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            is_elsewhere = optimizer.partition_gradients or optimizer.use_grad_accum_attribute
        return self._elsewhere if is_elsewhere else self._in_grad


def dropped(optimizer: Any, *_: Any, **__: Any) -> None:
    """The optimizer of an engine has dropped what it had, if it does."""
    record = record_of(optimizer)
    keeps = isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.partition_gradients
    if record is not NOTHING and not keeps:
        record.drops += 1


# In ZeRO's buckets.


def waits(optimizer: Any, parameter: nn.Parameter, *group: int) -> bool:
    """Whether a gradient that ZeRO is about to put into its bucket has to wait; it is remembered
    then. ``group`` is its number at stage 1 and 2, which stage 3 does without."""
    record = record_of(optimizer)
    if parameter in record.last:
        record.waiting.append((parameter, *group))
        return True
    slices = record.slices
    if slices is None or not _is_awaited(slices, parameter):
        return False
    if not slices.knows(parameter) or _reduces_as_ready(optimizer):
        slices.add(_gradient(optimizer, parameter, *group))
    return True


def saw_ready(optimizer: Any, parameter: nn.Parameter, group: int) -> None:
    """Slice a gradient that ZeRO 1 without ``overlap_comm`` would look at after backward only."""
    slices = record_of(optimizer).slices
    if slices is None or _reduces_as_ready(optimizer):
        return
    if optimizer.is_gradient_accumulation_boundary() and _is_awaited(slices, parameter):
        slices.add(_gradient(optimizer, parameter, group))


def reduce_waiting(optimizer: Any) -> None:
    """Reduce what no slice took, then what is left of the others, then experts."""
    record = record_of(optimizer)
    if record.slices is not None:
        record.slices.finish()
    waiting, record.waiting = record.waiting, []
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        waiting.sort(key=lambda given: given[0].ds_id)  # they come in another order on each rank
    elif waiting:
        optimizer.reduce_ipg_grads()
    for given in waiting:
        _reduce(optimizer, *given)


def means_of(optimizer: Any, bucket: list[Tensor]) -> Tensor | None:
    """The means of what ZeRO is about to sum, if slices have averaged it: flat, and in the type
    that travels. ZeRO asks for them in order."""
    record = record_of(optimizer)
    left_N = record.means
    if left_N is None:
        return None
    size = sum(tensor.numel() for tensor in bucket)
    record.means = left_N[size:]
    return left_N[:size]


@dataclass(frozen=True)
class _ZeroAveraging:
    """As ZeRO does it: it divides in one type, and sums in another."""

    divisor: float
    divided_in: torch.dtype
    summed_in: torch.dtype

    def mean(self, flat_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        share_N = flat_N.to(self.divided_in).div_(self.divisor)
        return sum_in_place(share_N.to(self.summed_in), group)


def _gradient(optimizer: Any, parameter: nn.Parameter, group: int) -> Gradient:
    num_ranks = dist.get_world_size(optimizer.dp_process_group) / optimizer.sequence_parallel_size
    summed_in = optimizer.get_param_comm_dtype(parameter)
    averaging = _ZeroAveraging(
        divisor=num_ranks if optimizer.gradient_average else 1.0,
        divided_in=optimizer.ipg_buckets[summed_in].buffer[0].dtype,
        summed_in=summed_in,
    )
    return Gradient(
        parameter,
        optimizer.get_gradient_for_reduction(parameter).view(-1),
        averaging,
        keep=partial(_keep_by_zero, optimizer, parameter, group, averaging),
        leave=partial(_reduce, optimizer, parameter, group),
    )


def _keep_by_zero(
    optimizer: Any, parameter: nn.Parameter, group: int, averaging: _ZeroAveraging, mean_N: Tensor
) -> None:
    """Let ZeRO reduce one gradient, whose mean is known, in a bucket of its own."""
    buffer_N = torch.empty_like(mean_N, dtype=averaging.divided_in)
    if mean_N.is_cuda:  # what is freed in Python stays until ZeRO has read it
        stream = get_accelerator().current_stream()
        if optimizer.overlap_comm:
            stream = optimizer.reduction_stream
        mean_N.record_stream(stream)
        buffer_N.record_stream(stream)
    buckets = {averaging.summed_in: IPGBucket([buffer_N, buffer_N])}
    with (
        during(optimizer, ipg_buckets=buckets, extra_large_param_to_reduce={}),
        during(record_of(optimizer), means=mean_N),
    ):
        _reduce(optimizer, parameter, group)
        optimizer.reduce_ipg_grads(comm_dtype=averaging.summed_in)


def _reduce(optimizer: Any, *given: Any) -> None:
    """DeepSpeed's own, under our patch."""
    patched = type(optimizer).reduce_independent_p_g_buckets_and_remove_grads
    patched.__wrapped__(optimizer, *given)


def _is_awaited(slices: GradientSlices, parameter: nn.Parameter) -> bool:
    """Whether slices wait for a gradient, and it is ready."""
    # A tiled computation makes a gradient in parts and says which is the last.
    return getattr(parameter, "ds_grad_is_ready", True) and slices.is_awaited(parameter)


def _reduces_as_ready(optimizer: Any) -> bool:
    return bool(optimizer.partition_gradients or optimizer.overlap_comm)


# At stage 0, where DeepSpeed averages all of them behind backward.


def slice_gradients(engine: Any, slices: GradientSlices) -> None:
    """Reduce its dense gradients in slices from now on."""
    for number, parameter in enumerate(engine.module.parameters()):
        if parameter.requires_grad:
            show = partial(_show, weakref.ref(engine), slices, number)
            parameter.register_post_accumulate_grad_hook(show)


def unaveraged(engine: Any, gradients: list[Any]) -> list[Any]:
    """Those of the gradients that slices have not averaged. Collective."""
    record = record_of(engine)
    if record.slices is None:
        return gradients
    # DeepSpeed takes zeros for a gradient that a rank does not have; slices cannot.
    digest = zlib.crc32(repr(record.order).encode())
    record.order.clear()
    ends = torch.tensor([digest, -digest], device=engine.device)
    most, negative_least = max_in_place(ends, engine.seq_data_parallel_group).tolist()
    if most != -negative_least:
        raise RuntimeError(
            "ranks have gradients of different dense weights (for example, the model skips a "
            "layer on one of them), so their slices do not match; let all ranks use the same "
            f"weights, or set {record.slices.key} to false"
        )
    record.slices.finish()
    # DeepSpeed's own class of sparse ones is no tensor.
    left = [g for g in gradients if not (torch.is_tensor(g) and g.data_ptr() in record.averaged)]
    record.averaged.clear()
    return left


def average_experts(
    engine: Any, gradients: Mapping[str, list[Tensor]], average: Callable[[], None]
) -> None:
    """Let DeepSpeed average experts' gradients. What it divides them by is not what it divides
    dense ones by, where sequence parallel ranks count for one: this is made up for."""
    by = dist.get_world_size(groups._get_data_parallel_group())
    dense_by = dist.get_world_size(engine.seq_data_parallel_group) / engine.sequence_parallel_size
    if by != dense_by and engine.gradient_average:
        for own in filter(None, gradients.values()):
            torch._foreach_mul_(own, by / dense_by)
    average()
    divided_by = dense_by if engine.gradient_average else 1
    record_of(engine).averaged_experts = [
        (own, divided_by / dist.get_world_size(groups._get_expert_data_parallel_group(name)))
        for name, own in gradients.items()
        if own
    ]


def _show(engine: weakref.ref[Any], slices: GradientSlices, number: int, parameter: Tensor) -> None:
    alive = engine()
    if alive is None or not alive.is_gradient_accumulation_boundary():
        return
    assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
    if parameter.grad.is_sparse or not slices.is_awaited(parameter):
        return
    flat_N, record = parameter.grad.data.view(-1), record_of(alive)
    num_ranks = dist.get_world_size(slices.group) / alive.sequence_parallel_size
    before, after = 1.0 / num_ranks, 1.0
    if alive.postscale_gradients():
        divided = alive.gradient_predivide_factor()
        before, after = 1.0 / divided, divided / num_ranks
    if not alive.gradient_average:
        before, after = 1.0, 1.0
    averaging = _EngineAveraging(alive.communication_data_type, before, after)

    def keep(mean_N: Tensor) -> None:
        flat_N.copy_(mean_N)
        record.averaged.add(flat_N.data_ptr())

    record.order.append(number)
    # What is left DeepSpeed finds by itself.
    slices.add(Gradient(parameter, flat_N, averaging, keep, leave=lambda: None))


@dataclass(frozen=True)
class _EngineAveraging:
    """As the engine does it: it scales what travels, before and after."""

    summed_in: torch.dtype
    before: float
    after: float

    def mean(self, flat_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        return sum_in_place(flat_N.to(self.summed_in).mul_(self.before), group).mul_(self.after)
