# SPDX-License-Identifier: Apache-2.0
"""Ranks of Megatron-core with batches of other sizes than each other's, or none; and such as call
the model at other times."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import pytest
from torch import Tensor

from tests.hosts import megatron_jobs
from tests.hosts.megatron_jobs import Training, megatron, merged
from tests.hosts.megatron_skewed import worst
from tests.hosts.megatron_toy import MegatronRun
from tests.hosts.test_megatron_bad_numbers import RUN, SOON_S, STRATEGIES, block
from tests.hosts.test_megatron_move import go_to_owner
from tests.marks import slow
from tests.ranks import pool_of

SIZES = {  # samples of a rank's micro-batch, and their length
    "other sizes and lengths": ((2, 16), (1, 11)),
    "one token": ((2, 16), (1, 1)),
}
DOUBLE = replace(RUN, dtype="float64", steps=4, aux_coefficient=0.0)  # which is a mean over tokens


class Trained(NamedTuple):
    """By one rank."""

    losses: list[float]
    norms: list[float | None]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def _loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.sum() / 32
    return loss, {"loss": loss.detach().clone()}


def trained(
    rank: int, world_size: int, run: MegatronRun, settings: dict[str, Any] | None, what: str
) -> Trained:
    stock = Training._batches

    def cut(training: Training, step: int) -> Iterator[Tensor]:
        size, length = SIZES[what][rank % 2]
        for tokens in stock(training, step):
            yield tokens[:size, : length + 1]

    patched = mock.patch.object(Training, "_batches", cut)
    with megatron(run, settings), patched, mock.patch.object(megatron_jobs, "_loss", _loss):
        training, losses, norms = Training(run), [], []
        gradients: dict[str, Tensor] = {}
        for step in range(run.steps):
            losses.append(training.compute(step))
            gradients = gradients or training.gradients()
            norms.append(training.update())
        go_to_owner(training)
        return Trained(losses, norms, gradients, training.weights())


@cache
def stock(run: MegatronRun, what: str) -> list[Trained]:
    return pool_of(2).run(trained, run, None, what)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (name, what) if (name, what) == ("fssdp", "one token") else slow(name, what)
        for name in STRATEGIES
        for what in SIZES
    ],
)
def test_batches_of_other_sizes_train_as_stock(name: str, what: str) -> None:
    run, settings, world_size = DOUBLE, block(name), 2
    if name == "zebra":  # whose attention ranks have the batches
        run, world_size = replace(run, ep=1), 3
        settings = {**settings, "zebra": {"attention_size": 2, "expert_size": 1}}
    ours, theirs = pool_of(world_size).run(trained, run, settings, what), stock(run, what)
    assert ours[0].losses == pytest.approx(theirs[0].losses, rel=1e-12)
    assert ours[0].norms == pytest.approx(theirs[0].norms, rel=1e-11)
    for kind, error in (("gradients", 1e-12), ("weights", 1e-9)):
        found, expected = (merged([one._asdict()[kind] for one in t]) for t in (ours, theirs))
        assert worst(found, expected) <= error, kind


def without_samples(rank: int, world_size: int, name: str) -> tuple[float, str]:
    """What ends a step in which rank 1 has none."""
    run = replace(RUN, ep=1 if name == "zebra" else 2)
    settings = block(name)
    if name == "zebra":
        settings = {**settings, "zebra": {"attention_size": 2, "expert_size": 1}}
    stock = Training._batches

    def cut(training: Training, step: int) -> Iterator[Tensor]:
        for tokens in stock(training, step):
            yield tokens[: 2 if rank != 1 else 0]

    with megatron(run, settings), mock.patch.object(Training, "_batches", cut):
        training, begun_s = Training(run), time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            training.compute(0)
        return time.monotonic() - begun_s, f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("name", [slow(name) for name in STRATEGIES])
def test_a_batch_without_samples_is_megatrons_error_on_all_ranks(name: str) -> None:
    """Its attention cannot take one; who waits in an MoE layer is notified of it."""
    pool = pool_of(3 if name == "zebra" else 2)
    try:
        ranks = pool.run(without_samples, name)
    finally:
        pool.close()
    for rank, (seconds, reported) in enumerate(ranks):
        assert seconds < SOON_S
        assert "cannot reshape tensor of 0 elements" in reported, reported
        assert reported.startswith("RuntimeError" if rank == 1 else "BrokenOff: rank 1 failed"), (
            reported
        )


# Ranks that call the model at other times.


def late(rank: int, world_size: int, run: MegatronRun, settings: dict[str, Any]) -> str:
    """What is stated while rank 1 does something else between two steps."""
    printed = io.StringIO()
    with megatron(run, settings), contextlib.redirect_stderr(printed):
        training = Training(run)
        for step in range(2):
            if step == 1 and rank == 1:
                time.sleep(5.0)
            training.compute(step)
            training.update()
    return printed.getvalue()


@pytest.mark.parametrize("name", [slow(name) for name in STRATEGIES])
def test_who_waits_says_so(name: str) -> None:
    run = replace(RUN, ep=1 if name == "zebra" else 2)
    settings = {**block(name), "waits": {"log_after_s": 2}}
    first, _ = pool_of(2).run(late, run, settings)
    assert "ds_moe_ext: rank 0 has waited" in first, first
    assert "rank 1 is in none of them" in first, first
    assert "in as many micro-batches a step, steps and evaluations" in first
    assert "joined" not in first


def trained_and_evaluated(rank: int, world_size: int, name: str) -> tuple[float, str]:
    """Rank 0 evaluates while rank 1 trains."""
    run = replace(RUN, ep=1 if name == "zebra" else 2)
    settings = {**block(name), "megatron": {"layer": "program"}}  # stock Megatron would wait
    with megatron(run, settings):
        training = Training(run)
        begun_s = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            training.evaluate(0) if rank == 0 else training.compute(0)
        return time.monotonic() - begun_s, str(caught.value)


@pytest.mark.parametrize("name", ["ep", *map(slow, ["fssdp", "prophet", "esp", "zebra"])])
def test_passes_that_do_not_belong_together_are_reported(name: str) -> None:
    ranks = pool_of(2).run(trained_and_evaluated, name)
    for seconds, reported in ranks:
        assert seconds < SOON_S
        assert "joined" not in reported
        if name == "zebra":
            assert "are not at the same step" in reported, reported
        else:
            assert "place 0: layer 0, evaluation; place 1: layer 0, training" in reported
            assert "in as many micro-batches a step, steps and evaluations" in reported
