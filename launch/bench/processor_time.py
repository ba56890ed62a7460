# SPDX-License-Identifier: Apache-2.0
"""Processor time of an engine's passes, by contender: what its host takes, dense parts included."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.table import Table


class Passes(NamedTuple):
    """Processor seconds of a micro-batch, of all threads of this process."""

    forward: float
    backward: float
    step: float


def table_of(spent: Mapping[str, Sequence[Passes]], num_layers: int) -> Table:
    """Lower quartiles in microseconds a layer, and the quartiles of the ratios of forward and
    backward to the first one's, paired by micro-batch."""
    first = next(iter(spent.values()))
    table = Table(title="Processor us a layer, all threads of a rank", title_justify="left")
    for heading in ("contender", *Passes._fields, "forward + backward x first", "quartiles"):
        table.add_column(heading)
    for name, own in spent.items():
        us = [1e6 * statistics.quantiles(part, n=4)[0] / num_layers for part in zip(*own)]
        low, middle, high = statistics.quantiles(map(_ratio, own, first), n=4)
        both = f"{middle:.2f}", f"{low:.2f}-{high:.2f}"
        table.add_row(name, *(f"{each:,.0f}" for each in us), *both)
    return table


def _ratio(own: Passes, first: Passes) -> float:
    return (own.forward + own.backward) / (first.forward + first.backward)
