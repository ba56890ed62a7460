# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own pretrain_gpt.py, not changed, from a checkout that is named by hand:
``MEGATRON_LM=PATH pytest -m slow tests/hosts/test_pretrain_gpt.py``. It needs what that needs: pip
packages six, regex, pyyaml and pybind11, make, g++ and python3-config.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.hosts.test_monitors import on_board

ROOT = Path(__file__).parents[2]
CHECKOUT = os.environ.get("MEGATRON_LM")
CONFIGS = ROOT / "configs/strategies"
STRATEGIES = ("ep", "esp", "fssdp", "prophet", "esp_fssdp")
ITERATIONS = 20
HALF = 10
FLAGS = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16 --lr 5e-3
--lr-decay-style constant --clip-grad 1.0 --swiglu --no-bias-swiglu-fusion --disable-bias-linear
--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights
--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
--moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall
--transformer-impl local --distributed-backend gloo
--no-persist-layer-norm --no-masked-softmax-fusion
--mock-data --tokenizer-type NullTokenizer --vocab-size 4097
--log-interval 1 --eval-iters 1 --eval-interval 1000 --save-interval 10
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHECKOUT is None,
        reason="MEGATRON_LM does not name a checkout of Megatron-LM; fetch NVIDIA/Megatron-LM",
    ),
]


def start(
    world_size: int, *arguments: str, config: Path | None, iterations: int, is_loaded: bool = True
) -> str:
    """What a run of ``ITERATIONS`` prints, up to this one."""
    has_roles = config is not None and config.name == "zebra.json"  # which go on without fusion
    fusion = () if has_roles else ("--no-gradient-accumulation-fusion",)
    named = [] if config is None else ["--ds-moe-ext-config", str(config)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc_per_node", str(world_size)),
            str(ROOT / "launch/megatron_on_cpu.py"),
            *(("-m", "ds_moe_ext.run") if is_loaded else ()),
            *(f"{CHECKOUT}/pretrain_gpt.py", *FLAGS.split(), *fusion, *named),
            *("--expert-model-parallel-size", str(world_size)),
            *("--train-iters", str(ITERATIONS), "--exit-interval", str(iterations)),
            *arguments,  # the last word
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(CHECKOUT),
            "DS_MOE_EXT_AUTOLOAD": str(int(is_loaded)),
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert (config is not None) == ("ds_moe_ext: strategy" in done.stdout)
    return done.stdout


def losses_of(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"\| lm loss: (\S+) \|", printed)]


def train(world_size: int, *arguments: str, config: Path | None, iterations: int) -> list[float]:
    """The loss of each iteration."""
    return losses_of(start(world_size, *arguments, config=config, iterations=iterations))


@cache
def stock(world_size: int, *flags: str) -> list[float]:
    losses = train(world_size, *flags, config=None, iterations=ITERATIONS)
    assert len(losses) == ITERATIONS
    assert losses[-1] < losses[0]
    return losses


@cache
def resumed_stock(world_size: int) -> list[float]:
    """Behind a checkpoint of its own: the loss that stock Megatron prints of the second iteration
    then differs by 2e-4 from that of a run without a break, and no other."""
    with TemporaryDirectory() as folder:
        train(world_size, "--save", folder, config=None, iterations=HALF)
        return train(world_size, "--load", folder, config=None, iterations=ITERATIONS)


def check_close(losses: list[float], expected: list[float]) -> None:
    """In float32 a choice of experts may flip after some steps; the curve stays."""
    assert losses[:5] == pytest.approx(expected[:5], rel=2e-6)
    assert losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_follows_stock_megatron(strategy: str, world_size: int) -> None:
    config = CONFIGS / f"{strategy}.json"
    check_close(train(world_size, config=config, iterations=ITERATIONS), stock(world_size))


TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
WHOLE = ("--expert-tensor-parallel-size", "1")
PREDICTING = ("--mtp-num-layers", "1", "--position-embedding-type", "rope", "--no-rope-fusion")


UNSPLIT = ("--expert-model-parallel-size", "1")


def with_roles(folder: Path, size: int, profile: dict[str, Any] | None = None) -> Path:
    """A file by which half of the ranks have attention, half experts."""
    config = folder / "zebra.json"
    zebra = {"attention_size": size, "expert_size": size, "profile": profile}
    config.write_text(
        json.dumps({"ds_moe_ext": {"enabled": True, "strategy": "zebra", "zebra": zebra}})
    )
    return config


def losses_of_roles(printed: str, iterations: int) -> list[list[float]]:
    """Both log."""
    reported = re.findall(r"iteration +(\d+)/ .*?\| lm loss: (\S+) \|", printed)
    assert len(reported) == 2 * iterations
    reported.sort(key=lambda line: int(line[0]))
    return [[float(loss) for _, loss in reported[first::2]] for first in (0, 1)]


@pytest.mark.parametrize(
    ("world_size", "flags", "profile"),
    [(2, (), None), (4, (), {}), (4, TENSOR, {}), (4, PREDICTING, {})],
)
def test_zebra_follows_its_attention_ranks_alone(
    world_size: int, flags: tuple[str, ...], profile: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Expert ranks draw experts as expert parallel ranks do. A profile takes its sizes from the
    flags."""
    size = world_size // 2
    config = with_roles(tmp_path, size, profile)
    printed = start(world_size, *UNSPLIT, *flags, config=config, iterations=ITERATIONS)
    assert ("2 x 32 tokens through one layer" in printed) == (profile is not None)
    assert "ds_moe_ext: gradient accumulation fusion is off" in printed
    for losses in losses_of_roles(printed, ITERATIONS):
        check_close(losses, stock(size, *flags, *WHOLE))


def test_zebra_saves_and_goes_on_under_async_save(tmp_path: Path) -> None:
    """The flag is off with roles, and a line says so. One checkpoint has what both need."""
    config, flags = with_roles(tmp_path, 1), (*UNSPLIT, "--async-save")
    folder = str(tmp_path / "saved")
    printed = start(2, *flags, "--save", folder, config=config, iterations=HALF)
    assert "ds_moe_ext: --async-save is off" in printed
    for losses in losses_of_roles(printed, HALF):
        check_close(losses, stock(1, *WHOLE)[:HALF])
    printed = start(
        2, *flags, "--load", folder, "--save", folder, config=config, iterations=ITERATIONS
    )
    for losses in losses_of_roles(printed, HALF):
        check_close(losses, resumed_stock(1))


def test_without_the_flag_a_run_is_as_without_the_package() -> None:
    """Every digit of losses and norms that Megatron prints."""
    runs = [
        re.findall(
            r"lm loss: \S+ .*grad norm: \S+",
            start(2, config=None, iterations=HALF, is_loaded=is_loaded),
        )
        for is_loaded in (True, False)
    ]
    assert len(runs[0]) == HALF
    assert runs[0] == runs[1]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_run_goes_on_under_another_strategy_and_without_us(
    world_size: int, tmp_path: Path
) -> None:
    saved = ["--save", str(tmp_path)]
    first = train(world_size, *saved, config=CONFIGS / "fssdp.json", iterations=HALF)
    check_close(first, stock(world_size)[:HALF])
    for config in (CONFIGS / "prophet.json", None):
        losses = train(world_size, "--load", str(tmp_path), config=config, iterations=ITERATIONS)
        check_close(losses, resumed_stock(world_size))


def test_scalars_come_to_its_tensorboard(tmp_path: Path) -> None:
    board = ("--tensorboard-dir", str(tmp_path), "--tensorboard-log-interval", "5")
    start(2, *board, config=CONFIGS / "fssdp.json", iterations=HALF)
    points = on_board(tmp_path)
    assert [at for at, _ in points["ds_moe_ext/balance/mean"]] == [5, HALF]
    assert [at for at, _ in points["ds_moe_ext/tokens_per_s"]] == [HALF]


def test_the_import_line_applies(tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(Path(f"{CHECKOUT}/pretrain_gpt.py").read_text())
    patch = ROOT / "patches/pretrain_gpt.diff"
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", "--unidiff-zero", str(patch)], cwd=tmp_path, check=True)
    assert "import ds_moe_ext" in script.read_text().splitlines()[1]
    compile(script.read_text(), str(script), "exec")
