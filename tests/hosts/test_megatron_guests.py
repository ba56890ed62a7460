# SPDX-License-Identifier: Apache-2.0
"""Megatron's own layers with guests learn what they learn without: by Transformer Engine's experts
(on the stand-in), with every dispatcher, and with flags that only Megatron's layer has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner, NearestReplica, PlannedParts
from ds_moe_ext.hosts.megatron.refusals import way_of
from ds_moe_ext.hosts.steps.host import Passes, Schedules
from ds_moe_ext.planning.strategy import Plan
from ds_moe_ext.strategies.settings import read_settings
from tests.hosts.megatron_jobs import Training, _forward
from tests.hosts.megatron_skewed import NEVER, assert_equal, num_replicas, train_skewed
from tests.hosts.megatron_toy import MegatronRun
from tests.hosts.test_te_stand_in import by_engine
from tests.hosts.varied import VARIED
from tests.marks import slow
from tests.ranks import pool_of

SKEW = (2.0, 1.0, 0.0, NEVER)
RUN = MegatronRun(dtype="float64", num_microbatches=2, clip=0.1, ep=2, swiglu=True)
TE = replace(RUN, experts="te_grouped")
OVERLAPPED = {"optimizer": "distributed", "overlap_grad_reduce": True, "overlap_param_gather": True}
FSSDP = {"overlap_degree": 2, "replicas_per_rank": 2, "reshard_interval": 0}
BLOCK = {"enabled": True, "report": {"enabled": False}, "megatron": {"layer": "host"}}
BLOCKS: dict[str, dict[str, Any]] = {
    "ep": {**BLOCK, "strategy": "ep"},
    "fssdp": {**BLOCK, "strategy": "fssdp", "fssdp": FSSDP, "debug": True},
    "varied": {**BLOCK, "strategy": VARIED, "options": {"layers": 1.0, "replicas": 0.5}},
}


def with_config(run: MegatronRun, **config: Any) -> MegatronRun:
    return replace(run, config=tuple(config.items()))


MOE_ACT = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}
OFFLOADED = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["expert_fc1", "moe_act"],
}
BY_ENGINE: dict[str, MegatronRun] = {
    "grouped": TE,
    "grouped, distributed, overlapped": replace(TE, **OVERLAPPED),
    "sequential": RUN,
    "moe_act": with_config(TE, **MOE_ACT),
    "DeepEP": replace(
        with_config(TE, **FLEX, moe_flex_dispatcher_backend="deepep"), dtype="float32"
    ),
    "HybridEP": replace(
        with_config(TE, **FLEX, moe_flex_dispatcher_backend="hybridep"), dtype="float32"
    ),
}
ROUNDED: dict[str, MegatronRun] = {
    "bf16, two micro-batches interleaved": replace(
        with_config(TE, overlap_moe_expert_parallel_comm=True),
        **{**OVERLAPPED, "overlap_param_gather": False},
        dtype="bfloat16",
        num_microbatches=3,
    ),
    "the same, weights' gradients put off": replace(
        with_config(TE, overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True),
        optimizer="distributed",
        ddp=(("delay_wgrad_compute", True),),
        dtype="bfloat16",
        num_microbatches=3,
    ),
    "fp8 mxfp8": with_config(TE, fp8="hybrid", fp8_recipe="mxfp8"),
    "fp8 tensorwise": with_config(TE, fp8="hybrid", fp8_recipe="tensorwise"),
    "fp8 tensorwise, sequential": with_config(RUN, fp8="hybrid", fp8_recipe="tensorwise"),
    "fp8 padded": with_config(
        TE, fp8="hybrid", fp8_recipe="tensorwise", moe_router_padding_for_quantization=True
    ),
}


QUICK = ("grouped, distributed, overlapped", "DeepEP")


@pytest.mark.slow  # test_megatron_memory.py has grouped experts, test_te_stand_in.py its modules
def test_some_by_transformer_engine(tmp_path: Path) -> None:
    check_by_engine("varied", QUICK, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["varied", "fssdp", "ep"])
def test_all_by_transformer_engine(name: str, tmp_path: Path) -> None:
    check_by_engine(name, (*BY_ENGINE, *ROUNDED), RUN.steps, tmp_path)


def check_by_engine(name: str, which: tuple[str, ...], steps: int, tmp_path: Path) -> None:
    known = {**BY_ENGINE, **ROUNDED}
    runs = {what: replace(known[what], steps=steps) for what in which}
    asked = [(run, s, SKEW) for run in runs.values() for s in (BLOCKS[name], None)]
    found = by_engine(tmp_path, 2, asked)
    for place, (what, run) in enumerate(runs.items()):
        ours, stock = found[2 * place : 2 * place + 2]
        if name != "ep":
            assert num_replicas(ours) > 1, what
        if what in ROUNDED and name != "ep":  # sums in 16 bits, scales of a slot's tokens
            for own, its in zip(ours, stock):
                assert own.trained.losses == pytest.approx(its.trained.losses, rel=2e-3), what
        else:
            assert_equal(ours, stock, 1e-12 if run.dtype == "float64" else 1e-5)


@pytest.mark.parametrize("name", ["varied", slow("fssdp")])
def test_tokens_that_are_gathered(name: str) -> None:
    run = replace(RUN, dispatcher="allgather")
    ours, stock = (pool_of(2).run(train_skewed, run, s, SKEW) for s in (BLOCKS[name], None))
    assert_equal(ours, stock)
    assert num_replicas(ours) > 1


GRAPHED = with_config(
    RUN,
    cuda_graph_impl="transformer_engine",  # Megatron-LM's loop would capture, and none runs here
    cuda_graph_scope=["moe_router", "moe_preprocess"],
)


def test_a_dispatcher_in_a_graph_is_left_alone() -> None:
    ours, stock = (pool_of(2).run(train_skewed, GRAPHED, s, SKEW) for s in (BLOCKS["ep"], None))
    assert_equal(ours, stock)
    with pytest.raises(
        AssertionError, match=r"--cuda-graph-scope moe_preprocess.*\n*.*use strategy"
    ):
        pool_of(2).run(train_skewed, GRAPHED, BLOCKS["fssdp"], SKEW)


def two_in_flight(training: Training) -> str:
    """What a pipeline schedule of one's own raises, which has two micro-batches in flight."""
    batches = training._batches(step=0)
    losses = [_forward(batches, training.chunks[0])[0].mean() for _ in range(2)]
    try:
        for loss in losses:
            loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_schedule_of_ones_own_is_an_error() -> None:
    found = pool_of(2).run(train_skewed, RUN, BLOCKS["varied"], SKEW, look=two_in_flight)
    assert any("get_forward_backward_func" in one.trained.seen for one in found)


# Who runs the layers.


@pytest.mark.parametrize(
    ("block", "flags", "by_host", "why"),
    [
        ({"strategy": "ep"}, {}, True, "'ep' only places experts"),
        ({"strategy": "fssdp"}, {}, True, "only places"),
        ({"strategy": "auto"}, {}, False, "schedules the tasks of a layer"),
        (
            {"strategy": "auto", "auto": {"candidates": ["ep", "prophet"]}},
            {},
            True,
            "'auto' only places",
        ),
        ({"strategy": "esp"}, {}, False, "'esp' schedules the tasks of a layer"),
        ({"strategy": VARIED}, {}, True, "only places"),
        ({"strategy": "ep", "ep": {"send_once": True}}, {}, False, "send_once is True"),
        ({"strategy": "ep", "ep": {"static_capacity": 8}}, {}, False, "how tokens are sent"),
        ({"strategy": "fssdp", "fssdp": {"calibrate": True}}, {}, False, "calibrate is True"),
        ({"strategy": "prophet"}, {"moe_pad_expert_input_to_capacity": True}, False, "pads all"),
        ({"strategy": "ep"}, {"moe_pad_expert_input_to_capacity": True}, True, "only places"),
        ({"strategy": "ep", "megatron": {"layer": "program"}}, {}, False, "layer is 'program'"),
    ],
)
def test_who_runs_the_layers(
    block: dict[str, Any], flags: dict[str, Any], by_host: bool, why: str
) -> None:
    chosen, strategy = read_settings({"ds_moe_ext": {"enabled": True, **block}})
    assert strategy is not None
    way = way_of(chosen, strategy, SimpleNamespace(**flags))
    assert way.by_host == by_host and why in way.why, way


def test_a_host_that_cannot_is_refused() -> None:
    block = {"enabled": True, "strategy": "esp", "megatron": {"layer": "host"}}
    chosen, strategy = read_settings({"ds_moe_ext": block})
    assert strategy is not None
    with pytest.raises(ValueError, match=r"layer is 'host', but strategy 'esp' .* leave"):
        way_of(chosen, strategy, SimpleNamespace())
    with pytest.raises(ValueError, match=r"megatron\.layer is 'us'.*host.*program"):
        read_settings({"ds_moe_ext": {"megatron": {"layer": "us"}}})


def test_a_layer_that_runs_several_times_a_micro_batch() -> None:
    schedules = Schedules()
    passes = Passes(schedules, 2)
    schedules.begin(2, forward_only=False)
    seen = []
    for _ in range(4):
        passes.begins(is_training=True)
        seen.append(passes.is_last())
    assert seen == [False, False, False, True]


# Where tokens go.


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, int, np.ndarray]:
    """A plan with replicas, a sender, and its choices, bool ``[T, E]``."""
    num_ranks, per_rank = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_experts = num_ranks * per_rank
    drawn = np.random.default_rng(draw(st.integers(0, 2**32)))
    owner = Placement.block(num_experts, num_ranks)
    replicas_EC = drawn.random((num_experts, num_ranks)) < draw(st.sampled_from((0.2, 0.6, 1.0)))
    target = owner.with_replicas(replicas_EC)
    node_C = np.arange(num_ranks) // draw(st.integers(1, 2))
    share = NearestReplica(target, node_C) if draw(st.booleans()) else LocalElseOwner(owner, target)
    chosen_TE = drawn.random((draw(st.integers(0, 20)), num_experts)) < 0.4
    return Plan(owner, target, share), draw(st.integers(0, num_ranks - 1)), chosen_TE


@settings(max_examples=60, deadline=None)
@given(plans())
def test_each_choice_goes_to_one_slot_that_has_its_expert(
    drawn: tuple[Plan, int, np.ndarray],
) -> None:
    from ds_moe_ext.hosts.megatron.guests import Places

    plan, sender, chosen_TE = drawn
    places = Places.of(plan, sender, torch.device("cpu"))
    routing_map = torch.from_numpy(chosen_TE)
    probs = torch.rand(chosen_TE.shape) * routing_map
    map_TV, probs_TV = places.mapped(routing_map, probs)
    assert map_TV.shape == probs_TV.shape == (len(chosen_TE), places.num_virtual)
    # Back from slots to experts: nothing is lost, and nothing is there twice.
    expert_V = np.full(places.num_virtual, -1)
    for rank in range(plan.owner.num_ep_ranks):
        first, own = rank * places.num_slots, plan.owner.experts_of(rank)
        guests = np.flatnonzero(plan.target.holds_EC[:, rank] & ~plan.owner.holds_EC[:, rank])
        expert_V[first : first + len(own)] = own
        behind = first + places.num_owners
        expert_V[behind : behind + len(guests)] = guests
    back = torch.zeros_like(probs)
    for slot in np.flatnonzero(expert_V >= 0):
        back[:, expert_V[slot]] += probs_TV[:, slot]
    assert torch.equal(back, probs)
    assert map_TV.sum() == routing_map.sum() and not map_TV[:, expert_V < 0].any()
    # As many to each rank as the report says.
    parts = places.destination.share
    assert isinstance(parts, PlannedParts)
    sent_EC = parts.rows_from(sender, chosen_TE.sum(0)[None])[0]
    for expert, rank in np.ndindex(*sent_EC.shape):
        slots = [s for s in np.flatnonzero(expert_V == expert) if s // places.num_slots == rank]
        assert sum(int(map_TV[:, s].sum()) for s in slots) == sent_EC[expert, rank]


@settings(max_examples=40, deadline=None)
@given(plans(), st.integers(0, 50))
def test_parts_of_a_rule_are_divided_as_the_rule_does(
    drawn: tuple[Plan, int, np.ndarray], most: int
) -> None:
    """To within a row for each holder; and all ways to ask say the same."""
    plan, _, _ = drawn
    parts = PlannedParts.of(plan.target, plan.share, None)
    shape = plan.target.holds_EC.T.shape
    rows_CE = np.random.default_rng(most).integers(0, most + 1, shape)
    sent_CEC = np.stack([parts.rows_from(c, r[None])[0] for c, r in enumerate(rows_CE)])
    rule_CEC = np.stack([plan.share.rows_from(c, r[None])[0] for c, r in enumerate(rows_CE)])
    assert (sent_CEC.sum(axis=2) == rows_CE).all()
    assert np.abs(sent_CEC - rule_CEC).max(initial=0) <= 1
    between_CC = parts.rows_between(rows_CE[:, None])[0]
    assert (between_CC == sent_CEC.sum(axis=1)).all()
    assert (parts.computed_C(rows_CE) == between_CC.sum(axis=0)).all()
    assert (parts.rows_to(0, rows_CE[:, None])[:, 0] == sent_CEC[..., 0]).all()
