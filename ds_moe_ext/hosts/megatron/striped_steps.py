# SPDX-License-Identifier: Apache-2.0
"""A step of zebra parallelism in the place of Megatron's forward-backward schedule.

The host's micro-batches are the stripes: each runs Megatron's own forward step in a coroutine that
pauses at the experts, and backward goes the same way back, in the order of Theorem 1. Expert ranks
serve. Gradients are handed to the hooks of Megatron's DDP stripe by stripe, as autograd would. On a
stage of a pipeline, Megatron's own 1F1B says in which order units of stripes go forward and back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.core.layout import divisors
from ds_moe_ext.hosts.attachment.modules import during
from ds_moe_ext.hosts.steps.training_run import RECORD, Record
from ds_moe_ext.hosts.zebra.stripe_model import Ahead, Stack
from ds_moe_ext.hosts.zebra.stripe_pass import Stripe, StripePass
from ds_moe_ext.strategies.settings import BLOCK


class _Ran(NamedTuple):
    """A micro-batch that the model has run: the loss as Megatron would begin backward with it, and
    what Megatron's schedule returns of it."""

    loss: Tensor
    kept: list[Any]
    num_tokens: Tensor  # that its loss is a sum of, 0-dim, where that is asked for


_STOCK_FORWARD_STEP = schedules.forward_step


@dataclass(frozen=True, eq=False)
class StripedSteps:
    """Called as Megatron's ``forward_backward_func`` is. Collective over the ZP group."""

    chunk: Any  # the model in its DDP
    stack: Stack  # its layers
    control: dist.ProcessGroup  # the ranks of the ZP group, over gloo
    stages: dist.ProcessGroup  # the ranks of the pipeline that this one is in
    # micro-batches that run as stripes of one pass; None: all of a step, or on a stage of a
    # pipeline the fewest that overlap
    num_stripes: int | None
    checks: bool  # compare what all ranks issued, after every pass

    def __call__(
        self,
        *,
        num_microbatches: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        **given: Any,
    ) -> list[Any]:
        num = self._agreed(num_microbatches, forward_only)
        config, ddp_config = self.chunk.config, self.chunk.ddp_config
        if not forward_only:
            self._scaled.begin()
        # DDP reduces no gradient meanwhile: a weight may get several in a pass.
        unsynced = self.chunk.no_sync() if ddp_config.overlap_grad_reduce else nullcontext()
        passes = _Passes(self, num, forward_only, collect_non_loss_data, given)
        with _timed(config), unsynced:
            if self.stages.size() > 1:
                passes.pipelined()
            else:
                passes.all_at_once()
        kept = passes.kept
        if not forward_only:
            self._scaled.end()
            if ddp_config.overlap_grad_reduce:
                self.chunk.start_grad_sync()
            if config.finalize_model_grads_func is not None:
                by_token = config.calculate_per_token_loss
                counted = self._counted(passes.num_tokens) if by_token else None
                config.finalize_model_grads_func([self.chunk], counted)
        is_silent = collect_non_loss_data and not self.stack.is_attention
        return [] if is_silent else self._reported(kept)

    @cached_property
    def _scaled(self) -> _ScaledOnce:
        """A rank divides by the data and context parallel ranks of its role, and an expert rank has
        the sum of what all attention ranks of the group found; wanted is the mean over data and
        context parallel attention ranks, and the sum over tensor parallel ones. Of losses that are
        sums over tokens nobody divides, and wanted is the sum. Collective."""
        size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        sizes = gather_objects(size, self.control)
        by_token = self.chunk.config.calculate_per_token_loss
        share = 1.0 if by_token else size / sizes[self.stack.roles.attention_ep_ranks[0]]
        return _ScaledOnce(self.chunk, share)

    def _counted(self, num_tokens: Tensor) -> Tensor:
        """What this rank adds to its role's sum of tokens, by which Megatron divides gradients: the
        first expert rank of a ZP group those of its attention ranks, the others nothing. Tensor
        parallel ranks count the same tokens. Collective."""
        own = int(num_tokens), parallel_state.get_tensor_model_parallel_world_size()
        gathered, roles = gather_objects(own, self.control), self.stack.roles
        if self.stack.is_attention:
            return num_tokens
        counts, (tp, *_) = zip(*(gathered[ep_rank] for ep_rank in roles.attention_ep_ranks))
        is_first = self.control.rank() == roles.expert_ep_ranks[0]
        return num_tokens.fill_(sum(counts) // tp if is_first else 0)

    def _agreed(self, num_microbatches: int, forward_only: bool) -> int:
        """The number of micro-batches of an attention rank. Collective."""
        gathered = gather_objects((num_microbatches, forward_only), self.control)
        counts = {gathered[ep_rank][0] for ep_rank in self.stack.roles.attention_ep_ranks}
        if len(counts) > 1 or len({is_evaluation for _, is_evaluation in gathered}) > 1:
            raise RuntimeError(
                f"{BLOCK}: the ranks of a ZP group are not at the same step: they have (number of "
                f"micro-batches, only forward) {gathered}; give all ranks the same flags"
            )
        return int(counts.pop())

    def _reported(self, kept: list[Any]) -> list[Any]:
        """What Megatron's schedule returns: of an expert rank the mean of what the attention ranks
        of its group return. Collective."""
        is_attention = self.stack.is_attention
        own = tree_map_only(Tensor, lambda x: x.detach().cpu(), kept) if is_attention else None
        gathered = gather_objects(own, self.control)
        if is_attention:
            return kept
        trees = [gathered[ep_rank] for ep_rank in self.stack.roles.attention_ep_ranks]
        leaves, shapes = zip(*map(tree_flatten, trees))
        means = [_mean(column, self.stack.device) for column in zip(*leaves)]
        found: list[Any] = tree_unflatten(means, shapes[0])
        return found


class _Unit(NamedTuple):
    """Micro-batches that pass a stage of a pipeline together."""

    inputs: list[Tensor]  # of each, leaves; none on the first stage, and on expert ranks
    ahead: Ahead


class _Passes:
    """The passes of a step through the model of one rank, or its stage. Arguments as of
    ``StripedSteps``."""

    def __init__(
        self,
        steps: StripedSteps,
        num: int,
        forward_only: bool,
        collect_non_loss_data: bool,
        given: dict[str, Any],
    ) -> None:
        self.kept: list[Any] = []  # what Megatron's schedule returns
        self.num_tokens = torch.zeros([], dtype=torch.int, device=steps.stack.device)
        self._steps, self._num, self._forward_only = steps, num, forward_only
        self._collects, self._given = collect_non_loss_data, given
        self._add_grad = None if forward_only else torch.autograd.backward
        self._counts = steps.chunk.training
        batches = given["data_iterator"]
        self._batches = batches[0] if isinstance(batches, list) else batches
        self._units: deque[_Unit] = deque()  # whose backward is to come

    def all_at_once(self) -> None:
        """Forward and backward of so many micro-batches as run at once, then of the next."""
        steps, size = self._steps, self._steps.num_stripes or self._num
        control = steps.control if steps.checks else None
        for first in range(0, self._num, size):
            numbers = range(self._num)[first : first + size]
            stripes = [self._stripe(i) for i in (numbers if steps.stack.is_attention else ())]
            steps.stack.run(
                len(numbers), stripes, self._add_grad, counts=self._counts, control=control
            )
            self._keep(stripes)

    def pipelined(self) -> None:
        """One stage of a pipeline around ZP groups, in Megatron's order (1F1B): attention ranks by
        its own schedule, of units of several micro-batches, and expert ranks beside them."""
        stages, size = self._steps.stages, self._unit_size
        num_units = self._num // size
        if not self._steps.stack.is_attention:
            num_ahead = min(stages.size() - stages.rank() - 1, num_units)
            for unit in range(num_units):
                self._forward(size, [])
                if unit >= num_ahead and not self._forward_only:
                    self._backward()
            while self._units:
                self._backward()
            return
        config = self._steps.chunk.config
        given = self._given | {"micro_batch_size": self._given["micro_batch_size"] * size}
        none = dict.fromkeys(("no_sync_func", "grad_sync_func", "finalize_model_grads_func"))
        with (
            during(config, **none),
            during(schedules, forward_step=self._forward_step, backward_step=self._backward_step),
        ):
            schedules.forward_backward_pipelining_without_interleaving(
                num_microbatches=num_units,
                forward_only=self._forward_only,
                collect_non_loss_data=self._collects,
                **given,
            )

    @property
    def _unit_size(self) -> int:
        """Units are alike, so that what stages send each other is."""
        wanted = self._steps.num_stripes or 2
        return next((d for d in divisors(self._num) if d >= wanted), self._num)

    def _forward_step(
        self, _: Any, batches: Any, model: Any, num_units: int, given: Any, *rest: Any, **named: Any
    ) -> tuple[Any, Any]:
        """In the place of Megatron's, of a unit: its outputs along the dim of samples."""
        size, unit = self._unit_size, named["current_microbatch"]
        (whole,) = given if isinstance(given, list) else [given]
        inputs = (
            []
            if whole is None
            else [x.requires_grad_(not self._forward_only) for x in whole.detach().chunk(size, 1)]
        )
        numbers = range(unit * size, (unit + 1) * size)
        stripes = [
            self._stripe(number, inputs[n] if inputs else None) for n, number in enumerate(numbers)
        ]
        self._forward(size, stripes, inputs)
        self._keep(stripes)
        outputs = [stripe.stripe_passes[0].output.loss.detach() for stripe in stripes]
        is_last = self._steps.stages.rank() == self._steps.stages.size() - 1
        output = torch.zeros(1) if is_last else torch.cat(outputs, 1)
        return [output] if isinstance(given, list) else output, 0

    def _backward_step(self, given: Any, output: Any, grads: Any, *rest: Any) -> Any:
        """In the place of Megatron's: the gradients of a unit's inputs."""
        (grad,) = grads if isinstance(grads, list) else [grads]
        unit = self._units[0]
        if grad is not None:
            stripes = unit.ahead.stripes
            for stripe, seed in zip(stripes, grad.chunk(len(stripes), 1)):
                stripe.seeds = [seed]
        self._backward()
        passes = [stripe.stripe_passes[0] for stripe in unit.ahead.stripes]
        found = [
            torch.zeros_like(x) if (own := stripe_pass.grad_of(x)) is None else own
            for stripe_pass, x in zip(passes, unit.inputs)
        ]
        whole = torch.cat(found, 1) if found else None
        return [whole] if isinstance(given, list) else whole

    def _forward(self, size: int, stripes: Sequence[Stripe], inputs: Sequence[Tensor] = ()) -> None:
        stack = self._steps.stack
        if self._add_grad is None:
            stack.run(size, stripes, None, counts=self._counts)
        else:
            ahead = stack.ahead(size, stripes, self._add_grad, counts=self._counts)
            self._units.append(_Unit(list(inputs), ahead))

    def _backward(self) -> None:
        self._steps.stack.back(self._units.popleft().ahead)

    def _keep(self, stripes: Sequence[Stripe]) -> None:
        for ran in (stripe.stripe_passes[0].output for stripe in stripes):
            self.kept += ran.kept
            self.num_tokens += ran.num_tokens

    def _stripe(self, number: int, x: Tensor | None = None) -> Stripe:
        """A micro-batch, by its number in the step; ``x`` comes from the stage before."""
        stack, call = self._steps.stack, partial(self._ran, number, x)
        return Stripe([StripePass(call, self._add_grad, stack.threads, stack.here)], [1.0])

    def _ran(self, number: int, x: Tensor | None) -> _Ran:
        config, stages, given = self._steps.chunk.config, self._steps.stages, self._given
        is_last = stages.rank() == stages.size() - 1
        kept = list[Any]()
        output, num_tokens = _STOCK_FORWARD_STEP(
            given["forward_step_func"],
            self._batches,
            self._steps.chunk,
            self._num,
            x,
            kept,
            config,
            parallel_state.get_context_parallel_world_size(),
            self._collects,
            is_first_microbatch=schedules.check_first_val_step(
                given.get("first_val_step"), self._forward_only, number == 0
            ),
            current_microbatch=number,
            is_last_stage=is_last,
        )
        if is_last and not self._forward_only and config.grad_scale_func is not None:
            output = config.grad_scale_func(output)
        return _Ran(output, kept, num_tokens)


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


class _ScaledOnce:
    """Gradients of a model are scaled where they lie in Megatron's buffers, in full precision, and
    once, however many schedules add to them before they are reduced."""

    def __init__(self, chunk: Any, factor: float) -> None:
        self._chunk, self._factor, self._is_scaled = chunk, factor, False
        zero: Callable[[], None] = chunk.zero_grad_buffer

        @wraps(zero)
        def zero_grad_buffer() -> None:
            zero()
            self._is_scaled = False

        chunk.zero_grad_buffer = zero_grad_buffer

    def begin(self) -> None:
        """More is about to be added: what is there becomes as it came. Somebody may have made it
        zero otherwise than Megatron does, which changes nothing."""
        if self._is_scaled and self._factor != 1:
            self._chunk.scale_gradients(1 / self._factor)
        self._is_scaled = False

    def end(self) -> None:
        """All of a schedule has been added."""
        if self._factor != 1:
            self._chunk.scale_gradients(self._factor)
        self._is_scaled = True


@dataclass(eq=False)
class ModelRecord(Record):
    """What is known of a model's DDP whose ranks have roles: how it runs."""

    steps: StripedSteps | None = None


def steps_of(model: Any) -> StripedSteps | None:
    """How a model runs, as Megatron's schedules are given it; None where ranks have no roles."""
    chunk = model[0] if isinstance(model, list) else model
    record: ModelRecord | None = getattr(chunk, RECORD, None)
    return None if record is None else record.steps
