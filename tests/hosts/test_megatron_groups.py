# SPDX-License-Identifier: Apache-2.0
"""Process groups that are given to Megatron's modules, and are not those of its parallel state."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist

from tests.hosts.megatron_jobs import Training, megatron
from tests.hosts.megatron_toy import MegatronRun, transformer_config
from tests.ranks import pool_of

RUN = MegatronRun(dtype="float64", ep=2, steps=3)
SETTINGS = {
    "enabled": True,
    "strategy": "fssdp",
    "fssdp": {"replicas_per_rank": 1, "reshard_interval": 0},
    "debug": True,
    "report": {"enabled": False},
}


class Outcome(NamedTuple):
    """Losses and norms of the steps, and EP ranks of the first layer; 0 without us."""

    losses: list[float]
    norms: list[float | None]
    num_ep_ranks: int


@contextmanager
def collected() -> Any:
    """Everything is built with groups of two expert ranks, while the parallel state has one of
    each rank."""
    from megatron.core import distributed, optimizer, parallel_state
    from megatron.core.models import gpt
    from megatron.core.process_groups_config import ProcessGroupCollection

    from ds_moe_ext.hosts.megatron import engine

    assert engine.DistributedDataParallel is distributed.DistributedDataParallel
    collection = ProcessGroupCollection.use_mpu_process_groups()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    assert parallel_state.get_expert_model_parallel_world_size() == 1
    with ExitStack() as stack:
        for module, name in (
            (gpt, "GPTModel"),
            (distributed, "DistributedDataParallel"),
            (optimizer, "get_megatron_optimizer"),
        ):
            given = partial(vars(module)[name], pg_collection=collection)
            stack.enter_context(mock.patch.object(module, name, given))
        yield


def train_collected(rank: int, world_size: int, settings: dict[str, Any] | None) -> Outcome:
    from ds_moe_ext.hosts.steps.training_run import run_of

    with megatron(RUN, settings), collected():
        training = Training(RUN)
        lines = [(training.compute(step), training.update()) for step in range(RUN.steps)]
        run = run_of(training.optimizer)
        num_ep_ranks = 0 if run is None else run.blueprint.grid.num_ep_ranks
    losses, norms = zip(*lines)
    return Outcome(list(losses), list(norms), num_ep_ranks)


def test_groups_come_from_the_collection_of_the_model() -> None:
    stock = pool_of(2).run(train_collected, None)[0]
    ours = pool_of(2).run(train_collected, SETTINGS)[0]
    assert ours.num_ep_ranks == 2 and stock.num_ep_ranks == 0
    assert ours.losses == pytest.approx(stock.losses, rel=1e-12)
    assert ours.norms == pytest.approx(stock.norms, rel=1e-10)


def layer_alone(rank: int, world_size: int) -> str:
    """The class of an MoE layer that is built where there is no parallel state."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_layer import MoELayer

    with megatron(RUN, SETTINGS):
        collection = ProcessGroupCollection.use_mpu_process_groups()
        parallel_state.destroy_model_parallel()
        spec = get_gpt_layer_local_spec(num_experts=RUN.num_experts, moe_grouped_gemm=False)
        submodules = spec.submodules.mlp.submodules
        layer = MoELayer(transformer_config(RUN), submodules, 1, pg_collection=collection)
        return type(layer).__name__


def test_a_layer_is_built_where_there_is_no_parallel_state() -> None:
    assert pool_of(2).run(layer_alone) == ["MoELayer"] * 2


def places(rank: int, world_size: int) -> str:
    from ds_moe_ext.hosts.megatron.engine import Place, place_in

    class Collection:
        def __init__(self) -> None:
            self.ep = dist.group.WORLD

    collection = Collection()
    assert place_in(collection, "ep") == Place(rank, world_size)
    assert place_in(collection, "pp") == Place(0, 1)
    with pytest.raises(ValueError) as caught:
        place_in(collection, "expt_tp")
    return str(caught.value)


def test_a_group_that_is_missing_is_named() -> None:
    results = pool_of(2).run(places)
    assert "has no group 'expt_tp'" in results[0] and "initialize_model_parallel" in results[0]
