# SPDX-License-Identifier: Apache-2.0
"""Megatron's distributed checkpoints (``--ckpt-format torch_dist``), without Megatron.

Their tensors are whole, whatever sizes of TP, PP, EP and ETP a run has that saves or loads them.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_moe_ext.commands.conversion import dcp
from ds_moe_ext.commands.conversion.model import Attention, Experts, Family, Model
from ds_moe_ext.commands.conversion.stored import Maker, Source, Stored, object_of, text_of
from ds_moe_ext.commands.conversion.tables import (
    EXTRA_STATES,
    Cell,
    cells,
    decoder_of,
    in_megatron,
    megatron_layouts,
    of_model,
)
from ds_moe_ext.files import unpickle
from ds_moe_ext.hosts.megatron import checkpoint_sums

TRACKER = "latest_checkpointed_iteration.txt"
BACKENDS, COMMON = checkpoint_sums.LAST_FILE, "common.pt"
RELEASE = "release"
"""In place of an iteration: Megatron then takes weights, and starts optimizer and counters anew."""

_TORCH_DIST = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""How the names of tensors are to be understood; Megatron asks for them by it."""


def is_here(folder: Path) -> bool:
    """Whether a folder is one, or one iteration of one."""
    return (folder / TRACKER).exists() or (folder / BACKENDS).exists()


def iteration_of(folder: Path) -> Path:
    """The folder of the iteration that a run would go on from."""
    chosen = folder
    if not (folder / BACKENDS).exists():
        reported = text_of(folder / TRACKER)
        if reported != RELEASE and not reported.isdecimal():
            raise ValueError(
                f"{folder / TRACKER} has {reported[:50]!r}, neither a number nor {RELEASE}: it "
                "is damaged; write the iteration to read into it"
            )
        chosen = folder / (reported if reported == RELEASE else f"iter_{int(reported):07d}")
    path = chosen / BACKENDS
    if not path.exists():
        raise ValueError(
            f"{chosen} has no {BACKENDS}: it was not saved with --ckpt-format torch_dist, or "
            "not completely; save it with that format"
        )
    backend = object_of(path, "sharded_backend")["sharded_backend"]
    if backend != _TORCH_DIST["sharded_backend"]:
        raise ValueError(f"{chosen} has format {backend}; save it as torch_dist")
    return chosen


def arguments(folder: Path) -> Namespace:
    """What it was saved with."""
    common = unpickle.load(folder / COMMON)
    found = common.get("args") if isinstance(common, Mapping) else None
    if not isinstance(found, Namespace):
        raise ValueError(
            f"{folder / COMMON} has no args; describe the model with --model: a Hugging Face "
            "config.json or a file like those of configs/models"
        )
    return found


def has_optimizer(folder: Path) -> bool:
    """Whether it has states, which are not converted."""
    return any(map(_is_of_optimizer, dcp.Folder(folder).tensors))


def _is_of_optimizer(name: str) -> bool:
    return name.startswith(("optimizer.", "chained_"))


def open_source(folder: Path, model: Model) -> Source:
    checkpoint_sums.check_part(folder)
    stored = dcp.Folder(folder)
    tensors = {
        name: Stored(tuple(kept.size), kept.properties.dtype, partial(stored.read, name))
        for name, kept in stored.tensors.items()
        if not _is_of_optimizer(name)
    }
    tables = tuple(megatron_layouts(model))
    any_of_them = {cell.name for table in tables for cell in cells(model, table)}
    return Source(str(folder), tensors, tables, may_pad=True, spare=any_of_them.__contains__)


def write(folder: Path, maker: Maker) -> None:
    """Write a folder that ``--load`` takes; one box is in memory at a time."""
    release = folder / RELEASE
    release.mkdir(parents=True)
    model, made = decoder_of(maker.model), dict[str, dict[tuple[int, ...], Cell]]()
    for cell in maker.cells(in_megatron(model)):
        start = (*cell.lead, *(0 for _ in cell.inner_shape(model)))
        made.setdefault(cell.name, {})[start] = cell
    tensors = {
        name: dcp.ToWrite(
            shape=next(iter(boxes.values())).shape(model),
            dtype=maker.dtype_of(next(iter(boxes.values()))),
            boxes={start: _to_make(maker, cell) for start, cell in boxes.items()},
        )
        for name, boxes in made.items()
    }
    dcp.write(release, tensors, _extra_states(model))
    common = {
        "args": arguments_of(model),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": _CONTENT,
    }
    torch.save(common, release / COMMON)
    (release / BACKENDS).write_text(json.dumps(_TORCH_DIST))
    (folder / TRACKER).write_text(RELEASE)  # last: that it is there says that all else is


def _to_make(maker: Maker, cell: Cell) -> dcp.ToMake:
    shape = (*(1 for _ in cell.lead), *cell.inner_shape(maker.model))

    def make() -> Tensor:
        return maker.make(cell).reshape(shape)

    return dcp.ToMake(shape, make)


def _extra_states(model: Model) -> dict[str, Any]:
    """What modules keep beside weights: nothing, but Megatron misses it if it is not there."""
    found: dict[str, Any] = {}
    for row in of_model(model, EXTRA_STATES):
        for layer, expert in model.places(row.parts[0].scope):
            lead = [] if layer is None or not model.is_uniform else [(layer, model.num_layers)]
            lead += [] if expert is None else [(expert, model.experts.number)]
            numbers, sizes = zip(*(lead or [(0, 1)]))
            shard = f"shard_{'.'.join(map(str, numbers))}_{'.'.join(map(str, sizes))}"
            name = row.name
            if layer is not None and not model.is_uniform:
                name = name.replace("decoder.layers.", f"decoder.layers.{layer}.")
            found[f"{name}._extra_state/{shard}"] = [None]
    return found


# Megatron's arguments of a model: those that a checkpoint keeps, and flags of pretrain_gpt.py.

LEARNED, ROTARY = "learned_absolute", "rope"
LAYER_NORM, RMS_NORM = "LayerNorm", "RMSNorm"


def arguments_of(model: Model) -> Namespace:
    """What ``common.pt`` has as ``args``: enough for ``--use-checkpoint-args``."""
    attention, experts, is_gpt = model.attention, model.experts, model.is_gpt
    return Namespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.dense_ffn_size or experts.ffn_size,
        seq_length=model.max_positions,
        max_position_embeddings=model.max_positions,
        num_attention_heads=attention.num_heads,
        group_query_attention=attention.num_groups != attention.num_heads,
        num_query_groups=attention.num_groups,
        kv_channels=attention.head_size,
        qk_layernorm=attention.has_norms,
        position_embedding_type=LEARNED if is_gpt else ROTARY,
        add_position_embedding=is_gpt,
        use_rotary_position_embeddings=not is_gpt,
        rotary_base=_rotary_base(model),
        rotary_percent=1.0,
        rotary_interleaved=False,
        add_bias_linear=is_gpt,
        add_qkv_bias=False,
        swiglu=not is_gpt,
        squared_relu=False,
        normalization=LAYER_NORM if is_gpt else RMS_NORM,
        norm_epsilon=model.norm_epsilon,
        apply_layernorm_1p=False,
        untie_embeddings_and_output_weights=not model.is_tied,
        vocab_size=model.vocab_size,
        padded_vocab_size=model.vocab_size,
        num_experts=experts.number,
        moe_layer_freq=_frequency(model),
        moe_ffn_hidden_size=experts.ffn_size,
        moe_router_topk=experts.top_k,
        moe_router_pre_softmax=not experts.normalizes,
        moe_router_score_function="softmax",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        no_save_optim=True,
        no_save_rng=True,
    )


def _rotary_base(model: Model) -> int:
    """Megatron takes whole numbers only."""
    theta = model.attention.rope_theta or 10000.0  # its default, where it counts for nothing
    if not theta.is_integer():
        raise ValueError(f"rope_theta is {theta}; Megatron's --rotary-base is a whole number")
    return int(theta)


def _frequency(model: Model) -> int | list[int]:
    """One for all layers, so that Megatron stacks them; else 1 for each with experts."""
    if model.is_uniform:
        return 1
    return [int(layer in model.moe_layers) for layer in range(model.num_layers)]


def flags_of(model: Model) -> Iterator[str]:
    """Of pretrain_gpt.py, for a model that takes the weights."""
    attention, experts = model.attention, model.experts
    yield f"--num-layers {model.num_layers} --hidden-size {model.hidden_size}"
    yield f"--ffn-hidden-size {model.dense_ffn_size or experts.ffn_size}"
    yield f"--num-attention-heads {attention.num_heads} --kv-channels {attention.head_size}"
    if attention.num_groups != attention.num_heads:
        yield f"--group-query-attention --num-query-groups {attention.num_groups}"
    if attention.has_norms:
        yield "--qk-layernorm"
    yield f"--max-position-embeddings {model.max_positions} --norm-epsilon {model.norm_epsilon}"
    if model.is_gpt:
        yield f"--position-embedding-type {LEARNED} --no-bias-gelu-fusion"
    else:
        yield f"--position-embedding-type {ROTARY} --rotary-base {_rotary_base(model)}"
        yield f"--normalization {RMS_NORM} --swiglu --disable-bias-linear"
    if not model.is_tied:
        yield "--untie-embeddings-and-output-weights"
    yield f"--num-experts {experts.number} --moe-ffn-hidden-size {experts.ffn_size}"
    yield f"--moe-router-topk {experts.top_k}"
    if not experts.normalizes:
        yield "--moe-router-pre-softmax"
    frequency = _frequency(model)
    if isinstance(frequency, list):
        yield f"--moe-layer-freq {str(frequency).replace(' ', '')}"


_ONLY_ARGUMENTS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("multi_latent_attention", (False, None)),
    ("moe_shared_expert_intermediate_size", (None,)),
    ("moe_router_score_function", ("softmax", None)),
    ("moe_router_enable_expert_bias", (False, None)),
    ("moe_router_topk_scaling_factor", (None,)),
    ("moe_router_num_groups", (None,)),
    ("moe_latent_size", (None,)),
    ("mtp_num_layers", (None,)),
    ("rotary_percent", (1.0, None)),
    ("rotary_interleaved", (False, None)),
    ("rotary_seq_len_interpolation_factor", (None,)),
    ("use_rope_scaling", (False, None)),
    ("window_size", (None,)),
    ("squared_relu", (False, None)),
    ("apply_layernorm_1p", (False, None)),
    ("softmax_type", ("vanilla", None)),
    ("attention_output_gate", (False, None)),
    ("moe_expert_capacity_factor", (None,)),
)
"""Arguments of which no other value has a counterpart in a family that is converted."""


def model_of_arguments(arguments: Namespace) -> Model:
    """The model that a checkpoint's arguments describe."""
    given = vars(arguments)
    for name, values in _ONLY_ARGUMENTS:
        if given.get(name) not in values:
            raise ValueError(
                f"the checkpoint's {name} is {given[name]!r}, but convertible models have only "
                f"{values[0]!r}"
            )
    family = _family(given)
    hidden, heads = _argument(given, "hidden_size"), _argument(given, "num_attention_heads")
    groups = given.get("num_query_groups") if given.get("group_query_attention") else heads
    is_gpt, ffn_size = family is Family.GPT_MOE, _argument(given, "ffn_hidden_size")
    return Model(
        family=family,
        vocab_size=given.get("padded_vocab_size") or _argument(given, "vocab_size"),
        max_positions=_argument(given, "max_position_embeddings"),
        hidden_size=hidden,
        num_layers=_argument(given, "num_layers"),
        moe_layers=_moe_layers(given),
        dense_ffn_size=ffn_size,
        attention=Attention(
            num_heads=heads,
            num_groups=groups or heads,
            head_size=given.get("kv_channels") or hidden // heads,
            has_norms=bool(given.get("qk_layernorm")),
            rope_theta=None if is_gpt else float(_argument(given, "rotary_base")),
        ),
        experts=Experts(
            number=_argument(given, "num_experts"),
            top_k=_argument(given, "moe_router_topk"),
            ffn_size=given.get("moe_ffn_hidden_size") or ffn_size,
            normalizes=not given.get("moe_router_pre_softmax"),
        ),
        norm_epsilon=_argument(given, "norm_epsilon"),
        is_tied=not given.get("untie_embeddings_and_output_weights"),
    )


def _argument(given: Mapping[str, Any], name: str) -> Any:
    if given.get(name) is None:
        raise ValueError(f"the checkpoint's arguments have no {name}; describe it with --model")
    return given[name]


_FAMILY_BY = (
    ("position_embedding_type", ROTARY, LEARNED),
    ("normalization", RMS_NORM, LAYER_NORM),
    ("swiglu", True, False),
    ("add_bias_linear", False, True),
)
"""An argument, what it is in families of Hugging Face, and in our GPT."""


def _family(given: Mapping[str, Any]) -> Family:
    values = tuple(given.get(name) for name, _, _ in _FAMILY_BY)
    if values == tuple(of_gpt for _, _, of_gpt in _FAMILY_BY):
        return Family.GPT_MOE
    expected = tuple(of_huggingface for _, of_huggingface, _ in _FAMILY_BY)
    if values != expected or given.get("add_qkv_bias"):
        names = (name for name, _, _ in _FAMILY_BY)
        text = ", ".join(f"{name} {value!r}" for name, value in zip(names, values))
        raise ValueError(
            f"the checkpoint is of a model with {text}, add_qkv_bias "
            f"{given.get('add_qkv_bias')!r}, which belongs to no convertible family"
        )
    is_qwen3 = given.get("qk_layernorm") or given.get("moe_router_pre_softmax")
    is_uniform = len(_moe_layers(given)) == given["num_layers"]
    return Family.QWEN3_MOE if is_qwen3 or not is_uniform else Family.MIXTRAL


def _moe_layers(given: Mapping[str, Any]) -> tuple[int, ...]:
    """As Megatron reads ``--moe-layer-freq``: every n-th from the first, or 1 for each."""
    frequency, layers = given.get("moe_layer_freq") or 1, range(given["num_layers"])
    if isinstance(frequency, int):
        return tuple(layer for layer in layers if layer % frequency == 0)
    return tuple(layer for layer in layers if frequency[layer])
