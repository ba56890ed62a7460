# SPDX-License-Identifier: Apache-2.0
"""Hooks on experts that were there before these are replaced are reported, once for each layer."""

from __future__ import annotations

import warnings
from typing import Any

import ds_moe_ext
from tests.hosts import jobs
from tests.ranks import pool_of

BLOCK = {"enabled": True, "strategy": "ep", "report": {"enabled": False}}


def reported(rank: int, world_size: int) -> list[str]:
    """Warnings of the start, then of a second one without such hooks."""
    found = []
    for has_hooks in (True, False):
        model: Any = jobs.model_of(jobs.Job("toy"))
        first, second, _ = (block.experts for block in model.blocks)
        if has_hooks:
            first.register_forward_hook(lambda *_: None)
            first.up_EFD.register_post_accumulate_grad_hook(lambda _: None)
            second.down_EDF.register_hook(lambda _: None)
        model.blocks[2].register_forward_hook(lambda *_: None)  # it stays
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ds_moe_ext.attach(model, BLOCK)
        found += [str(each.message) for each in caught if " had hooks " in str(each.message)]
    return found


def test_hooks_on_what_is_replaced_are_reported() -> None:
    (first, second), none = pool_of(2).run(reported)
    assert first.startswith("blocks.0.experts, blocks.0.experts.up_EFD had hooks before ds_moe_ext")
    assert "Register hooks afterwards, on the new module at blocks.0.experts" in first
    assert second.startswith("blocks.1.experts.down_EDF had hooks before")
    assert not none
