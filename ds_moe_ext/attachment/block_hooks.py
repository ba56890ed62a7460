# SPDX-License-Identifier: Apache-2.0
"""What a transformer block does about copies as it begins.

It does the tasks of the layer's ``block`` (``schedule/wires.py``): starts the pass of its own
copies and launches them, and starts that of the next layer's where this block carries them. Their
adjoints end the block's backward, so that gradients can travel while it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_moe_ext.attachment.dynamo import eager
from ds_moe_ext.attachment.host_layer import Hosted
from ds_moe_ext.attachment.replacement import AttachedLayer
from ds_moe_ext.schedule.task import START
from ds_moe_ext.strategy import followers


def launch_with_blocks(
    model: nn.Module, layers: Sequence[AttachedLayer], *, measures: bool
) -> tuple[RemovableHandle, ...]:
    """Let each layer's block launch copies as it begins.

    Args:
        measures: what blocks compute beside their MoE layer is timed also where none has copies.

    Returns:
        The hooks that do it.
    """
    hooks: list[RemovableHandle] = []
    for layer, launch in zip(layers, launches(layers)):
        if measures or layer.routed.copies is not None:
            hook = eager(launch.__call__)
            block = model.get_submodule(block_of(model, layer.name))
            hooks.append(block.register_forward_pre_hook(hook, with_kwargs=True))
    return tuple(hooks)


def launches(layers: Sequence[AttachedLayer]) -> list[Launch]:
    """What each layer's block does as it begins."""
    following = followers(layers, [layer.stack for layer in layers])
    return [
        Launch(layer.hosted, None if after is None else after.hosted)
        for layer, after in zip(layers, following)
    ]


def block_of(model: nn.Module, name: str) -> str:
    """Name of the block: the innermost element of a list of modules around a layer, also where the
    model is one, as of a pipeline; the layer's own where there is none."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if isinstance(model.get_submodule(".".join(parts[: length - 1])), nn.ModuleList):
            return ".".join(parts[:length])
    return parts[0] if parts[0].isdecimal() else name


class Launch:
    """A pre-forward hook."""

    def __init__(self, hosted: Hosted, after: Hosted | None) -> None:
        self._hosted, self._after = hosted, after

    @property
    def begun(self) -> tuple[Hosted, ...]:
        """Layers whose copies may be launched."""
        return (self._hosted,) if self._after is None else (self._hosted, self._after)

    def __call__(self, block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = (x for x in (*given, *named.values()) if isinstance(x, Tensor))
        self.begin(next(tensors, None))

    def begin(self, block_input: Tensor | None) -> None:
        """Args: block_input: what the block computes from; None: this rank has no rows."""
        own = self._hosted.routed
        for task in own.block_begins(block_input):
            hosted = self._hosted if task.layer == own.site.layer else self._after
            assert hosted is not None
            if task.op == START:
                hosted.routed.begin(hosted.weights(), is_training=hosted.training)
            else:
                hosted.routed.launch()
