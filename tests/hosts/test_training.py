"""A real DeepSpeed engine with replaced layers trains as one rank without us does."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.hosts.jobs import Job, Result, train
from tests.marks import slow
from tests.ranks import pool_of
from tests.reference import relative_error

FAMILIES = ["mixtral", "gpt_moe"]


def run(world_size: int, job: Job) -> Result:
    result: Result = pool_of(world_size).run(train, job)[0]
    return result


@functools.cache
def one_rank(job: Job) -> Result:
    """The same job on one rank at ZeRO 0, without us."""
    return run(1, replace(job, stage=0, block=False, cells=None, ep_size=1))


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(relative_error(ours[name].double(), theirs[name].double()) for name in theirs)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_first_gradients_equal_one_rank(family: str, stage: int, world_size: int) -> None:
    """One step of SGD at a huge rate is the gradient, whatever ZeRO does with it. The optimizer is
    the user's own, so that is tested too."""
    job = Job(family, stage, steps=1, optimizer="object", sgd=True, learning_rate=1e4)
    ours, plain = run(world_size, job), one_rank(replace(job, stage=0))
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    assert worst(ours.state, plain.state) <= 1e-6


@pytest.mark.parametrize("world_size", [2, slow(4)])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_steps_equal_one_rank(family: str, stage: int, world_size: int) -> None:
    """In float32 a flipped choice may move a curve, but not far in ten steps; clipping by the
    global norm, in which each expert counts once."""
    job = Job(family, stage, clip=0.5)
    ours, plain = run(world_size, job), one_rank(replace(job, stage=0))
    assert ours.losses == pytest.approx(plain.losses, rel=2e-4)
    if stage:
        assert ours.norms == pytest.approx(norms_at_zero_1(job), rel=2e-3)


@functools.cache
def norms_at_zero_1(job: Job) -> list[float]:
    """Global norms of the job on one rank without us; DeepSpeed has none at ZeRO 0."""
    return run(1, replace(job, stage=1, block=False)).norms


@pytest.mark.parametrize(
    ("family", "world_size"),
    [("mixtral", 4), ("gpt_moe", 2), slow("mixtral", 2), slow("gpt_moe", 4)],
)
def test_float64_curves_equal_one_rank(family: str, world_size: int) -> None:
    """ZeRO 1 and 2 keep masters in float32; ZeRO 0 keeps float64, but for the reduction, which the
    job does itself."""
    job = Job(family, 0, dtype="float64")
    ours, plain = run(world_size, job), one_rank(job)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-12)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_grids_of_two_cells(stage: int) -> None:
    """Expert gradients are reduced over the ranks that hold the same experts."""
    job = Job("mixtral", stage, steps=1, optimizer="object", sgd=True, learning_rate=1e4, cells=2)
    ours, plain = run(4, job), one_rank(replace(job, stage=0))
    assert worst(ours.state, plain.state) <= 1e-6


@pytest.mark.parametrize("cells", [2, None])
def test_native_model_built_with_ep_size(cells: int | None) -> None:
    job = Job("gpt_moe", 1, steps=1, optimizer="object", sgd=True, learning_rate=1e4, ep_size=2)
    ours, plain = run(2, replace(job, cells=cells)), one_rank(replace(job, stage=0))
    assert worst(ours.state, plain.state) <= 1e-6


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("drop_tokens", [False, True])
def test_gates_of_deepspeed(drop_tokens: bool, top_k: int) -> None:
    """Top-1, top-2 and top-k, dropless and with capacity: what its gate drops stays dropped."""
    job = Job("gpt_moe", 1, steps=1, optimizer="object", sgd=True, learning_rate=1e4)
    job = replace(job, top_k=top_k, drop_tokens=drop_tokens)
    ours, plain = run(2, job), one_rank(replace(job, stage=0))
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    assert worst(ours.state, plain.state) <= 2e-6


@pytest.mark.parametrize("stage", [slow(0), 1, slow(2)])
@pytest.mark.parametrize("optimizer", ["object", "callable"])
@pytest.mark.parametrize("parameters", ["list", "generator", "groups"])
def test_users_own_optimizer_and_parameters(stage: int, optimizer: str, parameters: str) -> None:
    job = Job("mixtral", stage, steps=3, optimizer=optimizer, parameters=parameters)
    ours = run(2, job)
    plain = one_rank(replace(job, stage=0))
    assert ours.losses == pytest.approx(plain.losses, rel=2e-5)
    moved = run(2, replace(job, steps=0)).state
    for name, tensor in ours.state.items():
        assert not torch.equal(tensor, moved[name]), f"{name} was not trained"


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("family", ["mixtral", slow("gpt_moe")])
def test_bfloat16_trains(family: str, stage: int) -> None:
    job = Job(family, stage, dtype="bfloat16")
    plain = run(1, replace(job, block=False))
    assert run(2, job).losses == pytest.approx(plain.losses, rel=2e-2)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_sync_and_evaluation_change_nothing(family: str, stage: int) -> None:
    """DeepSpeed itself refuses ``no_sync`` at ZeRO 2."""
    job = Job(family, stage, steps=3, clip=0.5)
    ours = run(2, replace(job, no_sync=True, evaluate=True))
    assert ours.losses == pytest.approx(run(2, job).losses, rel=1e-6)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("mixtral", "float32"),
        ("gpt_moe", "bfloat16"),
        slow("mixtral", "bfloat16"),
        slow("gpt_moe", "float32"),
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_resumed_run_goes_on_exactly(family: str, stage: int, dtype: str, tmp_path: Path) -> None:
    job = Job(family, stage, dtype=dtype, steps=5, save_at=2, folder=str(tmp_path))
    straight = run(2, job)
    resumed = run(2, replace(job, save_at=None, resume=True))
    assert resumed.losses == straight.losses[2:]
    assert worst(resumed.state, straight.state) == 0.0


def test_weights_alone_load_on_another_grid(tmp_path: Path) -> None:
    """By expert number: written by two cells, read by four."""
    job = Job("mixtral", 1, steps=2, save_at=2, folder=str(tmp_path))
    saved = run(2, job)
    alone = replace(job, save_at=None, resume=True, load_arguments=(("load_module_only", True),))
    assert worst(run(4, replace(alone, steps=0)).state, saved.state) == 0.0


def test_checkpoint_without_us_is_refused(tmp_path: Path) -> None:
    job = Job("mixtral", 1, steps=1, save_at=1, folder=str(tmp_path), block=False)
    run(2, job)
    with pytest.raises(AssertionError, match=r"has no ds_moe_ext\.json"):
        pool_of(2).run(train, replace(job, save_at=None, resume=True, block=True))


def disagree(rank: int, world_size: int) -> str:
    """Attach a strategy that plans differently on every rank, with ``debug`` on, though the ranks
    take their settings for equal."""
    import deepspeed

    from ds_moe_ext.attachment import agreement
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
        with mock.patch.object(agreement, "settings_of", return_value={}):
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_debug_names_ranks_that_disagree() -> None:
    for message in pool_of(2).run(disagree):
        assert "ranks disagree on model.layers.0.mlp.experts: digests" in message
