# SPDX-License-Identifier: Apache-2.0
"""Experts that move to new owners between two steps (``ExpertMover``), with all that the host's
optimizer keeps of them (``States``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.core.comm import exchange
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.hosts.attachment.host_layer import Slot
from ds_moe_ext.hosts.attachment.replacement import AttachedLayer
from ds_moe_ext.planning.strategy import CostGroup
from ds_moe_ext.schedule.task import PARAM

MASTER = "master"  # the weight that the optimizer steps, beside its states by their own names


GRADIENT = "gradient"  # the name of what is being accumulated, where that moves too


Scalar = float | Tensor  # a 0-dim tensor where the optimizer keeps one


class Expert(NamedTuple):
    """One expert of the model."""

    layer: int
    number: int


class Kind(NamedTuple):
    """One state, by its name, of one weight of an expert, by its number."""

    weight: int
    state: str


# By parameter and name, what moves with it: views, ``[F]`` each.
Kept = Mapping[nn.Parameter, Mapping[str, Tensor]]


class _ExpertTransfers(NamedTuple):
    """What moves of this rank's slots."""

    # slots whose contents leave, and the EP ranks that they go to
    given: Sequence[tuple[Slot, int]]
    # slots that contents come to, and the EP ranks that they come from
    got: Sequence[tuple[Slot, int]]
    within: Sequence[tuple[Slot, Slot]]  # pairs of slots, from and to

    @property
    def taken(self) -> list[Slot]:
        """Slots that have other contents afterwards."""
        return [slot for slot, _ in self.got] + [to for _, to in self.within]


@dataclass(frozen=True, eq=False)
class ExpertMover:
    """Moves experts between the ranks of a run."""

    states: Callable[[], States]  # finds the states of the host's optimizer, as it is when asked
    layers: Sequence[AttachedLayer]  # in model order
    cost_groups: Sequence[CostGroup]  # layers that may exchange experts

    @property
    def _ep_rank(self) -> int:
        return self.layers[0].routed.layer_context.layout.index("ep")

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.layers[0].routed.layer_context.layout.group("ep", PARAM)

    def __call__(self, old: Sequence[Placement], new: Sequence[Placement]) -> None:
        """An expert that stays keeps its slot. Between a step and the next. Collective."""
        slots = self.slots(old)
        leaving = [e for e in slots if new[e.layer].owner_E[e.number] != self._ep_rank]
        arriving = [e for e in self._experts(new) if e not in slots]
        taken: dict[Expert, Slot] = {}  # one that an expert of the same shape leaves
        for cost_group in self.cost_groups:
            left = [slots[expert] for expert in leaving if expert.layer in cost_group.layers]
            come = [expert for expert in arriving if expert.layer in cost_group.layers]
            taken.update(zip(come, left, strict=True))
        self.move(old, new, slots | taken)

    def move(
        self,
        old: Sequence[Placement],
        new: Sequence[Placement],
        new_slots: Mapping[Expert, Slot],
        gradients: Callable[[nn.Parameter], Tensor | None] | None = None,
    ) -> None:
        """Bring experts from old owners to new ones, each that this rank will own
        into its given slot. Collective. Transfers are between pairs of ranks, one batch for each
        kind of state, so that no more than one is in memory twice. ``gradients`` gives what is
        being accumulated of a parameter, to move too; between a step and the next that is of no
        use. Raises ValueError where the optimizer's states cannot be moved; then nothing has been
        changed."""
        slots = self.slots(old)
        transfers = self._expert_transfers(slots, old, new, new_slots)
        states = self.states()
        kept = {
            parameter: _views(states.of(parameter), parameter, gradients)
            for slot in slots.values()
            for parameter in slot.parameters
        }
        for kind in sorted(set().union(*(_kinds(slot, kept) for slot in slots.values()))):
            self._exchange(kind, transfers, kept)
        self._exchange_scalars(transfers, states)
        for slot in transfers.taken:
            for parameter in slot.parameters:
                parameter.data.view(-1).copy_(kept[parameter][MASTER])
        self.hold(new_slots, new)

    def _expert_transfers(
        self,
        slots: Mapping[Expert, Slot],
        old: Sequence[Placement],
        new: Sequence[Placement],
        new_slots: Mapping[Expert, Slot],
    ) -> _ExpertTransfers:
        ep_rank = self._ep_rank
        to = {expert: int(new[expert.layer].owner_E[expert.number]) for expert in slots}
        arriving = [expert for expert in self._experts(new) if expert not in slots]
        return _ExpertTransfers(
            given=[(slots[expert], owner) for expert, owner in to.items() if owner != ep_rank],
            got=[(new_slots[e], int(old[e.layer].owner_E[e.number])) for e in arriving],
            within=[
                (slots[expert], new_slots[expert])
                for expert, owner in to.items()
                if owner == ep_rank and not _is_same(new_slots[expert], slots[expert])
            ],
        )

    def _exchange(self, kind: Kind, transfers: _ExpertTransfers, kept: Kept) -> None:
        """Move one state of one weight of all experts that move. What lies in host memory travels
        by the device of the weights, which the group is of."""
        away = [slot for slot, _ in (*transfers.given, *transfers.got)]
        device = away[0].parameters[0].device if away else None

        def views(slots: Iterable[Slot]) -> list[Tensor]:
            return [
                kept[slot.parameters[kind.weight]][kind.state]
                for slot in slots
                if kind in _kinds(slot, kept)
            ]

        def ends(pairs: Sequence[tuple[Slot, int]]) -> list[int]:
            return [other for slot, other in pairs if kind in _kinds(slot, kept)]

        sent = [view.to(device, copy=True) for view in views(slot for slot, _ in transfers.given)]
        stayed = [view.clone() for view in views(slot for slot, _ in transfers.within)]
        got = views(slot for slot, _ in transfers.got)
        arrived = [torch.empty_like(view, device=device) for view in got]
        receives = list(zip(arrived, ends(transfers.got)))
        exchange(receives, list(zip(sent, ends(transfers.given))), self._group)
        for view, content in zip(views(transfers.taken), arrived + stayed, strict=True):
            view.copy_(content)

    def _exchange_scalars(self, transfers: _ExpertTransfers, states: States) -> None:
        """Move what is kept once for a weight, such as its number of steps.

        Of frozen experts nothing is kept, so that nothing is sent: a rank may have none but these.
        """
        sends = [(_scalars(states, slot), to) for slot, to in transfers.given]
        receives = [
            (torch.empty_like(_scalars(states, slot)), from_) for slot, from_ in transfers.got
        ]
        pairs = [(tensor, other) for tensor, other in receives if tensor.numel()]
        exchange(pairs, [(tensor, other) for tensor, other in sends if tensor.numel()], self._group)
        contents = [tensor for tensor, _ in receives]
        contents += [_scalars(states, slot) for slot, _ in transfers.within]
        written: dict[nn.Parameter, ParameterStates] = {}
        for slot, content in zip(transfers.taken, contents, strict=True):
            numbers = iter(content.tolist())
            for parameter in slot.parameters:
                own = states.of(parameter)
                scalars = {name: next(numbers) for name in sorted(own.scalars)}
                if scalars != {name: float(value) for name, value in own.scalars.items()}:
                    written[parameter] = replace(own.clone(), scalars=scalars)
        states.write(written)

    def slots(self, owners: Sequence[Placement]) -> dict[Expert, Slot]:
        """Where this rank's experts lie, in the order of layers and experts."""
        slots = [slot for layer in self.layers for slot in layer.hosted.slots()]
        return dict(zip(self._experts(owners), slots, strict=True))

    def _experts(self, owners: Sequence[Placement]) -> list[Expert]:
        """That this rank owns, in the order of layers and experts."""
        return [
            Expert(layer, number)
            for layer, owner in enumerate(owners)
            for number in owner.experts_of(self._ep_rank).tolist()
        ]

    def hold(self, slots: Mapping[Expert, Slot], owners: Sequence[Placement]) -> None:
        """Say which slots this rank's experts lie in from now on; nothing in them changes."""
        for index, (layer, owner) in enumerate(zip(self.layers, owners)):
            numbers = owner.experts_of(self._ep_rank).tolist()
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


@dataclass(frozen=True, eq=False)
class ParameterStates:
    """What an optimizer keeps of one parameter on this rank."""

    start: int  # first element of the flattened parameter that this rank keeps
    stop: int  # one past its last; ``start`` where this rank keeps none
    # what is kept element by element, ``[F]`` each, by name: ``MASTER`` always, and ``exp_avg`` and
    # the like once there have been steps
    tensors: Mapping[str, Tensor]
    # what is kept once, by name, such as ``step``. ZeRO 1 and 2 and the fused half precision
    # optimizer keep it once for a whole parameter group.
    scalars: Mapping[str, Scalar]

    def clone(self) -> ParameterStates:
        """The same in memory of its own, to survive a write to where it came from."""
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return ParameterStates(self.start, self.stop, tensors, self.scalars)


class Place(NamedTuple):
    """Where an optimizer keeps one parameter."""

    held: Tensor  # that the optimizer steps
    offset: int  # in it, of elements ``[start, stop)`` of the parameter
    start: int
    stop: int
    weight: Tensor | None = None  # that the model computes with, ``[F]``; None: the parameter's own

    def of(self, tensor: Tensor) -> Tensor:
        """The parameter's part of a tensor that is shaped as ``held``, ``[F]``."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.stop - self.start)


# Of parameters that are stacks, the slots' parameters, which are views into them, in order.
Views = Mapping[nn.Parameter, Sequence[nn.Parameter]]


def _parts(
    views_of: Views, parameter: nn.Parameter, numel: int
) -> Iterator[tuple[nn.Parameter, int, int]]:
    """A parameter and each view of a stack, with its first element in it and how many it has."""
    yield parameter, 0, numel
    views = views_of.get(parameter, ())
    starts = accumulate((view.numel() for view in views), initial=0)
    yield from ((view, start, view.numel()) for view, start in zip(views, starts))


class Group(NamedTuple):
    """One tensor that an optimizer steps, and the parameters that it was flattened from."""

    held: Tensor
    begin: int  # its first element in the flat buffer of all ranks that share it
    parameters: Iterable[nn.Parameter]
    offsets: Iterable[int]  # at which each starts in that buffer

    @classmethod
    def of_one(cls, held: Tensor, parameter: nn.Parameter) -> Group:
        return cls(held, 0, (parameter,), (0,))

    def places(self, views_of: Views) -> Iterator[tuple[nn.Parameter, Place]]:
        """Where each parameter lies, and each view of a stack, also if this rank has none of it."""
        length = self.held.numel()
        for parameter, offset in zip(self.parameters, self.offsets):
            for part, start, numel in _parts(views_of, parameter, parameter.numel()):
                first = offset + start - self.begin
                # In ``held``; it may lie before it, or behind it.
                low, high = (min(max(end, 0), length) for end in (first, first + numel))
                yield part, Place(self.held, low, low - first, high - first)


class Shard(NamedTuple):
    """What a rank has of one parameter that is sharded by itself, with what it has of others in one
    tensor that an optimizer steps."""

    held: Tensor  # that tensor
    offset: int  # where the shard begins in it
    parameter: nn.Parameter  # of which it is
    numel: int  # elements of the whole parameter
    begin: int  # the first of them that is in the shard
    weight: Tensor  # what the model computes with, ``[N]``; it may be longer than what is left

    def places(self, views_of: Views) -> Iterator[tuple[nn.Parameter, Place]]:
        """See ``Group.places``."""
        length = self.weight.numel()
        for part, start, numel in _parts(views_of, self.parameter, self.numel):
            first = start - self.begin
            low, high = (min(max(end, 0), length) for end in (first, first + numel))
            weight = self.weight.detach().narrow(0, low, high - low)
            yield part, Place(self.held, self.offset + low, low - first, high - first, weight)


class _Stepper(NamedTuple):
    """What steps a held tensor: an optimizer of torch's kind, and the number of its group."""

    optimizer: Any
    number: int


class States:
    """Access to the states of every parameter that some optimizers step.

    Between optimizer steps only: gradients that are being accumulated are not among them.

    Args:
        stepped: optimizers of torch's kind, and what each steps; None beside what none does.
        views_of: that are written in place of the stacks.
    """

    def __init__(
        self, stepped: Iterable[tuple[Any, Iterable[Group | Shard]]], views_of: Views | None = None
    ) -> None:
        views = views_of or {}
        self._place: dict[nn.Parameter, Place] = {}
        self._sharers: dict[Tensor, list[nn.Parameter]] = {}  # that have elements in a held tensor
        self._stepper: dict[Tensor, _Stepper] = {}
        for optimizer, groups in stepped:
            for parameter, place in (pair for group in groups for pair in group.places(views)):
                self._place[parameter] = place
                if place.start < place.stop and parameter not in views:
                    self._sharers.setdefault(place.held, []).append(parameter)
            for number, options in enumerate(() if optimizer is None else optimizer.param_groups):
                for held in options["params"]:
                    self._stepper[held] = _Stepper(optimizer, number)

    def of(self, parameter: nn.Parameter) -> ParameterStates:
        """What is kept of a parameter; its tensors are views, so writing to them changes the states
        (but not the parameter: that ``write`` does). Of one that is not trained only ``MASTER`` is
        kept: its own data. Raises ValueError where the optimizer keeps something that has no part
        for each element."""
        place = self._place_of(parameter)
        tensors, scalars = {MASTER: place.of(place.held)}, {}
        for name, value in self._state(place.held).items():
            if value is None:
                continue  # so SGD says that there is none yet
            if _is_scalar(name, value, place.held):
                scalars[name] = value.clone() if isinstance(value, Tensor) else value
            elif isinstance(value, Tensor) and value.shape == place.held.shape:
                tensors[name] = place.of(value)
            else:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                kind = self._stepper[place.held].optimizer.__class__.__name__
                raise ValueError(
                    f"{kind} keeps {name!r} ({shape}) of a weight {tuple(place.held.shape)}: "
                    "it has no entry per element, so it cannot move with an expert; use an "
                    "optimizer such as AdamW"
                )
        return ParameterStates(place.start, place.stop, tensors, scalars)

    def write(self, states: Mapping[nn.Parameter, ParameterStates]) -> None:
        """Replace what is kept of some parameters, and the parameters' own data with it.

        Parameters of one flat group share which states there are, and the scalars: either all of
        them are written, or what is written must have the group's own.

        Where a rank keeps a fragment, it writes that much of the parameter's data; the rest is for
        the ranks that keep it, and for the host to bring.

        Args:
            states: for each parameter, in memory of their own (see ``ParameterStates.clone``).

        Raises:
            ValueError: they do not fit; then nothing has been changed.
        """
        self.check(states)
        with torch.no_grad():
            for parameter, given in states.items():
                if given.start < given.stop:
                    self._write(parameter, given)

    def check(self, states: Mapping[nn.Parameter, ParameterStates]) -> None:
        """Raises ValueError where ``write`` would not take them."""
        for parameter, given in states.items():
            _check_range(self._place_of(parameter), given)
        self._check_groups({p: given for p, given in states.items() if given.start < given.stop})

    def options(self, parameter: nn.Parameter) -> dict[str, Any] | None:
        """The settings of the parameter group that a parameter is stepped with, such as ``lr``: the
        optimizer's own dict; None of a parameter that is not trained."""
        return self._options(self._place_of(parameter).held)

    def _options(self, held: Tensor) -> dict[str, Any] | None:
        if held not in self._stepper:
            return None
        optimizer, number = self._stepper[held]
        options: dict[str, Any] = optimizer.param_groups[number]
        return options

    def _check_groups(self, written: Mapping[nn.Parameter, ParameterStates]) -> None:
        given_of: dict[Tensor, list[ParameterStates]] = {}
        for parameter, given in written.items():
            given_of.setdefault(self._place_of(parameter).held, []).append(given)
        for held, group in given_of.items():
            others = (p for p in self._sharers.get(held, ()) if p not in written)
            first, *rest = map(_shared, (*group, *map(self.of, islice(others, 1))))
            for other in rest:
                if other != first:
                    raise ValueError(
                        f"a parameter group cannot keep {first} of one parameter and {other} of "
                        "another; write all parameters of the group, with the same scalars"
                    )

    def _write(self, parameter: nn.Parameter, given: ParameterStates) -> None:
        place = self._place_of(parameter)
        old = self._state(place.held)
        scalars = given.scalars.items()
        new = {name: self._like(old.get(name), own, place.held) for name, own in scalars}
        for name, tensor in given.tensors.items():
            if name == MASTER:
                place.of(place.held).copy_(tensor)
            else:
                kept = old.get(name)
                new[name] = torch.zeros_like(place.held) if kept is None else kept
                place.of(new[name]).copy_(tensor)
        if new:
            self._stepper[place.held].optimizer.state[place.held] = new
        elif old:
            del self._stepper[place.held].optimizer.state[place.held]
        own = place.weight
        if own is None:
            own = parameter.data.view(-1)[place.start : place.stop]
        own.copy_(given.tensors[MASTER])

    def _like(self, old: Scalar | None, new: Scalar, held: Tensor) -> Any:
        """A scalar in the kind that the optimizer has; where it has none yet, as it came."""
        if isinstance(old, Tensor):
            return old.fill_(float(new))
        if old is not None:
            return type(old)(new)
        if not isinstance(new, Tensor):
            return new
        options = self._options(held) or {}
        on_device = options.get("fused") or options.get("capturable")  # as torch's load_state_dict
        return new.to(held.device if on_device else "cpu", copy=True)

    def _place_of(self, parameter: nn.Parameter) -> Place:
        return self._place.get(parameter) or Place(parameter, 0, 0, parameter.numel())

    def _state(self, held: Tensor) -> Mapping[str, Any]:
        if held not in self._stepper:
            return {}
        state: Mapping[str, Any] = self._stepper[held].optimizer.state.get(held, {})
        return state


def _is_scalar(name: str, value: Any, held: Tensor) -> bool:
    """Whether something is kept once for a weight; of a weight without dims all states are 0-dim,
    and its number of steps is known by its name."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and (held.dim() > 0 or name == "step")
    return isinstance(value, int | float)


def _check_range(place: Place, given: ParameterStates) -> None:
    if (given.start, given.stop) != (place.start, place.stop):
        raise ValueError(
            f"states of elements {given.start} to {given.stop} were given, but this rank keeps "
            f"{place.start} to {place.stop}; give those"
        )
    for name, tensor in given.tensors.items():
        if tensor.shape != (given.stop - given.start,):
            raise ValueError(
                f"{name!r} of elements {given.start} to {given.stop} has shape "
                f"{tuple(tensor.shape)}; flatten it, and give it whole"
            )
    if MASTER not in given.tensors:
        raise ValueError(f"the states {sorted(given.tensors)} lack {MASTER!r}; give it too")


def _shared(states: ParameterStates) -> dict[str, float | None]:
    """Names of the states, and the values of scalars."""
    names: dict[str, float | None] = dict.fromkeys(states.tensors)
    return names | {name: float(value) for name, value in states.scalars.items()}
