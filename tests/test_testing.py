# SPDX-License-Identifier: Apache-2.0
"""The check of strategies: ours and those of the docs pass it, and planted errors are found."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_moe_ext import testing
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner, NearestReplica
from ds_moe_ext.moe.route import Restore
from ds_moe_ext.planning.strategy import Intervals, Job, LayerContext, Plan, Strategy
from ds_moe_ext.schedule.orders import ALONE, Beside
from ds_moe_ext.schedule.stages import Stage
from ds_moe_ext.schedule.task import INTER, RESTORE, ChunkRange, Op, Stream
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.esp import ExpertSharding
from ds_moe_ext.strategies.fssdp import FullySharded
from ds_moe_ext.strategies.prophet import ProProphet
from ds_moe_ext.strategies.zebra import Zebra
from ds_moe_ext.testing import Case, check
from tests.marks import slow
from tests.ranks import pool_of
from tests.strategies_for_tests import Alternating

ROOT = Path(__file__).parents[1]

OURS: Mapping[str, Strategy] = {
    "ep": ExpertParallel(),
    "ep, send once": ExpertParallel(send_once=True),
    "fssdp": FullySharded(calibrate=True, overlap_degree=2, replicas_per_rank=3),
    "fssdp, planned share": FullySharded(share="planned", overlap_degree=2, replicas_per_rank=3),
    "fssdp, priced share": FullySharded(
        share="priced", calibrate=True, overlap_degree=2, replicas_per_rank=3
    ),
    "prophet": ProProphet(),
    "prophet, priced share": ProProphet(share="priced"),
    "esp": ExpertSharding(degree=2, slice_gradients=False),
    "auto, by turns": Alternating(),
}


GUARDED = (
    "ep",
    "ep, send once",
    "fssdp",
    "fssdp, planned share",
    "prophet",
    "prophet, priced share",
    "esp",
    "auto, by turns",
)
"""By fssdp's priced share, which goes by planned parts, too; by test_configurations.py, which has
the shares of fssdp and prophet; ep, esp, and rows sent once, by test_layer.py."""


@pytest.mark.parametrize("name", [slow(name) if name in GUARDED else name for name in OURS])
def test_ours_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(OURS[name], ranks_of=pool_of)
    printed = capsys.readouterr().out
    assert printed.count("equal") == len(testing.CASES) and "left out" not in printed
    replicas = [int(number) for number in re.findall(r"(\d+) replicas", printed)]
    assert any(replicas) == name.startswith(("fssdp", "prophet", "auto"))
    assert ("0 moves" not in printed.splitlines()[3]) == name.startswith("fssdp")


BY_TIME = {
    **{name: OURS[name] for name in OURS if "share" in name},
    "fssdp, priced share, freed": FullySharded(
        share="priced", rematerialize=True, overlap_degree=4, replicas_per_rank=2
    ),
    "prophet, planned share, kept": ProProphet(share="planned", rematerialize=False),
}
LARGER = (
    Case(num_ranks=8),
    Case(num_ranks=4, hot=30.0, num_micro_batches=3),  # nearly all rows for one expert
    Case(num_ranks=8, degrees=(8, 3)),
    Case(num_ranks=8, degrees=(2, 8), etp_size=2, num_micro_batches=2),
    Case(num_ranks=8, degrees=(3, 2), etp_size=4, checkpoints=True),
    Case(num_ranks=4, degrees=(2, 3), etp_size=4),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGER, ids=str)
@pytest.mark.parametrize("name", BY_TIME)
def test_shares_by_time_pass_in_larger_cases(name: str, case: Case) -> None:
    check(BY_TIME[name], (case,), ranks_of=pool_of)


# The page.


def modules_of_the_page() -> dict[str, str]:
    """Of docs/adding_a_strategy.md: path and text."""
    page = (ROOT / "docs" / "adding_a_strategy.md").read_text()
    blocks = re.findall(r"```python\n# (my_package/\w+\.py)\n(.*?)```", page, re.DOTALL)
    return dict(blocks)


def test_the_page_has_two_strategies() -> None:
    assert set(modules_of_the_page()) == {"my_package/eplb_like.py", "my_package/llep_like.py"}


@pytest.mark.parametrize(
    ("name", "options"),
    [slow("eplb_like:EplbLike", '{"redundant": 2}'), slow("llep_like:LlepLike", "{}")],
)
def test_strategies_of_the_page_pass(tmp_path: Path, name: str, options: str) -> None:
    for path, text in modules_of_the_page().items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    words = (sys.executable, "-m", "ds_moe_ext.testing", f"my_package.{name}", "--options", options)
    ran = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("equal") == len(testing.CASES) and "left out" not in ran.stdout
    assert re.search(r"[1-9]\d* replicas", ran.stdout)


def test_the_page_has_every_member_and_every_field() -> None:
    page = (ROOT / "docs" / "adding_a_strategy.md").read_text()
    members = {name for name in vars(Strategy) if not name.startswith("_")} - {"has_roles"}
    fields = set(Plan.__dataclass_fields__)
    named = set(re.findall(r"`(\w+)", "\n".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))))
    named |= set(re.findall(r"`(\w+)", " ".join(re.findall(r"^\| (`[^|]*)\|", page, re.MULTILINE))))
    assert members | fields <= named, (members | fields) - named


# What follows from the plan.


@dataclass(frozen=True, kw_only=True)
class Everywhere(Strategy):
    """Every expert in every EP rank, and no word more."""

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(self.plan_of(job, owner) for owner in job.owners)

    def plan_of(self, job: Job, owner: Placement) -> Plan:
        target = owner.with_replicas(np.ones_like(owner.holds_EC))
        return Plan(owner, target, NearestReplica(target, job.node_C))


@dataclass(frozen=True, kw_only=True)
class Cut(Everywhere):
    """In chunks, by the schedules of the base class."""

    def plan_of(self, job: Job, owner: Placement) -> Plan:
        plan = super().plan_of(job, owner)
        return replace(plan, forward_degree=2, backward_degree=3)


class ForgetsUses(Everywhere):
    def uses(self) -> tuple[tuple[str, Stream], ...]:
        return (("ep", INTER),)


class ForgetsBeside(Everywhere):
    def beside(self, layer_context: LayerContext) -> Beside:
        return ALONE


class ForgetsFreed(Everywhere):
    """In its schedules, what its plan says."""

    def plan_of(self, job: Job, owner: Placement) -> Plan:
        return replace(super().plan_of(job, owner), rematerialize=True)

    def beside(self, layer_context: LayerContext) -> Beside:
        return super().beside(layer_context)._replace(freed=False)


FEW = (Case(num_ranks=2), Case(num_ranks=2, num_micro_batches=2, checkpoints=True))


@pytest.mark.parametrize("strategy", [Everywhere(), Cut()])
def test_uses_beside_and_schedules_follow_from_the_plan(strategy: Strategy) -> None:
    check(strategy, FEW, ranks_of=pool_of)


@pytest.mark.parametrize(
    ("strategy", "stated"),
    [
        (ForgetsUses(), "ForgetsUses plans replicas of experts, but its uses.. leaves out"),
        (ForgetsBeside(), "ForgetsBeside plans replicas .*let beside.. say copied, or leave"),
        (ForgetsFreed(), "ForgetsFreed plans to free replicas .*let beside.. say freed, or leave"),
    ],
)
def test_what_is_overridden_and_forgotten_is_reported(strategy: Strategy, stated: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s)ValueError: {stated}"):
        check(strategy, FEW[:1], ranks_of=pool_of)


# Planted errors.


@dataclass(frozen=True, eq=False)
class Disagreeing(LocalElseOwner):
    """Receivers expect what nobody sends."""

    def rows_to(self, holder: int, rows_CFE: np.ndarray) -> np.ndarray:
        return super().rows_to(holder, rows_CFE) // 2


class Dropping(LocalElseOwner):
    """The last row of each expert is lost on both sides."""

    def rows_from(self, sender: int, rows_FE: np.ndarray) -> np.ndarray:
        return super().rows_from(sender, np.maximum(rows_FE - 1, 0))


@dataclass(frozen=True, kw_only=True)
class Shared(Strategy):
    share: type[LocalElseOwner]

    def intervals(self) -> Intervals:
        return Intervals(plan_every=1)

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(Plan(owner, owner, self.share(owner, owner)) for owner in job.owners)


@pytest.mark.parametrize(
    ("share", "stated"),
    [
        (
            Disagreeing,
            r"plan of layer 0 .*EP rank \d sends EP rank \d \d+ of \d+ rows of expert \d+",
        ),
        (Dropping, "does not hand out all rows of each expert"),
    ],
)
def test_a_share_that_cannot_be_right_is_found(share: type[LocalElseOwner], stated: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s)2 ranks.*ValueError: .*{stated}|{stated}"):
        check(Shared(share=share), FEW[:1], ranks_of=pool_of)


@dataclass(frozen=True)
class WrongAdjoint:
    """Gradients of scores are doubled."""

    common: Restore

    def forward(
        self, chunk_range: ChunkRange, *reads: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return self.common.forward(chunk_range, *reads)

    def backward(self, chunk_range: ChunkRange, saved: Any, *grads: Any) -> tuple[Any, ...]:
        rows, scores, *others = self.common.backward(chunk_range, saved, *grads)
        return rows, 2 * scores, *others

    def recut(self, chunk_range: ChunkRange, pieces: Any) -> tuple[Any, ...]:
        return self.common.recut(chunk_range, pieces)


class Doubling(ExpertParallel):
    def stages(self, layer_context: LayerContext) -> Mapping[Op, Stage]:
        return {RESTORE: WrongAdjoint(Restore())}


def test_a_wrong_adjoint_is_found_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError) as caught:
        check(Doubling(), FEW[:1], ranks_of=pool_of)
    text = str(caught.value)
    assert "Doubling is not equal to the dense reference" in text and "(2 ranks)" in text
    assert "gradient of gate of layer 0, step 0" in text and "gradient of the input" in text
    # What comes out is right, and so are the experts of the last layer.
    assert "output" not in text and "up of layer 1" not in text
    assert "DIFFER" in capsys.readouterr().out


class Elsewhere(ExpertParallel):
    """Plans a target that lacks what lives there."""

    def plan(self, job: Job) -> tuple[Plan, ...]:
        others = [Placement(owner.holds_EC[:, ::-1].copy()) for owner in job.owners]
        return tuple(
            Plan(owner, other, NearestReplica(other, job.node_C))
            for owner, other in zip(job.owners, others)
        )


def test_a_target_without_its_owner_is_found() -> None:
    with pytest.raises(
        AssertionError, match="its target lacks expert 0 in EP rank 0, which has it"
    ):
        check(Elsewhere(), FEW[:1], ranks_of=pool_of)


def test_roles_are_refused() -> None:
    with pytest.raises(ValueError, match="Zebra has roles"):
        check(Zebra())


def test_a_strategy_with_schedules_of_its_own_is_not_laid_under_pipelines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tests.strategies_for_tests import Chunked

    cases = (FEW[0], Case(num_ranks=2, degrees=(2, 2)))
    check(Chunked(forward=2, backward=3), cases, ranks_of=pool_of)
    equal, left_out = capsys.readouterr().out.splitlines()
    assert "equal" in equal and "left out" in left_out and "leave schedules to" in left_out


# Its ranks.


def _slow(rank: int, world_size: int) -> None:
    time.sleep(rank * 30.0)


def _world_size(rank: int, world_size: int) -> int:
    return world_size


def test_ranks_whose_job_was_interrupted_are_given_up() -> None:
    """They are in the middle of it: another one's answers would be those of this."""
    pool = pool_of(2)
    # What a shell has begun in the background was reported to ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.run(_slow)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not pool.is_alive
    assert pool_of(2).run(_world_size) == [2, 2]
