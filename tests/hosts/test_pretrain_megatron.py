# SPDX-License-Identifier: Apache-2.0
"""launch/pretrain_megatron.py as a user starts it: torchrun, real text, a few steps."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.processes import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)

SCRIPT = ROOT / "launch/pretrain_megatron.py"
EP_2 = ("--expert-model-parallel-size", "2")
ALL_OVERLAPS = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
SAVED_STEP = 4
NUM_STEPS = 6
FIRST_STEPS = ("--train-iters", str(SAVED_STEP))


@dataclass(frozen=True)
class Started:
    """Runs of the script, each with a folder of its own under `folder`."""

    folder: Path
    num_ranks: int
    model: str = "gpt_moe_tiny"

    def arguments(self, name: str, *flags: str) -> list[str]:
        """Of the run that leaves its results in a folder of this name."""
        text = ["--data", str(ROOT / "docs"), "--seq-length", "32", "--eval-iters", "1"]
        steps = ["--train-iters", str(NUM_STEPS), "--lr-decay-iters", str(NUM_STEPS)]
        sizes = ["--micro-batch-size", "4", "--global-batch-size", "16"]
        output = ["--output", str(self.folder / name)]
        model = ["--model", str(ROOT / f"configs/models/{self.model}.json")]
        return [*model, *text, *steps, *sizes, *output, *flags]

    def run(self, runs: dict[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
        """Their summaries, by the names given; one after the other in the same ranks."""
        lists = [self.arguments(name, *flags) for name, flags in runs.items()]
        self.torchrun(ROOT / "tests/hosts/script_runs.py", str(SCRIPT), json.dumps(lists))
        return {name: self.summary(name) for name in runs}

    def torchrun(self, script: Path, *arguments: str) -> str:
        """What the ranks printed."""
        done = subprocess.run(
            [
                "torchrun",
                "--standalone",
                "--nproc_per_node",
                str(self.num_ranks),
                str(script),
                *arguments,
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    def summary(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / name / "summary.json").read_text())
        return content


def saved_and_resumed(started: Started, *flags: str) -> dict[str, dict[str, Any]]:
    """A run, its first steps alone, and one that goes on from there."""
    folder = str(started.folder / "saved")
    return started.run(
        {
            "whole": flags,
            "saving": (*flags, *FIRST_STEPS, "--save", folder),
            "resumed": (*flags, "--load", folder),
        }
    )


@pytest.mark.slow
def test_losses_fall_and_a_resumed_run_has_the_same(tmp_path: Path) -> None:
    summaries = saved_and_resumed(Started(tmp_path, num_ranks=2), *EP_2)
    whole = summaries["whole"]
    assert whole["strategy"] == "plain" and whole["world_size"] == 2
    assert whole["tokens_per_step"] == 16 * 32 and whole["tokens_per_s"] > 0
    assert len(whole["losses"]) == NUM_STEPS
    # A byte is one of 256 at first: 5.55 nats.
    assert 5.3 < whole["losses"][0] < 5.8 and whole["losses"][-1] < whole["losses"][0] - 0.5
    assert whole["held_out_losses"][str(NUM_STEPS)] < 5.3
    assert summaries["resumed"]["first_step"] == SAVED_STEP
    assert summaries["resumed"]["losses"] == whole["losses"][SAVED_STEP:]
    assert summaries["resumed"]["held_out_losses"] == whole["held_out_losses"]


@pytest.mark.slow
def test_distributed_optimizer_overlaps_and_bf16_resume_alike(tmp_path: Path) -> None:
    started = Started(tmp_path, num_ranks=2, model="mixtral_tiny")
    summaries = saved_and_resumed(started, *EP_2, *ALL_OVERLAPS, "--bf16")
    assert summaries["resumed"]["losses"] == summaries["whole"]["losses"][SAVED_STEP:]


@pytest.mark.slow
def test_parallelism_changes_no_loss(tmp_path: Path) -> None:
    """Where the same seed draws the same weights: overlaps, recomputation, micro-batches."""
    full = ("--recompute-granularity", "full", "--recompute-method", "uniform")
    losses = Started(tmp_path, num_ranks=2).run(
        {
            "plain": EP_2,
            "overlaps": (*EP_2, *ALL_OVERLAPS),
            "recomputed": (*EP_2, *full, "--recompute-num-layers", "1"),
            "gathered": (*EP_2, "--moe-token-dispatcher-type", "allgather"),
        }
    )
    plain = losses["plain"]["losses"]
    for name, summary in losses.items():
        assert summary["losses"] == pytest.approx(plain, abs=2e-3), name
        assert summary["losses"][0] == pytest.approx(plain[0], rel=1e-6), name


@pytest.mark.slow
def test_pipelines_and_tensor_parallel_ranks_train(tmp_path: Path) -> None:
    pipeline = (*EP_2, "--pipeline-model-parallel-size", "2")
    saved = str(tmp_path / "saved")
    tensor = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    summaries = Started(tmp_path, num_ranks=4).run(
        {
            "pipeline": pipeline,
            "saving": (*pipeline, *FIRST_STEPS, "--save", saved),
            "resharded": ("--expert-model-parallel-size", "4", "--load", saved),
            "interleaved": (*pipeline, "--num-virtual-stages-per-pipeline-rank", "2"),
            "tensor": (*EP_2, *tensor, "--expert-tensor-parallel-size", "1", ALL_OVERLAPS[0]),
        }
    )
    for name in ("pipeline", "interleaved", "tensor"):
        losses = summaries[name]["losses"]
        assert len(losses) == NUM_STEPS and losses[-1] < losses[0] - 0.5, name
    resharded = summaries["resharded"]["losses"]
    assert resharded == pytest.approx(summaries["pipeline"]["losses"][SAVED_STEP:], abs=2e-3)


@pytest.mark.slow
def test_a_user_starts_it_and_is_reported_what_is_wrong(tmp_path: Path) -> None:
    """The script itself, and one line instead of a traceback."""
    started = Started(tmp_path, num_ranks=2)
    printed = started.torchrun(SCRIPT, *started.arguments("run", *EP_2))
    assert "held-out loss" in printed and "Summary" in printed
    assert "Warning" not in printed
    with pytest.raises(AssertionError) as raised:
        started.torchrun(SCRIPT, *started.arguments("wrong", "--global-batch-size", "9"))
    assert "--global-batch-size 9 is no multiple of" in str(raised.value)
    assert (
        "Traceback (most recent call last):\n  File" not in str(raised.value).split("torchrun")[0]
    )
