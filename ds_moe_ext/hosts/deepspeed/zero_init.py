# SPDX-License-Identifier: Apache-2.0
"""Models built under ``deepspeed.zero.Init``: all weights are sharded before layers are replaced.

A layer's experts are gathered while it is replaced, one layer at a time, and a rank keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from deepspeed.runtime.zero import ZeroParamStatus
from deepspeed.runtime.zero.utils import is_zero_param
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.host_layer import Adopted, Found, RoutedOf
from ds_moe_ext.hosts.deepspeed.shards import whole
from ds_moe_ext.moe.sharding import Shard


def is_of(model: nn.Module) -> bool:
    """Whether a model was built so."""
    return any(map(is_zero_param, model.parameters()))


@contextmanager
def described(model: nn.Module) -> Iterator[None]:
    """A block in which weights have their shapes, though their elements take no memory and mean
    nothing. Else one that is not gathered has no elements."""
    parameters: list[Any] = [p for p in model.parameters() if is_zero_param(p)]
    released = [p for p in parameters if p.shape != p.ds_shape]
    for parameter in released:
        parameter.data = parameter.data.new_empty(()).expand(parameter.ds_shape)
    try:
        yield
    finally:
        for parameter in released:
            if parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                parameter.data = parameter.data.new_empty(0)


def gathering(model: nn.Module, found: Found) -> Found:
    """A layer that gathers its weights while it is replaced, if they are sharded."""
    weights: list[Any] = list(model.get_submodule(found.name).parameters())
    if not any(map(is_zero_param, weights)):
        return found

    def adopt(held: Tensor, shard: Shard, routed_of: RoutedOf) -> Adopted:
        of_zero = _marks_of_zero(weights[0])
        of_user = {weight: vars(weight).keys() - of_zero for weight in weights}
        with whole(weights):
            adopted = found.adopt(held, shard, routed_of)
        for parameter, (source,) in adopted.sources.items():
            for name in vars(parameter).keys() - of_user[source]:
                delattr(parameter, name)
        return adopted

    return replace(found, adopt=adopt)


def _marks_of_zero(sharded: Any) -> set[str]:
    """Names of what ZeRO puts on a parameter that it shards. Collective."""
    probe = nn.Parameter(torch.empty(1, dtype=sharded.dtype, device=sharded.device))
    sharded.convert_to_zero_parameters(param_list=[probe])
    return set(vars(probe))
