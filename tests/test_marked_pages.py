# SPDX-License-Identifier: Apache-2.0
"""Pages of files whose strings are markup: it is shown as text, and a browser runs none of it."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from papers.figure import Claim, Curve, Figure, Paper, Row
from papers.figure_page import page_of as paper_page

from ds_moe_ext import cli
from ds_moe_ext.commands.report import draw
from ds_moe_ext.report.charts import chart_files
from ds_moe_ext.report.markup import Html
from ds_moe_ext.report.page import html_document, page_of
from ds_moe_ext.report.record import RunRecord, TracedRecord
from ds_moe_ext.report.two_runs import Shown, page_beside
from tests.marks import slow
from tests.pricing.test_price import ASKED, JOB, TINY, cluster
from tests.test_rank_figures import with_ranks
from tests.test_report import TERMS, added, looked_at, step_of_two_layers
from tests.test_time_saved import chosen

IMAGE = "dispatch<img src=x onerror=alert(1)>\"onmouseover=\"x'onclick='x"  # may name a file
MARK = f"{IMAGE}</title></svg></style></script><script>alert(1)</script><b>"


class Shape(HTMLParser):
    """What a browser acts on: tags, their attributes, scripts and style sheets."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.attributes: set[tuple[str, str]] = set()
        self.code: list[str] = []  # of scripts that run, and of style sheets
        self.policy = ""
        self._is_code = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.attributes |= {(tag, name) for name in ("", *given)}
        for name in ("src", "href"):
            assert given.get(name, "data:").startswith("data:"), given
        self._is_code = tag in ("script", "style") and "type" not in given
        if self._is_code:
            self.code.append("")
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]

    def handle_endtag(self, tag: str) -> None:
        self._is_code = False

    def handle_data(self, data: str) -> None:
        if self._is_code:
            self.code[-1] += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)


def stated(page: str) -> str:
    """All that a page says, in its drawings too, after these were found to hold no script."""
    drawings = chart_files(page).values()
    for drawing in drawings:
        for each in ET.fromstring(drawing).iter():
            assert each.tag.rpartition("}")[2] in DRAWS, each.tag
            assert not [name for name in each.attrib if name.startswith("on")]
    return "".join([page, *drawings])


DRAWS = {"svg", "defs", "style", "g", "path", "use", "text", "clipPath", "rect", "image"}


def check_same_shape(marked: str, plain: str) -> None:
    ours, theirs = Shape(marked), Shape(plain)
    assert ours.attributes <= theirs.attributes, ours.attributes - theirs.attributes
    assert not [name for _, name in ours.attributes if name.startswith("on")]
    assert ours.code == theirs.code and ours.policy == theirs.policy
    stated(marked)


def whole_run() -> dict[str, Any]:
    """A report.json with all that a page has a place for."""
    run = dataclasses.replace(
        looked_at(),
        placements=added().placements,
        traced=TracedRecord(step_of_two_layers(), 10.0),
        terms=TERMS,
        choices=chosen().choices,
        ranks=with_ranks().ranks,
    )
    document: dict[str, Any] = json.loads(run.to_json())
    document["ranks"]["device"] = {"name": "cpu", "num_cores": 1}
    document["ranks"]["bad_scores"] = [5, 1, 1]
    return document


def strings_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every string with the key that it stands under; of keys that a file makes up, with ``name``
    of the object, in brackets."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list):
        for each in value:
            yield from strings_of(each, key)
    elif isinstance(value, dict):
        for name, each in value.items():
            if key in FREE:
                yield f"{key}[]", name
            yield from strings_of(each, name if key not in FREE else key)


FREE = ("versions", "seconds_by_kind", "expected_s")
"""Objects whose keys a file makes up."""
UNSEEN = {"chunk", "expected_s[]", "kinds_K"}
"""No page shows these."""
KEYS = sorted({key for key, _ in strings_of(whole_run())})


def marked(value: Any, marks: Mapping[str, str], key: str = "") -> Any:
    """With its mark behind every string whose key has one."""
    if isinstance(value, str):
        return value + marks.get(key, "")
    if isinstance(value, list):
        return [marked(each, marks, key) for each in value]
    if isinstance(value, dict):
        is_free = key in FREE
        return {
            (name + marks.get(f"{key}[]", "") if is_free else name): marked(
                each, marks, key if is_free else name
            )
            for name, each in value.items()
        }
    return value


def record_of(document: Any) -> RunRecord:
    return RunRecord.from_json(json.dumps(document))


def test_a_report_has_strings_of_all_kinds() -> None:
    wanted = {
        "strategy",
        "kind",
        "name",
        "lane",
        "phase",
        "layer",
        "chunk",
        "told",
        "kinds_K",
    }
    assert wanted | {f"{name}[]" for name in FREE} <= set(KEYS)


WORDS = ("strategy", "kind", "name", "lane", "phase")
"""By these a page chooses what it shows: each is marked alone, so that the rest is known."""


@functools.cache
def plain_pages() -> tuple[str, str]:
    """Of a run, and of two."""
    run = record_of(whole_run())
    return page_of(run), page_beside(Shown("ours", run), Shown("theirs", run))


@pytest.mark.parametrize(
    "keys",
    [KEYS, *(slow([word]) for word in WORDS), [key for key in KEYS if key not in WORDS]],
    ids=str,
)
def test_marked_reports(keys: list[str]) -> None:
    """All strings at once, and some; each key has a mark of its own."""
    marks = {key: MARK.replace("alert(1)", f"alert({number})") for number, key in enumerate(keys)}
    run = record_of(marked(whole_run(), marks))
    page = page_of(run)
    check_same_shape(page, plain_pages()[0])
    shown = {key for number, key in enumerate(keys) if f"alert({number})" in stated(page)}
    if keys is not KEYS:
        assert shown == {*keys} - UNSEEN
    else:
        assert shown
        beside = page_beside(Shown("ours", run), Shown("theirs", record_of(whole_run())))
        check_same_shape(beside, plain_pages()[1])


def test_marked_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs are called by their folders; charts are files of their own."""
    texts = {}
    for name in ("plain", IMAGE):
        for folder in (tmp_path / name, tmp_path / name / "other"):
            folder.mkdir()
            document = (
                whole_run() if name == "plain" else marked(whole_run(), dict.fromkeys(KEYS, MARK))
            )
            (folder / "report.json").write_text(json.dumps(document))
        folder = tmp_path / name
        beside = folder / "other" / "report.json"
        draw(folder / "report.json", beside, folder / "charts")
        texts[name] = (
            (folder / "beside.html").read_text("utf-8"),
            [path.read_text("utf-8") for path in (folder / "charts").iterdir()],
        )
    check_same_shape(texts[IMAGE][0], texts["plain"][0])
    assert texts[IMAGE][0].count("alert(1)") > 20
    assert any("alert(1)" in text for text in texts[IMAGE][1])
    assert len(texts[IMAGE][1]) == len(texts["plain"][1]) > 0


def test_marked_papers() -> None:
    def page(mark: str) -> str:
        texts = (f"text{mark}",)
        figure = Figure(
            name=f"Figure{mark}",
            title=f"title{mark}",
            rows=(Row(name=f"row{mark}", paper=2.0, ours=3.0),),
            claims=(Claim(f"claim{mark}", True), Claim(f"other{mark}", False)),
            assumed=texts,
            because=f"because{mark}",
            curves=(Curve(f"curve{mark}", (f"1{mark}", f"2{mark}"), (1.0, 3.0)),),
        )
        paper = Paper(
            name=f"name{mark}",
            title=f"title{mark}",
            inputs=texts,
            assumed=texts,
            fitted=texts,
            left_out=texts,
            figures=(),
        )
        return paper_page([(paper, [figure])])

    check_same_shape(page(MARK), page(""))
    assert page(MARK).count("alert(1)") >= 14


def test_marked_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {}
    for mark, file_mark in (("", ""), (MARK, IMAGE)):
        folder = tmp_path / (file_mark or "plain")
        folder.mkdir()
        model = folder / f"tiny{file_mark}.json"
        model.write_text(json.dumps({**TINY, "hidden_size": 32, "vocab_size": 100}))
        (folder / "job.json").write_text(json.dumps(JOB))
        device = cluster(1e9).device
        device = dataclasses.replace(
            device, name=device.name + mark, memory_bytes=16 * 2**30, memory_bytes_per_s=1e9
        )
        hardware = cluster(device=device)
        hardware = dataclasses.replace(
            hardware, name=hardware.name + mark, source=hardware.source + mark
        )
        (folder / "two.json").write_text(hardware.to_json())
        monkeypatch.chdir(folder)
        words = ["job.json", "--model", model.name, *ASKED[2:], "--html", "page.html"]
        monkeypatch.setattr(sys, "argv", ["ds-moe-ext", "price", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        pages[mark] = (folder / "page.html").read_text("utf-8")
    check_same_shape(pages[MARK], pages[""])
    assert pages[MARK].count("alert(1)") >= 3


# The type, and what stands behind it.


def test_what_is_no_markup_is_escaped() -> None:
    assert Html("<b>{}</b>").format("<i>") == "<b>&lt;i&gt;</b>"
    assert Html("<b>{}</b>").format(Html("<i>")) == "<b><i></b>"
    assert Html("<b>{:.2f}</b>").format(1) == "<b>1.00</b>"
    assert Html(", ").join(["<i>", Html("<b>")]) == "&lt;i&gt;, <b>"
    assert Html("<b>") + "<i>" == "<b>&lt;i&gt;" and "<i>" + Html("<b>") == "&lt;i&gt;<b>"
    forgotten = Html("{}").format(f"<b>{Html('<i>')}</b>")
    assert forgotten == "&lt;b&gt;&lt;i&gt;&lt;/b&gt;"
    assert Html.escape("\"'&\x00\t\ud800") == "&quot;&#x27;&amp;\ufffd\t\ufffd"


def test_the_policy_lets_nothing_run() -> None:
    shape = Shape(html_document("title", [Html("<p></p>")]))
    rules = dict(rule.split(" ", 1) for rule in shape.policy.split("; "))
    (style,) = shape.code
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert rules == {
        "default-src": "'none'",
        "style-src-elem": f"'sha256-{digest}'",
        "style-src-attr": "'unsafe-inline'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
