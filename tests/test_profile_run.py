# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext profile``: as a launcher starts it, and what it prints and writes."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_moe_ext.commands.cluster_profile import (
    add_profile,
    main,
    notes,
    profile,
    replicas_text,
)
from ds_moe_ext.commands.profile_ranks import device_of
from ds_moe_ext.core.hardware import (
    Collectives,
    Device,
    Flops,
    Hardware,
    Link,
    read_hardware,
)
from ds_moe_ext.hosts.attachment.startup_check import Launched
from tests.ranks import pool_of

ROOT = Path(__file__).parents[1]
MODULE = ("-m", "ds_moe_ext.profile_run")
SMALL = ("--quick", "--device", "cpu", "--expert-bytes", "300000")


def start(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    clean = {key: value for key, value in os.environ.items() if key not in launchers}
    settled = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**clean, **settled},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# Launched.


@pytest.mark.slow
def test_two_ranks_by_torchrun(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done = start(tmp_path, *torchrun, *MODULE, *SMALL, "--out", "ours.json", "--window-s", "0.1")
    assert done.returncode == 0, done.stderr
    hardware = read_hardware(tmp_path / "ours.json")
    assert (hardware.num_nodes, hardware.ranks_per_node) == (1, 2)
    assert hardware.source.startswith("measured by ds-moe-ext profile --quick, 20")
    assert hardware.copy_link(2) == hardware.intra_collectives.copy
    assert hardware.intra is not None
    assert hardware.intra.r_squared is not None
    assert hardware.inter is None
    for each in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "copy"):
        link = vars(hardware.intra_collectives)[each]
        assert link.r_squared is not None, each
        assert each.replace("_", "-") in done.stdout
    product = hardware.device.products.fp32
    assert product is not None
    assert product.r_squared is not None
    for words in ("matrix products, fp32", "between nodes: not measured"):
        assert words in done.stdout
    assert done.stdout.count("wrote ours.json") == 1, "one rank shows, for all"
    assert "one more replica of an expert of 293 KiB everywhere" in done.stdout
    assert "behind 100 ms" in done.stdout


@pytest.mark.slow  # ranks that are joined already are quick
def test_alone_it_says_what_it_cannot_measure(tmp_path: Path) -> None:
    done = start(tmp_path, *MODULE, *SMALL, "--name", "my laptop")
    assert done.returncode == 0, done.stderr
    hardware = read_hardware(tmp_path / "hardware.json")
    assert (hardware.name, hardware.num_ranks) == ("my laptop", 1)
    assert hardware.device.flops_per_s.fp32 is not None
    assert (hardware.intra, hardware.inter) == (None, None)
    assert "links: not measured, because there is one rank; start with torchrun" in done.stdout


def exit_of(
    rank: int, world_size: int, options: tuple[str, ...], environment: dict[str, str], folder: Path
) -> tuple[object, str]:
    """Exit code and standard error of a rank that starts in a folder."""
    stated = io.StringIO()
    arguments = ["profile_run", *SMALL, *options]
    with (
        pytest.MonkeyPatch.context() as changed,
        contextlib.redirect_stderr(stated),
        mock.patch.object(sys, "argv", arguments),
        mock.patch.dict(os.environ, environment, clear=bool(environment)),
        pytest.raises(SystemExit) as ended,
    ):
        changed.chdir(folder)
        main()
    return ended.value.code, stated.getvalue()


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        (("--expert-bytes", "0"), {}, "an expert has 0 bytes"),
        (("--ranks-per-node", "3"), {}, "3 rank(s) on a node do not divide 1 rank(s)"),
        ((), {"RANK": "0"}, "the environment has no WORLD_SIZE, LOCAL_RANK, which a launcher"),
        (("--out", "nowhere/ours.json"), {}, "nowhere/ours.json"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    options: tuple[str, ...], environment: dict[str, str], expected: str, tmp_path: Path
) -> None:
    ((code, stated),) = pool_of(1).run(exit_of, options, environment, tmp_path)
    assert code == 2
    assert expected in stated
    assert "Traceback" not in stated


def test_all_ranks_end_where_the_first_cannot_write(tmp_path: Path) -> None:
    for code, stated in pool_of(2).run(exit_of, ("--out", "nowhere/ours.json"), {}, tmp_path):
        assert code == 2
        assert "--out is 'nowhere/ours.json', which cannot be written: No such file" in stated


def in_a_world(rank: int, world_size: int, out: str, ranks_per_node: int) -> int:
    parser = argparse.ArgumentParser()
    add_profile(parser.add_subparsers())
    options = (*SMALL, "--out", out, "--ranks-per-node", str(ranks_per_node))
    given = parser.parse_args(["profile", *options])
    assert given.run is profile
    return int(given.run(given))


def test_ranks_that_are_joined_already(tmp_path: Path) -> None:
    out = tmp_path / "ours.json"
    assert pool_of(4).run(in_a_world, str(out), 2) == [0] * 4
    hardware = read_hardware(out)
    assert (hardware.num_nodes, hardware.ranks_per_node) == (2, 2)
    for link in (hardware.intra, hardware.inter, hardware.inter_collectives.copy, hardware.copy):
        assert link is not None
        assert link.bytes_per_s > 0
    assert pool_of(4).run(size_of_the_world) == [4] * 4, "the world is still there"


def size_of_the_world(rank: int, world_size: int) -> int:
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    return int(ranks)


# What it prints.


def line(rate: float, r_squared: float | None = None) -> Link:
    return Link(bytes_per_s=rate, r_squared=r_squared)


def cluster(num_nodes: int, ranks_per_node: int, **known: Any) -> Hardware:
    device = Device(name="a GPU", flops_per_s=Flops(bf16=300e12))
    sizes = {"num_nodes": num_nodes, "ranks_per_node": ranks_per_node}
    return Hardware(name="ours", source="a test", device=device, **sizes, **known)


def test_overlap_degree_of_the_spec() -> None:
    """HECATE, H7: 13 replicas."""
    text = replicas_text(cluster(4, 8, inter=line(12.5e9)), 4_718_592, 5e-3)
    assert text.endswith("of 4.5 MiB on every rank: 377 µs; hidden by 5 ms: 13 (overlap degree t)")
    assert "behind" not in replicas_text(cluster(4, 8, inter=line(12.5e9)), 4_718_592, None)


def test_notes_say_what_is_missing_and_what_is_noise() -> None:
    assert [note[:19] for note in notes(cluster(1, 1))] == ["links: not measured"]
    assert list(notes(cluster(1, 2, intra=line(1e9)))) == [
        "between nodes: not measured, all ranks are on one"
    ]
    assert list(notes(cluster(2, 1, inter=line(1e9, 0.999)))) == [
        "within a node: not measured, each has one rank"
    ]
    noisy = Collectives(copy=line(1e9, 0.5), all_reduce=line(1e9, 0.995))
    (note,) = notes(cluster(2, 2, intra=line(1e9, 0.9), inter_collectives=noisy))
    assert "copy between nodes, out of a rank within a node; measure again" in note
    assert "all-reduce" not in note


# What it reads.


def test_the_environment_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Launched.from_environment() == Launched(0, 1, 0)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("WORLD_SIZE", "16")
    with pytest.raises(ValueError, match="has no LOCAL_RANK, which a launcher sets"):
        Launched.from_environment()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert Launched.from_environment() == Launched(rank=9, world_size=16, local_rank=1)


@pytest.mark.parametrize(
    ("num_devices", "local_rank", "expected"),
    [
        (0, 0, "--device is 'cuda', but torch finds no CUDA device here; give --device cpu"),
        (2, 2, r"local rank 2 \(LOCAL_RANK\), but this node has 2 CUDA device\(s\), one per rank"),
    ],
)
def test_a_device_that_is_not_there_is_named(
    num_devices: int, local_rank: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    with pytest.raises(ValueError, match=expected):
        device_of(Launched(local_rank, 3, local_rank), "cuda")
