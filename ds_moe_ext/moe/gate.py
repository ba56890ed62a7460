# SPDX-License-Identifier: Apache-2.0
"""Gate: which experts a token goes to, with what score, and what the choice costs.

A gate is a function of hidden states and its own weights. ``Gate`` makes one that JSON can name;
more of them are in ``gates/``. Shape letters: T tokens, K choices a token, E experts, D model
width.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.init import constant_, normal_

from ds_moe_ext.core.comm import all_gather_rows
from ds_moe_ext.schedule.task import Cut
from ds_moe_ext.strict import check_object, found_at, named, read_record


class Choice(NamedTuple):
    """What a gate decides."""

    expert_TK: Tensor  # chosen experts, int64 ``[T, K]``, best first; -1 where a choice is not used
    score_TK: Tensor  # weight of each choice in the output, ``[T, K]``
    losses: Tensor  # load-balance loss and z-loss, unscaled, ``[2]``


GateFunction = Callable[[Tensor, tuple[Tensor, ...]], Choice]


RunRows = Callable[[Tensor, Tensor, Tensor, tuple[Tensor, ...]], Tensor]
"""Rows ``[T, D]``, experts and scores ``[T, K]`` and the experts' weights to outputs ``[T, D]``."""


@dataclass(frozen=True)
class GateWeight:
    """One weight that a gate learns."""

    # of the parameter. "weight" is the one that a host's router has already: its values stay where
    # the shape is the same.
    name: str
    shape: tuple[int, ...]  # of the parameter
    # draws its first values in place, with torch's default generator
    fill: Callable[[Tensor], object]


@dataclass(frozen=True, kw_only=True)
class Gate(ABC):
    """A gate. A subclass is a frozen dataclass: its fields are its JSON keys."""

    top_k: int | None = None  # choices ``K``; null takes as many as the host's router
    looks_ahead: ClassVar[bool] = False  # a token's experts depend on tokens after it
    may_drop: ClassVar[bool] = False  # ids may be -1, for choices that are not used
    is_even: ClassVar[bool] = False  # every expert gets as many rows, so that none is over capacity

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; a token needs 1 expert or more")

    def __call__(
        self, x_TD: Tensor, weights: tuple[Tensor, ...], *, is_training: bool = False
    ) -> Choice:
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
    """Softmax over all experts, the k best of them (GShard, Switch Transformer, Mixtral, Qwen3)."""

    # scale the scores of a token to sum to one (Mixtral; Qwen3's norm_topk_prob)
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


# Cosine top-k: the angle between token and expert in a few dimensions, not the token's length.


SHORTEST = 1e-4  # shorter vectors are not stretched to one: their gradients would have no bound


@dataclass(frozen=True, kw_only=True)
class CosineTopK(Gate):
    """Top-k of cosines over a learned temperature (X-MoE, Chi et al. 2022; FSMoE, section 3.1; the
    temperature as in Tutel's cosine gate)."""

    # softmax over those kept; else over all experts, which X-MoE's one choice needs for its score
    # to say anything
    renormalize: bool = True
    most: float = 100.0  # the logits are at most so large: cosine x min(1 / temperature, most)
    projection_size: int = 256  # width ``P`` in which angles are taken

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most <= 0 or self.projection_size < 1:
            raise ValueError(
                f"most {self.most} and projection_size {self.projection_size} leave no logits; "
                "give a most above 0 and a projection_size of 1 or more"
            )

    def weights(self, num_experts: int, width: int) -> tuple[GateWeight, ...]:
        """Projection ``[P, D]``, expert vectors ``[E, P]``, and the logarithm of 1 / temperature
        ``[1]``, whose start is Tutel's 0.5."""
        return (
            projection("projection", self.projection_size, width),
            GateWeight(
                "direction", (num_experts, self.projection_size), lambda w: normal_(w, std=0.01)
            ),
            GateWeight("sharpness", (1,), lambda w: constant_(w, math.log(2))),
        )

    def logits_of(self, x_TD: Tensor, weights: tuple[Tensor, ...], *, is_training: bool) -> Tensor:
        projection_PD, expert_EP, sharpness = weights
        cosine_TE = cosines(logits(x_TD, projection_PD), expert_EP)
        return cosine_TE * sharpness.to(cosine_TE.dtype).clamp(max=math.log(self.most)).exp()

    def choose(self, logit_TE: Tensor) -> Choice:
        return choose_by_softmax(logit_TE, self.num_choices, renormalize=self.renormalize)


def cosines(token_TP: Tensor, expert_EP: Tensor) -> Tensor:
    """Of the angle between each token and each expert, ``[T, E]``; 0 for a vector of zeros."""
    direction_TP = normalize(token_TP, dim=-1, eps=SHORTEST)
    direction_EP = normalize(expert_EP.to(token_TP.dtype), dim=-1, eps=SHORTEST)
    return direction_TP @ direction_EP.T


# Expert choice: experts choose tokens, each as many, so that the load is even by construction.


@dataclass(frozen=True, kw_only=True)
class ExpertChoice(Gate):
    """Each expert keeps its best tokens, scored by softmax over those kept (FSMoE, section 3.1;
    the idea is Zhou et al. 2022's, who take the softmax over experts).

    A token may have any number of experts, or none; ``top_k`` is how many it has on average.
    Experts choose among the tokens of one call, that is of one rank. The layer needs
    ``LayerOptions(gate_may_drop=True)``. Not for causal models: whether an expert keeps a token
    depends on later tokens, which are not there when text is generated.
    """

    capacity_factor: float = 1.0  # scales the average
    looks_ahead: ClassVar[bool] = True
    may_drop: ClassVar[bool] = True
    is_even: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capacity_factor <= 0:
            raise ValueError(
                f"capacity_factor {self.capacity_factor} leaves experts no tokens; give a "
                "factor above 0"
            )

    def choose(self, logit_TE: Tensor) -> Choice:
        """``K`` is the most experts that any token has, at least 1; the host waits for the device
        to know it. The load-balance loss is a constant: there is nothing to balance."""
        num_tokens, num_experts = logit_TE.shape
        rows = capacity_of(num_tokens * self.num_choices, num_experts, self.capacity_factor)
        kept_ER, token_ER = logit_TE.T.topk(min(rows, num_tokens), dim=-1)
        score_TE = torch.zeros_like(logit_TE).scatter(0, token_ER.T, kept_ER.softmax(dim=-1).T)
        is_kept_TE = torch.zeros_like(logit_TE, dtype=torch.bool).scatter_(0, token_ER.T, True)
        most = int(is_kept_TE.sum(dim=-1).max()) if num_tokens else 1
        by_score_TE = score_TE.where(is_kept_TE, -1).argsort(dim=-1, descending=True, stable=True)
        expert_TK = by_score_TE[:, :most]
        losses = torch.stack((logit_TE.new_full((), min(num_tokens, 1)), z_loss(logit_TE)))
        return Choice(
            expert_TK.where(is_kept_TE.gather(1, expert_TK), -1),
            score_TE.gather(1, expert_TK),
            losses,
        )


# Noisy top-k: noise, as large as the token asks for, lets other experts be tried.


@dataclass(frozen=True, kw_only=True)
class NoisyTopK(Gate):
    """Top-k of noisy logits, softmax over those kept (Shazeer et al. 2017, eq. 3 to 5; FSMoE's
    "GShard" gate, section 3.1).

    With one choice its score is always 1, and only the losses train the gate.
    """

    def weights(self, num_experts: int, width: int) -> tuple[GateWeight, ...]:
        """Of the logits and of the noise, ``[E, D]`` each; both start at zero, as Shazeer's."""
        shape = (num_experts, width)
        return tuple(GateWeight(name, shape, torch.nn.init.zeros_) for name in ("weight", "noise"))

    def logits_of(self, x_TD: Tensor, weights: tuple[Tensor, ...], *, is_training: bool) -> Tensor:
        """Noise is drawn in training only, from torch's default generator, ``T x E`` normal
        numbers a call."""
        weight_ED, noise_ED = weights
        logit_TE = logits(x_TD, weight_ED)
        if not is_training:
            return logit_TE
        deviation_TE = torch.nn.functional.softplus(logits(x_TD, noise_ED))
        return logit_TE + torch.randn_like(logit_TE) * deviation_TE

    def choose(self, logit_TE: Tensor) -> Choice:
        return choose_by_softmax(logit_TE, self.num_choices)


# Sigmoid top-k: each expert's score stands for itself; they need not sum to one.


@dataclass(frozen=True, kw_only=True)
class SigmoidTopK(Gate):
    """Top-k of the logits, each kept one scored by its sigmoid (BASE layers, StableMoE; FSMoE,
    section 3.1).

    Of the load-balance loss, the probabilities are a token's sigmoids over their sum, as in
    DeepSeek-V3.
    """

    def choose(self, logit_TE: Tensor) -> Choice:
        logit_TK, expert_TK = logit_TE.topk(self.num_choices, dim=-1)
        # Through logarithms: all sigmoids of a token may be zero in float32.
        probability_TE = torch.nn.functional.logsigmoid(logit_TE).softmax(dim=-1)
        losses = torch.stack((balance_loss(probability_TE, expert_TK), z_loss(logit_TE)))
        return Choice(expert_TK, logit_TK.sigmoid(), losses)


# SoftMoE: every slot of an expert takes a mixture of all tokens, every token one of all slots.


@dataclass(frozen=True, kw_only=True)
class SoftMixture(Gate):
    """Slot inputs ``D^T x``, output ``C e(slots)``: of the logits ``x Phi``, ``D`` is the softmax
    over the tokens of a sequence and ``C`` that over all slots (Puigcerver et al. 2024, section 2;
    FSMoE's specification, 1.3).

    The slots are the rows that travel: each goes to its expert with score 1, by any strategy.
    Nothing is chosen, so there is no ``top_k``. Not for causal models.
    """

    slots_per_expert: int = 1  # of each sequence
    looks_ahead: ClassVar[bool] = True
    is_even: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.top_k is not None:
            raise ValueError(f"top_k is {self.top_k}, but SoftMoE does not choose; leave it out")
        if self.slots_per_expert < 1:
            raise ValueError(f"slots_per_expert is {self.slots_per_expert}; it must be 1 or more")

    def with_top_k(self, top_k: int | None) -> Gate:
        return self

    def weights(self, num_experts: int, width: int) -> tuple[GateWeight, ...]:
        """``Phi``, ``[S, D]``, expert by expert."""
        return (projection("weight", num_experts * self.slots_per_expert, width),)

    def choose(self, logit_TE: Tensor) -> Choice:
        """Of logits by slot, ``[T, S]``: the expert of each slot, ``[1, S]``, and in the place of
        scores the logits themselves, for ``around`` to make both mixtures from. The load-balance
        loss is a constant: there is nothing to balance."""
        num_tokens, num_slots = logit_TE.shape
        slot_S = torch.arange(num_slots, device=logit_TE.device)
        losses = torch.stack((logit_TE.new_full((), min(num_tokens, 1)), z_loss(logit_TE)))
        return Choice(slot_S[None] // self.slots_per_expert, logit_TE, losses)

    def by_expert(self, logit_TE: Tensor) -> Tensor:
        """Their softmax is the weight of an expert's slots together."""
        return logit_TE.unflatten(-1, (-1, self.slots_per_expert)).logsumexp(dim=-1)

    def around(self, run: RunRows, num_sequences: Callable[[], int]) -> RunRows:
        """Mix before the experts and behind them."""

        def mixed(
            x_TD: Tensor, expert_1S: Tensor, logit_TS: Tensor, weights: tuple[Tensor, ...]
        ) -> Tensor:
            count = num_sequences()
            shape = (count, x_TD.shape[0] // count)
            x_BLD, logit_BLS = x_TD.unflatten(0, shape), logit_TS.unflatten(0, shape)
            slots_BSD = logit_BLS.softmax(dim=1).to(x_TD.dtype).transpose(1, 2) @ x_BLD
            rows_RD = slots_BSD.flatten(0, 1)
            expert_R1 = expert_1S.expand(count, -1).reshape(-1, 1)
            y_RD = run(rows_RD, expert_R1, torch.ones_like(rows_RD[:, :1]).detach(), weights)
            return (logit_BLS.softmax(dim=2).to(x_TD.dtype) @ y_RD.view_as(slots_BSD)).flatten(0, 1)

        return mixed


# Which gate a JSON object names, read strictly.


GATES: Mapping[str, type[Gate]] = {
    "softmax_top_k": SoftmaxTopK,
    "noisy_top_k": NoisyTopK,
    "sigmoid_top_k": SigmoidTopK,
    "cosine_top_k": CosineTopK,
    "expert_choice": ExpertChoice,
    "soft": SoftMixture,
}
"""By the name that JSON gives as ``type``."""

OWN = " A gate of your own is 'my_package.my_module:MyGate'"


def read_gate(values: Any, where: str) -> Gate:
    """A gate from a JSON object: its ``type``, and beside it the gate's own keys.

    Raises:
        ValueError: the type is unknown, or a key or value is not the gate's.
    """
    check_object(where, values)
    if "type" not in values:
        raise ValueError(f"{where} needs the key 'type'; add it: {', '.join(map(repr, GATES))}")
    keys = dict(values)
    cls = named(keys.pop("type"), f"{where}.type", GATES, _class_at, OWN)
    try:
        return read_record(cls, keys, where)
    except ValueError as error:
        if str(error).startswith(where):
            raise
        raise ValueError(f"{where}: {error}") from error


def _class_at(path: str, where: str) -> type[Gate]:
    cls = found_at(path, where, "'my_package.my_module:MyGate'")
    if not (isinstance(cls, type) and issubclass(cls, Gate)) or inspect.isabstract(cls):
        raise ValueError(
            f"{where} is {path!r}, which is not a gate; derive it from "
            "ds_moe_ext.moe.gate.Gate, and let it choose"
        )
    if "__dataclass_params__" not in vars(cls):
        raise ValueError(
            f"{where} is {path!r}, which is not a dataclass; make it one: its fields are its JSON "
            "keys"
        )
    return cls


# Tokens that several ranks have alike, as under tensor parallelism: each routes a part of them.


@dataclass(frozen=True, eq=False)
class TokenParts:
    """Experts for tokens that all ranks of a group have alike; so are the outputs. Collective.

    Gradients are alike too, those of the outputs as what follows computes them, and those of the
    tokens and scores as what came before wants them.
    """

    run: RunRows  # the experts, on this rank's part of the tokens
    group: dist.ProcessGroup  # the ranks; a communicator that the model's thread uses

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
