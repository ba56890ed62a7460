# SPDX-License-Identifier: Apache-2.0
"""docs/keys.md names every key of the block, and no other, with its default."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_moe_ext.planning.strategy import registered
from ds_moe_ext.strategies.settings import Settings
from ds_moe_ext.strategies.zebra import Profile
from ds_moe_ext.strict import fields_of

PAGE = (Path(__file__).parents[1] / "docs/keys.md").read_text(encoding="utf-8")


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


def on_the_page(first: str, last: str) -> dict[str, str]:
    """Defaults by key of the tables between two headings."""
    part = PAGE.partition(f"\n## {first}\n")[2].partition(f"\n## {last}\n")[0]
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
    page = on_the_page("The block", "Blocks of strategies")
    blocks = {"report", "trace", "waits", "checkpoint", "megatron", *STRATEGIES}
    assert {key: page[key] for key in page if key not in blocks} == wanted
    assert blocks <= page.keys()


def test_keys_of_strategies() -> None:
    wanted = {
        key: as_written(default)
        for name, cls in STRATEGIES.items()
        for key, default in keys_of(cls, f"{name}.")
    }
    wanted |= {key: as_written(default) for key, default in keys_of(Profile, "zebra.profile.")}
    assert on_the_page("Blocks of strategies", "`gate`") == wanted
