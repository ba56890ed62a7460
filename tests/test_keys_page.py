# SPDX-License-Identifier: Apache-2.0
"""docs/keys.md and strategies' pages name every key of the block, with its default."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_moe_ext.planning.strategy import registered
from ds_moe_ext.strategies.settings import Settings
from ds_moe_ext.strategies.zebra import Profile
from ds_moe_ext.strict import fields_of

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "keys.md").read_text(encoding="utf-8")


STRATEGIES = {n: c for n, c in registered().items() if c.__module__.startswith("ds_moe_ext.")}


def keys_of(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each key of a record with its default, those of records within by their full names."""
    for field in fields_of(cls):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if dataclasses.is_dataclass(default) and field.name != "hooks":
            yield from keys_of(type(default), f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, [] if field.name == "hooks" else default


def on_the_page(page: str, heading: str, end: str = "\n## ") -> dict[str, str]:
    """Defaults by key of the tables below a heading."""
    part = page.partition(f"\n## {heading}\n")[2].partition(end)[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", part, re.M)
    return {name: default for keys, default in rows for name in re.findall(r"`(.*?)`", keys)}


def as_written(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "needed"
    if isinstance(default, bool | int | float) or default is None:
        return json.dumps(default)
    return f"`{json.dumps(default)}`"


def test_keys_of_the_block() -> None:
    wanted = {key: as_written(default) for key, default in keys_of(Settings)}
    page = on_the_page(PAGE, "The block", "\n## Blocks of strategies")
    blocks = {"report", "trace", "waits", "checkpoint", "megatron", *STRATEGIES}
    assert {key: page[key] for key in page if key not in blocks} == wanted
    assert blocks <= page.keys()


@pytest.mark.parametrize("name", STRATEGIES)
def test_keys_of_a_strategy(name: str) -> None:
    wanted = {key: as_written(default) for key, default in keys_of(STRATEGIES[name])}
    (row,) = re.findall(rf"^\| \[`{name}`\].*? \| (.*) \|$", PAGE, re.M)
    assert {*re.findall(r"`(.*?)`", row)} == wanted.keys()
    if name == "zebra":
        wanted |= {key: as_written(default) for key, default in keys_of(Profile, "profile.")}
    page = (DOCS / f"strategies/{name}.md").read_text(encoding="utf-8")
    assert on_the_page(page, "Keys") == wanted
