# SPDX-License-Identifier: Apache-2.0
"""Dense gradients, averaged in slices where backward leaves the network idle.

FSMoE, section 5 (spec section 3, runtime). DeepSpeed puts gradients into buckets and reduces a
bucket when it is full, or all after backward. Here they wait in the order in which they become
ready, and an MoE layer says when to average how many elements of them. A gradient that is whole
goes back to DeepSpeed, and what no layer took is reduced by DeepSpeed as ever. What differs between
ZeRO stages is in ``buckets`` and ``zero_0``.

Shape letters: N elements.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from torch import Tensor, nn

from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.hosts.attachment.notices import Refusal
from ds_moe_ext.hosts.deepspeed.refusals import told
from ds_moe_ext.hosts.deepspeed.tensor_parallel import TensorParallel
from ds_moe_ext.hosts.steps.optimizers import Reduced, check_slice
from ds_moe_ext.moe.layer import SawSlice
from ds_moe_ext.planning.strategy import Keys
from ds_moe_ext.schedule.executor import Event, Lanes, lanes_for
from ds_moe_ext.schedule.task import INTER


class Averaging(Protocol):
    """How DeepSpeed averages a gradient; equal ones may travel together."""

    def mean(self, flat_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Over the ranks, in the type that travels; ``flat_N`` may be overwritten. Collective."""
        ...


@dataclass(eq=False)
class Gradient:
    """A gradient on its way.

    Attributes:
        parameter: whose it is.
        flat_N: its elements.
        averaging: how to average it.
        keep: gives its mean to DeepSpeed, flat.
        leave: leaves it to DeepSpeed to average.
        taken: elements that slices took, from the first on.
        landed: those of them that have been averaged.
        means: what came of them, in order.
    """

    parameter: nn.Parameter
    flat_N: Tensor
    averaging: Averaging
    keep: Callable[[Tensor], None]
    leave: Callable[[], None]
    taken: int = 0
    landed: int = 0
    means: list[Tensor] = field(default_factory=list)

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


class _Begun(NamedTuple):
    """Slices that a lane averages while backward goes on."""

    event: Event
    lanes: Lanes
    slices: list[_Slice]


class GradientSlices:
    """The dense gradients of one engine on their way through slices.

    ``reduce`` and ``begin`` are called by the thread of backward, or while it waits: by the lanes
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
        self._begun: list[_Begun] = []
        self._whole: deque[Gradient] = deque()  # that DeepSpeed may have back

    @classmethod
    def of(
        cls, engine: Any, piece_bytes: int | None = None, *, key: str = Keys().slices_gradients
    ) -> GradientSlices:
        """Slices of an engine under construction, which is given its gradients when it has an
        optimizer. Collective.

        Args:
            engine: DeepSpeed's.
            piece_bytes: fixed size of what travels; Lina's is 30 MB.
            key: what a person sets to false to have none.
        """
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
        """Average so many elements, or as many as are ready, in the caller's lane. Collective."""
        self._land_begun()
        slices = self._cut(elements)
        self._average(slices)
        self._land(slices)
        self.reduced += Reduced(within_moe=_elements(slices), num_slices=len(slices))

    def begin(self, elements: int, saw: SawSlice | None = None) -> None:
        """Begin to average so many elements, or as many as are ready, in the lane between cells,
        and return at once. Collective.

        The slices begun before have ended by then if the layer's own exchanges ran in that lane;
        else they are waited for.

        Args:
            elements: of gradients.
            saw: told as the lane ends, when it began; None tells nobody.
        """
        self._land_begun()
        slices = self._cut(elements)
        if slices:
            lanes = lanes_for(slices[0][0].gradient.flat_N.device, overlaps=True)

            def work() -> None:
                start = lanes.mark()
                self._average(slices)
                if saw is not None:
                    saw(start, lanes)

            event = lanes.submit(INTER, work, ())
            self._begun.append(_Begun(event, lanes, slices))
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
        """Take a gradient that is ready, and give back those that are whole.

        Raises:
            RuntimeError: it has been ready before, and may have been reduced.
        """
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
        """Make the caller's lane see what was begun: a group is used in one lane at a time."""
        for begun in self._begun:
            begun.lanes.join([begun.event])
            self._land(begun.slices)
        self._begun.clear()

    def _land(self, slices: list[_Slice]) -> None:
        for gradient, start, stop in (piece for pieces in slices for piece in pieces):
            gradient.landed += stop - start
            if gradient.is_whole:
                self._whole.append(gradient)


def _elements(slices: Iterable[_Slice]) -> int:
    return sum(stop - start for pieces in slices for _, start, stop in pieces)


def _shards_weights(engine: Any) -> str:
    stage = engine.zero_optimization_stage()
    return "" if stage in (0, 1, 2) else told("zero_optimization.stage", stage)


def _sums_after_backward(engine: Any) -> str:
    types = engine.get_data_types()
    is_late = engine.zero_optimization_stage() == 1 and types == (torch.bfloat16, torch.float32)
    is_late = is_late and not engine.zero_cpu_offload()  # by another wrapper
    return "bfloat16 weights have float32 sums at stage 1" if is_late else ""


def _has_no_buckets(engine: Any) -> str:
    is_asked = engine.zero_optimization_stage() > 0 and not engine.zero_contiguous_gradients()
    return told("zero_optimization.contiguous_gradients", False) if is_asked else ""


def _does_not_scatter(engine: Any) -> str:
    is_asked = engine.zero_optimization_stage() > 0 and not engine.zero_reduce_scatter()
    return told("zero_optimization.reduce_scatter", False) if is_asked else ""


def _is_pipeline(engine: Any) -> str:
    return "the model is a PipelineModule" if engine.pipeline_parallelism else ""


UNSLICED = (
    Refusal(
        "a PipelineModule",
        _is_pipeline,
        "its engine reduces all gradients behind the last backward",
        "pass a plain nn.Module",
    ),
    Refusal(
        "zero_optimization.stage 3", _shards_weights, "it shards weights", "use stage 0, 1 or 2"
    ),
    Refusal(
        "bfloat16 with data_types.grad_accum_dtype fp32 at stage 1",
        _sums_after_backward,
        "DeepSpeed's BF16_Optimizer makes the gradients it reduces after backward",
        "use stage 2, or leave out data_types.grad_accum_dtype",
    ),
    Refusal(
        "zero_optimization.contiguous_gradients false",
        _has_no_buckets,
        "ZeRO then has no buckets that averaged gradients could go back through",
        "set it to true",
    ),
    Refusal(
        "zero_optimization.reduce_scatter false",
        _does_not_scatter,
        "DeepSpeed refuses it with experts",
        "set it to true",
    ),
)
"""Of an engine: DeepSpeed does not show each gradient as it becomes ready."""
