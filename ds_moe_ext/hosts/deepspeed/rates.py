# SPDX-License-Identifier: Apache-2.0
"""A saved schedule of the learning rate, for a rank whose parameter groups may be others.

A schedule of torch's keeps lists with an entry for each parameter group, such as base rates, and
one rank's state is saved for all. But where ranks have roles, the groups of an attention rank may
have no experts, and those of an expert rank have nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.hosts.deepspeed.checkpoint_contents import base_optimizer, has_dense_weights
from ds_moe_ext.hosts.deepspeed.parameter_groups import belongs_to_user
from ds_moe_ext.hosts.steps.training_run import Run


def fitting(engine: Any, run: Run, saved: Any) -> Any:
    """The state of a schedule as this rank may load it.

    Lists with an entry for each parameter group stay this rank's own where those that were saved
    are of other groups: where they are not as many, or this rank has experts only, for an attention
    rank saves. What such lists have is told by the run's settings; the step is not among it.

    Args:
        engine: DeepSpeed's, with a schedule.
        run: its replaced layers.
        saved: the state of the schedule of the rank that saved.
    """
    optimizer = _scheduled(engine)
    groups = [] if optimizer is None else optimizer.param_groups
    has_others = not has_dense_weights(run) and not belongs_to_user(engine, optimizer)
    return _Fit(len(groups), has_others)(saved, engine.lr_scheduler.state_dict())


def tell(engine: Any) -> None:
    """Let the schedule tell the rates that have been loaded, as torch's and DeepSpeed's do.
    Collective."""
    _share(engine)
    schedule, optimizer = engine.lr_scheduler, _scheduled(engine)
    if optimizer is not None and isinstance(getattr(schedule, "_last_lr", None), list):
        schedule._last_lr = [group["lr"] for group in optimizer.param_groups]


def _share(engine: Any) -> None:
    """Give a user's groups of which this rank has no weight, so that none was loaded, the rates of
    ranks that have some: schedules go on from them. Collective."""
    optimizer = engine.client_optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    groups = optimizer.param_groups
    own = [float(group["lr"]) if group["params"] else None for group in groups]
    of_ranks = gather_objects(own, None)
    for group, rates in zip(groups, zip(*of_ranks)):
        if not group["params"]:
            group["lr"] = next((rate for rate in rates if rate is not None), group["lr"])


def _scheduled(engine: Any) -> Any:
    """The optimizer whose groups the schedule counts: the user's, or as a wrapper steps it."""
    return getattr(engine.lr_scheduler, "optimizer", None) or base_optimizer(engine)


class _Fit(NamedTuple):
    """Joins a saved state and a rank's own.

    Attributes:
        num_groups: parameter groups of the rank.
        has_others: they are not those that were saved, though they be as many.
    """

    num_groups: int
    has_others: bool

    def __call__(self, saved: Any, own: Any) -> Any:
        if isinstance(saved, dict) and isinstance(own, dict):
            return {key: self(value, own.get(key)) for key, value in saved.items()}
        if not (isinstance(saved, list) and isinstance(own, list)):
            return saved
        if len(own) == self.num_groups and (self.has_others or len(saved) != len(own)):
            return own
        return [self(*pair) for pair in zip(saved, own)] if len(saved) == len(own) else saved
