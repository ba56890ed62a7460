# SPDX-License-Identifier: Apache-2.0
"""Models on the meta device: dense weights and buffers are made on every rank, and of the experts
those that a rank owns.

A rank never holds all experts: it has its slots, and one weight of one expert while it is drawn.
What an expert starts with depends on its layer and number alone, not on ranks, strategy or owner.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.core.comm import take_first
from ds_moe_ext.hosts.attachment.experts import HostedExperts
from ds_moe_ext.hosts.attachment.host_layer import Adopted, Found, RoutedOf, Slot, keep_marks
from ds_moe_ext.hosts.attachment.modules import named_modules
from ds_moe_ext.hosts.attachment.notices import Refusal
from ds_moe_ext.hosts.attachment.recorded_writes import Unknown, Writes, blank, has_blanks, key_of
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
    "the initial values of adapters were lost there",
    "build the model on the CPU",
)
"""A row for hosts whose ``asked`` takes what has a ``model``."""


class MetaModel:
    """A model that may have weights or buffers on the meta device.

    Attributes:
        sources: what was made, and what without elements it took the place of.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.sources: Mapping[Tensor, Tensor] = {}
        self._writes = Writes(set(), set())
        self._seed, self._device = 0, torch.device("cpu")

    def drawing(self, found: Found) -> Found:
        """A layer that draws the experts of this rank as it is replaced, if it is on the meta
        device."""
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

    def make_real(
        self, found: Sequence[Found], device: torch.device, *, has_dense: bool = True
    ) -> str:
        """Give all but the experts of these layers elements, as the model itself initialises them.
        Collective.

        Args:
            found: the layers.
            device: where.
            has_dense: else of dense tensors buffers alone: other ranks keep the weights.

        Returns:
            What was done, for a person; empty if all was there.
        """
        model = self._model
        if not is_on_meta(model):
            return ""
        tying: Iterable[Any] = outermost(model)
        for each in tying:  # init_empty_weights makes a parameter of each place
            each.tie_weights()
        experts = {p for each in found for p in model.get_submodule(each.name).parameters()}
        empty = [*_empty(model)]
        others = () if has_dense else (named.tensor for named in empty)
        unmade = experts.union(each for each in others if isinstance(each, nn.Parameter))
        counts = [named.tensor._version for named in empty]
        have_run = any(hasattr(module, DONE) for module in model.modules())
        # One of torch's random numbers, of which a constructor would have taken some; rank 0's.
        seed = torch.randint(2**62, (1,), dtype=torch.int64, device="cpu").to(device)
        self._device, self._seed = device, int(take_first(seed, None))
        there = [named.tensor for named in tensors_of(model) if not named.tensor.is_meta]
        for tensor in there:  # as buffers behind init_empty_weights
            if tensor not in experts:
                tensor.data = tensor.data.to(device)
        made = {n.tensor: _blank(n, device) for n in empty if n.tensor not in unmade}
        for module in model.modules():  # wherever they are: tied ones stay tied
            places: Iterable[dict[str, Any]] = (module._parameters, module._buffers)
            for own in places:
                own.update((name, made[tensor]) for name, tensor in own.items() if tensor in made)
        self.sources = {real: old for old, real in made.items()}
        now = [named._replace(tensor=made.get(named.tensor, named.tensor)) for named in empty]
        self._writes = Writes(set(map(key_of, unmade)), set(map(key_of, there)))
        with _random_from(device):
            torch.manual_seed(self._seed)
            initialize(model, self._writes)
        dense = [named for named in now if not named.tensor.is_meta]
        self._check(dense)
        for each in found:
            self._check_experts(each, model.get_submodule(each.name))
        _check_overwritten(model, zip(now, counts), self._writes, have_run)
        return _reported(model, found, dense)

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
        # Of each weight of all slots, behind each other as in a model that is real.
        shapes = [
            ((len(column), *column[0].shape), column[0].dtype) for column in columns if column
        ]
        stacks = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes]
        with _random_from(self._device):
            for place, expert in enumerate(held.tolist()):
                torch.manual_seed(_seed_of(self._seed, found.name, expert))
                for number, stack in enumerate(stacks):
                    whole = self._recipe(found, module, number, expert).made(self._device)
                    if has_blanks(whole):
                        raise ValueError(
                            f"{found.name} {META}, and its initialiser leaves part of "
                            f"{found.expert[number][0]!r} unset; {REMEDY}"
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


def _check_overwritten(
    model: nn.Module, before: Iterable[tuple[Named, int]], writes: Writes, have_run: bool
) -> None:
    """Report what was written to more often, while it had no elements, than initialisers do:
    values of somebody else's, which are lost. Where initialisers of transformers ran before, on
    weights without elements, nobody can say what others wrote."""
    known = {key_of(named.tensor) for each in outermost(model) for named in tensors_of(each)}
    more = [named for named, count in before if writes.count(named.tensor) < count]
    of_transformers = [named.name for named in more if key_of(named.tensor) in known]
    of_others = [named.name for named in more if key_of(named.tensor) not in known]
    if of_others:
        raise ValueError(
            f"the model {META}, and a constructor wrote to {_some(of_others)} behind the "
            "reset_parameters of the modules that have it, so that these would start with other "
            "values; let the module that did so have a reset_parameters() or an "
            f"_init_weights(module) that does it, or {REMEDY}"
        )
    if of_transformers and not have_run and dist.get_rank() == 0:
        warnings.warn(
            f"the model {META}, and values written to {_some(of_transformers)} are lost; its "
            f"own initialiser sets them; load a checkpoint, or {REMEDY}",
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


def _like(own: Tensor, old: nn.Parameter) -> nn.Parameter:
    parameter = nn.Parameter(own, requires_grad=old.requires_grad)
    keep_marks(parameter, old)
    return parameter


def _seed_of(seed: int, layer: str, expert: int) -> int:
    """For the weights of one expert: the same on whichever ranks own it."""
    digest = hashlib.sha256(f"{seed} {layer} {expert}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


@contextmanager
def _random_from(device: torch.device) -> Iterator[None]:
    """A block that may seed torch's random numbers, and leaves them as they were."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield


def _reported(model: nn.Module, found: Sequence[Found], dense: Sequence[Named]) -> str:
    """See ``MetaModel.make_real``."""
    by = {type(each).__name__ for each in outermost(model)} or {"its modules' reset_parameters"}
    num_weights = sum(isinstance(named.tensor, nn.Parameter) for named in dense)
    return (
        f"the model came on the meta device: {num_weights} dense weights and "
        f"{len(dense) - num_weights} buffers were made alike on every rank, and each rank drew its "
        f"own experts of {len(found)} layers, by the initialisers of {', '.join(sorted(by))}; "
        "load a checkpoint for other values"
    )


# Weights and buffers as a model itself initialises them, module by module. Models of transformers
# have an initialiser for all that they have (``initialize_weights``), which is also what
# ``from_pretrained`` calls for weights that a file lacks. Other modules have torch's
# ``reset_parameters``, and maybe an ``_init_weights(module)`` that their constructor applies.


DONE = "_is_hf_initialized"
"""Mark of transformers on what its initialisers shall leave alone."""


class Named(NamedTuple):
    """A weight or a buffer of a model."""

    name: str  # dotted, of the first place where it is
    tensor: Tensor  # it
    module: nn.Module  # that has it there


def tensors_of(model: nn.Module) -> Iterator[Named]:
    """All weights and buffers, each once, in model order."""
    seen = set[int]()
    for path, module in named_modules(model):
        for name, tensor in own_tensors(module):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield Named(f"{path}.{name}".removeprefix("."), tensor, module)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights and buffers of a module without those within."""
    for name, tensor in chain(module._parameters.items(), module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def is_of_transformers(module: nn.Module) -> bool:
    """Whether it is a model that initialises all within it."""
    return hasattr(module, "initialize_weights") and hasattr(module, "_init_weights")


def outermost(module: nn.Module) -> Iterator[nn.Module]:
    """The models of transformers, without those within others."""
    if is_of_transformers(module):
        yield module
        return
    for child in module.children():
        yield from outermost(child)


def initialize(model: nn.Module, writes: Writes) -> None:
    """Run the initialisers of a model."""
    for module in model.modules():
        if hasattr(module, DONE):
            delattr(module, DONE)
    with torch.no_grad(), writes.recording():
        _initialize(model, set())
    within = [module for each in outermost(model) for module in each.modules()]
    for module in dict.fromkeys(within):  # what transformers does not know, as a user's experts
        own = [tensor for _, tensor in own_tensors(module)]
        left = [tensor for tensor in own if not writes.count(tensor)]
        if left and (reset := _reset_of(module)) is not None:
            writes.keep(tensor for tensor in own if writes.count(tensor))
            with torch.no_grad(), writes.recording():
                _run_initializer(module, reset)


def _initialize(module: nn.Module, seen: set[int]) -> None:
    """As constructors do: what is within a module first."""
    if id(module) in seen:
        return
    seen.add(id(module))
    code: Any = module
    if is_of_transformers(module):
        _run_initializer(module, code.initialize_weights)
        return
    for child in module.children():
        _initialize(child, seen)
    if (reset := _reset_of(module)) is not None:
        _run_initializer(module, reset)
    if hasattr(module, "_init_weights"):  # as in nanoGPT
        _run_initializer(module, lambda: code.apply(code._init_weights))


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        reset: Callable[[], Any] | None = getattr(module, name, None)
        if callable(reset):
            return reset
    return None


def _run_initializer(module: nn.Module, initializer: Callable[[], Any]) -> None:
    try:
        initializer()
    except Exception as error:  # whatever a model of the user's raises
        raise ValueError(
            f"the model lies on the meta device, and the initialiser of {type(module).__name__} "
            f"fails there ({error!r}); {REMEDY}"
        ) from error


REMEDY = "build the model on the CPU, where each rank can hold all of it, or under zero.Init"
