# SPDX-License-Identifier: Apache-2.0
"""Models on the meta device: dense weights and buffers are made on every rank, and of the experts
those that a rank is home to.

A rank never holds all experts: it has its slots, and one weight of one expert while it is drawn.
What an expert starts with depends on its layer and number alone, not on ranks, strategy or home.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.core.comm import take_first
from ds_moe_ext.hosts.attachment.experts import HostedExperts
from ds_moe_ext.hosts.attachment.host_layer import Adopted, Found, RoutedOf, Slot, keep_marks
from ds_moe_ext.hosts.attachment.notices import Refusal
from ds_moe_ext.hosts.attachment.recorded_writes import Unknown, Writes, blank, has_blanks, key_of
from ds_moe_ext.hosts.own_initializers import (
    DONE,
    REMEDY,
    Named,
    Overwritten,
    have_run,
    initialize,
    outermost,
    overwritten,
    tensors_of,
    tie,
)
from ds_moe_ext.moe.sharding import Shard

META = "lies on the meta device"


def is_on_meta(module: nn.Module) -> bool:
    """Whether it has a weight or a buffer without elements."""
    return any(named.tensor.is_meta for named in tensors_of(module))


def _adapted(given: Any) -> str:
    for module in given.model.modules():
        kind = type(module)
        if kind.__module__.partition(".")[0] == "peft" and is_on_meta(module):
            return f"an adapter of peft ({kind.__name__}) {META}"
    return ""


ADAPTERS = Refusal(
    "adapters of peft and a model on the meta device",
    _adapted,
    "what an adapter starts with, as zeros, was lost there",
    "build the model on the CPU",
)
"""A row for hosts whose ``asked`` takes what has a ``model``."""


class MetaModel:
    """A model that may have weights or buffers on the meta device.

    Attributes:
        sources: what was made, and what without elements it took the place of.

    Args:
        model: before its layers are replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.sources: Mapping[Tensor, Tensor] = {}
        self._writes = Writes(set(), set())
        self._seed, self._device = 0, torch.device("cpu")

    def drawing(self, found: Found) -> Found:
        """A layer that draws the experts of this rank as it is replaced, if it is on the meta
        device.

        Raises:
            ValueError: some of its weights are there, and some are not.
        """
        module = self._model.get_submodule(found.name)
        weights = dict(module.named_parameters())
        empty = [name for name, weight in weights.items() if weight.is_meta]
        if not empty:
            return found
        if len(empty) < len(weights):
            raise ValueError(
                f"of {found.name} {', '.join(empty)} {META}, and the other weights do not; give "
                "all or none of a layer's experts their values"
            )

        def adopt(held: Tensor, shard: Shard, routed_of: RoutedOf) -> Adopted:
            adopted = found.adopt(held, shard, routed_of)
            return self._drawn(found, module, adopted, held)

        return replace(found, adopt=adopt)

    def make_real(self, found: Sequence[Found], device: torch.device) -> str:
        """Give all but the experts of these layers elements, as the model itself initialises them.
        Collective.

        Args:
            found: layers that will be replaced.
            device: where.

        Returns:
            What was done, for a person; empty if all was there.

        Raises:
            ValueError: the model does not say how something is initialised.
        """
        model = self._model
        if not is_on_meta(model):
            return ""
        tie(model)
        experts = {p for each in found for p in model.get_submodule(each.name).parameters()}
        empty = [*_empty(model)]
        counts, have_elsewhere_run = [named.tensor._version for named in empty], have_run(model)
        self._device, self._seed = device, _drawn_seed(device)
        there = [named.tensor for named in tensors_of(model) if not named.tensor.is_meta]
        for tensor in there:  # as buffers behind init_empty_weights
            if tensor not in experts:
                tensor.data = tensor.data.to(device)
        made = {n.tensor: _blank(n, device) for n in empty if n.tensor not in experts}
        _put(model, made)
        self.sources = {real: old for old, real in made.items()}
        now = [named._replace(tensor=made.get(named.tensor, named.tensor)) for named in empty]
        self._writes = Writes(set(map(key_of, experts)), set(map(key_of, there)))
        with _random_from(device):
            torch.manual_seed(self._seed)
            initialize(model, self._writes)
        dense = [named for named in now if not named.tensor.is_meta]
        self._check(dense)
        for each in found:
            self._check_experts(each, model.get_submodule(each.name))
        _check_overwritten(
            overwritten(model, [*zip(now, counts)], self._writes), have_elsewhere_run
        )
        return _told(model, found, dense)

    def _check(self, made: Sequence[Named]) -> None:
        """Raises ValueError where something is not initialised."""
        writes = self._writes
        left = [
            f"{named.name} (of a {type(named.module).__name__})"
            for named in made
            if not writes.count(named.tensor) or has_blanks(named.tensor)
        ]
        left += [e.name for e in _empty(self._model) if key_of(e.tensor) not in writes.empty]
        left += _loose(self._model)
        if left:
            raise ValueError(
                f"the model {META}, and nothing initialises {_some(left)}: a module says how by "
                "reset_parameters(), a model of transformers by its _init_weights(module); write "
                "one, or build the model under accelerate's init_empty_weights, which leaves "
                f"buffers and what is no parameter real, or {REMEDY}"
            )

    def _check_experts(self, found: Found, module: nn.Module) -> None:
        """Raises ValueError where one expert of a layer cannot be drawn alone."""
        is_meta = any(weight.is_meta for weight in module.parameters())
        for number in range(len(found.stored) if is_meta else 0):
            for expert in range(found.num_experts):
                self._recipe(found, module, number, expert)

    def _recipe(self, found: Found, module: nn.Module, number: int, expert: int) -> Any:
        stored = found.stored[number]
        weight, place = stored.of(module, expert), stored.place(module, expert)
        part = weight.detach() if place is None else weight.detach()[place]
        try:
            return self._writes.recipe(weight, part)
        except Unknown as error:
            by = f", but by {error}, which is of all of them together" if str(error) else ""
            raise ValueError(
                f"{found.name} {META}, and nothing that ds_moe_ext can do for one expert alone "
                f"initialises {found.expert[number][0]!r} of its {found.kind}{by}; write a "
                "reset_parameters() of its class, or an _init_weights(module) of its model, that "
                "fills weights by torch.nn.init (normal_, uniform_, zeros_ and their like), or "
                f"{REMEDY}"
            ) from error

    def _drawn(self, found: Found, module: nn.Module, adopted: Adopted, held: Tensor) -> Adopted:
        """With the experts of this rank, in place of slots without elements."""
        hosted = adopted.hosted
        assert isinstance(hosted, HostedExperts), "others are refused"
        slots = hosted.slots()
        names = range(len(found.stored))
        columns = [[slot.parameters[number] for slot in slots] for number in names]
        stacks = [_stack_of(column, self._device) for column in columns if column]
        with _random_from(self._device):
            for place, expert in enumerate(held.tolist()):
                torch.manual_seed(_seed_of(self._seed, found.name, expert))
                for number, stack in enumerate(stacks):
                    whole = self._recipe(found, module, number, expert).made(self._device)
                    if has_blanks(whole):
                        raise ValueError(
                            f"{found.name} {META}, and its initialiser leaves a part of "
                            f"{found.expert[number][0]!r} as it was; {REMEDY}"
                        )
                    stack[place] = hosted.shard.of(number, whole)
        made = [
            Slot(tuple(_like(stack[place], old) for stack, old in zip(stacks, slot.parameters)))
            for place, slot in enumerate(slots)
        ]
        hosted.hold(made)
        sources = {
            new: adopted.sources[old]
            for slot, before in zip(made, slots)
            for new, old in zip(slot.parameters, before.parameters)
        }
        return replace(adopted, sources=sources)


def _empty(model: nn.Module) -> Iterator[Named]:
    return (named for named in tensors_of(model) if named.tensor.is_meta)


def _loose(model: nn.Module) -> list[str]:
    """What a module keeps on the meta device that is neither a weight nor a buffer of its."""
    return [
        f"the attribute {name!r} of {path or type(module).__name__}"
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta
    ]


def _check_overwritten(names: Overwritten, have_run_before: bool) -> None:
    """Tell of values that are lost. Where initialisers of transformers ran before, on weights
    without elements, nobody can say what others wrote.

    Raises:
        ValueError: a constructor wrote them.
    """
    if names.of_others:
        raise ValueError(
            f"the model {META}, and a constructor wrote to {_some(names.of_others)} behind the "
            "reset_parameters of the modules that have it, so that these would start with other "
            "values; let the module that did so have a reset_parameters() or an "
            f"_init_weights(module) that does it, or {REMEDY}"
        )
    if names.of_transformers and not have_run_before and dist.get_rank() == 0:
        warnings.warn(
            f"the model {META}, where something wrote to {_some(names.of_transformers)}: that is "
            "lost, and it starts with what its own initialiser gives; load a checkpoint, or "
            f"{REMEDY}",
            stacklevel=2,
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _blank(named: Named, device: torch.device) -> Tensor:
    """In the place of a weight or buffer, with elements that mean nothing yet."""
    empty = named.tensor
    real = torch.empty_like(empty, device=device, requires_grad=False)
    blank(real)
    if isinstance(empty, nn.Parameter):
        real = nn.Parameter(real, requires_grad=empty.requires_grad)
    vars(real).update((name, value) for name, value in vars(empty).items() if name != DONE)
    return real


def _put(model: nn.Module, made: Mapping[Tensor, Tensor]) -> None:
    """Replace tensors of a model, wherever they are: tied ones stay tied."""
    for module in model.modules():
        places: Iterable[dict[str, Any]] = (module._parameters, module._buffers)
        for own in places:
            own.update((name, made[tensor]) for name, tensor in own.items() if tensor in made)


def _stack_of(column: Sequence[Tensor], device: torch.device) -> Tensor:
    """For one weight of all slots, ``[S, ...]``, behind each other as in a model that is real."""
    first = column[0]
    return torch.empty((len(column), *first.shape), dtype=first.dtype, device=device)


def _like(own: Tensor, old: nn.Parameter) -> nn.Parameter:
    parameter = nn.Parameter(own, requires_grad=old.requires_grad)
    keep_marks(parameter, old)
    return parameter


def _drawn_seed(device: torch.device) -> int:
    """One of torch's random numbers, of which a constructor would have taken some; rank 0's.
    Collective."""
    own = torch.randint(2**62, (1,), dtype=torch.int64, device="cpu")
    return int(take_first(own.to(device), None))


def _seed_of(seed: int, layer: str, expert: int) -> int:
    """For the weights of one expert: the same on whichever ranks it has a home."""
    digest = hashlib.sha256(f"{seed} {layer} {expert}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


@contextmanager
def _random_from(device: torch.device) -> Iterator[None]:
    """A block that may seed torch's random numbers, and leaves them as they were."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield


def _told(model: nn.Module, found: Sequence[Found], dense: Sequence[Named]) -> str:
    """See ``MetaModel.make_real``."""
    by = {type(each).__name__ for each in outermost(model)} or {"its modules' reset_parameters"}
    num_weights = sum(isinstance(named.tensor, nn.Parameter) for named in dense)
    return (
        f"the model came on the meta device: {num_weights} dense weights and "
        f"{len(dense) - num_weights} buffers were made alike on every rank, and each rank drew its "
        f"own experts of {len(found)} layers, by the initialisers of {', '.join(sorted(by))}; "
        "load a checkpoint for other values"
    )
