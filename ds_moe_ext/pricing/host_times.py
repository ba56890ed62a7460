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
OF_CHUNKS = (*_CHUNKS, *_SPLIT)
"""Tasks that each chunk has."""


def issued(
    host: HostTimes, *, is_split: bool, chunk_s: tuple[float, float] | None = None
) -> tuple[HostSeconds, HostSeconds]:
    """As planners of pipelines want it: forward, and backward.

    Args:
        host: of each task.
        is_split: the ranks of a cell split experts.
        chunk_s: what the tasks of a chunk took on the host that is planned for, forward and
            backward: it is slower by as much in all else. None: it is as quick.
    """
    names = OF_CHUNKS if is_split else _CHUNKS

    def side(times: Mapping[str, float], seen_s: float | None) -> HostSeconds:
        layer_s = times.get("attention", 0.0) + times.get("order", 0.0)
        of_chunk_s = sum(times.get(name, 0.0) for name in names)
        if seen_s is None:
            return HostSeconds(layer_s, of_chunk_s)
        return HostSeconds(layer_s * seen_s / of_chunk_s, seen_s)

    forward_s, backward_s = chunk_s or (None, None)
    return side(host.forward, forward_s), side(host.backward, backward_s)
