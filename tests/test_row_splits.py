# SPDX-License-Identifier: Apache-2.0
"""How rows split, by the C code, beside what the rules of shares say.

Shape letters: E experts, C cells, F chunks, O chunks of one rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext import compiled, row_splits
from ds_moe_ext.placement import Placement
from ds_moe_ext.row_splits import RowSplits, Splitting
from ds_moe_ext.share import LocalElseHome, NearestCopy, Share, received_by_slot
from tests.planners.plainly import PROPERTY


class Case(NamedTuple):
    """One pass of a cell."""

    share: Share
    target: Placement
    cell: int
    rows_CFE: np.ndarray
    own: slice


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_experts, num_cells = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    home = Placement.owned_by(rng.integers(0, num_cells, num_experts), num_cells)
    density = draw(st.sampled_from([0.0, 0.3, 1.0]))
    target = home.with_copies(rng.random((num_experts, num_cells)) < density)
    if draw(st.booleans()):
        target = Placement(target.holds_EC)  # slots in the order of experts
    nodes = rng.integers(0, 3, num_cells)
    # Of layers planned together tables are parts of larger ones.
    nearest, _ = NearestCopy.of_layers([target, home], nodes)
    share: Share = nearest if draw(st.booleans()) else LocalElseHome(home, target)
    num_chunks = draw(st.integers(1, 3))
    first = draw(st.integers(0, num_chunks - 1))
    own = slice(first, draw(st.integers(first + 1, num_chunks)))
    most = draw(st.sampled_from([0, 1, 7, 10**12]))
    # Behind the rows of experts counts tell other things.
    told = rng.integers(0, most + 1, (num_cells, num_chunks, num_experts + draw(st.integers(0, 2))))
    cell = draw(st.integers(0, num_cells - 1))
    return Case(share, target, cell, told[..., :num_experts], own)


def tables(splits: RowSplits) -> list[object]:
    """To compare."""
    moved = splits.moved and [each.tolist() for each in splits.moved]
    return [splits.there_and_here_2OC.tolist(), splits.received_CFS.tolist(), moved]


@PROPERTY
@given(cases(), st.booleans())
def test_rows_split_as_shares_say(case: Case, has_moves: bool) -> None:
    share, target, cell, rows_CFE, own = case
    splitting = Splitting(share, target, cell)
    assert splitting._bound is not None
    splits = splitting.of(rows_CFE, own, has_moves=has_moves)
    by_numpy = splitting._by_numpy(rows_CFE, own, has_moves=has_moves)
    assert tables(splits) == tables(by_numpy)

    sent_OEC = share.rows_from(cell, rows_CFE[cell, own])
    assert splits.there_and_here_2OC[0].tolist() == sent_OEC.sum(axis=1).tolist()
    received_CFS = received_by_slot(share, target, cell, rows_CFE)
    assert splits.received_CFS.tolist() == received_CFS.tolist()
    received_OC = received_CFS[:, own].sum(axis=2).T
    assert splits.there_and_here_2OC[1].tolist() == received_OC.tolist()
    if splits.moved is None or sent_OEC.sum() > 10**6:
        return
    # Rows by chunk, expert and holder, each known by its holder and slot.
    places = [
        (chunk, holder, int(target.slot_EC[expert, holder]))
        for chunk, expert, holder in np.ndindex(sent_OEC.shape)
        for _ in range(sent_OEC[chunk, expert, holder])
    ]
    shift, length = splits.moved
    index = np.repeat(shift, length) + np.arange(length.sum())
    assert [places[place] for place in index] == sorted(places)


def test_other_shares_split_by_their_own_rules() -> None:
    """A rule that a user has made of ours, and rows that C does not read."""
    home = Placement.block(4, 2)
    target = home.with_copies(np.array([[0, 1], [0, 0], [0, 0], [1, 0]], dtype=bool))

    class Halves(NearestCopy):
        """Of another's."""

    theirs, ours = (
        Splitting(kind(target, np.zeros(2, dtype=np.int64)), target, 1)
        for kind in (Halves, NearestCopy)
    )
    rows_CFE = np.arange(8).reshape(2, 1, 4)
    assert theirs._bound is None
    expected = tables(ours.of(rows_CFE, slice(0, 1), has_moves=True))
    assert tables(theirs.of(rows_CFE, slice(0, 1), has_moves=True)) == expected
    strided = np.asfortranarray(rows_CFE)
    assert tables(ours.of(strided, slice(0, 1), has_moves=True)) == expected
    elsewhere = replace(ours, target=home)
    assert elsewhere.of(rows_CFE, slice(0, 1), has_moves=False).received_CFS.shape == (2, 1, 2)


def test_where_nothing_can_be_compiled_numpy_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(name: str) -> None:
        raise RuntimeError("there is no compiler")

    assert row_splits.library is compiled.library
    monkeypatch.setattr(row_splits, "library", refuses)
    row_splits._code.cache_clear()
    try:
        home = Placement.block(2, 2)
        splitting = Splitting(LocalElseHome(home, home), home, 0)
        splits = splitting.of(np.array([[[5, 2]], [[1, 4]]]), slice(0, 1), has_moves=False)
        assert splits.there_and_here_2OC.tolist() == [[[5, 2]], [[5, 1]]]
        assert splits.received_CFS.tolist() == [[[5]], [[1]]]
    finally:
        row_splits._code.cache_clear()
