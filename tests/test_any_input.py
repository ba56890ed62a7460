# SPDX-License-Identifier: Apache-2.0
"""What is nearly right is read, or refused in one line: blocks, planners' jobs, Megatron's flag
file, and the files that ``price`` and ``doctor`` are given.

``pytest tests/test_any_input.py --hypothesis-profile long`` draws fifty times as many.
"""

from __future__ import annotations

import copy
import io
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext import cli
from ds_moe_ext.commands.plan import plan_text
from ds_moe_ext.hosts.megatron import active_settings
from ds_moe_ext.strategies.settings import BLOCK, read_settings
from tests.marks import slow
from tests.test_plan_jobs import JOBS
from tests.test_rank_figures import with_ranks

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
BLOCKS = {path.stem: json.loads(path.read_text()) for path in CONFIGS.glob("strategies/*.json")}
JOB = CONFIGS / "hosts/deepspeed_zero1.json"
HARDWARE = CONFIGS / "hardware/dgx_h100.json"
MODEL = CONFIGS / "models/mixtral_tiny.json"
PRICE = (
    *("price", str(JOB), "--hardware", str(HARDWARE), "--model", str(MODEL)),
    *("--strategies", "ep,fssdp"),
)
REPORT = "report.json"
COMMANDS = {
    "price, job": (PRICE, str(JOB), JOB.read_bytes()),
    "price, hardware": (PRICE, str(HARDWARE), HARDWARE.read_bytes()),
    "price, model": (PRICE, str(MODEL), MODEL.read_bytes()),
    "report": (("report", REPORT), REPORT, with_ranks().to_json().encode()),
    "doctor, model": (("doctor", "--model", str(MODEL)), str(MODEL), MODEL.read_bytes()),
}
"""Words, which of them is a file, and what is in it."""
FEWER = hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 10)
"""Of what takes a tenth of a second."""

VALUES = st.sampled_from(
    [
        *(None, True, False, "", "auto", "ep", "zz", "1", [], {}, [[]], {"a": 1}, [None]),
        *(-1, 0, 1, 2, 3, 7, 40, 2**70, -0.5, 0.3, 1e-300, 1e308, math.inf, -math.inf, math.nan),
    ]
)
Place = tuple[Any, Any]  # a list or an object of a document, and where in it


def places(document: Any) -> Iterator[Place]:
    """All of it, from the top."""
    within = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in within:
        yield document, key
        if isinstance(value, (dict, list)):
            yield from places(value)


def replace(holder: Any, key: Any, value: Any) -> None:
    holder[key] = value


def remove(holder: Any, key: Any, _: Any) -> None:
    del holder[key]


def misspell(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict):
        holder[key[1:]] = holder.pop(key)
    else:
        holder.append(value)


@st.composite
def nearly(draw: st.DrawFn, document: Any) -> Any:
    """The document, with one to three things in it changed."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        found = [*places(changed)]
        if found:
            holder, key = found[draw(st.integers(0, len(found) - 1))]
            change = draw(st.sampled_from([replace, replace, remove, misspell]))
            change(holder, key, copy.deepcopy(draw(VALUES)))
    return changed


def check_line(reported: str) -> None:
    assert reported and len(reported.splitlines()) == 1 and len(reported) < 2000, reported


@pytest.mark.parametrize("name", BLOCKS)
@given(data=st.data())
def test_blocks(name: str, data: st.DataObject) -> None:
    document = data.draw(nearly(BLOCKS[name]))
    try:
        settings, strategy = read_settings(document)
    except ValueError as error:
        check_line(str(error))
        assert str(error).startswith((BLOCK, "the document"))
    else:
        assert (strategy is not None) == settings.enabled


@pytest.mark.parametrize("name", JOBS)
@given(data=st.data())
def test_jobs_of_planners(name: str, data: st.DataObject) -> None:
    text = json.dumps(data.draw(nearly(JOBS[name]))).encode()
    try:
        json.loads(plan_text(name, text))
    except ValueError as error:
        check_line(str(error))


@FEWER
@given(st.sampled_from([*BLOCKS.values()]).flatmap(nearly))
def test_a_flag_file_of_megatron(document: Any) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            active_settings.read(document)
    except ValueError as error:
        check_line(str(error))


def flip(text: bytes, place: int, bit: int) -> bytes:
    place %= len(text)
    return text[:place] + bytes([text[place] ^ (1 << bit)]) + text[place + 1 :]


def cut(text: bytes, place: int, _: int) -> bytes:
    return text[: place % len(text)]


def of_bytes(text: bytes) -> st.SearchStrategy[bytes]:
    """With a bit flipped, or an end missing."""
    damages: list[Callable[[bytes, int, int], bytes]] = [flip, cut]
    places = st.integers(0, 2**20)
    return st.builds(
        lambda damage, place, bit: damage(text, place, bit),
        *(st.sampled_from(damages), places, st.integers(0, 7)),
    )


def as_bytes(document: Any) -> bytes:
    return json.dumps(document).encode()


@pytest.mark.parametrize("name", [*[*COMMANDS][:-1], slow("doctor, model")])
@FEWER
@given(data=st.data())
def test_files_of_commands(
    name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    words, path, text = COMMANDS[name]
    given = data.draw(of_bytes(text) | nearly(json.loads(text)).map(as_bytes))
    file = tmp_path_factory.getbasetemp() / name / REPORT
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(given)
    argv = ["ds-moe-ext", *(str(file) if word == path else word for word in words)]
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", argv),
        redirect_stdout(out),
        redirect_stderr(err),
        warnings.catch_warnings(),
        pytest.raises(SystemExit) as ended,
    ):
        warnings.simplefilter("ignore")
        cli.main()
    if ended.value.code == 2:
        check_line(err.getvalue())
        assert err.getvalue().startswith("ds-moe-ext: ")
    else:
        assert out.getvalue()  # what it costs, or why no way can be
