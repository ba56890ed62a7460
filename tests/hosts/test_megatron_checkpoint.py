# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of runs under Megatron-core are Megatron's own, wherever experts have moved.

Each run trains some steps, saves, and trains on; others go on from what it saved, with other
strategies, without us and in other layouts. All is computed in float64.
"""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.hosts.megatron_jobs import Training, megatron
from tests.hosts.megatron_toy import MegatronRun
from tests.hosts.test_megatron_move import RUN, fssdp, owners_of, skew
from tests.ranks import pool_of, preload

preload("megatron.core.dist_checkpointing")

SAVED, LAST = 6, 9  # steps
FULLY = "fully_reshardable"


def block(strategy: str) -> dict[str, Any] | None:
    """The settings of a strategy; None without us."""
    if strategy == "stock":
        return None
    if strategy == "fssdp":
        return fssdp()
    if strategy == "fssdp, by time":
        return fssdp(share="priced")
    return {"enabled": True, "strategy": strategy, "report": {"enabled": False}, "debug": True}


@dataclass(frozen=True)
class Job:
    """What a rank does."""

    run: MegatronRun
    strategy: str
    folder: str
    form: str


@dataclass(frozen=True)
class Saved:
    """What a rank has found."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    was_away: bool


@contextmanager
def files_written() -> Iterator[None]:
    """Let this rank, a daemon, write as Megatron does: by processes that it starts."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    config = vars(multiprocessing.current_process())["_config"]
    with (
        mock.patch.dict(config, daemon=False),
        mock.patch.object(filesystem_async, "_results_queue", queue.Queue()),  # not a server's
    ):
        yield


def sharded(training: Training, form: str, is_loading: bool) -> dict[str, Any]:
    """Everything, as Megatron-LM asks for it."""
    metadata: dict[str, Any] = {"chained_optim_avoid_prefix": True}
    if training.run.optimizer == "distributed":
        metadata["distrib_optim_sharding_type"] = form
    chunks = training.chunks
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    state = {
        name: chunk.module.sharded_state_dict(metadata=metadata)
        for name, chunk in zip(names, chunks)
    }
    optimizer = training.optimizer.sharded_state_dict(dict(state), is_loading, metadata=metadata)
    return {**state, "optimizer": optimizer}


def save(training: Training, folder: str, form: str) -> None:
    """In a form of Megatron's: "torch" is its older one, of a file a rank."""
    from megatron.core import dist_checkpointing

    give_gloo(training)
    if form != "torch":
        with files_written():
            dist_checkpointing.save(sharded(training, form, is_loading=False), folder)
        return
    if training.run.optimizer == "distributed":
        training.optimizer.save_parameter_state(f"{folder}/distributed{dist.get_rank()}.pt")
    models = [chunk.state_dict_for_save_checkpoint() for chunk in training.chunks]
    torch.save((models, training.optimizer.state_dict()), f"{folder}/rank{dist.get_rank()}.pt")


def load(training: Training, folder: str, form: str) -> None:
    from gpt_megatron import load_optimizer, start_adam
    from megatron.core import dist_checkpointing

    give_gloo(training)
    start_adam(training.optimizer)
    if form != "torch":
        state = dist_checkpointing.load(sharded(training, form, is_loading=True), folder)
        optimizer = state.pop("optimizer")
        for chunk, name in zip(training.chunks, sorted(name for name in state if "model" in name)):
            chunk.module.load_state_dict(state[name])
        load_optimizer(training.optimizer, optimizer)
        return
    models, optimizer = torch.load(f"{folder}/rank{dist.get_rank()}.pt", weights_only=False)
    for chunk, model in zip(training.chunks, models):
        chunk.load_state_dict(model)
    load_optimizer(training.optimizer, optimizer)
    if training.run.optimizer == "distributed":
        with torch.no_grad(), steps_aside(training):
            training.optimizer.load_parameter_state(f"{folder}/distributed{dist.get_rank()}.pt")


@contextmanager
def steps_aside(training: Training) -> Iterator[None]:
    """As ``load_optimizer`` does: Megatron does not expect torch's step counts."""
    parts = training.optimizer.chained_optimizers
    kept = [state for part in parts for state in part.optimizer.state.values()]
    counts = [state.pop("step") for state in kept]
    yield
    for state, count in zip(kept, counts):
        state["step"] = count


def give_gloo(training: Training) -> None:
    """The harness makes no second groups of gloo's; the first are that."""
    for part in training.optimizer.chained_optimizers:
        part.data_parallel_group_gloo = vars(part).get("data_parallel_group")


def steps(training: Training, first: int, last: int) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(first, last):
        losses.append(training.compute(step))
        norms.append(training.update() or 0.0)
    return losses, norms


def run_saving(rank: int, world_size: int, job: Job) -> Saved:
    """Steps to the end, and a checkpoint on the way."""
    with megatron(job.run, block(job.strategy)):
        training = Training(job.run)
        skew(training)
        steps(training, 0, SAVED)
        owners = [] if job.strategy == "stock" else owners_of(training)
        save(training, job.folder, job.form)
        dist.barrier()
        losses, norms = steps(training, SAVED, LAST)
    return Saved(
        tuple(losses), tuple(norms), any(new_owners != sorted(new_owners) for new_owners in owners)
    )


def run_resuming(rank: int, world_size: int, job: Job, steps_before: int = 0) -> Saved:
    """Steps from a checkpoint to the end; others before, that are forgotten."""
    with megatron(job.run, block(job.strategy)):
        training = Training(job.run)
        steps(training, 100, 100 + steps_before)
        load(training, job.folder, job.form)
        losses, norms = steps(training, SAVED, LAST)
    return Saved(tuple(losses), tuple(norms), False)


def assert_goes_on(found: list[Saved], saved: list[Saved]) -> None:
    torch.testing.assert_close(found[0].losses, saved[0].losses, rtol=1e-9, atol=0)
    torch.testing.assert_close(found[0].norms, saved[0].norms, rtol=1e-8, atol=0)


def ranks_of(run: MegatronRun) -> int:
    return run.pp * run.ep * (run.etp or 1)


def goes_to_stock(job: Job, other: MegatronRun) -> list[Saved]:
    """Saved by a strategy, resumed by stock; what its ranks found."""
    saved: list[Saved] = pool_of(ranks_of(job.run)).run(run_saving, job)
    assert saved[0].was_away == job.strategy.startswith("fssdp")
    resuming = replace(job, run=other, strategy="stock")
    assert_goes_on(pool_of(ranks_of(other)).run(run_resuming, resuming), saved)
    return saved


def both_ways(
    folder: Path, run: MegatronRun, strategy: str, form: str, other: MegatronRun | None = None
) -> None:
    """Saved by a strategy, resumed by stock and by it; saved by stock, resumed by it."""
    other = other or run
    ours, stocks = folder / "ours", folder / "stocks"
    ours.mkdir()
    stocks.mkdir()
    job = Job(run, strategy, str(ours), form)
    saved = goes_to_stock(job, other)
    assert_goes_on(pool_of(ranks_of(other)).run(run_resuming, replace(job, run=other)), saved)
    job = replace(job, folder=str(stocks))
    by_stock = pool_of(ranks_of(run)).run(run_saving, replace(job, strategy="stock"))
    assert_goes_on(by_stock, saved)
    resuming = replace(job, run=other)
    assert_goes_on(pool_of(ranks_of(other)).run(run_resuming, resuming, steps_before=SAVED), saved)


def test_stock_megatron_goes_on_from_moved_experts(tmp_path: Path) -> None:
    run = replace(RUN, optimizer="distributed")
    goes_to_stock(Job(run, "fssdp", str(tmp_path), FULLY), run)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer, form", [("distributed", FULLY), ("ddp", "torch")])
def test_moved_experts_are_saved_as_megatron_would(
    tmp_path: Path, optimizer: Any, form: str
) -> None:
    both_ways(tmp_path, replace(RUN, optimizer=optimizer), "fssdp", form)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer, form",
    [
        ("distributed", "dp_reshardable"),
        ("distributed", "dp_zero_gather_scatter"),
        ("distributed", "torch"),
        ("ddp", FULLY),
    ],
)
def test_in_every_form_of_optimizer_states(tmp_path: Path, optimizer: Any, form: str) -> None:
    both_ways(tmp_path, replace(RUN, optimizer=optimizer), "fssdp", form)


@pytest.mark.slow
def test_of_grouped_experts(tmp_path: Path) -> None:
    both_ways(tmp_path, replace(RUN, experts="te_grouped"), "fssdp", "torch")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ep", "esp", "prophet", "fssdp, by time"])
def test_of_every_strategy(tmp_path: Path, strategy: str) -> None:
    both_ways(tmp_path, RUN, strategy, FULLY)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"ep": 4}, {"ep": 2, "etp": 2}, {"ep": 2, "pp": 2}])
def test_in_other_layouts(tmp_path: Path, keys: dict[str, Any]) -> None:
    run = replace(RUN, num_microbatches=4)
    size = keys["ep"] * keys.get("etp", 1)  # as many samples a step
    both_ways(tmp_path, run, "fssdp", FULLY, replace(run, num_microbatches=8 // size, **keys))
