# SPDX-License-Identifier: Apache-2.0
"""A real DeepSpeed engine with replaced layers: users' optimizers, and runs that are resumed."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_moe_ext.testing import relative_error
from tests.hosts.jobs import Job, Result, train
from tests.marks import slow
from tests.ranks import pool_of


def run(world_size: int, job: Job) -> Result:
    result: Result = pool_of(world_size).run(train, job)[0]
    return result


@functools.cache
def one_rank(job: Job) -> Result:
    """The same job on one rank at ZeRO 0, without us."""
    return run(1, replace(job, stage=0, block=False, ep_ranks=None, ep_size=1))


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(relative_error(ours[name].double(), theirs[name].double()) for name in theirs)


QUICK = (("list", "object", 1), ("generator", "callable", 1), ("groups", "object", 1))


@pytest.mark.parametrize(
    ("parameters", "optimizer", "stage"),
    [
        case if case in QUICK else slow(*case)
        for case in product(("list", "generator", "groups"), ("object", "callable"), (0, 1, 2))
    ],
)
def test_users_own_optimizer_and_parameters(parameters: str, optimizer: str, stage: int) -> None:
    job = Job("mixtral", stage, steps=3, optimizer=optimizer, parameters=parameters)
    ours = run(2, job)
    plain = one_rank(replace(job, stage=0))
    assert ours.losses == pytest.approx(plain.losses, rel=2e-5)
    moved = run(2, replace(job, steps=0)).state
    for name, tensor in ours.state.items():
        assert not torch.equal(tensor, moved[name]), f"{name} was not trained"


@pytest.mark.slow  # quick: to the last bit, in test_checkpoint.py
@pytest.mark.parametrize("family", ["mixtral", "gpt_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resumed_run_goes_on_exactly(family: str, stage: int, dtype: str, tmp_path: Path) -> None:
    job = Job(family, stage, dtype=dtype, steps=5, save_at=2, folder=str(tmp_path))
    straight = run(2, job)
    resumed = run(2, replace(job, save_at=None, resume=True))
    assert resumed.losses == straight.losses[2:]
    assert worst(resumed.state, straight.state) == 0.0


def test_weights_alone_load_on_another_grid(tmp_path: Path) -> None:
    """By expert number: written by two EP ranks, read by four."""
    job = Job("mixtral", 1, steps=2, save_at=2, folder=str(tmp_path))
    saved = run(2, job)
    alone = replace(job, save_at=None, resume=True, load_arguments=(("load_module_only", True),))
    assert worst(run(4, replace(alone, steps=0)).state, saved.state) == 0.0


@pytest.mark.slow  # with other damages quick, in test_checkpoint.py
def test_checkpoint_without_us_is_refused(tmp_path: Path) -> None:
    job = Job("mixtral", 1, steps=1, save_at=1, folder=str(tmp_path), block=False)
    run(2, job)
    with pytest.raises(AssertionError, match=r"has no ds_moe_ext\.json"):
        pool_of(2).run(train, replace(job, save_at=None, resume=True, block=True))


def disagree(rank: int, world_size: int) -> str:
    """Attach a strategy that plans differently on every rank, with ``debug`` on, though the ranks
    take their settings for equal."""
    import deepspeed

    from ds_moe_ext.hosts.attachment import startup_check
    from tests.hosts.jobs import document_of, model_of

    job = Job("mixtral")
    document = document_of(job, world_size)
    document["ds_moe_ext"] |= {
        "debug": True,
        "strategy": "tests.strategies_for_tests:Chunked",
        "options": {"forward": 1 + rank, "backward": 1},
    }
    model = model_of(job)
    try:
        with mock.patch.object(startup_check, "settings_of", return_value={}):
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_debug_names_ranks_that_disagree() -> None:
    for message in pool_of(2).run(disagree):
        assert "ranks disagree on model.layers.0.mlp.experts: digests" in message
