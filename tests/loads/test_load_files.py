# SPDX-License-Identifier: Apache-2.0
"""Loads in files: ours, Megatron's and those of a run's report."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_moe_ext.files.documents import CONFIGS
from ds_moe_ext.planning.load_files import read_loads, write_loads
from ds_moe_ext.planning.loads import Loads, figures_of
from ds_moe_ext.report.record import LayerRecord, RunRecord
from ds_moe_ext.report.report_files import ReportFiles
from tests.commands import status


@pytest.mark.parametrize("ending", ["npz", "jsonl"])
@pytest.mark.parametrize("name", ["zipf:1.2", "source_ragged", "trained"])
def test_what_is_written_is_read(name: str, ending: str, tmp_path: Path) -> None:
    loads = read_loads(name, ranks=3, experts=12, layers=2, tokens=20, top_k=3, steps=3)
    path = tmp_path / "new" / f"loads.{ending}"
    write_loads(path, loads)
    read = read_loads(str(path), experts=12)
    assert np.array_equal(read.rows_ILCE, loads.rows_ILCE)
    assert (read.top_k, read.steps_I.tolist(), read.source) == (3, [0, 1, 2], str(path))
    assert read_loads(str(path), experts=12, ranks=6).rows_ILCE.shape == (3, 2, 6, 12)


def test_tables_of_others(tmp_path: Path) -> None:
    """By step, rank, layer and expert; choices a token are reported by whoever knows them."""
    path = tmp_path / "counts.npz"
    rows_ILCE = read_loads("trained", ranks=3, steps=4).rows_ILCE
    np.savez(path, counts_IRLE=rows_ILCE.swapaxes(1, 2).astype(np.uint16), iteration_I=[1, 2, 3, 9])
    loads = read_loads(str(path))
    assert np.array_equal(loads.rows_ILCE, rows_ILCE) and loads.top_k is None
    assert [len(run) for run in loads.runs()] == [3, 1]
    assert read_loads(str(path), top_k=2).tokens_ILC().max() == 4096
    with pytest.raises(ValueError, match="a token has 4 different experts; give another top_k"):
        read_loads(str(path), top_k=4)
    with pytest.raises(ValueError, match=r"experts is 32, but .* has 64, which cannot be"):
        read_loads(str(path), experts=32)
    with pytest.raises(ValueError, match=r"choices a token of .* are not known; give top_k"):
        write_loads(tmp_path / "counts.jsonl", loads)
    with pytest.raises(ValueError, match=r"ends on '.csv'; let it end on .npz or .jsonl"):
        write_loads(tmp_path / "counts.csv", loads)


def table_with(tmp_path: Path, **tables: Any) -> Path:
    path = tmp_path / "bad.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, table in tables.items():
            with archive.open(f"{name}.npy", "w") as file:
                if isinstance(table, np.ndarray):
                    np.lib.format.write_array(file, table)
                else:
                    np.lib.format.write_array_header_1_0(file, table)
    return path


ROWS = np.ones((2, 1, 2, 3), dtype=np.int64)


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"rows_ILCE": ROWS}, r"holds \['rows_ILCE'\], but needs rows_ILCE and steps_I"),
        ({"rows": ROWS, "steps_I": np.arange(2)}, "but needs rows_ILCE and steps_I"),
        ({"rows_ILCE": ROWS / 2, "steps_I": np.arange(2)}, "not whole numbers of 4 dims"),
        ({"rows_ILCE": ROWS[0], "steps_I": np.arange(2)}, "not whole numbers of 4 dims"),
        ({"rows_ILCE": -ROWS, "steps_I": np.arange(2)}, "experts have from -1 to -1 rows"),
        ({"rows_ILCE": ROWS << 62, "steps_I": np.arange(2)}, "give counts from 0"),
        ({"rows_ILCE": ROWS[:0], "steps_I": np.arange(0)}, "one of each at least"),
        ({"rows_ILCE": ROWS, "steps_I": np.array([3, 3])}, r"steps_I is \[3, 3\]; give one"),
        ({"rows_ILCE": ROWS, "steps_I": np.arange(2), "top_k": np.int64(4)}, "not whole|top_k is"),
        (
            {"rows_ILCE": np.full((1, 1, 1, 1), print), "steps_I": np.arange(1)},
            "rows_ILCE is object",
        ),
        (
            {
                "rows_ILCE": {"descr": "<i8", "fortran_order": False, "shape": (10**6, 10, 10, 10)},
                "steps_I": np.arange(2),
            },
            "1000000 x 10 x 10 x 10 = 1000000000 counts, but",
        ),
    ],
    ids=str,
)
def test_bad_tables(tables: dict[str, Any], expected: str, tmp_path: Path) -> None:
    """Whose objects are not made and whose sizes are not believed."""
    if isinstance(top_k := tables.get("top_k"), np.int64):
        tables = {**tables, "top_k": np.asarray(top_k)}
    path = table_with(tmp_path, **tables)
    with pytest.raises(ValueError, match=expected) as caught:
        read_loads(str(path))
    assert str(path) in str(caught.value)


# A run on two ranks: a decoder's layers 1 and 3, and one that predicts one more token. Rank 1 came
# to two micro-batches. Lines are as Megatron-core's RouterTracer writes them.
TRACES = {
    "router_trace_rank0.jsonl": [
        {"layer": 1, "top_indices": [[0, 4], [2, 0], [0, 1]]},
        {"layer": 3, "top_indices": [[5, 4], [4, 5], [1, 3]]},
        {"layer": 0, "block": "mtp", "mtp_idx": 0, "top_indices": [[2, 3], [2, 3], [2, 3]]},
    ],
    "router_trace_rank1.jsonl": [
        {"layer": 1, "top_indices": [[1, 0]]},
        {"layer": 3, "top_indices": [[1, 0]], "logit_offset": 0, "logit_bytes": 12},
        {"layer": 0, "block": "mtp", "mtp_idx": 0, "top_indices": [[1, 0]]},
        {"layer": 1, "top_indices": [[1, 2], [5, 1]]},
        {"layer": 3, "top_indices": [[1, 2], [5, 1]]},
        {"layer": 0, "block": "mtp", "mtp_idx": 0, "top_indices": [[1, 2], [5, 1]]},
    ],
}


def write_lines(folder: Path, name: str, lines: list[dict[str, Any]]) -> Path:
    path = folder / name
    rank = int(path.stem[-1])
    whole = [
        {
            "step": 5000,
            "stage": "pre_dispatch",
            "block": "decoder",
            "rank": rank,
            "num_tokens": len(line["top_indices"]),
            "topk": len(line["top_indices"][0]),
            **line,
        }
        for line in lines
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in whole))
    return path


def test_routing_traces_of_megatron(tmp_path: Path) -> None:
    for name, lines in TRACES.items():
        write_lines(tmp_path, name, lines)
    loads = read_loads(str(tmp_path))
    assert (loads.top_k, loads.steps_I.tolist()) == (2, [5000])
    assert loads.rows_ILCE.tolist() == [
        [
            [[3, 1, 1, 0, 1, 0], [1, 3, 1, 0, 0, 1]],
            [[0, 1, 0, 1, 2, 2], [1, 3, 1, 0, 0, 1]],
            [[0, 0, 3, 3, 0, 0], [1, 3, 1, 0, 0, 1]],
        ]
    ]
    assert read_loads(str(tmp_path), experts=8).rows_ILCE.shape == (1, 3, 2, 8)
    one = read_loads(str(tmp_path / "router_trace_rank0.jsonl"))
    assert np.array_equal(one.rows_ILCE, loads.rows_ILCE[:, :, :1])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"top_indices": [[0, 0]]}, ":7: a token has an expert twice"),
        ({"top_indices": [[0, -1]]}, ":7: experts go from -1 to 0; give 0 to 65535"),
        ({"top_indices": [[0, 10**6]]}, "experts go from 0 to 1000000"),
        ({"top_indices": [[0], [1, 2]]}, ":7: tokens have unlike numbers of experts"),
        ({"top_indices": [[0.5, 1.5]]}, ":7: top_indices has shape .* of float64"),
        ({"top_indices": [[0, 2**70]]}, ":7: top_indices has shape .* of object"),
        ({"top_indices": [[1, 2, 3]]}, ":7 has 3 choices a token, but others 2"),
        ({"top_indices": [[1, 2]], "layer": "1"}, ":7.layer is '1', but must be an integer"),
        ({"top_indices": [[1, 2]], "step": 5001}, "no line of step 5001, layer 1, rank 0"),
        ({"top_indices": [[1, 2]], "rank": 7}, "layer 3 is traced on 2 ranks, but others on 3"),
    ],
)
def test_bad_traces(line: dict[str, Any], expected: str, tmp_path: Path) -> None:
    write_lines(tmp_path, "router_trace_rank0.jsonl", TRACES["router_trace_rank0.jsonl"])
    lines = [*TRACES["router_trace_rank1.jsonl"], {"layer": 1, **line}]
    write_lines(tmp_path, "router_trace_rank1.jsonl", lines)
    with pytest.raises(ValueError, match=expected):
        read_loads(str(tmp_path))


@pytest.mark.parametrize("text", ["nothing", "[1]", "{}", '{"step": 1, "step": 2}', "[" * 9999])
def test_lines_that_are_no_trace(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_loads(str(path))
    assert f"{path}:1" in str(caught.value)


RECORD = RunRecord(
    strategy="ep",
    world_size=2,
    num_ep_ranks=2,
    layers=(LayerRecord("layers.0", "MixtralExperts", 4, 2, (0, 0, 1, 1), 1024),),
    steps_I=(10, 30),
    rows_ILE=np.array([[[4, 4, 4, 4]], [[8, 5, 2, 1]]]),
    ep_rank_rows_ILC=np.array([[[8, 8]], [[13, 3]]]),
    seconds_by_kind={},
    versions={},
)


def test_a_report_is_read_with_senders_alike(tmp_path: Path) -> None:
    ReportFiles(tmp_path).write(RECORD)
    path = tmp_path / "report.json"
    loads = read_loads(str(path))
    assert np.array_equal(loads.rows_ILCE.sum(axis=2), RECORD.rows_ILE)
    assert (loads.tokens_ILC() == 4).all()
    assert (loads.top_k, loads.steps_I.tolist()) == (2, [10, 30])
    document = json.loads(path.read_text())
    for keys, top_k in (
        ({"rows_ILE": [[[4, 4, 4, 3]], [[8, 5, 2, 1]]]}, None),  # one was dropped
        ({"layers": [{**document["layers"][0], "top_k": 0}]}, None),
        ({"num_cells": 4}, 2),
    ):
        path.write_text(json.dumps({**document, **keys}))
        assert read_loads(str(path)).top_k == top_k


@pytest.mark.parametrize(
    "keys",
    [
        {"rows_ILE": [[[1, 2], [3]]]},
        {"rows_ILE": "many"},
        {"rows_ILE": [[[0.5, 1]], [[1, 1]]]},
        {"rows_ILE": [[[-1, 1]], [[1, 1]]]},
        {"num_cells": 1.5},
        {"num_cells": 2**40},
        {"steps_I": []},
        {"steps_I": [1, 1]},
        {"layers": 3},
    ],
    ids=str,
)
def test_bad_reports(keys: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**json.loads(RECORD.to_json()), **keys}))
    with pytest.raises(ValueError, match=r"is no report.json of a run with loads") as caught:
        read_loads(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["x.npz", "x.jsonl", "x.json"])
def test_files_that_are_none(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(ValueError, match="is no file that is there"):
        read_loads(str(path))
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is no file that is there"):
        read_loads(str(path))
    path.unlink()
    path.write_bytes(b"\xff\x00 no file of loads")
    with pytest.raises(ValueError, match=str(path)):
        read_loads(str(path))
    with pytest.raises(ValueError, match="has no lines of a routing trace"):
        read_loads(str(tmp_path))


def test_loads_are_frozen() -> None:
    loads = Loads(ROWS, np.arange(2), "a test", 1)
    with pytest.raises(ValueError, match="read-only"):
        loads.rows_ILCE[0] = 0
    ROWS[0, 0, 0, 0] = 1  # whose array it was may still


# ``ds-moe-ext loads``.


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setenv("COLUMNS", "200")
    return status(monkeypatch, "loads", *arguments)


def test_loads_are_shown_and_converted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = ("--ranks", "4", "--experts", "16", "--tokens", "64", "--steps", "2", "--layers", "1")
    table, trace = str(tmp_path / "hot.npz"), str(tmp_path / "hot.jsonl")
    assert run(monkeypatch, "hot_rank", *sizes, "--seed", "2", "--out", table) == 0
    stated = capsys.readouterr().out
    assert "hot_rank: 2 steps, 1 layers, 4 ranks of 64 tokens, 16 experts, 2 a token" in stated
    assert stated.count("3.250") == 6 and f"wrote {table}" in stated
    assert run(monkeypatch, table, "--ranks", "8", "--out", trace) == 0
    assert "8 ranks of 32 tokens" in capsys.readouterr().out
    loads, divided = read_loads(table), read_loads(trace)
    assert np.array_equal(divided.rows_ILCE.sum(axis=2), loads.rows_ILCE.sum(axis=2))
    assert run(monkeypatch, "hot_rank", "--out", str(tmp_path / "hot.txt")) == 2
    shown, stated = capsys.readouterr()
    assert "let it end on .npz or .jsonl" in stated and not shown  # before loads are made


def test_figures() -> None:
    rows_IE = np.array([[6, 2, 0, 0], [2, 2, 2, 2], [2, 2, 2, 2], [0, 0, 0, 8]])
    rows_ILCE = np.stack([rows_IE, rows_IE], axis=1)[:, None]
    figures = figures_of(Loads(rows_ILCE, np.array([1, 2, 3, 9]), "a test"))
    assert figures.by_rank_IL[:, 0].tolist() == [2, 1, 1, 2]
    assert figures.hottest_IL[:, 0].tolist() == [3, 1, 1, 4]
    assert figures.unused_IL[:, 0].tolist() == [0.5, 0, 0, 0.75]
    assert figures.moved_L[:, 0].tolist() == [0.5, 0]  # the last step is too far off


@pytest.mark.parametrize(
    ("name", "sizes", "hottest"),
    [
        # Rows of the hottest expert over the mean, mean of the layers; of OLMoE by hand from its
        # counts: (3.02 + 2.66 + 2.50) / 3.
        ("mixtral_8x7b", (8, 2, 32), 1.19),
        ("olmoe_1b_7b", (64, 8, 3), 2.72),
        ("quickstart", (8, 2, 2), 2.17),
    ],
)
def test_loads_that_are_shipped(
    name: str, sizes: tuple[int, int, int], hottest: float, tmp_path: Path
) -> None:
    loads = read_loads(name)
    assert (loads.rows_ILCE.shape[-1], loads.top_k, loads.rows_ILCE.shape[1]) == sizes
    assert figures_of(loads).hottest_IL.mean() == pytest.approx(hottest, abs=0.01)
    file = CONFIGS / f"loads/{name}.json"
    assert file.stat().st_size < 100_000
    assert {"about", "source", "made"} <= json.loads(file.read_text()).keys()
    # As price takes them, on a cluster of other sizes.
    again = read_loads(name, ranks=16, layers=4, tokens=4096, steps=6)
    assert again.rows_ILCE.shape == (6, 4, 16, sizes[0])
    assert (again.rows_ILCE.sum(axis=(2, 3)) == 16 * 4096 * sizes[1]).all()


def test_names_that_nobody_has() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'mixtral_8x7b'\? known: balanced"):
        read_loads("mixtral_8x7")
