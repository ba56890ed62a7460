# SPDX-License-Identifier: Apache-2.0
"""The patch to Hugging Face accelerate, for the Trainer's ``save_model`` under DeepSpeed."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from ds_moe_ext.patches.patch import Patch, apply_all, by


def _get_state_dict(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    if sys.modules.get("deepspeed"):  # accelerate goes without it too
        from ds_moe_ext.hosts.deepspeed import checkpoint
        from ds_moe_ext.hosts.steps.training_run import run_of

        if run_of(model) is not None:
            return checkpoint.full_state_dict(model.module)
    return original(self, model, *args, **kwargs)


PATCHES = (
    Patch(
        "whole-state",
        "accelerate.accelerator:Accelerator.get_state_dict",
        ">=1.10,<2",
        "a saved model has all experts, not rank 0's alone",
        by(_get_state_dict),
    ),
)

apply = partial(apply_all, PATCHES)
"""Apply it, or say why not."""
