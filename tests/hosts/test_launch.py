# SPDX-License-Identifier: Apache-2.0
"""The main job on real text, a few steps: in ranks that are there, and (slow) by real launchers."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.marks import slow
from tests.ranks import Pool, key_value_store

ROOT = Path(__file__).parents[2]


def start(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def start_by_deepspeed(command: list[str]) -> str:
    """On two ranks."""
    with key_value_store() as address:
        port = ("--master_port", address["MASTER_PORT"])
        return start(["deepspeed", "--num_accelerators", "2", *port, *command], **address)


def start_by_torchrun(num_ranks: int, command: list[str]) -> str:
    return start(["torchrun", "--standalone", "--nproc_per_node", str(num_ranks), *command])


def run_script(rank: int, world_size: int, command: list[str]) -> str:
    """What a rank prints that runs a script as its own program."""
    with redirect_stdout(StringIO()) as printed, mock.patch.object(sys, "argv", command):
        runpy.run_path(command[0], run_name="__main__")
        atexit._run_exitfuncs()  # it leaves a report
    return printed.getvalue()


def start_in_ranks(command: list[str]) -> str:
    """On two ranks that have loaded what scripts import; the script leaves them without a group."""
    pool = Pool(2)
    try:
        first, _ = pool.run(run_script, command)
    finally:
        pool.close()
    return str(first)


def document(tmp_path: Path, **block: Any) -> Path:
    content = json.loads((ROOT / "configs/hosts/deepspeed_zero1.json").read_text())
    content["ds_moe_ext"] |= {"expert_parallel_size": 2, **block}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    return path


def arguments(tmp_path: Path, config: Path, model: str) -> list[str]:
    return [
        str(ROOT / "launch/pretrain_deepspeed.py"),
        "--model",
        str(ROOT / f"configs/models/{model}.json"),
        "--deepspeed_config",
        str(config),
        "--steps",
        "7",
        "--sequence_length",
        "64",
        "--data",
        str(ROOT / "docs"),
        "--output",
        str(tmp_path / "out"),
    ]


@pytest.mark.parametrize("start_by", [start_in_ranks, slow(start_by_deepspeed)])
def test_the_main_job_trains_and_reports(
    start_by: Callable[[list[str]], str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    steps = {"path": str(trace), "first_step": 2, "num_steps": 2}
    config = document(tmp_path, trace=steps, debug=True)
    command = [*arguments(tmp_path, config, "gpt_moe_tiny"), "--dtype", "fp32"]
    printed = start_by(command)
    assert "ds_moe_ext: strategy ep, 2 ranks" in printed  # the table at the start
    assert "busiest EP rank / mean" in printed  # and at the end
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["strategy"] == "ep" and summary["world_size"] == 2
    assert summary["dtype"] == "fp32" and summary["device"] == "cpu"
    assert len(summary["losses"]) == 7 and summary["losses"][-1] < summary["losses"][0]
    assert set(summary["balance_by_layer"]) == {"blocks.1.ffn", "blocks.3.ffn"}
    assert all(1.0 <= balance <= 2.0 for balance in summary["balance_by_layer"].values())
    assert summary["tokens_per_s"] > 0 and "deepspeed" in summary["versions"]
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["steps_I"] == list(range(7))
    # 2 ranks x 8 windows x 64 bytes x 2 choices a step and layer.
    assert {sum(rows_E) for rows_LE in report["rows_ILE"] for rows_E in rows_LE} == {2048}
    assert {chunk_range["name"] for chunk_range in report["timeline"]} == {
        "order", "dispatch", "expert", "combine", "restore"
    }  # fmt: skip
    assert "data:image/svg+xml" in (tmp_path / "out/report.html").read_text(encoding="utf-8")
    events = json.loads(trace.read_text())["traceEvents"]
    # 2 ranks x 2 steps x 2 layers x (5 forward + 4 backward) tasks.
    assert sum(event["ph"] == "X" for event in events) == 72


@pytest.mark.parametrize("model", [slow("mixtral_tiny"), slow("qwen3_moe_tiny")])
def test_torchrun_trains_hugging_face_models(model: str, tmp_path: Path) -> None:
    start_by_torchrun(2, arguments(tmp_path, document(tmp_path), model))
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["losses"][-1] < summary["losses"][0]
    assert len(summary["balance_by_layer"]) == 3


@pytest.mark.slow
def test_a_run_resumes_on_fewer_ranks_with_another_strategy(tmp_path: Path) -> None:
    """What seven steps of two ranks have saved goes on for two more on one."""
    saved = ["--save", str(tmp_path / "saved")]
    command = arguments(tmp_path, document(tmp_path, strategy="fssdp"), "mixtral_tiny")
    start_by_torchrun(2, [*command, *saved])
    before = json.loads((tmp_path / "out/summary.json").read_text())["losses"]
    command = arguments(tmp_path, document(tmp_path, expert_parallel_size=1), "mixtral_tiny")
    command[command.index("--steps") + 1] = "9"
    resumed = ["--resume", str(tmp_path / "saved")]
    start_by_torchrun(1, [*command, *resumed])
    after = json.loads((tmp_path / "out/summary.json").read_text())["losses"]
    assert len(after) == 2 and max(after) < before[0]


def losses_of(tmp_path: Path, **block: Any) -> list[float]:
    """Of seven steps in float32 under torchrun, which starts in half the time of deepspeed's."""
    config = document(tmp_path, debug=True, **block)
    command = [*arguments(tmp_path, config, "gpt_moe_tiny"), "--dtype", "fp32"]
    printed = start_by_torchrun(2, command)
    assert f"ds_moe_ext: strategy {block['strategy']}, 2 ranks = 1 x" in printed
    losses: list[float] = json.loads((tmp_path / "out/summary.json").read_text())["losses"]
    return losses


ROLES = {"strategy": "zebra", "zebra": {"attention_size": 1, "expert_size": 1}}


@pytest.mark.slow
def test_roles_under_torchrun(tmp_path: Path) -> None:
    """The same script with attention on one rank and experts on the other; both are in the
    picture."""
    trace = {"path": str(tmp_path / "trace.json"), "first_step": 2, "num_steps": 1}
    losses = losses_of(tmp_path, trace=trace, **ROLES)
    assert len(losses) == 7 and losses[-1] < losses[0]
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert {sum(rows_E) for rows_LE in report["rows_ILE"] for rows_E in rows_LE} == {2048}
    assert {(chunk_range["stream"], chunk_range["name"]) for chunk_range in report["timeline"]} == {
        *(("attention", "attention"), ("attention", "head"), ("expert", "expert")),
        *(("a2e", "dispatch"), ("a2e", "combine"), ("e2a", "combine"), ("e2a", "dispatch")),
    }
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    # 2 layers x 2 micro-batches x (attention, dispatch, combine), and heads, and all adjoints; as
    # often expert, dispatch and combine.
    assert sum(event["ph"] == "X" for event in events) == 2 * (2 * 2 * 3 + 2) + 2 * (2 * 2 * 3)


@pytest.mark.slow
def test_roles_change_no_loss_under_torchrun(tmp_path: Path) -> None:
    ours, theirs = losses_of(tmp_path, **ROLES), losses_of(tmp_path, strategy="ep")
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours[:2] == pytest.approx(theirs[:2], rel=1e-6)
