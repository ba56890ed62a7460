# SPDX-License-Identifier: Apache-2.0
"""A job under torchrun's elastic agents that loses half of its ranks goes on from its last
checkpoint on the others, and learns what it would have learned."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.hosts.elastic_script import STEPS
from tests.hosts.processes import ROOT
from tests.ranks import key_value_store

SCRIPTS = {
    "deepspeed": Path(__file__).with_name("elastic_script.py"),
    "megatron": Path(__file__).with_name("elastic_megatron.py"),
}
PATIENCE_S = 300.0
REL = {"deepspeed": 1e-12, "megatron": 1e-9}  # losses, in float64; Megatron's as elsewhere
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # an agent's store keeps dead ranks' keys
}


class Line(NamedTuple):
    """Of ``losses.txt``."""

    world_size: int
    step: int
    loss: float


def lines_of(folder: Path) -> list[Line]:
    file = folder / "losses.txt"
    words = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [Line(int(size), int(step), float(loss)) for size, step, loss in words]


@contextmanager
def agents(
    flags: Sequence[str], folder: Path, host: str, strategy: str, number: int = 1
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many of torchrun, of two ranks each; all are killed with the block."""
    folder.mkdir(exist_ok=True)
    command = [
        "torchrun",
        *flags,
        "--nproc_per_node",
        "2",
        str(SCRIPTS[host]),
        str(folder),
        strategy,
    ]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with (folder / "printed.txt").open("wb") as out:
        started = [
            subprocess.Popen(command, env=environment, stdout=out, stderr=out)
            for _ in range(number)
        ]
        try:
            yield started
        finally:
            for agent in started:
                kill(agent)


def kill(agent: subprocess.Popen[bytes]) -> None:
    """And its ranks, as where a node fails."""
    if agent.poll() is None:
        process = psutil.Process(agent.pid)
        for each in (process, *process.children(recursive=True)):
            each.send_signal(signal.SIGKILL)
    agent.wait()


def wait_for(num_lines: int, folder: Path, agent: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while len(lines_of(folder)) < num_lines:
        assert agent.poll() is None and time.monotonic() < end_s, printed(folder)
        time.sleep(0.05)


def printed(folder: Path) -> str:
    return (folder / "printed.txt").read_text(errors="replace")[-6000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "strategy"),
    [
        *(("deepspeed", name) for name in ("ep", "fssdp", "prophet", "esp", "zebra")),
        *(("megatron", name) for name in ("ep", "fssdp", "prophet", "esp", "zebra")),
    ],
)
def test_goes_on_with_the_ranks_that_are_left(host: str, strategy: str, tmp_path: Path) -> None:
    alone, lost = tmp_path / "alone", tmp_path / "lost"
    with agents(["--standalone"], alone, host, strategy) as (agent,):
        assert agent.wait(PATIENCE_S) == 0, printed(alone)
    with key_value_store() as address:
        flags = [
            *("--nnodes", "1:2", "--max-restarts", "3", "--rdzv_backend", "c10d"),
            *("--rdzv_endpoint", f"127.0.0.1:{address['MASTER_PORT']}", "--rdzv_id", "elastic"),
            *("--rdzv_conf", "is_host=false,last_call_timeout=5"),
        ]
        with agents(flags, lost, host, strategy, number=2) as (stays, dies):
            wait_for(4, lost, stays)
            kill(dies)
            assert stays.wait(PATIENCE_S) == 0, printed(lost)
    expected, got = lines_of(alone), lines_of(lost)
    sizes = [line.world_size for line in got]
    assert sizes == sorted(sizes, reverse=True) and {*sizes} == {4, 2}
    assert [line.step for line in expected] == [*range(STEPS)] and got[-1].step == STEPS - 1
    for line in got:
        assert line.loss == pytest.approx(expected[line.step].loss, rel=REL[host])
