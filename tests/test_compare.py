# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext compare``: two finished runs side by side."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
from console import Summary
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from ds_moe_ext.commands.compare import (
    SUMMARY,
    Finished,
    Reported,
    check_comparable,
    compare,
    comparison,
    equal_steps,
    largest_difference,
    notices,
)
from ds_moe_ext.report.record import DeviceRecord, LayerRecord, PlacementRecord, RunRecord
from ds_moe_ext.report.report_files import ReportFiles
from ds_moe_ext.report.summary import verdict
from tests.test_report import UNKNOWN
from tests.test_time_saved import pace, ranks


def summary(strategy: str, losses: list[float], **other: object) -> Summary:
    base = Summary(
        strategy=strategy,
        model="tiny.json",
        text="a book",
        seed=1,
        dtype="fp32",
        device="A GPU",
        cores=2,
        world_size=2,
        tokens_per_step=1000,
        first_step=0,
        losses=losses,
        held_out_losses={2: 4.0},
        tokens_per_s=2000.0,
        seconds_per_step_s=0.5,
        seconds_s=[0.5] * len(losses),
        peak_bytes=2**30,
        balance_by_layer={"a": 1.5},
        versions={"torch": "2.13.0"},
    )
    return dataclasses.replace(base, **other)  # type: ignore[arg-type]


def record(strategy: str) -> RunRecord:
    """2 steps, 1 layer of 2 experts on 2 EP ranks; one of the first 8 rows' experts was copied."""
    rows_ILE = np.array([[[6, 2]], [[4, 4]]])
    copied = PlacementRecord(np.array([[[1, 0]], [[0, 0]]]), rows_ILE, (), 1, (((), ()),))
    return RunRecord(
        strategy=strategy,
        world_size=2,
        num_ep_ranks=2,
        layers=(LayerRecord("a", "fake", 2, 1, (0, 1), 2048),),
        steps_I=(0, 1),
        rows_ILE=rows_ILE,
        ep_rank_rows_ILC=np.array([[[4, 4]], [[4, 4]]]) if strategy == "fssdp" else rows_ILE,
        seconds_by_kind={},
        versions={},
        placements=copied if strategy == "fssdp" else None,
    )


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Finished, Finished]:
    """As scripts and ds_moe_ext leave them."""
    plain = summary("ep", [5.0, 4.5, 4.0, 3.0])
    faster = {"tokens_per_s": 2200.0, "seconds_per_step_s": 0.4}
    copied = summary("fssdp", [5.0, 4.500001, 4.0, 3.125], **faster)
    for each in (plain, copied):
        each.write(tmp_path / each.strategy)
        ReportFiles(tmp_path / each.strategy).write(record(each.strategy))
    return Finished.read(tmp_path / "ep"), Finished.read(tmp_path / "fssdp")


def printed(first: Finished, second: Finished) -> dict[str, list[str]]:
    """Entries of the table by the name of their row."""
    text = io.StringIO()
    Console(file=text, width=160).print(comparison(first, second))
    lines = text.getvalue().replace("\u2503", "\u2502").splitlines()
    rows = [[entry.strip() for entry in line.split("\u2502")[1:-1]] for line in lines]
    return {name: entries for name, *entries in (row for row in rows if row)}


def telling(run: Finished, **other: object) -> Finished:
    reported = dataclasses.replace(run.reported, **other)  # type: ignore[arg-type]
    return dataclasses.replace(run, reported=reported)


def test_the_table_worked_by_hand(runs: tuple[Finished, Finished]) -> None:
    assert printed(*runs) == {
        "": ["ep", "fssdp", "difference"],
        "loss, step 1": ["5.000000", "5.000000", "+0.0e+00"],
        "loss, step 2": ["4.500000", "4.500001", "+1.0e-06"],
        "loss, step 4": ["3.000000", "3.125000", "+1.2e-01"],
        "largest difference, step 4": ["", "", "1.2e-01"],
        "tokens/s": ["2,000", "2,200", "+10.0 %"],
        "a step takes": ["0.500 s", "0.400 s", "-20.0 %"],
        "balance, no replicas": ["1.25", "1.25", ""],
        "balance, as computed": ["1.25", "1.00", ""],
        "replicas a step": ["0.0", "0.5", ""],
        "owners moved": ["0", "0", ""],
        "expert weights, rank 0": ["2 KiB", "2 KiB", ""],
    }
    losses, found, balance, *alone, first_page, second_page = notices(*runs)
    assert found == (
        "Result: the step time is 500 ms with ep and 400 ms with fssdp, 1.25 times as fast "
        "(measured in both runs)."
    )
    assert "equal within 1e-05 in the first 3 steps" in losses and "1 is perfect" in balance
    assert [first_page, second_page] == [f"Pictures: {run.folder / 'report.html'}" for run in runs]
    assert alone == [
        f"{run.name} by its own report: {verdict(run.record)}." for run in runs if run.record
    ]
    assert len(alone) == 2


def test_ranks_of_one_cpu_measure_no_speed(runs: tuple[Finished, Finished]) -> None:
    """What is slower there says on its own line that it is no measure."""
    for cores, why in ((1, "not comparable: shared cores"), (8, "not comparable: no network")):
        on_cpu = [telling(run, device="cpu", cores=cores) for run in runs]
        table = printed(*on_cpu)
        assert [table[name][-1] for name in ("tokens/s", "a step takes")] == [why, why]
        assert any("do not predict" in line for line in notices(*on_cpu))


def test_reports_alone_tell_what_ranks_found(runs: tuple[Finished, Finished]) -> None:
    """A script's mean is not held against another's median, nor its loss, without that of routers,
    against what gradients were made of."""
    reported = pace((9, 19), step_s_G=[3.0, 1.0], tokens_per_s_G=[9.0, UNKNOWN], loss_G=[4.0, 2.0])
    found = [
        dataclasses.replace(
            run,
            record=dataclasses.replace(record("ep"), ranks=ranks(over_steps=reported, device=cpu)),
        )
        for run, cpu in zip(runs, (DeviceRecord("cpu", 1), None))
    ]
    alone = [dataclasses.replace(run, reported=Reported()) for run in found]
    check_comparable(*alone)
    table = printed(*alone)
    why = "not comparable: shared cores"
    assert table["tokens/s"] == ["9", "9", why] and table["a step takes"] == ["2.000 s"] * 2 + [why]
    assert table["loss, step 10"] == ["4.000000", "4.000000", "+0.0e+00"]
    assert table["host memory, fullest rank"] == ["3 MiB", "3 MiB", ""]
    assert "allocated, fullest rank" not in table and "loss, step 1" not in table
    first, *others = notices(*alone)
    assert "in the first 2 of 2 steps that both reports cover." in first
    assert any("(1 cores here) do not predict" in line for line in others)
    both = printed(found[0], alone[1])
    assert both["loss, step 20"] == table["loss, step 20"] and both["tokens/s"][:2] == ["9", "9"]
    assert printed(*found)["tokens/s"][:2] == ["9", "9"]  # as pages and consoles have it
    with pytest.raises(ValueError, match=r"device is 'cpu' in .*ep and 'A GPU' in"):
        check_comparable(alone[0], runs[1])


def test_a_run_without_the_extension_and_one_that_was_resumed(
    runs: tuple[Finished, Finished],
) -> None:
    plain, copied = (telling(run, first_step=100) for run in runs)
    table = printed(dataclasses.replace(plain, record=None), copied)
    assert table["loss, step 101"][0] == "5.000000" and "largest difference, step 104" in table
    assert table["balance, as computed"] == ["-", "1.00", ""]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(*[st.floats(0, 10)] * 2), min_size=1, max_size=30))
def test_nothing_is_further_apart_than_the_largest_difference(
    pairs: list[tuple[float, float]],
) -> None:
    ours, theirs = zip(*pairs)
    worst = largest_difference(ours, theirs)
    assert worst.loss == abs(ours[worst.step - 1] - theirs[worst.step - 1])
    assert all(abs(a - b) <= worst.loss for a, b in pairs)
    assert worst == largest_difference(theirs, ours)
    alike = equal_steps(ours, theirs)
    assert all(abs(a - b) <= 1e-5 for a, b in pairs[:alike])
    assert alike == len(pairs) or abs(ours[alike] - theirs[alike]) > 1e-5


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"seed": 2}, "seed is 1 in .*ep and 2 in .*fssdp; compare runs that differ in"),
        ({"text": "another"}, "text is 'a book' in .* and 'another' in"),
        ({"dtype": "bf16"}, "dtype is 'fp32' in .* and 'bf16' in"),
        ({"tokens_per_step": 7}, "tokens_per_step is 1000 in .* and 7 in"),
        ({"losses": (5.0,)}, "has 4 steps and .* 1; give both the same number"),
    ],
)
def test_runs_that_cannot_be_compared(
    runs: tuple[Finished, Finished], other: dict[str, object], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        check_comparable(runs[0], telling(runs[1], **other))


def test_reports_that_cannot_be_compared(runs: tuple[Finished, Finished]) -> None:
    plain, copied = runs
    assert plain.record is not None and copied.record is not None
    other = dataclasses.replace(copied.record, layers=(*copied.record.layers,) * 2)
    with pytest.raises(ValueError, match="replaced layers is"):
        check_comparable(plain, dataclasses.replace(copied, record=other))
    more = dataclasses.replace(copied.record, world_size=4)
    with pytest.raises(ValueError, match=r"world_size is 2 in .* and 4 in"):
        check_comparable(plain, dataclasses.replace(copied, record=more))


def test_the_command(
    runs: tuple[Finished, Finished], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert compare(*(run.folder for run in runs)) == 0
    assert "balance, as computed" in capsys.readouterr().out
    with pytest.raises(ValueError, match="none has neither report"):
        compare(runs[0].folder, tmp_path / "none")
    for text in ("[]", '{"losses": 1}', "{"):
        (runs[1].folder / SUMMARY).write_text(text)
        with pytest.raises(ValueError, match=r"summary.json is not a summary of a run \("):
            compare(*(run.folder for run in runs))


def test_a_summary_may_tell_more_and_less(tmp_path: Path) -> None:
    (tmp_path / SUMMARY).write_text(json.dumps({"losses": [1, 2.5], "weather": "fine"}))
    assert Reported.read(tmp_path / SUMMARY) == Reported(losses=(1.0, 2.5))
