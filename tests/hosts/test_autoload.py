# SPDX-License-Identifier: Apache-2.0
"""``import torch`` works whatever lies in our way: a user's modules of our names, a package of ours
that cannot be imported, what we need and is not there. Each with and without the switch."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.hosts.processes import ROOT, answers, run_script
from tests.marks import slow

ON: Mapping[str, str] = {}
OFF = {"DS_MOE_EXT_AUTOLOAD": "0"}
ON_AND_SLOWLY_OFF = pytest.mark.parametrize("switch", [ON, slow(OFF)], ids=["on", "off"])

SCRIPT = """
import sys
import torch
print("answer:", torch.ones(2).sum().item())
print("answer:", "ds_moe_ext" in sys.modules, "ds_moe_ext._autoload" in sys.modules)
"""
ASKS_FOR_IT = """
import ds_moe_ext
print("answer:", ds_moe_ext.__file__, getattr(ds_moe_ext, "mine", None))
"""


def stated(
    folder: Path, code: str, switch: Mapping[str, str], *path: Path
) -> tuple[list[str], str]:
    """Answers of a script in a folder, and all that it printed."""
    script = folder / "script.py"
    script.write_text(code)
    (printed,) = run_script(script, path=path, **switch)
    return [answer.strip() for answer in answers(printed)], printed


@pytest.fixture
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip fills it, for ``PYTHONPATH``: found before the editable install."""
    folder = tmp_path_factory.mktemp("layer_context")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ds_moe_ext", folder / "ds_moe_ext", ignore=ignore)
    for name in ("configs", "patches"):
        shutil.copytree(ROOT / name, folder / "ds_moe_ext" / name, ignore=ignore)
    for module in ROOT.glob("*.py"):
        shutil.copy(module, folder)
    about = folder / "ds_moe_ext-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ds-moe-ext\nVersion: 0.1.0\n")
    reported = importlib.metadata.distribution("ds-moe-ext").read_text("entry_points.txt")
    (about / "entry_points.txt").write_text(reported or "")
    return folder


# A user's module of our name.


@ON_AND_SLOWLY_OFF
@pytest.mark.parametrize("name", ["ds_moe_ext.py", slow("ds_moe_ext/__init__.py")])
def test_a_module_of_our_name_stays_what_it_is(
    name: str, switch: dict[str, str], tmp_path: Path
) -> None:
    beside = tmp_path / name
    beside.parent.mkdir(exist_ok=True)
    beside.write_text("mine = 7\n")
    reported, printed = stated(tmp_path, SCRIPT + ASKS_FOR_IT, switch)
    assert reported == ["2.0", "False False", f"{beside} 7"]
    off = f"ds_moe_ext is off: {beside} has its name"
    assert printed.count(off) == printed.count("ds_moe_ext is off") == (switch is ON)
    assert ("rename it, or set DS_MOE_EXT_AUTOLOAD=0" in printed) == (switch is ON)


@pytest.mark.slow  # likewise
def test_a_module_of_our_name_that_was_imported_before(tmp_path: Path) -> None:
    beside = tmp_path / "ds_moe_ext.py"
    beside.write_text("mine = 7\n")
    reported, printed = stated(tmp_path, ASKS_FOR_IT + SCRIPT, ON)
    assert reported == [f"{beside} 7", "2.0", "True False"]
    assert printed.count(f"ds_moe_ext is off: {beside} has its name") == 1


@pytest.mark.slow
def test_a_script_of_our_name_runs(tmp_path: Path) -> None:
    script = tmp_path / "ds_moe_ext.py"
    script.write_text(SCRIPT)
    (printed,) = run_script(script)
    assert [answer.strip() for answer in answers(printed)] == ["2.0", "False False"]
    assert printed.count(f"ds_moe_ext is off: {script} has its name") == 1


def test_a_folder_of_our_name_is_in_the_way_of_an_editable_install(tmp_path: Path) -> None:
    """As checkpoints have one: the hook of such an install is asked after the script's folder."""
    folder = tmp_path / "ds_moe_ext"
    folder.mkdir()
    reported, printed = stated(tmp_path, SCRIPT, ON)
    assert reported == ["2.0", "False False"]
    assert printed.count(f"ds_moe_ext is off: {folder} has its name") == 1


@pytest.mark.slow  # it is in the way of an editable one, quickly
def test_a_folder_of_our_name_is_not_in_the_way_of_another(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "ds_moe_ext").mkdir()
    reported, printed = stated(tmp_path, SCRIPT + ASKS_FOR_IT, ON, installed)
    assert reported == ["2.0", "True True", f"{installed}/ds_moe_ext/__init__.py None"]
    assert "Warning" not in printed


# What we import, and our own code.


@pytest.mark.slow  # a module in the way is above
@ON_AND_SLOWLY_OFF
@pytest.mark.parametrize("first", ["", "import deepspeed"])
def test_a_module_rich_of_the_users(first: str, switch: dict[str, str], tmp_path: Path) -> None:
    """It is not looked at before a host is imported, which then goes on without us."""
    (tmp_path / "rich.py").write_text("mine = 7\n")
    reported, printed = stated(
        tmp_path, f"{first}{SCRIPT}import rich; print('answer:', rich.mine)", switch
    )
    assert reported == ["2.0", " ".join([str(switch is ON)] * 2), "7"]
    expected = bool(first) and switch is ON
    assert printed.count("ds_moe_ext could not attach to deepspeed and is off") == expected


@ON_AND_SLOWLY_OFF
@pytest.mark.parametrize("name", ["__init__.py", slow("_autoload.py")])
def test_a_package_that_cannot_be_imported(
    name: str, switch: dict[str, str], installed: Path, tmp_path: Path
) -> None:
    (installed / "ds_moe_ext" / name).write_text("def broken(:\n")
    reported, printed = stated(tmp_path, SCRIPT, switch, installed)
    assert reported == ["2.0", "False False"]
    off = "ds_moe_ext cannot be imported and is off: SyntaxError("
    assert printed.count(off) == printed.count("ds_moe_ext cannot") == (switch is ON)
    assert ("install it again, or set DS_MOE_EXT_AUTOLOAD=0" in printed) == (switch is ON)


@pytest.mark.slow  # likewise
def test_a_package_that_has_gone(installed: Path, tmp_path: Path) -> None:
    """Its entry point is left: no other ``ds_moe_ext`` is found, the editable one neither."""
    shutil.rmtree(installed / "ds_moe_ext")
    forbid = "import sys; sys.modules['ds_moe_ext'] = None\n"
    reported, printed = stated(tmp_path, forbid + SCRIPT, ON, installed)
    assert reported == ["2.0", "True False"]
    assert printed.count("ds_moe_ext cannot be imported and is off: ModuleNotFoundError(") == 1


@ON_AND_SLOWLY_OFF
def test_without_numpy(switch: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['numpy'] = None")
    reported, printed = stated(tmp_path, SCRIPT, switch, tmp_path)
    assert reported == ["2.0", " ".join([str(switch is ON)] * 2)]
    assert "ds_moe_ext" not in printed
