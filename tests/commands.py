# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext`` in the process of a test, as from a shell."""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest

from ds_moe_ext import cli


class Done(NamedTuple):
    """How a command ended, and what it stated."""

    returncode: int
    stdout: str
    stderr: str


def status(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """With which a command ends."""
    monkeypatch.setattr(sys, "argv", ["ds-moe-ext", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(str(ended.value))


def done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> Done:
    """How it ends, with all that it states."""
    return Done(status(monkeypatch, *arguments), *capsys.readouterr())
