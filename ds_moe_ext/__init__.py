# SPDX-License-Identifier: Apache-2.0
"""MoE training systems for DeepSpeed, Megatron-core and PyTorch; to import it attaches it there."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

from ds_moe_ext import _autoload, older_names

if TYPE_CHECKING:
    from ds_moe_ext.core.placement import Placement
    from ds_moe_ext.core.share import LocalElseOwner, NearestReplica, Rule, Share
    from ds_moe_ext.hosts.attachment.experts import ExpertsDescription, register_experts
    from ds_moe_ext.hosts.attachment.host_layer import InOne, OneEach, Stored
    from ds_moe_ext.hosts.deepspeed.checkpoint import full_state_dict
    from ds_moe_ext.hosts.plain.training_loop import attach
    from ds_moe_ext.hosts.steps.host import joined
    from ds_moe_ext.hosts.steps.training_run import recorder_of
    from ds_moe_ext.moe.feed_forward import FeedForwardExperts
    from ds_moe_ext.moe.layer import MoELayer
    from ds_moe_ext.patches.megatron import forget, use
    from ds_moe_ext.planning.strategy import Destination, Intervals, Job, Plan, Strategy, register
    from ds_moe_ext.strategies.settings import read_settings
    from ds_moe_ext.version import __version__

__all__ = ["attach", "forget", "full_state_dict", "joined", "read_settings", "recorder_of", "use"]
# Experts and layers of one's own.
__all__ += ["ExpertsDescription", "FeedForwardExperts", "InOne", "MoELayer", "OneEach", "Stored"]
__all__ += ["register_experts"]
# A strategy of one's own: what it is, what it is asked and answers, and the shares that are there.
__all__ += ["Destination", "Intervals", "Job", "LocalElseOwner", "NearestReplica", "Placement"]
__all__ += ["Plan", "Rule", "Share", "Strategy", "__version__", "register"]

_NAMES = {
    "core.placement": ("Placement",),
    "core.share": ("LocalElseOwner", "NearestReplica", "Rule", "Share"),
    "hosts.attachment.experts": ("ExpertsDescription", "register_experts"),
    "hosts.attachment.host_layer": ("InOne", "OneEach", "Stored"),
    "hosts.deepspeed.checkpoint": ("full_state_dict",),
    "hosts.plain.training_loop": ("attach",),
    "hosts.steps.host": ("joined",),
    "hosts.steps.training_run": ("recorder_of",),
    "moe.feed_forward": ("FeedForwardExperts",),
    "moe.layer": ("MoELayer",),
    "patches.megatron": ("forget", "use"),
    "planning.strategy": ("Destination", "Job", "Plan", "Intervals", "Strategy", "register"),
    "strategies.settings": ("read_settings",),
    "version": ("__version__",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    name = older_names.public(name)
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ds_moe_ext' has no attribute {name!r}")
    return pkgutil.resolve_name(f"ds_moe_ext.{_MODULE_OF[name]}:{name}")


_autoload.autoload()
