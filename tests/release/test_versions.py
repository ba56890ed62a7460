# SPDX-License-Identifier: Apache-2.0
"""Other versions of hosts, of torch and of Python, each in an environment of its own: some quick
tests, of each strategy one row. ``docs/versions.md`` has what came of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = (
    "deepspeed==0.19.7",
    "transformers==5.5.0",
    "transformers==5.14.1",
    "transformers==5.24.0",
    "torch==2.9.1",
    "torch==2.10.0",
    "torch==2.11.0",
    "torch==2.12.0",
    "torch==2.14.1",
)
PYTHONS = ("python3.10", "python3.12", "python3.13")
ROWS = (
    "ep curve mixtral zero2 2 ranks",
    "ep native ep_size 2, 2 EP ranks",
    "sharded gradients mixtral 2 ranks all EP ranks",
    "fssdp all at once 4 ranks",
    "prophet shadows 2 ranks",
    "esp gpt_moe 4 ranks by 2",
    "prophet noisy gate",
    "zebra 2+2 x 1, moved [0, 1]",
)
TESTS = (
    *(f"test_configurations.py::test_equals_stock[{row}]" for row in ROWS),
    "test_checkpoint.py::test_another_layout_goes_on",
    "test_huggingface.py::test_equals_stock_in_float64[mixtral-1]",
    "test_huggingface.py::test_equals_stock_in_float64[qwen3_moe-1]",
    "test_huggingface.py::test_equals_stock_in_float64[gpt_oss-1]",
    "test_huggingface.py::test_all_experts_of_a_family_are_known",
    "test_divided.py::test_learns_what_deepspeed_alone_learns[Way.AUTOTP-1-strategy0]",
    "test_torch.py::test_learns_what_one_rank_does[ep-fsdp-4]",
    "test_megatron_equal.py::test_equals_stock[ep-EP2, distributed, overlapped]",
    "test_megatron_equal.py::test_equals_stock[varied-PP2 VPP2 EP2]",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


INSTALL = ("-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-compile")


def with_version(asked: str, folder: Path) -> None:
    """An environment with that version, and all else from this one. Torch comes with what it loads:
    several GB."""
    venv.create(folder, with_pip=False)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    whole = () if asked.startswith(("torch", "transformers")) else ("--no-deps",)
    subprocess.run([sys.executable, *INSTALL, *whole, "--target", str(own), asked], check=True)
    behind = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (own / "behind.pth").write_text(behind)
    name, _, version = asked.partition("==")
    reported = _set_by(folder, f"import importlib.metadata as m; print(m.version({name!r}))")
    assert reported == version


def with_python(name: str, folder: Path) -> None:
    """An environment of that Python, with what is pinned; of what has dropped that Python the
    newest version that has not."""
    found = shutil.which(name)
    if found is None or subprocess.run([found, "--version"], check=False).returncode:
        pytest.skip(f"no {name} on PATH")  # pyenv's is there for versions that are not chosen, too
    subprocess.run([found, "-m", "venv", folder], check=True)
    pinned = (ROOT / "launch/requirements.txt").read_text().replace("==", "<=")
    at_most = folder / "requirements.txt"
    at_most.write_text(pinned)
    torch = next(line for line in pinned.splitlines() if line.startswith("torch<="))
    for wanted in ((torch,), ("-r", at_most), ("--no-deps", "-e", ROOT)):
        subprocess.run([folder / "bin/python", *INSTALL, *wanted], check=True)
    reported = _set_by(folder, "import sys; print('python%d.%d' % sys.version_info[:2])")
    assert reported == name


def _set_by(folder: Path, program: str) -> str:
    command = [folder / "bin/python", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


MAKERS = {**dict.fromkeys(VERSIONS, with_version), **dict.fromkeys(PYTHONS, with_python)}


@pytest.fixture(params=MAKERS)
def python(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Of an environment with that version."""
    folder = tmp_path / "venv"
    MAKERS[request.param](request.param, folder)
    yield folder / "bin/python"
    shutil.rmtree(folder)


def test_quick_tests_pass(python: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
    }
    # Compiled once before, as in launch/test.sh: ranks would wait for it.
    build = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
    subprocess.run([python, "-c", build], env=environment, cwd=ROOT, check=True)
    tests = [f"tests/hosts/{test}" for test in TESTS]
    options = ("-m", "pytest", "-p", "no:cacheprovider", "-n", "0")
    done = subprocess.run(
        [python, *options, *tests],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
