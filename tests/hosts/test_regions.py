# SPDX-License-Identifier: Apache-2.0
"""Fragments of parts of weights, cut into rectangles, against slices of the whole weight."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_moe_ext.hosts.deepspeed.dcp_folder import Box, Region, rectangles
from ds_moe_ext.moe.sharding import Along, Shard

SETTINGS = settings(deadline=None, derandomize=True, max_examples=100)


class Split(NamedTuple):
    """A weight, and how the ranks of an ETP group split it."""

    whole: Tensor
    along: Along
    num_shards: int

    def shards(self) -> Iterator[Shard]:
        return (Shard((self.along,), i, self.num_shards) for i in range(self.num_shards))


@st.composite
def splits(draw: st.DrawFn) -> Split:
    num_dims = draw(st.integers(1, 4))
    along = Along(draw(st.integers(0, num_dims - 1)), draw(st.integers(1, 3)))
    num_shards = draw(st.sampled_from([1, 2, 3, 4]))
    shape = [draw(st.integers(1, 4)) for _ in range(num_dims)]
    shape[along.dim] *= along.num_blocks * num_shards
    return Split(torch.arange(prod(shape)).view(shape), along, num_shards)


def in_whole(whole: Tensor, box: Box) -> Tensor:
    """What the whole tensor has where a box lies."""
    ends = (offset + size for offset, size in zip(box.offsets, box.tensor.shape))
    return whole[tuple(slice(offset, end) for offset, end in zip(box.offsets, ends))]


def cut(draw: st.DataObject, numel: int) -> list[range]:
    """Fragments that tile a part."""
    cuts = draw.draw(st.lists(st.integers(0, numel), max_size=3))
    return [range(a, b) for a, b in pairwise(sorted({0, numel, *cuts}))]


@SETTINGS
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_rectangles_are_the_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    found = list(rectangles(shape, start, stop))
    boxes = [
        in_whole(whole, Box(torch.empty(sizes), offsets)).flatten() for offsets, sizes in found
    ]
    assert torch.cat([torch.empty(0), *boxes]).tolist() == list(range(start, stop))
    assert len(found) <= 2 * len(shape) - 1


def test_a_matrix_takes_three_rectangles() -> None:
    assert list(rectangles((4, 5), 3, 17)) == [
        ((0, 3), (1, 2)),
        ((1, 0), (2, 5)),
        ((3, 0), (1, 2)),
    ]


@SETTINGS
@given(split=splits(), data=st.data())
def test_boxes_lie_where_the_part_does(split: Split, data: st.DataObject) -> None:
    """Those of all fragments of all parts are the whole weight, each element once."""
    seen: list[int] = []
    for shard in split.shards():
        part = shard.of(0, split.whole)
        region = Region.of_shard(shard, 0, part.shape)
        assert region.shape == split.whole.shape
        assert region.part_shape == part.shape
        assert region.is_whole == (split.num_shards == 1)
        assert torch.equal(region.of(split.whole), part)
        flat = part.reshape(-1)
        for fragment in cut(data, part.numel()):
            own = flat[fragment.start : fragment.stop]
            kept = region.part(own, fragment.start)
            assert kept.shape == split.whole.shape
            assert all(torch.equal(box.tensor, in_whole(split.whole, box)) for box in kept.boxes)
            assert sum(box.tensor.numel() for box in kept.boxes) == len(fragment)
            seen += own.tolist()
    assert sorted(seen) == split.whole.flatten().tolist()


@SETTINGS
@given(split=splits(), data=st.data())
def test_what_is_written_to_boxes_is_in_the_fragment(split: Split, data: st.DataObject) -> None:
    """They are views; of the rows around it one for each stretch is enough."""
    for shard in split.shards():
        flat = shard.of(0, split.whole).reshape(-1)
        region = Region.of_shard(shard, 0, shard.of(0, split.whole).shape)
        for fragment in cut(data, flat.numel()):
            begin, end = region.rows_around(fragment.start, fragment.stop)
            assert begin <= fragment.start and fragment.stop <= end
            rows = torch.full((end - begin,), -1)
            boxes = region.part(rows, begin).boxes
            for box in boxes:
                box.tensor.copy_(in_whole(split.whole, box))
            assert torch.equal(rows, flat[begin:end])
            assert len(boxes) <= split.along.num_blocks


def test_no_elements_have_no_boxes() -> None:
    region = Region.all_of((4, 5))
    assert region.rows_around(7, 7) == (7, 7)
    assert region.part(torch.empty(0), 7).boxes == ()


def test_a_weight_without_dims_has_one_element() -> None:
    (box,) = Region.of_shard(Shard(), 0, ()).part(torch.ones(1), 0).boxes
    assert box.offsets == (0,) and box.tensor.shape == (1,)
