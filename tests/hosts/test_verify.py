# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext verify`` finds what is planted, and nothing where nothing is."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from socket import socket
from typing import Any

import pytest

from ds_moe_ext.commands.verify import verdict_of
from ds_moe_ext.verification import Kind, Precision, Stage, Trial
from tests.hosts import families
from tests.hosts.jobs import Job
from tests.hosts.megatron_toy import MegatronRun
from tests.hosts.processes import ROOT
from tests.hosts.test_expert_adapters import with_adapters
from tests.hosts.test_launch import arguments, document
from tests.hosts.verified import both, train_job, train_loop, train_megatron
from tests.marks import slow

STRATEGIES: dict[str, dict[str, Any]] = {
    "ep": {},
    "fssdp": {"keys": (("replicas_per_rank", 2), ("reshard_interval", 2), ("resharding", "paper"))},
    "prophet": {"clip": 1.0},
    "esp": {"etp_size": 2},
    "auto": {},
}


def job_of(family: str, strategy: str, stage: int) -> Job:
    return Job(family, stage=stage, strategy=strategy, **STRATEGIES[strategy])


@pytest.mark.parametrize(
    ("family", "strategy", "stage"),
    [
        ("mixtral", "fssdp", 2),
        slow("gpt_oss", "esp", 0),
        *(slow(family, "ep", 1) for family in (*families.NAMES, "dbrx")),
        *(slow("qwen3_moe", strategy, 1) for strategy in STRATEGIES),
        *(slow("toy", "prophet", stage) for stage in (0, 1, 2)),
    ],
)
def test_equal_runs_are_found_equal(family: str, strategy: str, stage: int, tmp_path: Path) -> None:
    comparison = both(train_job, tmp_path, job_of(family, strategy, stage))
    assert comparison.first is None
    assert not comparison.uncompared
    assert len(comparison.off_I) == 4 and comparison.off_I[-1] != comparison.off_I[0]
    stages = {each.stage for each in comparison.compared}
    assert stages == set(Stage) - (set() if stage else {Stage.NORM})  # ZeRO 0 shows none
    assert {each.kind for each in comparison.compared} == {None, *Kind}
    # The sharpest check: rounding is far below what is let pass.
    gradients = [each.error for each in comparison.compared if each.stage is Stage.GRADIENTS]
    assert 0 < max(gradients) < 2e-5
    assert verdict_of(comparison, Precision.FLOAT32) == "equal within the rounding of float32"


def adapted(rank: int, world_size: int, trial: Trial, job: Job, is_wrong: bool) -> None:
    with_adapters(train_job, rank, world_size, trial, job, is_wrong)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ep", "esp"])
def test_adapters_of_experts_are_compared(strategy: str, tmp_path: Path) -> None:
    """All else is frozen, gates too."""
    pytest.importorskip("peft")
    comparison = both(adapted, tmp_path, job_of("mixtral", strategy, 1))
    assert comparison.first is None
    assert len(comparison.uncompared) == 1 and "frozen" in comparison.uncompared[0]
    gradients = [each.error for each in comparison.compared if each.stage is Stage.GRADIENTS]
    assert 0 < max(gradients) < 2e-5


@pytest.mark.parametrize(("ep_size", "stage"), [(2, 1), slow(1, 0), slow(1, 2)])
def test_layers_of_deepspeed_are_compared(ep_size: int, stage: int, tmp_path: Path) -> None:
    comparison = both(train_job, tmp_path, Job("gpt_moe", stage=stage, ep_size=ep_size))
    assert comparison.first is None
    assert {each.kind for each in comparison.compared} == {None, *Kind}
    names = {each.name for each in comparison.compared if each.kind is Kind.EXPERT}
    assert len(names) == 2 * 4 * 4  # layers, experts, weights and biases


GATES = {
    "tests.hosts.verified:Louder": (Stage.SCORES, 1.01),
    "sigmoid_top_k": (Stage.SCORES, None),
}


@pytest.mark.parametrize("gate", [slow("tests.hosts.verified:Louder"), "sigmoid_top_k"])
def test_a_gate_that_weighs_otherwise_is_found(gate: str, tmp_path: Path) -> None:
    job = replace(job_of("mixtral", "ep", 1), gate=(("type", gate),))
    comparison = both(train_job, tmp_path, job)
    stage, factor = GATES[gate]
    first = comparison.first
    assert first is not None
    assert (first.stage, first.name) == (stage, "model.layers.0.mlp.experts")
    assert first.factor == (None if factor is None else pytest.approx(factor, rel=1e-5))
    text = verdict_of(comparison, Precision.FLOAT32)
    assert "NOT equal: first differs in scores: model.layers.0.mlp.experts" in text
    assert ("on is 1.01 times off" in text) == (factor is not None)


def test_experts_that_compute_something_else_are_found(tmp_path: Path) -> None:
    comparison = both(train_job, tmp_path, Job("toy"), is_wrong=True)
    first = comparison.first
    assert first is not None
    assert (first.stage, first.name) == (Stage.OUTPUT, "blocks.0.experts")
    assert "activation" in verdict_of(comparison, Precision.FLOAT32)


@pytest.mark.parametrize("family", ["mixtral", slow("toy")])
def test_a_loop_of_ones_own_is_compared(family: str, tmp_path: Path) -> None:
    comparison = both(train_loop, tmp_path, family)
    assert comparison.first is None
    assert {each.kind for each in comparison.compared} == {None, *Kind}
    assert {each.stage for each in comparison.compared} == set(Stage)


def test_a_loop_in_float64_is_compared_to_its_last_digits(tmp_path: Path) -> None:
    comparison = both(train_loop, tmp_path, "toy", precision=Precision.FLOAT64)
    assert comparison.first is None
    assert max(each.error for each in comparison.compared) < 1e-12


def test_gradients_alone_are_enough(tmp_path: Path) -> None:
    """Those of all parameters are doubled; in the loop's losses it is seen behind them."""
    first = both(train_loop, tmp_path, "mixtral", is_wrong=True).first
    assert first is not None
    assert first.stage is Stage.GRADIENTS and first.factor == pytest.approx(2, rel=1e-5)


def test_strategies_with_roles_are_refused(tmp_path: Path) -> None:
    roles = (("attention_size", 1), ("expert_size", 1))
    with pytest.raises(AssertionError, match="where ranks run batches of other ranks"):
        both(train_job, tmp_path, Job(strategy="zebra", keys=roles))


def test_shards_of_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="verify the job at stage 2"):
        both(train_job, tmp_path, Job(stage=3))


def test_a_block_that_is_off_leaves_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="has no enabled block ds_moe_ext"):
        both(train_job, tmp_path, Job(block=False))


MEGATRON = MegatronRun(ep=2, num_microbatches=2, swiglu=True)


@pytest.mark.parametrize(
    "run", [MEGATRON, slow(replace(MEGATRON, optimizer="distributed", recompute="full"))]
)
def test_megatron_is_compared(run: MegatronRun, tmp_path: Path) -> None:
    comparison = both(train_megatron, tmp_path, run)
    assert comparison.first is None
    assert {each.kind for each in comparison.compared} == {None, *Kind}
    assert {each.stage for each in comparison.compared} == set(Stage)
    names = {each.name for each in comparison.compared if each.kind is Kind.EXPERT}
    assert len(names) == 2 * 4 * 2  # layers, experts, weights


def verified(folder: Path, *command: str, num_steps: int = 5) -> tuple[int, dict[str, Any]]:
    """How ``ds-moe-ext verify`` of a command ends, and what it prints as JSON."""
    options = ["--steps", str(num_steps), "--out", str(folder / "verify"), "--json"]
    done = subprocess.run(
        ["ds-moe-ext", "verify", *options, "--", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode < 2, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


TORCHRUN = ("torchrun", "--standalone", "--nproc_per_node", "2")


@pytest.mark.slow
def test_the_command_finds_an_error_in_a_script_without_seeds(tmp_path: Path) -> None:
    config = tmp_path / "moe.json"
    config.write_text('{"ds_moe_ext": {"enabled": true, "report": {"enabled": false}}}')
    script = str(ROOT / "tests/hosts/verified_script.py")
    ended, printed = verified(tmp_path, *TORCHRUN, script, str(config), "wrong")
    assert ended == 1 and not printed["equal"]
    assert printed["first_difference"]["name"] == "blocks.0.experts"
    assert len(printed["losses_off"]) == 5 and printed["worst"][0]["error"] == 0


TEXT = ("--data", str(ROOT / "docs"))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt_moe_tiny", "mixtral_tiny"])
def test_the_main_job_is_equal_under_deepspeeds_launcher(model: str, tmp_path: Path) -> None:
    config = document(tmp_path, strategy="fssdp")
    with socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])  # free in both runs, unless others come before
    launcher = ("deepspeed", "--num_accelerators", "2", "--master_port", port)
    job = arguments(tmp_path, config, model)
    job[job.index("--steps") + 1] = "30"
    ended, printed = verified(tmp_path, *launcher, *job, num_steps=20)
    assert ended == 0 and printed["verdict"] == "equal within the rounding of float32"
    assert len(printed["losses_on"]) == 20


@pytest.mark.slow
def test_the_loop_and_the_megatron_job_are_equal_under_torchrun(tmp_path: Path) -> None:
    block = str(ROOT / "configs/strategies/fssdp.json")
    model = ("--model", str(ROOT / "configs/models/mixtral_tiny.json"))
    loop = (str(ROOT / "launch/pretrain_torch.py"), *model, *TEXT, "--config", block)
    ended, printed = verified(tmp_path, *TORCHRUN, *loop)
    assert ended == 0 and not printed["not_compared"]
    megatron = (str(ROOT / "launch/pretrain_megatron.py"), *model, *TEXT, "--train-iters", "30")
    flags = ("--expert-model-parallel-size", "2", "--ds-moe-ext-config", block)
    output = ("--output", str(tmp_path / "out"))
    ended, printed = verified(tmp_path, *TORCHRUN, *megatron, *flags, *output)
    assert ended == 0 and not printed["not_compared"]
