# SPDX-License-Identifier: Apache-2.0
"""Parameter groups as DeepSpeed's wrappers must have them, beside those that the user made.

ZeRO 1 and 2, and half precision, take the tensors of a group for one flat one, which ranks share
that have all of it. So experts need groups of their own, and so does nothing else: a group without
anything to train is one that they cannot flatten. But whoever made the optimizer knows its groups
by their places: a schedule of the learning rate keeps a list of as many rates, and its state is
that of a run without us. So the optimizer keeps the user's groups, on every rank, and a wrapper
gets it as a ``Parted`` one: the same, seen by parts of its groups. What is written to a group, such
as ``lr``, reaches its parts, and what is written to a part its group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.moe.utils import (
    is_moe_param,
    is_moe_param_group,
    split_params_into_different_moe_groups_for_optimizer,
)

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.core.layout import GRID
from ds_moe_ext.hosts.deepspeed.engine_record import record_of
from ds_moe_ext.hosts.steps.training_run import Run
from ds_moe_ext.schedule.task import INTER
from ds_moe_ext.strategies.settings import BLOCK

Options = dict[str, Any]  # a parameter group, as torch has it

OF_A_PART = ("params", "name", "moe")  # what a group and its parts do not share


@contextmanager
def undivided(engine: Any, optimizer: Any) -> Iterator[None]:
    """While DeepSpeed makes its optimizer, let it take parameter groups as they are, for it divides
    such only as have names; and remember the groups of a user's own optimizer."""
    is_made = isinstance(optimizer, torch.optim.Optimizer)
    record = record_of(engine)
    record.users_groups = list(optimizer.param_groups) if is_made else None
    has_moe_layers, engine.has_moe_layers = engine.has_moe_layers, False
    try:
        yield
    finally:
        record.users_groups = None
        engine.has_moe_layers = has_moe_layers


def restore(engine: Any, optimizer: torch.optim.Optimizer) -> None:
    """Give a user's optimizer back the groups of which this rank has nothing. DeepSpeed drops them,
    by which a schedule would find fewer than it knows."""
    groups = record_of(engine).users_groups
    if groups is not None:
        optimizer.param_groups[:] = groups


def pair_with_weights(optimizer: Any) -> None:
    """apex's FusedAdam goes through its groups together with lists that it made when they were
    others: what has no partner there would never be stepped."""
    if hasattr(optimizer, "param_groups_master"):
        groups = optimizer.param_groups
        pairs = [{"params": [None] * len(group["params"])} for group in groups]
        optimizer.param_groups_master = pairs


def belongs_to_user(engine: Any, optimizer: Any) -> bool:
    """Whether it has the groups that the user made, the same on all ranks."""
    return optimizer is not None and optimizer is engine.client_optimizer


@contextmanager
def parted(engine: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """An optimizer as a wrapper of DeepSpeed's must have it. While the wrapper is being made, the
    engine knows whether there are experts in it: told of MoE layers, a wrapper wants some."""
    result: Any = optimizer
    parts = [_parts_of(group, number) for number, group in enumerate(optimizer.param_groups)]
    if any(map(len, parts)):  # a wrapper of nothing is DeepSpeed's to judge
        result = Parted(optimizer, parts)
    engine.has_moe_layers = any(map(is_moe_param_group, result.param_groups))
    try:
        yield result
    finally:
        engine.has_moe_layers = False


@contextmanager
def not_parted(engine: Any) -> Iterator[None]:
    """While ZeRO 3 is being made, which parts groups itself, by the ranks that share a weight: told
    of MoE layers, it wants DeepSpeed's own."""
    has_moe_layers, engine.has_moe_layers = engine.has_moe_layers, False
    try:
        yield
    finally:
        engine.has_moe_layers = has_moe_layers


def check_ranks_alike(optimizer: torch.optim.Optimizer, run: Run, *, is_sharded: bool) -> None:
    """What flattens groups goes through those of experts with other ranks, and ZeRO 3 through all
    weights. Collective.

    Raises:
        ValueError: on all ranks; experts of some ranks are frozen, or in groups of their own, where
            those of others are not.
    """
    if run.blueprint.strategy.roles is not None:
        return
    groups = enumerate(optimizer.param_groups)
    number_of = {p: number for number, group in groups for p in group["params"] if p.requires_grad}
    weights = [number_of.get(p) for layer in run.layers for p in layer.parameters]
    own = weights if is_sharded else sorted({number for number in weights if number is not None})
    told = gather_objects(own, run.layers[0].routed.site.layout.group(GRID, INTER))
    if told.count(own) == len(told):
        return
    if is_sharded:
        raise ValueError(
            "zero_optimization.stage is 3, under which ranks go through their weights together, "
            "but experts of some ranks are frozen, or in parameter groups of their own, where "
            "those in the same places of other ranks are not; treat all experts of a layer alike, "
            "or use stage 0, 1 or 2"
        )
    raise ValueError(
        f"{BLOCK}: the parameter groups in which there are trained experts are {told} on the ranks "
        "that share the experts, in their order, but what DeepSpeed makes of groups at this ZeRO "
        "stage and precision waits for all ranks in each of them; train an expert of each rank in "
        "each of these groups, or set zero_optimization.stage to 0 and train in float32"
    )


def _parts_of(group: Options, number: int) -> list[Options]:
    """What is trained of a group: its dense weights, and its experts in one or several parts."""
    trained = [p for p in group["params"] if p.requires_grad]
    whole = {**group, "params": trained, "name": group.get("name", f"group_{number}"), "moe": False}
    if not any(map(is_moe_param, trained)):
        return [whole] if trained else []
    split = split_params_into_different_moe_groups_for_optimizer([whole])
    return [part for part in split if part["params"]]


class Parted:
    """An optimizer whose groups are parts of the user's. All else is the optimizer's own.

    Args:
        optimizer: it keeps its groups.
        parts: of each of them, dense weights first.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parts: list[list[Options]]) -> None:
        self._optimizer, self._users = optimizer, optimizer.param_groups
        wholes = [_Whole(self, number, each) for number, each in enumerate(parts)]
        self._wholes = wholes
        every = [part for whole in wholes for part in whole.parts]
        self._parts: list[Options] = sorted(every, key=is_moe_param_group)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """DeepSpeed looks at an optimizer's class."""
        return type(self._optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    @property
    def param_groups(self) -> list[Options]:
        """With what has been written to the user's groups meanwhile."""
        for whole in self._wholes:
            whole.hand_down()
        return self._parts

    @param_groups.setter
    def param_groups(self, parts: list[Options]) -> None:
        self._parts = parts  # of which ZeRO steps one at a time

    def users_groups(self) -> list[Options]:
        """The optimizer's groups, as they are but for its steps."""
        if self._optimizer.param_groups is not self._parts:
            self._users = self._optimizer.param_groups  # new ones, after a load_state_dict
        return self._users

    def step(self, *given: Any, **named: Any) -> Any:
        """The optimizer's step, of the parts."""
        users, parts = self.users_groups(), self.param_groups
        self._optimizer.param_groups = parts
        pair_with_weights(self._optimizer)
        try:
            return self._optimizer.step(*given, **named)
        finally:
            self._optimizer.param_groups = users


class Part(Options):
    """A parameter group that is part of a user's; what is written to it, that one gets too."""

    def __init__(self, whole: _Whole, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._whole = whole

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._whole.take(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *given: Any, **named: Any) -> None:
        for key, value in dict(*given, **named).items():
            self[key] = value


class _Whole:
    """A user's parameter group.

    Args:
        owner: whose it is.
        number: of the group.
        parts: options of each part.
    """

    def __init__(self, owner: Parted, number: int, parts: list[Options]) -> None:
        self._owner, self._number = owner, number
        self.parts = [Part(self, options) for options in parts]
        self._known: Options = {}  # what the parts have been told, or have told

    @property
    def _group(self) -> Options:
        return self._owner.users_groups()[self._number]

    def hand_down(self) -> None:
        """Write to the parts what has been written to the group. What one part wrote stays its
        own, for some optimizers count their steps in each group."""
        for key, value in self._group.items():
            if key not in OF_A_PART and self._known.get(key, self) is not value:
                self._known[key] = value
                for part in self.parts:
                    dict.__setitem__(part, key, value)

    def take(self, key: str, value: Any) -> None:
        """Write to the group what is written to a part."""
        if key == "params":
            self._group["params"] = [p for part in self.parts for p in part["params"]]
        elif key not in OF_A_PART:
            self._group[key] = self._known[key] = value
