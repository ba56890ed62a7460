# SPDX-License-Identifier: Apache-2.0
"""A router that gives no numbers, or a loss that is none, on one rank under Megatron-core: what
becomes of the step, and of those behind it, is what stock Megatron makes of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_moe_ext.hosts.steps.training_run import run_of
from ds_moe_ext.report.record import BadScores
from tests.hosts import megatron_jobs
from tests.hosts.megatron_jobs import Training, megatron, merged
from tests.hosts.megatron_toy import MegatronRun
from tests.hosts.test_megatron_move import go_to_owner
from tests.marks import slow
from tests.ranks import pool_of

SOON_S = 30.0  # of a group that would wait for 120 s
BAD_STEP = 2
NUM_STEPS = BAD_STEP + 3
SCALED = (("initial_loss_scale", 2.0**7), ("hysteresis", 1))  # halved by the first that overflows
RUN = MegatronRun(ep=2, num_microbatches=2)
MOVING = {"replicas_per_rank": 1, "reshard_interval": 1, "resharding": "paper"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ep": {},
    "fssdp": {"fssdp": MOVING},
    "prophet": {"prophet": {"planner": "shadow", "split": "half"}},
    "esp": {"esp": {"degree": 2}},
    "zebra": {"zebra": {"attention_size": 1, "expert_size": 1}},
}


def block(name: str) -> dict[str, Any]:
    common = {"enabled": True, "strategy": name, "debug": True, "report": {"enabled": False}}
    return {**common, **STRATEGIES[name]}


class Left(NamedTuple):
    """Of a step, by one rank."""

    is_taken: bool
    norm: float
    loss: float
    num_dense: int
    num_experts: int


class Reported(NamedTuple):
    """By one rank."""

    steps: list[Left]
    weights: dict[str, Tensor]
    scale: float
    bad_scores: BadScores | None


def _bad_loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.mean()
    return loss * torch.inf, {"loss": loss.detach().clone()}


@contextlib.contextmanager
def spoilt(training: Training, what: str) -> Iterator[None]:
    """The logits of the last router here, or the loss, are no numbers on this rank."""
    if what == "loss":
        with mock.patch.object(megatron_jobs, "_loss", _bad_loss):
            yield
        return
    (layers,) = (m for n, m in training.chunks[0].named_modules() if n.endswith("decoder.layers"))
    router = layers[-1].mlp.router
    stock = router.gating
    with mock.patch.object(router, "gating", lambda given: stock(given) * torch.nan):
        yield


def _num_finite(training: Training, *, are_experts: bool) -> int:
    return sum(
        int(each.isfinite().sum())
        for name, each in training.chunks[0].named_parameters()
        if (".experts." in name) == are_experts
    )


def _watch_scores(training: Training) -> None:
    """As a report of ours has it."""
    run = run_of(training.optimizer)
    if run is not None:
        assert run.recorder.ranks is not None
        run.recorder.ranks.is_on = True
        for layer in run.layers:
            layer.routed.rows.keeps_scores = True


def _bad_scores(training: Training) -> BadScores | None:
    run = run_of(training.optimizer)
    if run is None:
        return None
    assert run.recorder.ranks is not None
    return run.recorder.ranks.own.reported(0.0).bad_scores


def trained(
    rank: int, world_size: int, run: MegatronRun, settings: dict[str, Any] | None, what: str
) -> Reported:
    """Train past a step of bad numbers: on the last rank, which has the last stage, where models
    are divided; else on the first."""
    bad_rank = world_size - 1 if run.tp * run.pp > 1 else 0
    with megatron(run, settings):
        training = Training(run)
        _watch_scores(training)
        steps = []
        for step in range(NUM_STEPS):
            begun_s = time.monotonic()
            if step == BAD_STEP and rank == bad_rank:
                with spoilt(training, what):
                    loss = training.compute(step)
            else:
                loss = training.compute(step)
            is_taken, norm, _ = training.optimizer.step()
            assert time.monotonic() - begun_s < SOON_S
            steps.append(
                Left(
                    is_taken,
                    torch.nan if norm is None else float(norm),
                    loss,
                    _num_finite(training, are_experts=False),
                    _num_finite(training, are_experts=True),
                )
            )
        go_to_owner(training)
        scale = float(training.optimizer.get_loss_scale())
        return Reported(steps, training.weights(), scale, _bad_scores(training))


@cache
def stock(world_size: int, run: MegatronRun, what: str) -> list[Reported]:
    return pool_of(world_size).run(trained, run, None, what)


def _first(reported: list[Reported]) -> BadScores | None:
    """What ranks report to each other of."""
    return min((one.bad_scores for one in reported if one.bad_scores is not None), default=None)


def _num_finite_experts(reported: list[Reported]) -> list[int]:
    """Behind each step, of all ranks: experts may have another owner."""
    return [sum(one.num_experts for one in step) for step in zip(*(one.steps for one in reported))]


def _check_same_are_numbers(ours: list[Reported], theirs: list[Reported]) -> None:
    """At the end, of all weights."""
    found, expected = (merged([one.weights for one in reported]) for reported in (ours, theirs))
    assert found.keys() == expected.keys()
    for piece, weight in expected.items():
        assert torch.equal(found[piece].isfinite(), weight.isfinite()), piece


KINDS = [
    (name, dtype, optimizer, what)
    for name in STRATEGIES
    for dtype in ("float32", "bfloat16", "float16")
    for optimizer in ("ddp", "distributed")
    for what in ("logits", "loss")
]
QUICK = (("fssdp", "float16", "distributed", "logits"),)


@pytest.mark.parametrize(
    ("name", "dtype", "optimizer", "what"),
    [kind if kind in QUICK else slow(*kind) for kind in KINDS],
)
def test_it_is_as_without_us(name: str, dtype: str, optimizer: Any, what: str) -> None:
    run, num_stock = replace(RUN, dtype=dtype, optimizer=optimizer), 2
    if name == "zebra":
        run, num_stock = replace(run, ep=1), 1
    check_as_stock(name, run, what, 2, num_stock)


@pytest.mark.parametrize("what", ["logits", "loss"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("sizes", [{"tp": 2, "etp": 1, "ep": 4}, {"pp": 2}], ids=["tp", "pp"])
@pytest.mark.parametrize("name", [slow(name) for name in STRATEGIES if name != "zebra"])
def test_it_is_as_without_us_beside_tensor_and_pipeline_parallelism(
    name: str, sizes: dict[str, int], dtype: str, what: str
) -> None:
    check_as_stock(name, replace(RUN, **sizes, dtype=dtype, optimizer="distributed"), what, 4, 4)


def check_as_stock(name: str, run: MegatronRun, what: str, ranks: int, num_stock: int) -> None:
    """A step is skipped in float16 alone; else weights are lost, the same ones."""
    is_skipped = run.dtype == "float16"
    run = replace(run, stepping=SCALED) if is_skipped else run
    ours = pool_of(ranks).run(trained, run, block(name), what)
    theirs = stock(num_stock, run, what)
    rel = 1e-5 if run.dtype == "float32" else 2e-2
    for own, its in zip(ours, theirs):
        for one, other in zip(own.steps, its.steps, strict=True):
            assert one[:3] == pytest.approx(other[:3], rel=rel, nan_ok=True)
            assert one.num_dense == other.num_dense
    assert _num_finite_experts(ours) == _num_finite_experts(theirs)
    _check_same_are_numbers(ours, theirs)
    assert {one.scale for one in ours} == {one.scale for one in theirs}
    for each in ours:
        taken = [step.is_taken for step in each.steps]
        assert taken == [not (is_skipped and step == BAD_STEP) for step in range(NUM_STEPS)]
    steps = theirs[0].steps
    assert (steps[-1].num_dense == steps[0].num_dense) == is_skipped
    first = _first(ours)
    if what == "logits":
        assert first == BadScores(BAD_STEP, layer=1 if run.pp == 1 else 0, rank=3 * (ranks == 4))
    else:  # weights are no numbers in the step behind it
        assert (first and first[:2]) == (None if is_skipped else (BAD_STEP + 1, 0))


def skipped(rank: int, world_size: int, run: MegatronRun) -> list[tuple[bool, float | None, float]]:
    """Of each step, in the third of which the first gradient of one role overflows: whether it is
    taken, the norm, and the scale of losses then."""
    with megatron(run, block("zebra")):
        training = Training(run)
        found = []
        for step in range(NUM_STEPS):
            begun_s = time.monotonic()
            training.compute(step)
            if step == BAD_STEP and rank == 0:
                first, *_ = training.chunks[0].parameters()
                vars(first)["main_grad"].fill_(torch.inf)
            is_taken, norm, _ = training.optimizer.step()
            assert time.monotonic() - begun_s < SOON_S
            found.append((is_taken, norm, float(training.optimizer.get_loss_scale())))
        return found


@pytest.mark.parametrize(
    ("dtype", "stepping", "last_scale"),
    [slow("bfloat16", (("loss_scale", 8.0),), 8.0), ("float16", SCALED, 2.0**6)],
)
def test_roles_skip_a_step_together(
    dtype: str, stepping: tuple[tuple[str, Any], ...], last_scale: float
) -> None:
    """Before, the one that did not skip waited for the other's norm for ever."""
    run = replace(RUN, ep=1, dtype=dtype, stepping=stepping)
    first, second = pool_of(2).run(skipped, run)
    assert first == second
    taken = [is_taken for is_taken, *_ in first]
    assert taken == [step != BAD_STEP for step in range(NUM_STEPS)]
    assert first[-1][-1] == last_scale


# Megatron's own checks.


def checked(rank: int, world_size: int, run: MegatronRun, name: str, what: str) -> str:
    """What was raised in a step of bad numbers."""
    with megatron(run, block(name)):
        training = Training(run)
        training.compute(0)
        training.update()
        begun_s = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            if rank == 0:
                with spoilt(training, what):
                    training.compute(1)
            else:
                training.compute(1)
        assert time.monotonic() - begun_s < SOON_S
        return str(caught.value)


@pytest.mark.parametrize("what", ["logits", "loss"])
@pytest.mark.parametrize("name", [slow(name) for name in STRATEGIES])
def test_a_check_of_gradients_ends_all_ranks(name: str, what: str) -> None:
    """--check-for-nan-in-loss-and-grad asks for it. It raises on ranks that have such gradients;
    where the others wait for them, they are notified."""
    run = replace(RUN, ep=1 if name == "zebra" else 2, ddp=(("check_for_nan_in_grad", True),))
    try:
        results = pool_of(2).run(checked, run, name, what)
    finally:
        pool_of(2).close()  # its communicators are closed
    assert "in local grad norm for bucket" in results[0]
    assert "in local grad norm for bucket" in results[1], results[1]


def run_again(
    rank: int, world_size: int, run: MegatronRun, settings: dict[str, Any] | None, what: str
) -> list[tuple[int, tuple[bool, bool, int]]]:
    """Of each step that was run: how often, and what Megatron-LM's loop is to do then (save, exit,
    the exit code). "check": a number is refused on one rank that no other has, as a loss may be."""
    from megatron.core import rerun_state_machine as reruns

    calls = reruns.initialize_rerun_state_machine, reruns.destroy_rerun_state_machine
    calls[0](mode=reruns.RerunMode.VALIDATE_RESULTS)
    machine, found = reruns.get_rerun_state_machine(), []

    def checked_loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = output.mean()
        machine.validate_result(loss.detach(), lambda _: True, "it is refused", fatal=True)
        return loss, {"loss": loss.detach().clone()}

    try:
        with megatron(run, settings):
            training = Training(run)
            for step in range(NUM_STEPS):
                num, begun_s = 0, time.monotonic()
                while machine.should_run_forward_backward(None):
                    num += 1
                    if (step, rank) != (BAD_STEP, 0):
                        training.compute(step)
                    elif what == "check":
                        with mock.patch.object(megatron_jobs, "_loss", checked_loss):
                            training.compute(step)
                    else:
                        with spoilt(training, what):
                            training.compute(step)
                reported = machine.should_checkpoint_and_exit()
                found.append((num, reported))
                if reported[1]:
                    break
                training.update()
                assert time.monotonic() - begun_s < SOON_S
    finally:
        calls[1]()
    return found


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (name, what) if (name, what) == ("zebra", "check") else slow(name, what)
        for name in STRATEGIES
        for what in ("logits", "loss", "check")
    ],
)
def test_steps_are_run_again_as_without_us(name: str, what: str) -> None:
    """Megatron-LM's --rerun-mode validate_results: the bad step twice, then all ranks end."""
    run = replace(RUN, ddp=(("check_for_nan_in_grad", True),))
    run, num_stock = (replace(run, ep=1), 1) if name == "zebra" else (run, 2)
    first, second = pool_of(2).run(run_again, run, block(name), what)
    assert first == second == pool_of(num_stock).run(run_again, run, None, what)[0]
    assert [num for num, _ in first] == [1] * BAD_STEP + [2]
    assert first[-1][1][:2] == (True, True)
