# SPDX-License-Identifier: Apache-2.0
"""The activation of Megatron-core's experts, as Megatron itself computes it: fused functions of its
do not all that the plain ones do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from torch import Tensor

from ds_moe_ext.moe.feed_forward import silu_gated


def activation_of(experts: Any, config: Any) -> Callable[[Tensor], Tensor]:
    """What lies between the two linear modules of an expert; gate and up lie behind each other."""
    if getattr(config, "use_te_activation_func", False):
        owner = experts if hasattr(experts, "activation_func") else experts.local_experts[0]
        by_engine: Callable[[Tensor], Tensor] = owner.activation_func
        return by_engine
    plain: Callable[[Tensor], Tensor] = config.activation_func
    if not config.gated_linear_unit:
        return plain
    clamp = None if forgets_clamp(config) else getattr(config, "activation_func_clamp_value", None)
    offset = getattr(config, "glu_linear_offset", None) or 0.0
    if plain is torch.nn.functional.silu and clamp is None and not offset:
        return silu_gated
    return Gated(plain, clamp, offset)


def forgets_clamp(config: Any) -> bool:
    """Whether Megatron's fused SwiGLU leaves out the clamp that was asked for: up to some version
    it has no parameter for one. Of a ``TransformerConfig``."""
    if getattr(config, "activation_func_clamp_value", None) is None:
        return False
    is_swiglu = config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
    if not is_swiglu or not config.bias_activation_fusion:
        return False
    taken = inspect.signature(weighted_bias_swiglu_impl).parameters
    return not any("clamp" in name for name in taken)


@dataclass(frozen=True)
class Gated:
    """Megatron's gated linear unit: ``activation(gate) * (up + offset)``, ``[R, 2F] -> [R, F]``.

    Attributes:
        activation: of the gate.
        clamp: gate at most this, up at most this in size; None leaves them.
        offset: added to up.
    """

    activation: Callable[[Tensor], Tensor]
    clamp: float | None
    offset: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self.clamp is not None:
            gate, up = gate.clamp(max=self.clamp), up.clamp(min=-self.clamp, max=self.clamp)
        return self.activation(gate) * (up + self.offset)
