# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from ds_moe_ext.hosts.deepspeed.guard import notice_of_old_lock
from tests import ranks

# A busy machine is slow: that is no failure of what is tested.
hypothesis.settings.register_profile(
    "patient",
    deadline=None,
    max_examples=30,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "long", hypothesis.settings.get_profile("patient"), max_examples=5000, print_blob=True
)
hypothesis.settings.load_profile("patient")

ROOT = Path(__file__).parents[1]
SCRIPTS = ("launch", "launch/bench", "launch/gpu_day", "docs")
sys.path[:0] = [str(ROOT / folder) for folder in SCRIPTS]  # as when a script there runs


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "run one of N equal parts of the tests, the first is 1/N"
    parser.addoption("--part", metavar="I/N", default="1/1", help=help_text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, num_parts = map(int, config.getoption("--part").split("/"))
    chosen = items[number - 1 :: num_parts]
    if num_parts > 1:
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def pytest_configure(config: pytest.Config) -> None:
    """Say what all ranks would wait for, until their pools give them up."""
    is_one_of_several = hasattr(config, "workerinput")
    if (reported := notice_of_old_lock()) and not is_one_of_several:
        print(f"tests: {reported}", file=sys.stderr)


@pytest.fixture(scope="session", autouse=True)
def _pools() -> Iterator[None]:
    yield
    ranks.close_pools()


@pytest.fixture(scope="session", autouse=True)
def _shared_memory() -> Iterator[None]:
    """DeepSpeed leaves 66 MiB of it behind each rank that it launches on a CPU."""
    yield
    buffers = set(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*"))
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # a process that has ended, or is another's
            buffers -= {Path(line.split()[-1]) for line in maps.open() if "/dev/shm/" in line}
    for buffer in buffers:
        buffer.unlink(missing_ok=True)
