# SPDX-License-Identifier: Apache-2.0
"""Fused kernels of Megatron's router: its own functions, not fused. It names all arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _unfused(name: str) -> Callable[..., Any]:
    def call(**named: Any) -> Any:
        from megatron.core.transformer.moe import moe_utils

        if "coeff" in named:
            named["moe_aux_loss_coeff"] = named.pop("coeff")
        return getattr(moe_utils, name)(**named, fused=False)

    return call


fused_topk_with_score_function = _unfused("topk_routing_with_score_function")
fused_compute_score_for_moe_aux_loss = _unfused("compute_routing_scores_for_aux_loss")
fused_moe_aux_loss = _unfused("switch_load_balancing_loss_func")
