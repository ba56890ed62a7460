# SPDX-License-Identifier: Apache-2.0
"""Tokens that several ranks have alike, as under tensor parallelism: each routes a part of them.

What FSMoE does by scattering and gathering along the sequence (spec 1.7, steps 2 and 10), for
models whose attention ends in an all-reduce. Shape letters: T tokens, K choices a token, D model
width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.comm import all_gather_rows
from ds_moe_ext.moe.gate import RunRows
from ds_moe_ext.schedule.task import Cut


@dataclass(frozen=True, eq=False)
class TokenParts:
    """Experts for tokens that all ranks of a group have alike; so are the outputs. Collective.

    Gradients are alike too, those of the outputs as what follows computes them, and those of the
    tokens and scores as what came before wants them.

    Attributes:
        run: the experts, on this rank's part of the tokens.
        group: the ranks; a communicator that the model's thread uses.
    """

    run: RunRows
    group: dist.ProcessGroup

    def __call__(
        self, x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor, weights: tuple[Tensor, ...]
    ) -> Tensor:
        bounds = Cut.equal(x_TD.shape[0], self.group.size()).bounds
        here = self.group.rank()
        own_TK = expert_TK[bounds[here] : bounds[here + 1]]
        x_part, score_part = (_Part.apply(whole, bounds, self.group) for whole in (x_TD, score_TK))
        y_part = self.run(x_part, own_TK, score_part, weights)
        y_TD: Tensor = _Whole.apply(y_part, bounds, self.group)
        return y_TD


def _part(whole: Tensor, bounds: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    here = group.rank()
    return whole[bounds[here] : bounds[here + 1]]


def _whole(part: Tensor, bounds: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    lengths = [stop - start for start, stop in pairwise(bounds)]
    return all_gather_rows(part, lengths, group)


class _Part(torch.autograd.Function):
    """This rank's part of what all have; the parts' gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, *where: Any) -> Tensor:
        ctx.where = where
        return _part(whole, *where).clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _whole(grad, *ctx.where), None, None


class _Whole(torch.autograd.Function):
    """What all parts are together; of its gradient, which all have, each takes its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, *where: Any) -> Tensor:
        ctx.where = where
        return _whole(part, *where)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _part(grad, *ctx.where).contiguous(), None, None
