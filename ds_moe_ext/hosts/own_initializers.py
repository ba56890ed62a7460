# SPDX-License-Identifier: Apache-2.0
"""Weights and buffers as a model itself initialises them, module by module.

Models of transformers have an initialiser for all that they have (``initialize_weights``), which is
also what ``from_pretrained`` calls for weights that a file lacks. Other modules have torch's
``reset_parameters``, and maybe an ``_init_weights(module)`` that their constructor applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.modules import named_modules
from ds_moe_ext.hosts.attachment.recorded_writes import Writes, key_of

DONE = "_is_hf_initialized"
"""Mark of transformers on what its initialisers shall leave alone."""


class Named(NamedTuple):
    """A weight or a buffer of a model.

    Attributes:
        name: dotted, of the first place where it is.
        tensor: it.
        module: that has it there.
    """

    name: str
    tensor: Tensor
    module: nn.Module


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


def tie(model: nn.Module) -> None:
    """Tie weights as the models' configurations say: accelerate's ``init_empty_weights`` makes a
    parameter of each place."""
    tying: Iterable[Any] = outermost(model)
    for each in tying:
        each.tie_weights()


def initialize(model: nn.Module, writes: Writes) -> None:
    """Run the initialisers of a model.

    Args:
        model: in which what is to be initialised is blank, or has no elements.
        writes: what else is there, which stays as it is; told of all that is written.

    Raises:
        ValueError: one of them failed.
    """
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
                _run(module, reset)


def _initialize(module: nn.Module, seen: set[int]) -> None:
    """As constructors do: what is within a module first."""
    if id(module) in seen:
        return
    seen.add(id(module))
    code: Any = module
    if is_of_transformers(module):
        _run(module, code.initialize_weights)
        return
    for child in module.children():
        _initialize(child, seen)
    if (reset := _reset_of(module)) is not None:
        _run(module, reset)
    if hasattr(module, "_init_weights"):  # as in nanoGPT
        _run(module, lambda: code.apply(code._init_weights))


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        reset: Callable[[], Any] | None = getattr(module, name, None)
        if callable(reset):
            return reset
    return None


def _run(module: nn.Module, initializer: Callable[[], Any]) -> None:
    try:
        initializer()
    except Exception as error:  # whatever a model of the user's raises
        raise ValueError(
            f"the model lies on the meta device, and the initialiser of {type(module).__name__} "
            f"fails there ({error!r}); {REMEDY}"
        ) from error


REMEDY = "build the model on the CPU, where each rank can hold all of it, or under zero.Init"


def have_run(model: nn.Module) -> bool:
    """Whether initialisers of transformers have run where weights had no elements, as they do in
    accelerate's ``init_empty_weights``."""
    return any(hasattr(module, DONE) for module in model.modules())


class Overwritten(NamedTuple):
    """Names of what was written to more often, while it had no elements, than initialisers do:
    values of somebody else's, which are lost.

    Attributes:
        of_transformers: within models of transformers.
        of_others: of modules elsewhere.
    """

    of_transformers: list[str]
    of_others: list[str]


def overwritten(
    model: nn.Module, before: Sequence[tuple[Named, int]], writes: Writes
) -> Overwritten:
    """See ``Overwritten``.

    Args:
        model: that has been initialised.
        before: what of it had no elements, and how often each had been written to.
        writes: what initialisers did.
    """
    known = {key_of(named.tensor) for each in outermost(model) for named in tensors_of(each)}
    more = [named for named, count in before if writes.count(named.tensor) < count]
    return Overwritten(
        [named.name for named in more if key_of(named.tensor) in known],
        [named.name for named in more if key_of(named.tensor) not in known],
    )
