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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import (
    is_moe_param,
    is_moe_param_group,
    split_params_into_different_moe_groups_for_optimizer,
)
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.core.layout import GRID
from ds_moe_ext.hosts.attachment.modules import during
from ds_moe_ext.hosts.deepspeed import zero_3
from ds_moe_ext.hosts.deepspeed.gradients import EngineRecord, record_of
from ds_moe_ext.hosts.steps.expert_moves import Group, Scalar, Shard, States
from ds_moe_ext.hosts.steps.training_run import Run, run_of
from ds_moe_ext.schedule.task import INTER
from ds_moe_ext.strategies.settings import BLOCK

Options = dict[str, Any]  # a parameter group, as torch has it

OF_A_PART = ("params", "name", "moe")  # what a group and its parts do not share


@contextmanager
def undivided(engine: Any, optimizer: Any) -> Iterator[None]:
    """While DeepSpeed makes its optimizer, let it take parameter groups as they are, for it divides
    such only as have names; and remember the groups of a user's own optimizer."""
    is_made = isinstance(optimizer, torch.optim.Optimizer)
    given = list(optimizer.param_groups) if is_made else None
    with during(record_of(engine), users_groups=given), during(engine, has_moe_layers=False):
        yield


def restore_groups(engine: Any, optimizer: torch.optim.Optimizer) -> None:
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


@contextmanager
def parted(engine: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """An optimizer as a wrapper of DeepSpeed's must have it. While the wrapper is being made, the
    engine knows whether there are experts in it: given MoE layers, a wrapper wants some."""
    result: Any = optimizer
    parts = [_parts_of(group, number) for number, group in enumerate(optimizer.param_groups)]
    if any(map(len, parts)):  # a wrapper of nothing is DeepSpeed's to judge
        result = Parted(optimizer, parts)
    with during(engine, has_moe_layers=any(map(is_moe_param_group, result.param_groups))):
        yield result


def check_ranks_alike(optimizer: torch.optim.Optimizer, run: Run, *, is_sharded: bool) -> None:
    """What flattens groups goes through those of experts with other ranks, and ZeRO 3 through all
    weights. Collective."""
    if run.blueprint.strategy.roles is not None:
        return
    groups = enumerate(optimizer.param_groups)
    number_of = {p: number for number, group in groups for p in group["params"] if p.requires_grad}
    weights = [number_of.get(p) for layer in run.layers for p in layer.parameters]
    own = weights if is_sharded else sorted({number for number in weights if number is not None})
    gathered = gather_objects(own, run.layers[0].routed.layer_context.layout.group(GRID, INTER))
    if gathered.count(own) == len(gathered):
        return
    if is_sharded:
        raise ValueError(
            "zero_optimization.stage is 3, where ranks gather their weights together, but "
            "some experts of a layer are frozen or in other parameter groups than the rest; "
            "treat all experts of a layer alike, or use stage 0, 1 or 2"
        )
    raise ValueError(
        f"{BLOCK}: the parameter groups in which there are trained experts are {gathered} on the "
        "ranks that share the experts, in their order, but what DeepSpeed makes of groups at this "
        "ZeRO stage and precision waits for all ranks in each of them; train an expert of each "
        "rank in each of these groups, or set zero_optimization.stage to 0 and train in float32"
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
    """An optimizer whose groups are parts of the user's. All else is the optimizer's own."""

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
    """A user's parameter group."""

    def __init__(self, owner: Parted, number: int, parts: list[Options]) -> None:
        self._owner, self._number = owner, number
        self.parts = [Part(self, options) for options in parts]
        self._known: Options = {}  # what the parts have been given, or have given

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


# Where an engine's optimizer keeps its states.


def _groups_of(optimizer: Any) -> Iterator[Group]:
    """The tensors that an engine's optimizer steps."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer):  # ZeRO 1 and 2
        for index, held in enumerate(optimizer.single_partition_of_fp32_groups):
            begin = dist.get_rank(optimizer.real_dp_process_group[index]) * held.numel()
            parameters = optimizer.round_robin_bit16_groups[index]
            yield Group(held, begin, parameters, optimizer.round_robin_bit16_offsets[index])
    elif isinstance(optimizer, BF16_Optimizer):  # ZeRO 1, bf16 with gradients accumulated in fp32
        for index, held in enumerate(optimizer.fp32_groups_flat_partition):
            begin = dist.get_rank(optimizer.real_dp_process_group[index]) * held.numel()
            parameters = optimizer.bf16_groups[index]
            yield Group(held, begin, parameters, _back_to_back(parameters))
    elif isinstance(optimizer, FP16_Optimizer):  # ZeRO 0, half precision, FusedAdam
        for held, parameters in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups):
            yield Group(held, 0, parameters, _back_to_back(parameters))
    elif isinstance(optimizer, FP16_UnfusedOptimizer):  # ZeRO 0, half precision, any other
        for masters, parameters in zip(optimizer.fp32_groups, optimizer.fp16_groups):
            yield from map(Group.of_one, masters, parameters)
    elif isinstance(optimizer, DeepSpeedOptimizer):
        raise ValueError(
            f"the states of a {type(optimizer).__name__} cannot be moved; use ZeRO stage 0 to 3"
        )
    elif optimizer is not None:  # ZeRO 0, full precision: the user's or a plain one
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield Group.of_one(parameter, parameter)


def _back_to_back(parameters: Iterable[nn.Parameter]) -> Iterator[int]:
    return accumulate((parameter.numel() for parameter in parameters), initial=0)


ADAMS = {"FusedAdam", "DeepSpeedCPUAdam"}
"""DeepSpeed's own, which keep the same; it takes the second where states are offloaded. Their steps
are numbers, and those of torch's, which steps what ``ratio`` leaves on the device, tensors."""


class OptimizerStates(States):
    """Access to the states of every parameter of an engine."""

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        groups: Sequence[Group | Shard] = list(
            zero_3.shards_of(optimizer, engine.module)
            if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
            else _groups_of(optimizer)
        )
        is_wrapped = isinstance(optimizer, DeepSpeedOptimizer)
        stepper = optimizer.optimizer if is_wrapped else optimizer
        run = run_of(engine)
        views: dict[nn.Parameter, list[nn.Parameter]] = {}  # of the stacks that experts lie in
        for layer in () if run is None else run.layers:
            for slot in layer.hosted.slots():
                for stack, view in zip(slot.stacks, slot.parameters):
                    views.setdefault(stack, []).append(view)
        with zero_3.groups_filled(optimizer):
            super().__init__([(stepper, groups)], views)
        for held in zero_3.stepped_on_device(optimizer):
            own = self._stepper[held]
            self._stepper[held] = own._replace(optimizer=optimizer.backup_optimizer)

    def _like(self, old: Scalar | None, new: Scalar, held: Tensor) -> Any:
        if old is None:
            stepper = self._stepper[held].optimizer
            if stepper.__class__.__name__ in ADAMS:
                new = int(new)
            elif isinstance(stepper, torch.optim.AdamW):
                new = torch.as_tensor(float(new))
        return super()._like(old, new, held)


def link_states(optimizer: Any, record: EngineRecord) -> None:
    """Link weights to their states once more, when all groups have been stepped once, for
    ``safe_get_full_optimizer_state`` and its like. At ZeRO 1 and 2 DeepSpeed steps one group at a
    time, and links all weights behind the first, when those of others have no states yet."""
    if not record.has_linked and getattr(optimizer, "_hp_optimizer_states_linked", False):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
        record.has_linked = True


# A saved schedule of the learning rate, for a rank whose parameter groups may be others.


def fitting_schedule(engine: Any, run: Run, saved: Any) -> Any:
    """The state of a schedule as this rank may load it.

    Lists with an entry for each parameter group stay this rank's own where those that were saved
    are of other groups: where they are not as many, or this rank has experts only, for an attention
    rank saves. What such lists have is reported by the run's settings; the step is not among it.
    """
    optimizer = _scheduled(engine)
    num_groups = 0 if optimizer is None else len(optimizer.param_groups)
    belongs_to_user = optimizer is not None and optimizer is engine.client_optimizer
    # Though they be as many as those that were saved.
    has_others = not has_dense_weights(run) and not belongs_to_user

    def joined(saved: Any, own: Any) -> Any:
        if isinstance(saved, dict) and isinstance(own, dict):
            return {key: joined(value, own.get(key)) for key, value in saved.items()}
        if not (isinstance(saved, list) and isinstance(own, list)):
            return saved
        if len(own) == num_groups and (has_others or len(saved) != len(own)):
            return own
        return [*map(joined, saved, own)] if len(saved) == len(own) else saved

    return joined(saved, engine.lr_scheduler.state_dict())


def report_rates(engine: Any) -> None:
    """Let the schedule report the rates that have been loaded, as torch's and DeepSpeed's do. A
    user's groups of which this rank has no weight, so that none was loaded, get the rates of ranks
    that have some: schedules go on from them. Collective."""
    users = engine.client_optimizer
    if isinstance(users, torch.optim.Optimizer):
        groups = users.param_groups
        own = [float(group["lr"]) if group["params"] else None for group in groups]
        for group, rates in zip(groups, zip(*gather_objects(own, None))):
            if not group["params"]:
                group["lr"] = next((rate for rate in rates if rate is not None), group["lr"])
    schedule, optimizer = engine.lr_scheduler, _scheduled(engine)
    if optimizer is not None and isinstance(getattr(schedule, "_last_lr", None), list):
        schedule._last_lr = [group["lr"] for group in optimizer.param_groups]


def _scheduled(engine: Any) -> Any:
    """The optimizer whose groups the schedule counts: the user's, or as a wrapper steps it."""
    return getattr(engine.lr_scheduler, "optimizer", None) or base_optimizer(engine)


def has_dense_weights(run: Run) -> bool:
    """Whether this rank has weights that are no expert's."""
    roles = run.blueprint.strategy.roles
    return roles is None or roles.is_attention(dist.get_rank())


def base_optimizer(engine: Any) -> torch.optim.Optimizer | None:
    """The optimizer inside DeepSpeed's wrapper."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedOptimizer):
        optimizer = optimizer.optimizer
    inner: torch.optim.Optimizer | None = optimizer
    return inner
