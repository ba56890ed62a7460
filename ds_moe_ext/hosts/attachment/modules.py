# SPDX-License-Identifier: Apache-2.0
"""Checks of a host's modules: compiled ones, duplicates, hooks that would be lost, tied weights,
and layers with experts that nobody describes."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch import config as functorch_config

from ds_moe_ext.hosts.attachment.host_layer import Found, Wanted
from ds_moe_ext.strategies.settings import BLOCK

WRAPPED = "_orig_mod"  # where ``torch.compile(module)`` keeps the module that it wraps


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which runs as it is inside of what is compiled.

    Not as a decorator: that would import Dynamo with the host."""
    broken: Callable[..., Any] = torch.compiler.disable(
        function, reason="ds_moe_ext runs an all-to-all here; fullgraph must be false"
    )
    return broken


def stepped_into(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which runs as it is inside of what is compiled; what it calls is compiled."""
    skipped: Callable[..., Any] = torch.compiler.disable(function, recursive=False)
    return skipped


class Compilable:
    """A model's own forward, which the user may compile at any time."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = self._run = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Backward goes through some graphs twice, which may then free nothing the first time. It is
        # set for good: calls begin in many threads before others have ended, and torch keeps its
        # settings for each thread, or before 2.12 for all at once.
        if functorch_config.donated_buffer:
            functorch_config.donated_buffer = False
        return self._run(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """In the place of ``nn.Module.compile``, with its arguments."""
        self._run = torch.compile(self._forward, *args, **kwargs)


def plain(name: str) -> str:
    """A dotted name as it is in the model that is not compiled."""
    return without(WRAPPED, name)


def without(wrapper: str, name: str) -> str:
    """A dotted name without the parts that are a wrapper's."""
    return ".".join(part for part in name.split(".") if part != wrapper)


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules by their plain names, which ``get_submodule`` takes as well."""
    return ((plain(name), module) for name, module in model.named_modules())


def unwrapped(model: nn.Module) -> nn.Module:
    """What ``torch.compile`` was given; the model itself if it was not."""
    inner: nn.Module = model._modules.get(WRAPPED) or model
    return inner


def no_duplicate(name: str) -> TypeError:
    """The error for a user who copies a model, as for averaged weights, or pickles it."""
    return TypeError(
        f"{name} is run by ds_moe_ext on experts of all ranks, and cannot be copied "
        "(copy.deepcopy, AveragedModel) or pickled (torch.save of a model). For averaged "
        "weights, copy the model before its layers are replaced, and average "
        "ds_moe_ext.full_state_dict(model) into the copy; to save, use full_state_dict or a "
        "checkpoint"
    )


def warn_of_hooks(name: str, module: nn.Module, inside: str = "") -> None:
    """Report, on rank 0, hooks that go with a module and its weights."""
    hooked = []  # modules with weights and weights that have hooks of passes
    root, prefix = module.get_submodule(inside), f"{name}.{inside}" if inside else name
    for inner, each in root.named_modules(prefix=prefix):
        if hooks_of(each) and next(each.parameters(), None) is not None:
            hooked.append(inner)
        for weight, parameter in each.named_parameters(recurse=False):
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                hooked.append(f"{inner}.{weight}")
    if hooked and dist.get_rank() == 0:
        names = ", ".join(hooked[:3]) + (", ..." if len(hooked) > 3 else "")
        warnings.warn(
            f"{names} had hooks before ds_moe_ext replaced the experts of {name}; these are "
            f"not called any more. Register hooks afterwards, on the new module at {name} or "
            "on its parameters (each rank has those of its own experts)",
            stacklevel=2,
        )


def hooks_of(module: nn.Module) -> list[Any]:
    """A module's own hooks of passes, from where torch keeps them."""
    kept = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return [hook for hooks in kept for hook in hooks.values()]


_WHY = (
    "ds_moe_ext gives each expert its own parameters, which would no longer be shared; give "
    "each its own weights, share the whole experts module, or leave this layer out with "
    "ds_moe_ext.moe_layer_pattern"
)


def check_not_tied(model: nn.Module, found: Sequence[Found]) -> None:
    """A module that stands at several places of a model is replaced at all of them, but of a weight
    that two modules have each would get one of its own. Raises ValueError where a weight of an
    expert is another's too, or that of a module elsewhere; a layer that does not say how it keeps
    its weights is not looked at."""
    owners: dict[int, list[nn.Module]] = {}  # of a parameter
    for module in model.modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append(module)
    for layer in found:
        experts = model.get_submodule(layer.name)
        inside = {id(inner) for inner in experts.modules()}
        for weight in _weights(layer, experts):
            outside = next((each for each in owners[weight] if id(each) not in inside), None)
            if outside is not None:
                reported = next(other for other, each in named_modules(model) if each is outside)
                raise ValueError(
                    f"a weight of experts of {layer.name} is tied to one of "
                    f"{reported or 'the model'}; {_WHY}"
                )


def _weights(layer: Found, experts: nn.Module) -> Iterable[int]:
    """The ids of the parameters that have a layer's weights, of which no two are one."""
    used: dict[int, list[str]] = {}  # of a parameter, which of its places are an expert's
    for each in layer.stored:
        for expert in range(layer.num_experts):
            place = str(each.place(experts, expert))
            places = used.setdefault(id(each.of(experts, expert)), [])
            if place in places:
                raise ValueError(
                    f"a weight of expert {expert} of {layer.name} is tied to one of another expert "
                    f"of it, or to another weight of its own; {_WHY}"
                )
            places.append(place)
    return used


def unknown_experts(model: nn.Module, known: Collection[str], wanted: Wanted) -> list[str]:
    """Modules with weights that have "expert" in their name or class, beside the layers that are
    ``known``, one text for all of a class that differ in the numbers of their name only; shared
    experts are dense."""
    seen: list[str] = [*known]
    counts: Counter[tuple[str, str]] = Counter()
    for name, module in named_modules(model):
        kind = type(module).__name__
        text = f"{name.rpartition('.')[2]} {kind}".lower()
        if "expert" not in text or "shared" in text or next(module.parameters(), None) is None:
            continue
        inside = (f"{name}.".startswith(f"{o}.") or f"{o}.".startswith(f"{name}.") for o in seen)
        if not wanted(name) or any(inside):
            continue
        seen.append(name)
        counts[re.sub(r"\b\d+\b", "*", name), kind] += 1
    return [f"{name} ({kind}, {count})" for (name, kind), count in counts.items()]


def warn_of_unknown(unknown: Sequence[str]) -> None:
    """Report that some stay as they are."""
    if unknown:
        warnings.warn(
            f"{BLOCK}: these look like experts, but their classes are unknown to ds_moe_ext "
            f"and stay unchanged: {', '.join(unknown)}; register the classes with "
            f"ds_moe_ext.register_experts, or exclude them with {BLOCK}.moe_layer_pattern",
            stacklevel=2,
        )


@contextmanager
def during(owner: Any, **others: Any) -> Iterator[None]:
    """A block in which attributes of an object are these; methods that its class has come back."""
    before = {name: getattr(owner, name) for name in others if name in vars(owner)}
    for name, value in others.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in others:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
