# SPDX-License-Identifier: Apache-2.0
"""User-facing pages, messages and docstrings keep to the words of docs/style.md."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EXCEPT = {"docs/style.md"}  # lists the words
REFUSED = {
    r"told|foretold": "log, report, warn, notify; predicted",
    r"who(so)?ever|whichever": "the one that, who or which",
    r"homes?(?= of (ranks?|experts?))|first homes|home ranks?": "owner",
    r"(?<!table )cells?(?! of (a|the|this|that) table)": "EP rank, ETP group",
    r"lanes?": "stream",
    r"trips?": "transfer, dispatch, combine, all-to-all",
    r"flights?|airfields?|cargos?": "transfer, prefetch",
    r"there is to know": "full reference",
    r"(go|goes|going|went|gone) on from": "resume from",
    r"learn(s|ed|t)? the same": "training results are unchanged",
    r"(is|are) said|goes by the name|as it was found": "is called, is set by, unchanged",
    r"reckon(s|ed|ing)?": "predict, count, price",
    r"slept": "simulated by sleeping",
    r"whereof|thereof|therein": "plain words",
}
"""Regular expressions of whole words, and what to write in place."""
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
GAP = "\N{HORIZONTAL ELLIPSIS}"  # in place of what an f-string fills in
PUBLIC = re.compile(r"^::: (\S+)$", re.MULTILINE)


def pages() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if str(path.relative_to(ROOT)) not in EXCEPT]


def sources() -> list[Path]:
    """Files whose strings a person is shown."""
    folders = (ROOT / "ds_moe_ext", ROOT / "patches", ROOT / "launch")
    found = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [*found, ROOT / "docs/known_limits.py"]


def scripts() -> list[Path]:
    return [*sorted((ROOT / "launch").rglob("*.sh")), *sorted((ROOT / "examples").rglob("*.sh"))]


def public_names() -> list[str]:
    """What docs/api.md lists."""
    return PUBLIC.findall((ROOT / "docs/api.md").read_text(encoding="utf-8"))


def violations(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, word and remedy; code, inline too, is not looked at."""
    prose = CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
    for words, remedy in REFUSED.items():
        for match in re.finditer(rf"\b(?:{words})\b".replace(" ", r"\s"), prose, re.IGNORECASE):
            yield prose.count("\n", 0, match.start()) + 1, match[0], remedy


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string literal of two words or more, but for docstrings."""
    passed: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):  # parents come before their children
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            passed.add(node.value)
        if not isinstance(node, (ast.JoinedStr, ast.Constant)):
            continue
        text = None
        if isinstance(node, ast.JoinedStr):
            parts = [part for part in node.values if isinstance(part, ast.Constant)]
            passed.update(parts)
            text = "".join(
                str(p.value) if isinstance(p, ast.Constant) else GAP for p in node.values
            )
        elif isinstance(node.value, str):
            text = None if node in passed else node.value
        if text is not None and len(text.split()) > 1:
            yield node.lineno, text


def docstrings(name: str) -> Iterator[tuple[str, str]]:
    """Name and docstring of a public object, and of the public members of its own."""
    module, _, attribute = name.rpartition(".")
    shown = getattr(importlib.import_module(module), attribute)
    members: dict[str, Any] = dict(vars(shown)) if inspect.isclass(shown) else {}
    own = {key: value for key, value in members.items() if not key.startswith("_")}
    for key, value in {"": shown, **own}.items():
        if callable(value) or isinstance(value, (property, classmethod, staticmethod)):
            yield f"{name}.{key}".rstrip("."), inspect.getdoc(value) or ""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [*pages(), *scripts()], ids=name_of)
def test_pages_keep_to_the_words(path: Path) -> None:
    found = [
        f"{name_of(path)}:{line}: {word!r}: write {remedy}"
        for line, word, remedy in sorted(violations(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def test_messages_keep_to_the_words() -> None:
    found = [
        f"{name_of(path)}:{line}: {word!r}: write {remedy}"
        for path in sources()
        for line, text in strings(path.read_text(encoding="utf-8"))
        for _, word, remedy in violations(text)
    ]
    assert not found, "\n".join(found)


def test_public_docstrings_keep_to_the_words() -> None:
    found = [
        f"{shown}: {word!r}: write {remedy}"
        for name in public_names()
        for shown, text in docstrings(name)
        for _, word, remedy in violations(text)
    ]
    assert not found, "\n".join(found)


def test_what_is_looked_at() -> None:
    source = '''
def _private() -> None:
    """Whoever reads this."""
    print(f"rank {rank} was told {'so'} " "by whoever", "told", {"one lane": 1})
'''
    assert [text for _, text in strings(source)] == [
        f"rank {GAP} was told {GAP} by whoever",
        "one lane",
    ]
    assert len(public_names()) > 20 and len(sources()) > 200 and len(scripts()) > 4
    assert any(text for _, text in docstrings("ds_moe_ext.Strategy"))


def test_what_is_refused_and_what_is_not() -> None:
    refused = (
        "It is told so.",
        "Whoever waits",
        "homes of ranks",
        "the first\nhomes",
        "two lanes",
        "1 cell of 8 ranks",
        "all there is to know",
        "goes on from a checkpoint",
        "four trips",
    )
    assert all([*violations(text)] for text in refused)
    allowed = ("a table cell", "guests", "`told_after_s`", "```\ntold\n```", "planes", "home page")
    assert not any([*violations(text)] for text in allowed)
