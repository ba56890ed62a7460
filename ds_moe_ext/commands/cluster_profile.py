# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext profile``: measure this cluster, and write a hardware file of it.

Every rank runs it: ``torchrun --nproc_per_node 8 -m ds_moe_ext.profile_run``.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from ds_moe_ext.core.hardware import Collectives, Flops, Hardware, Link, Product
from ds_moe_ext.report.units import bytes_text, say, seconds_text, short_count, wide_console

EXPERT_BYTES = 4 * 768**2 * 2  # HECATE's GPT-MoE-S: 768 x 1536, twice, of two bytes each
NOISY = 0.99  # r² below this deserves a word


def add_profile(commands: Any) -> None:
    parser = commands.add_parser("profile", help="measure this cluster; write a hardware file")
    add_options(parser)
    parser.set_defaults(run=profile)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=Path("hardware.json"), help="file to write (%(default)s)")
    add("--quick", action="store_true", help="fewer and smaller sizes, less accurate")
    add("--expert-bytes", type=int, default=EXPERT_BYTES, help="of one expert (%(default)s)")
    add("--window-s", type=float, help="show how many replicas these seconds hide")
    add("--ranks-per-node", type=int, help="ranks per node, if host names do not show it")
    add("--name", help="of the cluster")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher says it twice


def profile(given: argparse.Namespace) -> int:
    """Measure; the first rank prints and writes. Collective."""
    from ds_moe_ext.commands import profile_ranks  # loads torch, which other commands do without

    rank, hardware = profile_ranks.measure_here(
        is_quick=given.quick,
        expert_bytes=given.expert_bytes,
        ranks_per_node=given.ranks_per_node,
        device_kind=given.device,
        out=given.out,
    )
    if rank == 0:
        hardware = dataclasses.replace(hardware, name=given.name or hardware.name)
        report(hardware, given)
        given.out.write_text(hardware.to_json(), encoding="utf-8")
        print(f'wrote {given.out}; in your JSON: "ds_moe_ext": {{"hardware": "{given.out}"}}')
    return 0


def report(hardware: Hardware, given: argparse.Namespace) -> None:
    """Print what was measured, what was not, and what it means for replicas of experts."""
    console = wide_console()
    console.print(table_of(hardware))
    lines = list(notes(hardware))
    if hardware.num_ranks > 1:
        lines.append(replicas_text(hardware, given.expert_bytes, given.window_s))
    for line in lines:
        say(console, line)


def table_of(hardware: Hardware) -> Table:
    """Latencies, rates and fits, a line each."""
    table = Table("where", "what", title=escape(hardware.name), title_justify="left")
    for heading in ("latency", "rate", "r²"):
        table.add_column(heading, justify="right")
    whole = [] if hardware.copy is None else [("over all ranks", "copy", hardware.copy)]
    for where, what, link in (*links(hardware), *whole):
        rate = f"{short_count(link.bytes_per_s)}B/s"
        table.add_row(where, what, seconds_text(link.latency_s), rate, _fit_text(link.r_squared))
    for what, product in products(hardware):
        rate = f"{short_count(2 * product.multiply_adds_per_s)}FLOP/s"
        start = "" if product.r_squared is None else seconds_text(product.start_s)
        table.add_row("device", what, start, rate, _fit_text(product.r_squared))
    if hardware.device.memory_bytes_per_s is not None:
        rate = f"{short_count(hardware.device.memory_bytes_per_s)}B/s"
        table.add_row("device", "memory, read and written", "", rate, "")
    return table


def _fit_text(r_squared: float | None) -> str:
    return "" if r_squared is None else f"{r_squared:.4f}"


def links(hardware: Hardware) -> Iterator[tuple[str, str, Link]]:
    """Where, what, link: of all that is known of the levels."""
    levels = (
        ("between nodes", "out of a node", hardware.inter, hardware.inter_collectives),
        ("within a node", "out of a rank", hardware.intra, hardware.intra_collectives),
    )
    for where, wire_name, wire, collectives in levels:
        if wire is not None:
            yield where, wire_name, wire
        for each in dataclasses.fields(Collectives):
            link = vars(collectives)[each.name]
            if link is not None:
                yield where, each.name.replace("_", "-"), link


def products(hardware: Hardware) -> Iterator[tuple[str, Product]]:
    """What, line: of all that is known of matrix products."""
    for each in dataclasses.fields(Flops):
        product = hardware.device.product(each.name)
        if product is not None:
            yield f"matrix products, {each.name}", product


def notes(hardware: Hardware) -> Iterator[str]:
    """What was not measured, or not well."""
    if hardware.num_ranks == 1:
        yield (
            "links: not measured, because there is one rank; start with torchrun "
            "--nproc_per_node N -m ds_moe_ext.profile_run"
        )
    elif hardware.num_nodes == 1:
        yield "between nodes: not measured, all ranks are on one"
    elif hardware.ranks_per_node == 1:
        yield "within a node: not measured, each has one rank"
    fits = [(f"{what} {where}", link.r_squared) for where, what, link in links(hardware)]
    fits += [(what, product.r_squared) for what, product in products(hardware)]
    noisy = [what for what, r_squared in fits if r_squared is not None and r_squared < NOISY]
    if noisy:
        yield (
            f"poor fits, r² below {NOISY}: {', '.join(noisy)}; measure again on a quiet "
            "machine, without --quick"
        )


def replicas_text(hardware: Hardware, expert_bytes: int, window_s: float | None) -> str:
    """How long a replica takes, and how many hide behind a window (HECATE, rules 11 and 50)."""
    link = hardware.copy_link(hardware.num_ranks)
    text = (
        f"one more replica of an expert of {bytes_text(expert_bytes)} on every rank: "
        f"{seconds_text(expert_bytes / link.bytes_per_s)}"
    )
    if window_s is None:
        return text
    num_hidden = int(link.bytes_within(window_s) // expert_bytes)
    return f"{text}; hidden by {seconds_text(window_s)}: {num_hidden} (overlap degree t)"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="ds_moe_ext.profile_run",
        description=(
            "Measure this cluster and write its hardware file; torchrun starts it on every rank."
        ),
    )
    add_options(parser)
    try:
        return profile(parser.parse_args())
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
