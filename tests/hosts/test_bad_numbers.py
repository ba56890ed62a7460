# SPDX-License-Identifier: Apache-2.0
"""A router that gives no numbers, or a loss that is none, on one rank: its rows still go somewhere,
nobody waits in vain, all ranks skip the step, and train on."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ds_moe_ext import full_state_dict
from ds_moe_ext.report.record import BadScores
from ds_moe_ext.steps.training_run import run_of
from tests.hosts.jobs import Job, _float16_on_a_cpu, engine_of, loss_of, micro_batch
from tests.hosts.zebra_runs import zebra
from tests.marks import slow
from tests.ranks import pool_of, preload

preload("deepspeed", "transformers")

SOON_S = 30.0  # of a group that would wait for 120 s
BAD_STEP = 2
HALF = Job(micro_batches=2, dtype="float16")
MOVING = (("copies_per_rank", 1), ("reshard_interval", 1), ("resharding", "paper"))
JOBS = {
    "ep": HALF,
    "fssdp": replace(HALF, strategy="fssdp", keys=MOVING),
    "prophet": replace(HALF, strategy="prophet"),
    "esp": replace(HALF, strategy="esp", keys=(("degree", 2),)),
    "zebra": zebra(HALF),
}


def _spoil(module: Any, given: Any, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Logits and scores that are no numbers; the choices of experts are what came of them."""
    return tuple(each * torch.nan if each.is_floating_point() else each for each in found)


class Told(NamedTuple):
    """By one rank.

    Attributes:
        changed: whether weights did, in each step.
        num_skipped: steps, as the engine says.
        bad_scores: as the report will have them.
    """

    changed: list[bool]
    num_skipped: int
    bad_scores: BadScores | None


def trained(rank: int, world_size: int, job: Job, what: str, bad: int) -> Told:
    """Train past a step of bad numbers."""
    scaled = (("fp16", {"enabled": True, "initial_scale_power": 4}),)
    with _float16_on_a_cpu():
        engine = engine_of(replace(job, dtype="float32", extra=scaled), world_size)
        run = run_of(engine)
        assert run is not None
        ranks = run.recorder.ranks
        ranks.is_on = True
        for layer in run.layers:
            layer.routed.rows.keeps_scores = True
        changed = []
        for step in range(BAD_STEP + 3):
            # By name: experts may move to other ranks behind a step, whether it is skipped or not.
            before = {name: w.clone() for name, w in full_state_dict(engine.module).items()}
            begun_s, is_bad = time.monotonic(), step == BAD_STEP and rank == bad
            hooks = []
            if is_bad and what == "logits":
                gate = engine.module.model.layers[1].mlp.gate
                hooks.append(gate.register_forward_hook(_spoil))
            loss = loss_of(engine, micro_batch(step, rank))
            for hook in hooks:
                hook.remove()
            engine.backward(loss * torch.inf if is_bad and what == "loss" else loss)
            engine.step()
            assert time.monotonic() - begun_s < SOON_S
            own = list(engine.module.parameters())
            assert all(p.isfinite().all() for p in own), step
            assert step == BAD_STEP or bool(loss.isfinite())
            after = full_state_dict(engine.module)
            changed.append(any(not torch.equal(after[name], old) for name, old in before.items()))
        return Told(changed, int(engine.skipped_steps), ranks.own.told(0.0).bad_scores)


@pytest.mark.parametrize("what", ["logits", slow("loss")])
@pytest.mark.parametrize("name", JOBS)
def test_all_ranks_skip_the_step(name: str, what: str) -> None:
    ranks = pool_of(2).run(trained, JOBS[name], what, 0)
    for changed, num_skipped, _ in ranks:
        assert changed == [step != BAD_STEP for step in range(len(changed))]
        assert num_skipped == 1
    bad = BadScores(BAD_STEP, layer=1, rank=0) if what == "logits" else None
    assert [told.bad_scores for told in ranks] == [bad, None]
