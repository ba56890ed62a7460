# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's decoupled writer, which writes dense weights by processes of its own while training
goes on, and moves ``latest`` at the next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.processes import ROOT
from tests.hosts.test_launch import start

SCRIPT = """
import sys
from pathlib import Path

import deepspeed
import torch.distributed as dist

from tests.hosts import families
from tests.hosts.jobs import loss_of, micro_batch

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
    "checkpoint": {"writer": {"type": "PYTHON", "decoupled": True}},
    "ds_moe_ext": {
        "enabled": True,
        "strategy": "fssdp",
        "fssdp": {"copies_per_rank": 2, "reshard_interval": 2, "resharding": "paper"},
        "report": {"enabled": False},
    },
}


def step(engine, number):
    loss = loss_of(engine, micro_batch(number, dist.get_rank()))
    engine.backward(loss)
    engine.step()
    return float(loss)


def main():
    deepspeed.init_distributed(dist_backend="gloo")
    folder = Path(sys.argv[1])
    engine, *_ = deepspeed.initialize(model=families.build("mixtral"), config=CONFIG)
    assert engine.checkpoint_engine.is_decoupled()
    for number in range(3):
        step(engine, number)
    engine.save_checkpoint(str(folder))
    assert not (folder / "latest").exists()
    expected = [step(engine, number) for number in range(3, 6)]
    assert (folder / "latest").read_text() == "global_step3"
    path, _ = engine.load_checkpoint(str(folder))
    assert path is not None and engine.global_steps == 3
    assert [step(engine, number) for number in range(3, 6)] == expected
    engine.destroy()
    dist.destroy_process_group()
    print("went on")


if __name__ == "__main__":  # the writer's processes import this file
    main()
"""


@pytest.mark.slow
def test_a_save_beside_training_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "decoupled.py"
    script.write_text(SCRIPT)
    command = ["torchrun", "--standalone", "--nproc_per_node", "2", str(script)]
    launcher = {"CROSS_SIZE": "1", "CROSS_RANK": "0"}  # as DeepSpeed's own sets them
    said = start([*command, str(tmp_path / "saved")], PYTHONPATH=str(ROOT), **launcher)
    assert said.count("went on") == 2
