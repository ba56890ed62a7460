# SPDX-License-Identifier: Apache-2.0
"""A report.json with values that no run has is refused by key and value, and never drawn."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_moe_ext.commands.report import draw
from ds_moe_ext.report.page import page_of
from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.strict import MOST
from tests.test_marked_pages import whole_run
from tests.test_rank_figures import with_ranks
from tests.test_report import added, copied, looked_at, worked
from tests.test_time_saved import chosen

Path_ = tuple[str | int, ...]
SIGNED = ("loss_G", "start_s", "end_s")  # seconds are from a start, which a task may precede


def numbers_of(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Where numbers are: of each list the first and the last."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key != "balance_by_layer":  # which is worked out anew
                yield from numbers_of(each, (*path, key))
    elif isinstance(value, list):
        for at in {0, len(value) - 1} if value else ():
            yield from numbers_of(value[at], (*path, at))
    elif isinstance(value, (int, float)):
        yield path


def key_of(path: Path_) -> str:
    return "report" + "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in path)


def with_value(path: Path_, value: Any) -> str:
    document = whole_run()
    inner: Any = document
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return json.dumps(document)


RUNS = (worked, copied, added, looked_at, with_ranks, chosen)


@pytest.mark.parametrize(
    "run", [*(make() for make in RUNS), RunRecord.from_json(json.dumps(whole_run()))]
)
def test_json_round_trip(run: RunRecord) -> None:
    """With what is not known, too, which JSON calls null."""
    text = run.to_json()
    assert "NaN" not in text
    again = RunRecord.from_json(text)
    np.testing.assert_equal(dataclasses.asdict(again), dataclasses.asdict(run))
    assert again.rows_ILE.dtype == np.int64
    assert again.to_json() == text and page_of(again) == page_of(run)


PATHS = sorted(numbers_of(whole_run()), key=key_of)


@pytest.mark.parametrize("path", PATHS, ids=key_of)
def test_every_number_has_its_rule(path: Path_) -> None:
    is_loss, is_signed = "loss_G" in path, any(name in path for name in SIGNED)
    may_lack = any(name in path for name in ("looks", "pace")) and "steps_G" not in path
    may_lack = may_lack and path[-1] != "num_nodes"
    hostile = {
        "a string": "7",
        "true": True if len(path) == 1 else "true",
        "too large": 1e308,
        "an integer too large": 10**30,
        "infinite": math.inf,
        "negative": -1,
        "not a number": math.nan,
    }
    for name, value in hostile.items():
        legitimate = is_loss and isinstance(value, (int, float)) and not isinstance(value, bool)
        legitimate |= name == "not a number" and may_lack
        legitimate |= name == "negative" and is_signed
        if not legitimate:
            with pytest.raises(ValueError) as caught:
                RunRecord.from_json(with_value(path, value))
            parts = [part for part in path if isinstance(part, str)]
            assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_page_is_of_true_values(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for where, value in ((("steps_I", 0), math.nan), (("world_size",), 1e308)):
        path.write_text(with_value(where, value))
        with pytest.raises(
            ValueError, match=rf"report\.{where[0]}.* is {re.escape(str(value))}, but"
        ):
            draw(path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, -2.5, None])
def test_losses_may_be_any_number(loss: float | None) -> None:
    """As where training went wrong, or its loss is a log-likelihood."""
    run = RunRecord.from_json(with_value(("ranks", "pace", "loss_G", 0), loss))
    assert run.ranks is not None
    assert np.array_equal(run.ranks.pace.loss_G[:1], [math.nan if loss is None else loss], True)
    page = page_of(run)
    assert "Step time, loss and memory over the steps" in page and "Infinity" not in page


def longer(values: list[Any]) -> list[Any]:
    return [*values, values[-1]]


@pytest.mark.parametrize(
    ("path", "change", "expected"),
    [
        (("steps_I",), lambda steps: steps[::-1], "report.steps_I[1] is 10, but must be more than"),
        (("layers", 0, "home_E", 0), lambda _: 2, "report.layers[0].home_E[0] names 2, but must"),
        (
            ("layers", 0, "home_E"),
            longer,
            "report.layers[0].home_E has 5 entries, but must have 4",
        ),
        (("rows_ILE",), longer, "report.rows_ILE has shape [3, 2, 4], but this run needs"),
        (("rows_ILE", 0, 0), longer, "report.rows_ILE has lists of different lengths"),
        (
            ("rows_ILE", 0, 0, 0),
            lambda _: 1.5,
            "report.rows_ILE has entries that are not 64-bit integers",
        ),
        (("rows_ILE", 0, 0, 0), lambda _: MOST, "report.rows_ILE adds up to"),
        (("looks", "left_IL"), longer, "report.looks.left_IL has shape [3, 2]"),
        (("placements", "moves", 0, "layer"), lambda _: 2, "placements.moves[0] names 2, but"),
        (("placements", "copied_to", 0, 0), lambda _: [2], "copied_to[0][0][0] names 2, but"),
        (("placements", "copied_to"), longer, "copied_to has 3 entries, but must have 2"),
        (("placements", "added", "to", 0, 1), lambda _: [[9, 1]], "added.to[0][1][0] names 9"),
        (("placements", "added", "to", 0, 1), lambda _: [[1]], "is [1], but must have 2 entries"),
        (("ranks", "sent_s_R"), longer, "report.ranks.sent_s_R has shape [3]"),
        (("ranks", "seconds_KR"), longer, "report.ranks.seconds_KR has shape"),
        (("ranks", "pace", "step_s_G"), longer, "report.ranks.pace.step_s_G has shape"),
        (("ranks", "ep_rank_R"), longer, "report.ranks.ep_rank_R has 3 entries"),
        (("ranks", "bad_scores"), longer, "but must have 3 entries"),
        (("timeline", 1, "end_s"), lambda _: 1.5, "report.timeline[1].end_s is 1.5, before start"),
        (("timeline", 1, "bound_by"), lambda _: 1, "timeline[1].bound_by is 1, but must be a task"),
        (("timeline", 0, "bound_by"), lambda _: 4, "timeline[1].bound_by is 0, but must be a task"),
        (("timeline", 0, "bound_by"), lambda _: 5, "timeline[0].bound_by is 5, but must be a task"),
        (("timeline",), lambda _: {}, "report.timeline is {}, but must be a list"),
        (("layers",), lambda _: None, "report.layers is None, but must be a list"),
        (("versions",), lambda _: {"a": 1}, "report.versions['a'] is 1, but must be a string"),
    ],
)
def test_parts_fit_each_other(path: Path_, change: Callable[[Any], Any], expected: str) -> None:
    inner: Any = whole_run()
    for step in path:
        inner = inner[step]
    with pytest.raises(ValueError) as caught:
        RunRecord.from_json(with_value(path, change(inner)))
    assert expected in str(caught.value)
