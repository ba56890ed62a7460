# SPDX-License-Identifier: Apache-2.0
"""The contenders of layer_speed.py: ours, Hugging Face's, DeepSpeed's, and a dense ceiling; gates
alone, and orders around experts that do nothing.

Shape letters: T tokens, K choices a token, E experts, D model width, F expert width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from order_functions import IndexOrdering, OneHotOrdering, Ordering, Seats, room_of
from torch import Tensor, nn

from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.hosts import huggingface
from ds_moe_ext.hosts.attachment.host_layer import any_name
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.gate import GATES, Gate, SoftmaxTopK
from ds_moe_ext.moe.layer import MoELayer, RoutedExperts
from ds_moe_ext.moe.sharding import WHOLE
from ds_moe_ext.moe.slot_rows import SlotRows
from ds_moe_ext.planning.strategy import Job, Site
from ds_moe_ext.strategies.ep import ExpertParallel

OURS, CEILING = "ours: MoELayer", "dense FFN of the same FLOPs"


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer, and how many tokens fill a GPU with it."""

    width: int
    expert_width: int
    num_experts: int
    top_k: int
    num_tokens: int

    def num_flops(self, num_tokens: int) -> float:
        """Of the experts' matrix products, forward and backward."""
        return 3 * 6.0 * num_tokens * self.top_k * self.width * self.expert_width


SHAPES = {
    "mixtral_8x7b": Shape(4096, 14336, 8, 2, 8192),
    "qwen3_30b_a3b": Shape(2048, 768, 128, 8, 8192),
    # What a rank of 8 has: 32 of 256 experts, and as many rows as it sends.
    "deepseek_v3_of_8": Shape(7168, 2048, 32, 8, 8192),
    "small": Shape(256, 512, 8, 2, 1024),
}


@dataclass(frozen=True, eq=False)
class Problem:
    """The weights that contenders share, and what goes through them.

    Attributes:
        gate_ED: router.
        up_EFD: gate and up projections joined, ``[E, 2F, D]``.
        down_EDF: down projections.
        x_TD: tokens.
        grad_TD: gradient of the output.
    """

    shape: Shape
    gate_ED: Tensor
    up_EFD: Tensor
    down_EDF: Tensor
    x_TD: Tensor
    grad_TD: Tensor

    @classmethod
    def of(
        cls, shape: Shape, num_tokens: int, *, skew: float, device: torch.device, dtype: torch.dtype
    ) -> Problem:
        """Random weights; expert ``e``'s logit is biased by ``-skew * log(1 + e)``."""
        generator = torch.Generator(device).manual_seed(1)

        def rand(*size: int, scale: float = 1.0) -> Tensor:
            out = torch.empty(size, device=device, dtype=dtype)
            return out.normal_(0.0, scale, generator=generator)

        e, d, f = shape.num_experts, shape.width, shape.expert_width
        gate_ED, x_TD = rand(e, d, scale=d**-0.5), rand(num_tokens, d)
        # The last input is always one: its column of the router biases the routing.
        x_TD[:, -1] = 1.0
        gate_ED[:, -1] = -skew * torch.arange(1, e + 1, device=device).log()
        up_EFD, down_EDF = rand(e, 2 * f, d, scale=d**-0.5), rand(e, d, f, scale=f**-0.5)
        return cls(shape, gate_ED, up_EFD, down_EDF, x_TD, rand(num_tokens, d))


Layer = Callable[[Tensor], Tensor]  # [T, D] -> [T, D]


@dataclass(frozen=True, eq=False)
class Contender:
    """One way to compute the layer.

    Attributes:
        name: shown in the table.
        layer: called with ``x``.
        parameters: whose gradients are cleared before each repetition.
        is_exact: computes the same function of the same weights, so that results are compared.
    """

    name: str
    layer: Layer
    parameters: tuple[nn.Parameter, ...]
    is_exact: bool = True


def ours(problem: Problem) -> Contender:
    """All six sub-modules in one program, one cell, strategy ep."""
    shape, site = problem.shape, one_cell(problem.shape.num_experts)
    up_EFD, down_EDF = problem.up_EFD.clone(), problem.down_EDF.clone()
    layer = MoELayer(
        nn.ParameterList([problem.gate_ED.clone()]),
        nn.ParameterList([weight for pair in zip(up_EFD, down_EDF) for weight in pair]),
        gate=SoftmaxTopK(top_k=shape.top_k),
        function=FeedForwardExperts(silu_gated),
        strategy=ExpertParallel(),
        plan=site.plan,
        layout=site.layout,
    )
    return Contender(OURS, lambda x: layer(x).y, tuple(layer.parameters()))


def one_cell(num_experts: int) -> Site:
    strategy, home = ExpertParallel(), Placement.block(num_experts, 1)
    layout = ParallelLayout.build(Grid(1, 1), strategy.uses())
    (plan,) = strategy.plan(Job.at_start([home], layout.node_C))
    return Site(plan, layout, 0)


def ours_in_hugging_face(problem: Problem) -> Contender:
    """Hugging Face's block with its own router; its experts replaced as the plug-in does it."""
    block = _mixtral_block(problem, "grouped_mm")
    site = one_cell(problem.shape.num_experts)
    for found in list(huggingface.find(block, any_name)):
        held = torch.arange(found.num_experts)
        found.adopt(held, WHOLE, lambda function: RoutedExperts(ExpertParallel(), site, function))
    return _hugging_face_contender("ours: experts of a Hugging Face block", block)


def hugging_face(implementation: str, problem: Problem) -> Contender:
    """Mixtral's block as transformers runs it."""
    block = _mixtral_block(problem, implementation)
    return _hugging_face_contender(f"Hugging Face {implementation}", block)


def _hugging_face_contender(name: str, block: nn.Module) -> Contender:
    return Contender(name, lambda x: block(x[None])[0], tuple(block.parameters()))


def _mixtral_config(shape: Shape, implementation: str) -> Any:
    from transformers.models.mixtral import MixtralConfig

    config = MixtralConfig(
        hidden_size=shape.width,
        intermediate_size=shape.expert_width,
        num_local_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = implementation
    return config


def _mixtral_block(problem: Problem, implementation: str) -> Any:
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = _mixtral_config(problem.shape, implementation)
    with torch.device(problem.x_TD.device):
        block: Any = MixtralSparseMoeBlock(config).to(problem.x_TD.dtype)
    with torch.no_grad():
        block.gate.weight.copy_(problem.gate_ED)
        block.experts.gate_up_proj.copy_(problem.up_EFD)
        block.experts.down_proj.copy_(problem.down_EDF)
    return block


def auto_ep(name: str, settings: Mapping[str, str], problem: Problem) -> Contender:
    """DeepSpeed AutoEP's layer, converted from a Mixtral block by DeepSpeed's own replacement."""
    layer = auto_ep_layer(settings, problem, ep_size=1)

    def call(x: Tensor) -> Tensor:
        out = layer(x[None])
        return (out[0] if isinstance(out, tuple) else out).view_as(x)

    return Contender(name, call, tuple(layer.parameters()))


def auto_ep_layer(settings: Mapping[str, str], problem: Problem, *, ep_size: int) -> Any:
    """Of the first rank of those that divide the experts."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config

    # AutoEP finds blocks by name.
    host = nn.Module()
    host.model = nn.Module()
    host.model.layers = nn.ModuleList([nn.Module()])
    host.model.layers[0].mlp = _mixtral_block(problem, "grouped_mm")
    host.config = _mixtral_config(problem.shape, "grouped_mm")
    block_settings = {"enabled": True, "preset_model": "mixtral", **settings}
    converter = AutoEP(host, parse_autoep_config(block_settings))
    (spec,) = converter.ep_parser()
    converter.replace_moe_layer(spec, ep_size=ep_size, ep_rank=0)
    return host.model.layers[0].mlp


def deepspeed_native(capacity_factor: float | None, problem: Problem) -> Contender:
    """``deepspeed.moe.layer.MoE`` with SwiGLU experts; no capacity factor: nothing is dropped."""
    from deepspeed.moe.layer import MoE

    shape = problem.shape
    with torch.device(problem.x_TD.device), redirect_stdout(sys.stderr):
        moe = MoE(
            shape.width,
            SwiGlu(shape.width, shape.expert_width, plain_silu_gated),
            num_experts=shape.num_experts,
            k=shape.top_k,
            capacity_factor=capacity_factor or 1.0,
            drop_tokens=capacity_factor is not None,
            top2_2nd_expert_sampling=False,
        ).to(problem.x_TD.dtype)
        moe.set_deepspeed_parallelism()
    with torch.no_grad():
        moe.deepspeed_moe.gate.wg.weight.copy_(problem.gate_ED)
        experts = moe.deepspeed_moe.experts.deepspeed_experts
        for expert, up_FD, down_DF in zip(experts, problem.up_EFD, problem.down_EDF):
            expert.up.weight.copy_(up_FD)
            expert.down.weight.copy_(down_DF)
    way = "dropless" if capacity_factor is None else f"capacity {capacity_factor}"
    return Contender(
        f"DeepSpeed MoE {way}",
        lambda x: moe(x[None])[0][0],
        tuple(moe.parameters()),
        # Its router works in float32: in bfloat16 it may choose otherwise.
        is_exact=capacity_factor is None and problem.x_TD.dtype == torch.float32,
    )


def plain_silu_gated(gate_up: Tensor) -> Tensor:
    """As people write it."""
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


class SwiGlu(nn.Module):
    """One expert: gate and up joined, activation, down."""

    def __init__(
        self, width: int, expert_width: int, activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(width, 2 * expert_width, bias=False)
        self.down = nn.Linear(expert_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(x)))
        return out


def dense(problem: Problem) -> Contender:
    """All ``T * K`` rows through one expert: the matrix products, and nothing of routing."""
    shape, x_TD = problem.shape, problem.x_TD
    with torch.device(x_TD.device):
        ffn = SwiGlu(shape.width, shape.expert_width, silu_gated).to(x_TD.dtype)
    rows_ND = x_TD.repeat(shape.top_k, 1).requires_grad_()
    num_tokens = x_TD.shape[0]

    def call(x: Tensor) -> Tensor:
        # x is not read: to copy it K times is no part of the ceiling.
        out: Tensor = ffn(rows_ND)
        return out.view(shape.top_k, num_tokens, shape.width)

    return Contender(CEILING, call, tuple(ffn.parameters()), is_exact=False)


Builder = Callable[[Problem], Contender]

FUSED = {"gate_up_impl": "fused", "combine_impl": "fused_weighted_sum"}
BUILDERS: Mapping[str, Builder] = {
    OURS: ours,
    "ours: experts of a Hugging Face block": ours_in_hugging_face,
    "Hugging Face grouped_mm": partial(hugging_face, "grouped_mm"),
    "Hugging Face eager": partial(hugging_face, "eager"),
    "Hugging Face batched_mm": partial(hugging_face, "batched_mm"),
    "DeepSpeed AutoEP": partial(auto_ep, "DeepSpeed AutoEP", {}),
    "DeepSpeed AutoEP, fused options": partial(auto_ep, "DeepSpeed AutoEP, fused options", FUSED),
    "DeepSpeed MoE dropless": partial(deepspeed_native, None),
    "DeepSpeed MoE capacity 1.25": partial(deepspeed_native, 1.25),
    CEILING: dense,
}
BATCHED_BYTES = 2**30  # batched_mm copies an expert's weights for every row


def reason_to_leave_out(name: str, problem: Problem) -> str | None:
    """Why a contender is not even tried."""
    shape, num_rows = problem.shape, problem.x_TD.shape[0] * problem.shape.top_k
    copied = num_rows * 3 * shape.width * shape.expert_width * problem.x_TD.element_size()
    if name == "Hugging Face batched_mm" and copied > BATCHED_BYTES:
        return f"would copy {copied / 2**30:,.0f} GiB of weights: one expert a row"
    return None


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
