# SPDX-License-Identifier: Apache-2.0
"""What the quickstart shows while it compiles and at the end, and that it starts what is there."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quickstart
from console import Summary

from ds_moe_ext.commands.compare import Finished
from ds_moe_ext.hosts.deepspeed.guard import OP
from ds_moe_ext.report.record import LayerRecord, PlacementRecord, RunRecord
from ds_moe_ext.report.report_files import ReportFiles

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "launch" / "quickstart.sh"


def finished(folder: Path, *, replicas: int, losses: list[float]) -> None:
    """What a run leaves: 1 step, 1 layer of 2 experts, one copied so often."""
    Summary(
        strategy=folder.name,
        model="tiny.json",
        text="a book",
        seed=1,
        dtype="fp32",
        device="cpu",
        cores=2,
        world_size=2,
        tokens_per_step=8,
        first_step=0,
        losses=losses,
        held_out_losses={},
        tokens_per_s=1.0,
        seconds_per_step_s=1.0,
        seconds_s=[1.0] * len(losses),
        peak_bytes=0,
        balance_by_layer={},
        versions={},
    ).write(folder)
    rows_ILE = np.array([[[6, 2]]])
    copied = PlacementRecord(np.array([[[replicas, 0]]]), rows_ILE, (), 0, (((1,), ()),))
    record = RunRecord(
        strategy=folder.name,
        world_size=2,
        num_ep_ranks=2,
        layers=(LayerRecord("a", "fake", 2, 1, (0, 1), 0),),
        steps_I=(0,),
        rows_ILE=rows_ILE,
        ep_rank_rows_ILC=np.array([[[4, 4]]]) if replicas else rows_ILE,
        seconds_by_kind={},
        versions={},
        placements=copied if replicas else None,
    )
    ReportFiles(folder).write(record)


def way(strategy: str, gain: float, **other: bool) -> dict[str, Any]:
    return {"strategy": strategy, "gain": gain, "fits": True, "is_base": False, **other}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """As quickstart.sh leaves everything."""
    finished(tmp_path / "ep", replicas=0, losses=[5.0, 4.0])
    finished(tmp_path / "fssdp", replicas=1, losses=[5.0, 4.000001])
    times = [
        {"name": "ep", "faster": [1.0]},
        {"name": "fssdp", "faster": [1.5]},
        {"name": "prophet", "faster": [1.7, 1.9, 1.8]},
    ]
    seen = {"load": 1.0, "cores": 2, "results": times}
    (tmp_path / "slow_motion.json").write_text(json.dumps(seen))
    cluster = {"num_nodes": 8, "ranks_per_node": 8, "device": {"name": "H100"}}
    ways = [way("esp", 1.41), way("fssdp", 1.23), way("ep", 1.0, is_base=True), way("esp", 0.6)]
    ways.append(way("prophet", 3.0, fits=False))
    (tmp_path / "price_h.json").write_text(json.dumps({"clusters": [cluster], "ways": ways}))
    return tmp_path


def test_what_it_says(root: Path) -> None:
    text = " ".join(" ".join(quickstart.screen(root)).split())
    for stated in (
        "losses agree within 1e-05 in each of 2 steps (largest difference 1e-06): from 5.000 "
        "to 4.000",
        "1.50 times the mean load; with 1 replicas of hot experts",
        "made for one step at a time, it had 1.00 times",
        "steps were 1.50 times (fssdp) and 1.80 times (prophet) as fast as with ep",
        "does not show speed: its ranks share the cores of this machine",
        "on 64 H100 esp 1.41, fssdp 1.23 times as fast as ep.",
        str(root / "fssdp" / "report.html"),
        str(root / "price_h.html"),
        "ds-moe-ext price YOUR_DEEPSPEED.json",
    ):
        assert stated in text


def test_losses_that_part_and_ranks_that_share_nothing(root: Path) -> None:
    plain, copied = (Finished.read(root / name) for name in ("ep", "fssdp"))
    parted = dataclasses.replace(copied.reported, losses=(5.0, 4.5))
    stated = quickstart.learned(plain, dataclasses.replace(copied, reported=parted))
    assert "in the first 1 of 2 steps; after that, rounding changes an expert choice" in stated
    gpu = dataclasses.replace(plain, reported=dataclasses.replace(plain.reported, device="A GPU"))
    seen = json.loads((root / "slow_motion.json").read_text())
    quiet, busy = (quickstart.timed({**seen, "load": load}, gpu) for load in (1.0, 9.0))
    assert "does not show speed" not in quiet and "kept this machine busy" not in quiet
    assert "kept this machine busy, load 9 on 2 cores" in busy


def test_the_script_is_one_and_names_files_that_are_there() -> None:
    subprocess.run(["bash", "-n", str(QUICKSTART)], check=True)
    script = QUICKSTART.read_text()
    named = re.findall(r"\b(?:launch|configs)/[\w/]+\.(?:py|json|sh)", script)
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []
    for model, cluster in (("mixtral_8x7b", "dgx_h100"), ("qwen3_30b_a3b", "dgx_a100")):
        assert (ROOT / f"configs/models/public/{model}.json").exists()
        assert (ROOT / f"configs/hardware/{cluster}.json").exists()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a compilation leaves."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(quickstart, "LOG_EVERY_S", 0.05)
    folder = tmp_path / "py311_cpu" / OP
    folder.mkdir(parents=True)
    return folder / f"{OP}.so"


def test_it_says_that_it_goes_on_and_is_silent_from_then_on(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = f"import pathlib, time; time.sleep(0.3); pathlib.Path({str(made)!r}).touch()"
    monkeypatch.setattr(quickstart, "BUILD", build)
    quickstart.compile_collectives()
    first, *others = capsys.readouterr().out.splitlines()
    assert "compiling DeepSpeed's CPU collectives" in first
    assert others and all("still compiling" in line for line in others)
    quickstart.compile_collectives()
    assert capsys.readouterr().out == ""


def test_it_says_that_nothing_came_of_it(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "BUILD", "raise SystemExit(1)")
    quickstart.compile_collectives()
    assert "that failed" in capsys.readouterr().out
