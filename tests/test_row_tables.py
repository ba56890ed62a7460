# SPDX-License-Identifier: Apache-2.0
"""Indices of rows by the C code, beside numpy's.

Shape letters: G chunk ranges, X blocks as they came, S expert slots.
"""

from __future__ import annotations

from itertools import combinations
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_moe_ext.core import compiled, kernels, rows
from ds_moe_ext.core.rows import Moved, place_of
from ds_moe_ext.moe.slot_rows import SlotSortings

CPU = torch.device("cpu")


def index_of_blocks(table: Tensor, num_blocks: int, num_rows: int) -> Tensor:
    """What the kernel computes."""
    shift, end = table[:num_blocks].numpy(), table[num_blocks : 2 * num_blocks].numpy()
    index = np.repeat(shift, np.diff(end, prepend=0)) + np.arange(num_rows)
    return torch.from_numpy(index.astype(np.int32))


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(0, 4)),
    st.sampled_from(["contiguous", "transposed"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_indices_are_numpys(
    shape: tuple[int, int, int], layout: str, has_beside: bool, has_kernels: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows_GXS = rng.integers(0, 4, shape) * rng.integers(0, 2, shape)
    if layout == "transposed":
        rows_GXS = np.asfortranarray(rows_GXS)
    lengths = rng.integers(0, 4, rng.integers(0, 6))
    beside = Moved(rng.integers(-9, 9, lengths.size), lengths) if has_beside else None
    with (
        mock.patch.object(kernels, "are_there", lambda device: has_kernels),
        mock.patch.object(kernels, "index_of_blocks", index_of_blocks),
    ):
        num_firsts = int(rng.integers(0, max(1, shape[2])))
        ours = SlotSortings(rows_GXS, CPU, beside, num_firsts)
        with mock.patch.object(rows, "are_there", lambda: False):
            numpys = SlotSortings(rows_GXS, CPU, beside, num_firsts)._made
        assert rows.are_there()
        indices, ends = ours._made
    assert [each.tolist() for each in indices] == [each.tolist() for each in numpys[0]]
    assert [each.tolist() for each in ends] == [each.tolist() for each in numpys[1]]
    assert {each.dtype for each in (*indices, *ends)} == {torch.int32}
    for number, sorting in enumerate(ours.each()):
        num_rows = int(rows_GXS[number].sum())
        came = torch.arange(num_rows)
        assert torch.equal(sorting.back(sorting.to_slots(came)), came)
        rows_S = rows_GXS[number].sum(axis=0)
        assert sorting.slots.end_S.tolist() == rows_S.cumsum().tolist()
        for start, stop in combinations(range(shape[2] + 1), 2):
            own = sorting.slots.between(start, stop)
            assert own.end_S.tolist() == rows_S[start:stop].cumsum().tolist()
            assert own.num_rows == rows_S[start:stop].sum()


def test_a_rank_without_experts_and_rows() -> None:
    """It has no table at all."""
    nothing = Moved(np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.int64))
    (index,), ends = SlotSortings(np.zeros((2, 2, 0), dtype=np.int64), CPU, nothing)._made
    assert index.tolist() == []
    assert [each.tolist() for each in ends] == [[], []]


def test_where_nothing_can_be_compiled_numpy_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(name: str) -> None:
        raise RuntimeError("there is no compiler")

    assert rows.quick is compiled.quick
    monkeypatch.setattr(compiled, "library", refuses)
    rows._code.cache_clear()
    try:
        assert not rows.are_there()
        (sorting,) = SlotSortings(np.array([[[1, 2], [3, 0]]]), CPU).each()
        # Blocks A, B / C, D of lengths 1, 2 / 3, 0 lie as A0 B1 B2 C3 C4 C5.
        assert sorting.to_slots(torch.arange(6)).tolist() == [0, 3, 4, 5, 1, 2]
    finally:
        rows._code.cache_clear()


def test_where_arrays_lie() -> None:
    whole = np.arange(12).reshape(3, 4)
    frozen = np.arange(3)
    frozen.setflags(write=False)
    for array in (whole, whole[:, 1:], whole.T, frozen, whole[:0], np.zeros(0)):
        assert place_of(array) == array.ctypes.data
