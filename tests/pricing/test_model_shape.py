# SPDX-License-Identifier: Apache-2.0
"""Sizes of models, against the numbers of weights that their makers publish."""

from __future__ import annotations

from typing import Any

import pytest

from ds_moe_ext.planning.model_shape import ModelShape, of_config, of_megatron

MIXTRAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
DEEPSEEK = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
FLAGS = {
    "num-layers": 61,
    "hidden-size": 7168,
    "ffn-hidden-size": 18432,
    "num-attention-heads": 128,
    "multi-latent-attention": True,
    "q-lora-rank": 1536,
    "kv-lora-rank": 512,
    "qk-head-dim": 128,
    "qk-pos-emb-head-dim": 64,
    "v-head-dim": 128,
    "moe-layer-freq": "([0]*3+[1]*58)",
    "num-experts": 256,
    "moe-ffn-hidden-size": 2048,
    "moe-shared-expert-intermediate-size": 2048,
    "moe-router-topk": 8,
    "swiglu": True,
    "vocab-size": 129280,
    "untie-embeddings-and-output-weights": True,
}


@pytest.mark.parametrize(("config", "billions"), [(MIXTRAL, 46.7), (QWEN, 30.5), (DEEPSEEK, 671.0)])
def test_all_weights(config: dict[str, Any], billions: float) -> None:
    assert of_config(config, "it").all_weights / 1e9 == pytest.approx(billions, abs=0.06)


def test_megatron_s_flags_say_the_same() -> None:
    by_flags, by_config = of_megatron(FLAGS, "it"), of_config(DEEPSEEK, "it")
    assert by_flags == by_config
    assert by_flags.moe_layers == tuple(range(3, 61))
    predicting = of_megatron({**FLAGS, "mtp-num-layers": "2"}, "it")
    assert (predicting.num_layers, predicting.moe_layers) == (63, tuple(range(3, 63)))
    staged = {"mtp-num-layers": "1", "pipeline-model-parallel-size": "61"}
    assert of_megatron({**FLAGS, **staged}, "it") == by_flags


def shape(**given: Any) -> ModelShape:
    return of_config({**MIXTRAL, **given}, "it")


def test_layers_with_experts() -> None:
    assert shape(num_hidden_layers=4).moe_layers == (0, 1, 2, 3)
    assert shape(num_hidden_layers=4, decoder_sparse_step=2).moe_layers == (1, 3)
    assert shape(num_hidden_layers=4, mlp_only_layers=[0, 2]).moe_layers == (1, 3)


def test_what_runs_before_and_after_experts() -> None:
    sparse = shape(num_hidden_layers=5, decoder_sparse_step=2)
    assert [list(sparse.layers_before(number)) for number in (0, 1)] == [[0, 1], [2, 3]]
    assert list(sparse.layers_after) == [4]


@pytest.mark.parametrize(
    ("frequency", "layers"),
    [("2", (0, 2, 4)), ("[0,1,1,1,1]", (1, 2, 3, 4)), ("([0]*2+[1,0]+[1])", (2, 4)), (1, range(5))],
)
def test_megatron_s_frequency(frequency: object, layers: tuple[int, ...]) -> None:
    flags = {**FLAGS, "num-layers": 5, "moe-layer-freq": frequency}
    assert of_megatron(flags, "it").moe_layers == tuple(layers)


@pytest.mark.parametrize("frequency", ["0", "[1]*4", "__import__('os')", "[2]*5", "-1"])
def test_a_frequency_that_is_none_is_refused_and_never_run(frequency: str) -> None:
    with pytest.raises(ValueError, match=r"moe-layer-freq.*list of 0 and 1 for each of 5"):
        of_megatron({**FLAGS, "num-layers": 5, "moe-layer-freq": frequency}, "it")


def test_what_is_missing_or_wrong_is_named() -> None:
    with pytest.raises(ValueError, match="does not say 'hidden_size'"):
        of_config({key: value for key, value in MIXTRAL.items() if key != "hidden_size"}, "it")
    with pytest.raises(ValueError, match="'vocab_size' of model 'it' is 'many'"):
        shape(vocab_size="many")
    with pytest.raises(ValueError, match="9 experts of 8; lower top_k"):
        shape(num_experts_per_tok=9)
    with pytest.raises(ValueError, match="no layer with experts"):
        shape(mlp_only_layers=list(range(32)))
