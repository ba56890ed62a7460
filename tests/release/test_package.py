# SPDX-License-Identifier: Apache-2.0
"""What a wheel is made of, as setup.cfg says it; and what the package says of itself."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

import ds_moe_ext
from ds_moe_ext import cli
from ds_moe_ext.files.documents import CONFIGS, file_of, names_of
from tests.release.test_versions import PYTHONS, VERSIONS

ROOT = Path(__file__).parents[2]
FOLDERS = {"ds_moe_ext.configs": "configs", "ds_moe_ext.patches": "patches"}
"""Packages that lie beside the package's own folder."""


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    read = configparser.ConfigParser()
    read.read(ROOT / "setup.cfg")
    return read


def test_every_room_is_in_a_wheel(setup: configparser.ConfigParser) -> None:
    """A folder that setup.cfg does not name would be missing there, and nowhere else."""
    code = {path.parent.relative_to(ROOT) for path in (ROOT / "ds_moe_ext").rglob("*.py")}
    rooms = {".".join(folder.parts) for folder in code} | FOLDERS.keys()
    assert set(setup["options"]["packages"].split()) == rooms


def test_every_file_beside_code_is_in_a_wheel(setup: configparser.ConfigParser) -> None:
    packed = {
        path
        for package, patterns in setup["options.package_data"].items()
        for pattern in patterns.split()
        for path in (ROOT / FOLDERS.get(package, package.replace(".", "/"))).glob(pattern)
    }
    beside = {
        path
        for path in (ROOT / "ds_moe_ext").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert packed == beside | set((ROOT / "configs").rglob("*.json"))
    assert ROOT / "ds_moe_ext" / "py.typed" in packed


def test_extras_ask_for_what_patches_are_for(setup: configparser.ConfigParser) -> None:
    """Of each host one range of versions, in setup.cfg, in its patches and on their page."""
    from ds_moe_ext.patches import accelerate, deepspeed, megatron, transformers

    patches = {
        "deepspeed": deepspeed,
        "accelerate": accelerate,
        "transformers": transformers,
        "megatron-core": megatron,
    }
    asked = " ".join(setup["options.extras_require"].values()).split()
    page = (ROOT / "patches" / "README.md").read_text(encoding="utf-8").lower()
    for name, module in patches.items():
        (versions,) = {patch.versions for patch in module.PATCHES}
        assert f"{name}{versions}" in asked
        assert f"{name} {versions}" in page


def test_one_version(
    setup: configparser.ConfigParser,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = setup["metadata"]["version"]
    assert ds_moe_ext.__version__ == wanted
    monkeypatch.setattr("sys.argv", ["ds-moe-ext", "--version"])
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main()
    assert capsys.readouterr().out == f"ds-moe-ext {wanted}\n"
    newest = re.search(r"^## \[(.*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] in (wanted, "Unreleased")
    assert f"\nversion: {wanted}\n" in (ROOT / "CITATION.cff").read_text()


def test_what_is_admitted_was_run(setup: configparser.ConfigParser) -> None:
    """The lowest of a host, of torch and of Python that setup.cfg admits, by a slow test."""
    extras = setup["options.extras_require"]
    wanted = "\n".join((setup["options"]["install_requires"], extras["deepspeed"], extras["hf"]))
    lowest = dict(re.findall(r"^(\w+)>=([\d.]+)", wanted, re.MULTILINE))
    for name in ("torch", "deepspeed", "transformers"):
        assert any(f"{run}.".startswith(f"{name}=={lowest[name]}.") for run in VERSIONS), name
    assert setup["options"]["python_requires"].replace(">=", "python") in PYTHONS


def test_public_names_are_there_and_shown() -> None:
    assert set(ds_moe_ext.__all__) <= set(dir(ds_moe_ext))
    assert all(hasattr(ds_moe_ext, name) for name in ds_moe_ext.__all__)
    assert {"attach", "use", "Strategy", "__version__"} <= set(ds_moe_ext.__all__)


def test_configs_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert file_of("hardware", "dgx_h100") == CONFIGS / "hardware/dgx_h100.json"
    assert file_of("models", "deepseek_v3") == CONFIGS / "models/public/deepseek_v3.json"
    assert file_of("strategies", "no_such") == Path("no_such")
    (tmp_path / "fssdp").touch()  # one's own goes first
    assert file_of("strategies", "fssdp") == Path("fssdp")


def test_no_name_means_two_files() -> None:
    kinds = [folder.name for folder in CONFIGS.iterdir() if folder.is_dir()]
    assert {"hardware", "hosts", "models", "strategies"} <= set(kinds)
    assert sum(len(names_of(kind)) for kind in kinds) == len([*CONFIGS.rglob("*.json")])


@pytest.mark.parametrize("name", sorted(names_of("strategies")))
def test_a_block_is_read_by_its_name(name: str) -> None:
    from ds_moe_ext.strategies.settings import read_file, read_settings

    document = read_file(name, "reported")
    settings, strategy = read_settings(document)
    assert settings.strategy == document["ds_moe_ext"]["strategy"] and strategy is not None


def test_pages_say_the_same_of_versions_and_minutes() -> None:
    """As setup.cfg and the quickstart do."""
    readme, all_pages, megatron, started = (
        (ROOT / name).read_text()
        for name in ("README.md", "docs/README.md", "docs/megatron.md", "launch/quickstart.sh")
    )
    low, below = re.findall(r"megatron-core>=0\.(\d+),<0\.(\d+)", (ROOT / "setup.cfg").read_text())[
        0
    ]
    admitted = f"0.{low} to 0.{int(below) - 1}"
    assert admitted in readme and admitted in megatron.splitlines()[2]
    (minutes,) = re.findall(r"(\w+) minutes on two quiet cores", started)
    assert f"trains and compares: {minutes.lower()} minutes" in readme
    assert f"`bash launch/quickstart.sh` ({minutes.lower()} minutes" in all_pages


def test_every_source_names_its_licence() -> None:
    for folder in ("ds_moe_ext", "patches", "launch", "docs", "examples", "tests"):
        for path in (ROOT / folder).rglob("*.*"):
            is_code = path.suffix in {".py", ".sh", ".c", ".css", ".js"}
            head = path.read_text()[:120] if is_code else ""
            assert not head or "SPDX-License-Identifier: Apache-2.0" in head, path
