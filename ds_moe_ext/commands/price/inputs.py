# SPDX-License-Identifier: Apache-2.0
"""What ``ds-moe-ext price`` is asked: a job's file, a model, a cluster, how it is trained."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_moe_ext.core.hardware import Hardware, read_hardware
from ds_moe_ext.files.documents import (
    bytes_of,
    file_of,
    is_json,
    names_of,
    parsed_as_hjson,
    read_document,
)
from ds_moe_ext.planning.model_shape import (
    ALONE,
    CORE_ATTENTION,
    MASTER_AND_STATES,
    MOE,
    ModelParallel,
    ModelShape,
    Training,
    of_config,
    of_megatron,
)
from ds_moe_ext.strategies.settings import BLOCK
from ds_moe_ext.strict import nearest_and_all

CONFIG = "config.json"
DEFAULT_LENGTH = 4096  # tokens of a sample, where nobody says
FLAG = "--ds-moe-ext-config"
_REMEDY = "name a DeepSpeed JSON, or a file of Megatron's flags"
_KINDS, _IN_32 = ("bf16", "fp16"), "fp32"  # number types, as both hosts name them
_NOWHERE = "none"  # as DeepSpeed says that it offloads nothing
_ALL_OF_IT, _PARTS, _P2P, _FUSED = "full", "selective", "p2p", "transformer_engine"
"""Values of Megatron's flags."""
_LISTS = ("recompute-modules", "offload-modules", "cuda-graph-scope", "data-path")
"""Flags that several words follow."""
_STATES = ("main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype")
_TYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, eq=False)
class AskedJob:
    """A job as its file describes it."""

    document: Mapping[str, Any]  # with our block; ``{}`` where there is none
    shape: ModelShape | None  # of the model, where the file says; Megatron's flags do
    sizes: Mapping[str, Any]  # fields of ``Training`` that the file says
    samples: int | None = None  # of a step, where the file says


def read_job(path: Path) -> AskedJob:
    """Of a DeepSpeed JSON, or of a file of Megatron's flags."""
    try:
        held = bytes_of(path)
        text = held.decode(json.detect_encoding(held))
        document = parsed_as_hjson(text) if is_json(text) else None
    except ValueError as error:
        raise ValueError(f"{str(path)!r} cannot be read ({error}); {_REMEDY}") from error
    if not text.strip():
        raise ValueError(f"{str(path)!r} has neither JSON nor flags; {_REMEDY}")
    if document is None:
        return _of_megatron(text, path)
    if not isinstance(document, Mapping):
        raise ValueError(f"{str(path)!r} is a JSON list, not an object; {_REMEDY}")
    return _of_deepspeed(document)


def _of_deepspeed(document: Mapping[str, Any]) -> AskedJob:
    has = {kind: _section(document, kind).get("enabled", False) for kind in _KINDS}
    kinds = [kind for kind in _KINDS if has[kind] is True]
    tensor = _number(_section(document, "tensor_parallel"), "autotp_size") or 1
    if tensor > 1:
        raise ValueError(
            f"tensor_parallel.autotp_size is {tensor}, and AutoTP is not priced; set it to 1, or "
            "give a file of Megatron's flags"
        )
    zero = _section(document, "zero_optimization")
    stage = zero.get("stage", 0)
    sizes = {
        "micro_batch": _number(document, "train_micro_batch_size_per_gpu"),
        "micro_batches": _number(document, "gradient_accumulation_steps"),
        # The Trainer fills in "auto" by its own flags.
        "number_type": kinds[0] if kinds else None if "auto" in has.values() else "fp32",
        "zero_stage": stage if isinstance(stage, int) else 0,
        "offloaded_states": _offloaded(_section(zero, "offload_optimizer"), stage),
        "hides_gradients": zero.get("overlap_comm") is True,
        "sums_in_float32": _section(document, "data_types").get("grad_accum_dtype") == _IN_32,
    }
    samples = _number(document, "train_batch_size")
    return AskedJob(document, None, _stated(sizes), samples)


def _offloaded(block: Mapping[str, Any], stage: Any) -> float:
    """Part of the optimizer's states that DeepSpeed keeps in host memory."""
    if block.get("device", _NOWHERE) == _NOWHERE:
        return 0.0
    ratio = block.get("ratio", 1.0) if stage == 3 else 1.0
    return float(ratio) if isinstance(ratio, int | float) and 0 <= ratio <= 1 else 1.0


def _stated(sizes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without those that nobody stated."""
    return {name: value for name, value in sizes.items() if value is not None}


def _section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = document.get(name)
    return section if isinstance(section, Mapping) else {}


def _number(document: Mapping[str, Any], key: str) -> int | None:
    """A whole number above 0; DeepSpeed's "auto" and what is not there are None."""
    value = document.get(key)
    return value if isinstance(value, int) and value > 0 else None


def _of_megatron(text: str, path: Path) -> AskedJob:
    flags = _flags(text, path)
    shape = of_megatron(flags, path.stem)
    parallel = _parallel(flags, shape, path)
    document: Mapping[str, Any] = {}
    named = flags.get(FLAG[2:])
    if isinstance(named, str):
        document = read_document(path.parent / named)
    sizes = {
        "number_type": next((kind for kind in _KINDS if flags.get(kind)), "fp32"),
        "zero_stage": 1 if flags.get("use-distributed-optimizer") else 0,
        "hides_gradients": bool(flags.get("overlap-grad-reduce")),
        # As Megatron does in bf16, whatever else is stated.
        "sums_in_float32": bool(flags.get("bf16")) and not flags.get("grad-reduce-in-bf16"),
        "recomputes": flags.get("recompute-granularity") == _ALL_OF_IT,
        "again": _again(flags),
        "is_fused": flags.get("transformer-impl", _FUSED) == _FUSED,
        "state_bytes": _state_bytes(flags, path),
        "micro_batch": _whole(flags, "micro-batch-size", path),
        "length": _whole(flags, "seq-length", path),
        "parallel": parallel,
    }
    samples = _whole(flags, "global-batch-size", path)
    stated = _expert_sizes(flags, parallel, path)
    block = {**document, BLOCK: {**stated, **_section(document, BLOCK)}}
    return AskedJob(block, shape, _stated(sizes), samples)


def _flags(text: str, path: Path) -> dict[str, str | bool]:
    """Flags by name, those without a value as true, as a shell would read them."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not a list of flags ({error}); correct it") from error
    flags: dict[str, str | bool] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags[name] = value if equals else True
        elif name and flags[name] is True:
            flags[name] = word
        elif name in _LISTS:
            flags[name] = f"{flags[name]} {word}"
        else:
            raise ValueError(
                f"{str(path)!r} says {word!r}, which belongs to no flag; give Megatron's flags "
                "as --name value, or a DeepSpeed JSON"
            )
    return flags


def _again(flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Modules that run again alone."""
    named = str(flags.get("recompute-modules", CORE_ATTENTION)).split()
    chosen = set(named) if flags.get("recompute-granularity") == _PARTS else set()
    if flags.get("moe-layer-recompute"):
        chosen.add(MOE)
    return tuple(sorted(chosen))


def _state_bytes(flags: Mapping[str, Any], path: Path) -> int:
    """Of a weight, for the optimizer: in 32 bits but with --use-precision-aware-optimizer."""
    if not flags.get("use-precision-aware-optimizer"):
        return MASTER_AND_STATES
    total = 0
    for name in _STATES:
        kind = flags.get(name, "fp32")
        if kind not in _TYPE_BYTES:
            raise ValueError(
                f"{str(path)!r} says --{name} {kind}; give one of {', '.join(_TYPE_BYTES)}"
            )
        total += _TYPE_BYTES[kind]
    return total


# What Megatron's flags say of tensor, context, pipeline and expert parallelism.

_REFUSED = {
    "pipeline-model-parallel-layout": (
        "set the layers of the first and the last stage with "
        "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
    ),
    "account-for-embedding-in-pipeline-split": "say --decoder-first-pipeline-num-layers",
    "account-for-loss-in-pipeline-split": "say --decoder-last-pipeline-num-layers",
    "hybrid-context-parallel": "leave it out",
    "hierarchical-context-parallel-sizes": "leave it out",
}
"""Flags of other ways than those that are priced, with what to do."""


def _parallel(flags: Mapping[str, Any], shape: ModelShape, path: Path) -> ModelParallel:
    """Of the flags of pretrain_gpt.py, by their names without dashes before."""
    for name, remedy in _REFUSED.items():
        if name in flags:
            raise ValueError(f"{str(path)!r} says --{name}, which is not priced; {remedy}")
    tensor = _whole(flags, "tensor-model-parallel-size", path) or 1
    context = _whole(flags, "context-parallel-size", path) or 1
    _check_tensor(flags, tensor, path)
    if context > 1 and flags.get("cp-comm-type", _P2P) != _P2P:
        raise ValueError(
            f"{str(path)!r} says --cp-comm-type {flags['cp-comm-type']}, which is not priced; only "
            f"{_P2P} is, Megatron's default"
        )
    pipeline = _whole(flags, "pipeline-model-parallel-size", path) or 1
    parallel = ModelParallel(
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        chunks=_chunks(flags, shape.num_layers, pipeline, path),
        first_layers=_whole(flags, "decoder-first-pipeline-num-layers", path),
        last_layers=_whole(flags, "decoder-last-pipeline-num-layers", path),
    )
    if pipeline > 1:
        parallel.layers(shape.num_layers)
    return parallel


def _check_tensor(flags: Mapping[str, Any], tensor: int, path: Path) -> None:
    if tensor == 1:
        return
    if not flags.get("sequence-parallel"):
        raise ValueError(
            f"{str(path)!r} says --tensor-model-parallel-size {tensor} without "
            "--sequence-parallel, which Megatron needs to train MoE layers; add it"
        )
    heads = _whole(flags, "num-attention-heads", path) or tensor
    groups = _whole(flags, "num-query-groups", path) or heads
    for name, number in (("num-attention-heads", heads), ("num-query-groups", groups)):
        if number % tensor and (number == heads or tensor % number):
            raise ValueError(
                f"{str(path)!r} says --{name} {number}, which --tensor-model-parallel-size "
                f"{tensor} does not divide; give another size"
            )


def _chunks(flags: Mapping[str, Any], num_layers: int, pipeline: int, path: Path) -> int:
    """Virtual stages of each stage."""
    chunks = _whole(flags, "num-virtual-stages-per-pipeline-rank", path)
    layers = _whole(flags, "num-layers-per-virtual-pipeline-stage", path)
    if layers is None:
        return chunks or 1
    is_uneven = any(f"decoder-{end}-pipeline-num-layers" in flags for end in ("first", "last"))
    if chunks is not None or is_uneven:
        raise ValueError(
            f"{str(path)!r} says --num-layers-per-virtual-pipeline-stage {layers} and how many "
            "virtual stages there are, or layers of the first or last stage; say the former by "
            "--num-virtual-stages-per-pipeline-rank alone"
        )
    if num_layers % (pipeline * layers):
        raise ValueError(
            f"{str(path)!r} says --num-layers-per-virtual-pipeline-stage {layers}, but "
            f"{num_layers} layers do not divide into {pipeline} pipeline stages of such parts; "
            "give another number"
        )
    return num_layers // (pipeline * layers)


def _expert_sizes(
    flags: Mapping[str, Any], parallel: ModelParallel, path: Path
) -> Mapping[str, int]:
    """As keys of our block; as in Megatron, experts are split as dense weights are, if nobody says
    otherwise."""
    ep_ranks = _whole(flags, "expert-model-parallel-size", path)
    split = _whole(flags, "expert-tensor-parallel-size", path)
    if ep_ranks is not None and split is None and parallel.tensor > 1:
        split = parallel.tensor
    return _stated({"expert_parallel_size": ep_ranks, "expert_sharding_size": split})


def _whole(flags: Mapping[str, Any], name: str, path: Path) -> int | None:
    """Of a flag, if it is given: a whole number above 0."""
    value = flags.get(name)
    if value is None:
        return None
    if isinstance(value, str) and value.isdigit() and int(value):
        return int(value)
    raise ValueError(f"{str(path)!r} says --{name} {value}; give a whole number above 0")


# The model and the cluster.


def read_model(path: Path) -> ModelShape:
    """Of a Hugging Face config.json or its folder, of a file of configs/models or like those."""
    file = path / CONFIG if path.is_dir() else file_of("models", path)
    try:
        document = read_document(file)
    except ValueError as error:
        raise ValueError(
            f"--model is {str(path)!r}, which cannot be read ({error}); name a model's config.json,"
            f" or one of configs/models: {nearest_and_all(str(path), names_of('models'))}"
        ) from error
    inner = document.get("config")
    if isinstance(inner, Mapping):
        inner = {"model_type": document.get("family"), **inner}
    name = file.resolve().parent.name if file.name == CONFIG else file.stem
    return of_config(inner if isinstance(inner, Mapping) else document, name)


def read_clusters(given: Sequence[str], num_nodes: Sequence[int] | None) -> list[Hardware]:
    """Of files, or names of configs/hardware; with other numbers of nodes, if they are given."""
    read = [read_hardware(each) for each in given]
    if num_nodes is None:
        return read
    if len(num_nodes) != len(read):
        raise ValueError(
            f"--nodes has {len(num_nodes)} numbers, but --hardware {len(read)} clusters; give each "
            "cluster its number"
        )
    if fewest := [nodes for nodes in num_nodes if nodes < 1]:
        raise ValueError(
            f"--nodes has {fewest[0]}; give each cluster a whole number of nodes, 1 or more"
        )
    return [replace(hardware, num_nodes=nodes) for hardware, nodes in zip(read, num_nodes)]


def training_of(
    asked: AskedJob, shape: ModelShape, num_ranks: int, given: Mapping[str, Any]
) -> Training:
    """How the job is trained: what is given on the command line, else by its file."""
    sizes: dict[str, Any] = {"length": min(shape.length or DEFAULT_LENGTH, DEFAULT_LENGTH)}
    sizes |= asked.sizes
    sizes |= {key: value for key, value in given.items() if value is not None}
    parallel = sizes.get("parallel", ALONE)
    if asked.samples is None or "micro_batches" in sizes:
        return Training(num_ranks=num_ranks, **sizes)
    micro_batch = sizes.get("micro_batch", 1)
    at_once = num_ranks // parallel.size * micro_batch
    if not at_once or asked.samples % at_once:
        share = f" in groups of {parallel.size}" * parallel.is_any
        raise ValueError(
            f"a step has {asked.samples} samples, which {num_ranks} ranks{share} of "
            f"{micro_batch} each do not divide; give other --nodes, or --micro-batch"
        )
    return Training(num_ranks=num_ranks, micro_batches=asked.samples // at_once, **sizes)
