# SPDX-License-Identifier: Apache-2.0
"""DBRX's experts: three matrices a layer, in each of which those of all experts lie one below the
other, without a dim of experts.

Shape letters: R rows, E experts, D model width, F expert width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.experts import ExpertsDescription, class_of, found_experts
from ds_moe_ext.hosts.attachment.host_layer import Found, InOne
from ds_moe_ext.moe.expert import ModuleExperts

NAMES = ("w1", "v1", "w2")
KEPT = tuple(f"mlp.{name}" for name in NAMES)


def is_experts(module: nn.Module) -> bool:
    """Whether it is DBRX's."""
    return class_of(module).__name__ == "DbrxExperts"


def found(model: nn.Module, name: str, module: nn.Module) -> Found:
    """The layer of such experts.

    Raises:
        ValueError: they have other weights.
    """
    experts: Any = module
    unknown = {key for key, _ in module.named_parameters()}.difference(KEPT)
    if unknown:
        raise ValueError(
            f"{name} has experts of DBRX with weights that ds_moe_ext does not know: "
            f"{', '.join(sorted(unknown))}; let them have {', '.join(KEPT)} and no more (adapters "
            "of experts are not supported), or leave the layer out with "
            "ds_moe_ext.moe_layer_pattern"
        )
    described = ExpertsDescription(
        num_experts=experts.num_experts,
        weight_names=NAMES,
        function=ModuleExperts(_Expert(experts.mlp.activation_fn), NAMES),
        kept_as=tuple(InOne(each, experts.num_experts, is_flat=True) for each in KEPT),
    )
    return found_experts(model, name, module, described)


class _Expert(nn.Module):
    """One expert, whose weights come with each call: each of them ``[F, D]``."""

    w1: Tensor
    v1: Tensor
    w2: Tensor

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation
        for name in NAMES:
            self.register_parameter(name, None)

    def forward(self, rows_RD: Tensor) -> Tensor:
        gate_RF, up_RF = rows_RD.matmul(self.w1.T), rows_RD.matmul(self.v1.T)
        return (self.activation(gate_RF) * up_RF).matmul(self.w2)
