# SPDX-License-Identifier: Apache-2.0
"""Pre-train a mixture-of-experts language model on bytes under Megatron-core.

A plain loop over Megatron-core's own parts, with the flags of Megatron-LM's `pretrain_gpt.py`; no
checkout of Megatron-LM is needed. `torchrun --nproc_per_node 4 launch/pretrain_megatron.py --model
configs/models/mixtral_tiny.json --expert-model-parallel-size 4` trains with Megatron's own MoE;
with `--ds-moe-ext-config configs/strategies/fssdp.json` the experts run by that strategy.
Without a GPU, four CPU processes do the same.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import megatron_on_cpu
import torch
import torch.distributed as dist
from console import (
    Batch,
    Display,
    StepRecord,
    WindowSampler,
    leave_summary,
    plain_errors,
    summarize,
)
from torch import Tensor, nn

from ds_moe_ext import recorder_of

with warnings.catch_warnings():
    # Megatron says on import, several times, that Transformer Engine and Apex are not installed.
    warnings.simplefilter("ignore", UserWarning)
    from gpt_megatron import Kept, Run, build_chunks, parse_arguments, read_run, transformer_config
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

SCRIPT = "pretrain_megatron"
PACKAGES = ("torch", "megatron-core", "transformer-engine", "ds_moe_ext")


def leave_out_warnings() -> None:
    """Leave out what is of no use to a person who trains: old names in Megatron's calls of torch
    and in its own defaults and, where there is no GPU, its surprise at that."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message="full scope is deprecated")
    if not torch.cuda.is_available():
        logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def start_ranks(arguments: argparse.Namespace) -> torch.device:
    """Join the other ranks, make Megatron's groups of them and seed. Collective.

    Returns:
        This rank's device.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=arguments.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=arguments.expert_model_parallel_size,
        expert_tensor_parallel_size=arguments.expert_tensor_parallel_size,
    )
    # Stages hold other layers, so they draw other weights; ranks that hold the same draw the same.
    seed = arguments.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return device


def forward_step(
    batches: Iterator[Batch], chunk: nn.Module
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    """Run one micro-batch through a chunk, as Megatron's schedules ask.

    Returns:
        What the chunk gives, and what makes a loss of it behind the last layer.
    """
    batch = next(batches)
    positions_BT = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device).expand_as(
        batch.input_ids
    )
    return chunk(batch.input_ids, positions_BT, None, labels=batch.labels), mean_loss


def mean_loss(losses_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Give the loss to differentiate, and the one to report: nats per byte."""
    loss = losses_BT.float().mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule divides the first in place


class Trainer:
    """Model, optimizer and text, and the step they make together. All collective."""

    def __init__(self, run: Run, device: torch.device) -> None:
        arguments = run.arguments
        self.run = run
        self.arguments = arguments
        self.device = device
        self.iteration = 0  # steps taken
        self.config = transformer_config(run.architecture, arguments)
        self.chunks = self._build_model()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=arguments.lr,
                min_lr=arguments.min_lr,
                weight_decay=arguments.weight_decay,
                adam_beta1=0.9,
                adam_beta2=0.95,
                clip_grad=arguments.clip_grad,
                bf16=arguments.bf16,
                params_dtype=self.config.params_dtype,
                use_distributed_optimizer=arguments.use_distributed_optimizer,
                overlap_param_gather=arguments.overlap_param_gather,
            ),
            self.chunks,
        )
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        if arguments.overlap_grad_reduce:
            no_syncs = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
        self.run_schedule = get_forward_backward_func()
        self.sampler = self._sampler(run.text.training, run.text.source)
        source = f"the held-out end of {run.text.source}"
        self.held_out = self._sampler(run.text.held_out, source)
        self.scheduler = self._build_scheduler()
        self.kept = Kept(self.chunks, self.optimizer, self.scheduler)
        self.held_out_losses: dict[int, float] = {}
        self.recorder = recorder_of(self.optimizer)  # None on a pipeline stage without experts

    def _build_model(self) -> list[DistributedDataParallel]:
        chunks = [
            chunk.to(self.device) for chunk in build_chunks(self.config, self.run.architecture)
        ]
        for chunk in chunks:
            for parameter in chunk.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if self.arguments.bf16:
            chunks = [Float16Module(self.config, chunk) for chunk in chunks]
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self.arguments.use_distributed_optimizer,
            overlap_grad_reduce=self.arguments.overlap_grad_reduce,
            overlap_param_gather=self.arguments.overlap_param_gather,
        )
        # The gradients of later chunks are reduced while earlier ones compute: one bucket will do.
        return [
            DistributedDataParallel(self.config, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]

    def _sampler(self, text: Any, source: str) -> WindowSampler:
        return WindowSampler(
            text=text,
            source=source,
            sequence_length=self.arguments.seq_length,
            micro_batch_size=self.arguments.micro_batch_size,
            num_micro_steps=self.num_micro_batches,
            num_ranks=parallel_state.get_data_parallel_world_size(),
            seed=self.arguments.seed,
        )

    @property
    def num_micro_batches(self) -> int:
        """Of a step, on each data parallel rank."""
        at_once = self.arguments.micro_batch_size * parallel_state.get_data_parallel_world_size()
        windows = self.arguments.global_batch_size or at_once
        if windows % at_once:
            raise ValueError(
                f"--global-batch-size {windows} is no multiple of --micro-batch-size x data "
                f"parallel ranks = {at_once}; give {max(1, windows // at_once) * at_once}"
            )
        return windows // at_once

    @property
    def windows_per_step(self) -> int:
        """Of all ranks."""
        return self.sampler.num_micro_steps * self.sampler.micro_batch_size * self.sampler.num_ranks

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.windows_per_step * self.arguments.seq_length

    def _build_scheduler(self) -> OptimizerParamScheduler:
        """Build a linear rise from zero, then half a cosine. Megatron counts windows."""
        arguments, windows = self.arguments, self.windows_per_step
        return OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=arguments.lr,
            min_lr=arguments.min_lr,
            lr_warmup_steps=windows * arguments.lr_warmup_iters,
            lr_decay_steps=windows * arguments.lr_decay_iters,
            lr_decay_style="cosine",
            start_wd=arguments.weight_decay,
            end_wd=arguments.weight_decay,
            wd_incr_steps=windows * arguments.train_iters,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,  # the command line, not the checkpoint
        )

    def load(self) -> None:
        """Go on from the checkpoint of `--load`, if given."""
        if self.arguments.load is None:
            return
        with self._weights_gathered():
            self.iteration = self.kept.load(self.arguments.load)
        if self.iteration >= self.arguments.train_iters:
            raise ValueError(
                f"--load {self.arguments.load} is already at step {self.iteration}; raise "
                f"--train-iters above it (now {self.arguments.train_iters})"
            )

    def train(self, display: Display) -> list[StepRecord]:
        """Take the steps that are left, evaluating and saving when due."""
        records = []
        while self.iteration < self.arguments.train_iters:
            records.append(self.take_step())
            display.show(records[-1])
            if self._is_due(self.arguments.eval_interval):
                loss = self._held_out_loss()
                self.held_out_losses[self.iteration] = loss
                display.show_held_out(self.iteration, loss)
            if self.arguments.save is not None and self._is_due(self.arguments.save_interval):
                with self._weights_gathered():
                    self.kept.save(self.arguments.save, self.iteration)
        return records

    def _is_due(self, interval: int) -> bool:
        is_last = self.iteration == self.arguments.train_iters
        return is_last or bool(interval and self.iteration % interval == 0)

    def take_step(self) -> StepRecord:
        """Take one optimizer step on the text that is due."""
        start_s = time.perf_counter()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._run_schedule(self.sampler, self.iteration, forward_only=False)
        is_stepped, *_ = self.optimizer.step()
        if is_stepped:
            self.scheduler.step(increment=self.windows_per_step)
        self.iteration += 1
        seconds_s = time.perf_counter() - start_s
        return StepRecord(
            step=self.iteration,
            loss=loss,
            seconds_s=seconds_s,
            tokens_per_s=self.tokens_per_step / seconds_s,
            balance=None if self.recorder is None else self.recorder.latest_balance(),
        )

    def _run_schedule(self, sampler: WindowSampler, step: int, *, forward_only: bool) -> float:
        """Run all micro-batches of a step through the pipeline.

        Returns:
            The loss, mean over micro-batches and ranks, on every rank.
        """
        batches = [list(self._batches(sampler, step))] * len(self.chunks)
        iterators = [iter(chunk_batches) for chunk_batches in batches]
        is_single = len(self.chunks) == 1
        reports = self.run_schedule(
            forward_step_func=forward_step,
            data_iterator=iterators[0] if is_single else iterators,
            model=self.chunks[0] if is_single else self.chunks,
            num_microbatches=sampler.num_micro_steps,
            seq_length=self.arguments.seq_length,
            micro_batch_size=self.arguments.micro_batch_size,
            forward_only=forward_only,
        )
        # Only the last stage has losses, and the ranks of a tensor parallel group the same.
        total = torch.zeros(2, device=self.device)
        if reports:
            total[0] = torch.stack([report["loss"] for report in reports]).mean()
            total[1] = 1.0
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def _batches(self, sampler: WindowSampler, step: int) -> Iterator[Batch]:
        rank = parallel_state.get_data_parallel_rank()
        for micro_step in range(sampler.num_micro_steps):
            batch = sampler.batch(step, micro_step, rank)
            yield Batch(*(tensor.to(self.device) for tensor in batch))

    def _held_out_loss(self) -> float:
        # Always the same windows, so that the losses of two steps or two runs can be compared.
        for chunk in self.chunks:
            chunk.eval()
        with self._weights_gathered(), torch.no_grad():
            losses = [
                self._run_schedule(self.held_out, step, forward_only=True)
                for step in range(self.arguments.eval_iters)
            ]
        for chunk in self.chunks:
            chunk.train()
        return sum(losses) / len(losses)

    @contextmanager
    def _weights_gathered(self) -> Iterator[None]:
        """Hold whole weights here, where forward would otherwise gather them layer by layer."""
        chunks = self.chunks if self.arguments.overlap_param_gather else []
        for chunk in chunks:
            chunk.disable_forward_pre_hook()
        yield
        for chunk in chunks:
            chunk.enable_forward_pre_hook()


def main() -> None:
    """Train, then write and show the summary."""
    arguments = parse_arguments()
    with plain_errors(SCRIPT):
        run = read_run(arguments)
    leave_out_warnings()
    megatron_on_cpu.install()  # where there are GPUs little
    if run.ds_moe_ext is not None:
        from ds_moe_ext.patches.megatron import use

        with plain_errors(SCRIPT, RuntimeError):
            use(run.ds_moe_ext)
    # Megatron asserts, or raises RuntimeError, where settings do not fit.
    with plain_errors(SCRIPT, AssertionError, RuntimeError):
        trainer = Trainer(run, start_ranks(arguments))
    with plain_errors(SCRIPT, CheckpointingException):
        trainer.load()

    display = Display(first_step=trainer.iteration, num_steps=arguments.train_iters)
    with display.bar:
        records = trainer.train(display)

    summary = summarize(trainer, records, PACKAGES)
    if dist.get_rank() == 0:
        leave_summary(display, summary, run.output, arguments.save)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
