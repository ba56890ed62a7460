# SPDX-License-Identifier: Apache-2.0
"""Other versions of megatron-core, each in an environment of its own: losses of smoke runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = ("0.14.0", "0.15.3", "0.16.1")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=VERSIONS)
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with that megatron-core, and all else from this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(own)]
    subprocess.run([*command, f"megatron-core=={request.param}"], check=True)
    behind = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (own / "behind.pth").write_text(behind)
    python = folder / "bin/python"
    asked = [python, "-c", "import megatron.core as core; print(core.__version__)"]
    results = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert results.strip() == request.param
    return python


def losses(python: Path, output: Path, *arguments: str) -> list[float]:
    """Of a short run of the smoke script."""
    done = subprocess.run(
        [
            *(python, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", "2", ROOT / "launch/pretrain_megatron.py"),
            *("--model", ROOT / "configs/models/mixtral_tiny.json", "--data", ROOT / "docs"),
            *("--expert-model-parallel-size", "2", "--use-distributed-optimizer"),
            *("--overlap-grad-reduce", "--seq-length", "32", "--micro-batch-size", "2"),
            *("--global-batch-size", "8", "--train-iters", "8", "--eval-iters", "1"),
            *("--output", output, *arguments),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: list[float] = json.loads((output / "summary.json").read_text())["losses"]
    return found


@pytest.mark.parametrize("strategy", ["ep", "esp", "fssdp", "prophet"])
def test_strategies_follow_stock_megatron(python: Path, strategy: str, tmp_path: Path) -> None:
    stock = losses(python, tmp_path / "stock")
    config = ROOT / f"configs/strategies/{strategy}.json"
    ours = losses(python, tmp_path / "ours", "--ds-moe-ext-config", str(config))
    assert len(ours) == 8
    assert ours[:4] == pytest.approx(stock[:4], rel=1e-5)
    assert ours == pytest.approx(stock, rel=1e-2)
