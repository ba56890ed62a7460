# SPDX-License-Identifier: Apache-2.0
"""Small trainings under either host and every strategy, which other scripts damage, kill and watch.

Each rank makes one by ``made``, in an environment as torchrun gives it. Inputs are drawn by step
and rank, and skewed, so that there are hot experts: copies are made and homes move.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script sees its own folder alone

VOCABULARY, LENGTH, ROWS = 64, 16, 2
WIDTH, EXPERT_WIDTH, HEADS, LAYERS, EXPERTS = 32, 48, 2, 2, 4

_MOVING = {"copies_per_rank": 1, "reshard_interval": 2, "resharding": "paper"}
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "ep": {"strategy": "ep"},
    "fssdp": {"strategy": "fssdp", "fssdp": _MOVING},
    "prophet": {"strategy": "prophet"},
    "esp": {"strategy": "esp", "esp": {"degree": 2}},
    "esp over fssdp": {"strategy": "esp", "balance": "fssdp", "fssdp": _MOVING},
    "esp over prophet": {"strategy": "esp", "balance": "prophet"},
    "zebra": {"strategy": "zebra", "zebra": {"attention_size": 1, "expert_size": 1}},
}
"""Names in tables, and the block of each."""


class SmallRun(Protocol):
    """A training of one rank. Whatever it does, all ranks do together."""

    def step(self) -> None:
        """Take an optimizer step on the batch that is due."""

    def save(self, folder: Path) -> Path:
        """Write a checkpoint; where its files lie."""

    def save_beside(self, folder: Path) -> None:
        """Begin to write one; the next step, or the next save, ends that."""

    def save_over(self, folder: Path) -> None:
        """Write one in the place of the last one that was written so."""

    def load(self, folder: Path) -> None:
        """Go on from a folder's latest checkpoint."""

    def tensors(self) -> Iterator[Tensor]:
        """All that training changes on this rank: weights, masters, states of the optimizer."""


def block_of(strategy: str, **more: Any) -> dict[str, Any]:
    """The JSON block of a strategy of the table."""
    quiet = {"report": {"enabled": False, "trace_step": None}}
    return {"enabled": True, **quiet, **STRATEGIES[strategy], **more}


def _tokens(step: int, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_007 * seed + 101 * step + rank)
    drawn = torch.rand(ROWS, LENGTH, generator=generator) ** (1 + step % 3)
    return (drawn * VOCABULARY).long()


# DeepSpeed.


class OfDeepSpeed:
    """A Mixtral of transformers under a DeepSpeed engine.

    Args:
        block: of JSON.
        seed: of weights and batches.
        stage: of ZeRO.
        beside: saves are written by DeepSpeed's decoupled writer.
    """

    def __init__(
        self, block: Mapping[str, Any], seed: int = 0, stage: int = 1, *, beside: bool = False
    ) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        torch.manual_seed(seed)
        self._seed, model = seed, _mixtral()
        writer = {"checkpoint": {"writer": {"type": "PYTHON", "decoupled": True}}}
        os.environ.update(CROSS_SIZE="1", CROSS_RANK="0")  # the writer's, as DeepSpeed sets them
        self._engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": ROWS,
                "gradient_accumulation_steps": 1,
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
                "steps_per_print": 10**9,
                **(writer if beside else {}),
                "ds_moe_ext": dict(block),
            },
        )

    def step(self) -> None:
        """See ``SmallRun``."""
        engine = self._engine
        tokens = _tokens(engine.global_steps, engine.global_rank, self._seed).to(engine.device)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    def save(self, folder: Path) -> Path:
        """See ``SmallRun``."""
        self._engine.save_checkpoint(folder)
        return folder / f"global_step{self._engine.global_steps}"

    def save_beside(self, folder: Path) -> None:
        """See ``SmallRun``."""
        self._engine.save_checkpoint(folder)

    def save_over(self, folder: Path) -> None:
        """See ``SmallRun``."""
        self._engine.save_checkpoint(folder, tag="same")

    def load(self, folder: Path) -> None:
        """See ``SmallRun``."""
        self._engine.load_checkpoint(folder)

    def tensors(self) -> Iterator[Tensor]:
        """See ``SmallRun``."""
        from ds_moe_ext.hosts.deepspeed.state_places import OptimizerStates

        states = OptimizerStates(self._engine)
        for _, parameter in sorted(self._engine.module.named_parameters()):
            yield parameter
            own = states.of(parameter)
            yield from (own.tensors[kind] for kind in sorted(own.tensors))
        yield torch.tensor([self._engine.global_steps, self._engine.global_samples])


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=EXPERT_WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
        output_router_logits=True,
        sliding_window=None,
    )
    return MixtralForCausalLM(shape)


# Megatron-core.


class OfMegatron:
    """Megatron's GPT with the same shapes under its DDP and Adam.

    Args:
        block: of JSON.
        seed: of weights and batches.
        beside: some saves are.
    """

    def __init__(self, block: Mapping[str, Any], seed: int = 0, *, beside: bool = False) -> None:
        import megatron_on_cpu
        import pretrain_megatron
        from gpt_megatron import Architecture
        from megatron_flags import Run, parse_arguments
        from text import Text

        from ds_moe_ext.patches.megatron import use

        pretrain_megatron.leave_out_warnings()
        megatron_on_cpu.install()  # nothing where there are GPUs
        use({"ds_moe_ext": dict(block)})
        sys.argv[1:] = _flags(seed, "zebra" in block)
        arguments = parse_arguments()
        drawn_N = torch.cat([_tokens(step, 0, seed).flatten() for step in range(64)])
        letters = drawn_N.to(torch.uint8).numpy()
        text = Text(letters, letters, "drawn numbers")
        shape = Architecture(_TRANSFORMER, {"position_embedding_type": "rope"}, LENGTH)
        run = Run(arguments, dict(block), "", Path(), text, shape)
        if dist.is_initialized():  # another run before
            torch.manual_seed(seed)
            device = _DEVICE
        else:
            device = pretrain_megatron.start_ranks(arguments)
        self._trainer = pretrain_megatron.Trainer(run, device)
        self._saves: Any = None
        if beside:
            from megatron.core.dist_checkpointing.strategies import async_utils

            self._saves = async_utils.AsyncCallsQueue()

    def step(self) -> None:
        """See ``SmallRun``."""
        self._trainer.take_step()
        if self._saves is not None:
            self._saves.maybe_finalize_async_calls()

    def save(self, folder: Path) -> Path:
        """See ``SmallRun``."""
        self._trainer.kept.save(folder, self._trainer.iteration)
        return folder / f"iter_{self._trainer.iteration:07d}"

    def save_beside(self, folder: Path) -> None:
        """See ``SmallRun``."""
        self._saves.maybe_finalize_async_calls(blocking=True)
        begun = self._trainer.kept.save_beside(folder, self._trainer.iteration)
        self._saves.schedule_async_request(begun)

    def save_over(self, folder: Path) -> None:
        """See ``SmallRun``."""
        self._trainer.kept.save(folder, 1)

    def load(self, folder: Path) -> None:
        """See ``SmallRun``."""
        self._trainer.iteration = self._trainer.kept.load(folder)

    def tensors(self) -> Iterator[Tensor]:
        """See ``SmallRun``."""
        for chunk in self._trainer.chunks:
            yield from (parameter for _, parameter in sorted(chunk.named_parameters()))
        for part in self._trainer.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups if part.optimizer else ():  # has no weights
                for parameter in group["params"]:
                    kept = part.optimizer.state[parameter]
                    yield from (kept[name] for name in ("exp_avg", "exp_avg_sq") if name in kept)
        yield torch.tensor(self._trainer.iteration)


_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_TRANSFORMER: Mapping[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "ffn_hidden_size": EXPERT_WIDTH,
    "moe_ffn_hidden_size": EXPERT_WIDTH,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.01,
    "add_bias_linear": False,
}


def _flags(seed: int, has_roles: bool) -> list[str]:
    given = {
        "--model": "-",
        "--expert-model-parallel-size": "1" if has_roles else os.environ["WORLD_SIZE"],
        "--seq-length": str(LENGTH),
        "--micro-batch-size": str(ROWS),
        "--train-iters": "100000",
        "--lr": "1e-3",
        "--seed": str(seed),
    }
    return [word for pair in given.items() for word in pair]


HOSTS: Mapping[str, Callable[..., SmallRun]] = {"deepspeed": OfDeepSpeed, "megatron": OfMegatron}


def made(host: str, strategy: str, seed: int = 0, *, beside: bool = False, **more: Any) -> SmallRun:
    """A training of this rank. Collective.

    Args:
        host: of ``HOSTS``.
        strategy: of ``STRATEGIES``.
        seed: of weights and batches.
        beside: it may write checkpoints while it trains.
        more: keys of the block.
    """
    torch.set_num_threads(1)
    return HOSTS[host](block_of(strategy, **more), seed, beside=beside)


def main() -> None:
    """Train until the last step, or until somebody ends it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", choices=HOSTS, default="deepspeed")
    parser.add_argument("--strategy", choices=STRATEGIES, default="ep")
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    run = made(given.host, given.strategy)
    for _ in range(given.steps):
        run.step()
    print(sum(float(t.detach().double().sum()) for t in run.tensors()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
