# SPDX-License-Identifier: Apache-2.0
"""Offline runs of W&B, under both hosts, have our scalars: they are read back from its files.

Slow, for wandb has 100 MB and is not among what CI installs: ``pip install wandb`` first.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.hosts.megatron_toy import MegatronRun
from tests.hosts.test_monitors import FSSDP, Loop, check_balances, trained, under_megatron
from tests.ranks import pool_of

pytestmark = pytest.mark.slow
pytest.importorskip("wandb", reason="wandb is not installed")

BLOCK = 32768  # of LevelDB's log format, in which W&B writes
HEAD = struct.Struct("<IHB")  # checksum, length, and which part of a record
WHOLE, LAST = 1, 4
OURS = "ds_moe_ext/"


def records(data: bytes) -> Iterator[bytes]:
    """Of a file of W&B's, behind its seven bytes of header."""
    place, record = HEAD.size, b""
    while place + HEAD.size <= len(data):
        if (left := BLOCK - place % BLOCK) < HEAD.size:
            place += left
            continue
        _, length, part = HEAD.unpack_from(data, place)
        place += HEAD.size + length
        record += data[place - length : place]
        if part in (WHOLE, LAST):
            yield record
            record = b""


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Our scalars of the one run in a folder: by name, where they stand and values."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    points: dict[str, list[tuple[int, float]]] = {}
    for data in records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): float(item.value_json)
                for item in record.history.item
                if item.value_json.strip("-")[:1].isdigit()
            }
            for name, value in items.items():
                if name.startswith(OURS):
                    points.setdefault(name, []).append((int(items["_step"]), value))
    return points


def offline(folder: Path) -> Any:
    """What W&B reads."""
    reported = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}
    return mock.patch.dict(os.environ, reported)


def under_deepspeed(rank: int, world_size: int, folder: Path) -> Any:
    import wandb

    job = replace(
        FSSDP,
        steps=12,
        extra=(("wandb", {"enabled": True, "project": "p"}), ("steps_per_print", 5)),
    )
    with offline(folder):
        shown = trained(rank, world_size, job, {})
        wandb.finish()
        wandb.teardown()  # its service may still be writing
    return shown


def test_under_deepspeed(tmp_path: Path) -> None:
    first, _ = pool_of(2).run(under_deepspeed, tmp_path)
    points = logged(tmp_path)
    check_balances(points, first.balances, 5)
    assert {f"{OURS}replicas", f"{OURS}step_s", f"{OURS}tokens_per_s"} <= set(points)


def with_wandb(rank: int, world_size: int, run: MegatronRun, folder: Path) -> Any:
    """As its training loop does, on the last rank."""
    import wandb

    if dist.get_rank() < dist.get_world_size() - 1:
        return under_megatron(rank, world_size, run, folder)
    with offline(folder):
        of_run = wandb.init(project="p", dir=str(folder))
        with mock.patch.object(Loop, "get_wandb_writer", lambda _: of_run):
            shown = under_megatron(rank, world_size, run, folder)
        of_run.finish()
        wandb.teardown()  # its service may still be writing
    return shown


def test_under_megatron(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    _, last = pool_of(2).run(with_wandb, MegatronRun(ep=2, steps=12), tmp_path)
    points = logged(tmp_path)
    check_balances(points, last.balances, 5)
    assert [at for at, _ in points[f"{OURS}balance/mean"]] == [105, 110]
    assert [at for at, _ in points[f"{OURS}tokens_per_s"]] == [110]
