"""What a job was priced at, under every strategy and grid, and how a person reads it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ds_moe_ext.commands.price_inputs import read_cluster, read_job, read_model, training_of
from ds_moe_ext.commands.price_ways import BASE, EVERY, Chosen, chosen_strategies, ways_of
from ds_moe_ext.hardware import Hardware
from ds_moe_ext.layout import Grid
from ds_moe_ext.loads.sources import read_loads
from ds_moe_ext.pricing.candidates import PRICED, Priced, Refused, price_way
from ds_moe_ext.pricing.described_run import DescribedRun
from ds_moe_ext.pricing.model_shape import ModelShape
from ds_moe_ext.pricing.reached import Reached
from ds_moe_ext.pricing.training_shape import Training

SEEN = 3  # steps that plans go by, before those that are priced
GIB = 2**30


@dataclass(frozen=True, eq=False)
class Market:
    """All that was priced.

    Attributes:
        hardware: the cluster.
        shape: the model.
        training: how it is trained.
        loads: where they are from.
        own: names of strategies that the job's file says.
        priced: ways that can be, the fastest first.
        refused: ways that cannot.
    """

    hardware: Hardware
    shape: ModelShape
    training: Training
    loads: str
    own: str
    priced: Sequence[Priced]
    refused: Sequence[Refused]

    def fits(self, priced: Priced) -> bool:
        """Whether a rank has memory for it."""
        has = self.hardware.device.memory_bytes
        return has is None or priced.memory.total <= has

    @property
    def base(self) -> Priced | None:
        """The fastest of plain expert parallelism; of those that fit, if any does."""
        return self._fastest([each for each in self.priced if each.way.name == BASE])

    @property
    def best(self) -> Priced | None:
        """The fastest; likewise."""
        return self._fastest(self.priced)

    def _fastest(self, priced: Sequence[Priced]) -> Priced | None:
        fitting = [each for each in priced if self.fits(each)]
        return next(iter(fitting or priced), None)


def price(given: argparse.Namespace) -> int:
    """Price a job and print what came out. 0, or 1 if no way can be."""
    asked = read_job(given.job)
    hardware = read_cluster(given.hardware, given.nodes)
    shape = asked.shape if given.model is None else read_model(given.model)
    if shape is None:
        raise ValueError(
            f"{str(given.job)!r} does not say the model's sizes; name its config.json with --model"
        )
    sizes = {
        "length": given.length,
        "micro_batch": given.micro_batch,
        "micro_batches": given.micro_batches,
        "recomputes": given.recomputes,
    }
    training = training_of(asked, shape, hardware.num_ranks, sizes)
    chosen = chosen_strategies(asked.document, given.strategies)
    console = Console()
    market = priced_market(
        hardware, shape, training, given.loads, chosen, every_grid=given.grids == EVERY, to=console
    )
    print_market(market, console)
    return 0 if market.priced else 1


def priced_market(
    hardware: Hardware,
    shape: ModelShape,
    training: Training,
    loads: str,
    chosen: Sequence[Chosen],
    *,
    every_grid: bool,
    to: Console,
) -> Market:
    """Price every way.

    Args:
        hardware: the cluster, by its file.
        shape: of the model.
        training: how it is trained.
        loads: a name or a path.
        chosen: strategies.
        every_grid: as of ``ways_of``.
        to: where progress is shown.
    """
    rows = read_loads(
        loads,
        ranks=training.num_ranks,
        experts=shape.num_experts,
        layers=len(shape.moe_layers),
        tokens=training.tokens,
        top_k=shape.top_k,
        steps=SEEN + PRICED,
    )
    reached = Reached()
    described = partial(
        DescribedRun,
        hardware=reached.of(hardware),
        shape=shape,
        training=training,
        passes=reached.passes,
    )
    ways = list(ways_of(chosen, hardware, shape.num_experts, every_grid=every_grid))
    priced, refused = list[Priced](), list[Refused]()
    with Progress(console=to, transient=True) as progress:
        for _, way in progress.track(ways, description="pricing"):
            try:
                priced.append(price_way(way, described(grid=way.grid), rows.rows_ILCE))
            except ValueError as error:
                refused.append(Refused(way, str(error)))
    own = next(each.name for each in chosen if each.is_own)
    priced.sort(key=lambda each: each.step_s)
    return Market(hardware, shape, training, rows.source, own, priced, refused)


# What a person reads.


def print_market(market: Market, console: Console) -> None:
    """The tables, and what they rest on."""
    console.print(_about(market), highlight=False)
    console.print(_table(market))
    for line in _told(market):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _about(market: Market) -> str:
    shape, training, hardware = market.shape, market.training, market.hardware
    return (
        f"{shape.name}: {shape.all_weights / 1e9:,.1f} billion weights, {len(shape.moe_layers)} "
        f"layers of {shape.num_experts} experts, {shape.top_k} a token; on {hardware.name}: "
        f"{hardware.num_nodes} nodes of {hardware.ranks_per_node} {hardware.device.name}; "
        f"{training.tokens_of_step:,} tokens a step, {training.micro_batches} x "
        f"{training.micro_batch} samples of {training.length:,} a rank, {training.number_type}, "
        f"ZeRO {training.zero_stage}; loads: {market.loads}"
    )


def _table(market: Market) -> Table:
    table = Table(title="a step, ms", title_justify="left")
    table.add_column("")
    table.add_column("strategy")
    table.add_column("ranks: cells x split")
    for heading in ("step", "tokens/s", "gain", "computed", "imbalance", "sending", "host", "end"):
        table.add_column(heading, justify="right")
    table.add_column("balance", justify="right")
    table.add_column("copies", justify="right")
    table.add_column("GiB a rank", justify="right")
    base, best = market.base, market.best
    for each in market.priced:
        marks = ("> " if each is best else "") + ("yours" if each.way.name == market.own else "")
        gain = "" if base is None else f"{base.step_s / each.step_s:.2f} x"
        parts = ("computed_s", "imbalance_s", "exposed_s", "host_s", "end_s")
        memory = f"{each.memory.total / GIB:,.0f}"
        table.add_row(
            marks,
            each.way.name,
            grid_text(each.way.grid),
            f"{1e3 * each.step_s:,.1f}",
            f"{each.tokens_per_s:,.0f}",
            gain,
            *(f"{1e3 * each.mean(part):,.1f}" for part in parts),
            f"{each.mean('balance'):.2f}",
            f"{each.copies:.1f}",
            memory if market.fits(each) else f"{memory} too much",
            style=None if market.fits(each) else "dim",
        )
    return table


def grid_text(grid: Grid) -> str:
    """A grid for a person."""
    homes = grid.world_size // grid.size
    split = f" x {grid.cell_size}" if grid.cell_size > 1 else ""
    return f"{grid.num_cells}{split}" + (f", {homes} times" if homes > 1 else "")


def _told(market: Market) -> list[str]:
    """The best in words, what cannot be, and what the prices rest on."""
    told = []
    best, base = market.best, market.base
    if best is not None and base is not None:
        gain = base.step_s / best.step_s
        told.append(
            f"fastest: {best.way.name} on {grid_text(best.way.grid)}, {gain:.2f} times the best "
            f"plain expert parallelism (on {grid_text(base.way.grid)})"
            + (f": {best.told}" if best.told else "")
        )
        if not market.fits(best):
            told.append(
                "nothing fits into memory: take more nodes, --recomputes, shorter samples or a "
                "higher ZeRO stage"
            )
    for each in market.refused:
        told.append(f"{each.way.name} on {grid_text(each.way.grid)} cannot be: {each.why}")
    reached = Reached()
    told.append(
        "assumed where the hardware file has no measurement: products reach "
        f"{reached.products:.0%} of the peak, memory {reached.memory:.0%}, links "
        f"{reached.links:.0%}, which start in "
        f"{1e6 * reached.start_s:.0f} us; the host issues as measured (docs/price.md says all)"
    )
    return told
