"""The patches to Megatron-core, applied where settings are in use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_moe_ext.hosts.megatron import chosen
from ds_moe_ext.patches.record import Patch, apply_all

VERSIONS = ">=0.14,<0.17"


def _adopted(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from ds_moe_ext.hosts.megatron import layers

        original(self, *args, **kwargs)
        layers.constructed(self)

    return __init__


def _started(original: Any) -> Any:
    @functools.wraps(original)
    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        from ds_moe_ext.hosts.megatron import engine

        optimizer = original(*args, **kwargs)
        asked = chosen.chosen()
        if asked is not None:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            engine.start(asked, given["model_chunks"], optimizer)
        return optimizer

    return get_megatron_optimizer


def _counted(original: Any) -> Any:
    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        from ds_moe_ext.hosts.megatron import engine

        run = original(*args, **kwargs)

        @functools.wraps(run)
        def forward_backward(*, num_microbatches: int, **given: Any) -> Any:
            is_evaluation = bool(given.get("forward_only"))
            engine.SCHEDULES.begin(num_microbatches, forward_only=is_evaluation)
            return run(num_microbatches=num_microbatches, **given)

        return forward_backward

    return get_forward_backward_func


PATCHES = (
    Patch(
        "adopt",
        "megatron.core.transformer.moe.moe_layer:MoELayer.__init__",
        VERSIONS,
        "flags are checked, and expert weights marked, before they are wrapped",
        _adopted,
    ),
    Patch(
        "start",
        "megatron.core.optimizer:get_megatron_optimizer",
        VERSIONS,
        "layers are adopted when model and optimizer are there, by all ranks together",
        _started,
    ),
    Patch(
        "count",
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        VERSIONS,
        "the last pass of a step is known: gradients of copies wait for it",
        _counted,
    ),
)


def use(given: str | Path | Mapping[str, Any]) -> None:
    """Train Megatron's MoE layers as a document's ``ds_moe_ext`` block says. Call it before the
    model is built; where the block is not enabled, Megatron is left as it is.

    Args:
        given: a JSON file, or what is in it.

    Raises:
        ValueError: the document is malformed, or asks for what cannot be done.
        PatchError: this version of Megatron-core is not supported.
    """
    forget()
    asked = chosen.read(given)
    if asked is not None:
        apply_all(PATCHES)
        chosen.set_chosen(asked)


def forget() -> None:
    """Leave Megatron as it was, for models that are built from now on."""
    chosen.set_chosen(None)
    for patch in PATCHES:
        patch.undo()
