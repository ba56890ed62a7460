# SPDX-License-Identifier: Apache-2.0
"""What a paper prints beside what we get: one record for all tables and figures. Pure.

A figure is met where its rows lie within the tolerance and its claims hold. What is not met has a
reason, in words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """How far ours may be from the paper's.

    Attributes:
        relative: of the paper's value.
        absolute: in the figure's unit, beside that.
    """

    relative: float = 0.0
    absolute: float = 0.0

    def holds(self, paper: float, ours: float) -> bool:
        return abs(ours - paper) <= self.relative * abs(paper) + self.absolute + 1e-9

    def __str__(self) -> str:
        parts = [f"{100 * self.relative:g} %"] if self.relative else []
        return " and ".join(parts + ([f"{self.absolute:g}"] if self.absolute else []))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One value.

    Attributes:
        name: what it is.
        paper: as printed; None where the paper prints none.
        ours: as the product's planners, prices and simulator have it.
        is_held: it is held to the figure's tolerance; else it stands for comparison only.
    """

    name: str
    paper: float | None
    ours: float
    is_held: bool = True

    @property
    def miss(self) -> float | None:
        """Ours less the paper's, over the paper's."""
        return None if self.paper is None else self.ours / self.paper - 1


@dataclass(frozen=True)
class Claim:
    """What the paper says in words, an order mostly, and whether ours says the same."""

    text: str
    holds: bool


@dataclass(frozen=True)
class Curve:
    """Ours over an axis; papers print such as pictures, without numbers."""

    name: str
    at: tuple[str, ...]
    ours: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A table or figure of a paper.

    Attributes:
        name: of it in the paper.
        title: what is compared, and in which unit.
        rows: values, the paper's beside ours.
        tolerance: of held rows; None where claims alone are held.
        claims: what must hold besides.
        assumed: for this figure, beside what is assumed for the whole paper.
        because: why what is not met is not.
        is_fitted: what all figures share was chosen with this one in sight, so that meeting it
            says little.
        curves: ours, where the paper has a picture.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    tolerance: Tolerance | None = None
    claims: tuple[Claim, ...] = ()
    assumed: tuple[str, ...] = ()
    because: str = ""
    is_fitted: bool = False
    curves: tuple[Curve, ...] = ()

    @property
    def held(self) -> tuple[Row, ...]:
        """Rows that the tolerance is for."""
        if self.tolerance is None:
            return ()
        return tuple(row for row in self.rows if row.is_held and row.paper is not None)

    def is_beyond(self, row: Row) -> bool:
        """Whether a row is held and beyond the tolerance."""
        if self.tolerance is None or row.paper is None or not row.is_held:
            return False
        return not self.tolerance.holds(row.paper, row.ours)

    @property
    def missed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if self.is_beyond(row))

    @property
    def broken(self) -> tuple[Claim, ...]:
        """Claims that do not hold."""
        return tuple(claim for claim in self.claims if not claim.holds)

    @property
    def is_judged(self) -> bool:
        """Whether anything is held; else it stands for comparison only."""
        return bool(self.held or self.claims)

    @property
    def is_met(self) -> bool:
        return not self.missed and not self.broken

    @property
    def verdict(self) -> str:
        """In words."""
        lines = []
        if self.held:
            number = len(self.held) - len(self.missed)
            lines.append(f"{number} of {len(self.held)} values within {self.tolerance}")
        if self.claims:
            number = len(self.claims) - len(self.broken)
            lines.append(f"{number} of {len(self.claims)} claims hold")
        if not self.is_judged:
            return "for comparison"
        return f"{self.worth}: {', '.join(lines)}"

    @property
    def worth(self) -> str:
        """What meeting it says, in a few words."""
        if not self.is_met:
            return MISSED
        if self.is_fitted:
            return FITTED
        return MET if self.held else IN_ORDER


MET, IN_ORDER, FITTED, MISSED = "met", "met in order only", "fitted on this row", "missed"


@dataclass(frozen=True, kw_only=True)
class Paper:
    """What is reproduced of a paper.

    Attributes:
        name: of its system.
        title: of the paper.
        inputs: what was taken from it, each with its place there.
        assumed: what it does not say.
        fitted: what was chosen with results in sight; all figures share it.
        left_out: tables and figures that are not here, and why.
        figures: each makes one, in seconds to half a minute.
    """

    name: str
    title: str
    inputs: tuple[str, ...]
    assumed: tuple[str, ...]
    fitted: tuple[str, ...]
    left_out: tuple[str, ...]
    figures: tuple[Callable[[], Figure], ...]


def met_of(figures: Sequence[Figure]) -> str:
    """How many of those that are judged are met, and how, in words."""
    worths = [figure.worth for figure in figures if figure.is_judged]
    parts = [f"{worths.count(worth)} {worth}" for worth in (IN_ORDER, FITTED) if worth in worths]
    met = f"{worths.count(MET)} of {len(worths)} tables and figures met"
    return ", ".join([met, *parts])
