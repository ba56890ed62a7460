# SPDX-License-Identifier: Apache-2.0
"""A step that Megatron runs again, to see whether numbers that are none come again: both roles run
it again, or none; and both end for it."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import rerun_state_machine

from ds_moe_ext.core.comm import max_in_place


def join_reruns(control: dist.ProcessGroup) -> None:
    """Let what any rank asks for be asked for by both roles. Of its own role a rank knows it.

    Nothing is changed where nobody has made a machine that reruns steps.

    Args:
        control: all ranks, over gloo.
    """
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is None or machine.get_mode() is rerun_state_machine.RerunMode.DISABLED:
        return
    stock = machine._reduce_any

    @wraps(stock)
    def reduce_any(asked: Any) -> Any:
        found = max_in_place(torch.tensor(stock(asked), dtype=torch.int64), control)
        return tuple(map(bool, found.tolist())) if isinstance(asked, list) else bool(found)

    machine._reduce_any = reduce_any
