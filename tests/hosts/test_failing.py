# SPDX-License-Identifier: Apache-2.0
"""One rank fails: the others learn it within seconds, and of what."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.hosts.jobs import Job, engine_of, loss_of, micro_batch
from tests.hosts.processes import ROOT, answers, run_script
from tests.marks import slow
from tests.ranks import pool_of, preload

preload("deepspeed", "transformers")

SCRIPT = ROOT / "tests/hosts/spoilt_script.py"
SOON_S = 30.0  # of a group that would wait for 120 s

PROPHET = Job(strategy="prophet", micro_batches=2)
ZEBRA = Job(strategy="zebra", keys=(("attention_size", 1), ("expert_size", 1)), micro_batches=2)


def _broke(*args: Any, **kwargs: Any) -> None:
    raise ValueError("it broke")


def _dense(engine: Any) -> None:
    engine.module.model.layers[1].input_layernorm.register_forward_pre_hook(_broke)


def _expert(engine: Any) -> None:
    routed = engine.module.model.layers[1].mlp.experts.routed
    routed.function = _broke
    routed._program.clear()


def _backward(engine: Any) -> None:
    engine.module.model.layers[0].post_attention_layernorm.register_full_backward_hook(_broke)


def _zebra_expert(engine: Any) -> None:
    engine.ds_moe_ext.run.layers[1].routed.function = _broke


def fail(rank: int, world_size: int, job: Job, spoil: Callable[[Any], None], spoilt: int) -> Any:
    """What ends a step in which one rank has been spoilt, and after how many seconds."""
    engine = engine_of(job, world_size)
    for step in range(2):
        _step(engine, micro_batch(step, rank))
    if rank == spoilt:
        spoil(engine)
    start = time.monotonic()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        _step(engine, micro_batch(2, rank))
    return time.monotonic() - start, type(caught.value).__name__, str(caught.value)


def _step(engine: Any, tokens: torch.Tensor) -> None:
    engine.backward(loss_of(engine, tokens))
    engine.step()


@pytest.mark.parametrize(
    ("job", "spoil", "spoilt", "where"),
    [
        (Job(micro_batches=2), _dense, 1, "engine.forward, after model.layers.0.mlp.experts"),
        (PROPHET, _expert, 1, "model.layers.1.mlp.experts (expert, forward)"),
        (ZEBRA, _zebra_expert, 1, "model.layers.1.mlp.experts (expert, forward)"),
        slow(ZEBRA, _dense, 0, "model.layers.1.mlp.experts (attention, forward)"),
        (Job(micro_batches=2), _backward, 0, "engine.backward, after model.layers.0.mlp.experts"),
    ],
)
def test_others_learn_of_a_failure(
    job: Job, spoil: Callable[[Any], None], spoilt: int, where: str
) -> None:
    answers = pool_of(2).run(fail, job, spoil, spoilt)
    if spoil is _backward:  # the other one waited in DeepSpeed's own communicator
        pool_of(2).close()
    assert max(seconds for seconds, _, _ in answers) < SOON_S
    _, kind, own = answers[spoilt]
    assert (kind, own) == ("ValueError", "it broke")  # its own error, where it came from
    _, kind, reported = answers[1 - spoilt]
    assert kind == "BrokenOff"
    assert reported.startswith(f"rank {spoilt} failed in {where}"), reported
    assert "ValueError: it broke" in reported


@pytest.mark.slow
def test_processes_end_of_themselves() -> None:
    """Without a launcher that ends them, and where rank 0 keeps the store."""
    start = time.monotonic()
    failed, other = run_script(SCRIPT, "fail", world_size=2, path=(ROOT,), good=False)
    assert time.monotonic() - start < 100.0  # of a group that would wait for 200 s
    assert "ValueError: it broke" in failed
    assert "BrokenOff: rank 0 failed in model.layers." in other
    assert "ValueError: it broke" in other


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named() -> None:
    """Without a launcher that would end the other; see also ``launch/bench/kills.py``."""
    start = time.monotonic()
    _, other = run_script(SCRIPT, "die", world_size=2, path=(ROOT,), good=False)
    assert time.monotonic() - start < 100.0
    assert "BrokenOff: rank 0 ended or stopped without a message" in other
    assert re.search(r"\(this rank (waited|was) in (model\.layers|engine)\.", other)


@pytest.mark.slow
def test_a_rank_that_is_late_is_reported() -> None:
    late, waiting = run_script(SCRIPT, "late", world_size=2, path=(ROOT,))
    assert answers(late) == answers(waiting) == ["trained"]
    assert "ds_moe_ext: rank 1 has waited 1" in waiting
    assert "for other ranks" not in late
