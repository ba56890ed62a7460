# SPDX-License-Identifier: Apache-2.0
"""What must be the same on all ranks of a run, as texts that ranks compare as it starts.

Ranks that plan from unlike settings, or run other code, would wait for each other in vain. What
says where a rank writes, and what it shows to a person, may differ: all of ``report`` but
``trace_step``, and the path of ``trace``, though not whether there is one: ranks send their tasks
to the first. A hardware file is compared by what is in it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ds_moe_ext.attachment.host_layer import Found
from ds_moe_ext.attachment.meeting import Description
from ds_moe_ext.hardware import read_hardware
from ds_moe_ext.settings import BLOCK, Settings
from ds_moe_ext.strategy import Choosing, registered
from ds_moe_ext.strict import read_record

_AS_WRITTEN = ("gate", "hooks", "options")
"""Keys of the block whose values may be objects of the user's own: their JSON is compared."""

_APART = ("enabled", "hardware", "report", "trace")


def versions(host: str, version: str) -> Description:
    """Of what makes plans and moves data. What follows a + (as of CUDA) may differ, as on nodes of
    two kinds; of Python what follows the second number.

    Args:
        host: name of the host's package.
        version: of it.
    """
    try:
        own = importlib.metadata.version("ds_moe_ext")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        own = "unknown"
    found = {
        "ds_moe_ext": own,
        host: version,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    return {f"the version of {name}": text.partition("+")[0] for name, text in found.items()}


def settings_of(settings: Settings, block: Mapping[str, Any]) -> Description:
    """What the block asks for, by key.

    Args:
        settings: what was read.
        block: from which it was.
    """
    told: dict[str, str] = {}
    for field in dataclasses.fields(settings):
        where = f"{BLOCK}.{field.name}"
        if field.name in _AS_WRITTEN:
            told[where] = _text(block.get(field.name) or None)
        elif field.name not in _APART:
            told.update(_flat(where, getattr(settings, field.name)))
    told[f"{BLOCK}.report.trace_step"] = _text(settings.report.trace_step)
    trace = settings.trace
    steps = {"first_step": trace.first_step, "num_steps": trace.num_steps}
    told[f"{BLOCK}.trace"] = _text(None if trace.path is None else steps)
    for name in _blocks_read(settings):
        if name in registered():
            where = f"{BLOCK}.{name}"
            told.update(_flat(where, read_record(registered()[name], block.get(name) or {}, where)))
    hardware = None if settings.hardware is None else read_hardware(settings.hardware)
    told.update(_flat(f"{BLOCK}.hardware", hardware))
    return told


def _blocks_read(settings: Settings) -> list[str]:
    """Names of strategies whose keys count."""
    if issubclass(registered().get(settings.strategy, object), Choosing):
        return list(registered())
    return [name for name in (settings.strategy, settings.balance) if name is not None]


def layers_of(found: Iterable[Found]) -> Description:
    """The layers to be replaced, by name."""
    return {
        layer.name: f"{layer.num_experts} experts ({layer.kind}) of {_expert(layer)}"
        for layer in found
    }


def weights_of(model: nn.Module) -> Description:
    """Types and shapes of a model's weights, by name."""
    return {
        f"the weight {name}": f"{_type(weight.dtype)} {list(weight.shape)}"
        + ("" if weight.requires_grad else ", frozen")
        for name, weight in model.named_parameters()
    }


def empty_of(model: nn.Module) -> Description:
    """How many of a model's weights and buffers have no elements yet: ranks make them together."""
    tensors = [*model.parameters(), *model.buffers()]
    return {"weights and buffers on the meta device": str(sum(t.is_meta for t in tensors))}


def _expert(layer: Found) -> str:
    return ", ".join(
        f"{name} {list(shape)} {dtype.removeprefix('torch.')}{'' if is_trained else ' frozen'}"
        for name, shape, dtype, is_trained in layer.expert
    )


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _flat(where: str, value: Any) -> Iterator[tuple[str, str]]:
    """The fields of records, dotted."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _flat(f"{where}.{field.name}", getattr(value, field.name))
    else:
        yield where, _text(value)


def _text(value: Any) -> str:
    """As JSON has it; of an object of the user's own its class."""
    return json.dumps(value, sort_keys=True, default=lambda thing: type(thing).__qualname__)
