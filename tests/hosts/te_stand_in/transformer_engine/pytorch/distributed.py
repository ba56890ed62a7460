# SPDX-License-Identifier: Apache-2.0
"""Collectives of tensor parallelism, recomputation, states of generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as State
from transformer_engine.pytorch.fp8 import fp8_autocast

_recomputing = [False, False]  # is enabled; is in the second forward
_all_rng_states: dict[str, Tensor] = {}


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    _recomputing[:] = activation_recompute and State.is_fp8_enabled(), recompute_phase
    yield
    _recomputing[:] = False, False


def is_fp8_activation_recompute_enabled() -> bool:
    return _recomputing[0]


def in_fp8_activation_recompute_phase() -> bool:
    return _recomputing[1]


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for key in ("distribute_saved_activations", "get_rng_state_tracker", "tp_group"):
        kwargs.pop(key, None)
    is_on, recipe, group = State.is_fp8_enabled(), State.get_fp8_recipe(), State.get_fp8_group()

    def run(*inputs: Any) -> Any:  # again in backward, which is behind the autocast
        with fp8_autocast(is_on, fp8_recipe=recipe, fp8_group=group):
            return function(*inputs, **kwargs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=True)


class CudaRNGStatesTracker:
    """States of the CPU's generator by name."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.states_: dict[str, Tensor] = {}

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()
        _all_rng_states.update(self.states_)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        yield
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(before)


def get_all_rng_states() -> dict[str, Tensor]:
    return _all_rng_states


def _reduce(tensor: Tensor, group: Any) -> Tensor:
    found = tensor.clone()
    dist.all_reduce(found, group=group)
    return found


def _gather(tensor: Tensor, group: Any) -> Tensor:
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(found, tensor.contiguous(), group=group)
    return torch.cat(found)


def _scatter(tensor: Tensor, group: Any) -> Tensor:
    return _reduce(tensor, group).chunk(group.size())[group.rank()].contiguous()


def _keep(tensor: Tensor, group: Any) -> Tensor:
    return tensor


class Collective(torch.autograd.Function):
    """What is done to a tensor ahead, and to its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, ahead: Any, back: Any) -> Tensor:
        ctx.group, ctx.back = group, back
        return ahead(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.back(grad, ctx.group), None, None, None


def communicate(tensor: Tensor, linear: Any, mode: str) -> Tensor:
    """The input of a column parallel linear, or the output of a row parallel one."""
    if linear.parallel_mode != mode or linear.tp_size == 1:
        return tensor
    ways = (_gather, _scatter) if linear.sequence_parallel else (_keep, _reduce)
    return Collective.apply(tensor, linear.tp_group, *(ways if mode == "column" else ways[::-1]))
