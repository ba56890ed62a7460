# SPDX-License-Identifier: Apache-2.0
"""What is priced, and what came out: records that the table, the page and the files share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ds_moe_ext.commands.price.ways import BASE
from ds_moe_ext.core.hardware import Hardware
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.moe.hooks import NO_HOOKS, Hooked, on_its_way
from ds_moe_ext.planning.candidates import PRICED, Priced, Reached, Refused
from ds_moe_ext.planning.described_run import DescribedRun
from ds_moe_ext.planning.load_files import read_loads
from ds_moe_ext.planning.loads import Loads
from ds_moe_ext.planning.model_shape import ModelShape, OnItsWay, Training
from ds_moe_ext.planning.zebra_price import ZebraPrice, joined, price_zebra

SEEN = 3  # steps that plans go by, before those that are priced
LARGE = 2**22  # counts of a step, from which one step is priced in place of some


@dataclass(frozen=True, eq=False)
class Case:
    """A job on a cluster.

    Attributes:
        clusters: by their files, side by side.
        shape: of the model.
        training: how it is trained.
        reached: of datasheets.
        hooks: of its block, by which rows and copies travel.

    Raises:
        ValueError: pipeline stages on unlike clusters, or hooks that make no rows of the model's.
    """

    clusters: tuple[Hardware, ...]
    shape: ModelShape
    training: Training
    reached: Reached = field(default_factory=Reached)
    hooks: Hooked = NO_HOOKS

    def __post_init__(self) -> None:
        if self.training.parallel.pipeline > 1 and len(self._device_names) > 1:
            raise ValueError(
                f"pipeline stages on {' and '.join(sorted(self._device_names))} are not priced; "
                "give clusters of one device, or no pipeline parallelism"
            )
        self._on_its_way(cell_size=1)  # so that hooks which do not fit are refused at once

    def _on_its_way(self, cell_size: int) -> OnItsWay | None:
        return on_its_way(self.hooks, self.shape, self.training.number_type, cell_size)

    @property
    def _device_names(self) -> set[str]:
        return {each.device.name for each in self.clusters}

    @cached_property
    def hardware(self) -> Hardware:
        """The cluster, as its files say."""
        return joined(self.clusters)

    @cached_property
    def _mixed(self) -> tuple[Hardware, ...]:
        return tuple(map(self.reached.of, self.clusters))

    @property
    def has_two_kinds(self) -> bool:
        """Whether it is two clusters of unlike devices, to which zebra would give roles."""
        return len(self.clusters) == len(self._device_names) == 2

    def zebra(self, rows: Loads) -> ZebraPrice:
        """What zebra would take.

        Raises:
            ValueError: as of ``price_zebra``, or what does not go with it.
        """
        if self.training.parallel.is_any:
            raise ValueError("its roles go with no tensor, context or pipeline parallelism")
        if self.hooks.transforms:
            raise ValueError("its roles go with no transforms of rows")
        rows_LE = rows.rows_ILCE[-1].sum(axis=1)
        return price_zebra(
            self._mixed,
            self.shape,
            self.training,
            rows_LE,
            passes=self.reached.passes,
            on_its_way=self._on_its_way(cell_size=1),
        )

    def run(self, grid: Grid) -> DescribedRun:
        """The model on the cluster by one grid."""
        return DescribedRun(
            hardware=joined(self._mixed),
            shape=self.shape,
            training=self.training,
            grid=grid,
            passes=self.reached.passes,
            on_its_way=self._on_its_way(grid.cell_size),
            mixed=self._mixed,
        )

    @property
    def num_priced(self) -> int:
        """Steps whose mean is a price."""
        counts = self.training.stage_ranks * len(self.shape.moe_layers) * self.shape.num_experts
        return 1 if counts > LARGE else PRICED

    def rows(self, loads: str) -> Loads:
        """Rows of its passes, of those steps that plans go by and of those that are priced.

        Args:
            loads: a name or a path.
        """
        return read_loads(
            loads,
            ranks=self.training.stage_ranks,
            experts=self.shape.num_experts,
            layers=len(self.shape.moe_layers),
            tokens=self.training.tokens,
            top_k=self.shape.top_k,
            steps=SEEN + self.num_priced,
        )

    def with_tokens(self, tokens: int) -> Case:
        """The same with so many tokens of a rank in a pass: shorter samples, or more of them."""
        shared = tokens * self.training.parallel.sharers
        length = min(shared, self.training.length)
        training = replace(self.training, length=length, micro_batch=max(shared // length, 1))
        return replace(self, training=training)


@dataclass(frozen=True, eq=False)
class Market:
    """All that was priced.

    Attributes:
        case: what was priced.
        loads: where they are from.
        own: name of the strategy that the job's file says; empty for one that is not priced.
        priced: ways that can be, the fastest first.
        refused: ways that cannot.
        zebra: what it would take, or why it cannot be; None where devices are alike.
        asked: name of the only strategy that was asked for; empty if there are several.
    """

    case: Case
    loads: str
    own: str
    priced: Sequence[Priced]
    refused: Sequence[Refused]
    zebra: ZebraPrice | str | None = None
    asked: str = ""

    def fits(self, priced: Priced) -> bool:
        """Whether a rank has memory for it."""
        has = self.case.hardware.device.memory_bytes
        return has is None or priced.memory.total <= has

    @property
    def base(self) -> Priced | None:
        """The fastest of plain expert parallelism; of those that fit, if any does."""
        return self._fastest_of(BASE)

    @property
    def best(self) -> Priced | None:
        """The fastest of those that fit; None where none does."""
        return next(filter(self.fits, self.priced), None)

    @property
    def too_large(self) -> Priced | None:
        """The fastest, where it does not fit."""
        return next((each for each in self.priced[:1] if not self.fits(each)), None)

    @property
    def own_best(self) -> Priced | None:
        """The fastest of the job's own strategy; of those that fit, if any does."""
        return self._fastest_of(self.own)

    @property
    def traced(self) -> Priced | None:
        """The fastest of the only strategy that was asked for, else of all; likewise."""
        return self._fastest_of(self.asked) or self.best or next(iter(self.priced), None)

    @property
    def named(self) -> list[tuple[str, Priced]]:
        """The fastest, the job's own and the best plain expert parallelism, each way once, and what
        a person calls it."""
        named = (
            ("the fastest", self.best),
            ("yours", self.own_best),
            ("the best plain expert parallelism", self.base),
        )
        names: dict[int, list[str]] = {}
        ways: dict[int, Priced] = {}
        for name, each in named:
            if each is not None:
                ways[id(each)] = each
                names.setdefault(id(each), []).append(name)
        return [(" and ".join(names[key]), each) for key, each in ways.items()]

    def gain(self, priced: Priced) -> float | None:
        """Speed over the best plain expert parallelism; None where there is none."""
        return None if self.base is None else self.base.step_s / priced.step_s

    def _fastest_of(self, name: str) -> Priced | None:
        named = [each for each in self.priced if each.way.name == name]
        return next(filter(self.fits, named), None) or next(iter(named), None)
