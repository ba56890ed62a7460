# SPDX-License-Identifier: Apache-2.0
"""The patches by which ``ds-moe-ext verify`` watches a loop in plain PyTorch; others never load
them."""

from __future__ import annotations

from functools import partial

from ds_moe_ext.hosts.plain import training_loop
from ds_moe_ext.hosts.verification import of_hosts
from ds_moe_ext.patches.patch import Patch, apply_all, by

LOOP = training_loop.__name__


PATCHES = (
    Patch(
        "verify-attach",
        f"{LOOP}:attach",
        ">=0",
        "one run of two has the block off, and both are watched",
        by(of_hosts.attach),
    ),
    Patch(
        "verify-steps", f"{LOOP}:Attachment.watch", ">=0", "steps are counted", by(of_hosts.watch)
    ),
    Patch(
        "verify-norm",
        f"{LOOP}:Attachment.clip_grad_norm_",
        ">=0",
        "the norm of all gradients is seen",
        by(of_hosts.clip),
    ),
    Patch(
        "verify-loss",
        "torch:Tensor.backward",
        ">=2.9",
        "a loop's losses are what it goes back from",
        by(of_hosts.backward),
    ),
)

apply = partial(apply_all, PATCHES)
"""Apply all, or none and say why."""
