# SPDX-License-Identifier: Apache-2.0
"""A small decoder-only GPT whose every n-th feed-forward is `deepspeed.moe.layer.MoE`.

Shape letters: B windows in a micro-batch, T positions of a window, D model width, H attention
heads, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class MoeSettings:
    """What every `deepspeed.moe.layer.MoE` of the model is built with, under DeepSpeed's names."""

    num_experts: int
    k: int
    ep_size: int | None = None  # None: one rank holds every expert
    drop_tokens: bool = True
    capacity_factor: float = 1.0
    eval_capacity_factor: float = 1.0
    use_rts: bool = False
    top2_2nd_expert_sampling: bool = False

    def __post_init__(self) -> None:
        if self.num_experts % (self.ep_size or 1):
            raise ValueError(
                f"ep_size {self.ep_size} does not divide num_experts {self.num_experts}; "
                "choose a divisor"
            )


@dataclass(frozen=True)
class GptMoeConfig:
    """Shape of the model; the `config` section of a model file whose family is `gpt_moe`."""

    vocab_size: int
    sequence_length: int  # the longest window that has learned positions
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_hidden_size: int  # of dense blocks and of each expert
    moe: MoeSettings
    moe_every: int = 2  # 1: every block; 2: the second, fourth, ...
    aux_loss_coef: float = 0.01
    tie_embeddings: bool = True
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}; "
                f"try {self.hidden_size // self.num_heads * self.num_heads or self.num_heads}"
            )
        if not 1 <= self.moe_every <= self.num_layers:
            raise ValueError(
                f"moe_every {self.moe_every} must be from 1 to num_layers {self.num_layers}, "
                "or the model has no mixture of experts; use 2"
            )

    def check_window(self, num_positions: int) -> None:
        """Raise ValueError if a window is longer than there are learned positions."""
        if num_positions > self.sequence_length:
            raise ValueError(
                f"a window of {num_positions} tokens is longer than the model's "
                f"sequence_length {self.sequence_length}; shorten it or raise the latter"
            )

    @staticmethod
    def from_json(config: Mapping[str, Any], *, ep_size: int | None = None) -> GptMoeConfig:
        """Read the `config` section of a model file.

        Args:
            config: the section as parsed from JSON.
            ep_size: replaces the file's `moe.ep_size` unless None.

        Raises:
            ValueError: a key is unknown or missing, or the shape is impossible.
        """
        moe = dict(config.get("moe", {}))
        if ep_size is not None:
            moe["ep_size"] = ep_size
        _check_keys(moe, record=MoeSettings, section="config.moe")
        _check_keys(config, record=GptMoeConfig, section="config")
        return GptMoeConfig(**{**config, "moe": MoeSettings(**moe)})


def _check_keys(given: Mapping[str, Any], *, record: type, section: str) -> None:
    fields = dataclasses.fields(record)
    known = [field.name for field in fields]
    for key in given:
        if key not in known:
            nearest = get_close_matches(key, known, n=1) or [", ".join(known)]
            raise ValueError(f"unknown key {section}.{key}; did you mean {nearest[0]}?")
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in given:
            raise ValueError(f"{section}.{field.name} is missing; add it to the model file")


class LanguageModelOutput(NamedTuple):
    """What one forward gives; only `loss` carries a gradient."""

    loss: Tensor  # scalar: language_loss + aux_loss_coef * aux_loss
    language_loss: Tensor  # scalar, mean cross-entropy in nats per token
    aux_loss: Tensor  # scalar, sum of the layers' load-balancing losses


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which each position sees itself and what came before."""

    def __init__(self, *, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Attend within each window: ``[B, T, D]`` to ``[B, T, D]``."""
        heads = self.query_key_value(x_BTD).unflatten(-1, (3, self.num_heads, -1))
        query_BHTd, key_BHTd, value_BHTd = heads.permute(2, 0, 3, 1, 4)
        mixed_BHTd = F.scaled_dot_product_attention(
            query_BHTd, key_BHTd, value_BHTd, is_causal=True
        )
        return self.output(mixed_BHTd.transpose(1, 2).flatten(-2))


def initialize(module: nn.Module, *, std: float) -> None:
    """Draw the weights of every linear and embedding in `module`; biases become zero."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


def feed_forward(hidden_size: int, ffn_hidden_size: int) -> nn.Sequential:
    """Build the two-layer GELU network that is a dense block's feed-forward, or one expert."""
    return nn.Sequential(
        nn.Linear(hidden_size, ffn_hidden_size),
        nn.GELU(),
        nn.Linear(ffn_hidden_size, hidden_size),
    )


class Block(nn.Module):
    """Pre-norm attention, then a pre-norm dense or mixture-of-experts feed-forward."""

    def __init__(self, config: GptMoeConfig, *, has_experts: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = CausalSelfAttention(
            hidden_size=config.hidden_size, num_heads=config.num_heads
        )
        self.ffn_norm = nn.LayerNorm(config.hidden_size)
        self.has_experts = has_experts
        expert = feed_forward(config.hidden_size, config.ffn_hidden_size)
        # Before MoE replicas the expert: so the start depends neither on ep_size nor on the rank.
        for module in (self.attention, expert):
            initialize(module, std=config.initializer_range)
        self.ffn = _moe(config, expert) if has_experts else expert

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Transform ``[B, T, D]``; also give this block's load-balancing loss (0 if dense)."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        normed_BTD = self.ffn_norm(x_BTD)
        if not self.has_experts:
            return x_BTD + self.ffn(normed_BTD), x_BTD.new_zeros((), dtype=torch.float32)
        mixed_BTD, aux_loss, _ = self.ffn(normed_BTD)
        return x_BTD + mixed_BTD, aux_loss


def _moe(config: GptMoeConfig, expert: nn.Module) -> MoE:
    moe = config.moe
    return MoE(
        hidden_size=config.hidden_size,
        expert=expert,
        num_experts=moe.num_experts,
        ep_size=moe.ep_size or 1,
        k=moe.k,
        drop_tokens=moe.drop_tokens,
        capacity_factor=moe.capacity_factor,
        eval_capacity_factor=moe.eval_capacity_factor,
        use_rts=moe.use_rts,
        top2_2nd_expert_sampling=moe.top2_2nd_expert_sampling,
    )


class GptMoe(nn.Module):
    """The language model: embeddings, blocks, norm, head."""

    def __init__(self, config: GptMoeConfig) -> None:
        super().__init__()
        self.aux_loss_coef = config.aux_loss_coef
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.sequence_length, config.hidden_size)
        self.blocks = nn.ModuleList(
            Block(config, has_experts=(index + 1) % config.moe_every == 0)
            for index in range(config.num_layers)
        )
        self.final_norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight
        for module in (self.token_embedding, self.position_embedding, self.head):
            initialize(module, std=config.initializer_range)

    def forward(self, input_ids: Tensor, labels: Tensor) -> LanguageModelOutput:
        """Predict each window's next tokens.

        Args:
            input_ids: int64 ``[B, T]``.
            labels: int64 ``[B, T]``, the token that follows each of `input_ids`.
        """
        positions_T = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden_BTD = self.token_embedding(input_ids) + self.position_embedding(positions_T)
        aux_losses = []
        for block in self.blocks:
            hidden_BTD, aux_loss = block(hidden_BTD)
            aux_losses.append(aux_loss)
        logits_BTV = self.head(self.final_norm(hidden_BTD))
        language_loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels.flatten())
        aux_loss = torch.stack(aux_losses).sum()
        return LanguageModelOutput(
            loss=language_loss + self.aux_loss_coef * aux_loss,
            language_loss=language_loss.detach(),
            aux_loss=aux_loss.detach(),
        )


def build(config: Mapping[str, Any]) -> GptMoe:
    """The model of the `config` section of a model file, which names this function."""
    return GptMoe(GptMoeConfig.from_json(config))
