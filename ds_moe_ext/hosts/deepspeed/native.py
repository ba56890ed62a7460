"""``deepspeed.moe.layer.MoE``: its gate stays, its experts run by a strategy.

Parameter names stay as DeepSpeed's checkpoints have them
(``deepspeed_moe.experts.deepspeed_experts.<slot>...``), and so does what ``MoE.forward`` reads:
``l_aux`` and ``exp_counts``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

from ds_moe_ext.hosts.experts import shell
from ds_moe_ext.hosts.found import Adopted, Found, RoutedOf, Slot, Wanted, shape_of, weights_of
from ds_moe_ext.moe.expert import ModuleExperts
from ds_moe_ext.moe.layer import RoutedExperts


def find(model: nn.Module, wanted: Wanted) -> Iterator[Found]:
    """The MoE layers, in model order."""
    for name, module in model.named_modules():
        if isinstance(module, MoE) and wanted(name):
            yield _found(name, module)


def _found(name: str, moe: MoE) -> Found:
    if moe.enable_expert_tensor_parallelism:
        raise ValueError(
            f"{name} has enable_expert_tensor_parallelism on, which ds_moe_ext does not support; "
            "build it without"
        )
    first = moe.deepspeed_moe.experts.deepspeed_experts[0]
    buffers = [buffer for buffer, _ in first.named_buffers()]
    if buffers:
        raise ValueError(
            f"an expert of {name} has buffers {buffers}, but under ds_moe_ext one module computes "
            "all experts of a rank; make them parameters that are not trained"
        )

    def adopt(held: Tensor, routed_of: RoutedOf) -> Adopted:
        layer = moe.deepspeed_moe
        slots = list(layer.experts.deepspeed_experts)
        if len(slots) == moe.num_experts:  # every rank has all: keep this rank's
            kept = [slots[expert] for expert in held.tolist()]
        else:
            kept = slots  # built for as many cells as there are
        names = tuple(parameter for parameter, _ in first.named_parameters())
        routed = routed_of(ModuleExperts(_code(first), names))
        layer.experts.deepspeed_experts = nn.ModuleList(kept)
        layer.experts.num_local_experts = len(kept)
        hosted = HostedMoE(layer.gate, layer.experts, routed, names)
        moe.deepspeed_moe = hosted
        num_cells = routed.site.layout.grid.num_cells
        moe.ep_size, moe.num_local_experts = num_cells, len(kept)
        moe.expert_group_name = f"ep_size_{num_cells}"
        own = [parameter for module in kept for parameter in module.parameters()]
        left = {id(p) for p in own}
        gone = tuple(p for module in slots for p in module.parameters() if id(p) not in left)
        return Adopted(hosted, {p: (p,) for p in own}, gone)

    num_cells = moe.num_experts // moe.num_local_experts
    return Found(
        name=name,
        kind="deepspeed.moe",
        num_experts=moe.num_experts,
        expert=shape_of((each, p, p.requires_grad) for each, p in first.named_parameters()),
        num_cells=num_cells,
        may_drop=bool(moe.deepspeed_moe.gate.drop_tokens),
        adopt=adopt,
    )


def _code(expert: nn.Module) -> nn.Module:
    """The expert's modules without weights: ``functional_call`` brings them."""
    empty = shell(expert)
    empty._modules = {name: module and _code(module) for name, module in expert._modules.items()}
    return empty


class HostedMoE(nn.Module):
    """In the place of DeepSpeed's ``MOELayer``: same gate, same names, our way of the rows.

    Args:
        gate: DeepSpeed's ``TopKGate``.
        experts: DeepSpeed's ``Experts`` with this rank's experts.
        routed: the program of the layer.
        weight_names: parameter names of one expert, in the order that the program takes them.
    """

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        routed: RoutedExperts,
        weight_names: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.routed = routed
        self.l_aux: Tensor | None = None
        self.exp_counts: Tensor | None = None
        self.weight_names = weight_names

    def _set_ep_group(self, group: Any) -> None:
        """DeepSpeed hands over its expert-parallel group; our rows travel by the layout's.

        Its gate would use the group to agree on a padded capacity, which we do not need.
        """

    def slots(self) -> list[Slot]:
        """This rank's experts."""
        return [
            Slot(tuple(expert.get_parameter(name) for name in self.weight_names), expert)
            for expert in self.experts.deepspeed_experts  # type: ignore[union-attr]
        ]

    def hold(self, slots: Sequence[Slot]) -> None:
        """Take these slots in place of the present ones."""
        modules = [slot.module for slot in slots if slot.module is not None]
        self.experts.deepspeed_experts = nn.ModuleList(modules)
        self.experts.num_local_experts = len(modules)  # type: ignore[assignment]

    def weights(self) -> tuple[Tensor, ...]:
        """Weights of the first slot's expert in name order, then of the second's, and so on."""
        return weights_of(self.slots())

    def forward(self, hidden: Tensor, used_token: Tensor | None = None) -> Tensor:
        """``[..., D]`` to ``[..., D]``. Collective over the cells."""
        self.routed.rows.begin(is_training=self.training)
        x_TD = hidden.reshape(-1, hidden.shape[-1])
        self.l_aux, _, _, ids_KT, _, score_KT, self.exp_counts = self.gate(x_TD, used_token, True)
        expert_TK = ids_KT.T.contiguous().to(torch.int64)
        y_TD = self.routed(x_TD, expert_TK, score_KT.T.contiguous(), self.weights())
        return y_TD.view_as(hidden)
