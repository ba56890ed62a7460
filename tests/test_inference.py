# SPDX-License-Identifier: Apache-2.0
"""Passes in inference mode, before and between those that are trained: what they leave behind is
of use to these. One process stands for one of four ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fake_world import Batch, Ours, Sizes, Way, as_on_cuda, esp, fake_world, on_streams

from ds_moe_ext.moe.replicas import Replicas
from ds_moe_ext.schedule.executor import InlineStreams, ScheduleStreams, ThreadStreams
from ds_moe_ext.schedule.task import PARAM

FSSDP = {"overlap_degree": 8, "replicas_per_rank": 2, "reshard_interval": 0}
BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "ep": {"strategy": "ep"},
    "static capacity": {"strategy": "ep", "ep": {"static_capacity": 16}},
    "sent once": {"strategy": "ep", "ep": {"send_once": True}},
    "esp": esp(2),
    "fssdp": {"strategy": "fssdp", "fssdp": FSSDP},
    "fssdp, freed": {"strategy": "fssdp", "fssdp": {**FSSDP, "rematerialize": True}},
    "prophet": {"strategy": "prophet", "prophet": {"planner": "shadow"}},
    "esp over fssdp": esp(2, balance="fssdp", fssdp=FSSDP),
}
SIZES = Sizes(layers=2, experts=8, tokens=32, top_k=2)


def replicas_of(model: Ours) -> list[Replicas]:
    found = [layer.routed.replicas for layer in model.replaced.layers]
    return [replicas for replicas in found if replicas is not None]


@pytest.mark.parametrize("is_eval", [True, False], ids=["eval", "train"])
@pytest.mark.parametrize("is_mixed", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("streams", [InlineStreams, ThreadStreams])
@pytest.mark.parametrize("name", BLOCKS)
def test_layers_are_trained_after_an_evaluation(
    name: str, streams: type[ScheduleStreams], is_mixed: bool, is_eval: bool
) -> None:
    """Autograd differentiates the experts where types are mixed."""
    mixed = torch.autocast("cpu", dtype=torch.bfloat16) if is_mixed else nullcontext()
    with fake_world(4, rank=1), on_streams(streams()), as_on_cuda():
        model = Ours(Way("", BLOCKS[name], has_threads=True), SIZES)
        for number in range(3):
            batch = Batch.of(SIZES, number)
            with mixed:
                model.model.train(not is_eval)
                with torch.inference_mode():
                    assert model.forward(batch).is_inference()
                # Nothing is left for the next step to wait for, however many evaluations there are.
                assert not any(replicas._outstanding for replicas in replicas_of(model))
                model.model.train().zero_grad(set_to_none=True)
                model.forward(batch).sum().backward()
            assert all(weight.grad is not None for weight in model.model.parameters())
            model.after_step(number)


def test_other_threads_are_in_inference_mode_too() -> None:
    """Replicas are unpacked there into memory that the caller has made."""
    streams = ThreadStreams()
    with torch.inference_mode():
        room = torch.zeros(3)
        streams.join([streams.submit(PARAM, lambda: room.add_(1), ())])
    assert room.tolist() == [1, 1, 1]
    seen: list[bool] = []
    streams.join(
        [streams.submit(PARAM, lambda: seen.append(torch.is_inference_mode_enabled()), ())]
    )
    assert seen == [False]


@pytest.mark.parametrize("streams", [InlineStreams, ThreadStreams])
@pytest.mark.parametrize("name", ["ep", "fssdp", "prophet"])
def test_what_an_evaluation_does_is_not_timed(name: str, streams: type[ScheduleStreams]) -> None:
    """Its rows are not counted, and costs are seconds a row. It begins where the model's blocks do,
    before its layers know, and what was launched in a stream may end late."""

    def seen(*, evaluates: bool) -> list[Counter[str]]:
        model = Ours(Way("", BLOCKS[name], has_threads=True), SIZES)
        layers = [layer.routed for layer in model.replaced.layers]
        found = []
        for number in range(3):
            for layer in layers:
                layer.tasks.is_wanted = layer.meter.is_wanted = True
            batch = Batch.of(SIZES, number)
            output = model.forward(batch)
            if evaluates:
                model.model.eval()
                with torch.no_grad():
                    model.forward(batch)
                model.model.train()
            output.sum().backward()
            if evaluates:
                model.model.eval()
                with torch.inference_mode():
                    model.forward(batch)
                model.model.train()
            model.model.zero_grad(set_to_none=True)
            tasks = [timed for layer in layers for timed in layer.tasks.take()]
            assert len(tasks) == sum(len(layer.meter.take()) for layer in layers) > 0
            found.append(Counter(str(timed.task) for timed in tasks))
            for layer in layers:
                layer.after_step()
        return found

    with fake_world(4, rank=1), on_streams(streams()), as_on_cuda():
        assert seen(evaluates=True) == seen(evaluates=False)
