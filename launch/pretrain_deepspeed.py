# SPDX-License-Identifier: Apache-2.0
"""Pre-train a mixture-of-experts language model on bytes under DeepSpeed.

A plain DeepSpeed script: which MoE system runs is a matter of the JSON that `--deepspeed_config`
names. Of ds_moe_ext it asks only what it shows: how evenly the experts' rows fell on the ranks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from console import (
    VOCABULARY_SIZE,
    Batch,
    Display,
    StepRecord,
    Text,
    WindowSampler,
    leave_summary,
    named,
    plain_errors,
    read_json,
    read_text,
    summarize,
)
from deepspeed.utils import logger
from gpt_moe import GptMoe, GptMoeConfig
from torch import Tensor, nn

from ds_moe_ext import read_settings, recorder_of
from ds_moe_ext.hosts.attachment.startup_check import is_first
from ds_moe_ext.hosts.deepspeed.guard import is_compiled, log_old_lock

SCRIPT = "pretrain_deepspeed"
NUM_HELD_OUT_BATCHES = 4
ASKS_ITSELF = "Attempting to get learning rate from scheduler before it has started"
GPT_MOE = "gpt_moe"
FAMILIES = (GPT_MOE, "mixtral", "qwen3_moe")  # the others by Hugging Face's model type
NARROW = ("bf16", "fp16")  # as sections of a DeepSpeed JSON are called
DTYPES = ("fp32", *NARROW)
PACKAGES = ("torch", "deepspeed", "transformers", "ds_moe_ext")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="model file, see configs/models/")
    add("--steps", type=int, help="train up to this step; default: the LR schedule's last")
    add("--sequence_length", type=int, default=128, help="bytes in a window")
    add("--data", type=Path, help="file or folder of text; default: Python's standard library")
    add("--output", type=Path, help="folder for results; default: runs/quickstart/<strategy>")
    add("--seed", type=int, default=1, help="of weights and of the order of the text")
    add("--strategy", help="replaces the word after `strategy` in the ds_moe_ext block")
    add("--dtype", choices=DTYPES, help="replaces the number type of the DeepSpeed JSON")
    add("--ep_size", type=int, help="replaces ep_size of a gpt_moe model file")
    add("--save", type=Path, help="folder for a checkpoint after the last step")
    add("--save_every", type=int, default=0, help="save also every so many steps")
    add("--resume", type=Path, help="folder of the checkpoint to resume from")
    add("--eval_every", type=int, default=0, help="held-out loss every so many steps; 0: never")
    add("--local_rank", type=int, default=-1, help="set by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model with what differs between families: what it is called with, and its plain loss."""

    module: nn.Module
    arguments: Callable[[Batch], dict[str, Tensor]]
    language_loss: Callable[[Any], Tensor]


def build_model(arguments: argparse.Namespace) -> LanguageModel:
    """Build the model a file describes; the same seed gives every rank the same weights."""
    return model_of(read_json(arguments.model, "--model"), arguments)


def model_of(model: Mapping[str, Any], arguments: argparse.Namespace) -> LanguageModel:
    """Build the model that a file's content describes, likewise."""
    family, config = model.get("family"), model.get("config", {})
    if family not in FAMILIES:
        raise ValueError(
            f"--model {arguments.model}: family {family!r} is not one of {', '.join(FAMILIES)}"
        )
    if config.get("vocab_size", 0) < VOCABULARY_SIZE:
        raise ValueError(
            f"--model {arguments.model}: config.vocab_size {config.get('vocab_size')} cannot hold "
            f"the {VOCABULARY_SIZE} values of a byte; set it to {VOCABULARY_SIZE}"
        )
    torch.manual_seed(arguments.seed)
    if family == GPT_MOE:
        return _gpt_moe(config, arguments)
    if arguments.ep_size is not None:
        raise ValueError(
            f"--ep_size {arguments.ep_size} is for the family {GPT_MOE}; for {family} set "
            "expert_parallel_size in the DeepSpeed JSON"
        )
    return _hugging_face(family, config)


def _gpt_moe(config: Mapping[str, Any], arguments: argparse.Namespace) -> LanguageModel:
    gpt_config = GptMoeConfig.from_json(config, ep_size=arguments.ep_size)
    gpt_config.check_window(arguments.sequence_length)
    return LanguageModel(
        GptMoe(gpt_config),
        arguments=Batch._asdict,
        language_loss=lambda output: output.language_loss,
    )


def _hugging_face(family: str, config: Mapping[str, Any]) -> LanguageModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    # Router logits give the load-balancing loss; a cache of keys and values is of no use here.
    needed = {"output_router_logits": True, "use_cache": False}
    hf_config = AutoConfig.for_model(family, **{**config, **needed})
    coefficient = hf_config.router_aux_loss_coef
    return LanguageModel(
        AutoModelForCausalLM.from_config(hf_config),
        # Hugging Face shifts the labels itself.
        arguments=lambda batch: {"input_ids": batch.input_ids, "labels": batch.input_ids},
        language_loss=lambda output: (output.loss - coefficient * output.aux_loss).detach(),
    )


@dataclass(frozen=True, eq=False)
class Run:
    """What the command line asks for, once the files it names are read."""

    deepspeed_config: dict[str, Any]
    dtype: str  # one of DTYPES
    strategy: str  # "plain" without an enabled ds_moe_ext block
    output: Path
    text: Text
    num_steps: int


def read_run(arguments: argparse.Namespace) -> Run:
    """Read and complete the DeepSpeed JSON, and find the text."""
    path = arguments.deepspeed_config and Path(arguments.deepspeed_config)
    config = read_json(path, "--deepspeed_config")
    read_settings(config)
    block = config.get("ds_moe_ext") or {}
    if arguments.strategy and not block.get("enabled", False):
        raise ValueError(
            f"--strategy {arguments.strategy} has no effect: {path} has no ds_moe_ext block with "
            '"enabled": true; add one, or name configs/hosts/deepspeed_zero1.json'
        )
    if arguments.strategy:
        block["strategy"] = arguments.strategy
    if arguments.dtype:
        config |= {name: {"enabled": name == arguments.dtype} for name in NARROW}
    name = named(config, arguments.output, Path("runs/quickstart"))
    num_steps = _last_step(config) if arguments.steps is None else arguments.steps
    if num_steps < 1:
        raise ValueError(f"--steps {num_steps} is not a number of steps; give 1 or more")
    if arguments.save_every and arguments.save is None:
        raise ValueError(f"--save_every {arguments.save_every} has no effect without --save FOLDER")
    text = read_text(arguments.data)
    return Run(config, _dtype(config), name.strategy, name.output, text, num_steps)


def _dtype(config: Mapping[str, Any]) -> str:
    enabled = (name for name in NARROW if config.get(name, {}).get("enabled", False))
    return next(enabled, "fp32")


def _last_step(config: Mapping[str, Any]) -> int:
    num_steps = config.get("scheduler", {}).get("params", {}).get("total_num_steps")
    if num_steps is None:
        raise ValueError("--steps is needed: the DeepSpeed JSON's scheduler has no total_num_steps")
    return num_steps


class Trainer:
    """The engine, its model and its text, and the step they make together. All collective."""

    def __init__(self, arguments: argparse.Namespace, run: Run, model: LanguageModel) -> None:
        self.arguments = arguments
        self.run = run
        self.model = model
        with plain_errors(SCRIPT):
            self.engine, *_ = deepspeed.initialize(
                model=model.module,
                model_parameters=model.module.parameters(),
                config=run.deepspeed_config,
            )
            self.recorder = recorder_of(self.engine)
            self.sampler = self._sampler(run.text.training, run.text.source)
            if arguments.eval_every:
                source = f"the held-out end of {run.text.source}"
                self.held_out = self._sampler(run.text.held_out, source)
        self.held_out_losses: dict[int, float] = {}

    def _sampler(self, text: Any, source: str) -> WindowSampler:
        return WindowSampler(
            text=text,
            source=source,
            sequence_length=self.arguments.sequence_length,
            micro_batch_size=self.engine.train_micro_batch_size_per_gpu(),
            num_micro_steps=self.engine.gradient_accumulation_steps(),
            num_ranks=dist.get_world_size(),
            seed=self.arguments.seed,
        )

    def resume(self) -> None:
        """Load the weights, optimizer, LR schedule and step of `--resume`, if given."""
        if self.arguments.resume is None:
            return
        loaded_path, _ = self.engine.load_checkpoint(str(self.arguments.resume))
        if loaded_path is None:
            raise ValueError(
                f"--resume {self.arguments.resume} holds no DeepSpeed checkpoint (no file "
                "`latest`); name the folder that --save wrote"
            )
        if self.engine.global_steps >= self.run.num_steps:
            raise ValueError(
                f"--resume {self.arguments.resume} is already at step {self.engine.global_steps}; "
                f"raise --steps above it (now {self.run.num_steps})"
            )

    def train(self, display: Display) -> list[StepRecord]:
        """Take the steps that are left, evaluating and saving when due."""
        records = []
        for step in range(self.engine.global_steps, self.run.num_steps):
            records.append(self._step(step))
            display.show(records[-1])
            if self.arguments.eval_every and (step + 1) % self.arguments.eval_every == 0:
                loss = self._held_out_loss()
                self.held_out_losses[step + 1] = loss
                display.show_held_out(step + 1, loss)
            self._save_if_due(step + 1)
        return records

    def _step(self, step: int) -> StepRecord:
        start_s = time.perf_counter()
        losses = []
        for micro_step in range(self.sampler.num_micro_steps):
            output = self._forward(self.sampler, step, micro_step)
            self.engine.backward(output.loss)
            self.engine.step()
            losses.append(self.model.language_loss(output))
        loss = mean_over_ranks(losses)
        seconds_s = time.perf_counter() - start_s
        return StepRecord(
            step=step + 1,
            loss=loss,
            seconds_s=seconds_s,
            tokens_per_s=self.tokens_per_step / seconds_s,
            balance=None if self.recorder is None else self.recorder.latest_balance(),
        )

    def _forward(self, sampler: WindowSampler, step: int, micro_step: int) -> Any:
        batch = sampler.batch(step, micro_step, dist.get_rank())
        on_device = Batch(*(tensor.to(self.device) for tensor in batch))
        return self.engine(**self.model.arguments(on_device))

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
        device: torch.device = self.engine.device
        return device

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks, in one optimizer step."""
        return self.engine.train_batch_size() * self.arguments.sequence_length

    def _held_out_loss(self) -> float:
        # Always the same windows, so that the losses of two steps or two runs can be compared.
        self.engine.eval()
        with torch.no_grad():
            losses = [
                self.model.language_loss(self._forward(self.held_out, step, 0))
                for step in range(NUM_HELD_OUT_BATCHES)
            ]
        self.engine.train()
        return mean_over_ranks(losses)

    def _save_if_due(self, num_done: int) -> None:
        every = self.arguments.save_every
        is_due = num_done == self.run.num_steps or (every and num_done % every == 0)
        if self.arguments.save is not None and is_due:
            self.engine.save_checkpoint(str(self.arguments.save))


def mean_over_ranks(losses: Sequence[Tensor]) -> float:
    """Average losses over themselves and over the ranks. Collective."""
    total = torch.stack([loss.float() for loss in losses]).mean()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    """Train, then write and show the summary."""
    arguments = parse_arguments()
    with plain_errors(SCRIPT):
        run = read_run(arguments)
        model = build_model(arguments)
    if is_first():
        log_old_lock()
        if not is_compiled():
            print("on a CPU, DeepSpeed now compiles its collectives: 20 to 60 s", flush=True)
    # WarmupCosineLR asks for its own rate as it is made, and warns on every rank that it did.
    logger.addFilter(lambda record: ASKS_ITSELF not in record.getMessage())
    deepspeed.init_distributed()
    trainer = Trainer(arguments, run, model)
    with plain_errors(SCRIPT):
        trainer.resume()
    display = Display(first_step=trainer.engine.global_steps, num_steps=run.num_steps)
    with display.bar:
        records = trainer.train(display)

    summary = summarize(trainer, records, PACKAGES)
    if dist.get_rank() == 0:
        leave_summary(display, summary, run.output, arguments.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
