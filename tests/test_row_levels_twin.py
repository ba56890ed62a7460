# SPDX-License-Identifier: Apache-2.0
"""The twin of the C code in Python finds the same integers.

Shape letters: C cells, E experts, F chunks, K placements, N (copied expert, holder) pairs.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ds_moe_ext import testing
from ds_moe_ext.core import compiled, row_levels, row_levels_twin
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.row_levels import CompiledLayer, Division, RowLevels, WholePrices
from ds_moe_ext.core.row_levels_twin import TwinLayer
from ds_moe_ext.core.share import PLANNED_SWEEPS, SWEEPS
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.strategies.fssdp import FullySharded
from tests.planners.test_priced_share import cases
from tests.ranks import pool_of
from tests.test_row_levels import levels_of, many_rows, with_cards


@contextmanager
def nothing_compiles() -> Iterator[None]:
    """As in a process of a machine where the compiler refuses."""
    with mock.patch.dict("os.environ", {"CC": "/bin/false", "TORCH_EXTENSIONS_DIR": "/dev/null"}):
        compiled.library.cache_clear()
        row_levels.is_compiled.cache_clear()
        try:
            yield
        finally:
            compiled.library.cache_clear()
            row_levels.is_compiled.cache_clear()


class Both(NamedTuple):
    """What divides the rows of one layer."""

    compiled: RowLevels
    twin: RowLevels

    @classmethod
    def of(cls, levels: RowLevels) -> Both:
        twin = RowLevels(levels.target, levels.node_C, levels.prices)
        with mock.patch.object(row_levels, "is_compiled", lambda: False):
            twin.prepare()
        assert isinstance(levels._layer, CompiledLayer) and isinstance(twin._layer, TwinLayer)
        return cls(levels, twin)


class Pass(NamedTuple):
    """A layer, its rows, those it was planned for, other placements, and chunks."""

    levels: RowLevels
    rows_CE: np.ndarray
    planned_CE: np.ndarray
    holds_KEC: np.ndarray
    num_chunks: int


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    num_cells, num_experts = draw(st.integers(2, 16)), draw(st.integers(1, 32))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    node_C = 5 * rng.integers(0, draw(st.integers(1, 4)), num_cells) + 2
    density = draw(st.sampled_from([0.0, 0.1, 0.4, 1.0]))

    def placed() -> np.ndarray:
        holds_EC = rng.random((num_experts, num_cells)) < density
        holds_EC[np.arange(num_experts), rng.integers(0, num_cells, num_experts)] = True
        return holds_EC

    most = draw(st.sampled_from([1, 9, 300, 20_000, 500_000]))

    def routed() -> np.ndarray:
        part_E = rng.random(num_experts) ** draw(st.sampled_from([0, 4]))
        lacks_CE = rng.random((num_cells, num_experts)) < draw(st.sampled_from([0.0, 0.5]))
        return np.where(lacks_CE, 0, rng.integers(0, most + 1, lacks_CE.shape) * part_E).astype(int)

    row_s_C = np.full(num_cells, draw(st.sampled_from([0.0, 0.02, 1.0])))
    if draw(st.booleans()):
        row_s_C *= rng.uniform(1, 5, num_cells)
    local_s, cross_s = (draw(st.sampled_from([0.0, 0.1, 1.0, 5.0])) for _ in range(2))
    cards, worth_s = draw(st.sampled_from([1.0, 2.5])), draw(st.sampled_from([0.0, 100.0]))
    prices = WholePrices.of(row_s_C, local_s, cross_s, cards=cards, worth_s=worth_s)
    holds_KEC = np.stack([placed() for _ in range(3)])
    levels = RowLevels(Placement(placed()), node_C, prices)
    return Pass(levels, routed(), routed(), holds_KEC, draw(st.integers(1, 4)))


def numbers(division: Division) -> list[object]:
    """To compare; all are integers."""
    assert division.rows_N.dtype == division.part_N.dtype == np.int64
    rest = (*division.steps, division.mean, division.price)
    return [division.rows_N.tolist(), division.part_N.tolist(), *rest]


def check_travels(
    both: Both, rows_CE: np.ndarray, rows_N: np.ndarray, rows_CFE: np.ndarray
) -> None:
    for cell, rows_FE in enumerate(rows_CFE):
        sent = [each.sent(rows_CE, rows_N, cell, rows_FE) for each in both]
        assert np.array_equal(*sent) and sent[1].sum() == rows_FE.sum()
        received = [each.received(rows_CE, rows_N, cell, rows_CFE) for each in both]
        assert np.array_equal(*received)
        assert {each.dtype for each in (*sent, *received)} == {np.dtype(np.int64)}
    computed = [each.computed_EC(rows_CE, rows_N) for each in both]
    assert np.array_equal(*computed) and computed[1].sum() == rows_CE.sum()


@settings(deadline=None, derandomize=True, max_examples=40)
@given(passes(), st.sampled_from([0, 1, SWEEPS]), st.integers(0, 2**32 - 1))
def test_finds_what_c_finds(case: Pass, sweeps: int, seed: int) -> None:
    both, rng = Both.of(case.levels), np.random.default_rng(seed)
    plans = [each.divided(case.planned_CE, None, sweeps=PLANNED_SWEEPS) for each in both]
    plan = plans[0]
    assert numbers(plan) == numbers(plans[1])
    for rows_CE in (case.rows_CE, case.planned_CE):
        found, again = (each.divided(rows_CE, plan, sweeps=sweeps) for each in both)
        assert numbers(found) == numbers(again)
        rows_CFE = rng.multinomial(rows_CE, [1 / case.num_chunks] * case.num_chunks)
        check_travels(both, rows_CE, found.rows_N, rows_CFE.transpose(0, 2, 1))
    firsts = [
        each.first_below(plan, case.holds_KEC, case.planned_CE, sweeps=sweeps) for each in both
    ]
    first, again = (each and (each[0], numbers(each[1])) for each in firsts)
    assert first == again


def repaired(
    levels: RowLevels, rows_CE: np.ndarray, division: Division, **given: int
) -> tuple[int, object]:
    """What was found, to compare."""
    owner_E = levels.target.owner_E
    found = levels.repaired(division, rows_CE, owner_E, **given)
    busiest = levels.busiest_cell(division, rows_CE)
    return busiest, found and (found[0].tolist(), numbers(found[1]))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(passes(), st.sampled_from([1, 2, 5]), st.sampled_from([0, 1, 50]), st.sampled_from([0, 6]))
def test_repairs_as_c_does(case: Pass, num_slots: int, rows: int, sweeps: int) -> None:
    """Copies that cost as much as so many rows in the mean cell, and none."""
    both = Both.of(case.levels)
    division = both.compiled.divided(case.rows_CE, None, sweeps=sweeps)
    given = {"copy_price": rows * int(case.levels.prices.row_C.mean()), "num_slots": num_slots}
    found = [repaired(each, case.rows_CE, division, **given, sweeps=sweeps) for each in both]
    assert found[0] == found[1]


def test_finds_what_c_finds_in_usual_layers() -> None:
    """With hot experts, and a plan of rows like those that come."""
    rng, num_below, num_repaired = np.random.default_rng(0), 0, 0
    for blind in cases(24, most_cells=16, most_experts=32, seed=31):
        for case in (blind, with_cards(blind)):
            both = Both.of(levels_of(case))
            plans = [each.divided(case.rows_CE, None, sweeps=PLANNED_SWEEPS) for each in both]
            assert numbers(plans[0]) == numbers(plans[1])
            later_CE = rng.poisson(case.rows_CE)
            found = [each.divided(later_CE, plans[0], sweeps=SWEEPS) for each in both]
            assert numbers(found[0]) == numbers(found[1])
            holds_EC = both.twin.target.holds_EC
            holds_KEC = holds_EC | (rng.random((6, *holds_EC.shape)) < 0.02)
            firsts = [
                each.first_below(plans[0], holds_KEC, case.rows_CE, sweeps=SWEEPS) for each in both
            ]
            first, again = (each and (each[0], numbers(each[1])) for each in firsts)
            assert first == again
            num_below += first is not None
            turned_CE = np.roll(case.rows_CE, 5, axis=1)  # other experts are hot
            divided = levels_of(case).divided(turned_CE, plans[0], sweeps=SWEEPS)
            given = {"copy_price": 1 << 22, "num_slots": 1, "sweeps": SWEEPS}
            mended = [repaired(each, turned_CE, divided, **given) for each in both]
            assert mended[0] == mended[1]
            num_repaired += mended[0][1] is not None
    assert num_below > 10 and num_repaired > 10


def test_finds_what_c_finds_in_layers_of_many_rows() -> None:
    for levels, rows_CE, before_CE in many_rows():
        both = Both.of(levels)
        plan = levels.divided(before_CE, None, sweeps=PLANNED_SWEEPS)
        found = [each.divided(rows_CE, plan, sweeps=40) for each in both]
        assert numbers(found[0]) == numbers(found[1])


def test_no_float_comes_to_the_twin() -> None:
    """Sums and products of floats may differ in the last bit between processors."""
    for node in ast.walk(ast.parse(Path(row_levels_twin.__file__).read_text())):
        assert not isinstance(node, ast.Div)
        assert not (isinstance(node, ast.Constant) and isinstance(node.value, float))


# Where nothing can be compiled.


def test_one_warning_says_why_and_what_to_do() -> None:
    levels = levels_of(*cases(1, most_cells=4, most_experts=8, seed=1))
    rows_CE = np.ones(levels.target.holds_EC.T.shape, dtype=np.int64)
    with nothing_compiles():
        with pytest.warns(UserWarning, match="divided over copies in Python") as told:
            for _ in range(2):
                again = RowLevels(levels.target, levels.node_C, levels.prices)
                assert isinstance(again._layer, TwinLayer)
        assert len(told) == 1
    said = str(told[0].message)
    assert f"about {row_levels.SLOWER} times slower" in said
    assert "/bin/false does not compile" in said and "install gcc or set CC" in said
    expected = levels.divided(rows_CE, None, sweeps=SWEEPS)
    assert numbers(again.divided(rows_CE, None, sweeps=SWEEPS)) == numbers(expected)


def trained(
    rank: int, num_ranks: int, strategy: Strategy, case: testing.Case, compiling: tuple[bool, ...]
) -> tuple[list[testing.Seen], set[str]]:
    """A training, and what divided rows on this rank."""
    kinds, made = set(), RowLevels._layer.func

    def noted(levels: RowLevels) -> CompiledLayer | TwinLayer:
        layer = made(levels)
        kinds.add(type(layer).__name__)
        return layer

    with nullcontext() if compiling[rank] else nothing_compiles(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mock.patch.object(RowLevels._layer, "func", noted):
            return testing._train(rank, num_ranks, strategy, case), kinds


@pytest.mark.parametrize("degrees", [None, (2, 3)])
def test_ranks_that_cannot_compile_train_as_others_do(degrees: tuple[int, int] | None) -> None:
    """To the last bit, also where one rank can compile and another cannot."""
    case = testing.Case(num_ranks=4, degrees=degrees)
    laid = testing._laid(
        FullySharded(share="priced", calibrate=True, overlap_degree=2, copies_per_rank=3), case
    )
    expected: list[list[testing.Seen]] = []
    for compiling in ((True,) * 4, (False,) * 4, (True, False, True, False)):
        found = pool_of(4).run(trained, laid, case, compiling)
        names = [{CompiledLayer.__name__ if able else TwinLayer.__name__} for able in compiling]
        assert [kinds for _, kinds in found] == names
        seen = [steps for steps, _ in found]
        assert sum(step.num_copies for step in seen[0])
        expected = expected or seen
        for ours, theirs in zip(seen, expected, strict=True):
            for step, other in zip(ours, theirs, strict=True):
                assert step.num_copies == other.num_copies
                pairs = zip(tree_leaves(step), tree_leaves(other), strict=True)
                assert all(torch.equal(*pair) for pair in pairs if isinstance(pair[0], Tensor))
