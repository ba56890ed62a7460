# SPDX-License-Identifier: Apache-2.0
"""Routers under Megatron-core that choose otherwise than their layers were built to: capacities and
padding that are switched between two passes, and routers of a user's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.hosts.megatron_jobs import Training
from tests.hosts.megatron_skewed import NEVER, Seen, assert_equal, train_skewed
from tests.hosts.megatron_toy import MegatronRun
from tests.ranks import pool_of

SKEW = (2.0, 1.0, 0.0, NEVER)
RUN = MegatronRun(dtype="float64", ep=2, steps=1, num_layers=1)
NARROW = replace(RUN, config=(("moe_ffn_hidden_size", 48),))  # experts have a config of their own
EP = {"enabled": True, "debug": True, "strategy": "ep", "report": {"enabled": False}}
PROGRAM = {**EP, "megatron": {"layer": "program"}}


def padded(training: Training, factor: float) -> float:
    """The loss of an evaluation with experts filled up to a capacity, as Megatron decodes."""
    from megatron.core.inference import utils

    (chunk,) = training.chunks
    with mock.patch.object(utils, "moe_layer_cache", None):
        utils.set_decode_expert_padding(chunk, True, factor)
        return training.evaluate(50)


def drops_nothing(training: Training) -> float:
    return padded(training, 2.0)


def drops_some(training: Training) -> float:
    return padded(training, 0.5)


def refused(training: Training) -> str:
    """What is stated where an evaluation would drop choices."""
    try:
        return str(drops_some(training))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("run", "look"),
    [(NARROW, drops_nothing), (replace(NARROW, capacity_factor=1.0), drops_some)],
)
def test_capacities_that_change_around_an_evaluation(run: MegatronRun, look: Any) -> None:
    ours, theirs = (pool_of(2).run(train_skewed, run, s, SKEW, look=look) for s in (EP, None))
    assert_equal(ours, theirs)
    assert ours[0].trained.seen == pytest.approx(theirs[0].trained.seen, rel=1e-12)


def test_a_capacity_that_comes_too_late() -> None:
    for seen in pool_of(2).run(train_skewed, RUN, PROGRAM, SKEW, look=refused):
        with pytest.raises(
            ValueError, match=r"is 0\.5 in this pass, but was None .* at least 2 \("
        ):
            raise ValueError(seen.trained.seen)


@contextmanager
def own_router() -> Iterator[None]:
    """One that chooses all experts with some of the probability, at least one, and reports of the
    others' too."""
    from megatron.core.transformer.moe.router import TopKRouter

    def routing(self: Any, logits: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:
        prob_TE = torch.softmax(logits.view(-1, logits.shape[-1]), -1)
        map_TE = prob_TE >= prob_TE.amax(1, keepdim=True).clamp(max=0.05)
        return prob_TE, map_TE

    with mock.patch.object(TopKRouter, "routing", routing):
        yield


def train_routed(
    rank: int, world_size: int, run: MegatronRun, settings: dict[str, Any] | None
) -> Seen | str:
    """What a rank has found with the user's router, or what was stated."""
    try:
        with own_router():
            return train_skewed(rank, world_size, run, settings, SKEW)
    except ValueError as error:
        return str(error)


def test_a_router_of_a_users_own_chooses_as_many_as_it_likes() -> None:
    run = replace(RUN, topk=3)
    ours, theirs = (pool_of(2).run(train_routed, run, settings) for settings in (EP, None))
    assert_equal(ours, theirs)


def test_more_choices_than_there_is_room_for() -> None:
    for stated in pool_of(1).run(train_routed, replace(RUN, ep=1), PROGRAM):
        with pytest.raises(
            ValueError, match=r"chose 3 .*-topk 2 of them; give --moe-router-topk 3"
        ):
            raise ValueError(stated)


def own_routing(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether Megatron's router, and another, are predicted to be a user's own."""
    from megatron.core.transformer.moe.router import TopKRouter

    from ds_moe_ext.hosts.megatron.layers import has_own_routing

    stock = has_own_routing(TopKRouter.__new__(TopKRouter))
    with own_router():
        return stock, has_own_routing(TopKRouter.__new__(TopKRouter))


def test_megatrons_router_is_reported_from_others() -> None:
    assert pool_of(1).run(own_routing)[0] == (False, True)
