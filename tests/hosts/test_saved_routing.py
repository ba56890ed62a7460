# SPDX-License-Identifier: Apache-2.0
"""A model that routes tokens otherwise than the one whose weights it takes is named in one warning,
whatever the layout; the same model, and a checkpoint that does not say, go on in silence."""

from __future__ import annotations

import json
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from tests.hosts import jobs, toy
from tests.hosts.checkpoints import LAYOUT_FILE, Saved, edit_layout, run_steps, saved
from tests.hosts.jobs import Job
from tests.marks import slow
from tests.ranks import pool_of

pytestmark = pytest.mark.usefixtures("checkpoints_removed")

MIXTRAL, NATIVE, TOY = Job(), Job(family="gpt_moe"), Job(family="toy")
SIGMOID = replace(MIXTRAL, gate=(("type", "sigmoid_top_k"),))
FIRST = {
    "mixtral": "model.layers.0.mlp.experts",
    "gpt_moe": "blocks.0.ffn",
    "toy": "blocks.0.experts",
}


def one_choice(job: Job) -> AbstractContextManager[Any]:
    """The job's model is built with a top-k of 1, where the job itself does not say it."""
    from transformers import MixtralConfig

    def config(**keys: Any) -> Any:
        return MixtralConfig(**{**keys, "num_experts_per_tok": 1})

    if job.family == "toy":  # no attribute of it says so
        return mock.patch.object(toy, "TOP_K", 1)
    return mock.patch("transformers.MixtralConfig", config)


def warned(
    rank: int, world_size: int, job: Job, folder: str, has_one_choice: bool, **arguments: Any
) -> tuple[list[str], list[str]]:
    """What was reported routing when a checkpoint was loaded, and in the two steps behind."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with one_choice(job) if has_one_choice else nullcontext():
            engine = jobs.engine_of(job, world_size)
            lines = []
            engine.load_checkpoint(folder, **arguments)
            lines.append([str(each.message) for each in seen])
            seen.clear()
            run_steps(rank, world_size, engine, range(2, 4))
            lines.append([str(each.message) for each in seen])
    at_load, behind = ([text for text in each if "routes tokens" in text] for each in lines)
    return at_load, behind


def warned_by(
    job: Job, checkpoint: Saved, *, has_one_choice: bool = False, world_size: int = 2, **how: Any
) -> tuple[list[str], list[str]]:
    """Likewise of the first rank; the others are silent."""
    folder = str(checkpoint.folder)
    first, *others = pool_of(world_size).run(warned, job, folder, has_one_choice, **how)
    assert not any(reported for each in others for reported in each)
    return first


@pytest.mark.parametrize(
    ("source", "goal", "expected"),
    [
        (NATIVE, replace(NATIVE, top_k=1), "k was 2 and is 1"),
        slow(NATIVE, replace(NATIVE, drop_tokens=True), "drop_tokens was False and is True"),
        slow(
            MIXTRAL,
            replace(MIXTRAL, strategy="fssdp", capacity_factor=1.25),
            "ds_moe_ext.capacity_factor was None and is 1.25",
        ),
        slow(MIXTRAL, SIGMOID, "ds_moe_ext.gate was None and is 'SigmoidTopK'"),
        slow(
            SIGMOID,
            replace(MIXTRAL, gate=(*SIGMOID.gate, ("top_k", 1))),
            "top_k was 2 and is 1",
        ),
    ],
)
def test_what_differs_is_named_once(source: Job, goal: Job, expected: str) -> None:
    checkpoint = saved(2, source)
    at_load, behind = warned_by(goal, checkpoint)
    (reported,) = at_load
    assert reported.startswith(
        f"{checkpoint.tag} was saved by a model that routes tokens differently: "
    )
    assert f"{expected} in {FIRST[source.family]} and 1 more layer; the loss may jump" in reported
    assert reported.count(" was ") == 3
    assert not behind


@pytest.mark.parametrize("arguments", [{}, slow({"load_module_only": True})])
def test_another_top_k_of_mixtral(arguments: dict[str, Any]) -> None:
    checkpoint = saved(2, MIXTRAL)
    (reported,), behind = warned_by(MIXTRAL, checkpoint, has_one_choice=True, **arguments)
    assert f"differently: top_k was 2 and is 1 in {FIRST['mixtral']} and 1 more layer; " in reported
    assert not behind


def test_what_no_attribute_says_is_seen_in_the_first_step() -> None:
    at_load, (reported,) = warned_by(TOY, saved(2, TOY), has_one_choice=True)
    assert not at_load
    assert f"differently: top_k was 2 and is 1 in {FIRST['toy']} and 2 more layers; " in reported


@pytest.mark.parametrize(
    ("source", "goal"),
    [
        (MIXTRAL, replace(MIXTRAL, strategy="fssdp", stage=2, ep_ranks=1)),
        slow(NATIVE, replace(NATIVE, ep_size=2)),
        slow(TOY, TOY),
        slow(SIGMOID, SIGMOID),
    ],
)
def test_the_same_model_is_silent(source: Job, goal: Job) -> None:
    assert warned_by(goal, saved(2, source)) == ([], [])


def test_a_checkpoint_that_does_not_say_is_silent() -> None:
    """As of earlier versions."""
    checkpoint = saved(2, NATIVE)
    path = checkpoint.tag / LAYOUT_FILE
    before = path.read_text()
    try:
        edit_layout()(checkpoint.tag)
        document = json.loads(path.read_text())
        assert document.pop("routing")
        path.write_text(json.dumps(document))
        assert warned_by(replace(NATIVE, top_k=1), checkpoint) == ([], [])
    finally:
        path.write_text(before)
