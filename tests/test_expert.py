# SPDX-License-Identifier: Apache-2.0
"""Expert functions against one expert at a time, plain autograd. No ranks.

Shape letters: R rows, S slots, D model width, F expert width.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ds_moe_ext.moe.expert import ModuleExperts
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, grouped_linear, silu_gated
from ds_moe_ext.moe.slot_rows import SlotRows
from ds_moe_ext.testing import relative_error

S, D, F = 4, 8, 12
ROWS_S = (5, 0, 3, 1)  # one slot without rows


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def slots(rows_S: tuple[int, ...] = ROWS_S) -> SlotRows:
    return SlotRows.of(np.asarray(rows_S), torch.device("cpu"))


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(out, inputs, rand(*out.shape, dtype=out.dtype)))


def test_silu_gated_has_autograds_gradient() -> None:
    x = rand(6, 10).requires_grad_()
    gate, up = x.chunk(2, dim=-1)
    plain = torch.nn.functional.silu(gate) * up
    assert torch.equal(silu_gated(x), plain)
    ours, theirs = gradients(silu_gated(x), [x]), gradients(plain, [x])
    assert relative_error(ours[0], theirs[0]) <= 1e-15
    assert torch.autograd.gradcheck(silu_gated, (x,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_S", [ROWS_S, (0, 0, 0, 0), (9, 0, 0, 0)])
@pytest.mark.parametrize("F", [7, 12, 16])
def test_grouped_linear_is_one_product_a_slot(
    F: int, rows_S: tuple[int, ...], dtype: torch.dtype
) -> None:
    """float64 has no grouped GEMM; the others have one on CPU, if rows are aligned: bfloat16 of
    width 12 and anything of width 7 are not."""
    x = rand(sum(rows_S), D, dtype=dtype).requires_grad_()
    weight, bias = rand(S, D, F, dtype=dtype), rand(S, F, dtype=dtype)
    inputs = [x, weight.requires_grad_(), bias.requires_grad_()]
    parts = zip(x.split(rows_S), weight.unbind(), bias.unbind())
    plain = torch.cat([part @ matrix + shift for part, matrix, shift in parts])
    ours = grouped_linear(x, slots(rows_S), weight, bias)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    assert relative_error(ours.double(), plain.double()) <= tolerance
    for one, other in zip(gradients(ours, inputs), gradients(plain, inputs)):
        assert relative_error(one.double(), other.double()) <= tolerance


@pytest.mark.parametrize("sizes", [(), (S,), (1, 3)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_feed_forward_layouts(is_transposed: bool, has_bias: bool, sizes: tuple[int, ...]) -> None:
    """GPT-OSS stores its weights transposed and has biases; Mixtral neither. Weights come by slot,
    or in stacks of so many slots, as those of replicas behind those at their owners."""
    up, down = rand(S, 2 * F, D), rand(S, D, F)
    up_bias, down_bias = rand(S, 2 * F), rand(S, D)
    stored = [up.mT.contiguous(), down.mT.contiguous()] if is_transposed else [up, down]
    weights = [stored[0], up_bias, stored[1], down_bias] if has_bias else stored
    x = rand(sum(ROWS_S), D)
    function = FeedForwardExperts(silu_gated, is_transposed=is_transposed, has_bias=has_bias)
    by_slot = [weight[slot].clone() for slot in range(S) for weight in weights]
    inputs = [t.requires_grad_() for t in (x, *by_slot)]
    given = by_slot
    if sizes:
        columns = (torch.stack(by_slot[n :: len(weights)]) for n in range(len(weights)))
        given = [each for stack in zip(*(own.split(sizes) for own in columns)) for each in stack]
    ours = function(x, slots(), tuple(given))
    outs = []
    for slot, rows in enumerate(x.split(ROWS_S)):
        own = by_slot[slot * len(weights) : (slot + 1) * len(weights)]
        first, second = own[:: 2 if has_bias else 1]
        first, second = (first, second) if is_transposed else (first.T, second.T)
        hidden = silu_gated(rows @ first + (own[1] if has_bias else 0))
        outs.append(hidden @ second + (own[3] if has_bias else 0))
    plain = torch.cat(outs)
    assert relative_error(ours, plain) <= 1e-14
    for one, other in zip(gradients(ours, inputs), gradients(plain, inputs)):
        assert relative_error(one, other) <= 1e-13


class Bottleneck(nn.Module):
    """An expert of a user's own: two layers, a norm, a pair as output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D))
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.norm(self.layers(x)), None


def test_any_module_is_an_expert() -> None:
    torch.manual_seed(0)
    modules = [Bottleneck().double() for _ in range(S)]
    names = tuple(name for name, _ in modules[0].named_parameters())
    weights = [module.get_parameter(name) for module in modules for name in names]
    x = rand(sum(ROWS_S), D).requires_grad_()
    ours = ModuleExperts(modules[0], names)(x, slots(), tuple(weights))
    plain = torch.cat([module(rows)[0] for module, rows in zip(modules, x.split(ROWS_S))])
    assert relative_error(ours, plain) <= 1e-14
    for one, other in zip(gradients(ours, [x, *weights]), gradients(plain, [x, *weights])):
        assert relative_error(one, other) <= 1e-13
