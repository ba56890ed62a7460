# SPDX-License-Identifier: Apache-2.0
"""Every strategy under Megatron-core learns what Megatron's own alltoall dispatcher does.

Both run with the same layout, from the same weights, in float64 (see ``megatron_jobs``), unless a
test says otherwise. Some experts are busy, so that strategies copy them, and one gets no rows.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from ds_moe_ext.core.hardware import Device, Flops, Hardware, Link
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.moe.replicas import Prefetch
from ds_moe_ext.planning.strategy import Job, followers
from tests.hosts.copied_runs import SLOW, divides_anew
from tests.hosts.megatron_jobs import Training
from tests.hosts.megatron_skewed import (
    NEVER,
    Seen,
    assert_equal,
    num_replicas,
    stock,
    train_skewed,
)
from tests.hosts.megatron_toy import MegatronRun
from tests.hosts.varied import VARIED
from tests.marks import slow
from tests.ranks import pool_of

SKEW = (2.0, 1.0, 0.0, NEVER)
RUN = MegatronRun(dtype="float64", num_microbatches=2, clip=0.1, bucket_size=4096)
FSSDP = {"overlap_degree": 2, "replicas_per_rank": 2, "reshard_interval": 0}
FREED = {"rematerialize": True, "calibrate": True}
SHADOW = {"planner": "shadow", "split": "half"}  # replicas the busy, whatever that costs
VARIETY = {"layers": 1.0, "replicas": 0.5, "carried": 0.8, "revised": 0.3, "rematerialized": 0.5}

STRATEGIES: dict[str, dict[str, Any]] = {
    "ep": {},
    "esp": {},
    "esp 2": {"esp": {"degree": 2}},
    "esp 2, 4": {"esp": {"degree": {"forward": 2, "backward": 4}}},
    "fssdp": {"fssdp": FSSDP},
    "fssdp, by our program": {"fssdp": FSSDP, "megatron": {"layer": "program"}},
    "fssdp, freed": {"fssdp": {**FSSDP, **FREED}},
    "fssdp, by time": {"fssdp": {**FSSDP, **FREED, "share": "priced", "window": 1}},
    "esp over fssdp": {"balance": "fssdp", "esp": {"degree": 2}, "fssdp": FSSDP},
    "esp 2, 3 over fssdp, by time": {
        **{"balance": "fssdp", "esp": {"degree": {"forward": 2, "backward": 3}}},
        "fssdp": {**FSSDP, "share": "priced", "window": 1},
    },
    "prophet": {"prophet": SHADOW},
    "prophet, kept": {"prophet": {**SHADOW, "rematerialize": False}},
    "prophet, not hidden": {"prophet": {**SHADOW, "scheduler": False, "frequency": 1}},
    "prophet, by time": {"prophet": {**SHADOW, "share": "priced"}},
    "prophet, by parts": {"prophet": {**SHADOW, "share": "planned"}},
    "varied": {"strategy": VARIED, "options": VARIETY},
}
COPYING = [name for name in STRATEGIES if not name.startswith("e") or "over" in name]


class Layout(NamedTuple):
    """Ranks, and what they run."""

    world_size: int
    run: MegatronRun


PIPED = replace(RUN, pp=2, ep=2, num_layers=4)
FULL = {"optimizer": "distributed", "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = {
    "1 rank": Layout(1, RUN),
    "DP2": Layout(2, RUN),
    "EP2": Layout(2, replace(RUN, ep=2)),
    "EP4": Layout(4, replace(RUN, ep=4)),
    "TP2 EP2": Layout(2, replace(RUN, tp=2, etp=1, ep=2)),
    "TP2 EP2 DP2": Layout(4, replace(RUN, tp=2, etp=1, ep=2)),
    "ETP2 EP2": Layout(4, replace(RUN, etp=2, ep=2)),
    "TP2 ETP2 EP2": Layout(4, replace(RUN, tp=2, etp=2, ep=2)),
    "PP2 EP2": Layout(4, PIPED),
    "PP2 EP2, 5 micro-batches": Layout(4, replace(PIPED, num_microbatches=5)),
    "PP2 VPP2 EP2": Layout(4, replace(PIPED, vpp=2, num_layers=8)),
    "DP2 EP2": Layout(4, replace(RUN, ep=2)),
    "PP2 TP2 EP2 DP2": Layout(8, replace(PIPED, tp=2, etp=1)),
    "PP2 ETP2 EP2": Layout(8, replace(PIPED, etp=2)),
}
EP2 = LAYOUTS["EP2"]
OPTIONS: dict[str, dict[str, Any]] = {
    "distributed": {"optimizer": "distributed"},
    "overlapped": {"overlap_grad_reduce": True},
    "distributed, overlapped": FULL,
    "recompute moe": {"recompute": "moe"},
    "recompute full": {"recompute": "full"},
    "recompute full, distributed, overlapped": {"recompute": "full", **FULL},
    "1 micro-batch": {"num_microbatches": 1},
    "float32": {"dtype": "float32"},
    "grouped": {"experts": "te_grouped", "swiglu": True},
}
for _name, _fields in OPTIONS.items():
    LAYOUTS[f"EP2, {_name}"] = Layout(2, replace(EP2.run, **_fields))

QUICK = (
    ("ep", "EP2, distributed, overlapped"),
    ("esp over fssdp", "EP2"),
    ("fssdp", "EP2, recompute full, distributed, overlapped"),
    ("fssdp, by our program", "EP2, recompute full, distributed, overlapped"),
    ("prophet, by time", "EP2"),
    ("varied", "PP2 VPP2 EP2"),
)


@pytest.fixture(scope="module")
def hardware(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with links on which replicas cost nothing; beside it one on which rows are dear."""
    free = Link(bytes_per_s=1e12)
    described = Hardware(
        name="of a test",
        source="made up",
        num_nodes=1,
        ranks_per_node=8,
        device=Device(name="CPU"),
        intra=free,
    )
    path: Path = tmp_path_factory.mktemp("hardware") / "hardware.json"
    path.write_text(described.to_json())
    # Slices of dense gradients are planned by how fast the device multiplies, too.
    device = Device(name="CPU", flops_per_s=Flops(fp32=1e12))
    path.with_name("slow.json").write_text(replace(SLOW, device=device).to_json())
    return str(path)


def block(name: str, hardware: str) -> dict[str, Any]:
    """The settings of a strategy."""
    common = {"enabled": True, "strategy": re.split("[ ,]", name, maxsplit=1)[0], "debug": True}
    planned = {"hardware": hardware} if name.startswith("prophet") else {}
    if "by time" in name:
        planned = {"hardware": str(Path(hardware).with_name("slow.json"))}
    return {**common, "report": {"enabled": False}, **planned, **STRATEGIES[name]}


def check(name: str, layout: Layout, hardware: str) -> list[Seen]:
    settings = block(name, hardware)
    ours = pool_of(layout.world_size).run(train_skewed, layout.run, settings, SKEW)
    theirs = stock(*layout, SKEW)
    assert_equal(ours, theirs, 1e-12 if layout.run.dtype == "float64" else 1e-5)
    if layout.run.ep > 1 and name in COPYING:
        assert num_replicas(ours) > 2
        if "fssdp, by time" in name:  # the shadows of prophet are everywhere: rows stay
            assert any(divides_anew(one.steps) for one in ours)
    return ours


@pytest.mark.parametrize(("name", "layout"), QUICK)
def test_equals_stock(name: str, layout: str, hardware: str) -> None:
    world_size, run = LAYOUTS[layout]
    steps = 8 if name.startswith("prophet") else 3  # it copies nothing before costs are known
    check(name, Layout(world_size, replace(run, steps=steps)), hardware)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_equals_stock_over_20_steps(name: str, layout: str, hardware: str) -> None:
    world_size, run = LAYOUTS[layout]
    check(name, Layout(world_size, replace(run, steps=20)), hardware)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["varied", "prophet", "fssdp"])
def test_late_replicas_are_waited_for(name: str, hardware: str) -> None:
    """What a gather will write is not a number until it has arrived."""
    layout = Layout(2, replace(EP2.run, num_layers=3, steps=4 if name == "varied" else 8))
    settings = block(name, hardware)
    ours = pool_of(2).run(train_skewed, layout.run, settings, SKEW, late_s=0.01)
    assert_equal(ours, stock(*layout, SKEW))
    assert num_replicas(ours) > 2


# What follows what.


def test_layers_follow_each_other_within_a_stack() -> None:
    assert followers("abcd", (0, 0, 1, 1)) == ("b", None, "d", None)
    assert followers("", ()) == ()
    job = Job.at_start([Placement.block(4, 2)] * 4, np.array([0, 0]), stacks=(0, 0, 1, 1))
    assert list(map(job.follows, range(5))) == [False, True, False, True, False]
    assert list(map(replace(job, stacks=()).follows, range(5))) == [False, True, True, True, False]


class Neighbours(NamedTuple):
    """Of one MoE layer."""

    chunk: int
    is_first: bool
    is_last: bool
    follows: bool
    carried: bool


def neighbours(training: Training) -> list[Neighbours]:
    """Of all MoE layers of this rank."""
    from ds_moe_ext.hosts.megatron.layers import RunsHosted

    found = []
    for number, chunk in enumerate(training.chunks):
        for module in chunk.modules():
            if isinstance(module, RunsHosted):
                routed = module.hosted.routed
                replicas, layer_context = routed.replicas, routed.layer_context
                assert replicas is not None
                carried = layer_context.plan.carried is not None
                ends = replicas.before is None, replicas.after is None
                found.append(
                    Neighbours(number, *ends, layer_context.following is not None, carried)
                )
    return found


@pytest.mark.slow  # the rule is tested above, and chunks learn what stock does
def test_nothing_is_carried_from_one_chunk_of_a_stage_to_the_next(hardware: str) -> None:
    """Passes of other micro-batches, and the other stage's, come between two chunks."""
    layout = LAYOUTS["PP2 VPP2 EP2"]
    run = replace(layout.run, steps=6)
    settings = block("prophet", hardware)
    for seen in pool_of(4).run(train_skewed, run, settings, SKEW, look=neighbours):
        layers: list[Neighbours] = seen.trained.seen
        assert [layer.chunk for layer in layers] == [0, 0, 1, 1]
        assert [layer.is_first for layer in layers] == [True, False] * 2
        assert [layer.is_last for layer in layers] == [False, True] * 2
        assert [layer.follows for layer in layers] == [True, False] * 2
        assert not layers[0].carried and not layers[2].carried
        assert num_replicas([seen]) > 2


def recalled(rank: int, world_size: int, run: MegatronRun, settings: dict[str, Any]) -> list[bool]:
    """Of each layer whose replicas are freed after forward: whether they are gathered again in the
    order in which their backward passes come."""
    gathered: dict[int, list[Prefetch]] = defaultdict(list)
    needed: dict[int, list[Prefetch]] = defaultdict(list)
    recall, have_again = Prefetch.recall, Prefetch.have_again

    def then_recall(prefetch: Prefetch) -> None:
        if prefetch.memory.is_released:
            gathered[prefetch.replicas.coordinates.layer].append(prefetch)
        recall(prefetch)

    def then_have(prefetch: Prefetch) -> None:
        if prefetch.memory.is_released or prefetch in gathered[prefetch.replicas.coordinates.layer]:
            needed[prefetch.replicas.coordinates.layer].append(prefetch)
        have_again(prefetch)

    with (
        mock.patch.object(Prefetch, "recall", then_recall),
        mock.patch.object(Prefetch, "have_again", then_have),
    ):
        train_skewed(rank, world_size, run, settings, SKEW)
    return [prefetches == needed[layer] for layer, prefetches in gathered.items() if prefetches]


def test_replicas_of_the_pass_that_goes_back_are_gathered_again() -> None:
    """A pipeline's stage has several passes under way, and the first of them goes back first."""
    run = replace(PIPED, num_layers=6, num_microbatches=4, steps=1)
    options = {"layers": 1.0, "replicas": 0.5, "rematerialized": 1.0}
    settings = {"enabled": True, "strategy": VARIED, "options": options}
    settings["megatron"] = {"layer": "program"}  # which frees them
    for of_layers in pool_of(4).run(recalled, run, {**settings, "report": {"enabled": False}}):
        assert len(of_layers) == 2 and all(of_layers)  # the last one's are not freed


# Layers of other kinds.


@pytest.mark.parametrize("name", ["varied", slow("fssdp"), slow("esp"), slow("prophet")])
def test_multi_token_prediction(name: str, hardware: str) -> None:
    steps = 2 if name == "varied" else 8
    run = replace(EP2.run, steps=steps, config=(("mtp_num_layers", 1),))
    ours = pool_of(2).run(train_skewed, run, block(name, hardware), SKEW)
    assert_equal(ours, pool_of(2).run(train_skewed, run, None, SKEW))
    assert any(name.startswith("mtp.") and "experts" in name for name in ours[0].trained.weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["varied", "fssdp", "prophet"])
def test_a_stage_without_moe_layers(name: str, hardware: str) -> None:
    frequency = (("moe_layer_freq", [0, 0, 1, 1]),)
    steps = 2 if name == "varied" else 8
    check(name, Layout(4, replace(PIPED, steps=steps, config=frequency)), hardware)


# Replicas of an expert on several ranks.


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tp": 2, "etp": 1}, "ep"),
        slow({"tp": 2, "etp": 1, **FULL}, "fssdp"),
        slow({"tp": 2, "etp": 1, **FULL}, "esp"),
    ],
)
def test_experts_stay_equal_where_tensor_parallelism_splits_tokens_only(
    fields: dict[str, Any], name: str, hardware: str
) -> None:
    """Up to 0.18 Megatron leaves out the sum over those ranks, and experts drift apart."""
    run = replace(RUN, **fields)
    first, second = pool_of(2).run(train_skewed, run, block(name, hardware), SKEW)
    own, its = (
        {path: w for path, w in seen.trained.weights.items() if ".experts." in path}
        for seen in (first, second)
    )
    assert own.keys() == its.keys()
    assert all(torch.equal(own[path], its[path]) for path in own)
    (alone,) = stock(*LAYOUTS["1 rank"], SKEW)
    assert first.trained.losses == pytest.approx(alone.trained.losses, rel=1e-12)
    assert first.trained.norms == pytest.approx(alone.trained.norms, rel=1e-11)
    for path, weight in own.items():
        torch.testing.assert_close(weight, alone.trained.weights[path], rtol=0, atol=1e-12)


def test_stock_experts_drift_apart_there() -> None:
    """So that nobody takes the test above for one of something that cannot fail."""
    first, second = stock(2, replace(RUN, tp=2, etp=1), SKEW)
    name = next(name for name in first.trained.weights if ".experts." in name)
    assert not torch.equal(first.trained.weights[name], second.trained.weights[name])
