# SPDX-License-Identifier: Apache-2.0
"""What ``auto`` ends at beside the strategies that it chooses from, by the simulator.

`python launch/bench/auto_scenarios.py`: six scenarios, 8 ETP groups of two nodes, 8 layers. Each
strategy plans by the steps before and is priced on the rows that come; so is ``auto``, which
chooses every ten steps. The second half of the steps counts. No ranks are started.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.table import Table

from ds_moe_ext.core.layout import Grid
from ds_moe_ext.core.placement import even_owners
from ds_moe_ext.planning.layer_costs import BACKWARD, LayerCosts
from ds_moe_ext.planning.layer_pipelines import Measured, MeasuredLayer
from ds_moe_ext.planning.layer_seconds import TaskCosts
from ds_moe_ext.planning.load_files import read_loads
from ds_moe_ext.planning.loads import LoadWindow
from ds_moe_ext.planning.prices import FREE, AllReduce, Line, Prices
from ds_moe_ext.planning.step_price import Conditions, price_step
from ds_moe_ext.planning.strategy import Choice, CostGroup, Job, Past, Strategy
from ds_moe_ext.strategies.auto import Auto

EP_RANKS, LAYERS, TOKENS, TOP_K = 8, 8, 4096, 2
WIDTH = 4096  # of a row, two bytes each
START_S = 20e-6  # of a transfer


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run."""

    loads: str  # a name of ``loads.sources``
    inter: float = 50e9  # bytes a second of a node's card
    experts: int = 32  # of a layer
    expert_width: int = 4096  # of each
    slow_ep_ranks: int = 0  # that take three times as long for a row

    @property
    def job(self) -> Job:
        """Without rows."""
        row_s = 3 * 3 * WIDTH * self.expert_width / 300e12
        expert_bytes = 2 * 3 * WIDTH * self.expert_width
        layers = tuple(range(LAYERS))
        cost_group = CostGroup(
            layers=layers,
            prices=Prices(
                row_s=row_s,
                row_bytes=2 * WIDTH,
                copy_s=expert_bytes / self.inter,
                inter_bytes_per_s=self.inter,
                intra_bytes_per_s=360e9,
            ),
            row_s_C=tuple(3 * row_s if c < self.slow_ep_ranks else row_s for c in range(EP_RANKS))
            if self.slow_ep_ranks
            else (),
            expert_bytes=expert_bytes,
            state_bytes=6 * expert_bytes,
            copy_latency_s=START_S,
        )
        window_s = TOKENS * (4 * WIDTH * WIDTH + TOKENS * WIDTH) / 300e12
        job = Job.at_start(
            even_owners([self.experts] * LAYERS, EP_RANKS), np.arange(EP_RANKS) // 4, (cost_group,)
        )
        return replace(
            job,
            window_s=(window_s,) * LAYERS,
            back_window_s=(BACKWARD * window_s,) * LAYERS,
            free_bytes=8 * LAYERS * expert_bytes,
            pipelines=self._pipelines(row_s, BACKWARD * window_s),
        )

    def _pipelines(self, row_s: float, dense_window_s: float) -> Measured:
        rows = float(TOKENS * TOP_K)
        exchange = Line(alpha_s=START_S, beta_s=2 * WIDTH * 4 / 2 / self.inter)
        costs = LayerCosts(
            all_to_all=exchange.over(rows),
            all_gather=FREE.over(rows),
            reduce_scatter=FREE.over(rows),
            expert=Line(alpha_s=START_S, beta_s=row_s / 3).over(rows),
        )
        layer = MeasuredLayer(costs, dense_window_s, 0)
        return Measured((layer,) * LAYERS, 0, AllReduce(0.0, 0.0), 2)


SCENARIOS = {
    "skewed, fast net": Scenario(loads="zipf:0.9", inter=360e9),
    "skewed, slow net": Scenario(loads="zipf:0.9", inter=10e9),
    "balanced, slow net": Scenario(loads="balanced", inter=10e9),
    "unlike devices": Scenario(loads="zipf:0.5", slow_ep_ranks=4),
    "tiny experts": Scenario(loads="zipf:0.9", experts=64, expert_width=256),
    "rotating hotspot": Scenario(loads="rotating_hotspot"),
}


def run(strategy: Strategy, scenario: Scenario, num_steps: int) -> tuple[list[float], list[str]]:
    """Seconds of each step by the simulator, and what planned it."""
    rows_ILCE = read_loads(
        scenario.loads,
        ranks=EP_RANKS,
        experts=scenario.experts,
        layers=LAYERS,
        tokens=TOKENS,
        top_k=TOP_K,
        steps=num_steps + 1,
    ).rows_ILCE
    conditions = Conditions(
        grid=Grid(EP_RANKS, EP_RANKS),
        tasks=TaskCosts(exchange_start_s=START_S, expert_start_s=START_S),
    )
    window = LoadWindow(strategy.intervals().window)
    job, choice, ratios = scenario.job, None, dict[str, float]()
    window.push(list(rows_ILCE[0]))
    predicted = window.predicted()
    seconds, names = list[float](), list[str]()
    for step, rows_LCE in enumerate(rows_ILCE[1:], 1):
        came = tuple(rows_ILCE[step - 1])
        past = Past(step, predicted, came, choice, ratios)
        predicted = window.predicted()
        job = replace(job, rows=predicted, drift=window.drift, past=past)
        every = strategy.intervals().shard_every
        if every and step % every == 0:
            job = replace(job, owners=strategy.owners(job))
        plans = strategy.plan(job)
        price = price_step(strategy, plans, job, list(rows_LCE), conditions)
        choice = plans[0].choice
        seconds.append(price.step_s)
        names.append("" if choice is None else choice.name)
        ratios = _learnt(ratios, choice, price.step_s)
        window.push(list(rows_LCE))
    return seconds, names


def _learnt(ratios: Mapping[str, float], choice: Choice | None, step_s: float) -> dict[str, float]:
    if choice is None:
        return dict(ratios)
    return {**ratios, choice.name: step_s / choice.expected_s}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    auto = Auto(interval=10)
    table = Table(title="ms a step, by the simulator; the second half of the steps")
    table.add_column("scenario")
    for name in (*auto.strategies, "auto", "over the best", "took at the end"):
        table.add_column(name, justify="right")
    for name, scenario in SCENARIOS.items():
        fixed = {
            each: _end_s(run(strategy, scenario, given.steps)[0])
            for each, strategy in auto.strategies.items()
        }
        seconds, took = run(auto, scenario, given.steps)
        own_s = _end_s(seconds)
        over = own_s / min(fixed.values()) - 1
        cells = (f"{1e3 * s:.2f}" for s in (*fixed.values(), own_s))
        table.add_row(name, *cells, f"{100 * over:.1f} %", took[-1])
    Console(width=160).print(table)


def _end_s(seconds: list[float]) -> float:
    return fmean(seconds[len(seconds) // 2 :])


if __name__ == "__main__":
    main()
