# SPDX-License-Identifier: Apache-2.0
"""``torch.compile``: what lies between replaced layers is compiled, and a run learns the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_moe_ext.hosts.attachment.modules import plain
from tests.hosts.jobs import Job, document_of, loss_of, micro_batch, model_of
from tests.hosts.varied import VARIED
from tests.marks import slow
from tests.ranks import pool_of, refusal

ATTENTION = "scaled_dot_product"


@dataclass(frozen=True)
class Compiled:
    """What a rank shows of a run."""

    losses: list[float]
    first_graphs: list[list[str]]
    later_graphs: int
    names: list[str]
    own_names: list[str]


def blocks_of(model: Any) -> list[nn.Module]:
    return list(model.blocks)


def inductor(graphs: list[list[str]]) -> Any:
    return "inductor"


def counting(graphs: list[list[str]]) -> Any:
    """A backend that runs graphs as they are, forward and backward, and writes them down."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def forward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if "call" in node.op])
        return make_boxed_func(graph.forward)

    def backward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=forward, bw_compiler=backward)


def train(
    rank: int,
    world_size: int,
    job: Job,
    way: str,
    backend_of: Callable[[list[list[str]]], Any] = counting,
) -> Compiled:
    """Run a job."""
    import deepspeed

    from ds_moe_ext import full_state_dict

    torch.compiler.reset()
    graphs: list[list[str]] = []
    backend: Any = backend_of(graphs)
    model: Any = model_of(job)
    if way == "blocks":
        for block in blocks_of(model):
            block.compile(backend=backend)
    if way == "wrapped":
        model.blocks = nn.ModuleList(torch.compile(each, backend=backend) for each in model.blocks)
    if way == "in place":
        model.compile(backend=backend)
    if way == "model":
        model = torch.compile(model, backend=backend)
    document = document_of(job, world_size)
    parameters = model.parameters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=document)
    if way == "engine":
        engine.compile(backend=backend)
    if job.resume:
        engine.load_checkpoint(job.folder)
    losses, in_first_step = [], 0
    for step in range(engine.global_steps, job.steps):
        for number in range(rank, job.micro_batches, world_size):
            loss = loss_of(engine, micro_batch(step, number))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        in_first_step = in_first_step or len(graphs)
        if job.save_at == step + 1:
            engine.save_checkpoint(job.folder)
    own_names = [name for name, _ in engine.module.named_parameters()]
    later = len(graphs) - in_first_step
    return Compiled(
        losses, graphs[:in_first_step], later, list(full_state_dict(engine.module)), own_names
    )


ZEBRA = Job("toy", 1, steps=3, strategy="zebra", keys=(("attention_size", 1), ("expert_size", 1)))
JOBS = {
    "ep": Job("toy", 1, steps=3),
    "experts that move": Job("toy", 1, steps=3, strategy=VARIED, keys=(("shard_every", 1),)),
    "prophet, deepspeed.moe, a gate of ours": Job(
        "gpt_moe", 1, steps=3, strategy="prophet", gate=(("type", "sigmoid_top_k"),)
    ),
    "zebra": ZEBRA,
}
WAYS = {
    "ep": ("model", "engine", "blocks"),
    "experts that move": ("model", "wrapped"),
    "prophet, deepspeed.moe, a gate of ours": ("engine",),
    "zebra": ("model", "engine", "blocks"),
}


QUICK = (("zebra", "blocks"),)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way) if (name, way) in QUICK else slow(name, way)
        for name in JOBS
        for way in WAYS[name]
    ],
)
def test_dense_parts_are_compiled(name: str, way: str) -> None:
    """Losses are those of the run that is not compiled. Attention is in graphs, on ranks that have
    any; nothing is compiled anew when experts move."""
    job = JOBS[name]
    alone = pool_of(2).run(train, job, "")
    ranks = pool_of(2).run(train, job, way)
    for ours, theirs in zip(ranks, alone):
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
        has_dense = any("experts" not in own for own in ours.own_names)
        assert has_dense == any(ATTENTION in target for g in ours.first_graphs for target in g)
        assert ours.later_graphs == 0
        assert [plain(each) for each in ours.names] == theirs.names


def test_names_are_those_of_the_stock_engine(tmp_path: Path) -> None:
    """In what is exported; a checkpoint may be loaded by a run that is not compiled, and back."""
    job = Job("toy", 1, steps=2, save_at=1, folder=str(tmp_path))
    stock = pool_of(2).run(train, replace(job, block=False, steps=0, save_at=None), "model")[0]
    saved = pool_of(2).run(train, job, "model")[0]
    assert sorted(saved.names) == sorted(stock.own_names)
    assert all(name.startswith("_orig_mod.") for name in saved.names)
    (layout,) = tmp_path.glob("*/ds_moe_ext.json")
    assert next(iter(json.loads(layout.read_text())["num_experts"])) == "blocks.0.experts"
    resumed = replace(job, save_at=None, resume=True)
    for way in ("", "model"):
        goes_on = pool_of(2).run(train, resumed, way)[0]
        assert goes_on.losses == pytest.approx(saved.losses[2:], rel=1e-6)


def test_a_model_compiled_in_place_is_refused_under_zebra() -> None:
    for stated in pool_of(2).run(refusal, train, ZEBRA, "in place"):
        assert re.search(r"compiled in place.*; call engine.compile\(\)", stated)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_inductor(name: str) -> None:
    """What users compile with."""
    job = JOBS[name]
    alone = pool_of(2).run(train, job, "")
    ranks = pool_of(2).run(train, job, "engine", inductor)
    for ours, theirs in zip(ranks, alone):
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
