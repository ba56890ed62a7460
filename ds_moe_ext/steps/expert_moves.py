# SPDX-License-Identifier: Apache-2.0
"""Experts to new homes, with all that the host's optimizer keeps of them: the same for every host.

A rank gives away as many experts as it gets, so that its parameters stay the same objects: only
what is in them changes, and which layer and expert they stand for. The host's optimizer need not
know. Where the ranks of a cell split its experts, each moves its part between the ranks in its
place of the cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.attachment.host_layer import Slot
from ds_moe_ext.attachment.replacement import AttachedLayer
from ds_moe_ext.comm import exchange
from ds_moe_ext.placement import Placement
from ds_moe_ext.schedule.task import PARAM
from ds_moe_ext.steps.optimizer_states import MASTER, ParameterStates, States
from ds_moe_ext.strategy import Pool

GRADIENT = "gradient"  # the name of what is being accumulated, where that moves too


class Expert(NamedTuple):
    """One expert of the model."""

    layer: int
    number: int


class Kind(NamedTuple):
    """One state, by its name, of one weight of an expert, by its number."""

    weight: int
    state: str


Kept = Mapping[nn.Parameter, Mapping[str, Tensor]]
"""By parameter and name, what moves with it: views, ``[F]`` each."""


class _Trips(NamedTuple):
    """What moves of this rank's slots.

    Attributes:
        given: slots whose contents leave, and the cells that they go to.
        got: slots that contents come to, and the cells that they come from.
        within: pairs of slots, from and to.
    """

    given: Sequence[tuple[Slot, int]]
    got: Sequence[tuple[Slot, int]]
    within: Sequence[tuple[Slot, Slot]]

    @property
    def taken(self) -> list[Slot]:
        """Slots that have other contents afterwards."""
        return [slot for slot, _ in self.got] + [to for _, to in self.within]


@dataclass(frozen=True, eq=False)
class ExpertMover:
    """Moves experts between the ranks of a run.

    Attributes:
        states: finds the states of the host's optimizer, as it is when asked.
        layers: in model order.
        pools: layers that may exchange experts.
    """

    states: Callable[[], States]
    layers: Sequence[AttachedLayer]
    pools: Sequence[Pool]

    @property
    def _cell(self) -> int:
        return self.layers[0].routed.site.layout.index("ep")

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.layers[0].routed.site.layout.group("ep", PARAM)

    def __call__(self, old: Sequence[Placement], new: Sequence[Placement]) -> None:
        """An expert that stays keeps its slot. Between a step and the next. Collective.

        Raises:
            ValueError: the optimizer's states cannot be moved; then nothing has been changed.
        """
        slots = self.slots(old)
        leaving = [e for e in slots if new[e.layer].owner_E[e.number] != self._cell]
        arriving = [
            expert
            for expert in self._experts(new)
            if old[expert.layer].owner_E[expert.number] != self._cell
        ]
        self.move(old, new, slots | self._taken(slots, leaving, arriving))

    def move(
        self,
        old: Sequence[Placement],
        new: Sequence[Placement],
        seats: Mapping[Expert, Slot],
        gradients: Callable[[nn.Parameter], Tensor | None] | None = None,
    ) -> None:
        """Bring experts into given slots. Collective.

        Transfers between pairs of ranks, one batch for each kind of state, so that no more than
        one is in memory twice.

        Args:
            old: homes as they are.
            new: homes as they shall be.
            seats: slot of every expert that will be at home on this rank; others are not looked at.
            gradients: what is being accumulated of a parameter, to move too; None between a step
                and the next, when that is of no use.

        Raises:
            ValueError: the optimizer's states cannot be moved; then nothing has been changed.
        """
        slots = self.slots(old)
        trips = self._trips(slots, old, new, seats)
        states = self.states()
        kept = {
            parameter: _views(states.of(parameter), parameter, gradients)
            for slot in slots.values()
            for parameter in slot.parameters
        }
        for kind in sorted(set().union(*(_kinds(slot, kept) for slot in slots.values()))):
            self._exchange(kind, trips, kept)
        self._exchange_scalars(trips, states)
        for slot in trips.taken:
            for parameter in slot.parameters:
                parameter.data.view(-1).copy_(kept[parameter][MASTER])
        self.hold(seats, new)

    def _trips(
        self,
        slots: Mapping[Expert, Slot],
        old: Sequence[Placement],
        new: Sequence[Placement],
        seats: Mapping[Expert, Slot],
    ) -> _Trips:
        cell = self._cell
        to = {expert: int(new[expert.layer].owner_E[expert.number]) for expert in slots}
        arriving = [expert for expert in self._experts(new) if expert not in slots]
        return _Trips(
            given=[(slots[expert], home) for expert, home in to.items() if home != cell],
            got=[(seats[e], int(old[e.layer].owner_E[e.number])) for e in arriving],
            within=[
                (slots[expert], seats[expert])
                for expert, home in to.items()
                if home == cell and not _is_same(seats[expert], slots[expert])
            ],
        )

    def _exchange(self, kind: Kind, trips: _Trips, kept: Kept) -> None:
        """Move one state of one weight of all experts that move. What lies in host memory travels
        by the device of the weights, which the group is of."""
        away = [slot for slot, _ in (*trips.given, *trips.got)]
        device = away[0].parameters[0].device if away else None

        def views(slots: Iterable[Slot]) -> list[Tensor]:
            return [
                kept[slot.parameters[kind.weight]][kind.state]
                for slot in slots
                if kind in _kinds(slot, kept)
            ]

        def ends(pairs: Sequence[tuple[Slot, int]]) -> list[int]:
            return [other for slot, other in pairs if kind in _kinds(slot, kept)]

        sent = [view.to(device, copy=True) for view in views(slot for slot, _ in trips.given)]
        stayed = [view.clone() for view in views(slot for slot, _ in trips.within)]
        got = views(slot for slot, _ in trips.got)
        arrived = [torch.empty_like(view, device=device) for view in got]
        receives = list(zip(arrived, ends(trips.got)))
        exchange(receives, list(zip(sent, ends(trips.given))), self._group)
        for view, content in zip(views(trips.taken), arrived + stayed, strict=True):
            view.copy_(content)

    def _exchange_scalars(self, trips: _Trips, states: States) -> None:
        """Move what is kept once for a weight, such as its number of steps.

        Of frozen experts nothing is kept, so that nothing is sent: a rank may have none but these.
        """
        sends = [(_scalars(states, slot), to) for slot, to in trips.given]
        receives = [(torch.empty_like(_scalars(states, slot)), from_) for slot, from_ in trips.got]
        pairs = [(tensor, other) for tensor, other in receives if tensor.numel()]
        exchange(pairs, [(tensor, other) for tensor, other in sends if tensor.numel()], self._group)
        contents = [tensor for tensor, _ in receives]
        contents += [_scalars(states, slot) for slot, _ in trips.within]
        written: dict[nn.Parameter, ParameterStates] = {}
        for slot, content in zip(trips.taken, contents, strict=True):
            numbers = iter(content.tolist())
            for parameter in slot.parameters:
                own = states.of(parameter)
                scalars = {name: next(numbers) for name in sorted(own.scalars)}
                if scalars != {name: float(value) for name, value in own.scalars.items()}:
                    written[parameter] = replace(own.clone(), scalars=scalars)
        states.write(written)

    def slots(self, homes: Sequence[Placement]) -> dict[Expert, Slot]:
        """Where this rank's experts lie, in the order of layers and experts."""
        slots = [slot for layer in self.layers for slot in layer.hosted.slots()]
        return dict(zip(self._experts(homes), slots, strict=True))

    def _experts(self, homes: Sequence[Placement]) -> list[Expert]:
        """That are at home on this rank, in the order of layers and experts."""
        return [
            Expert(layer, number)
            for layer, home in enumerate(homes)
            for number in home.experts_of(self._cell).tolist()
        ]

    def _taken(
        self,
        slots: Mapping[Expert, Slot],
        leaving: Sequence[Expert],
        arriving: Sequence[Expert],
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
        for index, (layer, home) in enumerate(zip(self.layers, homes)):
            numbers = home.experts_of(self._cell).tolist()
            layer.hosted.hold([slots[Expert(index, number)] for number in numbers])


def _views(
    states: ParameterStates,
    parameter: nn.Parameter,
    gradients: Callable[[nn.Parameter], Tensor | None] | None,
) -> Mapping[str, Tensor]:
    """What moves with a parameter."""
    gradient = None if gradients is None else gradients(parameter)
    if gradient is None:
        return states.tensors
    return {**states.tensors, GRADIENT: gradient.view(-1)}


def _is_same(one: Slot, other: Slot) -> bool:
    return all(p is q for p, q in zip(one.parameters, other.parameters, strict=True))


def _kinds(slot: Slot, kept: Kept) -> set[Kind]:
    return {
        Kind(weight, state)
        for weight, parameter in enumerate(slot.parameters)
        for state in kept[parameter]
    }


def _scalars(states: States, slot: Slot) -> Tensor:
    """Of all weights of an expert, by name, float64."""
    kept = [states.of(parameter).scalars for parameter in slot.parameters]
    numbers = [float(scalars[name]) for scalars in kept for name in sorted(scalars)]
    return torch.tensor(numbers, dtype=torch.float64, device=slot.parameters[0].device)
