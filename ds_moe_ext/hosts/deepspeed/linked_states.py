# SPDX-License-Identifier: Apache-2.0
"""What ``deepspeed.utils.safe_get_full_optimizer_state`` and its like find of experts.

At ZeRO 1 and 2 DeepSpeed steps one parameter group at a time, and behind the first one links all
weights to their states, which those of others do not have yet: experts have groups of their own.
"""

from __future__ import annotations

from typing import Any

from ds_moe_ext.hosts.deepspeed.engine_record import EngineRecord


def link_states(optimizer: Any, record: EngineRecord) -> None:
    """Link weights to their states once more, when all groups have been stepped once.

    Args:
        optimizer: of an engine, which may be none that links anything.
        record: of that engine.
    """
    if not record.has_linked and getattr(optimizer, "_hp_optimizer_states_linked", False):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
        record.has_linked = True
