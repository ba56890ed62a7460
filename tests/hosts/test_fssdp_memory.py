# SPDX-License-Identifier: Apache-2.0
"""What replicas cost in memory, counted in the storages that live: HECATE's model, spec rule 40.

Nothing of ours is believed here: every slab that a rank makes and every gradient of a copy that it
sends is followed by its storage, and looked at whenever memory is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ds_moe_ext.core.comm import Arrived, sparse_reduce_scatter
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.transfer import Part
from ds_moe_ext.moe.replica_memory import ReplicaMemory
from ds_moe_ext.schedule.executor import Steps
from tests.hosts.copied_runs import REPLICAS, varied
from tests.hosts.jobs import Job, engine_of, loss_of, micro_batch
from tests.marks import slow
from tests.ranks import pool_of


@dataclass
class Census:
    """Bytes of this process's replicas and of their gradients."""

    most_replicas: int = 0
    most_grads: int = 0
    most_layers: int = 0
    _slabs: WeakSet[ReplicaMemory] = field(default_factory=WeakSet)
    _grads: dict[StorageWeakRef, int] = field(default_factory=dict)

    def count(self) -> None:
        """Look at all storages that live."""
        sizes = [sum(storage_bytes(slab.tensors())) for slab in self._slabs]
        self.most_replicas = max(self.most_replicas, sum(sizes))
        self.most_layers = max(self.most_layers, sum(size > 0 for size in sizes))
        # A list first: another stream may add one meanwhile.
        self._grads = {ref: size for ref, size in [*self._grads.items()] if not ref.expired()}
        self.most_grads = max(self.most_grads, sum(self._grads.values()))

    def reduce(
        self, part: Part, grads: Mapping[int, Sequence[Tensor]], group: Any, **how: Any
    ) -> Steps[Arrived]:
        for tensor in (tensor for expert in part.received for tensor in grads[expert]):
            storage = tensor.untyped_storage()
            self._grads[StorageWeakRef(storage)] = storage.nbytes()
        self.count()
        return (yield from sparse_reduce_scatter(part, grads, group, **how))

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take it while this lasts."""
        make_room, restore = ReplicaMemory.make_room, ReplicaMemory.restore

        def counted_room(slab: ReplicaMemory, *arguments: Any) -> Any:
            room = make_room(slab, *arguments)
            self._slabs.add(slab)
            self.count()
            return room

        def counted_restore(slab: ReplicaMemory) -> Any:
            room = restore(slab)
            self.count()
            return room

        with (
            mock.patch.object(ReplicaMemory, "make_room", counted_room),
            mock.patch.object(ReplicaMemory, "restore", counted_restore),
            mock.patch(f"{REPLICAS}.sparse_reduce_scatter", self.reduce),
        ):
            yield


def storage_bytes(tensors: Iterable[Tensor]) -> list[int]:
    """Of each storage once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return [storage.nbytes() for storage in storages.values()]


@dataclass(frozen=True)
class Counted:
    """Bytes on one rank."""

    own: int
    expert: int
    replicas_L: tuple[int, ...]
    num_own: int
    census: tuple[int, int, int]


def counted(rank: int, world_size: int, job: Job) -> Counted:
    """Three steps by one plan."""
    from ds_moe_ext.hosts.deepspeed.parameter_groups import OptimizerStates
    from ds_moe_ext.hosts.steps.training_run import run_of

    census = Census()
    with census.taken():
        engine = engine_of(job, world_size)
        layers = run_of(engine).layers
        own = [parameter for layer in layers for parameter in layer.parameters]
        grads: dict[int, int] = {}
        for parameter in own:
            parameter.register_post_accumulate_grad_hook(
                lambda p: grads.update({id(p): p.grad.untyped_storage().nbytes()})
            )
        for step in range(job.steps):
            for number in range(rank, job.micro_batches, world_size):
                engine.backward(loss_of(engine, micro_batch(step, number)))
                engine.step()
    states = OptimizerStates(engine)
    kept = [tensor for p in own for tensor in states.of(p).tensors.values()]
    plans = [layer.routed.layer_context.plan for layer in layers]
    replicas = layers[0].routed.replicas
    return Counted(
        own=sum(p.nbytes for p in own) + sum(grads.values()) + sum(t.nbytes for t in kept),
        expert=sum(weight.nbytes for weight in replicas.like),
        replicas_L=tuple(num_here(p.target, rank) - num_here(p.owner, rank) for p in plans),
        num_own=sum(num_here(plan.owner, rank) for plan in plans),
        census=(census.most_replicas, census.most_grads, census.most_layers),
    )


def num_here(placement: Placement, ep_rank: int) -> int:
    return int(placement.holds_EC[:, ep_rank].sum())


JOB = Job("toy, wide", 1, dtype="bfloat16", steps=3)


def ranks_of(job: Job, **keys: Any) -> list[Counted]:
    """By one plan from the first step on."""
    return pool_of(4).run(counted, varied(job, layers=1.0, replicas=0.6, plan_every=0, **keys))


@pytest.mark.parametrize("rematerialized", [0.0, slow(1.0)])
def test_memory_is_that_of_the_model(rematerialized: float) -> None:
    """Of replicas two bytes a weight: of all layers, or of one; and gradients of one layer at once.
    Experts at their owners take 16 bytes a weight."""
    for rank in ranks_of(JOB, rematerialized=rematerialized):
        most_replicas, most_grads, most_layers = rank.census
        held = max(rank.replicas_L) if rematerialized else sum(rank.replicas_L)
        assert most_replicas == held * rank.expert
        assert most_grads == max(rank.replicas_L) * rank.expert
        assert most_layers == (1 if rematerialized else sum(map(bool, rank.replicas_L)))
        assert rank.own == pytest.approx(8 * rank.num_own * rank.expert, rel=0.02)
        # Spec rule 40: 2 bytes of a weight, 2 of its gradient, and at the owner 12 of Adam's.
        overhead = (2 * held + 2 * max(rank.replicas_L)) / (16 * rank.num_own)
        assert (most_replicas + most_grads) / rank.own == pytest.approx(overhead, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("rematerialized", [0.0, 1.0])
def test_memory_of_several_micro_batches(rematerialized: float) -> None:
    """Replicas are those of one; gradients of rematerialized ones do not wait for each other."""
    job = Job("toy, wide", 1, dtype="bfloat16", steps=3, micro_batches=8)
    for rank in ranks_of(job, rematerialized=rematerialized):
        most_replicas, most_grads, _ = rank.census
        held = max(rank.replicas_L) if rematerialized else sum(rank.replicas_L)
        assert most_replicas == held * rank.expert
        if rematerialized:
            assert most_grads == max(rank.replicas_L) * rank.expert
