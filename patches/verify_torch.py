# SPDX-License-Identifier: Apache-2.0
"""The patches by which ``ds-moe-ext verify`` watches a loop in plain PyTorch; others never load
them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ds_moe_ext.hosts.verification import of_torch
from ds_moe_ext.patches.patch import Patch, apply_all

LOOP = "ds_moe_ext.hosts.plain.training_loop"


def _by(ours: Callable[..., Any]) -> Callable[[Any], Any]:
    """A wrap of a function or method: ours gets the original and its arguments."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            return ours(original, *args, **kwargs)

        return watched

    return wrap


PATCHES = (
    Patch(
        "verify-attach",
        f"{LOOP}:attach",
        ">=0",
        "one run of two has the block off, and both are watched",
        _by(of_torch.attach),
    ),
    Patch(
        "verify-steps",
        f"{LOOP}:Attachment.watch",
        ">=0",
        "steps are counted",
        _by(of_torch.watch),
    ),
    Patch(
        "verify-norm",
        f"{LOOP}:Attachment.clip_grad_norm_",
        ">=0",
        "the norm of all gradients is seen",
        _by(of_torch.clip),
    ),
    Patch(
        "verify-loss",
        "torch:Tensor.backward",
        ">=2.9",
        "a loop's losses are what it goes back from",
        _by(of_torch.backward),
    ),
)


def apply() -> None:
    """Apply all, or none and say why."""
    apply_all(PATCHES)
