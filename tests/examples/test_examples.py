# SPDX-License-Identifier: Apache-2.0
"""Every example as its page starts it: real launchers, two ranks."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.marks import slow
from tests.ranks import key_value_store

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TORCHRUN = ("torchrun", "--standalone", "--nproc_per_node", "2")


def printed_by(*command: str, **environment: str) -> str:
    """On stdout, from the repository's root."""
    common = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "COLUMNS": "200"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **common, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def check_trains(printed: str, strategy: str) -> None:
    assert f"ds_moe_ext: strategy {strategy}, 2 ranks" in printed
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", printed, re.M)]
    # A byte is one of 256 at first: 5.55 nats.
    assert len(losses) == 10 and 5.3 < losses[0] < 5.9 and losses[-1] < losses[0] - 0.5


@pytest.mark.slow  # tests/hosts/test_launch.py has the launcher
def test_deepspeed_and_hugging_face_by_json() -> None:
    pytest.importorskip("deepspeed")
    with key_value_store() as address:
        launcher = ("deepspeed", "--num_accelerators", "2", "--master_port", address["MASTER_PORT"])
        script = ("examples/deepspeed_mixtral.py", "--deepspeed_config")
        file = "examples/deepspeed_mixtral.json"
        check_trains(printed_by(*launcher, *script, file, **address), "fssdp")


@pytest.mark.slow  # tests/hosts/test_trainer.py has the Trainer
@pytest.mark.parametrize("stage", [2, 3])
def test_hugging_face_trainer(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    with key_value_store() as address:
        launcher = ("deepspeed", "--num_accelerators", "2", "--master_port", address["MASTER_PORT"])
        script = ("examples/hf_trainer/train.py", "--output_dir", str(tmp_path), "--deepspeed")
        file = f"examples/hf_trainer/zero{stage}.json"
        check_trains(printed_by(*launcher, *script, file, **address), "fssdp")
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.slow  # tests/hosts/test_megatron_*.py run the same code in ranks of a pool
def test_megatron_core_by_its_flag() -> None:
    pytest.importorskip("megatron.core")
    script = ("launch/megatron_on_cpu.py", "examples/megatron_core.py")
    check_trains(printed_by(*TORCHRUN, *script, "--ds-moe-ext-config", "fssdp"), "fssdp")


@pytest.mark.parametrize(
    ("block", "strategy"),
    [
        slow("examples/own_strategy.json", "own_strategy:Busiest"),
        slow("fssdp", "fssdp"),
    ],
)
def test_plain_torch(block: str, strategy: str) -> None:
    check_trains(printed_by(*TORCHRUN, "examples/plain_torch.py", block), strategy)


@pytest.mark.slow
def test_the_strategy_of_one_s_own_is_right() -> None:
    lines = printed_by("python", "examples/own_strategy.py").splitlines()
    assert len(lines) == 9 and all(": equal, largest relative error" in line for line in lines)


def test_plan_replicas() -> None:
    printed = printed_by("python", "examples/plan_replicas.py")
    assert "expert 0 computes on ranks [0 1 2 3 4 5 6 7]" in printed
    # Experts 0 and 1 of 16 live on rank 0 of 8: (1 + 1/2) / (1 + 1/2 + ... + 1/16) of all rows.
    assert "at the owner: the busiest rank computes 3.55 times the mean" in printed
    assert "with replicas: the busiest rank computes 1.39 times the mean" in printed


@pytest.mark.slow
def test_price_my_model() -> None:
    printed = printed_by("bash", "examples/price_my_model.sh", "--strategies", "ep,fssdp")
    assert "my_model: 10.2 billion weights, 24 layers of 64 experts" in printed
    assert "8 NVIDIA H100-SXM5-80GB" in printed and "fastest: fssdp on 16 EP ranks" in printed


def test_the_page_names_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    scripts = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")]
    assert len(scripts) == 6 and all(f"[{name}]({name})" in page for name in scripts)
