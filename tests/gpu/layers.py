# SPDX-License-Identifier: Apache-2.0
"""One MoE layer on one device, on streams that a test chooses; on a CPU the same code runs too.

Shape letters: T tokens, K choices a token, E experts, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.gate import SoftmaxTopK
from ds_moe_ext.moe.layer import LayerOptions, MoELayer
from ds_moe_ext.planning.strategy import Job, Strategy
from ds_moe_ext.schedule.executor import (
    DeviceStreams,
    InlineDeviceStreams,
    InlineStreams,
    ScheduleStreams,
    ThreadStreams,
)
from ds_moe_ext.schedule.program import Program
from ds_moe_ext.strategies.ep import ExpertParallel
from tests.strategies_for_tests import Chunked

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ON_CUDA = pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)
DEVICES = pytest.mark.parametrize("device", [pytest.param(CPU, id="cpu"), ON_CUDA])


@dataclass(frozen=True)
class Case:
    """Sizes and routing of one layer."""

    num_tokens: int = 96
    width: int = 16
    expert_width: int = 24
    num_experts: int = 8
    top_k: int = 2
    hot: float = 0.0  # added to the first expert's logits
    dead: int = 0  # experts that no token chooses
    degrees: tuple[int, int] = (1, 1)
    capacity_factor: float | None = None
    dtype: torch.dtype = torch.float64

    @property
    def strategy(self) -> Strategy:
        forward, backward = self.degrees
        if self.degrees == (1, 1):
            return ExpertParallel()
        return Chunked(forward=forward, backward=backward)

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Router ``[E, D]``, up ``[E, 2F, D]``, down ``[E, D, F]``; the same on every device."""
        generator = torch.Generator().manual_seed(self.num_experts)
        e, d, f = self.num_experts, self.width, self.expert_width

        def rand(*shape: int, scale: float) -> Tensor:
            drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return (drawn * scale).to(self.dtype)

        gate_ED = rand(e, d, scale=1.0)
        # The last input is always one: its column biases the routing.
        gate_ED[0, -1] += self.hot
        gate_ED[e - self.dead :, -1] -= 1e3
        return gate_ED, rand(e, 2 * f, d, scale=d**-0.5), rand(e, d, f, scale=f**-0.5)

    def tokens(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """x and the gradient of y, ``[T, D]``."""
        generator = torch.Generator().manual_seed(100 + seed)
        shape = (2, self.num_tokens, self.width)
        x, grad = torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)
        x[:, -1] = 1.0
        return x, grad


def layer_of(case: Case, device: torch.device) -> MoELayer:
    """The layer in an EP rank. No process group is needed."""
    take_back, strategy = Placement.block(case.num_experts, 1), case.strategy
    (plan,) = strategy.plan(Job.at_start([take_back], np.zeros(1, dtype=np.int64)))
    gate, *experts = (weight.to(device) for weight in case.weights())
    return MoELayer(
        nn.ParameterList([gate]),
        nn.ParameterList([weight[slot] for slot in range(case.num_experts) for weight in experts]),
        gate=SoftmaxTopK(top_k=case.top_k),
        function=FeedForwardExperts(silu_gated),
        strategy=strategy,
        plan=plan,
        layout=ParallelLayout(Grid(1, 1), 0),
        options=LayerOptions(capacity_factor=case.capacity_factor),
    )


def side_by_side(device: torch.device) -> ScheduleStreams:
    """Streams that overlap."""
    return DeviceStreams(device) if device.type == "cuda" else ThreadStreams()


def one_by_one(device: torch.device) -> ScheduleStreams:
    """Streams in the caller's cuda_stream or thread."""
    return InlineDeviceStreams(device) if device.type == "cuda" else InlineStreams()


@dataclass(frozen=True, eq=False)
class Runner:
    """A layer's program on chosen streams."""

    layer: MoELayer
    program: Program

    @classmethod
    def of(
        cls,
        case: Case,
        device: torch.device,
        streams: ScheduleStreams,
        change: Callable[[Program], Program] = lambda program: program,
    ) -> Runner:
        layer = layer_of(case, device)
        program = replace(layer.routed.program(device), streams=streams)
        return cls(layer, change(program))

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y and the losses."""
        layer = self.layer
        y, losses = self.program(x, tuple(layer.gate_weights), tuple(layer.expert_weights))
        return y, losses

    def step(self, x: Tensor, grad: Tensor) -> list[Tensor]:
        """y, losses and the gradients of x and of all weights."""
        for parameter in self.layer.parameters():
            parameter.grad = None
        x = x.detach().requires_grad_()
        y, losses = self(x)
        scale = torch.arange(1, losses.numel() + 1, device=x.device, dtype=losses.dtype) * 0.1
        torch.autograd.backward([y, losses], [grad, scale])
        grads = [x.grad, self.layer.gate_weights[0].grad, *self.expert_grads()]
        return [y.detach(), losses.detach(), *(g for g in grads if g is not None)]

    def expert_grads(self) -> list[Tensor]:
        """Of up ``[E, 2F, D]`` and down ``[E, D, F]``; none before a step."""
        grads = [p.grad for p in self.layer.expert_weights if p.grad is not None]
        return [torch.stack(grads[i::2]) for i in range(2) if grads]


def all_equal(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> bool:
    """Bit by bit. Waits for the device."""
    return len(ours) == len(reference) and all(map(torch.equal, ours, reference))
