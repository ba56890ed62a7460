# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model that its price depends on, from a Hugging Face config or Megatron's flags.

Pure. Work is counted in multiply-adds of one token in forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ds_moe_ext.strict import check_object

GATED, PLAIN = 3, 2  # matrix products of an MLP: SwiGLU's, and two layers


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What stands at the ends of a model, or of a part of it.

    Attributes:
        size: of the embedding and of the head.
        is_tied: the two are one.
        has_embedding: the embedding is in this part.
        has_head: so are head and loss.
    """

    size: int = 0
    is_tied: bool = False
    has_embedding: bool = True
    has_head: bool = True

    @property
    def tables(self) -> int:
        """Tables of weights that this part has."""
        tables = self.has_embedding + self.has_head
        return min(tables, 1) if self.is_tied else tables


@dataclass(frozen=True, kw_only=True)
class DividedAttention:
    """What tensor and context parallelism make of a layer's attention.

    Attributes:
        replicated_weights: those that tensor parallel ranks all have whole.
        gathered_widths: what of a token these gather before; none: its hidden state.
        key_value_width: of all heads' keys and values together; 0 for that of queries and values.
    """

    replicated_weights: int = 0
    gathered_widths: tuple[int, ...] = ()
    key_value_width: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder whose layers are alike, but for those that have no experts; or a part of one.

    Attributes:
        name: for a person.
        num_layers: all.
        moe_layers: numbers of those with experts, ascending.
        width: of the hidden states.
        attention_weights: of one layer's attention.
        head_width: of all heads' queries together, and that of their values; both for the products
            of attention itself.
        dense_width: of the MLP of a layer without experts.
        products: matrix products of an MLP: ``GATED`` or ``PLAIN``.
        num_experts: of a layer.
        top_k: experts of a token.
        expert_width: hidden width of an expert.
        shared_width: hidden width of what all tokens pass beside the experts; 0 for none.
        vocabulary: embedding and head.
        length: tokens of a sample, where the model says.
        divided: attention, where ranks divide it.

    Raises:
        ValueError: sizes that no model has.
    """

    name: str
    num_layers: int
    moe_layers: tuple[int, ...]
    width: int
    attention_weights: int
    head_width: tuple[int, int]
    dense_width: int
    products: int
    num_experts: int
    top_k: int
    expert_width: int
    shared_width: int = 0
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    length: int | None = None
    divided: DividedAttention = field(default_factory=DividedAttention)

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
        """Of one expert."""
        return self.products * self.width * self.expert_width

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
        """Of one layer, without its experts: its router and shared experts with it.

        Args:
            layer: its number.
            tensor: ranks that divide all but the router, norms and what is replicated.
        """
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
        """Of the model."""
        experts = len(self.moe_layers) * self.num_experts * self.expert_weights
        return self.all_dense_weights + experts

    def dense_work(self, layer: int, length: int) -> float:
        """Of one layer without its experts, in samples of so many tokens, each of which attends to
        those before it."""
        return self.dense_weights(layer) + self.attention_work(length)

    def attention_work(self, length: int) -> float:
        """Of attention itself, its scores and what they weigh."""
        return length / 2 * sum(self.head_width)

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
    """Of a Hugging Face config.json, or of the ``config`` of our own GPT.

    Args:
        keys: what the file holds.
        name: for a person.

    Raises:
        ValueError: what it lacks.
    """
    check_object(f"the config of model {name!r}", keys)
    if "moe_every" in keys:
        return _of_gpt_moe(keys, name)
    read = _Reader({**keys, **_text_config(keys)}, name)
    num_layers, width = read("num_hidden_layers", most=MOST_LAYERS), read("hidden_size")
    num_experts = read("n_routed_experts", "num_local_experts", "num_experts")
    expert_width = read("moe_intermediate_size", "intermediate_size")
    attention = _attention(read, width)
    return ModelShape(
        name=name,
        num_layers=num_layers,
        moe_layers=tuple(_moe_layers(read, num_layers)),
        width=width,
        attention_weights=attention.weights,
        head_width=attention.head_width,
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
        divided=attention.divided,
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
    attention = _grouped(width, heads, groups, head)
    if flags.get("multi-latent-attention"):
        attention = _latent(read, width, heads, _LATENT_FLAGS)
    return ModelShape(
        name=name,
        num_layers=num_layers,
        moe_layers=tuple(_by_frequency(flags.get("moe-layer-freq", 1), num_layers, name)),
        width=width,
        attention_weights=attention.weights,
        head_width=attention.head_width,
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
        divided=attention.divided,
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


def _text_config(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = keys.get("text_config")
    return inner if isinstance(inner, Mapping) else {}


class _Attention(NamedTuple):
    """Of one layer; see ``ModelShape``."""

    weights: int
    head_width: tuple[int, int]
    divided: DividedAttention


def _attention(read: _Reader, width: int) -> _Attention:
    heads = read("num_attention_heads")
    if read.get("kv_lora_rank") is not None:
        return _latent(read, width, heads, _LATENT_KEYS)
    head = read("head_dim", default=width // max(heads, 1))
    groups = read("num_key_value_heads", default=heads)
    return _grouped(width, heads, groups, head)


def _grouped(width: int, heads: int, groups: int, head: int) -> _Attention:
    queries = heads * head
    weights = width * head * 2 * (heads + groups)
    divided = DividedAttention(key_value_width=2 * groups * head)
    return _Attention(weights, (queries, queries), divided)


_LATENT_KEYS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
_LATENT_FLAGS = ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")


def _latent(read: _Reader, width: int, heads: int, keys: Sequence[str]) -> _Attention:
    """DeepSeek's multi-head latent attention. Tensor parallel ranks compute latent vectors each of
    its own tokens, by whole weights, and gather these."""
    query_rank, latent, plain, rotary, value = (read(key, default=0) for key in keys)
    query = heads * (plain + rotary)
    queries = width * query_rank + query_rank * query if query_rank else width * query
    weights = (
        queries
        + width * (latent + rotary)
        + latent * heads * (plain + value)
        + heads * value * width
    )
    divided = DividedAttention(
        replicated_weights=width * (query_rank + latent + rotary),
        gathered_widths=(query_rank or width, latent, rotary),
        key_value_width=query + heads * value,
    )
    return _Attention(weights, (query, heads * value), divided)


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


_FLAGS = {"0": 0, "1": 1}


def _pattern(text: str) -> list[int] | None:
    """Of sums of lists, some times a number: nothing is evaluated."""
    pattern: list[int] = []
    for term in text.strip("() ").replace(" ", "").split("+"):
        items, _, times = term.partition("*")
        flags = items.strip("[]").split(",")
        if not _FLAGS.keys() >= set(flags) or not (times or "1").isdigit():
            return None
        if len(flags) * int(times or 1) > MOST_LAYERS:
            return None
        pattern += [_FLAGS[flag] for flag in flags] * int(times or 1)
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
