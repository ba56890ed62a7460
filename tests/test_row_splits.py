# SPDX-License-Identifier: Apache-2.0
"""How rows split, by the C code, beside what the rules of shares say.

Shape letters: E experts, C EP ranks, P places in an ETP group, F chunks of a rank.
"""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.core import compiled, rows
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.rows import RowSplits, split
from ds_moe_ext.core.share import LocalElseOwner, NearestReplica, Share, received_by_slot
from tests.planners.plainly import PROPERTY


class Case(NamedTuple):
    """One pass of an EP rank."""

    share: Share
    target: Placement
    ep_rank: int
    rows_CPFE: np.ndarray
    place: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_experts, num_ep_ranks = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    owner = Placement.owned_by(rng.integers(0, num_ep_ranks, num_experts), num_ep_ranks)
    density = draw(st.sampled_from([0.0, 0.3, 1.0]))
    target = owner.with_replicas(rng.random((num_experts, num_ep_ranks)) < density)
    if draw(st.booleans()):
        target = Placement(target.holds_EC)  # slots in the order of experts
    nodes = rng.integers(0, 3, num_ep_ranks)
    # Of layers planned together tables are parts of larger ones.
    nearest, _ = NearestReplica.of_layers([target, owner], nodes)
    share: Share = nearest if draw(st.booleans()) else LocalElseOwner(owner, target)
    shape = num_ep_ranks, draw(st.integers(1, 3)), draw(st.integers(1, 3))
    most = draw(st.sampled_from([0, 1, 7, 10**12]))
    # Behind the rows of experts counts report other things.
    reported = rng.integers(0, most + 1, (*shape, num_experts + draw(st.integers(0, 2))))
    place = draw(st.integers(0, shape[1] - 1))
    ep_rank = draw(st.integers(0, num_ep_ranks - 1))
    return Case(share, target, ep_rank, reported[..., :num_experts], place)


def tables(splits: RowSplits) -> list[object]:
    """To compare."""
    *reported, moved = splits
    return [each.tolist() for each in (*reported, *(moved or ()))]


def moving(case: Case) -> RowSplits:
    """As where the send order is not known beforehand."""
    return split(*case, has_moves=True)


@PROPERTY
@given(cases())
def test_rows_split_as_shares_say(case: Case) -> None:
    share, target, ep_rank, rows_CPFE, place = case
    with mock.patch.object(rows, "_by_code", wraps=rows._by_code) as by_code:
        splits = moving(case)
    assert by_code.called == isinstance(share, NearestReplica)
    with mock.patch.object(rows, "_code", lambda: None):
        assert tables(splits) == tables(moving(case))
    assert tables(split(*case, has_moves=False)) == tables(splits._replace(moved=None))

    sent_FEC = share.rows_from(ep_rank, rows_CPFE[ep_rank, place])
    assert splits.sent_FC.tolist() == sent_FEC.sum(axis=1).tolist()
    for each, received_CFS in enumerate(splits.received_PCFS):
        expected_CFS = received_by_slot(share, target, ep_rank, rows_CPFE[:, each])
        assert received_CFS.tolist() == expected_CFS.tolist()
    received_FC = splits.received_PCFS[place].sum(axis=2).T
    assert splits.received_FC.tolist() == received_FC.tolist()
    if sent_FEC.sum() > 10**6:
        return
    # Rows by chunk, expert and holder, each known by its holder and slot.
    places = [
        (chunk, holder, int(target.slot_EC[expert, holder]))
        for chunk, expert, holder in np.ndindex(sent_FEC.shape)
        for _ in range(sent_FEC[chunk, expert, holder])
    ]
    assert splits.moved is not None
    shift, length = splits.moved
    index = np.repeat(shift, length) + np.arange(length.sum())
    assert [places[place] for place in index] == sorted(places)


def test_other_shares_split_by_their_own_rules() -> None:
    """A rule that a user has made of ours, and rows that C does not read."""
    owner = Placement.block(4, 2)
    target = owner.with_replicas(np.array([[0, 1], [0, 0], [0, 0], [1, 0]], dtype=bool))

    class Halves(NearestReplica):
        """Of another's."""

    rows_CPFE = np.arange(8).reshape(2, 1, 1, 4)
    nearest = NearestReplica(target, np.zeros(2, dtype=np.int64))
    case = Case(nearest, target, 1, rows_CPFE, 0)
    expected = tables(moving(case))
    halves = Halves(target, np.zeros(2, dtype=np.int64))
    with mock.patch.object(rows, "_by_code") as by_code:
        assert tables(moving(case._replace(share=halves))) == expected
        assert tables(moving(case._replace(rows_CPFE=np.asfortranarray(rows_CPFE)))) == expected
        elsewhere = moving(case._replace(target=owner))
        assert elsewhere.received_PCFS.shape == (1, 2, 1, 2)
    assert not by_code.called


def test_where_nothing_can_be_compiled_numpy_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(name: str) -> None:
        raise RuntimeError("there is no compiler")

    assert rows.quick is compiled.quick
    monkeypatch.setattr(compiled, "library", refuses)
    rows._row_splits_code.cache_clear()
    try:
        owner = Placement.block(2, 2)
        share = NearestReplica(owner, np.zeros(2, dtype=np.int64))
        splits = moving(Case(share, owner, 0, np.array([[[[5, 2]]], [[[1, 4]]]]), 0))
        assert splits.sent_FC.tolist() == [[5, 2]]
        assert splits.received_FC.tolist() == [[5, 1]]
        assert splits.received_PCFS.tolist() == [[[[5]], [[1]]]]
    finally:
        rows._row_splits_code.cache_clear()
