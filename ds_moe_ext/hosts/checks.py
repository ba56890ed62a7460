"""How good a strategy's model of costs is: what it said of some steps beside what they took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ds_moe_ext.hosts.attach import AttachedLayer
from ds_moe_ext.hosts.costs import CHECKED, Seen, of_all_ranks
from ds_moe_ext.moe.observe import Rows
from ds_moe_ext.report.record import TermRecord
from ds_moe_ext.strategies.base import Forecast, Job, Strategy

TERMS = {
    "exchange_s": "exchange of rows",
    "expert_s": "experts",
    "gather_s": "copies",
    "reduce_s": "their gradients",
}


@dataclass(eq=False)
class Checks:
    """Args:
    strategy: whose model it is.
    layers: in model order.

    Attributes:
        terms: what came out, once all steps to be checked have ended.
    """

    strategy: Strategy
    layers: Sequence[AttachedLayer]
    terms: tuple[TermRecord, ...] = field(default=(), init=False)
    _steps: list[int] = field(default_factory=list, init=False)
    _pairs: list[list[tuple[Forecast, Seen]]] = field(default_factory=list, init=False)

    def after_step(self, step: int, job: Job, rows: Sequence[Rows], seen: Sequence[Seen]) -> None:
        """Take a step that was looked at; the layers still have the plans it ran by. Collective.

        Args:
            step: its number.
            job: what the strategy knew.
            rows: what each layer routed.
            seen: what this rank saw of each layer; of no layer if nobody looked.
        """
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
        if len(self._pairs) == len(CHECKED):
            self.terms = self._compared()

    def _compared(self) -> tuple[TermRecord, ...]:
        copies = self.layers[0].routed.copies
        assert copies is not None
        device = copies.like[0].device
        said_s = {term: _table(self._pairs, term) for term in TERMS}
        steps = [of_all_ranks([seen for _, seen in step], device) for step in self._pairs]
        found_s = {
            # The last to come to an exchange does not wait for others.
            "exchange_s": _over_ranks(steps, "exchange_s", np.min),
            "expert_s": _over_ranks(steps, "expert_s", np.max),
            "gather_s": _over_ranks(steps, "gather_s", np.mean),
            "reduce_s": _over_ranks(steps, "reduce_s", np.mean),
        }
        return tuple(
            replace(term_of(name, said_s[term], found_s[term]), steps=tuple(self._steps))
            for term, name in TERMS.items()
            if found_s[term].any()
        )


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


def _table(pairs: Sequence[Sequence[tuple[Forecast, Seen]]], term: str) -> np.ndarray:
    return np.array([[vars(said)[term] for said, _ in step] for step in pairs])


def _over_ranks(
    steps: Sequence[Sequence[Sequence[Seen]]], term: str, pick: Callable[..., Any]
) -> np.ndarray:
    seen_IRL = np.array([[[vars(seen)[term] for seen in rank] for rank in step] for step in steps])
    found_IL: np.ndarray = pick(seen_IRL, axis=1)
    return found_IL
