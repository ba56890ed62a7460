"""Experts to new homes, with all that DeepSpeed's optimizer keeps of them.

A rank gives away as many experts as it gets, so that its parameters stay the same objects: only
what is in them changes, and which layer and expert they stand for. ZeRO need not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_moe_ext.comm import exchange
from ds_moe_ext.hosts.attach import AttachedLayer
from ds_moe_ext.hosts.deepspeed.states import OptimizerStates, ParameterStates
from ds_moe_ext.hosts.found import Slot
from ds_moe_ext.placement import Placement
from ds_moe_ext.schedule.task import PARAM
from ds_moe_ext.strategies.base import Pool


class Expert(NamedTuple):
    """One expert of the model."""

    layer: int
    number: int


@dataclass(frozen=True, eq=False)
class ExpertMover:
    """Moves experts between the ranks of an engine.

    Attributes:
        engine: DeepSpeed's.
        layers: in model order.
        pools: layers that may exchange experts.
    """

    engine: Any
    layers: Sequence[AttachedLayer]
    pools: Sequence[Pool]

    def __call__(self, old: Sequence[Placement], new: Sequence[Placement]) -> None:
        """One batch of transfers between pairs of ranks. Between a step and the next. Collective.

        Raises:
            ValueError: the optimizer's states cannot be moved.
        """
        layout = self.layers[0].routed.site.layout
        cell = layout.index("ep")
        slots = self._slots(old, cell)
        leaving = {e: int(new[e.layer].owner_E[e.number]) for e in slots}
        leaving = {expert: to for expert, to in leaving.items() if to != cell}
        arriving = {
            Expert(layer, number): int(old[layer].owner_E[number])
            for layer, home in enumerate(new)
            for number in home.experts_of(cell).tolist()
            if Expert(layer, number) not in slots
        }
        states = OptimizerStates(self.engine)
        taken = self._taken(slots, leaving, arriving)
        sends = [(tensor, to) for e, to in leaving.items() for tensor in _packed(states, slots[e])]
        # The slot that an expert comes to says what is kept of one.
        landed = {e: [torch.empty_like(t) for t in _packed(states, taken[e])] for e in arriving}
        receives = [(tensor, arriving[e]) for e, tensors in landed.items() for tensor in tensors]
        exchange(receives, sends, layout.group("ep", PARAM))
        written = {}
        for expert, tensors in landed.items():
            written.update(_unpacked(states, taken[expert], tensors))
        states.write(written)
        self._hold(slots | taken, new, cell)

    def _slots(self, homes: Sequence[Placement], cell: int) -> dict[Expert, Slot]:
        """Where this rank's experts lie, in the order of layers and experts."""
        return {
            Expert(index, number): slot
            for index, (layer, home) in enumerate(zip(self.layers, homes))
            for number, slot in zip(home.experts_of(cell).tolist(), layer.hosted.slots())
        }

    def _taken(
        self,
        slots: Mapping[Expert, Slot],
        leaving: Mapping[Expert, int],
        arriving: Mapping[Expert, int],
    ) -> dict[Expert, Slot]:
        """The slot of each expert that arrives: one that an expert of the same shape leaves."""
        taken: dict[Expert, Slot] = {}
        for pool in self.pools:
            left = [slots[expert] for expert in leaving if expert.layer in pool.layers]
            come = [expert for expert in arriving if expert.layer in pool.layers]
            taken.update(zip(come, left, strict=True))
        return taken

    def _hold(self, slots: Mapping[Expert, Slot], homes: Sequence[Placement], cell: int) -> None:
        for index, (layer, home) in enumerate(zip(self.layers, homes)):
            numbers = home.experts_of(cell).tolist()
            layer.hosted.hold([slots[Expert(index, number)] for number in numbers])


def _packed(states: OptimizerStates, slot: Slot) -> list[Tensor]:
    """All that is kept of an expert, in memory of its own; scalars as one tensor a weight."""
    packed = []
    for parameter in slot.parameters:
        kept = states.of(parameter)
        packed += [kept.tensors[name].clone() for name in sorted(kept.tensors)]
        scalars = [float(kept.scalars[name]) for name in sorted(kept.scalars)]
        if scalars:
            packed.append(torch.tensor(scalars, dtype=torch.float64, device=parameter.device))
    return packed


def _unpacked(
    states: OptimizerStates, slot: Slot, tensors: Sequence[Tensor]
) -> dict[torch.nn.Parameter, ParameterStates]:
    found = iter(tensors)
    return {parameter: _states_from(states.of(parameter), found) for parameter in slot.parameters}


def _states_from(like: ParameterStates, found: Iterator[Tensor]) -> ParameterStates:
    tensors = {name: next(found) for name in sorted(like.tensors)}
    numbers = next(found).tolist() if like.scalars else []
    return ParameterStates(like.start, like.stop, tensors, dict(zip(sorted(like.scalars), numbers)))
