# SPDX-License-Identifier: Apache-2.0
"""What Megatron's flags say of tensor, context, pipeline and expert parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_moe_ext.planning.model_shape import ModelParallel, ModelShape

_REFUSED = {
    "pipeline-model-parallel-layout": "say the layers of the first and the last stage by "
    "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers",
    "account-for-embedding-in-pipeline-split": "say --decoder-first-pipeline-num-layers",
    "account-for-loss-in-pipeline-split": "say --decoder-last-pipeline-num-layers",
    "hybrid-context-parallel": "leave it out",
    "hierarchical-context-parallel-sizes": "leave it out",
}
"""Flags of other ways than those that are priced, with what to do."""

_P2P = "p2p"


def parallel_of(flags: Mapping[str, Any], shape: ModelShape, path: Path) -> ModelParallel:
    """Of the flags, by their names without dashes before.

    Args:
        flags: of pretrain_gpt.py.
        shape: of the model.
        path: of the file.

    Raises:
        ValueError: what is not priced, or what Megatron would not run either.
    """
    for name, remedy in _REFUSED.items():
        if name in flags:
            raise ValueError(f"{str(path)!r} says --{name}, which is not priced; {remedy}")
    tensor = whole(flags, "tensor-model-parallel-size", path) or 1
    context = whole(flags, "context-parallel-size", path) or 1
    _check_tensor(flags, tensor, path)
    if context > 1 and flags.get("cp-comm-type", _P2P) != _P2P:
        raise ValueError(
            f"{str(path)!r} says --cp-comm-type {flags['cp-comm-type']}, which is not priced; only "
            f"{_P2P} is, Megatron's default"
        )
    pipeline = whole(flags, "pipeline-model-parallel-size", path) or 1
    parallel = ModelParallel(
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        chunks=_chunks(flags, shape.num_layers, pipeline, path),
        first_layers=whole(flags, "decoder-first-pipeline-num-layers", path),
        last_layers=whole(flags, "decoder-last-pipeline-num-layers", path),
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
            "--sequence-parallel, which Megatron does not train MoE layers by; add it"
        )
    heads = whole(flags, "num-attention-heads", path) or tensor
    groups = whole(flags, "num-query-groups", path) or heads
    for name, number in (("num-attention-heads", heads), ("num-query-groups", groups)):
        if number % tensor and (number == heads or tensor % number):
            raise ValueError(
                f"{str(path)!r} says --{name} {number}, which --tensor-model-parallel-size "
                f"{tensor} does not divide; give another size"
            )


def _chunks(flags: Mapping[str, Any], num_layers: int, pipeline: int, path: Path) -> int:
    """Virtual stages of each stage."""
    chunks = whole(flags, "num-virtual-stages-per-pipeline-rank", path)
    layers = whole(flags, "num-layers-per-virtual-pipeline-stage", path)
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


def expert_sizes(
    flags: Mapping[str, Any], parallel: ModelParallel, path: Path
) -> Mapping[str, int]:
    """As keys of our block; as in Megatron, experts are split as dense weights are, if nobody says
    otherwise."""
    cells = whole(flags, "expert-model-parallel-size", path)
    split = whole(flags, "expert-tensor-parallel-size", path)
    if cells is not None and split is None and parallel.tensor > 1:
        split = parallel.tensor
    sizes = {"expert_parallel_size": cells, "expert_sharding_size": split}
    return {key: size for key, size in sizes.items() if size is not None}


def whole(flags: Mapping[str, Any], name: str, path: Path) -> int | None:
    """Of a flag, if it is given.

    Raises:
        ValueError: it is no whole number above 0.
    """
    value = flags.get(name)
    if value is None:
        return None
    if isinstance(value, str) and value.isdigit() and int(value):
        return int(value)
    raise ValueError(f"{str(path)!r} says --{name} {value}; give a whole number above 0")
