# SPDX-License-Identifier: Apache-2.0
"""How large the code base is, in lines and files of each part, beside its ceilings.

python launch/size.py
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENDINGS = ("py", "sh", "c")


def files_of(*folders: str, without: str | None = None) -> list[Path]:
    """Source files below folders of the repository, without those below another."""
    found = [path for f in folders for end in ENDINGS for path in (ROOT / f).rglob(f"*.{end}")]
    return [path for path in found if without is None or ROOT / without not in path.parents]


def lines_of(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def benches() -> list[Path]:
    """Files of launch/bench that start something."""
    return [path for path in files_of("launch/bench") if "__main__" in path.read_text("utf-8")]


def sizes() -> list[tuple[str, int, int | None]]:
    """What is counted, how much there is, and its ceiling, if it has one."""
    product = files_of("ds_moe_ext", "patches")
    launch = files_of("launch", without="launch/papers")
    papers, tests = files_of("launch/papers"), files_of("tests")
    return [
        ("product: lines", lines_of(product), 50_000),
        ("product: files", len(product), 200),
        ("launch: lines", lines_of(launch), 6_000),
        ("launch: files", len(launch), 35),
        ("launch: benches", len(benches()), 15),
        ("launch/papers: lines", lines_of(papers), None),
        ("launch/papers: files", len(papers), None),
        ("tests: lines", lines_of(tests), 45_000),
        ("tests/test_house.py: lines", lines_of([ROOT / "tests/test_house.py"]), 200),
    ]


if __name__ == "__main__":
    for name, number, ceiling in sizes():
        beside = "" if ceiling is None else f"  of {ceiling:,}"
        print(f"{name:28}{number:>8,}{beside}")
