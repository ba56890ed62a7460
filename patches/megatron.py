"""The patches to Megatron-core, applied where settings are in use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_moe_ext.hosts.megatron import chosen, worlds
from ds_moe_ext.patches.record import Patch, apply_all

VERSIONS = ">=0.14,<0.21"


def _adopted(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from ds_moe_ext.hosts.megatron import layers

        original(self, *args, **kwargs)
        if chosen.chosen() is not None:
            layers.constructed(self)

    return __init__


def _started(original: Any) -> Any:
    @functools.wraps(original)
    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        from ds_moe_ext.hosts.megatron import engine, zebra

        optimizer = original(*args, **kwargs)
        asked = chosen.chosen()
        if asked is not None:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            start = engine.start if asked.worlds is None else zebra.start
            start(asked, given["model_chunks"], optimizer)
        return optimizer

    return get_megatron_optimizer


def _sized(original: Any) -> Any:
    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        parted = chosen.worlds()
        if parted is None:
            return original(*args, **kwargs)
        from ds_moe_ext.hosts.megatron import sides

        return sides.with_sizes(parted, original)(*args, **kwargs)

    return initialize_model_parallel


def _stripped(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        parted = chosen.worlds()
        if parted is not None and not parted.is_attention:
            from ds_moe_ext.hosts.megatron import sides

            sides.keep_experts(
                inspect.signature(original).bind(self, *args, **kwargs).arguments["module"]
            )
        original(self, *args, **kwargs)

    return __init__


def _saved(original: Any) -> Any:
    @functools.wraps(original)
    def save(sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        parted = chosen.worlds()
        if parted is None:
            return original(sharded_state_dict, *args, **kwargs)
        from ds_moe_ext.hosts.megatron import one_checkpoint

        return one_checkpoint.save_together(original, parted, sharded_state_dict, *args, **kwargs)

    return save


def _counted(original: Any) -> Any:
    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        from ds_moe_ext.hosts.megatron import engine, striping

        stock = original(*args, **kwargs)

        @functools.wraps(stock)
        def forward_backward(*, num_microbatches: int, **given: Any) -> Any:
            is_evaluation = bool(given.get("forward_only"))
            engine.SCHEDULES.begin(num_microbatches, forward_only=is_evaluation)
            run = striping.steps_of(given["model"]) or stock
            try:
                return run(num_microbatches=num_microbatches, **given)
            finally:
                engine.SCHEDULES.end()

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
        "sizes",
        "megatron.core.parallel_state:initialize_model_parallel",
        VERSIONS,
        "where ranks have roles, expert ranks share experts, and attention ranks do not",
        _sized,
    ),
    Patch(
        "strip",
        "megatron.core.distributed:DistributedDataParallel.__init__",
        VERSIONS,
        "where ranks have roles, expert ranks drop all but experts before they are wrapped",
        _stripped,
    ),
    Patch(
        "save",
        "megatron.core.dist_checkpointing.serialization:save",
        VERSIONS,
        "where ranks have roles, they write one checkpoint together",
        _saved,
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


def apply() -> None:
    """Apply them, or say why not. They do nothing but where settings are in use."""
    apply_all(PATCHES)


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
        apply()
        if asked.strategy.roles is not None:
            asked = replace(asked, worlds=worlds.part(asked.strategy.roles))
        chosen.set_chosen(asked)


def forget() -> None:
    """Leave Megatron as it was, for models that are built from now on."""
    parted = chosen.worlds()
    if parted is not None:
        parted.rejoin()
    chosen.set_chosen(None)
    for patch in PATCHES:
        patch.undo()
