# SPDX-License-Identifier: Apache-2.0
"""One parameter for a weight of all experts of a rank, where an engine may take them as one: what
it does for each parameter it then does once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from ds_moe_ext.hosts.attachment.experts import HostedExperts
from ds_moe_ext.hosts.attachment.host_layer import Adopted
from ds_moe_ext.hosts.attachment.replacement import AttachedLayer


def numbers_of_groups(optimizer: Any) -> Mapping[int, int]:
    """The parameter group of each parameter, by its ``id``, of an optimizer that a user has made;
    of none, nothing: DeepSpeed refuses one parameter from several groups by itself."""
    is_made = isinstance(optimizer, torch.optim.Optimizer)
    groups = optimizer.param_groups if is_made else ()
    return {id(p): number for number, group in enumerate(groups) for p in group["params"]}


def stacked(layer: AttachedLayer, adopted: Adopted, groups: Mapping[int, int]) -> Adopted:
    """With one parameter a weight, where the experts are no modules of their own, and all of them
    are trained or none, by one group of the user's.

    Args:
        layer: a replaced one.
        adopted: what became of its parameters.
        groups: see ``numbers_of_groups``.
    """
    if not isinstance(layer.hosted, HostedExperts):
        return adopted
    columns = list(zip(*(slot.parameters for slot in layer.hosted.slots())))
    if any(_differ(column, adopted, groups) for column in columns):
        return adopted
    of_first = {
        column[0]: chain.from_iterable(adopted.sources[p] for p in column) for column in columns
    }
    apart = set(layer.parameters)
    made = {
        stack: tuple(dict.fromkeys(of_first[one])) for stack, one in layer.hosted.stack().items()
    }
    others = {new: old for new, old in adopted.sources.items() if new not in apart}
    return replace(adopted, sources=others | made)


def _differ(weights: Sequence[nn.Parameter], adopted: Adopted, groups: Mapping[int, int]) -> bool:
    """Whether some are trained otherwise than others."""
    kinds = {
        (weight.requires_grad, groups.get(id(source)))
        for weight in weights
        for source in adopted.sources[weight]
    }
    return len(kinds) > 1
