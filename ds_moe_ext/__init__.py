"""Mixture-of-Experts training systems for DeepSpeed and Megatron-core, chosen by JSON.

Importing the package attaches it to the hosts; what else is named here is loaded when it is used.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

from ds_moe_ext import _autoload

if TYPE_CHECKING:
    from ds_moe_ext.attach.experts import ExpertsDescription, register_experts
    from ds_moe_ext.hosts.deepspeed.api import full_state_dict
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
    "forget",
    "full_state_dict",
    "joined",
    "read_settings",
    "recorder_of",
    "register",
    "register_experts",
    "use",
]

_HOME = {
    "ExpertsDescription": "ds_moe_ext.attach.experts",
    "FeedForwardExperts": "ds_moe_ext.moe.expert",
    "MoELayer": "ds_moe_ext.moe.layer",
    "forget": "ds_moe_ext.patches.megatron",
    "full_state_dict": "ds_moe_ext.hosts.deepspeed.api",
    "joined": "ds_moe_ext.steps.unequal_passes",
    "read_settings": "ds_moe_ext.settings",
    "recorder_of": "ds_moe_ext.steps.training_run",
    "register": "ds_moe_ext.strategy",
    "register_experts": "ds_moe_ext.attach.experts",
    "use": "ds_moe_ext.patches.megatron",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ds_moe_ext' has no attribute {name!r}")
    return pkgutil.resolve_name(f"{_HOME[name]}:{name}")


_autoload.autoload()
