# SPDX-License-Identifier: Apache-2.0
"""Gather the wheels that a day on GPUs needs where there is no network, for a Python and a torch.

`python launch/wheelhouse.py --python 3.12 --torch 2.11.0 --out build/wheels` here, and there
`pip install --no-index --find-links build/wheels $(cat build/wheels/names.txt)`. Torch, and what it
brings (CUDA's libraries, Triton, numpy), must be there already and are left out. Versions are those
of launch/requirements.txt.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
NEEDED = (
    *("deepspeed", "megatron-core", "transformers", "accelerate", "peft", "rich", "ninja"),
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
)
"""Of launch/requirements.txt: what trains and what the tests of a GPU import."""
PRESENT = ("torch", "numpy")
"""Left out, with all that they need."""
BROUGHT = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")
"""By torch, beside CUDA's libraries and Triton."""
LIMIT_MIB = 64
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17))
"""Newest first; pip takes a wheel of one of these names only, or of any platform."""
PURE_SOURCES = ("deepspeed",)
"""Published as sources, of which a wheel for any Python is made here."""


def pip(*arguments: str) -> None:
    """Run pip of this Python."""
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def pins() -> dict[str, str]:
    """Requirements that are needed, by name."""
    lines = (ROOT / "launch/requirements.txt").read_text().splitlines()
    found = {Requirement(line).name: line for line in lines if line and not line.startswith("#")}
    return {name: found[name] for name in NEEDED}


def target(python: str) -> list[str]:
    """Pip's options for wheels of another machine."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    platforms += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]


def stand_in(folder: Path, version: str) -> str:
    """A requirement: a torch of a version that needs what it brings, and has nothing in it. Pip
    then neither fetches torch nor looks for CUDA's libraries."""
    path, about = folder / f"torch-{version}-py3-none-any.whl", f"torch-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {name}\n" for name in BROUGHT)
    wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as archive:
        metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n{needs}"
        archive.writestr(f"{about}/METADATA", metadata)
        archive.writestr(f"{about}/WHEEL", wheel)
        archive.writestr(f"{about}/RECORD", "")
    return f"torch @ {path.as_uri()}"


def resolved(wanted: Sequence[str], given: argparse.Namespace) -> list[Mapping[str, Any]]:
    """All that is needed, as pip's report has it: nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        where = ["--target", folder, "--find-links", str(given.out)]
        lines = [*wanted, stand_in(Path(folder), given.torch)]
        how = ["--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
        pip("install", *how, *where, *target(given.python), *lines)
        found: list[Mapping[str, Any]] = json.loads(report.read_text())["install"]
    return found


def left(found: Sequence[Mapping[str, Any]], wanted: Sequence[str], python: str) -> Iterator[str]:
    """Name and version of what is reached from what is wanted without passing through what is
    present, nor is brought by it."""
    metadata: dict[str, Any] = {
        canonicalize_name(each["metadata"]["name"]): each["metadata"] for each in found
    }
    environment = {"python_version": python, "sys_platform": "linux", "platform_system": "Linux"}
    environment |= {"platform_machine": "x86_64", "extra": ""}

    def reached(names: Sequence[str], seen: set[str], stops: set[str]) -> set[str]:
        for name in names:
            if name in seen or name in stops or name not in metadata:
                continue
            seen.add(name)
            needs = map(Requirement, metadata[name].get("requires_dist", ()))
            due = [n for n in needs if n.marker is None or n.marker.evaluate(environment)]
            reached([canonicalize_name(need.name) for need in due], seen, stops)
        return seen

    present = reached([*map(canonicalize_name, PRESENT)], set(), set())
    roots = [canonicalize_name(Requirement(line).name) for line in wanted]
    for name in sorted(reached(roots, set(), present - set(roots))):
        yield f"{name}=={metadata[name]['version']}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Download, build, and hold the sum against the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--python", default="3.12", help="there, as 3.12 (%(default)s)")
    add("--torch", default="2.11.0", help="version there (%(default)s)")
    add("--out", type=Path, default=Path("build/wheels"))
    add("--limit_mib", type=float, default=LIMIT_MIB, help="of all wheels (%(default)s)")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    wanted, out = pins(), str(given.out)
    for name in PURE_SOURCES:
        pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, wanted[name])
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, str(ROOT))
    lines = list(wanted.values())
    names = list(left(resolved(lines, given), lines, given.python))
    others = [name for name in names if name.partition("==")[0] not in PURE_SOURCES]
    pip("download", "--quiet", "--no-deps", "-d", out, *target(given.python), *others)
    (given.out / "names.txt").write_text("\n".join([*names, "ds-moe-ext"]) + "\n")
    sizes = {path.name: path.stat().st_size / 2**20 for path in sorted(given.out.glob("*.whl"))}
    for name, mib in sizes.items():
        print(f"{mib:7.2f} MiB  {name}")
    total = sum(sizes.values())
    print(f"{total:7.2f} MiB  in all, of {given.limit_mib:g}")
    return int(total > given.limit_mib)


if __name__ == "__main__":
    sys.exit(main())
