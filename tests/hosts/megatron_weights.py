# SPDX-License-Identifier: Apache-2.0
"""Parameters of a Megatron model under names that no layout changes, and weights drawn by these.

Layers are counted over all pipeline stages and experts over all expert parallel ranks; a shard of a
tensor parallel parameter is its part of the whole. So runs of any layout start from one model.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SPREAD = 0.1  # standard deviation of weights
SEQUENTIAL = re.compile(r"(.*local_experts\.)(\d+)(\..*)")
TE_GROUPED = re.compile(r"(.*)(linear_fc[12]\.(?:weight|bias))(\d+)")


@dataclass(frozen=True)
class Piece:
    """One parameter of this rank, or one expert's part of a parameter that holds several."""

    name: str
    parameter: nn.Parameter
    part: int | None
    shape: tuple[int, ...]
    dim: int | None
    size: int
    rank: int
    halves: int

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor that is shaped as the parameter."""
        if self.part is None:
            return tensor.view(self.shape)
        count = tensor.numel() // torch.Size(self.shape).numel()
        return tensor.view(count, *self.shape)[self.part]

    def drawn(self) -> Tensor:
        """This rank's share of the weights that belong to the name."""
        whole = list(self.shape)
        if self.dim is not None:
            whole[self.dim] *= self.size
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        weights = SPREAD * torch.randn(whole, generator=generator, dtype=torch.float64)
        if self.dim is None:
            return weights
        halves = weights.chunk(self.halves, self.dim)
        return torch.cat([h.chunk(self.size, self.dim)[self.rank] for h in halves], self.dim)


def pieces(chunks: list[nn.Module], is_gated: bool, num_experts: int | None) -> Iterator[Piece]:
    """Every piece of this rank's model."""
    for chunk in chunks:
        for path, module in chunk.named_modules():
            for own, parameter in module.named_parameters(recurse=False):
                name = _counted(chunk, f"{path}.{own}")
                yield from _pieces(name, parameter, is_gated, _numbers(chunk, path))


def _numbers(chunk: nn.Module, path: str) -> list[int]:
    """Of this rank's experts, where a module is among those of a layer."""
    layer, is_expert, _ = f"{path}.".partition(".experts.")
    owner: Any = chunk.get_submodule(layer) if is_expert else None
    return list(owner.local_expert_indices) if is_expert else []


def _counted(chunk: nn.Module, path: str) -> str:
    """The name without wrappers, and with the layer's number in the whole model."""
    path = re.sub(r"^(module\.)+", "", path)
    found = re.match(r"(decoder\.layers\.)(\d+)(\..*)", path)
    if not found:
        return path
    layers: Any = next(module for name, module in chunk.named_modules() if name.endswith("layers"))
    return f"{found[1]}{layers[int(found[2])].layer_number - 1}{found[3]}"


def _pieces(name: str, parameter: Any, is_gated: bool, numbers: list[int]) -> Iterator[Piece]:
    from megatron.core import parallel_state

    is_expert = ".experts." in name
    if is_expert:
        size = parallel_state.get_expert_tensor_parallel_world_size()
        rank = parallel_state.get_expert_tensor_parallel_rank()
    else:
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
    dim = vars(parameter).get("partition_dim", -1)
    is_shared = dim < 0 or not vars(parameter).get("tensor_model_parallel", is_expert)
    is_first = "linear_fc1" in name or name.endswith("experts.weight1")
    split = (None if is_shared else dim, size, rank, 2 if is_gated and is_first else 1)
    if not is_expert:
        yield Piece(name, parameter, None, tuple(parameter.shape), *split)
        return
    if found := TE_GROUPED.fullmatch(name):
        name = f"{found[1]}local_experts.{found[3]}.{found[2]}"
    if found := SEQUENTIAL.fullmatch(name):
        slot = int(found[2])  # more than Megatron built where experts have moved here
        number = numbers[slot] if slot < len(numbers) else numbers[0] + slot
        name = f"{found[1]}{number}{found[3]}"
        yield Piece(name, parameter, None, tuple(parameter.shape), *split)
        return
    yield from _grouped(name, parameter, numbers, split)


def _grouped(
    name: str, parameter: Any, numbers: list[int], split: tuple[Any, ...]
) -> Iterator[Piece]:
    """The experts of one parameter of legacy GroupedMLP, whose weights lie [in, out]."""
    rows, columns = parameter.shape
    count = len(numbers)
    is_first = name.endswith("weight1")
    shape = (rows, columns // count) if is_first else (rows // count, columns)
    for slot, number in enumerate(numbers):
        whole = (1 if is_first else 0, *split[1:])
        yield Piece(f"{name}.{number}", parameter, slot, shape, *whole)


def draw(chunks: list[nn.Module], is_gated: bool, num_experts: int | None) -> None:
    """Give every parameter of more than one dimension, and every expert's, its weights."""
    for piece in pieces(chunks, is_gated, num_experts):
        if len(piece.shape) > 1 or ".experts." in piece.name:
            piece.of(piece.parameter.data).copy_(piece.drawn())


def draw_moved(chunks: list[nn.Module], is_gated: bool, num_experts: int | None) -> None:
    """The same of experts, anew, where they are others than Megatron built here: ranks with roles
    know which those are when the model is wrapped."""
    from megatron.core import parallel_state

    count = (num_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    first = count * parallel_state.get_expert_model_parallel_rank()
    modules = (vars(module) for chunk in chunks for module in chunk.modules())
    held = [list(of["local_expert_indices"]) for of in modules if "local_expert_indices" in of]
    if all(own in ([], list(range(first, first + count))) for own in held):
        return
    for piece in pieces(chunks, is_gated, num_experts):
        if ".experts." in piece.name:
            piece.of(piece.parameter.data).copy_(piece.drawn())


def gather_gradients(chunks: list[Any]) -> None:
    """Let every rank have all of what a distributed optimizer has reduced a shard of per rank."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if not group.ddp_config.use_distributed_optimizer:
                continue
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                share = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, share, group=ranks)
