# SPDX-License-Identifier: Apache-2.0
"""When our patches could not be applied: nobody who asked for us trains without us unawares."""

from __future__ import annotations

import functools
from typing import Any


def refuse_if_asked(deepspeed: Any, error: Exception) -> None:
    """Let ``deepspeed.initialize`` fail where the JSON enables us; all else goes on as without us.

    Imports nothing of the package: it may be what is broken.
    """
    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        block = result[0]._config._param_dict.get("ds_moe_ext") or {}
        if block.get("enabled"):
            raise RuntimeError(
                f"ds_moe_ext is enabled, but could not attach to DeepSpeed: {error}; run "
                "'ds-moe-ext doctor', or set ds_moe_ext.enabled to false"
            ) from error
        return result

    deepspeed.initialize = initialize
