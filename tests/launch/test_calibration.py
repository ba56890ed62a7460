# SPDX-License-Identifier: Apache-2.0
"""Published speeds are well-formed, and one is priced."""

from __future__ import annotations

import sys

import calibration
import pytest
from calibration import Reached, Row, error, halves, rows_of

ROWS = rows_of()
UNITS = {"tokens_per_s", "step_s", "tflops"}
SPELLED = ("none", "full")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_are_well_formed(row: Row) -> None:
    keys = row.keys
    assert keys["source"].startswith("https://")
    assert len(UNITS & keys["published"].keys()) == 1
    assert keys["recompute"] in SPELLED or row.training.again
    assert keys["dispatcher"] in {"alltoall", *calibration.ONCE}
    assert row.counts <= (keys["precision"] == "bf16")  # price knows no fp8
    assert row.training.tokens_of_step == keys["global_batch"] * keys["length"]
    assert row.training.stage_ranks % keys["expert"] == 0
    assert row.hardware.num_ranks >= keys["gpus"]
    assert 0 < row.once <= 1
    # Of no more than a device can do.
    peak = row.hardware.device.flops_per_s.bf16
    assert peak is not None
    assert 0.1 < row.published * calibration.TERA / peak < 0.7
    assert abs(row.priced_shape.num_layers / row.shape.num_layers - 1) < 0.05


def test_names_differ_and_halves_are_told_apart() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    fits, checks = halves(ROWS)
    assert len(fits) + len(checks) == sum(row.counts for row in ROWS) >= 10
    assert 0 <= len(fits) - len(checks) <= 1
    jobs = [
        {
            key: value
            for key, value in row.keys.items()
            if key not in {"name", "source", "published"}
        }
        for row in (*fits, *checks)
    ]
    assert all(job not in jobs[place + 1 :] for place, job in enumerate(jobs))


def test_flops_are_as_published() -> None:
    """Two sources state tokens a second and TFLOP/s of the same run."""
    by_name = {row.name: row for row in ROWS}
    for name, flops in (
        ("Qwen3 30B, EP 16", 299.352e12 / 13011.378),
        ("Moonlight 16B", 386.59e12 / 22528.026),
        ("Qwen3 235B, GB200", 728e12 / 4916),
    ):
        row = by_name[name]
        assert row.shape.flops(row.keys["length"]) == pytest.approx(flops, rel=2e-3)


def test_the_table_of_a_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["calibration.py", "--rows", "Qwen3 30B, FSDP", "--parts"])
    assert calibration.main() == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("| Qwen3"))
    assert "[Automodel](https://github.com/NVIDIA-NeMo/Automodel/" in line
    assert "| 8 H100 | 1 1 1 8 1 | 4 of 512 | 277 |" in line
    assert "median error" in out


def test_tokens_that_are_sent_once() -> None:
    (row,) = (row for row in ROWS if row.name == "Qwen3 30B, EP 16")
    assert row.once == pytest.approx((1 - 0.5**8) / 4)
    slow, fast = (row.ratio(Reached(), sends_once=once) for once in (False, True))
    assert fast > 1.3 * slow


def test_a_fit_is_no_worse() -> None:
    few = [row for row in ROWS if row.name in {"Qwen3 30B, FSDP", "Moonlight 16B"}]
    before, after = ([row.ratio(of) for row in few] for of in (Reached(), calibration.fitted(few)))
    assert error(after) <= error(before)
