# SPDX-License-Identifier: Apache-2.0
"""What ``ds-moe-ext profile`` does on every rank."""

from __future__ import annotations

import datetime
import socket
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from ds_moe_ext.core.comm import all_to_all_by_pairs, all_to_all_rows, gather_objects
from ds_moe_ext.core.hardware import Hardware, ranks_per_node_of
from ds_moe_ext.core.layout import world
from ds_moe_ext.files.whole_files import why_unwritable
from ds_moe_ext.hosts.attachment.startup_check import Launched
from ds_moe_ext.planning.bench import Bench, clock_of
from ds_moe_ext.planning.probe import (
    Sizes,
    levels_of,
    measure_cluster,
    measure_launch,
    measure_memory,
)


def measure_here(
    *,
    is_quick: bool,
    expert_bytes: int,
    ranks_per_node: int | None,
    device_kind: str | None,
    out: Path,
) -> tuple[int, Hardware]:
    """This rank, and the cluster as all ranks together found it; ``out`` is what the first will
    write. Collective.
    """
    launched = Launched.from_environment()
    device = device_of(launched, device_kind)
    backend = "nccl" if device.type == "cuda" else "gloo"
    with world(backend, launched.rank, launched.world_size):
        tried = why_unwritable(out, makes_folders=False) if launched.rank == 0 else ""
        if reason := gather_objects(tried, None)[0]:
            raise ValueError(f"--out is {str(out)!r}, which cannot be written: {reason}")
        hosts = gather_objects(socket.gethostname(), None)
        if ranks_per_node is None:
            ranks_per_node = ranks_per_node_of(hosts)
        # As layers exchange rows, see ``moe.dispatch.Wire``.
        by_pairs = len(hosts) > ranks_per_node and device.type == "cpu"
        exchange = all_to_all_by_pairs if by_pairs else all_to_all_rows
        levels = levels_of(len(hosts), ranks_per_node, exchange)
        rank = levels.whole.here
        with Console(quiet=rank > 0).status("starting") as status:
            bench = Bench(
                clock_of(device),
                device,
                num_warm_ups=1 if is_quick else 3,
                num_repeats=15 if is_quick else 50,
                budget_s=0.3 if is_quick else 5.0,
                begins=status.update,
            )
            hardware = measure_cluster(levels, bench, sizes_of(is_quick, expert_bytes))
            device_read = replace(hardware.device, memory_bytes_per_s=measure_memory(bench))
            launch_s = measure_launch(device)
    how = "ds-moe-ext profile --quick" if is_quick else "ds-moe-ext profile"
    source = f"{how}, {datetime.date.today()}, torch {torch.__version__}, {backend}"
    return rank, replace(
        hardware,
        device=device_read,
        host_launch_s=launch_s,
        source=f"measured by {source}",
    )


def device_of(launched: Launched, kind: str | None) -> torch.device:
    """This rank's device, made current."""
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(kind or ("cuda" if num_devices else "cpu"))
    if device.type != "cuda":
        return device
    if not num_devices:
        raise ValueError(
            "--device is 'cuda', but torch finds no CUDA device here; give --device cpu, or "
            "start on a machine with one"
        )
    if not 0 <= launched.local_rank < num_devices:
        raise ValueError(
            f"this is local rank {launched.local_rank} (LOCAL_RANK), but this node has "
            f"{num_devices} CUDA device(s), one per rank; start that many ranks per node, or "
            "give --device cpu"
        )
    device = torch.device("cuda", launched.local_rank)
    torch.cuda.set_device(device)
    return device


def sizes_of(is_quick: bool, expert_bytes: int) -> Sizes:
    """What is measured."""
    powers = range(18, 23) if is_quick else range(17, 26)
    return Sizes(
        bytes_per_peer_N=tuple(2**power for power in powers),
        expert_bytes=expert_bytes,
        num_experts_N=(1, 4, 6, 8) if is_quick else (1, 4, 8, 12, 16),
        product_N=tuple(range(1, 4 if is_quick else 13)),
    )
