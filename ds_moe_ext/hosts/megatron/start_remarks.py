# SPDX-License-Identifier: Apache-2.0
"""What a person is warned of as a model of Megatron-core's starts: it goes on, but otherwise than
its flags or its hooks may let one think."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ds_moe_ext.hosts.attachment.host_layer import Found
from ds_moe_ext.hosts.attachment.modules import hooks_of
from ds_moe_ext.hosts.megatron.activations import forgets_clamp

NOT_OF_USERS = ("megatron", "transformer_engine", "ds_moe_ext")
"""Packages whose hooks do what our program does as well."""


def of(model: nn.Module, found: Sequence[Found], config: Any) -> Iterator[str]:
    """One line for each thing.

    Args:
        model: with all layers.
        found: the layers that are about to be adopted.
        config: of the model.
    """
    if found and forgets_clamp(config):
        yield (
            f"activation_func_clamp_value is {config.activation_func_clamp_value}, but Megatron's "
            "fused SwiGLU has no clamp, and so neither have experts here; use "
            "--no-bias-swiglu-fusion to have it, or leave it out"
        )
    hooked = [name for layer in found for name in _hooked(model, layer.name)]
    if hooked:
        others = f" and {len(hooked) - 1} more" if len(hooked) > 1 else ""
        yield (
            f"hooks of {hooked[0]}{others} are never called, for the strategy's program computes "
            "with the weights of experts, not by their modules; hook the MoE layer or its experts "
            "as a whole, or leave the layer out with ds_moe_ext.moe_layer_pattern"
        )


def _hooked(model: nn.Module, layer: str) -> Iterator[str]:
    """Modules within the experts of a layer that have hooks of a user's."""
    experts = f"{layer}.experts"
    for name, module in model.get_submodule(experts).named_modules(prefix=experts):
        if name != experts and any(map(_is_of_user, hooks_of(module))):
            yield name


def _is_of_user(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").partition(".")[0] not in NOT_OF_USERS
