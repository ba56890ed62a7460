# SPDX-License-Identifier: Apache-2.0
"""Hooks on a host's blocks: replicas are launched as a block begins, frozen experts left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.core.layout import GRID
from ds_moe_ext.hosts.attachment.host_layer import Hosted
from ds_moe_ext.hosts.attachment.modules import eager
from ds_moe_ext.hosts.attachment.notices import OWNERS, Log, Refusal, settle
from ds_moe_ext.hosts.attachment.replacement import AttachedLayer, Blueprint
from ds_moe_ext.planning.strategy import followers
from ds_moe_ext.schedule.task import INTER, START


def launch_with_blocks(
    model: nn.Module, layers: Sequence[AttachedLayer], *, measures: bool
) -> tuple[RemovableHandle, ...]:
    """Let each layer's block launch replicas as it begins, by the hooks that are returned; where
    ``measures``, also where none has replicas, to time what blocks compute beside their MoE
    layer."""
    hooks: list[RemovableHandle] = []
    for layer, launch in zip(layers, launches(layers)):
        if measures or layer.routed.replicas is not None:
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
        """Layers whose replicas may be launched."""
        return (self._hosted,) if self._after is None else (self._hosted, self._after)

    def __call__(self, block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = (x for x in (*given, *named.values()) if isinstance(x, Tensor))
        self.begin(next(tensors, None))

    def begin(self, block_input: Tensor | None) -> None:
        """Launch, by what the block computes from; None where this rank has no rows."""
        own = self._hosted.routed
        for task in own.block_begins(block_input):
            hosted = self._hosted if task.layer == own.layer_context.layer else self._after
            assert hosted is not None
            if task.op == START:
                hosted.routed.begin(hosted.weights(), is_training=hosted.training)
            else:
                hosted.routed.launch()


# Of names of such layers, where experts move. What is frozen is a place, which the host's optimizer
# steps or does not.
MIXED = Refusal(
    "a layer with frozen experts beside trained ones",
    lambda names: f"of {names[0]} some experts are frozen and some are trained" if names else "",
    "a frozen owner cannot train an expert that moves to it",
    "freeze all experts of a layer alike",
)


def settled(blueprint: Blueprint, layers: Sequence[AttachedLayer], log: Log) -> Blueprint:
    """Let gradients of replicas travel wherever a layer has an expert that is trained; of layers
    that have frozen ones too, experts keep their owners. Collective, over the ranks that run the
    layers. Raises ValueError, on all ranks, where a key asks for experts that move."""
    copied = [layer.routed for layer in layers if layer.routed.replicas is not None]
    if not copied:
        return blueprint
    # Of each layer whether there are trained experts at their owners here, and whether frozen ones.
    own = [
        sorted({any(p.requires_grad for p in slot.parameters) for slot in layer.hosted.slots()})
        for layer in layers
        if layer.routed.replicas is not None
    ]
    gathered = gather_objects(own, copied[0].layer_context.layout.group(GRID, INTER))
    mixed = [each for each, *ways in zip(copied, *gathered) if len(set().union(*ways)) > 1]
    for routed in mixed:
        assert routed.replicas is not None
        routed.replicas.some_are_trained = True
    names = [routed.name for routed in mixed]
    return replace(blueprint, strategy=settle(OWNERS, blueprint.strategy, (MIXED,), names, log))
