# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's decoupled writer, which writes dense weights by processes of its own while training
goes on, and moves ``latest`` at the next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.processes import ROOT
from tests.hosts.test_launch import start

SCRIPT = """
import json
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
}
BLOCK = {
    "enabled": True,
    "strategy": sys.argv[2],
    "fssdp": {"replicas_per_rank": 2, "reshard_interval": 2, "resharding": "paper"},
    "zebra": {"attention_size": 1, "expert_size": 1},
    "report": {"enabled": False},
}


def step(engine, number):
    loss = loss_of(engine, micro_batch(number, dist.get_rank()))
    engine.backward(loss)
    engine.step()
    return float(loss)


def main():
    deepspeed.init_distributed(dist_backend="gloo")
    folder = Path(sys.argv[1])
    engine, *_ = deepspeed.initialize(
        model=families.build("mixtral"), config={**CONFIG, "ds_moe_ext": BLOCK}
    )
    assert engine.checkpoint_engine.is_decoupled()
    for number in range(3):
        step(engine, number)
    engine.save_checkpoint(str(folder))
    layout = folder / "global_step3" / "ds_moe_ext.json"
    assert not (folder / "latest").exists() and not layout.exists()
    expected = [step(engine, number) for number in range(3, 6)]
    assert (folder / "latest").read_text() == "global_step3"
    files = json.loads(layout.read_text())["files"]
    assert "mp_rank_00_model_states.pt" in files and len(files) == 4, files
    engine.save_checkpoint(str(folder))  # is ended by the load
    path, _ = engine.load_checkpoint(str(folder), tag="global_step3")
    assert (folder / "latest").read_text() == "global_step6"
    assert path is not None and engine.global_steps == 3
    assert [step(engine, number) for number in range(3, 6)] == expected
    engine.destroy()
    dist.destroy_process_group()
    print("went on")


if __name__ == "__main__":  # the writer's processes import this file
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fssdp", "esp", "zebra"])
def test_a_save_beside_training_goes_on(strategy: str, tmp_path: Path) -> None:
    script = tmp_path / "decoupled.py"
    script.write_text(SCRIPT)
    command = ["torchrun", "--standalone", "--nproc_per_node", "2", str(script)]
    launcher = {"CROSS_SIZE": "1", "CROSS_RANK": "0"}  # as DeepSpeed's own sets them
    words = (str(tmp_path / "saved"), strategy)
    stated = start([*command, *words], PYTHONPATH=str(ROOT), **launcher)
    assert stated.count("went on") == 2
