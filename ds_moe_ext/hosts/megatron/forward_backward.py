# SPDX-License-Identifier: Apache-2.0
"""A step of zebra parallelism in the place of Megatron's forward-backward schedule.

The host's micro-batches are the stripes: each runs Megatron's own forward step in a coroutine that
pauses at the experts, and backward goes the same way back, in the order of Theorem 1. Expert ranks
serve. Gradients are handed to Megatron's DDP stripe by stripe, as autograd would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.hosts.megatron.role_scale import ScaledOnce
from ds_moe_ext.hosts.steps.training_run import RECORD, Record
from ds_moe_ext.hosts.zebra.passage import Passage
from ds_moe_ext.hosts.zebra.stack import Stack
from ds_moe_ext.hosts.zebra.stripe import Stripe
from ds_moe_ext.strategies.settings import BLOCK


@dataclass(frozen=True, eq=False)
class Ran:
    """A micro-batch that the model has run.

    Attributes:
        loss: as Megatron would begin backward with it.
        kept: what Megatron's schedule returns of it.
    """

    loss: Tensor
    kept: list[Any]


class HandsOver:
    """Gives gradients to the hooks that DDP has put on its parameters."""

    def add(self, parameter: Tensor, grad: Tensor) -> None:
        """One more."""
        torch.autograd.backward(parameter, grad)


@dataclass(frozen=True, eq=False)
class StripedSteps:
    """Called as Megatron's ``forward_backward_func`` is. Collective over the ZP group.

    Attributes:
        chunk: the model in its DDP.
        stack: its layers.
        control: the ranks of the ZP group, over gloo.
        num_stripes: micro-batches that are under way at once; None: all of a step.
        checks: compare what all ranks issued, after every pass.
    """

    chunk: Any
    stack: Stack
    control: dist.ProcessGroup
    num_stripes: int | None
    checks: bool

    def __call__(
        self,
        *,
        num_microbatches: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        **given: Any,
    ) -> list[Any]:
        num = self._agreed(num_microbatches, forward_only)
        config = self.chunk.config
        forward = partial(
            self._forward,
            given=given,
            num_microbatches=num,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
        )
        kept: list[Any] = []
        if not forward_only:
            self._scaled.begin()
        with _timed(config), self._unsynced():
            for first in range(0, num, self.num_stripes or num):
                numbers = range(num)[first : first + (self.num_stripes or num)]
                kept += self._pass(numbers, forward, None if forward_only else HandsOver())
        if not forward_only:
            self._finalize()
        return [] if collect_non_loss_data and not self.stack.is_attention else self._told(kept)

    def _pass(
        self, numbers: Sequence[int], forward: Callable[[int], Ran], grads: HandsOver | None
    ) -> list[Any]:
        """Some micro-batches there and, where gradients are wanted, back."""
        stack = self.stack
        stripes = []
        for number in numbers if stack.is_attention else ():
            call = partial(forward, number)
            add = None if grads is None else grads.add
            stripes.append(Stripe([Passage(call, add, stack.threads, stack.here)], [1.0]))
        control = self.control if self.checks else None
        stack.run(len(numbers), stripes, grads, counts=self.chunk.training, control=control)
        return [kept for stripe in stripes for kept in stripe.passages[0].output.kept]

    def _forward(
        self,
        number: int,
        *,
        given: dict[str, Any],
        num_microbatches: int,
        forward_only: bool,
        collect_non_loss_data: bool,
    ) -> Ran:
        config, batches = self.chunk.config, given["data_iterator"]
        kept: list[Any] = []
        output, _ = schedules.forward_step(
            given["forward_step_func"],
            batches[0] if isinstance(batches, list) else batches,
            self.chunk,
            num_microbatches,
            None,
            kept,
            config,
            1,
            collect_non_loss_data,
            is_first_microbatch=schedules.check_first_val_step(
                given.get("first_val_step"), forward_only, number == 0
            ),
            current_microbatch=number,
        )
        if not forward_only and config.grad_scale_func is not None:
            output = config.grad_scale_func(output)
        return Ran(output, kept)

    def _unsynced(self) -> Any:
        """DDP reduces no gradient, inside the block: a weight may get several in a pass."""
        overlaps = self.chunk.ddp_config.overlap_grad_reduce
        return self.chunk.no_sync() if overlaps else nullcontext()

    @cached_property
    def _scaled(self) -> ScaledOnce:
        """An expert rank divides by the number of its role's ranks, and has the sum of what all
        attention ranks of the group found; wanted is the mean over attention ranks."""
        roles = self.stack.roles
        share = len(roles.expert_cells) / len(roles.attention_cells)
        return ScaledOnce(self.chunk, 1.0 if self.stack.is_attention else share)

    def _finalize(self) -> None:
        """Reduce gradients as Megatron does."""
        config = self.chunk.config
        self._scaled.end()
        if self.chunk.ddp_config.overlap_grad_reduce:
            self.chunk.start_grad_sync()
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func([self.chunk], None)

    def _agreed(self, num_microbatches: int, forward_only: bool) -> int:
        """The number of micro-batches of an attention rank. Collective."""
        told = gather_objects((num_microbatches, forward_only), self.control)
        counts = {told[cell][0] for cell in self.stack.roles.attention_cells}
        if len(counts) > 1 or len({is_evaluation for _, is_evaluation in told}) > 1:
            raise RuntimeError(
                f"{BLOCK}: the ranks of a ZP group are not at the same step: they have (number of "
                f"micro-batches, only forward) {told}; give all ranks the same flags"
            )
        return int(counts.pop())

    def _told(self, kept: list[Any]) -> list[Any]:
        """What Megatron's schedule returns: of an expert rank the mean of what the attention ranks
        of its group return. Collective."""
        is_attention = self.stack.is_attention
        told = gather_objects(tree_map(_on_host, kept) if is_attention else None, self.control)
        if is_attention:
            return kept
        trees = [told[cell] for cell in self.stack.roles.attention_cells]
        leaves, shapes = zip(*map(tree_flatten, trees))
        means = [_mean(column, self.stack.device) for column in zip(*leaves)]
        found: list[Any] = tree_unflatten(means, shapes[0])
        return found


def _on_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _mean(column: Sequence[Any], device: torch.device) -> Any:
    """Of numbers; of anything else the first."""
    first = column[0]
    if isinstance(first, Tensor):
        return torch.stack([x.double() for x in column]).mean(0).to(device, first.dtype)
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return type(first)(sum(column) / len(column))
    return first


@contextmanager
def _timed(config: Any) -> Iterator[None]:
    """As Megatron times a schedule. What it times of a micro-batch begins anew before it has
    ended, where several are under way."""
    timers = config.timers
    if timers is None:
        yield
        return
    timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    config.timers = None
    try:
        yield
    finally:
        config.timers = timers
        timers("forward-backward").stop()


@dataclass(eq=False)
class ModelRecord(Record):
    """What is known of a model's DDP whose ranks have roles.

    Attributes:
        steps: how it runs.
    """

    steps: StripedSteps | None = None


def set_steps(steps: StripedSteps) -> None:
    """Let a model run so from now on."""
    setattr(steps.chunk, RECORD, ModelRecord(steps=steps))


def steps_of(model: Any) -> StripedSteps | None:
    """How a model runs, as Megatron's schedules are given it; None where ranks have no roles."""
    chunk = model[0] if isinstance(model, list) else model
    record: ModelRecord | None = getattr(chunk, RECORD, None)
    return None if record is None else record.steps
