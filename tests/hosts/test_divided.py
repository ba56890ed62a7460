# SPDX-License-Identifier: Apache-2.0
"""Replaced experts in a model that DeepSpeed divides: by AutoTP, or by Ulysses along the sequence.

Gradients of the first step, curves and norms equal those of DeepSpeed alone, divided likewise, and
of one rank where it has the same weights.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.hosts.divided_runs import Case, Learnt, Way, train
from tests.hosts.jobs import LENGTH, Job
from tests.hosts.varied import VARIED
from tests.hosts.zebra_runs import by_device, zebra
from tests.marks import slow
from tests.ranks import pool_of, preload

preload("deepspeed", "transformers.models.mixtral.modeling_mixtral", "einops")

AUTOTP, ULYSSES = Way.AUTOTP, Way.ULYSSES
CURVE = Job(aux_coefficient=0.0, steps=6, clip=0.5)
GRADIENTS = Job(aux_coefficient=0.0, steps=1, sgd=True, learning_rate=1e4, optimizer="object")
"""One step so long that weights are gradients."""

EP: dict[str, Any] = {"strategy": "ep"}
FSSDP: dict[str, Any] = {
    "strategy": "fssdp",
    "keys": (("overlap_degree", 2), ("replicas_per_rank", 2), ("reshard_interval", 0)),
}
BY_CHANCE: dict[str, Any] = {
    "strategy": VARIED,
    "keys": (("layers", 1.0), ("replicas", 0.7), ("rematerialized", 0.4)),
}
PROPHET: dict[str, Any] = {"strategy": "prophet"}
ESP: dict[str, Any] = {
    "strategy": "esp",
    "etp_size": 2,
    "keys": (("degree", 2), ("slice_gradients", False)),
}
SLICED: dict[str, Any] = {**ESP, "keys": (("degree", 2), ("slice_gradients", True))}


@cache
def stock(job: Job, way: Way, world_size: int) -> list[Learnt]:
    """Of DeepSpeed alone, all of whose ranks have all experts."""
    size = 1 if way is Way.NONE else 2
    return pool_of(world_size).run(train, Case(replace(job, block=False), way, size))


ROWS = [
    slow(AUTOTP, 1, EP),
    (ULYSSES, 1, BY_CHANCE),
    *(
        slow(way, stage, strategy)
        for way in (AUTOTP, ULYSSES)
        for stage in (0, 1, 2, 3)
        for strategy in (EP, BY_CHANCE, FSSDP, PROPHET, ESP, SLICED)
        if (way, stage, strategy) not in ((AUTOTP, 1, EP), (ULYSSES, 1, BY_CHANCE))
        and (stage < 3 or strategy is not SLICED)  # which is refused
    ),
]


@pytest.mark.parametrize(("way", "stage", "strategy"), ROWS)
def test_learns_what_deepspeed_alone_learns(way: Way, stage: int, strategy: dict[str, Any]) -> None:
    """On four ranks, two a copy of the model."""
    ours = pool_of(4).run(train, Case(replace(GRADIENTS, stage=stage, **strategy), way, 2))
    like = 3 if stage == 3 else 1
    for own, alone in zip(ours, stock(replace(GRADIENTS, stage=like), way, 4)):
        assert_alike(own, alone)
        assert own.num_copied or strategy is not BY_CHANCE
    if stage == 3 and way is ULYSSES:  # where DeepSpeed takes the mean over all ranks
        reference = stock(replace(CURVE, stage=3), way, 4)[0]
    else:
        reference = stock(CURVE, Way.NONE, 1)[0]
        assert_alike(ours[0], stock(GRADIENTS, Way.NONE, 1)[0])
    for own in pool_of(4).run(train, Case(replace(CURVE, stage=stage, **strategy), way, 2)):
        assert own.losses == pytest.approx(reference.losses, rel=2e-5)
        assert own.norms == pytest.approx(reference.norms, rel=1e-4)
        assert own.num_copied or strategy is not BY_CHANCE  # others copy where that pays


def assert_alike(own: Learnt, alone: Learnt) -> None:
    """By the largest gradient of each weight."""
    assert own.losses == pytest.approx(alone.losses, rel=1e-6)
    assert own.state.keys() == alone.state.keys()
    for name, weight in alone.state.items():
        torch.testing.assert_close(
            own.state[name], weight, rtol=0, atol=2e-6 * float(weight.abs().max()), msg=name
        )


ON_HOST = (("device", "cpu"),)
IN_FLOAT32 = {"grad_accum_dtype": "fp32"}
WAYS = pytest.mark.parametrize("way", [AUTOTP, ULYSSES], ids=str)


def with_roles(job: Job, attention: int = 2, experts: int = 2, **keys: Any) -> Job:
    return zebra(job, attention, experts, **keys)


BY_BOTH: tuple[tuple[int, dict[str, Any]], ...] = (
    (4, {"moved": [0, 1]}),
    (4, {"attention_ep_ranks": [2, 3], "num_micro_batches": 1}),
    (6, {"experts": 4, "num_micro_batches": 3}),
    (8, {"attention": 4, "experts": 4}),
    (8, {"moved": [2, 0]}),
    (8, {"moved": [1, 0], "attention_device": "A40"}),
)
T4S_FIRST = ["T4"] * 4 + ["A40"] * 4
"""Of eight ranks."""
HALVED = (6, {"attention": 4, "num_micro_batches": 3})
"""A piece has half a batch's samples, but Ulysses is told at the start how many a batch has."""


@pytest.mark.parametrize(
    ("way", "world_size", "keys"),
    [
        *(slow(way, *row) for way in (AUTOTP, ULYSSES) for row in BY_BOTH),
        slow(AUTOTP, *HALVED),
    ],
    ids=str,
)
def test_roles_learn_in_float64_what_ep_learns(
    way: Way, world_size: int, keys: dict[str, Any]
) -> None:
    """Units of two ranks: other units, other places, and two ZP groups, also of no neighbours."""
    job = replace(CURVE, stage=0, dtype="float64", steps=4, micro_batches=12, num_experts=12)
    work = partial(pool_of(world_size).run, by_device, T4S_FIRST, train)
    theirs = work(Case(replace(job, **EP), way, 2))
    ours = work(Case(with_roles(job, **keys), way, 2))
    for own, like in zip(ours, theirs):
        assert own.losses == pytest.approx(like.losses, rel=1e-12)
        assert own.norms == pytest.approx(like.norms, rel=1e-12)
        assert own.state.keys() == like.state.keys()
        for name, weight in like.state.items():
            torch.testing.assert_close(own.state[name], weight, rtol=0, atol=1e-12)


def profiled(rank: int, world_size: int, case: Case) -> tuple[Learnt, list[tuple[int, int]]]:
    """Train; and of what this rank has measured before: weights that are trained, and bytes that
    blocks keep."""
    from ds_moe_ext.hosts.zebra import profile

    found, rehearse = [], profile.rehearse_dense

    def watched(*given: Any, **named: Any) -> Any:
        dense = rehearse(*given, **named)
        found.append((dense.parts.num_trained, dense.parts.blocks_bytes))
        return dense

    with mock.patch.object(profile, "rehearse_dense", watched):
        return train(rank, world_size, case), found


@pytest.mark.parametrize(
    ("way", "device"), [(AUTOTP, None), slow(ULYSSES, None), slow(AUTOTP, "A40")], ids=str
)
def test_roles_measure_the_divided_model(way: Way, device: str | None) -> None:
    """The ranks that divide it run it together, in groups of no neighbours too; and whatever moves,
    it learns what ``ep`` does."""
    job = replace(CURVE, stage=0, dtype="float64", steps=2, num_experts=12)
    measured = {"sequence_length": LENGTH, "num_repeats": 2}
    ((_, ((whole, bytes_of_whole),)), _) = pool_of(2).run(
        profiled, Case(with_roles(job, 1, 1, profile=measured))
    )
    work = partial(pool_of(8 if device else 4).run, by_device, T4S_FIRST)
    theirs = work(train, Case(replace(job, **EP), way, 2))
    ours = work(profiled, Case(with_roles(job, profile=measured, attention_device=device), way, 2))
    first = 4 if device else 0
    assert [n for n, (_, found) in enumerate(ours) if found] == [first, first + 1]
    for own, like in zip(ours, theirs):
        assert own[0].losses == pytest.approx(like.losses, rel=1e-12)
        assert own[0].norms == pytest.approx(like.norms, rel=1e-12)
    for num_trained, kept_bytes in (found for _, (found,) in ours[first : first + 2]):
        assert num_trained == whole if way is ULYSSES else 0.4 * whole < num_trained < whole
        assert 0.4 * bytes_of_whole < kept_bytes < 0.9 * bytes_of_whole


@pytest.mark.slow  # quick: roles that measure the divided model; ZeRO 2 in test_configurations.py
@WAYS
@pytest.mark.parametrize(
    ("stage", "offload"),
    [(0, ()), (1, ()), (2, ()), (1, ON_HOST), (2, ON_HOST)],
    ids=str,
)
def test_roles_learn_by_zero_what_ep_learns(
    way: Way, stage: int, offload: tuple[tuple[str, Any], ...]
) -> None:
    """The gradients of one step, and curves."""
    for given, compare in ((GRADIENTS, assert_alike), (CURVE, assert_curves_alike)):
        job = replace(given, stage=stage, offload=offload)
        theirs = pool_of(4).run(train, Case(replace(job, **EP), way, 2))
        ours = pool_of(4).run(train, Case(with_roles(job, moved=[1, 0]), way, 2))
        for own, like in zip(ours, theirs):
            compare(own, like)


def assert_curves_alike(own: Learnt, alone: Learnt) -> None:
    assert own.losses == pytest.approx(alone.losses, rel=2e-5)
    assert own.norms == pytest.approx(alone.norms, rel=1e-4)


@WAYS
@pytest.mark.parametrize(
    ("stage", "extra"),
    [slow(0, ()), slow(1, ()), slow(1, (("data_types", IN_FLOAT32),)), slow(2, ())],
    ids=str,
)
def test_roles_in_bfloat16(way: Way, stage: int, extra: tuple[Any, ...]) -> None:
    """By each of DeepSpeed's wrappers, which take norms in ways of their own."""
    job = replace(CURVE, stage=stage, dtype="bfloat16", extra=extra)
    theirs = pool_of(1).run(train, Case(replace(job, block=False)))[0]
    for own in pool_of(4).run(train, Case(with_roles(job), way, 2)):
        assert own.losses == pytest.approx(theirs.losses, rel=1e-2)
        assert own.norms[0] == pytest.approx(theirs.norms[0], rel=3e-2)


@pytest.mark.slow  # undivided models do in test_checkpoint.py, quickly
@WAYS
@pytest.mark.parametrize("stages", [(1, 2, 1), (2, 1, 0)], ids=str)
def test_roles_go_on_from_ep_and_ep_from_roles(
    way: Way, stages: tuple[int, int, int], tmp_path: Path
) -> None:
    losses, norms = [], []
    for number, stage in enumerate(stages):
        stop = 2 * (number + 1)
        job = replace(CURVE, **EP, stage=stage, folder=str(tmp_path), steps=stop, save_at=stop)
        job = replace(job, resume=number > 0)
        learnt = pool_of(4).run(train, Case(with_roles(job) if number == 1 else job, way, 2))[0]
        losses += learnt.losses
        norms += learnt.norms
    one = stock(CURVE, Way.NONE, 1)[0]
    assert losses == pytest.approx(one.losses, rel=2e-5)
    assert norms == pytest.approx(one.norms, rel=1e-4)


@pytest.mark.slow
def test_what_tp_model_init_was_reported() -> None:
    """It only remembers, and ``initialize`` divides."""
    results = pool_of(4).run(train, Case(replace(GRADIENTS, **EP), AUTOTP, 2, early=True))
    for own, alone in zip(results, stock(GRADIENTS, AUTOTP, 4)):
        assert_alike(own, alone)


@pytest.mark.parametrize(
    ("way", "stages", "later"),
    [
        slow(AUTOTP, (1, 2), Case(replace(CURVE, **FSSDP), AUTOTP, 2)),
        slow(ULYSSES, (2, 1), Case(replace(CURVE, **ESP))),
        slow(AUTOTP, (3, 0), Case(replace(CURVE, **ESP), AUTOTP, 2)),
        slow(ULYSSES, (3, 1), Case(replace(CURVE, **PROPHET), ULYSSES, 2)),
        slow(ULYSSES, (0, 2), Case(replace(CURVE, **FSSDP), ULYSSES, 4)),
    ],
)
def test_goes_on_by_another_strategy(
    way: Way, stages: tuple[int, int], later: Case, tmp_path: Path
) -> None:
    """At another stage too, and after Ulysses undivided."""
    folder, half = str(tmp_path), CURVE.steps // 2
    job = replace(CURVE, **EP, stage=stages[0], folder=folder, save_at=half, steps=half)
    pool_of(4).run(train, Case(job, way, 2))
    goes_on = replace(later.job, stage=stages[1], folder=folder, resume=True)
    one = stock(CURVE, Way.NONE, 1)[0]
    for own in pool_of(4).run(train, later._replace(job=goes_on)):
        assert own.losses == pytest.approx(one.losses[half:], rel=2e-5)
        assert own.norms == pytest.approx(one.norms[half:], rel=1e-4)


@pytest.mark.slow
def test_parts_of_autotp_need_as_many_ranks_again(tmp_path: Path) -> None:
    job = replace(CURVE, **EP, folder=str(tmp_path), save_at=1, steps=1)
    pool_of(4).run(train, Case(job, AUTOTP, 2))
    with pytest.raises(AssertionError, match="2 tensor parallel rank"):
        pool_of(4).run(train, Case(replace(job, resume=True)))
