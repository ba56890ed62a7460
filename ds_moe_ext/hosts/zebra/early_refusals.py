# SPDX-License-Identifier: Apache-2.0
"""Keys of strategy zebra that need what is not known where roles are given as a flag is read."""

from __future__ import annotations

from collections.abc import Callable

from ds_moe_ext.hosts.attachment.notices import Refusal, refuse
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.strategies.settings import BLOCK, Settings
from ds_moe_ext.strategies.zebra import WHERE, Zebra


def _is_set(key: str, value: Callable[[Zebra], object], reason: str, remedy: str) -> Refusal:
    def asked(strategy: Zebra) -> str:
        return f"{WHERE}.{key} is {value(strategy)!r}" if value(strategy) else ""

    return Refusal(f"{WHERE}.{key}", asked, reason, remedy)


def _sizes(strategy: Zebra) -> str:
    sizes = strategy.attention_size, strategy.expert_size
    if None not in sizes:
        return ""
    return f"{WHERE}.attention_size is {sizes[0]} and expert_size {sizes[1]}"


EARLY = (
    _is_set(
        "attention_device",
        lambda strategy: strategy.attention_device,
        "roles are given before devices are known",
        "set it to null, and give attention_size, expert_size and, where attention ranks are not "
        "the first, attention_cells",
    ),
    Refusal(
        f"{WHERE} without attention_size or expert_size",
        _sizes,
        "roles are given when the flag is read",
        "set both",
    ),
    _is_set(
        "moved",
        lambda strategy: strategy.moved,
        "attention ranks have no experts here",
        "leave it out",
    ),
    _is_set(
        "profile",
        lambda strategy: strategy.profile,
        "it measures under DeepSpeed only",
        "leave it out",
    ),
)


def refuse_early(settings: Settings, strategy: Strategy) -> None:
    """Check the keys of zebra; those of another strategy are its own to check.

    Raises:
        ValueError: they ask for what is not known, or done, under Megatron.
    """
    if isinstance(strategy, Zebra):
        refuse(EARLY, strategy, context=f"{BLOCK}.strategy is {settings.strategy!r} under Megatron")
