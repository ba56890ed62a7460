# SPDX-License-Identifier: Apache-2.0
"""The patches by which ``ds-moe-ext verify`` watches Megatron-core; others never load them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ds_moe_ext.hosts.megatron import FLAG
from ds_moe_ext.hosts.megatron.active_settings import read_document
from ds_moe_ext.hosts.verification.recording import turned, undrawn
from ds_moe_ext.patches.megatron import VERSIONS
from ds_moe_ext.patches.patch import Patch, apply_all, by


def _use(original: Any, given: str | Path | Mapping[str, Any]) -> None:
    source, document = read_document(given)
    original(turned(document, f"{source}, which {FLAG} names,"))
    apply_all(CORE)


def _forget(original: Any) -> None:
    for patch in CORE:  # which are around ours
        patch.undo()
    original()


def _get_megatron_optimizer(original: Any, *args: Any, **kwargs: Any) -> Any:
    from ds_moe_ext.hosts.verification import of_hosts

    with undrawn():
        optimizer = original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    of_hosts.watch_model(optimizer, given["config"], given["model_chunks"])
    return optimizer


def _get_forward_backward_func(original: Any, *args: Any, **kwargs: Any) -> Any:
    from ds_moe_ext.hosts.verification import of_hosts

    return of_hosts.watched(original(*args, **kwargs))


CORE = (
    Patch(
        "verify-model",
        "megatron.core.optimizer:get_megatron_optimizer",
        VERSIONS,
        "a model that is ready to be trained is watched",
        by(_get_megatron_optimizer),
    ),
    Patch(
        "verify-steps",
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        VERSIONS,
        "losses are seen, and steps counted",
        by(_get_forward_backward_func),
    ),
)

PATCHES = (
    Patch(
        "verify",
        "ds_moe_ext.patches.megatron:use",
        ">=0",
        "one run of two has the block off, and both are watched",
        by(_use),
    ),
    Patch(
        "verify-no-more",
        "ds_moe_ext.patches.megatron:forget",
        ">=0",
        "Megatron is left as it was",
        by(_forget),
    ),
)

apply = partial(apply_all, PATCHES)
"""Apply both, or none and say why; Megatron-core's follow where its settings are read."""
