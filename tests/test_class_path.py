# SPDX-License-Identifier: Apache-2.0
"""Classes that JSON names by where they are: any way in which a module may have one will do."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_moe_ext.strict import found_at

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
    path = f"{__name__}:Outer.Inner"
    assert found_at(path, "ds_moe_ext.gate", "'a:B'") is Outer.Inner


class Outer:
    class Inner: ...
