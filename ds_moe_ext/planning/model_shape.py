# SPDX-License-Identifier: Apache-2.0
"""A model's sizes and how it is trained, as far as its price depends on them. Pure.

``ModelShape`` is read from a Hugging Face config (``of_config``) or Megatron's flags
(``of_megatron``); ``Training`` is one optimizer step of it, ``ModelParallel`` over which ranks one
copy of the dense weights and one micro-batch are divided. As Megatron-core lays ranks out: those of
a tensor parallel group are neighbours, then come context, data and, outermost, pipeline
parallelism, so that a stage's ranks follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from ds_moe_ext.planning.prices import RowBytes
from ds_moe_ext.strict import check_object


@dataclass(frozen=True, kw_only=True)
class ModelParallel:
    """Sizes of tensor, context and pipeline parallelism."""

    # ranks that divide dense weights and, by sequence parallelism, the tokens between
    tensor: int = 1
    context: int = 1  # ranks that divide each sample
    pipeline: int = 1  # stages that divide the layers
    chunks: int = 1  # of each stage, which interleave where there are more than one
    # of the first stage, where it has another number than those between
    first_layers: int | None = None
    last_layers: int | None = None  # of the last one, likewise

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size is not None and size < 1:
                raise ValueError(f"{name} of model parallelism is {size}; give at least 1")
        if self.chunks > 1 and self.pipeline == 1:
            raise ValueError(
                f"each stage has {self.chunks} chunks, but there is one stage; give more stages, "
                "or one chunk"
            )

    @property
    def is_any(self) -> bool:
        """Whether anything is divided."""
        return self.tensor * self.context * self.pipeline > 1

    @property
    def sharers(self) -> int:
        """Ranks of a stage that share each micro-batch."""
        return self.tensor * self.context

    @property
    def size(self) -> int:
        """Ranks of one copy of the dense weights, with those that share its samples."""
        return self.sharers * self.pipeline

    def layers(self, num_layers: int) -> list[list[range]]:
        """Layers of each chunk, ``[stage][chunk]``: the first chunks of all stages, in their order,
        then the second ones."""
        sizes = [size // self.chunks for size in self._stage_sizes(num_layers)]
        begins = accumulate(sizes, initial=0)
        firsts = range(0, num_layers, sum(sizes))
        return [
            [range(first + begin, first + begin + size) for first in firsts]
            for begin, size in zip(begins, sizes)
        ]

    def _stage_sizes(self, num_layers: int) -> list[int]:
        ends = [self.first_layers, *[None] * (self.pipeline - 2), self.last_layers]
        named = [size for size in ends[: self.pipeline] if size is not None]
        left, stages = num_layers - sum(named), self.pipeline - len(named)
        if left < stages or left % max(stages, 1) or (left and not stages):
            less = " but for those of its first and last one" if named else ""
            raise ValueError(
                f"{num_layers} layers do not divide over {self.pipeline} pipeline stages{less}; "
                "give another number of stages, or layers of the first and the last one by "
                "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
            )
        sizes = [left // stages if size is None else size for size in ends[: self.pipeline]]
        if any(size % self.chunks for size in sizes):
            raise ValueError(
                f"a pipeline stage's layers, {', '.join(map(str, dict.fromkeys(sizes)))}, do not "
                f"divide into {self.chunks} chunks; give another number of virtual stages"
            )
        return sizes


ALONE = ModelParallel()
"""Each rank has all dense weights and samples of its own."""


ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
MASTER_AND_STATES = 12  # bytes of a weight for Adam: itself and two states, in 32 bits
CORE_ATTENTION, LAYER_NORM, UP_PROJECTION = "core_attn", "layernorm", "mla_up_proj"
MOE_ACTIVATION, SHARED, MLP, MOE = "moe_act", "shared_experts", "mlp", "moe"
MODULES = (CORE_ATTENTION, LAYER_NORM, UP_PROJECTION, MOE_ACTIVATION, SHARED, MLP, MOE)
"""Of a layer, as ``--recompute-modules`` of Megatron-core 0.16.1 names them."""
MOST_PASSES = 100_000  # of a step


@dataclass(frozen=True, kw_only=True)
class Training:
    """One optimizer step of a run."""

    num_ranks: int  # of the run
    length: int  # tokens of a sample
    micro_batch: int = 1  # samples in one pass, of a rank or of the ranks that share them
    micro_batches: int = 1  # passes of a step
    # in which matrices are multiplied: ``fp32``, ``tf32``, ``fp16`` or ``bf16``
    number_type: str = "bf16"
    # as DeepSpeed counts: from 1 ranks divide optimizer states, from 2 gradients, from 3 weights.
    # Megatron's distributed optimizer is 1.
    zero_stage: int = 1
    offloaded_states: float = 0.0  # part of the optimizer's states that lies in host memory, 0 to 1
    # layers run again in backward, so that only what passes between them is kept
    recomputes: bool = False
    # modules of each layer that run again alone, some of ``MODULES``: Megatron-core's selective
    # recomputation
    again: tuple[str, ...] = ()
    is_fused: bool = False  # layers are Megatron-core's with Transformer Engine
    state_bytes: int = MASTER_AND_STATES  # of a weight for the optimizer
    hides_gradients: bool = False  # gradients are reduced beside backward by the host itself
    sums_in_float32: bool = False  # gradients are summed in 32 bits, where they are narrower
    parallel: ModelParallel = ALONE  # tensor, context and pipeline parallelism

    def __post_init__(self) -> None:
        for name in ("num_ranks", "length", "micro_batch", "micro_batches"):
            if vars(self)[name] < 1:
                raise ValueError(f"{name} is {vars(self)[name]}; give at least 1")
        if self.micro_batches > MOST_PASSES:
            raise ValueError(
                f"micro_batches is {self.micro_batches}, and each is gone through; give at most "
                f"{MOST_PASSES:,}"
            )
        if self.number_type not in ELEMENT_BYTES:
            raise ValueError(
                f"number_type is {self.number_type!r}; choose {', '.join(ELEMENT_BYTES)}"
            )
        if unknown := sorted(set(self.again) - set(MODULES)):
            raise ValueError(
                f"modules that run again have {unknown[0]!r}, which is none of Megatron's; choose "
                f"among {', '.join(MODULES)}"
            )
        parallel, stages = self.parallel, self.parallel.pipeline
        if self.num_ranks % parallel.size:
            raise ValueError(
                f"tensor x context x pipeline parallelism is {parallel.tensor} x "
                f"{parallel.context} x {stages}, which does not divide {self.num_ranks} ranks; "
                "give other sizes, or other --nodes"
            )
        halves = 2 * parallel.context if parallel.context > 1 else 1
        if self.length % halves or self.length // parallel.context % parallel.tensor:
            raise ValueError(
                f"samples of {self.length} tokens do not divide over context parallelism "
                f"{parallel.context}, by twice as many, and tensor parallelism {parallel.tensor}; "
                "give another --length"
            )
        rest = self.micro_batches % stages
        if parallel.chunks > 1 and rest:
            raise ValueError(
                f"a step has {self.micro_batches} micro-batches, which {stages} interleaved "
                "pipeline stages do not divide; give more samples a step, or one virtual stage"
            )

    @property
    def stage_ranks(self) -> int:
        """Of one pipeline stage."""
        return self.num_ranks // self.parallel.pipeline

    @property
    def dense_replicas(self) -> int:
        """Ranks of a stage that have the same dense weights, and sum their gradients."""
        return self.stage_ranks // self.parallel.tensor

    @property
    def tokens(self) -> int:
        """Of a rank in one pass."""
        return self.length * self.micro_batch // self.parallel.sharers

    @property
    def tokens_of_step(self) -> int:
        """Of all ranks."""
        return self.tokens * self.micro_batches * self.stage_ranks

    @property
    def element_bytes(self) -> int:
        """Of a weight or a number of a row."""
        return ELEMENT_BYTES[self.number_type]

    @property
    def gradient_bytes(self) -> int:
        """Of a weight's gradient."""
        return 4 if self.sums_in_float32 else self.element_bytes


GATED, PLAIN = 3, 2  # matrix products of an MLP: SwiGLU's, and two layers


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What stands at the ends of a model, or of a part of it."""

    size: int = 0  # of the embedding and of the head
    is_tied: bool = False  # the two are one
    has_embedding: bool = True  # the embedding is in this part
    has_head: bool = True  # so are head and loss

    @property
    def tables(self) -> int:
        """Tables of weights that this part has."""
        tables = self.has_embedding + self.has_head
        return min(tables, 1) if self.is_tied else tables


@dataclass(frozen=True, kw_only=True)
class DividedAttention:
    """What tensor and context parallelism make of a layer's attention."""

    replicated_weights: int = 0  # those that tensor parallel ranks all have whole
    # what of a token these gather before; none: its hidden state
    gathered_widths: tuple[int, ...] = ()
    # of all heads' keys and values together; 0 for that of queries and values
    key_value_width: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder whose layers are alike, but for those that have no experts; or a part of one."""

    name: str  # for a person
    num_layers: int  # all
    moe_layers: tuple[int, ...]  # numbers of those with experts, ascending
    width: int  # of the hidden states
    attention_weights: int  # of one layer's attention
    # of all heads' queries together, and that of their values; both for the products of attention
    # itself
    head_width: tuple[int, int]
    dense_width: int  # of the MLP of a layer without experts
    products: int  # matrix products of an MLP: ``GATED`` or ``PLAIN``
    num_experts: int  # of a layer
    top_k: int  # experts of a token
    expert_width: int  # hidden width of an expert
    shared_width: int = 0  # hidden width of what all tokens pass beside the experts; 0 for none
    vocabulary: Vocabulary = field(default_factory=Vocabulary)  # embedding and head
    length: int | None = None  # tokens of a sample, where the model says
    # attention, where ranks divide it
    divided: DividedAttention = field(default_factory=DividedAttention)
    # numbers of a token that fused attention keeps for backward beside hidden states: always, and
    # where the up projections of latent vectors do not run again
    attention_kept: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        is_whole = self.vocabulary.has_embedding and self.vocabulary.has_head
        if is_whole and not self.moe_layers:
            raise ValueError(f"model {self.name!r} has no layer with experts, which are priced")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"model {self.name!r} sends a token to {self.top_k} experts of {self.num_experts}; "
                "lower top_k"
            )

    @property
    def expert_weights(self) -> int:
        return self.products * self.width * self.expert_width

    def flops(self, length: int) -> float:
        """Of one token in a step, forward and backward, as Megatron-LM counts them (its
        ``num_floating_point_operations``): without routers, norms and what runs again, with
        attention over half of a sample."""
        moe = len(self.moe_layers)
        work = self.num_layers * (self.attention_weights + self.attention_work(length))
        work += moe * (self.top_k * self.expert_weights)
        work += moe * self.products * self.width * self.shared_width
        work += (self.num_layers - moe) * self.products * self.width * self.dense_width
        return 6 * (work + self.vocabulary.size * self.width)

    def part(self, layers: range) -> ModelShape:
        """Some layers that follow each other, with the embedding or the head if they have the first
        one or the last."""
        return replace(
            self,
            num_layers=len(layers),
            moe_layers=tuple(each - layers.start for each in self.moe_layers if each in layers),
            vocabulary=replace(
                self.vocabulary,
                has_embedding=layers.start == 0,
                has_head=layers.stop == self.num_layers,
            ),
        )

    def dense_weights(self, layer: int, tensor: int = 1) -> int:
        """Of one layer, without its experts: its router and shared experts with it."""
        mlp = self.dense_width
        router = 0
        if layer in self.moe_layers:
            mlp, router = self.shared_width, self.width * self.num_experts
        whole = self.divided.replicated_weights + router + 2 * self.width
        divided = self.attention_weights - self.divided.replicated_weights
        return whole + (divided + self.products * self.width * mlp) // tensor

    @property
    def all_dense_weights(self) -> int:
        """Of the model without its experts."""
        return self.held_dense_weights(1)

    def held_dense_weights(self, tensor: int) -> int:
        """Those of them that each of so many tensor parallel ranks has."""
        embeddings = self.vocabulary.tables * self.vocabulary.size * self.width
        layers = range(self.num_layers)
        return embeddings // tensor + sum(self.dense_weights(each, tensor) for each in layers)

    @property
    def all_weights(self) -> int:
        experts = len(self.moe_layers) * self.num_experts * self.expert_weights
        return self.all_dense_weights + experts

    def dense_work(self, layer: int, length: int) -> float:
        """Of one layer without its experts, in samples of so many tokens, each of which attends to
        those before it."""
        return self.dense_weights(layer) + self.attention_work(length)

    def attention_work(self, length: int) -> float:
        """Of attention itself, its scores and what they weigh."""
        return length / 2 * sum(self.head_width)

    def again_work(self, layer: int, again: Sequence[str], length: int) -> float:
        """Multiply-adds of a token in the dense modules of one layer that run again; norms and
        activations are taken as free."""
        is_moe = layer in self.moe_layers
        work = 0.0
        if CORE_ATTENTION in again:
            work += self.attention_work(length)
        if UP_PROJECTION in again and self.attention_kept[1]:
            rest = self.divided.replicated_weights + self.width * self.head_width[1]
            work += self.attention_weights - rest
        if is_moe and (SHARED in again or MOE in again):
            work += self.products * self.width * self.shared_width
        if not is_moe and MLP in again:
            work += self.products * self.width * self.dense_width
        return work

    def layers_before(self, number: int) -> range:
        """Layers that run before the experts of MoE layer ``number``, since those of the one before
        it; the MoE layer's own attention with them."""
        first = 0 if number == 0 else self.moe_layers[number - 1] + 1
        return range(first, self.moe_layers[number] + 1)

    @property
    def layers_after(self) -> range:
        """Layers behind the last one with experts."""
        return range(self.moe_layers[-1] + 1 if self.moe_layers else 0, self.num_layers)


def of_config(keys: Mapping[str, Any], name: str) -> ModelShape:
    """Of a Hugging Face config.json, or of the ``config`` of our own GPT; ``name`` is for a person.

    Raises:
        ValueError: what it lacks.
    """
    check_object(f"the config of model {name!r}", keys)
    if "moe_every" in keys:
        return _of_gpt_moe(keys, name)
    inner = keys.get("text_config")
    read = _Reader({**keys, **inner} if isinstance(inner, Mapping) else keys, name)
    num_layers, width = read("num_hidden_layers", most=MOST_LAYERS), read("hidden_size")
    num_experts = read("n_routed_experts", "num_local_experts", "num_experts")
    expert_width = read("moe_intermediate_size", "intermediate_size")
    heads = read("num_attention_heads")
    if read.get("kv_lora_rank") is not None:
        attention = _latent(read, width, heads, _LATENT_KEYS)
    else:
        head = read("head_dim", default=width // max(heads, 1))
        groups = read("num_key_value_heads", default=heads)
        has_norms = str(read.get("model_type")).startswith(_NORMED)
        attention = _grouped(width, heads, groups, head, has_norms)
    return ModelShape(
        name=name,
        num_layers=num_layers,
        moe_layers=tuple(_moe_layers(read, num_layers)),
        width=width,
        dense_width=read("intermediate_size", default=0),
        products=GATED,
        num_experts=num_experts,
        top_k=read("num_experts_per_tok", "moe_topk", "moe_k"),
        expert_width=expert_width,
        shared_width=read(
            "shared_expert_intermediate_size",
            default=read("n_shared_experts", default=0) * expert_width,
        ),
        vocabulary=Vocabulary(
            size=read("vocab_size"), is_tied=bool(read("tie_word_embeddings", default=0))
        ),
        length=read("max_position_embeddings", default=0) or None,
        **attention,
    )


def of_megatron(flags: Mapping[str, Any], name: str) -> ModelShape:
    """Of the flags of Megatron's pretrain_gpt.py, by their names without dashes before.

    Raises:
        ValueError: what they lack.
    """
    read = _Reader(flags, name)
    num_layers, width = read("num-layers", most=MOST_LAYERS), read("hidden-size")
    heads = read("num-attention-heads")
    head = read("kv-channels", default=width // heads)
    groups = read("num-query-groups", default=heads)
    ffn = read("ffn-hidden-size", default=4 * width)
    attention = _grouped(width, heads, groups, head, bool(flags.get("qk-layernorm")))
    if flags.get("multi-latent-attention"):
        attention = _latent(read, width, heads, _LATENT_FLAGS)
    moe_layers = _by_frequency(flags.get("moe-layer-freq", 1), num_layers, name)
    if read("pipeline-model-parallel-size", default=1) == 1:
        for _ in range(read("mtp-num-layers", default=0, most=MOST_LAYERS)):  # as the last one
            moe_layers += [num_layers] if num_layers - 1 in moe_layers else []
            num_layers += 1
    return ModelShape(
        name=name,
        num_layers=num_layers,
        moe_layers=tuple(moe_layers),
        width=width,
        dense_width=ffn,
        products=GATED if flags.get("swiglu") else PLAIN,
        num_experts=read("num-experts"),
        top_k=read("moe-router-topk", default=2),
        expert_width=read("moe-ffn-hidden-size", default=ffn),
        shared_width=read("moe-shared-expert-intermediate-size", default=0),
        vocabulary=Vocabulary(
            size=read("vocab-size", "padded-vocab-size", default=0),
            is_tied=not flags.get("untie-embeddings-and-output-weights"),
        ),
        length=read("seq-length", default=0) or None,
        **attention,
    )


MOST_LAYERS = 10_000


class _Reader:
    """Whole numbers of a config, by the first of some keys that is there."""

    MOST = 10**7

    def __init__(self, keys: Mapping[str, Any], name: str) -> None:
        self._keys, self._name = keys, name

    def __call__(
        self, *names: str, default: int | None = None, least: int = 0, most: int = MOST
    ) -> int:
        found = next((key for key in names if self._keys.get(key) is not None), None)
        if found is None:
            if default is None:
                raise ValueError(
                    f"model {self._name!r} does not say {' or '.join(map(repr, names))}, which its "
                    "price depends on; is it a model's config.json? If so, add it there"
                )
            return default
        try:
            value = int(self._keys[found])
        except (OverflowError, TypeError, ValueError):
            value = -1
        if not least <= value <= most:
            raise ValueError(
                f"{found!r} of model {self._name!r} is {self._keys[found]!r}; give a whole "
                f"number, at least {least} and at most {most:,}"
            )
        return value

    def get(self, key: str) -> Any:
        """What stands there, whatever it is."""
        return self._keys.get(key)


_NORMED = "qwen3"
"""How ``model_type`` begins of models that normalize each head's queries and keys."""


def _grouped(width: int, heads: int, groups: int, head: int, has_norms: bool) -> dict[str, Any]:
    """What ``ModelShape`` says of attention whose heads share keys and values in groups. Queries,
    keys, values and what these come to are kept, and queries and keys before their norms."""
    kept = 2 * (heads + groups) * head + has_norms * (heads + groups) * head
    return {
        "attention_kept": (kept, 0),
        "attention_weights": width * head * 2 * (heads + groups),
        "head_width": (heads * head, heads * head),
        "divided": DividedAttention(key_value_width=2 * groups * head),
    }


_LATENT_KEYS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
_LATENT_FLAGS = ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")


def _latent(read: _Reader, width: int, heads: int, keys: Sequence[str]) -> dict[str, Any]:
    """And of DeepSeek's multi-head latent attention. Tensor parallel ranks compute latent vectors
    each of its own tokens, by whole weights, and gather these."""
    query_rank, latent, plain, rotary, value = (read(key, default=0) for key in keys)
    query = heads * (plain + rotary)
    queries = width * query_rank + query_rank * query if query_rank else width * query
    of_latent = width * (latent + rotary) + latent * heads * (plain + value)
    # Latent vectors before and behind their norms, what attention comes to; and what it is of.
    kept = 2 * (query_rank + latent) + rotary + heads * value
    return {
        "attention_kept": (kept, 2 * query + heads * value),
        "attention_weights": queries + of_latent + heads * value * width,
        "head_width": (query, heads * value),
        "divided": DividedAttention(
            replicated_weights=width * (query_rank + latent + rotary),
            gathered_widths=(query_rank or width, latent, rotary),
            key_value_width=query + heads * value,
        ),
    }


def _moe_layers(read: _Reader, num_layers: int) -> list[int]:
    dense_first = read("first_k_dense_replace", default=0)
    every = read("decoder_sparse_step", "moe_layer_freq", default=1, least=1)
    named = read.get("mlp_only_layers") or ()
    first = every - 1 if read.get("decoder_sparse_step") else 0
    return [
        layer
        for layer in range(num_layers)
        if layer >= dense_first and layer % every == first and layer not in named
    ]


def _by_frequency(value: Any, num_layers: int, name: str) -> list[int]:
    """Megatron's ``--moe-layer-freq``: every so many layers, or a 0 or 1 for each, which it takes
    as Python's text of a list, ``([0]*3+[1]*58)``."""
    text = str(value).strip()
    if text.isdigit() and int(text):
        return [layer for layer in range(num_layers) if layer % int(text) == 0]
    pattern = _pattern(text)
    if pattern is None or len(pattern) != num_layers:
        raise ValueError(
            f"'moe-layer-freq' of model {name!r} is {value!r}; give a number above 0, or a list of "
            f"0 and 1 for each of {num_layers} layers"
        )
    return [layer for layer, has_experts in enumerate(pattern) if has_experts]


def _pattern(text: str) -> list[int] | None:
    """Of sums of lists, some times a number: nothing is evaluated."""
    pattern: list[int] = []
    for term in text.strip("() ").replace(" ", "").split("+"):
        items, _, times = term.partition("*")
        flags = items.strip("[]").split(",")
        if not {"0", "1"} >= set(flags) or not (times or "1").isdigit():
            return None
        if len(flags) * int(times or 1) > MOST_LAYERS:
            return None
        pattern += [int(flag) for flag in flags] * int(times or 1)
    return pattern


def _of_gpt_moe(keys: Mapping[str, Any], name: str) -> ModelShape:
    read = _Reader(keys, name)
    moe = _Reader(keys.get("moe") or {}, name)
    width, every = read("hidden_size"), read("moe_every", least=1)
    num_layers, ffn = read("num_layers", most=MOST_LAYERS), read("ffn_hidden_size")
    return ModelShape(
        name=name,
        num_layers=num_layers,
        moe_layers=tuple(range(every - 1, num_layers, every)),
        width=width,
        attention_weights=4 * width * width,
        head_width=(width, width),
        dense_width=ffn,
        products=PLAIN,
        num_experts=moe("num_experts"),
        top_k=moe("k"),
        expert_width=ffn,
        vocabulary=Vocabulary(
            size=read("vocab_size"), is_tied=bool(read("tie_embeddings", default=0))
        ),
        length=read("sequence_length", default=0) or None,
    )


class OnItsWay(NamedTuple):
    """Bytes that travel of a described model."""

    row: RowBytes  # of one row in one transfer
    copy: float  # of what one rank has of an expert, the mean of there and, as gradients, back
