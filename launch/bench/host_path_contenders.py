# SPDX-License-Identifier: Apache-2.0
"""The contenders of host_path.py: tiny MoE layers of ours under a strategy each.

All take the same experts' ids and scores, which are made beforehand. Shape letters: L layers, T
tokens, K choices a token, E experts, D model width, F expert width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from fake_world import inline
from replaced_layers import CPU, ReplacedLayers
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.experts import ExpertsDescription, register_experts
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated

WIDTH = 8
"""Of tokens and of experts: what is computed takes no time beside what issues it."""


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch.

    Attributes:
        layers: ``L``.
        experts: ``E`` of a layer.
        tokens: ``T`` of a rank.
        top_k: ``K``.
        width: ``D``.
        expert_width: ``F``.
        dtype: of weights and tokens.
        device: where they are.
    """

    layers: int
    experts: int
    tokens: int
    top_k: int
    width: int = WIDTH
    expert_width: int = WIDTH
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU


@dataclass(frozen=True, eq=False)
class Batch:
    """What one step computes, and what gates would have chosen.

    Attributes:
        x_TD: tokens; their gradient is asked for.
        expert_LTK: choices, different ones of each token, int64.
        score_LTK: their weights; a leaf each, as routers are trained.
    """

    x_TD: Tensor
    expert_LTK: Sequence[Tensor]
    score_LTK: Sequence[Tensor]

    @classmethod
    def of(cls, sizes: Sizes, number: int, *, is_settled: bool = False) -> Batch:
        """The batch of a step. What experts are liked is of the layer and stays; who likes them is
        drawn anew in each step, or, where the run has settled, changes places with others: loads
        of many ranks that are drawn differ by less than those of one, which stands for all."""
        liked = torch.Generator().manual_seed(0)
        drawn = torch.Generator().manual_seed(number + 1)
        chosen = torch.Generator().manual_seed(0) if is_settled else drawn
        places_E = 1.0 + torch.arange(sizes.experts)
        experts, scores = [], []
        for _ in range(sizes.layers):
            weight_E = places_E[torch.randperm(sizes.experts, generator=liked)] ** -0.6
            weight_TE = weight_E.expand(sizes.tokens, -1)
            expert_TK = torch.multinomial(weight_TE, sizes.top_k, generator=chosen)
            if is_settled:
                expert_TK = expert_TK[torch.randperm(sizes.tokens, generator=drawn)]
            experts.append(expert_TK.to(sizes.device))
            score_TK = torch.rand(sizes.tokens, sizes.top_k, generator=drawn)
            scores.append(score_TK.to(sizes.device).requires_grad_())
        x_TD = torch.rand(sizes.tokens, sizes.width, generator=drawn)
        return cls(x_TD.to(sizes.device, sizes.dtype).requires_grad_(), experts, scores)


class Contender(ABC):
    """One way to run the layers.

    Args:
        name: in the table.
        model: whose gradients are freed before each step.

    Attributes:
        cpu_only: functions that wait on a CPU alone.
    """

    cpu_only: Collection[str] = ()

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name, self.model = name, model

    def turn(self) -> AbstractContextManager[None]:
        """In which all of a step happens."""
        return nullcontext()

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Tokens through all layers, ``[T, D]``."""

    def after_step(self, number: int) -> None:
        """What happens between the step of a number and the next: nothing."""
        return None

    @abstractmethod
    def attend(self, attentions: Sequence[nn.Module]) -> None:
        """Let these, ``[T, D] -> [T, D]``, stand before the experts of each block, and let tokens
        go past both, too."""


@dataclass(frozen=True)
class Way:
    """How layers of ours run.

    Attributes:
        name: in the table.
        block: of the JSON.
        has_threads: lanes are threads, as on a CPU; else one thread issues all, as on CUDA.
    """

    name: str
    block: Mapping[str, Any] = field(hash=False)
    has_threads: bool = False


_FSSDP = {"overlap_degree": 8, "copies_per_rank": 2, "reshard_interval": 0}
_EVERYWHERE = {**_FSSDP, "overlap_degree": 1024, "copies_per_rank": 1024, "share": "paper"}
_PROPHET = {"rematerialize": False}
"""As where a GPU has room; a rank of a CPU does as if it had little."""


def esp(degree: int, **keys: Any) -> dict[str, Any]:
    """The block of whole experts in so many chunks."""
    pipeline = {"degree": degree, "slice_gradients": False}
    return {"strategy": "esp", "expert_sharding_size": 1, "esp": pipeline, **keys}


WAYS = (
    Way("ep", {"strategy": "ep"}),
    Way("ep, static capacity", {"strategy": "ep", "ep": {"static_capacity": 16}}),
    Way("ep, send once", {"strategy": "ep", "ep": {"send_once": True}}),
    *(Way(f"esp, degree {degree}", esp(degree)) for degree in (1, 2, 4, 8)),
    Way("fssdp", {"strategy": "fssdp", "fssdp": _FSSDP}),
    Way("fssdp, all everywhere", {"strategy": "fssdp", "fssdp": _EVERYWHERE}),
    Way("fssdp, nothing copied", {"strategy": "fssdp", "fssdp": {**_FSSDP, "copies_per_rank": 0}}),
    Way("fssdp, paper share", {"strategy": "fssdp", "fssdp": {**_FSSDP, "share": "paper"}}),
    Way("prophet", {"strategy": "prophet", "prophet": _PROPHET}),
    Way("prophet, freed", {"strategy": "prophet", "prophet": {"rematerialize": True}}),
    Way("prophet, paper share", {"strategy": "prophet", "prophet": {**_PROPHET, "share": "paper"}}),
    Way("esp, degree 2, over fssdp", esp(2, balance="fssdp", fssdp=_FSSDP)),
    Way("esp, degree 2, over prophet", esp(2, balance="prophet", prophet=_PROPHET)),
    Way("esp, degree 2, threads", esp(2), has_threads=True),
    Way("fssdp, threads", {"strategy": "fssdp", "fssdp": _FSSDP}, has_threads=True),
    Way("prophet, threads", {"strategy": "prophet", "prophet": _PROPHET}, has_threads=True),
)
"""The first is what the others are compared with."""


class Experts(nn.Module):
    """SwiGLU experts as a host would have them; the product replaces them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, inner = sizes.width, sizes.expert_width

        def drawn(*shape: int) -> nn.Parameter:
            scaled = torch.rand(sizes.experts, *shape, dtype=sizes.dtype, device=sizes.device)
            return nn.Parameter(scaled * (WIDTH / shape[-1]) ** 0.5)

        self.gate_up, self.down = drawn(2 * inner, width), drawn(width, inner)


@register_experts(Experts)
def describe(experts: nn.Module) -> ExpertsDescription:
    """What the product has to know of them."""
    assert isinstance(experts, Experts)
    function = FeedForwardExperts(silu_gated)
    return ExpertsDescription(len(experts.down), ("gate_up", "down"), function)


class Block(nn.Module):
    """A transformer's block of which only the experts are left, if nobody lets it attend."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention: nn.Module | None = None
        self.experts: nn.Module = Experts(sizes)

    def forward(self, x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor) -> Tensor:
        if self.attention is not None:
            x_TD = x_TD + self.attention(x_TD)
        y_TD: Tensor = self.experts(x_TD, expert_TK, score_TK)
        return y_TD if self.attention is None else x_TD + y_TD


class Ours(Contender):
    """Layers of ours. Collective.

    Attributes:
        replaced: its layers.
    """

    def __init__(self, way: Way, sizes: Sizes) -> None:
        self._blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])
        super().__init__(way.name, nn.ModuleDict({"blocks": self._blocks}))
        # A device has lanes of its own, which one thread issues.
        self._has_own_lanes = way.has_threads or sizes.device.type == "cuda"
        with self.turn():
            self.replaced = ReplacedLayers.of(self.model, way.block, device=sizes.device)

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext() if self._has_own_lanes else inline()

    def forward(self, batch: Batch) -> Tensor:
        x_TD = batch.x_TD
        for block, expert_TK, score_TK in zip(self._blocks, batch.expert_LTK, batch.score_LTK):
            x_TD = block(x_TD, expert_TK, score_TK)
        return x_TD

    def after_step(self, number: int) -> None:
        self.replaced.after_step(number)

    def attend(self, attentions: Sequence[nn.Module]) -> None:
        for block, attention in zip(self._blocks, attentions):
            block.attention = attention


Builder = Callable[[Sizes], Contender]

OURS: Mapping[str, Builder] = {way.name: partial(Ours, way) for way in WAYS}
"""By name."""
