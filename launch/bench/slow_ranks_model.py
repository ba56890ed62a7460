# SPDX-License-Identifier: Apache-2.0
"""A small language model whose blocks take as long as they are told: see ``pace.py``.

Embeddings, norms, gates, head and loss are real and trained; attention is one matrix product. What
a block computes before its experts ends when its time has passed, and so do the experts, which are
``PacedExperts``. All experts have equally many rows, for a token's experts follow from its place:
the gate only weighs them. Shape letters: B samples, T tokens of a sample or of all, K choices of a
token, E experts, D model width.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pace import BACKWARD, Pace, PacedExperts
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 64


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a model, and of what each rank brings to a step.

    Attributes:
        layers: blocks, each with experts.
        experts: of a layer.
        top_k: experts of a token.
        width: of the model.
        expert_width: rows of an expert's weights.
        length: tokens of a sample.
        samples: of a rank's batch.
    """

    layers: int
    experts: int
    top_k: int
    width: int
    expert_width: int
    length: int
    samples: int

    @property
    def tokens(self) -> int:
        """Of a rank's batch."""
        return self.samples * self.length


@dataclass
class _Begun:
    """What a block computes before its experts, in one direction.

    Attributes:
        pace: of the rank; ``attention_s`` is that of its whole batch.
        share: of that batch.
        at_s: moment of ``time.perf_counter`` at which it began.
    """

    pace: Pace
    share: float
    at_s: float = 0.0

    def begin(self) -> None:
        self.at_s = time.perf_counter()

    def end(self, times: float) -> None:
        """Let the thread sleep until it has taken so many times as long as forward."""
        self.pace.hold(self.at_s, times * self.share * self.pace.attention_s)


class _Enter(torch.autograd.Function):
    """Begins forward, and ends backward."""

    @staticmethod
    def forward(ctx: Any, begun: _Begun, x_BTD: Tensor) -> Tensor:
        ctx.begun = begun
        begun.begin()
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[None, Tensor]:
        ctx.begun.end(BACKWARD)
        return None, grad_BTD


class _Leave(torch.autograd.Function):
    """Ends forward, and begins backward."""

    @staticmethod
    def forward(ctx: Any, begun: _Begun, x_TD: Tensor, score_TK: Tensor) -> tuple[Tensor, Tensor]:
        ctx.begun = begun
        begun.end(1.0)
        return x_TD.view_as(x_TD), score_TK.view_as(score_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor, grad_TK: Tensor) -> tuple[None, Tensor, Tensor]:
        ctx.begun.begin()
        return None, grad_TD, grad_TK


class Block(nn.Module):
    """Attention that is paced, then experts that are, both beside a residual.

    Args:
        pace: of this rank; its ``attention_s`` is that of the rank's own batch.
        shape: of the model.
    """

    def __init__(self, pace: Pace, shape: Shape) -> None:
        super().__init__()
        self.pace, self.shape = pace, shape
        self.attention_norm, self.norm = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = nn.Linear(shape.width, shape.width, bias=False)
        self.gate = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts: nn.Module = PacedExperts(
            pace, (shape.experts, shape.expert_width, shape.width)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        begun = _Begun(self.pace, x_BTD.shape[0] / self.shape.samples)
        x_BTD = _Enter.apply(begun, x_BTD)
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        x_TD = self.norm(x_BTD).flatten(0, 1)
        expert_TK = balanced(len(x_TD), self.shape.top_k, self.shape.experts)
        score_TK = self.gate(x_TD).gather(1, expert_TK).softmax(dim=-1)
        x_TD, score_TK = _Leave.apply(begun, x_TD, score_TK)
        return x_BTD + self.experts(x_TD, expert_TK, score_TK).view_as(x_BTD)


def balanced(num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    """Each token's experts, int64 ``[T, K]``, in turn: with no remainder all have equally many."""
    return torch.arange(num_tokens * top_k).view(num_tokens, top_k) % num_experts


class Output(NamedTuple):
    """Of the model."""

    loss: Tensor


class Model(nn.Module):
    """Embedding, blocks, head, loss."""

    def __init__(self, pace: Pace, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList([Block(pace, shape) for _ in range(shape.layers)])
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        """Both int64 ``[B, T]``."""
        x_BTD = self.embedding(input_ids)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = self.head(x_BTD).flatten(0, 1)
        return Output(functional.cross_entropy(logits, labels.flatten()))


def batch_of(shape: Shape, step: int, rank: int) -> Tensor:
    """Tokens of a rank in a step, the same for all contenders, int64 ``[B, T]``."""
    generator = torch.Generator().manual_seed(1009 * step + rank)
    return torch.randint(0, VOCABULARY, (shape.samples, shape.length), generator=generator)
