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
from pathlib import Path
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
from ds_moe_ext.commands.price.market import (
    BASE,
    EVERY,
    Case,
    Market,
    chosen_strategies,
    priced_market,
)
from ds_moe_ext.commands.price.words import GIB, assumed, grid_text
from ds_moe_ext.core.hardware import Hardware
from ds_moe_ext.files.documents import names_of
from ds_moe_ext.planning.zebra_price import ZebraPrice
from ds_moe_ext.report.units import bytes_text, counted, say, wide_console
from ds_moe_ext.strategies.settings import BLOCK, read_settings

NUMBER_TYPES = ("bf16", "fp16", "fp32")  # the first that both devices multiply in is taken
NOT_WITH_ROLES = ("expert_parallel_size", "expert_sharding_size", "options")


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
        """What zebra takes, or why it cannot be."""
        once = self.may_send_once if self.balance is None else (False,)
        rows = self.case.rows(self.loads)
        return self.case.zebra(rows, is_megatron=self.is_megatron, sends_once=once)

    @property
    def may_send_once(self) -> tuple[bool, ...]:
        """``ep.send_once`` as the job says, or both; not with ``ep.static_capacity``."""
        ep = self._before.get("ep") or {}
        if ep.get("static_capacity") is not None:
            return (False,)
        return (bool(ep["send_once"]),) if "send_once" in ep else (False, True)

    @property
    def balance(self) -> str | None:
        """The strategy whose replicas the job asks for, over another."""
        return self._before.get("balance")

    @property
    def _before(self) -> Mapping[str, Any]:
        """Keys of ``ds_moe_ext`` that the job's file has."""
        return self.asked.document.get(BLOCK) or {}

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
        """DistEP; plain expert parallelism and the fastest strategy, on all GPUs and on the new."""
        new, _ = self.sides
        clusters = self.case.clusters
        found = []
        if isinstance(self.zebra, ZebraPrice):
            fullest = max(self.zebra.attention_bytes, self.zebra.expert_bytes)
            found = [Rival("DistEP, the same roles in turns", self.zebra.dist_s, fullest, True)]
        return [
            *found,
            *self._without_roles(f"on all {self.case.training.num_ranks} GPUs", clusters),
            *self._without_roles(f"on {new.num_ranks} {new.device.name} alone", (new,)),
        ]

    def _without_roles(self, where: str, clusters: tuple[Hardware, ...]) -> list[Rival]:
        training, num_ranks = self.case.training, sum(each.num_ranks for each in clusters)
        samples = training.num_ranks * training.micro_batches  # in micro-batches of a step
        own = replace(training, num_ranks=num_ranks, micro_batches=-(-samples // num_ranks))
        markets = []
        for sends_once, asked in zip(self.may_send_once, (EVERY, BASE)):
            document = {BLOCK: {"enabled": True, "ep": {"send_once": sends_once}}}
            try:
                market = priced_market(
                    replace(self.case, clusters=clusters, training=own),
                    self.loads,
                    chosen_strategies(document, asked),
                    every_grid=False,
                    is_quick=True,
                    to=Console(quiet=True),
                )
            except ValueError as error:
                return [Rival(f"EP {where}", None, 0, False, str(error))]
            markets.append(market)
        fits, best = markets[0].fits, markets[0].best
        bases = [market.base for market in markets if market.base is not None]
        if not bases:
            why = next((each.why for each in markets[0].refused), "no grid divides the experts")
            return [Rival(f"EP {where}", None, 0, False, why)]
        base = min(bases, key=lambda each: (not fits(each), each.step_s))
        rows = [("EP", base)]
        if best and best.way.name != BASE and (best.step_s < base.step_s or not fits(base)):
            rows.append((best.way.name, best))
        return [
            Rival(
                f"{name} {where}, {grid_text(each.way.grid)}",
                training.tokens_of_step / each.tokens_per_s,
                each.memory.total,
                fits(each),
            )
            for name, each in rows
        ]

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

    def block(self, zebra: ZebraPrice, device: str | None) -> Mapping[str, Any]:
        """Keys of ``ds_moe_ext``, over what the job's file has; roles by a device, if it is one."""
        roles: dict[str, Any] = {
            "attention_size": zebra.shape.attention_ranks,
            "expert_size": zebra.shape.expert_ranks,
            "num_micro_batches": zebra.shape.num_stripes,
            "recompute_experts": self.case.training.recomputes,
        }
        if device is not None:
            roles["attention_device"] = device
        if self.is_megatron:
            roles["moved"] = list(zebra.moved_L)
        else:  # measured at start, since what is priced rests on datasheets
            roles["profile"] = {"sequence_length": self.case.training.length}
        kept = {key: value for key, value in self._before.items() if key not in NOT_WITH_ROLES}
        if zebra.shape.expert_ranks == 1:
            kept.pop("balance", None)
        if zebra.once_to:
            kept["ep"] = {**(kept.get("ep") or {}), "send_once": True}
        return {**kept, "enabled": True, "strategy": "zebra", "zebra": roles}

    def document(self, block: Mapping[str, Any]) -> Mapping[str, Any]:
        """What ``--out`` has."""
        if self.is_megatron:
            return {BLOCK: block}
        training = self.case.training
        written = {
            "zero_optimization": {"stage": training.zero_stage},
            **self.asked.document,
            "train_micro_batch_size_per_gpu": training.micro_batch,
            "gradient_accumulation_steps": training.micro_batches,
            BLOCK: block,
        }
        if "number_type" not in self.asked.sizes or self.no_longer:
            written |= {training.number_type: {"enabled": True}}
        return written | {kind: {"enabled": False} for kind in self.no_longer}

    @property
    def no_longer(self) -> list[str]:
        """The job's number type, where one of the devices lacks it."""
        asked, taken = self.asked.sizes.get("number_type"), self.case.training.number_type
        return [] if asked in (None, taken) else [asked]

    def flags(self, zebra: ZebraPrice, out: Path | None) -> str:
        """Of Megatron, over those of the job, and those of the job that have to go."""
        shape, training, before = zebra.shape, self.case.training, self.asked.sizes
        group = training.micro_batch * (shape.attention_ranks + shape.expert_ranks)
        samples = group * zebra.num_groups * training.micro_batches // training.parallel.sharers
        added = [
            f"--micro-batch-size {shape.stripe_samples(group)} --global-batch-size {samples}",
            *[f"--{training.number_type}" for _ in self.no_longer],
        ]
        if training.length != before.get("length"):
            added.append(f"--seq-length {training.length}")
        if training.recomputes and not before.get("recomputes"):
            added.append(
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
            )
        if out is not None:
            added.append(f"--ds-moe-ext-config {out}")
        dropped = [f"--{kind}" for kind in self.no_longer]
        if "expert_parallel_size" in self._before:
            dropped.append("--expert-model-parallel-size")
        return " ".join(added) + (f"; leave out {', '.join(dropped)}" if dropped else "")


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
        order = _rank_order(zebra, mixed, hosts)
        block = mixed.block(zebra, order.device)
        read_settings(document := mixed.document(block))
        lines += [
            *_words(mixed, zebra, given.out),
            f"ranks: {order.text}",
            json.dumps({BLOCK: block}),
        ]
        written = [(given.out, json.dumps(document, indent=2) + "\n")]
        written += [(given.hostfile, order.hostfile)]
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
    asked = AskedJob({}, None, {}) if given.job is None else read_job(given.job)
    shape = asked.shape if given.model is None else read_model(given.model)
    if shape is None:
        raise ValueError("--model is missing; name a config.json, or one of configs/models")
    sizes = ("length", "micro_batch", "micro_batches", "recomputes")
    num_ranks = sum(each.num_ranks for each in clusters)
    stated = {name: vars(given)[name] for name in sizes}
    stated["number_type"] = _number_type(clusters, asked.sizes.get("number_type"))
    training = training_of(asked, shape, num_ranks, stated)
    settings, _ = read_settings(asked.document)
    case = Case(tuple(clusters), shape, training, hooks=settings.hooks)
    return Mixed(asked, case, given.loads)


def _number_type(clusters: Sequence[Hardware], asked: str | None) -> str:
    """What the job asks for; in place of bf16, or where there is no job, one that both devices
    have."""
    for name in NUMBER_TYPES if asked in (None, NUMBER_TYPES[0]) else [asked]:
        if all(each.device.product(name) for each in clusters):
            return name
    raise ValueError(
        f"{clusters[0].name!r} and {clusters[1].name!r} do not both multiply in "
        f"{asked or 'one number type'} by their files; add 'device.flops_per_s' there"
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


def _words(mixed: Mixed, zebra: ZebraPrice, out: Path | None) -> list[str]:
    """The group, the experts that move, memory, and what Megatron's flags are."""
    (new, old), shape, training = mixed.sides, zebra.shape, mixed.case.training
    group = training.micro_batch * (shape.attention_ranks + shape.expert_ranks)
    stripe = shape.stripe_samples(group)
    lines = [
        f"{counted(zebra.num_groups, 'group')}, M : N = {shape.attention_ranks} : "
        f"{shape.expert_ranks}: attention on {new.device.name}, experts on {old.device.name}; "
        f"R = {shape.num_stripes} stripes of {counted(stripe, 'sample')}",
        "Asym-EA, experts that each expert rank gives to attention ranks, by layer: "
        f"moved = {list(zebra.moved_L)}",
        "memory: attention rank "
        f"{_of(zebra.attention_bytes, new)}, expert rank {_of(zebra.expert_bytes, old)}",
    ]
    if zebra.once_to:
        target = "node" if zebra.once_to > 1 else "rank"
        lines.append(
            f"ep.send_once: a token's row travels once to each {target} with experts of its own, "
            "so many as uniform routing has in the mean; adding up what comes back is taken to "
            "take no time"
        )
    if mixed.balance is not None:
        why = "kept; its replicas among expert ranks, which shorten a step, are not priced"
        if shape.expert_ranks == 1:
            why = "one expert rank has nobody to send replicas to; left out"
        lines.append(f'balance "{mixed.balance}": {why}')
    if training.number_type != (asked := mixed.asked.sizes.get("number_type", NUMBER_TYPES[0])):
        lines.append(
            f"number type: {training.number_type}, since one of the devices has no {asked} by its "
            "hardware file"
        )
    if mixed.is_megatron:
        lines.append(f"flags: {mixed.flags(zebra, out)}")
    return lines


def _of(num_bytes: float, hardware: Hardware) -> str:
    has = hardware.device.memory_bytes
    return bytes_text(num_bytes) + ("" if has is None else f" of {bytes_text(has)}")


# The order of the ranks.


class RankOrder(NamedTuple):
    """Which GPU has which rank."""

    text: str
    hostfile: str  # DeepSpeed's
    device: str | None  # of attention ranks, where neighbours make no group


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
    """Hosts group by group, those of its attention ranks first; where groups divide nodes, all
    hosts with attention first."""
    new, old = zebra.attention, 1 - zebra.attention
    clusters, shape = mixed.case.clusters, zebra.shape
    slots = {host: clusters[i].ranks_per_node for i in (new, old) for host in hosts[i]}
    size, of_new = shape.attention_ranks + shape.expert_ranks, clusters[new].device.name
    per_group = [
        divmod(ranks, clusters[i].ranks_per_node)
        for i, ranks in ((new, shape.attention_ranks), (old, shape.expert_ranks))
    ]
    if any(rest for _, rest in per_group):
        ordered, device = [*hosts[new], *hosts[old]], of_new
        how = f"devices whose name has {of_new!r} have attention, and each group takes the next"
    else:
        sides, device = [(hosts[i], n) for i, (n, _) in zip((new, old), per_group)], None
        groups = range(zebra.num_groups)
        ordered = [host for g in groups for own, n in sides for host in own[g * n : g * n + n]]
        how = f"the first {shape.attention_ranks} of each {size} ranks have attention"
    lines = "".join(f"{host} slots={slots[host]}\n" for host in ordered)
    return RankOrder(f"hosts in the order {','.join(ordered)}; {how}", lines, device)
