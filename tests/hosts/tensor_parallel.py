# SPDX-License-Identifier: Apache-2.0
"""A tensor parallel model as users of Megatron's layers have it, and the mpu that goes with it.

Attention's heads are divided over the ranks; what they make is summed by an all-reduce, or, with
sequence parallelism, scattered along the sequence and gathered again behind the experts (FSMoE's
ten steps, spec 1.7). Shape letters: B rows of a batch, T positions, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.hosts.toy import TOP_K, VOCABULARY, Experts, Output

D, HEADS, NUM_LAYERS = 16, 4, 2


@dataclass(frozen=True, eq=False)
class Mpu:
    """Groups by Megatron's names: ranks of one copy of the model are neighbours."""

    model: dist.ProcessGroup
    data: dist.ProcessGroup

    @classmethod
    def of(cls, size: int) -> Mpu:
        """Collective."""
        world = range(dist.get_world_size())
        models = [list(world)[i : i + size] for i in world[::size]]
        datas = [list(world)[i::size] for i in range(size)]
        made = [(ranks, dist.new_group(ranks)) for ranks in (*models, *datas)]
        mine = [group for ranks, group in made if dist.get_rank() in ranks]
        return cls(mine[0], mine[1])

    def get_model_parallel_group(self) -> Any:
        return self.model

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.model)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.model)

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data)


def _apply(forward: Any, backward: Any, x: Tensor) -> Tensor:
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor) -> Tensor:
            return forward(given)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return backward(grad.contiguous())

    return Both.apply(x)


@dataclass(frozen=True, eq=False)
class Ranks:
    """Megatron's four functions over the tensor parallel ranks; positions are dim 1."""

    group: Any
    size: int
    rank: int

    def summed(self, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def part(self, x: Tensor) -> Tensor:
        return x.chunk(self.size, dim=1)[self.rank].contiguous()

    def whole(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)

    def scattered(self, x: Tensor) -> Tensor:
        return self.part(self.summed(x))

    def copied(self, x: Tensor) -> Tensor:
        """All have it; gradients are summed."""
        return _apply(lambda given: given.view_as(given), self.summed, x)

    def reduced(self, x: Tensor) -> Tensor:
        """Sums; all have the gradient."""
        return _apply(self.summed, lambda grad: grad, x)

    def gathered(self, x: Tensor) -> Tensor:
        """Parts of the sequence to all of it; what follows is the same on all ranks."""
        return _apply(self.whole, self.part, x)

    def split(self, x: Tensor) -> Tensor:
        return _apply(self.part, self.whole, x)

    def reduce_scattered(self, x: Tensor) -> Tensor:
        """Sums, each rank a part of the sequence."""
        return _apply(self.scattered, self.whole, x)


class Block(nn.Module):
    """Norm and divided attention, norm and experts."""

    def __init__(self, experts: Experts, ranks: Ranks | None, *, has_own_tokens: bool) -> None:
        super().__init__()
        self.ranks, self.has_own_tokens = ranks, has_own_tokens
        size = 1 if ranks is None else ranks.size
        self.attention_norm, self.norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.query_key_value = nn.Linear(D, 3 * D // size, bias=False)
        self.out = nn.Linear(D // size, D, bias=False)
        self.router = nn.Linear(D, experts.num_experts, bias=False)
        self.experts = experts
        if ranks is not None:
            for part in (self.query_key_value.weight, self.out.weight):
                part.tensor_model_parallel = True

    def forward(self, x_BTD: Tensor) -> Tensor:
        normed = self.attention_norm(x_BTD)
        ranks = self.ranks
        if ranks is None:
            return self._with_experts(x_BTD + self._attended(normed))
        partial = self._attended(ranks.copied(normed))
        if not self.has_own_tokens:
            return self._with_experts(x_BTD + ranks.reduced(partial))
        y = self._with_experts(ranks.split(x_BTD) + ranks.reduce_scattered(partial))
        return ranks.gathered(y)

    def _with_experts(self, x_BTD: Tensor) -> Tensor:
        x_TD = self._own(self.norm, x_BTD).flatten(0, 1)
        score_TK, expert_TK = self._own(self.router, x_TD).softmax(dim=-1).topk(TOP_K)
        return x_BTD + self.experts(x_TD, expert_TK, score_TK).view_as(x_BTD)

    def _own(self, module: nn.Module, x: Tensor) -> Tensor:
        """Of weights that all ranks have: where each sees other tokens, their gradients are summed
        over the ranks."""
        if not self.has_own_tokens or self.ranks is None:
            return module(x)
        weights = {name: self.ranks.copied(p) for name, p in module.named_parameters()}
        return torch.func.functional_call(module, weights, (x,))

    def _attended(self, x_BTD: Tensor) -> Tensor:
        heads = self.query_key_value(x_BTD).unflatten(-1, (-1, 3, D // HEADS))
        q, k, v = heads.permute(3, 0, 2, 1, 4).unbind()
        y_BHTd = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y_BHTd.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    """Embedding, blocks, head: all ranks have embedding and head."""

    def __init__(self, ranks: Ranks | None, *, has_own_tokens: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D)
        self.blocks = nn.ModuleList(
            [Block(Experts(4, 12), ranks, has_own_tokens=has_own_tokens) for _ in range(NUM_LAYERS)]
        )
        self.head = nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        """Both int64 ``[B, T]``."""
        x_BTD = self.embedding(input_ids)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = self.head(x_BTD).flatten(0, 1)
        return Output(functional.cross_entropy(logits, labels.flatten()))


def build(ranks: Ranks | None, *, has_own_tokens: bool = False) -> Model:
    """The same model, whole or this rank's part of it."""
    torch.manual_seed(0)
    whole = Model(None, has_own_tokens=False)
    if ranks is None:
        return whole
    model = Model(ranks, has_own_tokens=has_own_tokens)
    state = whole.state_dict()
    for name, part in model.named_parameters():
        full = state[name]
        dim = next((d for d in range(full.dim()) if full.shape[d] != part.shape[d]), None)
        own = full if dim is None else full.chunk(ranks.size, dim)[ranks.rank]
        part.data.copy_(own)
    return model
