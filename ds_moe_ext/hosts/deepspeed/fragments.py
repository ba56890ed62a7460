"""What one rank keeps of weights, read from a folder however other ranks cut and wrote them.

Shape letters: F elements of a fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ds_moe_ext.hosts.deepspeed import dcp_folder
from ds_moe_ext.hosts.deepspeed.dcp_folder import Part
from ds_moe_ext.hosts.deepspeed.regions import Region


class Fragment(NamedTuple):
    """Elements ``[start, stop)`` of what a rank has of a weight.

    Attributes:
        region: what it has.
        start: the first element, of the flattened part.
        stop: one past the last.
        dtype: to read it as.
    """

    region: Region
    start: int
    stop: int
    dtype: torch.dtype


class _Landing(NamedTuple):
    """Where a fragment arrives.

    Attributes:
        part: what is read, which may be more.
        take: the fragment, ``[F]``, once that was read.
    """

    part: Part
    take: Callable[[], Tensor]


def read(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], fragments: Mapping[str, Fragment]
) -> dict[str, Tensor]:
    """Each fragment, ``[F]`` in host memory, by its tensor's name. Not collective.

    Args:
        folder: see ``dcp_folder.load``.
        shapes: in which each tensor is kept there: its own, or flat.
        fragments: what to read, by the tensor's name.

    Raises:
        ValueError: a file is missing or damaged.
    """
    landings = {name: _landing(each, shapes[name]) for name, each in fragments.items()}
    dcp_folder.load(folder, {name: landing.part for name, landing in landings.items()})
    return {name: landing.take() for name, landing in landings.items()}


def _landing(fragment: Fragment, shape: tuple[int, ...]) -> _Landing:
    region, start, stop, dtype = fragment
    if shape != region.shape:  # kept flat, where a split weight is in too many pieces to read each
        if start < stop and not region.is_whole:
            return _from_whole(fragment)
        region = Region.all_of(shape)
    begin, end = region.rows_around(start, stop)
    rows = torch.empty(end - begin, dtype=dtype)
    return _Landing(region.part(rows, begin), lambda: rows[start - begin : stop - begin])


def _from_whole(fragment: Fragment) -> _Landing:
    region, start, stop, dtype = fragment
    weight = torch.empty(region.shape, dtype=dtype)
    flat = Region.all_of((weight.numel(),)).part(weight.view(-1), 0)
    return _Landing(flat, lambda: region.of(weight).view(-1)[start:stop])
