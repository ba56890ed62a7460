# SPDX-License-Identifier: Apache-2.0
"""Transforms at all six places, trained by a host's engine: two ranks learn what one learns without
us, whose experts are the stock ones with the same functions around them.

Shape letters: T tokens, N rows, D model width.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ds_moe_ext.moe.transforms import Transform
from ds_moe_ext.testing import relative_error
from tests.hosts import jobs, megatron_jobs
from tests.hosts.jobs import Job
from tests.hosts.megatron_jobs import Trained, merged
from tests.hosts.megatron_toy import MegatronRun
from tests.marks import slow
from tests.ranks import pool_of, preload
from tests.test_transforms import HERE, Curved, Doubled, Halved, Mixed, of_place

preload("deepspeed", "transformers")

D, RATE, STEPS = 32, 0.5, 2
TRANSFORMS: tuple[Transform, ...] = (
    Curved(at="before_moe_start"),
    Mixed(at="before_dispatch", width=16, by_hand=True),
    Curved(at="before_dispatch"),
    Mixed(at="after_dispatch", width=D),
    Halved(at="before_combine"),
    Doubled(at="after_combine"),
    Curved(at="before_moe_end"),
)
HOOKS = tuple(
    (("type", f"{HERE}:{type(each).__name__}"), *dataclasses.asdict(each).items())
    for each in TRANSFORMS
)
JOB = Job(
    stage=0,
    dtype="float64",
    micro_batches=2,
    optimizer="object",
    sgd=True,
    learning_rate=RATE,
    hooks=HOOKS,
)
STOCK = dataclasses.replace(JOB, family="transformed", block=False)


def transformed(experts: Any, hidden_TD: Tensor, ids_TK: Tensor, score_TK: Tensor) -> Tensor:
    """Mixtral's experts one by one, with what the six places do."""
    x_TD = of_place(TRANSFORMS, "before_moe_start")(hidden_TD)
    y_TD = torch.zeros_like(x_TD)
    for expert in range(experts.num_experts):
        token_N, choice_N = torch.where(ids_TK == expert)
        rows_ND = of_place(TRANSFORMS, "before_dispatch", "after_dispatch")(x_TD[token_N])
        gate_NF, up_NF = (rows_ND @ experts.gate_up_proj[expert].T).chunk(2, dim=1)
        made_ND = (nn.functional.silu(gate_NF) * up_NF) @ experts.down_proj[expert].T
        made_ND = of_place(TRANSFORMS, "before_combine", "after_combine")(made_ND)
        y_TD = y_TD.index_add(0, token_N, made_ND * score_TK[token_N, choice_N, None])
    return of_place(TRANSFORMS, "before_moe_end")(y_TD)


def built(job: Job) -> nn.Module:
    """Stock Mixtral, around whose experts the functions are."""
    model = jobs._mixtral(job)
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.forward = partial(transformed, module)
    return model


def learned(rank: int, world_size: int, job: Job) -> list[dict[str, Tensor]]:
    """All weights before the first step, and behind each."""
    from ds_moe_ext import full_state_dict

    def state() -> dict[str, Tensor]:
        whole = full_state_dict(engine.module)
        return {name: weight.detach().clone() for name, weight in whole.items()}

    with mock.patch.dict(jobs._MODELS, {"transformed": built}), jobs.float64_everywhere():
        engine = jobs.engine_of(job, world_size)
        engine.enable_backward_allreduce = False
        states = [state()]
        for step in range(STEPS):
            for number in range(rank, job.micro_batches, world_size):
                engine.backward(jobs.loss_of(engine, jobs.micro_batch(step, number)))
                if engine.is_gradient_accumulation_boundary():
                    jobs.reduce_in_float64(engine)
                engine.step()
            states.append(state())
    return states


@pytest.mark.parametrize(
    ("strategy", "keys", "more"),
    [
        ("esp", {"degree": 2}, {}),
        slow("ep", {}, {}),
        slow("esp", {"degree": 2}, {"etp_size": 2}),
        slow("fssdp", {"overlap_degree": 1, "replicas_per_rank": 1}, {}),
        slow("prophet", {}, {}),
    ],
)
def test_an_engine_of_deepspeed(strategy: str, keys: dict[str, Any], more: dict[str, Any]) -> None:
    """First gradients, and weights after two steps of SGD."""
    job = dataclasses.replace(JOB, strategy=strategy, keys=tuple(keys.items()), **more)
    ours, _ = pool_of(2).run(learned, job)
    (stock,) = pool_of(1).run(learned, STOCK)
    assert all(got.keys() == expected.keys() for got, expected in zip(ours, stock, strict=True))
    assert all(torch.equal(ours[0][name], weight) for name, weight in stock[0].items())
    for name, start in stock[0].items():
        gradients = [(start - states[1][name]) / RATE for states in (ours, stock)]
        assert gradients[1].any(), name
        assert relative_error(*gradients) <= 1e-10, name
        assert relative_error(ours[STEPS][name], stock[STEPS][name]) <= 1e-10, name


MEGATRON = MegatronRun(dtype="float64", steps=STEPS)


def megatron_stock(rank: int, world_size: int, run: MegatronRun) -> Trained:
    """Megatron's own, with the functions around its experts and behind its layers."""
    import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer

    experts, layer = SequentialMLP.forward, MoELayer.forward

    def of_rows(self: Any, rows_ND: Tensor, rows_of: Tensor, score_N: Tensor) -> Any:
        places = "before_moe_start", "before_dispatch", "after_dispatch"
        given_ND = of_place(TRANSFORMS, *places)(rows_ND)
        made_ND, bias = experts(self, given_ND, rows_of, torch.ones_like(score_N))
        made_ND = of_place(TRANSFORMS, "before_combine", "after_combine")(made_ND)
        return made_ND * score_N[:, None], bias

    def of_layer(self: Any, *given: Any, **named: Any) -> Any:
        made, bias = layer(self, *given, **named)
        return of_place(TRANSFORMS, "before_moe_end")(made), bias

    with (
        mock.patch.object(SequentialMLP, "forward", of_rows),
        mock.patch.object(MoELayer, "forward", of_layer),
    ):
        return megatron_jobs.train(rank, world_size, run, keep=True)


@pytest.mark.parametrize(
    ("strategy", "keys"), [slow("ep", {}), slow("esp", {"degree": {"forward": 2, "backward": 4}})]
)
def test_megatron(strategy: str, keys: dict[str, Any]) -> None:
    """First gradients, and losses and weights after two steps of its own optimizer."""
    hooks = [dict(hook) for hook in HOOKS]
    settings = {"enabled": True, "strategy": strategy, "hooks": hooks, strategy: keys}
    settings |= {"report": {"enabled": False}}
    run = dataclasses.replace(MEGATRON, ep=2)
    train = partial(megatron_jobs.train, keep=True)
    ours: list[Trained] = pool_of(2).run(train, run, settings)
    (stock,) = pool_of(1).run(megatron_stock, dataclasses.replace(MEGATRON, num_microbatches=2))
    assert ours[0].losses == pytest.approx(stock.losses, rel=1e-11)
    gradients, weights = (
        merged([getattr(one, what) for one in ours]) for what in ("gradients", "weights")
    )
    assert gradients.keys() == stock.gradients.keys() and weights.keys() == stock.weights.keys()
    for name, expected in stock.gradients.items():
        assert expected.any(), name
        assert relative_error(gradients[name], expected) <= 1e-10, name
        assert relative_error(weights[name], stock.weights[name]) <= 1e-8, name
