# SPDX-License-Identifier: Apache-2.0
"""Training jobs under Megatron-core that ranks run: a real GPTModel, its DDP, optimizer, schedules.

``train`` runs on every rank of a pool. Every layout starts from the same weights and sees the same
global batch: micro-batch ``i`` of data parallel rank ``d`` is sample ``i * DP + d`` of a step.

float64: Megatron names float32 in some places (softmax of the router, cross-entropy, norms of
gradients, states of optimizers). In these runs every float32 that is named is float64, by
``FloatMeansDouble``; so the whole host computes in float64, DDP and both optimizers too. Legacy
GroupedMLP does not: it asks for bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.hosts.megatron_toy import VOCABULARY, MegatronRun, model_chunks, transformer_config
from tests.hosts.megatron_weights import gather_gradients, pieces
from tests.ranks import preload

preload("megatron.core.optimizer", "megatron.core.models.gpt.gpt_layer_specs")
preload("megatron.core.distributed", "megatron.core.pipeline_parallel")


@dataclass(frozen=True)
class Trained:
    """What a rank has found."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    seen: Any


class FloatMeansDouble(TorchFunctionMode):
    """Every float32 that is named in a call to torch is float64, and float64's type goes by
    float32's name: Megatron's optimizers know no other."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        # Inline: a training calls this some hundred thousand times.
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        found = func(*[torch.float64 if v is torch.float32 else v for v in args], **named)
        if func is Tensor.type and isinstance(found, str):
            return found.replace("DoubleTensor", "FloatTensor")
        return found


@contextmanager
def float_means_double() -> Iterator[None]:
    """Compute in float64, in backward too: modes are off in what they handle."""
    stock = torch.autograd._engine_run_backward

    def run_backward(*arguments: Any, **named: Any) -> Any:
        with FloatMeansDouble():
            return stock(*arguments, **named)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch("torch.autograd._engine_run_backward", run_backward), FloatMeansDouble():
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def megatron(run: MegatronRun, settings: dict[str, Any] | None = None) -> Iterator[None]:
    """Megatron's groups and generators on the pool's ranks; behind it all is as it was."""
    import megatron_on_cpu

    with ExitStack() as stack:
        megatron_on_cpu.install()
        stack.callback(megatron_on_cpu.remove)
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        stack.callback(moe_utils.get_moe_layer_wise_logging_tracker().clear)  # sized by layers
        stack.callback(MTPLossLoggingHelper.tracker.clear)
        if run.dtype == "float64":
            stack.enter_context(float_means_double())
        if settings is not None:
            from ds_moe_ext.patches.megatron import forget, use

            stack.callback(forget)
            use({"ds_moe_ext": settings})
        stack.callback(parallel_state.destroy_model_parallel)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=run.tp,
            pipeline_model_parallel_size=run.pp,
            virtual_pipeline_model_parallel_size=run.vpp,
            context_parallel_size=run.cp,
            expert_model_parallel_size=run.ep,
            expert_tensor_parallel_size=run.etp,
            create_gloo_process_groups=False,  # they are gloo's already
        )
        torch.manual_seed(run.seed)
        tensor_parallel.model_parallel_cuda_manual_seed(run.seed)
        yield


class Training:
    """A model with its optimizer, between two steps."""

    def __init__(self, run: MegatronRun) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.run = run
        self.config = transformer_config(run)
        self.chunks = model_chunks(run, self.config)
        self.config.finalize_model_grads_func = finalize_model_grads
        if run.overlap_grad_reduce:
            waits = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = waits if run.vpp else waits[0]
        self.optimizer: Any = None
        if run.optimizer != "none":
            fields: dict[str, Any] = {
                "optimizer": "adam",
                "lr": run.learning_rate,
                "clip_grad": run.clip,
                "bf16": self.config.bf16,
                "fp16": self.config.fp16,
                "params_dtype": self.config.params_dtype,
                "use_distributed_optimizer": run.optimizer == "distributed",
                "overlap_param_gather": run.overlap_param_gather,
            }
            wanted = OptimizerConfig(**{**fields, **dict(run.stepping)})
            self.optimizer = get_megatron_optimizer(
                wanted, self.chunks, use_gloo_process_groups=False
            )
            self.config.grad_scale_func = self.optimizer.scale_loss

    def compute(self, step: int) -> float:
        """Forward, backward and the reduction of gradients; the global batch's loss."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        return self._pass(step, forward_only=False)

    def evaluate(self, step: int) -> float:
        """The loss of a step's batch, without gradients and in eval mode."""
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            loss = self._pass(step, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return loss

    def update(self) -> float | None:
        """Take the optimizer's step; the norm of the gradients before clipping."""
        if self.optimizer is None:
            return None
        is_good, norm, _ = self.optimizer.step()
        assert is_good
        return float(norm)

    def gradients(self) -> dict[str, Tensor]:
        """After ``compute``: each piece's gradient, name -> this rank's share."""
        gather_gradients(self.chunks)
        return {
            piece.name: piece.of(_gradient(piece.parameter)).clone()
            for piece in pieces(self.chunks, self.run.swiglu, self.run.num_experts)
            if piece.parameter.requires_grad
        }

    def weights(self) -> dict[str, Tensor]:
        """Each piece's weights, name -> this rank's share. Collective."""
        if self.run.overlap_param_gather:  # the next forward would gather what has changed
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        return {
            piece.name: piece.of(piece.parameter.detach()).clone()
            for piece in pieces(self.chunks, self.run.swiglu, self.run.num_experts)
        }

    def _pass(self, step: int, forward_only: bool) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        batches = [iter(list(self._batches(step))) for _ in self.chunks]
        found = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=batches if self.run.vpp else batches[0],
            model=self.chunks if self.run.vpp else self.chunks[0],
            num_microbatches=self.run.num_microbatches,
            seq_length=self.run.length,
            micro_batch_size=self.run.batch,
            forward_only=forward_only,
        )
        return _mean([float(one["loss"]) for one in found])

    def _batches(self, step: int) -> Iterator[Tensor]:
        """Micro-batches of this rank: tokens [batch, length + 1], each some more than the last."""
        from megatron.core import parallel_state

        size = parallel_state.get_data_parallel_world_size()
        rank = parallel_state.get_data_parallel_rank()
        for number in range(self.run.num_microbatches):
            seed = 100_003 * step + number * size + rank
            generator = torch.Generator().manual_seed(seed)
            start = torch.randint(VOCABULARY, (self.run.batch, 1), generator=generator)
            stride = torch.randint(1, 4, (self.run.batch, 1), generator=generator)
            yield (start + stride * torch.arange(self.run.length + 1)) % VOCABULARY


def _mean(losses: list[float]) -> float:
    """The mean over micro-batches and data parallel ranks, on all ranks."""
    found = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
    dist.all_reduce(found)  # only last stages have any; tensor parallel ranks have the same
    return float(found[0] / found[1])


def _gradient(parameter: Any) -> Tensor:
    return vars(parameter).get("main_grad", parameter.grad).detach()


def _forward(
    batches: Iterator[Tensor], model: nn.Module, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """A forward step as Megatron's schedules ask for it."""
    tokens = next(batches)
    length = tokens.shape[1] - 1
    positions = torch.arange(length).expand(len(tokens), length)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    given = tokens[:, :-1], positions, mask
    run: Any = model
    if return_schedule_plan:  # two micro-batches are interleaved
        from megatron.core.utils import get_attr_wrapped_model

        run = get_attr_wrapped_model(model, "build_schedule_plan")
    losses = run(*given, labels=tokens[:, 1:].contiguous())
    if model.config.calculate_per_token_loss:
        return losses, partial(_loss_of_some, tokens[:, 1:] % 3 != 0)
    return losses, _loss


def _loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule scales the other in place


def _loss_of_some(mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Of tokens that count, whose number differs: their sum, which nobody has divided."""
    total, num = (output * mask).sum(), mask.sum()
    return total, num.int(), {"loss": (total / num).detach().clone()}


def train(
    rank: int,
    world_size: int,
    run: MegatronRun,
    settings: dict[str, Any] | None = None,
    *,
    keep: bool = False,
    look: Callable[[Training], Any] | None = None,
) -> Trained:
    """Run all steps on one rank of a pool."""
    losses: list[float] = []
    norms: list[float] = []
    gradients: dict[str, Tensor] = {}
    with megatron(run, settings):
        training = Training(run)
        for step in range(run.steps):
            losses.append(training.compute(step))
            if keep and step == 0:
                gradients = training.gradients()
            norm = training.update()
            norms += [] if norm is None else [norm]
        weights = training.weights() if keep else {}
        seen = look(training) if look is not None else None
    return Trained(tuple(losses), tuple(norms), gradients, weights, seen)


def merged(shares: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All ranks' pieces by name, from the first rank that has each; for layouts without tensor
    parallelism, where a piece is never a share."""
    return {name: tensor for share in reversed(shares) for name, tensor in share.items()}
