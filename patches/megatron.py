# SPDX-License-Identifier: Apache-2.0
"""The patches to Megatron-core, applied where settings are in use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_moe_ext.hosts.attachment.modules import during
from ds_moe_ext.hosts.attachment.startup_check import Start, starting
from ds_moe_ext.hosts.megatron import active_settings
from ds_moe_ext.patches.patch import Patch, PatchError, apply_all, by
from ds_moe_ext.schedule.watch import WATCH

VERSIONS = ">=0.14,<0.21"


def _arguments(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return inspect.signature(function).bind(*args, **kwargs).arguments


def _moe_layer(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    asked = active_settings.chosen()
    if asked is None:
        original(self, *args, **kwargs)
        return
    from ds_moe_ext.hosts.megatron import engine, roles

    given = _arguments(original, self, *args, **kwargs)
    try:
        if asked.worlds is not None:
            roles.settle_layer(asked.worlds, asked.strategy, given["config"])
        original(self, *args, **kwargs)
        engine.constructed(self, given.get("pg_collection"))
    except ValueError as error:
        asked.report(error)
        raise


def _get_megatron_optimizer(original: Any, *args: Any, **kwargs: Any) -> Any:
    from ds_moe_ext.hosts.megatron import engine, roles

    asked = active_settings.chosen()
    if asked is None:
        return original(*args, **kwargs)
    model = _arguments(original, *args, **kwargs)["model_chunks"]
    start = engine.start if asked.worlds is None else roles.start
    with starting(Start(engine.OPTIMIZER, is_wanted=True)) as begun:
        with asked.whole_world(), begun.together():
            pass  # all have their models
        optimizer = original(*args, **kwargs)
        with asked.whole_world():
            start(asked, model, optimizer)
    return optimizer


def _initialize_model_parallel(original: Any, *args: Any, **kwargs: Any) -> Any:
    asked, parted = active_settings.chosen(), active_settings.worlds()
    if parted is None:
        if asked is not None:
            sizes = {
                f"{name} of initialize_model_parallel": str(size)
                for name, size in _arguments(original, *args, **kwargs).items()
                if isinstance(size, (int, str))
            }
            asked.agree(sizes)
        return original(*args, **kwargs)
    from ds_moe_ext.hosts.megatron import roles

    assert asked is not None
    return roles.with_sizes(parted, asked.strategy, original)(*args, **kwargs)


def _initialize_aside(original: Any, *args: Any, **kwargs: Any) -> Any:
    Start(active_settings.USE).stand_aside("off")
    return original(*args, **kwargs)


def _distributed_data_parallel(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    asked = active_settings.chosen()
    if asked is not None and asked.worlds is not None:
        from ds_moe_ext.hosts.megatron import roles

        given = _arguments(original, self, *args, **kwargs)
        asked = roles.measured(asked, given["module"], given["ddp_config"])
        active_settings.set_chosen(asked)
        assert asked.worlds is not None
        roles.keep_own(given["module"], asked.worlds, asked.strategy)
    original(self, *args, **kwargs)


def _save(
    original: Any, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any
) -> Any:
    parted, chosen = active_settings.worlds(), active_settings.chosen()
    if chosen is None:
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    from ds_moe_ext.hosts.megatron import checkpoint, checkpoint_sums, roles

    checksums, routing = chosen.settings.checkpoint.checksums, checkpoint.routing()
    sealed = functools.partial(checkpoint_sums.save_sealed, checksums, routing, original)
    if parted is None:
        return sealed(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    state = sharded_state_dict, checkpoint_dir
    return roles.save_together(sealed, parted, *state, *args, **kwargs)


def _load(
    original: Any, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any
) -> Any:
    if active_settings.chosen() is None:
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    from ds_moe_ext.hosts.megatron import checkpoint, checkpoint_sums

    checkpoint_sums.check(checkpoint_dir)
    if active_settings.worlds() is not None:  # a role asks for its own part of a layer's experts
        kwargs["validate_access_integrity"] = False
    state = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    checkpoint.compare_routing(checkpoint_sums.routing_of(checkpoint_dir), checkpoint_dir)
    return state


def _get_forward_backward_func(original: Any, *args: Any, **kwargs: Any) -> Any:
    from ds_moe_ext.hosts.megatron import engine, striped_steps

    stock = original(*args, **kwargs)

    @functools.wraps(stock)
    def counted(*, num_microbatches: int, **given: Any) -> Any:
        is_evaluation = bool(given.get("forward_only"))
        engine.SCHEDULES.begin(num_microbatches, forward_only=is_evaluation)
        run = striped_steps.steps_of(given["model"]) or stock
        try:
            with WATCH.host_pass("a step's passes"):
                stored = run(num_microbatches=num_microbatches, **given)
        finally:
            engine.SCHEDULES.end()
        if not is_evaluation:
            engine.SCHEDULES.losses = engine.losses_of(stored)
        return stored

    return counted


def _checkpoint(original: Any, function: Any, distribute: Any, *args: Any) -> Any:
    if active_settings.worlds() is None:
        return original(function, distribute, *args)
    from ds_moe_ext.hosts.megatron import roles

    return roles.checkpoint(function, distribute, *args)


def _recompute(original: Any, self: Any, grad: Any) -> None:
    if active_settings.worlds() is None:
        original(self, grad)
    elif self.ctx is not None:  # backward of a stripe comes twice, and goes to all leaves of a part
        with during(torch.autograd, _is_checkpoint_valid=lambda: True):
            original(self, grad)


PATCHES = tuple(
    Patch(id, f"megatron.core.{target}", VERSIONS, reason, by(ours))
    for id, target, reason, ours in (
        (
            "adopt",
            "transformer.moe.moe_layer:MoELayer.__init__",
            "flags are checked, and expert weights marked, before they are wrapped",
            _moe_layer,
        ),
        (
            "sizes",
            "parallel_state:initialize_model_parallel",
            "settings are compared; where ranks have roles, only expert ranks share experts",
            _initialize_model_parallel,
        ),
        (
            "strip",
            "distributed:DistributedDataParallel.__init__",
            "where ranks have roles, expert ranks drop all but experts before they are wrapped",
            _distributed_data_parallel,
        ),
        (
            "save",
            "dist_checkpointing.serialization:save",
            "checksums are written beside; ranks with roles write one checkpoint together",
            _save,
        ),
        (
            "check",
            "dist_checkpointing.serialization:load",
            "damaged files are refused before Megatron reads them",
            _load,
        ),
        (
            "start",
            "optimizer:get_megatron_optimizer",
            "layers are adopted when model and optimizer are there, by all ranks together",
            _get_megatron_optimizer,
        ),
        (
            "count",
            "pipeline_parallel.schedules:get_forward_backward_func",
            "the last pass of a step is known: gradients of copies wait for it",
            _get_forward_backward_func,
        ),
        (
            "recompute",
            "tensor_parallel.random:checkpoint",
            "where ranks have roles, a stripe pauses within a checkpoint",
            _checkpoint,
        ),
        (
            "recompute-alone",
            "tensor_parallel.random:CheckpointWithoutOutput._recompute",
            "where ranks have roles, backward comes twice through the end of a block",
            _recompute,
        ),
    )
)

OFF = Patch(
    "stand-aside",
    "megatron.core.parallel_state:initialize_model_parallel",
    VERSIONS,
    "where the block is not enabled, ranks where it is learn of that",
    by(_initialize_aside),
)

apply = functools.partial(apply_all, PATCHES)
"""Apply them, or say why not. They do nothing but where settings are in use."""


def use(given: str | Path | Mapping[str, Any]) -> None:
    """Train Megatron's MoE layers as a document's ``ds_moe_ext`` block says. Call it before the
    model is built; where the block is not enabled, Megatron is left as it is.

    Args:
        given: a JSON file, a name of ``configs/strategies``, or what is in the file.

    Raises:
        ValueError: the document is malformed, or asks for what cannot be done.
        PatchError: this version of Megatron-core is not supported.
    """
    forget()
    try:
        asked = active_settings.read(given)
        if asked is not None:
            apply()
    except (ValueError, PatchError) as error:
        Start(active_settings.USE).report(error)
        raise
    if asked is None:
        _stand_aside()
        return
    if asked.strategy.has_roles:
        asked = active_settings.with_roles(asked)
    active_settings.set_chosen(asked)


def _stand_aside() -> None:
    """Let ranks that run by us know that this one does not, once there is a world."""
    if dist.is_initialized():
        Start(active_settings.USE).stand_aside("off")
        return
    with suppress(PatchError):  # Megatron is another: it is left as it is
        OFF.apply()


def forget() -> None:
    """Leave Megatron as it was, for models that are built from now on."""
    parted = active_settings.worlds()
    if parted is not None:
        parted.rejoin()
    active_settings.set_chosen(None)
    for patch in (*PATCHES, OFF):
        patch.undo()
