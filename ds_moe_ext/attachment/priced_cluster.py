# SPDX-License-Identifier: Apache-2.0
"""The cluster on which sizes are priced as a run starts: the one that the settings name, or the one
that stands for the ranks' device."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace

import torch

from ds_moe_ext.attachment.launcher import ranks_on_this_node
from ds_moe_ext.attachment.meeting import Start
from ds_moe_ext.hardware import Hardware, read_hardware, shipped_for
from ds_moe_ext.settings import BLOCK, Settings

REMEDY = (
    f"ds-moe-ext profile measures your cluster, and {BLOCK}.hardware names the file that it writes"
)


@dataclass(frozen=True)
class Cluster:
    """Attributes:
    hardware: None where none is known.
    told: how it came to be that, or why there is none, for a person; empty where one is named.
    """

    hardware: Hardware | None = None
    told: str = ""


UNKNOWN = Cluster()


def device_name(device: torch.device) -> str:
    """As its driver tells it; of a CPU the processor's, if that is known."""
    has_name = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if has_name else platform.processor()
    return name or device.type


def cluster_of(settings: Settings, device: torch.device, start: Start) -> Cluster:
    """The cluster of a run. Collective, whatever the settings say.

    Args:
        settings: which may name one.
        device: of this rank.
        start: in which the ranks have compared settings.

    Raises:
        ValueError: the file that is named cannot be read.
    """
    names = start.each_different("device", device_name(device))
    if settings.hardware is not None:
        return Cluster(read_hardware(settings.hardware))
    if len(names) > 1:
        unlike = " and ".join(map(repr, names))
        return Cluster(None, f"sizes were not priced, for ranks have unlike devices ({unlike})")
    (name,) = names
    file = shipped_for(name)
    if file is None:
        return Cluster(
            None, f"sizes were not priced, for no file that we ship stands for device {name!r}"
        )
    hardware = read_hardware(file)
    per_node = ranks_on_this_node() or hardware.ranks_per_node
    return Cluster(
        replace(hardware, ranks_per_node=per_node),
        f"the cluster is reckoned as configs/hardware/{file.name} with {per_node} ranks on a node, "
        f"by its device's name ({name})",
    )
