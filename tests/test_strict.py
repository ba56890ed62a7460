# SPDX-License-Identifier: Apache-2.0
"""Records from JSON: what lists and objects have in them is checked as all else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest

from ds_moe_ext.strict import Bounds, found_at, read_record


@dataclass(frozen=True)
class Inner:
    name: str


@dataclass(frozen=True)
class Outer:
    owners: Mapping[str, Sequence[int]]
    sums: dict[str, list[int | None]] | None = None
    rates: float | list[float] = 1.0
    inner: tuple[Inner, ...] | list[Inner] = ()
    anything: list[Any] | None = None


def test_contents_are_read_as_their_types_say() -> None:
    values = {
        "owners": {"a": [0, 1], "b": []},
        "sums": {"file": [3, None]},
        "rates": [1, 2.5],
        "inner": [{"name": "x"}],
        "anything": [True, "x", [1, {}]],
    }
    got = read_record(Outer, values, "it")
    assert got == Outer(**(values | {"inner": (Inner("x"),)}))
    assert isinstance(got.rates, list) and all(type(rate) is float for rate in got.rates)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"owners": {"a": [0, "1"]}}, "it.owners['a'][1] is '1', but must be an integer"),
        ({"owners": {"a": [True]}}, "it.owners['a'][0] is True, but must be an integer"),
        ({"owners": {"a": "01"}}, "it.owners['a'] is '01', but must be a list"),
        ({"owners": {"a": None}}, "it.owners['a'] is None, but must be a list"),
        ({"owners": [[0]]}, "it.owners is [[0]], but must be an object"),
        (
            {"owners": {}, "sums": {"f": [1.5]}},
            "it.sums['f'][0] is 1.5, but must be an integer or null",
        ),
        ({"owners": {}, "rates": [1, {}]}, "it.rates[1] is {}, but must be a number"),
        ({"owners": {}, "inner": [{"nam": "x"}]}, "it.inner[0] has no key 'nam'"),
    ],
)
def test_what_is_wrong_in_them_is_named_by_its_place(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_record(Outer, values, "it")
    assert str(caught.value).startswith(expected)


# Classes that JSON names by where they are: any way in which a module may have one will do.


LAZY = """
def __getattr__(name):
    if name == "Late":
        from lazy_package.inner import Late
        return Late
    raise AttributeError(name)
"""


def test_a_package_may_load_its_classes_when_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lazy_package"
    package.mkdir()
    (package / "__init__.py").write_text(LAZY)
    (package / "inner.py").write_text("class Late: pass")
    monkeypatch.syspath_prepend(tmp_path)
    late = found_at("lazy_package:Late", "ds_moe_ext.strategy", "'a:B'")
    assert late is found_at("lazy_package.inner:Late", "ds_moe_ext.strategy", "'a:B'")
    with pytest.raises(ValueError, match=r"'lazy_package:Never'.*AttributeError.*as 'a:B'"):
        found_at("lazy_package:Never", "ds_moe_ext.strategy", "'a:B'")


def test_a_class_may_lie_in_a_class() -> None:
    path = f"{__name__}:Enclosing.Inner"
    assert found_at(path, "ds_moe_ext.gate", "'a:B'") is Enclosing.Inner


class Enclosing:
    class Inner: ...


@dataclass
class Bounded:
    count: Annotated[int, Bounds(1, 8)] | None = None
    shares: list[Annotated[float, Bounds(0, 1)]] = field(default_factory=list)
    rest: Annotated[int, Bounds(0)] = 0


def test_numbers_are_held_against_their_bounds() -> None:
    assert read_record(Bounded, {"count": 8, "shares": [0, 1], "rest": 2**70}, "it") == Bounded(
        8, [0.0, 1.0], 2**70
    )
    assert read_record(Bounded, {"count": None}, "it").count is None
    for values, expected in (
        ({"count": 9}, "it.count is 9; it must be an integer from 1 to 8"),
        ({"count": "9"}, "it.count is '9', but must be an integer or null"),
        ({"shares": [1, 1.5]}, "it.shares[1] is 1.5; it must be a number from 0 to 1"),
        ({"rest": -1}, "it.rest is -1; it must be an integer of at least 0"),
    ):
        with pytest.raises(ValueError) as caught:
            read_record(Bounded, values, "it")
        assert str(caught.value) == expected
