# SPDX-License-Identifier: Apache-2.0
"""Blocks of README.md and docs/: JSON is read, commands and files exist, code compiles; lengths."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from ds_moe_ext import cli
from ds_moe_ext.strategies.settings import read_settings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
IMAGINED = "my_package."  # classes that a reader would write
OURS = re.compile(r"(?<![\w/.:*-])(?:configs|examples|launch|patches|tests)/[\w./*-]*\w")


def blocks(*languages: str) -> list[pytest.param]:
    return [
        pytest.param(match[3], id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, match in enumerate(FENCED.finditer(page.read_text(encoding="utf-8")))
        if match[2] in languages
    ]


@pytest.fixture(scope="module")
def commands() -> dict[str, argparse.ArgumentParser]:
    """Parsers of ``ds-moe-ext``, by command."""
    seen: list[argparse.ArgumentParser] = []

    def parse(parser: argparse.ArgumentParser) -> None:
        seen.append(parser)
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        cli.main()
    (found,) = (a for a in seen[0]._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


@pytest.mark.parametrize("text", blocks("json"))
def test_json_is_read(text: str) -> None:
    document = json.loads(text if text.lstrip().startswith(("{", "[")) else f"{{{text}}}")
    if IMAGINED not in text and "ds_moe_ext" in document:
        read_settings(document)


@pytest.mark.parametrize("text", blocks("bash"))
def test_shell_is_parsed(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("text", blocks("python"))
def test_python_compiles(text: str) -> None:
    ast.parse(text)


def unknown(line: str, commands: dict[str, argparse.ArgumentParser]) -> list[str]:
    """The command, or its options, that ``ds-moe-ext`` lacks."""
    words = shlex.split(re.split(r" --(?: |$)", line)[0], comments=True)
    if not words or words[0] == "COMMAND" or words[0].startswith("-"):
        return []
    if words[0] not in commands:
        return words[:1]
    options = commands[words[0]]._option_string_actions
    return [each for each in words if each[:2] == "--" and each.partition("=")[0] not in options]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_files_exist(page: Path, commands: dict[str, argparse.ArgumentParser]) -> None:
    text = page.read_text(encoding="utf-8")
    code = [match[3] for match in FENCED.finditer(text) if match[2] in {"bash", "console"}]
    code += re.findall(r"`([^`]+)`", FENCED.sub("", text))
    joined = "\n".join(code).replace("\\\n", " ")
    lines = re.findall(r"(?:^|\$ )ds-moe-ext (.*)", joined, re.MULTILINE)
    assert [each for line in lines for each in unknown(line, commands)] == []
    assert [path for path in OURS.findall(joined) if not [*ROOT.glob(path)]] == []


def test_pages_are_short() -> None:
    """README in three screens, results in one page, all pages in an hour's reading."""
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PAGES}
    assert lines.pop(ROOT / "README.md") <= 120
    assert lines[ROOT / "docs/results.md"] <= 200
    assert sum(lines.values()) <= 3_000
