# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints: each must be refused by the file's name, or be loaded as it was saved.

`torchrun --nproc_per_node 2 launch/bench/damage.py --host deepspeed --cases 500`
`torchrun --nproc_per_node 2 launch/bench/damage.py --host megatron --cases 500 --json damage.json`

Small trainings under either host and every strategy, which `kills.py` has too: each rank makes one
by ``made``, in an environment as torchrun gives it. Inputs are drawn by step and rank, and skewed,
so that there are hot experts: copies are made and owners move. Four checkpoints are made: one that
is damaged, one of the run's next step, and two of another run, whose state the ranks have before
each case: what loads nothing, or only a part, is then found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script sees its own folder alone


VOCABULARY, LENGTH, ROWS = 64, 16, 2
WIDTH, EXPERT_WIDTH, HEADS, LAYERS, EXPERTS = 32, 48, 2, 2, 4

_MOVING = {"replicas_per_rank": 1, "reshard_interval": 2, "resharding": "paper"}
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
    """A Mixtral of transformers under a DeepSpeed engine. All that a small run does is collective.

    ``save`` shows where its files lie; ``save_beside`` only begins, and the next step or save ends
    that; ``tensors`` are all that training changes on this rank."""

    def __init__(self, block: Mapping[str, Any], seed: int = 0, *, beside: bool = False) -> None:
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
                "zero_optimization": {"stage": 1},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
                "steps_per_print": 10**9,
                **(writer if beside else {}),
                "ds_moe_ext": dict(block),
            },
        )

    def step(self) -> None:
        engine = self._engine
        tokens = _tokens(engine.global_steps, engine.global_rank, self._seed).to(engine.device)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    def save(self, folder: Path) -> Path:
        self._engine.save_checkpoint(folder)
        return folder / f"global_step{self._engine.global_steps}"

    def save_beside(self, folder: Path) -> None:
        self._engine.save_checkpoint(folder)

    def save_over(self, folder: Path) -> None:
        self._engine.save_checkpoint(folder, tag="same")

    def load(self, folder: Path) -> None:
        self._engine.load_checkpoint(folder)

    def tensors(self) -> Iterator[Tensor]:
        from ds_moe_ext.hosts.deepspeed.parameter_groups import OptimizerStates

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
    """Megatron's GPT with the same shapes under its DDP and Adam."""

    def __init__(self, block: Mapping[str, Any], seed: int = 0, *, beside: bool = False) -> None:
        import megatron_on_cpu
        import pretrain_megatron
        from console import Text
        from gpt_megatron import Architecture, Run, parse_arguments

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
        self._trainer.take_step()
        if self._saves is not None:
            self._saves.maybe_finalize_async_calls()

    def save(self, folder: Path) -> Path:
        self._trainer.kept.save(folder, self._trainer.iteration)
        return folder / f"iter_{self._trainer.iteration:07d}"

    def save_beside(self, folder: Path) -> None:
        self._saves.maybe_finalize_async_calls(blocking=True)
        begun = self._trainer.kept.save_beside(folder, self._trainer.iteration)
        self._saves.schedule_async_request(begun)

    def save_over(self, folder: Path) -> None:
        self._trainer.kept.save(folder, 1)

    def load(self, folder: Path) -> None:
        self._trainer.iteration = self._trainer.kept.load(folder)

    def tensors(self) -> Iterator[Tensor]:
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


SmallRun = OfDeepSpeed | OfMegatron
HOSTS: Mapping[str, Callable[..., SmallRun]] = {"deepspeed": OfDeepSpeed, "megatron": OfMegatron}


def made(host: str, strategy: str, seed: int = 0, *, beside: bool = False, **more: Any) -> SmallRun:
    """A training of this rank. Collective."""
    torch.set_num_threads(1)
    return HOSTS[host](block_of(strategy, **more), seed, beside=beside)


# Damage.

SUMS_FILE = "ds_moe_ext_files.json"  # of Megatron's
BY_NAME, EQUAL = "refused by the file's name", "loaded, equal"
REFUSED, RAW, WRONG = "refused, no file named", "raw error", "silent wrong state"


@dataclass(frozen=True)
class Damage:
    """What is done to one checkpoint."""

    tag: Path  # the folder with its files
    file: Path  # that it is done to, chosen for this case
    # of_next_step, of_other_run: folders of other saves, with files of the same names
    of_next_step: Path
    of_other_run: Path
    draw: random.Random  # of the case


def flipped(damage: Damage) -> None:
    """A bit, anywhere."""
    whole = bytearray(damage.file.read_bytes())
    whole[damage.draw.randrange(len(whole))] ^= 1 << damage.draw.randrange(8)
    damage.file.write_bytes(whole)


def cut(damage: Damage) -> None:
    """To a part of its bytes."""
    whole = damage.file.read_bytes()
    damage.file.write_bytes(whole[: damage.draw.randrange(len(whole))])


def missing(damage: Damage) -> None:
    """No file."""
    damage.file.unlink()


def other_contents(damage: Damage) -> None:
    """Another file of the same folder in its place."""
    others = [p for p in sorted(damage.file.parent.iterdir()) if p.is_file() and p != damage.file]
    shutil.copy(damage.draw.choice(others), damage.file)


def of_the_next_step(damage: Damage) -> None:
    """That of the run's next step."""
    shutil.copy(damage.of_next_step / damage.file.relative_to(damage.tag), damage.file)


def of_another_run(damage: Damage) -> None:
    """That of the same step of another run."""
    shutil.copy(damage.of_other_run / damage.file.relative_to(damage.tag), damage.file)


def half_written(damage: Damage) -> None:
    """As a kill leaves it: files as far as they were written, in the order of their times, the last
    one cut."""
    files = sorted(_files(damage.tag), key=lambda path: path.stat().st_mtime_ns)
    last = damage.draw.randrange(len(files))
    whole = files[last].read_bytes()
    files[last].write_bytes(whole[: damage.draw.randrange(len(whole))])
    for path in files[last + 1 :]:
        path.unlink()


DAMAGES: Mapping[str, Callable[[Damage], None]] = {
    "a bit flipped": flipped,
    "cut": cut,
    "missing": missing,
    "another file's contents": other_contents,
    "of the next step": of_the_next_step,
    "of another run": of_another_run,
    "half written": half_written,
}


def _files(tag: Path) -> list[Path]:
    return sorted(path for path in tag.rglob("*") if path.is_file())


def state_of(run: SmallRun) -> str:
    """A digest of all that all ranks have. Collective."""
    digest = hashlib.sha256()
    for tensor in run.tensors():
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    lines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(lines, digest.hexdigest())
    return " ".join(lines)


class Tries:
    """Ranks that try to load damaged checkpoints. All collective."""

    def __init__(self, host: str, strategy: str, folder: Path, has_sums: bool) -> None:
        self._folder, self._case = folder, folder / "case"
        other = made(host, strategy, seed=1)
        other.step()
        other.step()
        self._of_other_run = other.save(folder / "other")
        self._run = made(host, strategy)
        self._run.step()
        self._run.step()
        self._tag, self._whole = self._run.save(folder / "whole"), state_of(self._run)
        self._run.step()
        self._next = self._run.save(folder / "next")
        if dist.get_rank() == 0 and not has_sums:
            for path in folder.rglob(SUMS_FILE):
                path.unlink()
        dist.barrier()
        self._run.load(folder / "other")
        self._before = state_of(self._run)
        assert self._before != self._whole

    def outcome(self, kind: str, seed: int) -> tuple[str, str]:
        """Damage, load, compare; then all is as it was.

        Returns:
            What became of it, and the message.
        """
        draw = random.Random(seed)
        tag = self._case / self._tag.name
        if dist.get_rank() == 0:
            shutil.rmtree(self._case, ignore_errors=True)
            shutil.copytree(self._folder / "whole", self._case)
            file = draw.choice(_files(tag))
            DAMAGES[kind](Damage(tag, file, self._next, self._of_other_run, draw))
        dist.barrier()
        error: BaseException | None = None
        try:
            self._run.load(self._case)
        except BaseException as raised:  # torch's CheckpointException is no Exception
            error = raised
        found = self._judged(error), f"{type(error).__name__}: {error}" if error else ""
        lines: list[tuple[str, str]] = [found] * dist.get_world_size()
        dist.all_gather_object(lines, found)
        state = state_of(self._run)
        worst = max(lines, key=lambda each: (BY_NAME, EQUAL, REFUSED, RAW, WRONG).index(each[0]))
        if worst[0] == EQUAL and state != self._whole:
            worst = WRONG, worst[1]
        elif worst[0] != EQUAL and state != self._before:
            worst = WRONG, f"changed by what was refused: {worst[1]}"
        if state != self._before:
            self._run.load(self._folder / "other")
            assert state_of(self._run) == self._before
        return worst

    def _judged(self, error: BaseException | None) -> str:
        if error is None:
            return EQUAL
        names = {path.name for path in _files(self._folder / "whole")}
        is_megatrons = type(error).__name__ == "CheckpointingException"
        is_reported = (isinstance(error, ValueError) or is_megatrons) and "\n" not in str(error)
        if is_reported and any(name in str(error) for name in names):
            return BY_NAME
        return REFUSED if is_reported else RAW


def main() -> None:
    """Damage, load, count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", choices=HOSTS, default="deepspeed")
    parser.add_argument("--strategy", choices=STRATEGIES, default="fssdp")
    parser.add_argument("--cases", type=int, default=70)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no_sums", action="store_true", help="as stock Megatron writes them")
    parser.add_argument("--json", type=Path, help="write the counts and what was reported here")
    given = parser.parse_args()
    launch = os.environ["MASTER_PORT"]  # the same on all ranks, and no other launch's
    folder = f"{tempfile.gettempdir()}/damage_{launch}"
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in DAMAGES}
    lines = []
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begun_s = time.monotonic()
        tries = Tries(given.host, given.strategy, Path(folder), not given.no_sums)
        for number in range(given.cases):
            kind = list(DAMAGES)[number % len(DAMAGES)]
            outcome, message = tries.outcome(kind, given.seed + number)
            counts[kind][outcome] += 1
            lines.append({"case": number, "kind": kind, "outcome": outcome, "message": message})
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        _show(given, counts, time.monotonic() - begun_s)
        if given.json:
            given.json.write_text(json.dumps(lines, indent=1))
    dist.destroy_process_group()


def _show(given: argparse.Namespace, counts: dict[str, Counter[str]], seconds_s: float) -> None:
    outcomes = (BY_NAME, EQUAL, REFUSED, RAW, WRONG)
    table = Table(title=f"{given.host}, {given.strategy}, {given.cases} cases, {seconds_s:.0f} s")
    for name in ("damage", *outcomes):
        table.add_column(name)
    for kind, counter in counts.items():
        table.add_row(kind, *(str(counter[outcome]) for outcome in outcomes))
    table.add_row("all", *(str(sum(c[outcome] for c in counts.values())) for outcome in outcomes))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
