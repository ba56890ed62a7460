"""What a strategy is, and how JSON names one.

A strategy is a frozen dataclass: its fields are its JSON keys. One of the user's own is named
``"package.module:Class"``. Shape letters: L layers, C cells, E experts.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from ds_moe_ext.layout import ParallelLayout
from ds_moe_ext.placement import Placement, Share
from ds_moe_ext.schedule.program import Stage
from ds_moe_ext.schedule.task import Lane, Op, Schedule


@dataclass(frozen=True, eq=False)
class Job:
    """All that a planner may know. The same on every rank.

    Attributes:
        rows_LCE: rows that each sender is predicted to route to each expert, ``[L, C, E]``.
        homes: where the weights of each layer's experts live.
    """

    rows_LCE: np.ndarray
    homes: tuple[Placement, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """What a strategy decided for one layer, until the next plan.

    Attributes:
        home: where an expert's weights and optimizer state live.
        target: where the expert computes this step.
        share: how the copies of an expert divide each sender's rows.
        forward_degree: spans that the tokens of a forward pass are cut into.
        backward_degree: and of a backward pass.
    """

    home: Placement
    target: Placement
    share: Share
    forward_degree: int = 1
    backward_degree: int = 1

    @property
    def num_chunks(self) -> int:
        """Finest chunks: both degrees divide them."""
        return int(np.lcm(self.forward_degree, self.backward_degree))


@dataclass(frozen=True, eq=False)
class Site:
    """What a stage may know about the layer it serves."""

    plan: Plan
    layout: ParallelLayout
    layer: int


class Strategy(Protocol):
    """One way to run MoE layers."""

    def uses(self) -> tuple[tuple[str, Lane], ...]:
        """The (axis, lane) pairs that need a communicator. Pure."""
        ...

    def plan(self, job: Job) -> tuple[Plan, ...]:
        """One plan a layer. Pure: equal jobs give equal plans on every rank."""
        ...

    def schedules(self, plan: Plan, layer: int, *, gated: bool) -> tuple[Schedule, Schedule]:
        """Forward and backward of one layer; ``gated`` as in ``wires.layer_schedule``. Pure."""
        ...

    def stages(self, site: Site) -> Mapping[Op, Stage]:
        """Stages that differ from the common ones; usually none."""
        ...


StrategyT = TypeVar("StrategyT", bound=type)
_STRATEGIES: dict[str, type] = {}


def register(name: str) -> Callable[[StrategyT], StrategyT]:
    """Give a strategy its JSON name."""

    def add(cls: StrategyT) -> StrategyT:
        if name in _STRATEGIES:
            raise ValueError(f"strategy {name!r} is already {_STRATEGIES[name].__qualname__}")
        if not dataclasses.is_dataclass(cls):
            raise TypeError(f"{cls.__qualname__} must be a dataclass: its fields are JSON keys")
        _STRATEGIES[name] = cls
        return cls

    return add


def registered() -> Mapping[str, type]:
    """Strategies by JSON name."""
    return _STRATEGIES


def class_at(path: str) -> type:
    """The strategy class at ``"package.module:Class"``.

    Raises:
        ValueError: there is none, or it is not a dataclass.
    """
    module, _, attribute = path.partition(":")
    try:
        cls = vars(importlib.import_module(module))[attribute]
    except Exception as error:  # whatever the user's module raises
        raise ValueError(
            f"ds_moe_ext.strategy is {path!r}, which cannot be imported ({error!r}); give the "
            "importable module and the class in it, as 'my_package.my_module:MyStrategy'"
        ) from error
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ValueError(
            f"ds_moe_ext.strategy is {path!r}, which is not a dataclass; make it one: its fields "
            "are its JSON keys"
        )
    return cls
