# SPDX-License-Identifier: Apache-2.0
"""The cluster that planners and prices reckon with: a device, and the links in and between nodes.

A file in ``configs/hardware`` describes a known cluster; ``ds-moe-ext profile`` writes one of the
cluster at hand. Rates are of one direction. Pure. Shape letter: C EP ranks.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ds_moe_ext.files.documents import bytes_of, file_of, names_of, parsed
from ds_moe_ext.strict import nearest_and_all, read_record


@dataclass(frozen=True, kw_only=True)
class Link:
    """A straight line from bytes to seconds.

    Raises:
        ValueError: a value that no link has.
    """

    bytes_per_s: float  # rate
    latency_s: float = 0.0  # seconds of a transfer of no bytes; 0 where the source states none
    r_squared: float | None = None  # of the line through what was measured; null for a datasheet's

    def __post_init__(self) -> None:
        _positive("a link's bytes_per_s", self.bytes_per_s)
        _check_line("a link", "latency_s", self.latency_s, self.r_squared)

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s

    def bytes_within(self, window_s: float) -> float:
        """What can be moved behind ``window_s`` seconds of other work (HECATE, spec rule 50)."""
        return max(0.0, window_s - self.latency_s) * self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Product:
    """A straight line from multiply-adds to seconds, of dense matrix products (FSMoE, spec 4).

    Raises:
        ValueError: a value that no product has.
    """

    multiply_adds_per_s: float  # rate; half of the operations per second
    start_s: float = 0.0  # seconds of a product of nothing
    r_squared: float | None = None  # of the line through what was measured; null for a datasheet's

    def __post_init__(self) -> None:
        _positive("a product's multiply_adds_per_s", self.multiply_adds_per_s)
        _check_line("a product", "start_s", self.start_s, self.r_squared)

    def seconds(self, num_multiply_adds: float) -> float:
        return self.start_s + num_multiply_adds / self.multiply_adds_per_s


@dataclass(frozen=True, kw_only=True)
class Products:
    """Measured lines of dense matrix products, by type; null: unknown."""

    fp32: Product | None = None
    tf32: Product | None = None
    fp16: Product | None = None
    bf16: Product | None = None


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Rates of dense matrix products, operations per second (a multiply-add is two); null: unknown.

    A datasheet's peak, or what was measured.
    """

    fp32: float | None = None
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            _positive(f"a device's flops_per_s.{each.name}", vars(self)[each.name])


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one rank computes on."""

    name: str  # of the model
    memory_bytes: int | None = None  # in all; null where it is not the device's own
    memory_bytes_per_s: float | None = None  # rate of its memory
    flops_per_s: Flops = field(default_factory=Flops)  # rates of matrix products
    products: Products = field(default_factory=Products)  # what was measured of them

    def __post_init__(self) -> None:
        _positive("a device's memory_bytes", self.memory_bytes)
        _positive("a device's memory_bytes_per_s", self.memory_bytes_per_s)

    def product(self, number_type: str) -> Product | None:
        """The line of matrix products: what was measured, else by ``flops_per_s``, else None.

        Args:
            number_type: a name of ``Flops``.

        Raises:
            ValueError: no such name.
        """
        if number_type not in vars(self.flops_per_s):
            raise ValueError(
                f"number_type is {number_type!r}; choose {', '.join(vars(self.flops_per_s))}"
            )
        measured: Product | None = vars(self.products)[number_type]
        flops_per_s: float | None = vars(self.flops_per_s)[number_type]
        if measured is not None or flops_per_s is None:
            return measured
        return Product(multiply_adds_per_s=flops_per_s / 2)


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """What collectives cost among the ranks of one level, all its groups at once; null: unknown.

    Between nodes a group has one rank of each node, within a node all its ranks.
    """

    all_to_all: Link | None = None  # bytes that one rank gives, its own part among them
    all_gather: Link | None = None  # bytes that one rank ends up with
    reduce_scatter: Link | None = None  # bytes that one rank gives
    all_reduce: Link | None = None  # bytes that one rank gives
    # bytes of weights that the busiest node takes in from others, all its ranks together; within a
    # node, that the busiest rank takes in
    copy: Link | None = None


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A cluster of equal nodes."""

    name: str  # of the cluster
    source: str  # where the numbers come from: a datasheet, a paper, a measurement
    num_nodes: int  # nodes that the numbers hold for
    ranks_per_node: int  # ranks on each; neighbours in rank share a node
    device: Device  # of every rank
    # what one rank sends to the others of its node; null where it is not known
    intra: Link | None = None
    # what one node sends to the others, all its network cards together; null likewise
    inter: Link | None = None
    # what was measured within a node
    intra_collectives: Collectives = field(default_factory=Collectives)
    # what was measured between nodes
    inter_collectives: Collectives = field(default_factory=Collectives)
    # replicas of weights over all ranks, into nodes and on within them, as bytes that the busiest
    # rank takes in; null where there is one level, or nothing was measured
    copy: Link | None = None
    # seconds in which a rank's host issues one operation of torch; null: 9e-6, as one H200's took
    host_launch_s: float | None = None
    # names of devices, as their driver shows them, for whose clusters the file stands where a run
    # names none
    stands_for: list[str] = field(default_factory=list, hash=False)

    def __post_init__(self) -> None:
        _positive("num_nodes", self.num_nodes)
        _positive("ranks_per_node", self.ranks_per_node)
        _positive("host_launch_s", self.host_launch_s)
        for name in self.stands_for:
            if not name.strip():
                raise ValueError(
                    f"stands_for has {name!r}; give names of devices as "
                    "torch.cuda.get_device_name shows them"
                )

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def node_of_ep_ranks(self, num_ep_ranks: int, etp_size: int = 1) -> np.ndarray:
        """Node of each EP rank, by its first rank, int64 ``[C]``."""
        return np.arange(num_ep_ranks) * etp_size // self.ranks_per_node

    def ep_rank_links(self, num_ranks: int, etp_size: int) -> EpRankLinks:
        """What replicas and rows travel over, where experts are spread over ``num_ranks`` ranks in
        EP ranks of ``etp_size``; rows go over the link of replicas where the file says no other.

        Raises:
            ValueError: the file does not say.
        """
        copy = self.copy_link(num_ranks)
        intra = self.intra or copy
        of_ep_rank = replace(intra, bytes_per_s=etp_size * intra.bytes_per_s)
        inter = self.inter or copy
        # A node takes all parts of an expert in at its cards, a rank its own at its link.
        parts = etp_size if num_ranks > self.ranks_per_node else 1
        return EpRankLinks(replace(copy, bytes_per_s=copy.bytes_per_s / parts), inter, of_ep_rank)

    def copy_link(self, num_ranks: int) -> Link:
        """The link that replicas of weights wait for, over ``num_ranks`` ranks.

        What was measured over all ranks (HECATE, spec rule 50) goes before what was measured
        between nodes, where a weight crosses into each node once, and that before what a datasheet
        says of a node's network cards together (rule 11, choice B7). Ranks of one node likewise.

        Raises:
            ValueError: the file does not say.
        """
        spans_nodes = num_ranks > self.ranks_per_node
        if spans_nodes:
            link = self.copy or self.inter_collectives.copy or self.inter
        else:
            link = self.intra_collectives.copy or self.intra
        if link is None and num_ranks == 1:
            return Link(bytes_per_s=1e18)  # a lone rank sends nothing, and it takes no time
        if link is None:
            where = "between nodes" if spans_nodes else "within a node"
            key = "inter" if spans_nodes else "intra"
            raise ValueError(
                f"hardware {self.name!r} does not give the speed of weight transfers {where}, "
                f"but {num_ranks} ranks with {self.ranks_per_node} on a node need it; measure "
                f"it with ds-moe-ext profile, or add the key {key!r} to its file"
            )
        return link

    def to_json(self) -> str:
        """The file's text; what is not known is left out."""
        return json.dumps(_without_nothing(dataclasses.asdict(self)), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: bytes | str) -> Hardware:
        """Read strictly.

        Raises:
            ValueError: no JSON, or what is wrong in it.
        """
        return read_record(cls, parsed(text), "hardware")


class EpRankLinks(NamedTuple):
    """What replicas and rows travel over."""

    copy: Link  # replicas of weights, by what each rank of an ETP group has of them
    inter: Link  # what one node sends to the others
    intra: Link  # what an EP rank sends to the others of its node


def ranks_per_node_of(hosts_C: Sequence[str]) -> int:
    """Ranks on each node, from the host name of every rank.

    Raises:
        ValueError: nodes of different sizes, or ranks of one node that are not neighbours.
    """
    size = next((i for i, host in enumerate(hosts_C) if host != hosts_C[0]), len(hosts_C))
    names = list(hosts_C[::size])
    evenly = [name for name in names for _ in range(size)]
    if list(hosts_C) != evenly or len(set(names)) < len(names):
        raise ValueError(
            f"ranks run on hosts {', '.join(hosts_C)}; start the same number on each host, "
            "one host after another"
        )
    return size


_KIND = "hardware"  # of configs/


def read_hardware(path: str | Path) -> Hardware:
    """The cluster that a file describes.

    Args:
        path: of a file, or a name of ``configs/hardware``.

    Raises:
        ValueError: there is no such file, or what is wrong in it.
    """
    try:
        text = bytes_of(file_of(_KIND, path))
    except ValueError as error:
        raise ValueError(
            f"hardware file {str(path)!r} cannot be read ({error}); write one with ds-moe-ext "
            "profile, or name one of configs/hardware: "
            f"{nearest_and_all(str(path), names_of(_KIND))}"
        ) from error
    try:
        return Hardware.from_json(text)
    except ValueError as error:
        raise ValueError(f"hardware file {str(path)!r}: {error}") from error


@cache
def shipped_for(device_name: str) -> Path | None:
    """The file of ``configs/hardware`` that stands for clusters of a device; None where none does.

    Args:
        device_name: as its driver shows it.
    """
    files = names_of(_KIND).values()
    return next((file for file in files if device_name in read_hardware(file).stands_for), None)


def _check_line(whose: str, start_name: str, start_s: float, r_squared: float | None) -> None:
    if not 0 <= start_s < math.inf:
        raise ValueError(
            f"{whose}'s {start_name} is {start_s}; it must be at least 0 and finite: write "
            "seconds, or leave it out if unknown"
        )
    if r_squared is not None and not r_squared <= 1:
        raise ValueError(f"{whose}'s r_squared is {r_squared}; it must be at most 1")


LEAST, MOST = 1e-9, 1e30
"""Of rates and sizes: seconds that are found from them are numbers, too."""


def _positive(what: str, value: float | None) -> None:
    if value is not None and not LEAST <= value <= MOST:
        raise ValueError(
            f"{what} is {value}; it must be above 0 and finite (from {LEAST} to {MOST}): "
            "correct it, or leave it out if unknown"
        )


def _without_nothing(value: Any) -> Any:
    """Without keys whose value is None, or an object or a list of nothing."""
    if not isinstance(value, Mapping):
        return value
    kept = {key: _without_nothing(inner) for key, inner in value.items()}
    return {key: inner for key, inner in kept.items() if inner not in (None, {}, [])}
