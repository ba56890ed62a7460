# SPDX-License-Identifier: Apache-2.0
"""What a model is, whatever form keeps it: its shape, and the pieces that its weights are made of.

Every form keeps the same pieces under other names, some of them joined. A piece is the smallest
tensor that some form keeps by itself, such as the queries of a layer or the gate of one expert.
``Model`` is a decoder as all three forms know it; see ``ListedModel`` for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any, NamedTuple

Shape = tuple[int, ...]
Document = Mapping[str, Any]
"""A model's config as JSON has it."""


class Family(Enum):
    """What ``model_type`` of a Hugging Face config, or ``family`` of a model file of ours says."""

    MIXTRAL = "mixtral"
    QWEN3_MOE = "qwen3_moe"
    GPT_MOE = "gpt_moe"  # a GPT with learned positions and DeepSpeed's MoE layers
    DBRX = "dbrx"
    LONGCAT_FLASH = "longcat_flash"
    SWITCH_TRANSFORMERS = "switch_transformers"


@dataclass(frozen=True)
class Attention:
    """Of every layer."""

    num_heads: int  # of queries
    num_groups: int  # heads of keys, and of values
    head_size: int  # of each
    has_norms: bool  # queries and keys are normalised, each head by itself
    rope_theta: float | None  # base of rotary positions; None where positions are learned

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"{self.num_groups} heads of keys and values do not divide {self.num_heads} "
                "heads of queries; correct the model's config"
            )


@dataclass(frozen=True)
class Experts:
    """Of every layer that has them."""

    number: int  # of experts
    top_k: int  # that a token goes to
    ffn_size: int  # width inside one
    normalizes: bool  # the scores of a token's experts sum to 1


@dataclass(frozen=True)
class Model:
    """A decoder whose feed-forwards are mixtures of experts, in all layers or in some."""

    # says which names it has elsewhere. A GPT has LayerNorm, biases, learned positions and GELU
    # without a gate; the others RMSNorm, no biases, rotary positions and SiLU gates
    family: Family
    vocab_size: int  # tokens, without rows that pad
    max_positions: int  # the longest window
    hidden_size: int  # of a row
    num_layers: int  # of all kinds
    moe_layers: tuple[int, ...]  # numbers of those with experts, ascending
    dense_ffn_size: int  # width of the feed-forward of the others
    attention: Attention  # of each layer
    experts: Experts  # of each layer that has them
    norm_epsilon: float  # of every norm
    is_tied: bool  # the output has the embedding's weight

    @property
    def is_gpt(self) -> bool:
        """Biases, LayerNorm, learned positions; no gates."""
        return self.family is Family.GPT_MOE

    @property
    def is_uniform(self) -> bool:
        return len(self.moe_layers) == self.num_layers

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def num_experts(self) -> int:
        """Of a layer that has them."""
        return self.experts.number

    @property
    def num_groups(self) -> int:
        return self.attention.num_groups

    @cached_property
    def shapes(self) -> Mapping[AnyPart, Shape]:
        """Of each part that the model has, the shape of a piece."""
        hidden, attention, experts = self.hidden_size, self.attention, self.experts
        queries = attention.num_heads * attention.head_size
        keys = attention.num_groups * attention.head_size
        found: dict[AnyPart, Shape] = {
            Part.EMBEDDING: (self.vocab_size, hidden),
            Part.FINAL_NORM: (hidden,),
            Part.INPUT_NORM: (hidden,),
            Part.QUERY: (queries, hidden),
            Part.KEY: (keys, hidden),
            Part.VALUE: (keys, hidden),
            Part.PROJECTION: (hidden, queries),
            Part.MOE_NORM: (hidden,),
            Part.ROUTER: (experts.number, hidden),
            Part.UP: (experts.ffn_size, hidden),
            Part.DOWN: (hidden, experts.ffn_size),
        }
        if not self.is_tied:
            found[Part.OUTPUT] = (self.vocab_size, hidden)
        if attention.has_norms:
            found |= {
                Part.QUERY_NORM: (attention.head_size,),
                Part.KEY_NORM: (attention.head_size,),
            }
        if not self.is_uniform:
            found |= {
                Part.DENSE_NORM: (hidden,),
                Part.DENSE_UP: (self.dense_ffn_size, hidden),
                Part.DENSE_DOWN: (hidden, self.dense_ffn_size),
            }
        if not self.is_gpt:
            gates = {Part.GATE: Part.UP, Part.DENSE_GATE: Part.DENSE_UP}
            return found | {gate: found[up] for gate, up in gates.items() if up in found}
        biases = {part: bias for part, bias in _BIASES.items() if part in found}
        found |= {bias: found[part][:1] for part, bias in biases.items()}
        return found | {Part.POSITIONS: (self.max_positions, hidden)}

    def places(self, scope: Scope) -> Iterator[Where]:
        """Where the model has the parts of a scope, in model order."""
        if scope is Scope.ONCE:
            yield Where(None, None)
            return
        for layer in range(self.num_layers):
            has_experts = layer in self.moe_layers
            if scope is Scope.EXPERT and has_experts:
                yield from (Where(layer, expert) for expert in range(self.experts.number))
            elif (
                scope is Scope.LAYER
                or (scope is Scope.MOE_LAYER and has_experts)
                or (scope is Scope.DENSE_LAYER and not has_experts)
            ):
                yield Where(layer, None)


class Scope(Enum):
    """How often a model has a part."""

    ONCE = auto()
    LAYER = auto()
    DENSE_LAYER = auto()
    MOE_LAYER = auto()
    EXPERT = auto()


class Part(Enum):
    """What a piece is. Its second value says how often a model has it."""

    EMBEDDING = ("embedding", Scope.ONCE)
    POSITIONS = ("positions", Scope.ONCE)
    OUTPUT = ("output", Scope.ONCE)
    FINAL_NORM = ("final norm", Scope.ONCE)
    FINAL_NORM_BIAS = ("final norm's bias", Scope.ONCE)
    INPUT_NORM = ("input norm", Scope.LAYER)
    INPUT_NORM_BIAS = ("input norm's bias", Scope.LAYER)
    QUERY = ("query", Scope.LAYER)
    KEY = ("key", Scope.LAYER)
    VALUE = ("value", Scope.LAYER)
    QUERY_BIAS = ("query's bias", Scope.LAYER)
    KEY_BIAS = ("key's bias", Scope.LAYER)
    VALUE_BIAS = ("value's bias", Scope.LAYER)
    QUERY_NORM = ("query norm", Scope.LAYER)
    KEY_NORM = ("key norm", Scope.LAYER)
    PROJECTION = ("projection", Scope.LAYER)
    PROJECTION_BIAS = ("projection's bias", Scope.LAYER)
    DENSE_NORM = ("norm before the feed-forward", Scope.DENSE_LAYER)
    DENSE_NORM_BIAS = ("bias of the norm before the feed-forward", Scope.DENSE_LAYER)
    DENSE_GATE = ("gate", Scope.DENSE_LAYER)
    DENSE_UP = ("up", Scope.DENSE_LAYER)
    DENSE_UP_BIAS = ("up's bias", Scope.DENSE_LAYER)
    DENSE_DOWN = ("down", Scope.DENSE_LAYER)
    DENSE_DOWN_BIAS = ("down's bias", Scope.DENSE_LAYER)
    MOE_NORM = ("norm before the experts", Scope.MOE_LAYER)
    MOE_NORM_BIAS = ("bias of the norm before the experts", Scope.MOE_LAYER)
    ROUTER = ("router", Scope.MOE_LAYER)
    ROUTER_BIAS = ("router's bias", Scope.MOE_LAYER)
    GATE = ("expert's gate", Scope.EXPERT)
    UP = ("expert's up", Scope.EXPERT)
    UP_BIAS = ("expert's up's bias", Scope.EXPERT)
    DOWN = ("expert's down", Scope.EXPERT)
    DOWN_BIAS = ("expert's down's bias", Scope.EXPERT)

    @property
    def scope(self) -> Scope:
        """How often a model has it."""
        return self.value[1]


class Weight(NamedTuple):
    """A part that a model has once, known by a name alone."""

    name: str

    @property
    def scope(self) -> Scope:
        """How often a model has it."""
        return Scope.ONCE


AnyPart = Part | Weight


class Where(NamedTuple):
    """Which of the layers and experts; None where there is only one."""

    layer: int | None
    expert: int | None


class Piece(NamedTuple):
    """One tensor of a model."""

    part: AnyPart
    where: Where


_BIASES = {
    Part[bias.name.removesuffix("_BIAS")]: bias for bias in Part if bias.name.endswith("_BIAS")
}
"""Of each part that may have one."""


# What forms call the weights of a model.


class Row(NamedTuple):
    """One kind of stored tensor; ``tables`` says what its name means."""

    name: str  # pattern
    parts: tuple[AnyPart, ...]  # joined along their first dim, in this order
    is_grouped: bool = False  # joined for each group of the attention by itself


Table = tuple[Row, ...]


@dataclass(frozen=True)
class HuggingFaceNames:
    """Names in safetensors files."""

    files: Table  # as ``save_pretrained`` writes
    others: tuple[Table, ...]  # that are read too
    # of names that no part has: copies, and what the model's class does not read
    is_spare: Callable[[str], bool]


@dataclass(frozen=True)
class DeepSpeedNames:
    """Names of modules in DeepSpeed's own file; experts in ours, by number."""

    module: Table  # all but experts
    experts: Table  # in the folder of experts
    layers: tuple[str, ...]  # modules that are replaced, in model order
    # what a slot's first weight is called when an engine starts, by ``{layer}`` of these and
    # ``{slot}``
    slot: str
    # parts that it does not have, for they are zero there; by each, the part whose type they take
    zeros: Mapping[AnyPart, AnyPart] = field(default_factory=dict)

    @property
    def both(self) -> Table:
        """Of the module and of experts."""
        return self.module + self.experts


# A model that is a list of its weights, for families that only Hugging Face and DeepSpeed have. All
# weights but the experts' have one name in both forms, and one piece is one weight; ``Model`` is
# for families of which Megatron joins, cuts and renames parts.


@dataclass(frozen=True, eq=False)
class ListedModel:
    """Its weights, and what two forms call them."""

    family: Family  # that it is of
    architecture: str  # its class in transformers
    num_layers: int  # of all kinds
    num_experts: int  # of each layer that has them
    shapes: Mapping[AnyPart, Shape]  # of its weights
    huggingface: HuggingFaceNames  # names in safetensors files
    deepspeed: DeepSpeedNames  # names of modules, and of experts by number
    unlike_megatron: str  # what Megatron-core has no counterpart of

    @property
    def num_moe_layers(self) -> int:
        return len(self.deepspeed.layers)

    @property
    def num_groups(self) -> int:
        return 1

    def places(self, scope: Scope) -> Iterator[Where]:
        """Each of its weights is there once."""
        assert scope is Scope.ONCE
        yield Where(None, None)


AnyModel = Model | ListedModel


def pieces(model: AnyModel) -> Iterator[Piece]:
    for part in model.shapes:
        for where in model.places(part.scope):
            yield Piece(part, where)


def needed(document: Document, *names: str) -> Any:
    """The value of the first of these keys that is there."""
    for name in names:
        if document.get(name) is not None:
            return document[name]
    raise ValueError(f"the model's config has no {' or '.join(names)}; add it")
