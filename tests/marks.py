# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test are long runs, started by hand (``pytest -m slow``), and what some need.

Where a test has many axes, CI has so many cases that every pair of values is in one (``cases``), or
those that a test's own table names.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case for ``pytest.mark.parametrize`` that guards what a quicker one guards already."""
    return pytest.param(*values, marks=pytest.mark.slow)


needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None, reason="DeepSpeedCPUAdam is compiled, and there is no c++"
)


Values = dict[str, Any]


def combinations(**values: Iterable[Any]) -> list[Values]:
    return [dict(zip(values, each)) for each in itertools.product(*values.values())]


def by_pairs(cases: Sequence[Values]) -> list[Values]:
    """Some of the cases, in which every pair of values is that is in any. Greedy: the next one has
    most of those that are missing."""
    missing = set().union(*map(_pairs, cases))
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda case: len(missing & _pairs(case))))
        missing -= _pairs(chosen[-1])
    return chosen


def _pairs(case: Values) -> set[Any]:
    return set(itertools.combinations(case.items(), 2))


def cases(
    possible: Callable[[Values], bool],
    rare: Sequence[Any] = (),
    quick: Callable[[Values], bool] | None = None,
    **values: Iterable[Any],
) -> Any:
    """For ``parametrize``: those that are not ``quick`` are slow; without it, those that no pair
    needs, and those with a rare value."""
    found = list(filter(possible, combinations(**values)))
    common = [each for each in found if not {*each.values()} & {*rare}]
    chosen = by_pairs(common) if quick is None else list(filter(quick, found))
    return [
        pytest.param(
            each,
            id=" ".join(f"{name}={value}" for name, value in each.items()),
            marks=[] if each in chosen else [pytest.mark.slow],
        )
        for each in found
    ]
