# SPDX-License-Identifier: Apache-2.0
"""The source distribution and the wheel, built; and the wheel, installed where no clone is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "layer_context")
BUILD = """
import sys
from setuptools import build_meta

(_, target) = sys.argv  # which setuptools changes
build_meta.build_sdist(target)
build_meta.build_wheel(target)
"""


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    """What a command printed, in a folder, without the clone on its path."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**clean, "COLUMNS": "200", "DS_ACCELERATOR": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with both, built as ``python -m build --no-isolation`` does."""
    folder = tmp_path_factory.mktemp("built")
    source, target = folder / "source", folder / "dist"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_OUT))
    target.mkdir()
    run(sys.executable, "-c", BUILD, target, folder=source)
    return target


def test_the_source_has_all(built: Path) -> None:
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("ds_moe_ext", "configs", "docs", "examples", "launch", "patches", "tests")
    wanted = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    wanted |= {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}
    wanted |= {"CITATION.cff", "mkdocs.yml", "pyproject.toml", "ruff.toml", "setup.cfg"}
    wanted.add("_ds_moe_ext_autoload.py")
    assert wanted <= names
    assert not [name for name in names if name.endswith(".pyc")]


def test_the_wheel_has_all(built: Path) -> None:
    (file,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(file).namelist())
    within = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "ds_moe_ext").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    within |= {f"ds_moe_ext/{p.relative_to(ROOT)}" for p in (ROOT / "configs").rglob("*.json")}
    within |= {f"ds_moe_ext/{p.relative_to(ROOT)}" for p in (ROOT / "patches").glob("*.py")}
    within.add("_ds_moe_ext_autoload.py")
    beside = {name for name in names if ".dist-info/" in name}
    assert names - beside == within
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in beside)


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which has torch and the rest from this one, but no clone."""
    place = tmp_path_factory.mktemp("installed") / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", place, folder=built)
    python = place / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
    run(*pip, "--no-index", wheel, folder=built)
    (packages,) = place.glob("lib/python*/site-packages")
    # Named so, their own .pth files are not read, by which an editable install is found.
    theirs = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "others.pth").write_text("\n".join(theirs))
    return place / "bin"


@pytest.mark.slow
def test_commands_find_configs_by_name(installed: Path, tmp_path: Path) -> None:
    where = "import ds_moe_ext; print(ds_moe_ext.__file__, ds_moe_ext.__version__)"
    place, version = run(installed / "python", "-c", where, folder=tmp_path).split()
    assert Path(place).is_relative_to(installed.parent)
    command = installed / "ds-moe-ext"
    assert run(command, "--version", folder=tmp_path) == f"ds-moe-ext {version}\n"

    reported = run(command, "doctor", "--model", "mixtral_tiny", folder=tmp_path)
    assert "autoload: on" in reported and "│ out" not in reported
    assert reported.count("MixtralExperts") == 3

    job = tmp_path / "job.json"
    job.write_text(json.dumps({"ds_moe_ext": {"enabled": True, "strategy": "fssdp"}}))
    asked = ("--model", "mixtral_8x7b", "--hardware", "dgx_h100", "--strategies", "ep,fssdp")
    priced = run(command, "price", job, *asked, folder=tmp_path)
    assert "mixtral_8x7b: 46.7 billion weights" in priced and "fastest: " in priced

    figures = run(command, "reproduce", "--help", folder=tmp_path)
    assert "usage" in figures


@pytest.mark.slow
def test_torch_loads_it_where_no_module_of_its_name_is(installed: Path, tmp_path: Path) -> None:
    code = "import sys, torch, ds_moe_ext; print(ds_moe_ext.__file__, len(sys.meta_path))"
    place, finders = run(installed / "python", "-c", code, folder=tmp_path).split()
    assert Path(place).is_relative_to(installed.parent)
    (tmp_path / "ds_moe_ext.py").write_text("")
    place, without = run(installed / "python", "-c", code, folder=tmp_path).split()
    assert (place, int(without)) == (str(tmp_path / "ds_moe_ext.py"), int(finders) - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("deepspeed_mixtral.py", ("--deepspeed_config", "deepspeed_mixtral.json")),
        ("plain_torch.py", ("fssdp",)),
    ],
)
def test_a_job_outside_of_the_clone_trains(
    script: str, arguments: tuple[str, ...], installed: Path, tmp_path: Path
) -> None:
    for path in (ROOT / "examples").glob("*.*"):
        shutil.copy(path, tmp_path)
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    printed = run(
        installed / "python", *ranks, script, *arguments, folder=tmp_path, OMP_NUM_THREADS="1"
    )
    assert "ds_moe_ext: strategy fssdp, 2 ranks" in printed and "step 10: loss" in printed
