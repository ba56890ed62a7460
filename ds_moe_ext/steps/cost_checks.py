# SPDX-License-Identifier: Apache-2.0
"""How good a strategy's model of costs is: what it said of some steps beside what they took.

First it is tried, which tells what layers add to what links alone would take: exchanges a start,
copies what they meet on their way. Then it is checked, for a person to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import NamedTuple

import numpy as np

from ds_moe_ext.attachment.replacement import AttachedLayer
from ds_moe_ext.cost.link_prices import Trip, trip_through
from ds_moe_ext.cost.prices import TRIPS
from ds_moe_ext.moe.observation import Rows
from ds_moe_ext.report.record import TermRecord
from ds_moe_ext.steps.costs import (
    CHECKED,
    TRIED,
    Correction,
    Seen,
    exchange_s,
    of_all_ranks,
)
from ds_moe_ext.strategy import Forecast, Job, Strategy


class Term(NamedTuple):
    """One term of a model; its key is its name in ``Forecast``.

    Attributes:
        name: for a person.
        found_s: seconds of a layer and step, by what each rank saw.
    """

    name: str
    found_s: Callable[[Sequence[Seen]], float]


TERMS = {
    "exchange_s": Term("exchange of rows", exchange_s),
    "expert_s": Term("experts", lambda ranks: max(seen.expert_s for seen in ranks)),
    "gather_s": Term("copies", lambda ranks: mean(seen.gather_s for seen in ranks)),
    "reduce_s": Term("their gradients", lambda ranks: mean(seen.reduce_s for seen in ranks)),
}


class Times(NamedTuple):
    """Of one term of the model, float ``[I, L]``."""

    said_IL: np.ndarray
    found_IL: np.ndarray


@dataclass(eq=False)
class Checks:
    """Args:
    strategy: whose model it is.
    layers: in model order.

    Attributes:
        correction: what layers make of links, just after the last of the steps in which the model
            is tried; else None.
        terms: what came out, once all steps to be checked have ended.
    """

    strategy: Strategy
    layers: Sequence[AttachedLayer]
    correction: Correction | None = field(default=None, init=False)
    terms: tuple[TermRecord, ...] = field(default=(), init=False)
    _is_tried: bool = field(default=False, init=False)
    _steps: list[int] = field(default_factory=list, init=False)
    _pairs: list[list[tuple[Forecast, Seen]]] = field(default_factory=list, init=False)

    def begin_anew(self) -> None:
        """Try the model once more: what it reckons with has been measured again. Terms that came
        out stay."""
        self._is_tried = False
        self._steps.clear()
        self._pairs.clear()

    def after_step(self, step: int, job: Job, rows: Sequence[Rows], seen: Sequence[Seen]) -> None:
        """Take a step that was looked at; the layers still have the plans it ran by. Collective.

        Args:
            step: its number.
            job: what the strategy knew.
            rows: what each layer routed.
            seen: what this rank saw of each layer; of no layer if nobody looked.
        """
        self.correction = None
        if not seen or job.accumulates:  # how often copies travel is then another matter
            return
        plans = [layer.routed.site.plan for layer in self.layers]
        forecasts = [
            self.strategy.forecast(job, layer, plan, layer_rows.routed_CE)
            for layer, (plan, layer_rows) in enumerate(zip(plans, rows))
        ]
        known = [(said, its) for said, its in zip(forecasts, seen) if said is not None]
        if len(known) < len(seen):
            return
        self._steps.append(step)
        self._pairs.append(known)
        if len(self._pairs) < len(CHECKED if self._is_tried else TRIED):
            return
        times = self._times()
        if self._is_tried:
            self.terms = self.terms or self._terms(times)
        else:
            copy_speed = _speed(times["gather_s"], times["reduce_s"])
            self._is_tried, self.correction = (
                True,
                Correction(copy_speed, _trip(times["exchange_s"])),
            )
        self._steps.clear()
        self._pairs.clear()

    def _times(self) -> Mapping[str, Times]:
        """What was said and found of each term."""
        routed = self.layers[0].routed
        assert routed.copies is not None
        layout, device = routed.site.layout, routed.copies.like[0].device
        steps = [of_all_ranks([seen for _, seen in step], layout, device) for step in self._pairs]

        def times(key: str, term: Term) -> Times:
            said = [[vars(said)[key] for said, _ in step] for step in self._pairs]
            found = [[term.found_s(ranks) for ranks in zip(*step)] for step in steps]
            return Times(np.array(said), np.array(found))

        return {key: times(key, term) for key, term in TERMS.items()}

    def _terms(self, times: Mapping[str, Times]) -> tuple[TermRecord, ...]:
        return tuple(
            replace(term_of(term.name, *times[key]), steps=tuple(self._steps))
            for key, term in TERMS.items()
            if times[key].found_IL.any()
        )


def _speed(*times: Times) -> float | None:
    """Seconds said over seconds found; None where one of the two is nothing."""
    said_s = sum(float(each.said_IL.sum()) for each in times)
    found_s = sum(float(each.found_IL.sum()) for each in times)
    return said_s / found_s if said_s and found_s else None


def _trip(times: Times) -> Trip:
    """Of one of the exchanges of a layer and step."""
    said_N, found_N = (each.ravel() / TRIPS for each in times)
    return trip_through(said_N.tolist(), found_N.tolist())


def term_of(name: str, said_IL: np.ndarray, found_IL: np.ndarray) -> TermRecord:
    """One term of a model, from seconds said and found, float ``[I, L]``; layers in which nothing
    was found do not count."""
    counts_IL = found_IL > 0
    error_N = np.abs(said_IL[counts_IL] - found_IL[counts_IL]) / found_IL[counts_IL]
    return TermRecord(
        name=name,
        said_s=float(said_IL[counts_IL].mean()),
        found_s=float(found_IL[counts_IL].mean()),
        error=float(error_N.mean()),
    )
