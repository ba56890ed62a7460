# SPDX-License-Identifier: Apache-2.0
"""A small model of our own, in variants that published ones do not come in.

Shape letters: B rows of a batch, T positions, D model width, E experts, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_moe_ext import ExpertsDescription, FeedForwardExperts, register_experts
from ds_moe_ext.moe.feed_forward import silu_gated
from ds_moe_ext.moe.slot_rows import SlotRows
from ds_moe_ext.testing import dense_experts

VOCABULARY, LENGTH, D, HEADS, TOP_K = 64, 16, 16, 2, 2


@dataclass(frozen=True)
class Shape:
    """What is unusual about a variant."""

    experts: tuple[int, ...] = (8, 8, 8)
    widths: tuple[int, ...] = (12,)
    shares_first: bool = False
    trains: tuple[str, ...] = ("",)


class Experts(nn.Module):
    """Every expert on every token."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up_EFD = nn.Parameter(torch.randn(num_experts, 2 * width, D) * 0.3)
        self.down_EDF = nn.Parameter(torch.randn(num_experts, D, width) * 0.3)

    def forward(self, x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor) -> Tensor:
        return dense_experts(x_TD, expert_TK, score_TK, self.up_EFD, self.down_EDF)


@register_experts(Experts)
def _describe(experts: Experts) -> ExpertsDescription:
    names = ("up_EFD", "down_EDF")
    return ExpertsDescription(experts.num_experts, names, FeedForwardExperts(silu_gated))


class PairedExperts(nn.Module):
    """Experts with two weights that have one gradient: what is added to one must not reach the
    other."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.first_EDD = nn.Parameter(torch.randn(num_experts, D, D) * 0.2)
        self.second_EDD = nn.Parameter(torch.randn(num_experts, D, D) * 0.2)

    def forward(self, x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor) -> Tensor:
        y_ETD = torch.tanh(x_TD @ (self.first_EDD + self.second_EDD))
        y_TKD = y_ETD.transpose(0, 1).gather(1, expert_TK[..., None].expand(-1, -1, D))
        return (y_TKD * score_TK[..., None]).sum(dim=1)


def _paired(rows_RD: Tensor, slots: SlotRows, weights: tuple[Tensor, ...]) -> Tensor:
    if not weights:
        return rows_RD.clone()
    pairs = zip(rows_RD.split(slots.on_host()), weights[::2], weights[1::2])
    return torch.cat([torch.tanh(rows @ (first + second)) for rows, first, second in pairs])


@register_experts(PairedExperts)
def _describe_paired(experts: PairedExperts) -> ExpertsDescription:
    return ExpertsDescription(experts.num_experts, ("first_EDD", "second_EDD"), _paired)


class Block(nn.Module):
    """Causal attention, then experts."""

    def __init__(self, experts: Experts | PairedExperts) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.query_key_value = nn.Linear(D, 3 * D, bias=False)
        self.router = nn.Linear(D, experts.num_experts, bias=False)
        nn.init.normal_(self.router.weight, std=0.5)
        self.experts = experts

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self._attended(self.attention_norm(x_BTD))
        x_TD = self.norm(x_BTD).flatten(0, 1)
        score_TK, expert_TK = self.router(x_TD).softmax(dim=-1).topk(TOP_K)
        return x_BTD + self.experts(x_TD, expert_TK, score_TK).view_as(x_BTD)

    def _attended(self, x_BTD: Tensor) -> Tensor:
        heads = self.query_key_value(x_BTD).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        y_BHTd = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y_BHTd.transpose(1, 2).flatten(-2)


class Output(NamedTuple):
    """Of the model, as the jobs read it."""

    loss: Tensor


class Toy(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        widths = shape.widths * (len(shape.experts) // len(shape.widths))
        self.embedding = nn.Embedding(VOCABULARY, D)
        experts = (
            Experts(count, width) if width else PairedExperts(count)
            for count, width in zip(shape.experts, widths)
        )
        self.blocks = nn.ModuleList(map(Block, experts))
        if shape.shares_first:
            self.blocks[-1].experts = self.blocks[0].experts
        self.head = nn.Linear(D, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(any(part in name for part in shape.trains))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        """Both int64 ``[B, T]``."""
        x_BTD = self.embedding(input_ids)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = self.head(x_BTD).flatten(0, 1)
        return Output(functional.cross_entropy(logits, labels.flatten()))


_SHAPES = {
    "toy": Shape(),
    "toy, two experts a layer": Shape((2, 2, 2, 2)),
    "toy, uneven layers": Shape((2, 6, 3, 5)),
    "toy, two pools": Shape((2, 6, 3, 5), (12, 12, 20, 20)),
    "toy, shared experts": Shape(shares_first=True),
    "toy, paired": Shape(widths=(0,)),
    "toy, wide": Shape(widths=(64,)),
    "toy, deep": Shape(experts=(8,) * 7, widths=(64,)),
    "toy, experts alone": Shape((2, 2, 2, 2), trains=("experts",)),
    "toy, frozen experts": Shape(trains=("norm", "router", "query", "head", "embedding")),
    "toy, some experts frozen": Shape(trains=("norm", "router", "query", "blocks.1.", "head")),
    "toy, top alone": Shape(trains=("blocks.2.", "head")),
}
NAMES = tuple(_SHAPES)


def build(name: str) -> Toy:
    """The variant of this name."""
    return Toy(_SHAPES[name])
