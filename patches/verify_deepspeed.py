# SPDX-License-Identifier: Apache-2.0
"""The patch by which ``ds-moe-ext verify`` watches DeepSpeed; others never load it."""

from __future__ import annotations

from functools import partial
from typing import Any

from ds_moe_ext.hosts.verification import of_hosts
from ds_moe_ext.patches.patch import Patch, apply_all, by


def _initialize(original: Any, *args: Any, **kwargs: Any) -> Any:
    return of_hosts.initialize(original, args, kwargs)


PATCHES = (
    Patch(
        "verify",
        "deepspeed:initialize",
        ">=0.19.7,<0.20",
        "one run of two has the block off, and both are watched",
        by(_initialize),
    ),
)

apply = partial(apply_all, PATCHES)
"""Apply it, or say why not."""
