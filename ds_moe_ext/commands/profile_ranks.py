# SPDX-License-Identifier: Apache-2.0
"""What ``ds-moe-ext profile`` does on every rank."""

from __future__ import annotations

import dataclasses
import datetime
import socket
from pathlib import Path

import torch
from rich.console import Console

from ds_moe_ext.core.comm import AllToAll, all_to_all_by_pairs, all_to_all_rows, gather_objects
from ds_moe_ext.core.hardware import Hardware, ranks_per_node_of
from ds_moe_ext.core.layout import world
from ds_moe_ext.files.writable import why_unwritable
from ds_moe_ext.hosts.attachment.startup_check import Launched
from ds_moe_ext.planning.bench import Bench, clock_of
from ds_moe_ext.planning.probe import Sizes, levels_of, measure_cluster, measure_memory


def measure_here(
    *,
    is_quick: bool,
    expert_bytes: int,
    ranks_per_node: int | None,
    device_kind: str | None,
    out: Path,
) -> tuple[int, Hardware]:
    """This rank, and the cluster as all ranks together found it. Collective.

    Args:
        is_quick: few and small sizes.
        expert_bytes: weights of one expert, for copies.
        ranks_per_node: where host names do not tell.
        device_kind: of ``torch.device``; None takes CUDA where there is one.
        out: file that the first rank will write.

    Raises:
        ValueError: ranks that are spread unevenly over nodes, or a file that cannot be written.
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
        exchange = exchange_of(device, spans_nodes=len(hosts) > ranks_per_node)
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
            rate = measure_memory(bench)
            measured = dataclasses.replace(hardware.device, memory_bytes_per_s=rate)
            hardware = dataclasses.replace(hardware, device=measured)
    how = "ds-moe-ext profile --quick" if is_quick else "ds-moe-ext profile"
    source = f"{how}, {datetime.date.today()}, torch {torch.__version__}, {backend}"
    return rank, dataclasses.replace(hardware, source=f"measured by {source}")


def device_of(launched: Launched, kind: str | None) -> torch.device:
    """This rank's device, made current.

    Raises:
        ValueError: CUDA is not there, or has no device for this rank.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(kind or ("cuda" if num_devices else "cpu"))
    if device.type != "cuda":
        return device
    if not num_devices:
        raise ValueError(
            "--device is 'cuda', but torch finds no CUDA device here; give --device cpu, or start "
            "where there is one"
        )
    if not 0 <= launched.local_rank < num_devices:
        raise ValueError(
            f"this is local rank {launched.local_rank} (LOCAL_RANK), but this node has "
            f"{num_devices} CUDA device(s), one a rank; start as many ranks a node, or give "
            "--device cpu"
        )
    device = torch.device("cuda", launched.local_rank)
    torch.cuda.set_device(device)
    return device


def exchange_of(device: torch.device, *, spans_nodes: bool) -> AllToAll:
    """How layers exchange rows, see ``moe.dispatch.Wire``."""
    return all_to_all_by_pairs if spans_nodes and device.type == "cpu" else all_to_all_rows


def sizes_of(is_quick: bool, expert_bytes: int) -> Sizes:
    """What is measured."""
    powers = range(18, 23) if is_quick else range(17, 26)
    return Sizes(
        bytes_per_peer_N=tuple(2**power for power in powers),
        expert_bytes=expert_bytes,
        num_experts_N=(1, 4, 6, 8) if is_quick else (1, 4, 8, 12, 16),
        product_N=tuple(range(1, 4 if is_quick else 13)),
    )
