# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing computes layers again in backward: same gradients, rows counted once."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_moe_ext.testing import relative_error
from tests.hosts import families, jobs
from tests.hosts.families import LENGTH, ROWS, tokens_of
from tests.hosts.replaced import replace_experts
from tests.ranks import pool_of

TOP_K = 2


def build(family: str, *, use_reentrant: bool | None) -> nn.Module:
    """A model whose blocks are computed again in backward; None for one that keeps all."""
    if family == "gpt_moe":
        model = jobs.model_of(jobs.Job("gpt_moe"))
        if use_reentrant is not None:
            for block in model.blocks:
                block.forward = functools.partial(
                    checkpoint, block.forward, use_reentrant=use_reentrant
                )
        return model
    model = families.build(family)
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model.train()


def grads_of(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    model(input_ids=tokens, labels=tokens).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def worst_error(rank: int, world_size: int, family: str, use_reentrant: bool) -> float:
    """Against the same replaced model without checkpointing."""
    plain, ours = (build(family, use_reentrant=value) for value in (None, use_reentrant))
    for model in (plain, ours):
        replace_experts(model)
        if family != "gpt_moe":
            # Hugging Face gathers router logits from the first pass, which reentrant checkpointing
            # runs without a graph: there its auxiliary loss has no gradient, with us or without.
            model.config.output_router_logits = not use_reentrant
    return worst(grads_of(ours, tokens_of(rank)), grads_of(plain, tokens_of(rank)))


def worst(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(relative_error(grad, expected[name]) for name, grad in got.items())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_moe"])
def test_gradients_are_the_same(family: str, use_reentrant: bool, world_size: int) -> None:
    for error in pool_of(world_size).run(worst_error, family, use_reentrant):
        assert error <= 1e-6


def worst_dense_error(rank: int, world_size: int, family: str, use_reentrant: bool) -> float:
    """Of what is not experts, against the stock model with the same checkpointing."""
    stock, ours = (build(family, use_reentrant=use_reentrant) for _ in range(2))
    replace_experts(ours)
    got, expected = (
        {k: g for k, g in grads_of(model, tokens_of(rank)).items() if ".experts." not in k}
        for model in (ours, stock)
    )
    return worst(got, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_equals_stock_with_the_same_checkpointing(family: str, use_reentrant: bool) -> None:
    for error in pool_of(2).run(worst_dense_error, family, use_reentrant):
        assert error <= 1e-5


def rows_counted(
    rank: int, world_size: int, family: str, use_reentrant: bool | None
) -> list[list[int]]:
    """Rows of each layer by experts: after one pass, after two, and in evaluation."""
    model = build(family, use_reentrant=use_reentrant)
    layers = replace_experts(model)
    tokens = tokens_of(rank)

    def taken() -> list[int]:
        return [int(layer.routed.rows.take().routed_CE.sum()) for layer in layers]

    grads_of(model, tokens)
    once = taken()
    grads_of(model, tokens)
    grads_of(model, tokens)
    twice = taken()
    model.eval()
    with torch.no_grad():
        model(input_ids=tokens, labels=tokens)
    evaluated = taken()
    model.train()
    model(input_ids=tokens, labels=tokens).loss.backward()
    return [once, twice, evaluated, taken()]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("use_reentrant", [None, True, False])
@pytest.mark.parametrize("family", ["mixtral", "gpt_moe"])
def test_rows_are_counted_once(family: str, use_reentrant: bool | None, world_size: int) -> None:
    """All ranks' rows of a training pass, each once; none of an evaluation."""
    rows = ROWS * LENGTH * TOP_K * world_size
    for counted in pool_of(world_size).run(rows_counted, family, use_reentrant):
        assert counted == [[rows] * 2, [2 * rows] * 2, [0] * 2, [rows] * 2]
