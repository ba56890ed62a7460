# SPDX-License-Identifier: Apache-2.0
"""Gate: which experts a token goes to, with what score, and what the choice costs.

A gate is a function of hidden states and its own weights. ``Gate`` makes one that JSON can name;
more of them are in ``gates/``. Shape letters: T tokens, K choices a token, E experts, D model
width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class Choice(NamedTuple):
    """What a gate decides.

    Attributes:
        expert_TK: chosen experts, int64 ``[T, K]``, best first; -1 where a choice is not used.
        score_TK: weight of each choice in the output, ``[T, K]``.
        losses: load-balance loss and z-loss, unscaled, ``[2]``.
    """

    expert_TK: Tensor
    score_TK: Tensor
    losses: Tensor


GateFunction = Callable[[Tensor, tuple[Tensor, ...]], Choice]


RunRows = Callable[[Tensor, Tensor, Tensor, tuple[Tensor, ...]], Tensor]
"""Rows ``[T, D]``, experts and scores ``[T, K]`` and the experts' weights to outputs ``[T, D]``."""


@dataclass(frozen=True)
class GateWeight:
    """One weight that a gate learns.

    Attributes:
        name: of the parameter. "weight" is the one that a host's router has already: its values
            stay where the shape is the same.
        shape: of the parameter.
        fill: draws its first values in place, with torch's default generator.
    """

    name: str
    shape: tuple[int, ...]
    fill: Callable[[Tensor], object]


@dataclass(frozen=True, kw_only=True)
class Gate(ABC):
    """A gate. A subclass is a frozen dataclass: its fields are its JSON keys.

    Attributes:
        top_k: choices ``K``; null takes as many as the host's router.
        looks_ahead: a token's experts depend on tokens after it.
        may_drop: ids may be -1, for choices that are not used.
        is_even: every expert gets as many rows, so that none is over capacity.
    """

    top_k: int | None = None
    looks_ahead: ClassVar[bool] = False
    may_drop: ClassVar[bool] = False
    is_even: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; a token needs 1 expert or more")

    def __call__(
        self, x_TD: Tensor, weights: tuple[Tensor, ...], *, is_training: bool = False
    ) -> Choice:
        """Choose. Scores are at least float32."""
        return self.choose(self.logits_of(x_TD, weights, is_training=is_training))

    def weights(self, num_experts: int, width: int) -> tuple[GateWeight, ...]:
        """What it learns for ``E`` experts of width ``D``; one ``[E, D]`` unless overridden."""
        return (projection("weight", num_experts, width),)

    def logits_of(self, x_TD: Tensor, weights: tuple[Tensor, ...], *, is_training: bool) -> Tensor:
        """What is compared, ``[T, E]``; ``x W^T`` unless overridden. Hosts take their own
        load-balance loss from it."""
        return logits(x_TD, weights[0])

    @abstractmethod
    def choose(self, logit_TE: Tensor) -> Choice:
        """Experts, scores and losses."""

    def by_expert(self, logit_TE: Tensor) -> Tensor:
        """The logits of ``logits_of`` as one for each expert, ``[T, E]``."""
        return logit_TE

    def around(self, run: RunRows, num_sequences: Callable[[], int]) -> RunRows:
        """What to do before and behind the experts: nothing, for tokens are the rows.

        Args:
            run: the experts.
            num_sequences: how many sequences of one length the tokens of the coming call are.
        """
        return run

    def with_top_k(self, top_k: int | None) -> Gate:
        """The gate with this ``top_k`` if it has none."""
        return self if self.top_k is not None else replace(self, top_k=top_k)

    @property
    def num_choices(self) -> int:
        """``top_k``, which must be known by now."""
        if self.top_k is None:
            raise ValueError(f"top_k of {type(self).__name__} is null and no host has one; give it")
        return self.top_k


@dataclass(frozen=True, kw_only=True)
class SoftmaxTopK(Gate):
    """Softmax over all experts, the k best of them (GShard, Switch Transformer, Mixtral, Qwen3).

    Attributes:
        renormalize: scale the scores of a token to sum to one (Mixtral; Qwen3's norm_topk_prob).
    """

    renormalize: bool = True

    def choose(self, logit_TE: Tensor) -> Choice:
        return choose_by_softmax(logit_TE, self.num_choices, renormalize=self.renormalize)


def projection(name: str, rows: int, width: int) -> GateWeight:
    """A weight ``[rows, D]`` whose products with hidden states of size 1 are of size 1."""
    return GateWeight(name, (rows, width), lambda w: torch.nn.init.normal_(w, std=width**-0.5))


def logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """``x W^T``, ``[T, E]``: multiplied in x's precision, given in float32 at least."""
    logit_TE = torch.nn.functional.linear(x_TD, weight_ED.to(x_TD.dtype))
    return logit_TE.to(torch.promote_types(logit_TE.dtype, torch.float32))


def choose_by_softmax(logit_TE: Tensor, top_k: int, *, renormalize: bool = True) -> Choice:
    """The ``top_k`` best, scored by softmax over those kept, or over all if not renormalized."""
    probability_TE = logit_TE.softmax(dim=-1)
    logit_TK, expert_TK = logit_TE.topk(top_k, dim=-1)  # probabilities may be zero in float32
    score_TK = logit_TK.softmax(dim=-1) if renormalize else probability_TE.gather(-1, expert_TK)
    losses = torch.stack((balance_loss(probability_TE, expert_TK), z_loss(logit_TE)))
    return Choice(expert_TK, score_TK, losses)


def balance_loss(probability_TE: Tensor, expert_TK: Tensor) -> Tensor:
    """``E * sum_e f_e * p_e``: f the share of rows, p the mean probability (Switch, eq. 4).

    It is 1 when both are uniform.
    """
    num_experts = probability_TE.shape[-1]
    rows_E = count(expert_TK.flatten(), num_experts)
    share_E = rows_E.to(probability_TE.dtype) / max(expert_TK.numel(), 1)
    mean_E = probability_TE.sum(dim=0) / max(probability_TE.shape[0], 1)
    return num_experts * (share_E * mean_E).sum()


def z_loss(logit_TE: Tensor) -> Tensor:
    """Mean square of the log-partition (ST-MoE, eq. 5): keeps logits small."""
    return logit_TE.logsumexp(dim=-1).square().sum() / max(logit_TE.shape[0], 1)


def count(ids_N: Tensor, num_ids: int) -> Tensor:
    """How often each id from 0 to ``num_ids - 1`` is there, int64 ``[num_ids]``.

    What ``bincount`` gives; but for that, on CUDA, the host waits.
    """
    return ids_N.new_zeros(num_ids).scatter_add_(0, ids_N, torch.ones_like(ids_N))


def capacity_of(num_rows: int, num_experts: int, factor: float) -> int:
    """Rows that one expert takes from one rank (GShard section 2.2): ``factor`` times the mean."""
    return math.ceil(factor * num_rows / num_experts - 1e-9)  # 50 x 1.1 is 55.000000000000007


def drop_over_capacity(expert_TK: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Mark the rows that come after ``capacity`` rows of the same expert with -1.

    First choices of all tokens come before second choices, then by token, as in GShard. Decided on
    the sender, before placement: which rows live does not depend on where experts are. Rows that
    are -1 already stay so and take no room.
    """
    expert_N = expert_TK.T.flatten()  # choice-major: GShard's priority
    by_expert_N = expert_N.argsort(stable=True)
    bucket_N = expert_N + 1  # 0: dropped before
    rows = count(bucket_N, num_experts + 1)
    first = rows.cumsum(dim=0) - rows
    nth_N = torch.empty_like(expert_N)  # how many rows of higher priority chose the same expert
    nth_N[by_expert_N] = (
        torch.arange(expert_N.numel(), device=expert_N.device) - first[bucket_N[by_expert_N]]
    )
    kept_N = expert_N.where(nth_N < capacity, -1)
    return kept_N.view(expert_TK.T.shape).T.contiguous()
