"""MoE training systems for DeepSpeed, Megatron-core and PyTorch; to import it attaches it there."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

from ds_moe_ext import _autoload

if TYPE_CHECKING:
    from ds_moe_ext.attachment.experts import ExpertsDescription, register_experts
    from ds_moe_ext.hosts.deepspeed.export import full_state_dict
    from ds_moe_ext.hosts.plain.training_loop import attach
    from ds_moe_ext.moe.expert import FeedForwardExperts
    from ds_moe_ext.moe.layer import MoELayer
    from ds_moe_ext.patches.megatron import forget, use
    from ds_moe_ext.settings import read_settings
    from ds_moe_ext.steps.training_run import recorder_of
    from ds_moe_ext.steps.unequal_passes import joined
    from ds_moe_ext.strategy import register

__all__ = [
    "ExpertsDescription",
    "FeedForwardExperts",
    "MoELayer",
    "attach",
    "forget",
    "full_state_dict",
    "joined",
    "read_settings",
    "recorder_of",
    "register",
    "register_experts",
    "use",
]

_NAMES = {
    "attachment.experts": ("ExpertsDescription", "register_experts"),
    "hosts.deepspeed.export": ("full_state_dict",),
    "hosts.plain.training_loop": ("attach",),
    "moe.expert": ("FeedForwardExperts",),
    "moe.layer": ("MoELayer",),
    "patches.megatron": ("forget", "use"),
    "settings": ("read_settings",),
    "steps.training_run": ("recorder_of",),
    "steps.unequal_passes": ("joined",),
    "strategy": ("register",),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return pkgutil.resolve_name(f"ds_moe_ext.{module}:{name}")
    raise AttributeError(f"module 'ds_moe_ext' has no attribute {name!r}")


_autoload.autoload()
