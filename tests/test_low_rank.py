# SPDX-License-Identifier: Apache-2.0
"""What is added to a weight of experts is what its factors say, and both get their gradients.

Shape letters: S slots, F and D the dims of a weight, Q the width of its factors.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_moe_ext.moe.sharding import WHOLE, Along, LowRank, Shard, with_low_ranks

S, F, D, Q = 3, 8, 6, 2


def drawn(*shape: int, trained: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(trained)


def low_rank(strength: float, *, is_transposed: bool = False) -> LowRank:
    """Of the second of two weights."""
    return LowRank(1, 2, 3, is_transposed, lambda: strength)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("trains_weight", [False, True])
def test_gradients_are_those_of_the_sum(is_transposed: bool, trains_weight: bool) -> None:
    weight = drawn(S, *((D, F) if is_transposed else (F, D)), trained=trains_weight)
    down, up = drawn(S, Q, D), drawn(S, F, Q)
    other = drawn(S, 5)
    added = low_rank(0.5, is_transposed=is_transposed)
    got = with_low_ranks([other, weight, down, up], [added], WHOLE, None)
    assert len(got) == 2 and got[0] is other
    product = torch.einsum("soq,sqi->sio" if is_transposed else "soq,sqi->soi", up, down)
    wanted = weight + 0.5 * product
    torch.testing.assert_close(got[1], wanted, rtol=1e-14, atol=1e-14)
    toward, leaves = drawn(*weight.shape), [down, up, *([weight] if trains_weight else [])]
    found = torch.autograd.grad((got[1] * toward).sum(), leaves)
    for mine, theirs in zip(found, torch.autograd.grad((wanted * toward).sum(), leaves)):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


def test_nothing_is_added_where_it_is_off() -> None:
    weight = drawn(S, F, D, trained=False)
    rest = [drawn(S, Q, D), drawn(S, F, Q)]
    assert with_low_ranks([weight, weight, *rest], [low_rank(0.0)], WHOLE, None)[1] is weight


def test_nothing_is_saved_by_autograd() -> None:
    """Activation checkpointing compares what forward saved with what is saved when it is computed
    again, where fewer layers begin."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        low_rank(1.0).added_to(drawn(S, F, D), drawn(S, Q, D), drawn(S, F, Q))
    assert not saved


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("along", [Along(0, 2), Along(0), Along(1)])
def test_a_part_is_made_of_parts(is_transposed: bool, along: Along) -> None:
    """One factor is split as the weight is, and of the other all is needed."""
    added = low_rank(2.0, is_transposed=is_transposed)
    weight = drawn(S, *((D, F) if is_transposed else (F, D)), trained=False)
    down, up = drawn(S, Q, D), drawn(S, F, Q)
    wanted = added.added_to(weight, down, up)
    of_down, of_up = added.ways_to_split(along)
    assert {of_down, of_up} - {along} <= {Along(0), Along(1), Along(0, 2), Along(1, 2)}
    gathered = added.along_width(along)
    for index in range(2):
        shard = Shard((Along(0), along, of_down, of_up), index, 2)
        factors = [
            whole if number == gathered else shard.of(number, whole, first_dim=1)
            for number, whole in ((2, down), (3, up))
        ]
        part = added.added_to(shard.of(1, weight, first_dim=1), *factors)
        assert torch.equal(part, shard.of(1, wanted, first_dim=1))
        assert shard.of(gathered, (down, up)[gathered - 2], first_dim=1).numel() == (
            (down, up)[gathered - 2].numel() // 2
        )
