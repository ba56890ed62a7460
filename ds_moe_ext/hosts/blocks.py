"""Where a layer's copies are launched: as the transformer block that it belongs to begins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ds_moe_ext.hosts.attach import AttachedLayer
from ds_moe_ext.hosts.found import Hosted


def launch_with_blocks(model: nn.Module, layers: Iterable[AttachedLayer]) -> None:
    """Launch each layer's copies from its block, so that attention runs while they travel."""
    for layer in layers:
        if layer.routed.copies is not None:
            model.get_submodule(block_of(model, layer.name)).register_forward_pre_hook(
                _Launch(layer.hosted)
            )


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

    def __init__(self, hosted: Hosted) -> None:
        self._hosted = hosted

    def __call__(self, block: nn.Module, given: tuple[Any, ...]) -> None:
        self._hosted.routed.start(self._hosted.weights(), is_training=self._hosted.training)
