# SPDX-License-Identifier: Apache-2.0
"""Hooks of a user's on experts that are replaced, which nobody calls any more: told at start."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn


def warn_of_hooks(name: str, module: nn.Module, inside: str = "") -> None:
    """Tell, on rank 0, of hooks that go with a module and its weights.

    Args:
        name: of the layer.
        module: what is there.
        inside: where in it what is replaced begins, dotted.
    """
    hooked = list(_hooked(module.get_submodule(inside), f"{name}.{inside}" if inside else name))
    if hooked and dist.get_rank() == 0:
        names = ", ".join(hooked[:3]) + (", ..." if len(hooked) > 3 else "")
        warnings.warn(
            f"{names} had hooks when ds_moe_ext replaced the experts of {name}, and these are not "
            f"called any more; register them behind that, on the module that is at {name} then, or "
            "on its parameters, of which each rank has those of its own experts",
            stacklevel=2,
        )


def hooks_of(module: nn.Module) -> list[Any]:
    """A module's own hooks of passes, from where torch keeps them."""
    kept = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return [hook for hooks in kept for hook in hooks.values()]


def _hooked(module: nn.Module, name: str) -> Iterator[str]:
    """Names of modules with weights and of weights that have hooks of passes."""
    for inner, each in module.named_modules(prefix=name):
        if hooks_of(each) and next(each.parameters(), None) is not None:
            yield inner
        for weight, parameter in each.named_parameters(recurse=False):
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                yield f"{inner}.{weight}"
