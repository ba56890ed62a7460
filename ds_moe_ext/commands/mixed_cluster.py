# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext plan mixed-cluster``: from new and old GPUs to a run of ``zebra``.

Its job is read as ``ds-moe-ext price`` reads it. ``price_zebra`` divides the ranks into groups and
the samples into stripes; plain expert parallelism, of all GPUs and of the new ones alone, is priced
as there. What comes out is a verdict, the block of JSON that runs it, and the order of the ranks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from ds_moe_ext.commands.price.inputs import (
    AskedJob,
    read_clusters,
    read_job,
    read_model,
    training_of,
)
from ds_moe_ext.commands.price.market import BASE, Case, Market, chosen_strategies, priced_market
from ds_moe_ext.commands.price.words import GIB, assumed, grid_text
from ds_moe_ext.core.hardware import Hardware
from ds_moe_ext.files.documents import names_of
from ds_moe_ext.planning.model_shape import Training
from ds_moe_ext.planning.zebra_price import ZebraPrice
from ds_moe_ext.report.units import bytes_text, counted, say, wide_console
from ds_moe_ext.strategies.settings import BLOCK, read_settings

NUMBER_TYPES = ("bf16", "fp16", "fp32")  # the first that both devices multiply in is taken
NOT_WITH_ROLES = ("balance", "expert_parallel_size", "expert_sharding_size", "options")


class Rival(NamedTuple):
    """What a step of zebra's tokens takes, and memory of the fullest rank."""

    name: str
    step_s: float | None  # seconds; None where it cannot be
    num_bytes: float
    fits: bool
    why: str = ""  # it cannot be


@dataclass(frozen=True, eq=False)
class Mixed:
    """A job on new and old GPUs, and what it takes."""

    asked: AskedJob
    case: Case
    loads: str  # where they are from

    @property
    def is_megatron(self) -> bool:
        """Its flags have the model's sizes."""
        return self.asked.shape is not None

    @cached_property
    def zebra(self) -> ZebraPrice | str:
        """What zebra takes, or why it cannot be. Under Megatron no experts move."""
        return self.case.zebra(self.case.rows(self.loads), moves=not self.is_megatron)

    @property
    def sides(self) -> tuple[Hardware, Hardware]:
        """The cluster with the attention ranks, and the other; by speed where there are none."""
        if isinstance(self.zebra, ZebraPrice):
            first = self.zebra.attention
        else:
            kind = self.case.training.number_type
            lines = [each.device.product(kind) for each in self.case.clusters]
            speeds = [0.0 if line is None else line.multiply_adds_per_s for line in lines]
            first = speeds.index(max(speeds))
        return self.case.clusters[first], self.case.clusters[1 - first]

    @cached_property
    def rivals(self) -> list[Rival]:
        """DistEP, expert parallelism on all GPUs, and on the new ones alone."""
        new, _ = self.sides
        clusters = self.case.clusters
        found = []
        if isinstance(self.zebra, ZebraPrice):
            fullest = max(self.zebra.attention_bytes, self.zebra.expert_bytes)
            found = [Rival("DistEP, the same roles in turns", self.zebra.dist_s, fullest, True)]
        return [
            *found,
            self._expert_parallel(f"EP on all {self.case.training.num_ranks} GPUs", clusters),
            self._expert_parallel(f"EP on {new.num_ranks} {new.device.name} alone", (new,)),
        ]

    def _expert_parallel(self, name: str, clusters: tuple[Hardware, ...]) -> Rival:
        training, num_ranks = self.case.training, sum(each.num_ranks for each in clusters)
        samples = training.num_ranks * training.micro_batches  # in micro-batches of a step
        own = replace(training, num_ranks=num_ranks, micro_batches=-(-samples // num_ranks))
        try:
            market = priced_market(
                replace(self.case, clusters=clusters, training=own),
                self.loads,
                chosen_strategies({}, BASE),
                every_grid=False,
                is_quick=True,
                to=Console(quiet=True),
            )
        except ValueError as error:
            return Rival(name, None, 0, False, str(error))
        return _rival(name, market, training)

    @property
    def verdict(self) -> str:
        """Whether zebra pays."""
        if isinstance(self.zebra, str):
            return f"zebra is not possible: {self.zebra}"
        rivals = [each for each in self.rivals if each.fits]
        best = min(rivals, key=lambda each: each.step_s or 0.0)
        times = (best.step_s or 0.0) / self.zebra.step_s
        if times > 1:
            return f"use zebra: {times:.2f} times as fast as the next, {best.name}"
        return f"zebra does not pay: {best.name} is {1 / times:.2f} times as fast; use that"

    def block(self, zebra: ZebraPrice) -> Mapping[str, Any]:
        """Keys of ``ds_moe_ext``, over what the job's file has."""
        before = self.asked.document.get(BLOCK) or {}
        roles: dict[str, Any] = {
            "attention_size": zebra.shape.attention_ranks,
            "expert_size": zebra.shape.expert_ranks,
            "num_micro_batches": zebra.shape.num_stripes,
        }
        if not self.is_megatron:
            # Measured at start, since what is priced rests on datasheets.
            roles["profile"] = {"sequence_length": self.case.training.length}
            roles["recompute_experts"] = self.case.training.recomputes
        kept = {key: value for key, value in before.items() if key not in NOT_WITH_ROLES}
        return {**kept, "enabled": True, "strategy": "zebra", "zebra": roles}

    def document(self, block: Mapping[str, Any]) -> Mapping[str, Any]:
        """What ``--out`` has."""
        if self.is_megatron:
            return {BLOCK: block}
        training = self.case.training
        written = {
            **self.asked.document,
            "train_micro_batch_size_per_gpu": training.micro_batch,
            "gradient_accumulation_steps": training.micro_batches,
            BLOCK: block,
        }
        if not self.asked.document:
            written |= {"zero_optimization": {"stage": training.zero_stage}}
            written |= {training.number_type: {"enabled": True}}
        return written


def _rival(name: str, market: Market, training: Training) -> Rival:
    """The best plain expert parallelism, for as many tokens as a step of ``training`` has."""
    base = market.base
    if base is None:
        why = next((each.why for each in market.refused), "no grid divides the experts")
        return Rival(name, None, 0, False, why)
    step_s = training.tokens_of_step / base.tokens_per_s
    named = f"{name}, {grid_text(base.way.grid)}"
    return Rival(named, step_s, base.memory.total, market.fits(base))


def plan_mixed_cluster(given: argparse.Namespace) -> int:
    """Price, print and write. 0, or 1 if zebra cannot be."""
    mixed, to = _read(given), wide_console()
    hosts = _hosts(given.hosts, mixed)
    zebra = mixed.zebra
    say(to, mixed.verdict)
    to.print(_table(mixed))
    lines = [f"{each.name}: not priced: {each.why}" for each in mixed.rivals if each.why]
    written: list[tuple[Any, str]] = []
    if isinstance(zebra, ZebraPrice):
        block = mixed.block(zebra)
        read_settings(document := mixed.document(block))
        order = _rank_order(zebra, mixed, hosts)
        lines += [*_words(mixed, zebra), f"ranks: {order.text}", json.dumps({BLOCK: block})]
        if given.hostfile is not None and order.hostfile is None:
            raise ValueError(
                f"--hostfile is {str(given.hostfile)!r}, but groups divide the GPUs of a node, so "
                f"that no hostfile has their order; start each process with its RANK: {order.text}"
            )
        written = [(given.out, json.dumps(document, indent=2) + "\n")]
        written += [(given.hostfile, order.hostfile or "")]
    lines += [
        "assumed: zebra and DistEP by zebra's simulator, where the host takes no time and a rank "
        "sends everything by its network card; EP as ds-moe-ext price does",
        *assumed(Market(mixed.case, given.loads, "", (), ()))[:1],
    ]
    for path, text in written:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            lines.append(f"wrote {path}")
    for line in lines:
        say(to, line)
    return 0 if isinstance(zebra, ZebraPrice) else 1


def _read(given: argparse.Namespace) -> Mixed:
    clusters = read_clusters(given.hardware or (), given.nodes)
    names = [each.device.name for each in clusters]
    if len(names) != 2 or len(set(names)) != 2:
        raise ValueError(
            f"--hardware has devices {', '.join(names) or 'none'}; give two files, or names of "
            f"configs/hardware, with different devices: {', '.join(names_of('hardware'))}"
        )
    asked = _usual(clusters) if given.job is None else read_job(given.job)
    shape = asked.shape if given.model is None else read_model(given.model)
    if shape is None:
        raise ValueError("--model is missing; name a config.json, or one of configs/models")
    sizes = ("length", "micro_batch", "micro_batches", "recomputes")
    num_ranks = sum(each.num_ranks for each in clusters)
    training = training_of(asked, shape, num_ranks, {name: vars(given)[name] for name in sizes})
    settings, _ = read_settings(asked.document)
    case = Case(tuple(clusters), shape, training, hooks=settings.hooks)
    return Mixed(asked, case, given.loads)


def _usual(clusters: Sequence[Hardware]) -> AskedJob:
    """Where no file is given: a number type that both devices have."""
    for name in NUMBER_TYPES:
        if all(each.device.product(name) for each in clusters):
            return AskedJob({}, None, {"number_type": name})
    raise ValueError(
        f"{clusters[0].name!r} and {clusters[1].name!r} have no number type in common; add "
        "'device.flops_per_s' to their files"
    )


def _table(mixed: Mixed) -> Table:
    zebra = mixed.zebra
    rows = list(mixed.rivals)
    if isinstance(zebra, ZebraPrice):
        fullest = max(zebra.attention_bytes, zebra.expert_bytes)
        rows.insert(0, Rival("zebra", zebra.step_s, fullest, True))
    training = mixed.case.training
    title = f"a step of {training.tokens_of_step:,} tokens; memory of the fullest rank"
    table = Table("", title=title, title_justify="left")
    for heading in ("ms", "tokens/s", "zebra is", "GiB"):
        table.add_column(heading, justify="right")
    for each in rows:
        if each.step_s is None:
            table.add_row(each.name, "", "", "", "")
            continue
        gain = f"{each.step_s / zebra.step_s:.2f} x" if isinstance(zebra, ZebraPrice) else ""
        table.add_row(
            each.name,
            f"{1e3 * each.step_s:,.1f}",
            f"{training.tokens_of_step / each.step_s:,.0f}",
            gain,
            f"{each.num_bytes / GIB:.1f}" + " too much" * (not each.fits),
        )
    return table


def _words(mixed: Mixed, zebra: ZebraPrice) -> list[str]:
    """The group, the experts that move, memory, and what Megatron's flags are."""
    (new, old), shape, training = mixed.sides, zebra.shape, mixed.case.training
    group = training.micro_batch * (shape.attention_ranks + shape.expert_ranks)
    stripe = shape.stripe_samples(group)
    lines = [
        f"{counted(zebra.num_groups, 'group')}, M : N = {shape.attention_ranks} : "
        f"{shape.expert_ranks}: attention on {new.device.name}, experts on {old.device.name}; "
        f"R = {shape.num_stripes} stripes of {counted(stripe, 'sample')}",
        "Asym-EA, experts that each expert rank gives to attention ranks, by layer: "
        f"moved = {list(zebra.moved_L)}" + "; not under Megatron" * mixed.is_megatron,
        "memory: attention rank "
        f"{_of(zebra.attention_bytes, new)}, expert rank {_of(zebra.expert_bytes, old)}",
    ]
    if mixed.is_megatron:
        samples = group * zebra.num_groups * training.micro_batches
        lines.append(f"flags: --micro-batch-size {stripe} --global-batch-size {samples}")
    return lines


def _of(num_bytes: float, hardware: Hardware) -> str:
    has = hardware.device.memory_bytes
    return bytes_text(num_bytes) + ("" if has is None else f" of {bytes_text(has)}")


# The order of the ranks.


class RankOrder(NamedTuple):
    """Which GPU has which rank."""

    text: str
    hostfile: str | None  # DeepSpeed's; None where groups divide nodes


def _hosts(given: Sequence[str] | None, mixed: Mixed) -> list[list[str]]:
    """Names of each cluster's hosts."""
    clusters = mixed.case.clusters
    if given is None:
        new = mixed.sides[0]
        names = ["new" if each is new else "old" for each in clusters]
        return [[f"{name}{n}" for n in range(of.num_nodes)] for name, of in zip(names, clusters)]
    hosts = [each.split(",") for each in given]
    found, wanted = [len(each) for each in hosts], [each.num_nodes for each in clusters]
    flat = [name for each in hosts for name in each]
    if found != wanted or len(set(flat)) < len(flat) or not all(flat):
        raise ValueError(
            f"--hosts is {' '.join(given)!r}, but the clusters have "
            f"{' and '.join(map(str, wanted))} nodes; name each node once, as new1,new2 old1, or "
            "give other --nodes"
        )
    return hosts


def _rank_order(zebra: ZebraPrice, mixed: Mixed, hosts: Sequence[Sequence[str]]) -> RankOrder:
    """Group by group, its attention ranks first: by a launcher that counts hosts one after the
    other where it can be."""
    new, old = zebra.attention, 1 - zebra.attention
    gpus = [
        [(host, gpu) for host in hosts[i] for gpu in range(mixed.case.clusters[i].ranks_per_node)]
        for i in (new, old)
    ]
    sizes = zebra.shape.attention_ranks, zebra.shape.expert_ranks
    ordered = [
        place
        for group in range(zebra.num_groups)
        for side, size in zip(gpus, sizes)
        for place in side[group * size : (group + 1) * size]
    ]
    runs = [(host, [gpu for _, gpu in run]) for host, run in groupby(ordered, lambda at: at[0])]
    if len({host for host, _ in runs}) == len(runs):
        text = (
            f"hosts in the order {','.join(host for host, _ in runs)}; the first {sizes[0]} of "
            f"each {sum(sizes)} ranks have attention, so that attention_ep_ranks stays null"
        )
        return RankOrder(text, "".join(f"{host} slots={len(own)}\n" for host, own in runs))
    said, rank = [], 0
    for host, own in runs:
        said.append(f"{_range(rank, len(own))} on {host} GPU {_range(own[0], len(own))}")
        rank += len(own)
    return RankOrder(f"{'; '.join(said)} (RANK and LOCAL_RANK; no hostfile has this order)", None)


def _range(first: int, count: int) -> str:
    return f"{first}" if count == 1 else f"{first}-{first + count - 1}"
