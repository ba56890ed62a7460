"""The contenders of bench_layer.py for parts of a layer: gates, and orders with experts that do
nothing.

Shape letters: T tokens, K choices a token, E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from bench_contenders import Builder, Contender, Problem, one_cell
from torch import Tensor, nn

from ds_moe_ext.moe.gate import Gate, SoftmaxTopK
from ds_moe_ext.moe.gates.gate_object import GATES
from ds_moe_ext.moe.layer import MoELayer
from ds_moe_ext.moe.order import SlotRows
from ds_moe_ext.moe.orderings import IndexOrdering, OneHotOrdering, Ordering, Seats, room_of
from ds_moe_ext.strategies.ep import ExpertParallel

# Gates alone: tokens to scores.


def gate_alone(name: str, problem: Problem) -> Contender:
    """Logits, choice and losses; noise as in training."""
    gate, weights = _gate_of(name, problem)
    return Contender(
        name,
        lambda x: gate(x, tuple(weights), is_training=True).score_TK,
        tuple(weights),
        is_exact=False,
    )


def soft_mixture(name: str, problem: Problem) -> Contender:
    """As it chooses nothing, both of its mixtures are measured, around experts that do nothing."""
    gate, weights = _gate_of("soft", problem)
    mixed = gate.around(lambda slots, experts, scores, weights: slots, lambda: 1)

    def call(x: Tensor) -> Tensor:
        choice = gate(x, tuple(weights))
        return mixed(x, choice.expert_TK, choice.score_TK, ())

    return Contender(name, call, tuple(weights), is_exact=False)


def _gate_of(name: str, problem: Problem) -> tuple[Gate, nn.ParameterList]:
    gate = GATES[name]().with_top_k(problem.shape.top_k)
    weights = nn.ParameterList()
    for wanted in gate.weights(*problem.gate_ED.shape):
        weight = torch.empty(wanted.shape, device=problem.x_TD.device, dtype=problem.x_TD.dtype)
        wanted.fill(weight)
        weights.append(weight)
    return gate, weights


def deepspeed_gate(name: str, problem: Problem) -> Contender:
    """``TopKGate``, as DeepSpeed's layer calls it: it finds places in the experts' buffers too."""
    gate = _deepspeed_gate_of(problem)
    return Contender(name, lambda x: gate(x, None, True)[5].T, tuple(gate.parameters()), False)


def _deepspeed_gate_of(problem: Problem) -> Any:
    from deepspeed.moe.sharded_moe import TopKGate

    num_experts, width = problem.gate_ED.shape
    gate = TopKGate(
        width,
        num_experts,
        k=problem.shape.top_k,
        drop_tokens=False,
        top2_2nd_expert_sampling=False,
    ).to(problem.x_TD.device)
    with torch.no_grad():
        gate.wg.weight.copy_(problem.gate_ED)
    return gate


# Softmax top-k, order, experts that do nothing, I-Order: tokens to tokens. Nothing is dropped.


def our_order(name: str, problem: Problem) -> Contender:
    """As strategies run it: the program of a layer on one rank, with all its stages."""
    site = one_cell(problem.shape.num_experts)
    layer = MoELayer(
        nn.ParameterList([problem.gate_ED.clone()]),
        nn.ParameterList(),
        gate=SoftmaxTopK(top_k=problem.shape.top_k),
        function=_nothing,
        strategy=ExpertParallel(),
        plan=site.plan,
        layout=site.layout,
    )
    return Contender(name, lambda x: layer(x).y, tuple(layer.parameters()))


def _nothing(rows_RD: Tensor, slots: SlotRows, weights: tuple[Tensor, ...]) -> Tensor:
    return rows_RD.clone()


def ordering(name: str, by: Ordering, problem: Problem) -> Contender:
    """A padded order function in plain autograd."""
    gate, weight = SoftmaxTopK(top_k=problem.shape.top_k), nn.Parameter(problem.gate_ED.clone())

    def call(x: Tensor) -> Tensor:
        choice = gate(x, (weight,))
        room = room_of(choice.expert_TK, problem.shape.num_experts, factor=None)
        seats = Seats.of(choice.expert_TK, problem.shape.num_experts, room)
        return by.restore(by.order(x, seats), choice.score_TK, seats)

    return Contender(name, call, (weight,))


def deepspeed_sparse(name: str, problem: Problem) -> Contender:
    """What DeepSpeed's MoE layer does today, by indices."""
    from deepspeed.moe import sharded_moe

    gate = _deepspeed_gate_of(problem)

    def call(x: Tensor) -> Tensor:
        _, capacity, num_experts, expert_KT, place_KT, score_KT, _ = gate(x, None, True)
        capacity = int(capacity)
        slots = sharded_moe._route_slots(expert_KT, place_KT, num_experts, capacity)
        rows_EBD = sharded_moe._sparse_encode(x, slots, num_experts, capacity)
        out: Tensor = sharded_moe._sparse_decode(
            rows_EBD.flatten(0, 1), slots, score_KT, x.shape[0]
        )
        return out

    return Contender(name, call, tuple(gate.parameters()), _same_router(problem))


def deepspeed_dense(name: str, problem: Problem) -> Contender:
    """What it did before: masks ``[T, E, B]`` and einsums."""
    gate = _deepspeed_gate_of(problem)

    def call(x: Tensor) -> Tensor:
        _, weight_TEB, mask_TEB, _ = gate(x)
        rows_EBD = torch.einsum("teb,td->ebd", mask_TEB.to(x.dtype), x)
        return torch.einsum("teb,ebd->td", weight_TEB.to(x.dtype), rows_EBD)

    return Contender(name, call, tuple(gate.parameters()), _same_router(problem))


def _same_router(problem: Problem) -> bool:
    """DeepSpeed's works in float32: in bfloat16 it may choose otherwise."""
    return problem.x_TD.dtype == torch.float32


GATE_BUILDERS: Mapping[str, Builder] = {
    **{name: partial(gate_alone, name) for name in GATES if name != "soft"},
    "soft, with both mixtures": partial(soft_mixture, "soft, with both mixtures"),
    "DeepSpeed TopKGate": partial(deepspeed_gate, "DeepSpeed TopKGate"),
}
ORDER_BUILDERS: Mapping[str, Builder] = {
    "ours: the program's Order": partial(our_order, "ours: the program's Order"),
    "index ordering (Tutel)": partial(ordering, "index ordering (Tutel)", IndexOrdering()),
    "one-hot ordering (GShard)": partial(ordering, "one-hot ordering (GShard)", OneHotOrdering()),
    "DeepSpeed TopKGate, by index": partial(deepspeed_sparse, "DeepSpeed TopKGate, by index"),
    "DeepSpeed TopKGate, einsum": partial(deepspeed_dense, "DeepSpeed TopKGate, einsum"),
}
