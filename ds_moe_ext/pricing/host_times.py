# SPDX-License-Identifier: Apache-2.0
"""What a host takes to issue the tasks of a layer: measured once, of all strategies. Data.

From docs/measurements.md, "Host time": microseconds of the thread that issues, one expert on each
of 8 ranks, all lanes issued by one thread as on CUDA. A pass of a layer takes 510 us, whatever it
does; each chunk 125 forward and 80 backward; copies 750 more, half of it where they are joined. The
dense part of a layer (attention, norms and router of a Hugging Face block, eager) takes 320 forward
and 300 backward, measured by the same means. Torch 2.13, an Intel Xeon of 2.6 GHz.
"""

from __future__ import annotations

from collections.abc import Mapping

from ds_moe_ext.planners.layer_pipelines import HostSeconds
from ds_moe_ext.pricing.issue import HostTimes

_US = 1e-6

HOST_TIMES = HostTimes(
    forward={
        "attention": 320 * _US,
        "order": 350 * _US,
        "dispatch": 35 * _US,
        "expert": 35 * _US,
        "combine": 30 * _US,
        "restore": 25 * _US,
        "join": 350 * _US,
        "launch": 90 * _US,
        "start": 30 * _US,
        "cell_gather": 35 * _US,
        "cell_scatter": 35 * _US,
    },
    backward={
        "attention": 460 * _US,  # with what a pass of a layer takes in backward
        "dispatch": 20 * _US,
        "expert": 25 * _US,
        "combine": 20 * _US,
        "restore": 15 * _US,
        "join": 100 * _US,
        "send_home": 90 * _US,
        "recall": 90 * _US,
        "have_again": 60 * _US,
        "cell_gather": 30 * _US,
        "cell_scatter": 30 * _US,
        "begin_gradients": 40 * _US,
    },
)

_CHUNKS = ("dispatch", "expert", "combine", "restore")
_SPLIT = ("cell_gather", "cell_scatter")  # of cells whose ranks split experts


def issued(host: HostTimes, *, is_split: bool) -> tuple[HostSeconds, HostSeconds]:
    """As planners of pipelines want it: forward, and backward.

    Args:
        host: of each task.
        is_split: the ranks of a cell split experts.
    """
    names = (*_CHUNKS, *_SPLIT) if is_split else _CHUNKS

    def side(times: Mapping[str, float]) -> HostSeconds:
        layer_s = times.get("attention", 0.0) + times.get("order", 0.0)
        return HostSeconds(layer_s, sum(times.get(name, 0.0) for name in names))

    return side(host.forward), side(host.backward)
