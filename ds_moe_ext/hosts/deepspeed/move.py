"""Experts to new homes, with all that DeepSpeed's optimizer keeps of them.

A rank gives away as many experts as it gets, so that its parameters stay the same objects: only
what is in them changes, and which layer and expert they stand for. ZeRO need not know. Where the
ranks of a cell split its experts, each moves its part between the ranks in its place of the cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.comm import exchange
from ds_moe_ext.hosts.attach import AttachedLayer
from ds_moe_ext.hosts.deepspeed.states import MASTER, OptimizerStates, ParameterStates
from ds_moe_ext.hosts.found import Slot
from ds_moe_ext.placement import Placement
from ds_moe_ext.schedule.task import PARAM
from ds_moe_ext.strategies.base import Pool


class Expert(NamedTuple):
    """One expert of the model."""

    layer: int
    number: int


class Kind(NamedTuple):
    """One state, by its name, of one weight of an expert, by its number."""

    weight: int
    state: str


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

    @property
    def _cell(self) -> int:
        return self.layers[0].routed.site.layout.index("ep")

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.layers[0].routed.site.layout.group("ep", PARAM)

    def __call__(self, old: Sequence[Placement], new: Sequence[Placement]) -> None:
        """Transfers between pairs of ranks, one batch for each kind of state, so that no more than
        one is in memory twice. Between a step and the next. Collective.

        Raises:
            ValueError: the optimizer's states cannot be moved; then nothing has been changed.
        """
        cell = self._cell
        slots = self.slots(old)
        leaving = {e: int(new[e.layer].owner_E[e.number]) for e in slots}
        leaving = {expert: to for expert, to in leaving.items() if to != cell}
        arriving = {
            Expert(layer, number): int(old[layer].owner_E[number])
            for layer, home in enumerate(new)
            for number in home.experts_of(cell).tolist()
            if Expert(layer, number) not in slots
        }
        taken = self._taken(slots, leaving, arriving)
        states = OptimizerStates(self.engine)
        kept = {p: states.of(p) for slot in slots.values() for p in slot.parameters}
        given = [(slots[expert], to) for expert, to in leaving.items()]
        got = [(taken[expert], from_) for expert, from_ in arriving.items()]
        for kind in sorted(set().union(*(_kinds(slot, kept) for slot in slots.values()))):
            self._exchange(kind, given, got, kept)
        self._exchange_scalars(given, got, states)
        for slot, _ in got:
            for parameter in slot.parameters:
                parameter.data.view(-1).copy_(kept[parameter].tensors[MASTER])
        self.hold(slots | taken, new)

    def _exchange(
        self,
        kind: Kind,
        given: Sequence[tuple[Slot, int]],
        got: Sequence[tuple[Slot, int]],
        kept: Mapping[nn.Parameter, ParameterStates],
    ) -> None:
        """Move one state of one weight of all experts that move."""

        def views(ends: Sequence[tuple[Slot, int]]) -> list[tuple[Tensor, int]]:
            return [
                (kept[slot.parameters[kind.weight]].tensors[kind.state], other)
                for slot, other in ends
                if kind in _kinds(slot, kept)
            ]

        sends = [(view.clone(), to) for view, to in views(given)]
        landing = views(got)
        receives = [(torch.empty_like(view), from_) for view, from_ in landing]
        exchange(receives, sends, self._group)
        for (view, _), (arrived, _) in zip(landing, receives):
            view.copy_(arrived)

    def _exchange_scalars(
        self,
        given: Sequence[tuple[Slot, int]],
        got: Sequence[tuple[Slot, int]],
        states: OptimizerStates,
    ) -> None:
        """Move what is kept once for a weight, such as its number of steps.

        Of frozen experts nothing is kept, so that nothing is sent: a rank may have none but these.
        """
        sends = [(_scalars(states, slot), to) for slot, to in given]
        receives = [(torch.empty_like(_scalars(states, slot)), from_) for slot, from_ in got]
        pairs = [(tensor, other) for tensor, other in receives if tensor.numel()]
        exchange(pairs, [(tensor, other) for tensor, other in sends if tensor.numel()], self._group)
        written: dict[nn.Parameter, ParameterStates] = {}
        for (slot, _), (arrived, _) in zip(got, receives):
            numbers = iter(arrived.tolist())
            for parameter in slot.parameters:
                own = states.of(parameter)
                scalars = {name: next(numbers) for name in sorted(own.scalars)}
                if scalars != {name: float(value) for name, value in own.scalars.items()}:
                    written[parameter] = replace(own.clone(), scalars=scalars)
        states.write(written)

    def slots(self, homes: Sequence[Placement]) -> dict[Expert, Slot]:
        """Where this rank's experts lie, in the order of layers and experts."""
        cell = self._cell
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

    def hold(self, slots: Mapping[Expert, Slot], homes: Sequence[Placement]) -> None:
        """Say which slots this rank's experts lie in from now on; nothing in them changes."""
        cell = self._cell
        for index, (layer, home) in enumerate(zip(self.layers, homes)):
            numbers = home.experts_of(cell).tolist()
            layer.hosted.hold([slots[Expert(index, number)] for number in numbers])


def _kinds(slot: Slot, kept: Mapping[nn.Parameter, ParameterStates]) -> set[Kind]:
    return {
        Kind(weight, state)
        for weight, parameter in enumerate(slot.parameters)
        for state in kept[parameter].tensors
    }


def _scalars(states: OptimizerStates, slot: Slot) -> Tensor:
    """Of all weights of an expert, by name, float64."""
    kept = [states.of(parameter).scalars for parameter in slot.parameters]
    numbers = [float(scalars[name]) for scalars in kept for name in sorted(scalars)]
    return torch.tensor(numbers, dtype=torch.float64, device=slot.parameters[0].device)
