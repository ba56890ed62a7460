# SPDX-License-Identifier: Apache-2.0
"""``torch.compile`` and replaced layers: Dynamo breaks its graph there, and names stay plain.

What is between the layers is compiled as the user asked; rows travel between ranks by schedules
that no graph can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

WRAPPED = "_orig_mod"
"""Where ``torch.compile(module)`` keeps the module that it wraps."""


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which runs as it is inside of what is compiled.

    Not as a decorator: that would import Dynamo with the host."""
    broken: Callable[..., Any] = torch.compiler.disable(
        function, reason="ds_moe_ext exchanges rows between ranks here; fullgraph must be false"
    )
    return broken


def stepped_into(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which runs as it is inside of what is compiled; what it calls is compiled."""
    skipped: Callable[..., Any] = torch.compiler.disable(function, recursive=False)
    return skipped


class Compilable:
    """A model's forward, which the user may compile at any time.

    Args:
        forward: the model's own.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = self._run = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Backward goes through some graphs twice, which may then free nothing the first time. It is
        # said for good: calls begin in many threads before others have ended, and torch keeps its
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
