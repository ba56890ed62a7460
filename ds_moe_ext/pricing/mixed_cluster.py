# SPDX-License-Identifier: Apache-2.0
"""Clusters of unlike devices side by side, as one. Pure.

Ranks are those of the first cluster, then those of the next. All ranks meet in every exchange, so
that a link, a memory and what all devices compute alike are those of the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import TypeVar

from ds_moe_ext.hardware import Collectives, Device, Hardware, Link, Product, Products

T = TypeVar("T")


def joined(clusters: Sequence[Hardware]) -> Hardware:
    """One cluster with the slowest of all parts.

    Args:
        clusters: one or more, as they are reckoned with (``Reached.of``).

    Raises:
        ValueError: their nodes have different numbers of ranks.
    """
    first = clusters[0]
    if len(clusters) == 1:
        return first
    sizes = [each.ranks_per_node for each in clusters]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"nodes of {' and '.join(map(str, sizes))} ranks cannot be priced together; describe "
            "clusters whose nodes have equally many"
        )
    return replace(
        first,
        name=" + ".join(each.name for each in clusters),
        source="; ".join(each.source for each in clusters),
        num_nodes=sum(each.num_nodes for each in clusters),
        device=_slowest_device([each.device for each in clusters]),
        intra=_least((each.intra for each in clusters), _rate),
        inter=_least((each.inter for each in clusters), _rate),
        # What was measured within one of them says nothing of all together.
        intra_collectives=Collectives(),
        inter_collectives=Collectives(),
        copy=None,
    )


def _slowest_device(devices: Sequence[Device]) -> Device:
    lines = {
        each.name: _least((device.product(each.name) for device in devices), _speed)
        for each in fields(Products)
    }
    return Device(
        name=" and ".join(dict.fromkeys(device.name for device in devices)),
        memory_bytes=_least((device.memory_bytes for device in devices), float),
        memory_bytes_per_s=_least((device.memory_bytes_per_s for device in devices), float),
        products=Products(**lines),
    )


def _rate(link: Link) -> float:
    return link.bytes_per_s


def _speed(line: Product) -> float:
    return line.multiply_adds_per_s


def _least(values: Iterable[T | None], key: Callable[[T], float]) -> T | None:
    """None where it is not known of all."""
    known = list(values)
    found = [value for value in known if value is not None]
    return min(found, key=key) if len(found) == len(known) else None
