"""What a transformer block does about copies as it begins.

It launches those of its own layer that are not yet on their way, and begins the flight of the next
layer where the plan says that this block carries its copies. That flight ends in backward behind
this block's, so that gradients can travel while it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ds_moe_ext.hosts.attach import AttachedLayer
from ds_moe_ext.hosts.compiled import eager
from ds_moe_ext.hosts.found import Hosted
from ds_moe_ext.schedule.program import in_backward
from ds_moe_ext.strategies.base import followers


def launch_with_blocks(
    model: nn.Module, layers: Sequence[AttachedLayer], *, measures: bool
) -> None:
    """Let each layer's block launch copies as it begins.

    Args:
        measures: what blocks compute beside their MoE layer is timed also where none has copies.
    """
    for layer, following in zip(layers, followers(layers, [layer.stack for layer in layers])):
        if measures or layer.routed.copies is not None:
            after = None if following is None else following.hosted
            launch = eager(_Launch(layer.hosted, after).__call__)
            block = model.get_submodule(block_of(model, layer.name))
            block.register_forward_pre_hook(launch, with_kwargs=True)


def block_of(model: nn.Module, name: str) -> str:
    """Name of the block: the innermost element of a list of modules around a layer; the layer's own
    where there is none."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if isinstance(model.get_submodule(".".join(parts[: length - 1])), nn.ModuleList):
            return ".".join(parts[:length])
    return name


class _Launch:
    """A pre-forward hook."""

    def __init__(self, hosted: Hosted, after: Hosted | None) -> None:
        self._hosted, self._after = hosted, after

    def __call__(self, block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        hosted, after = self._hosted, self._after
        tensors = (x for x in (*given, *named.values()) if isinstance(x, Tensor))
        hosted.routed.start(
            hosted.weights(),
            is_training=hosted.training,
            block_input=next(tensors, None),
        )
        if after is not None and after.routed.site.plan.carried is not None and not in_backward():
            after.routed.begin(after.weights(), is_training=after.training)
