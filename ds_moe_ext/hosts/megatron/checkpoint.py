# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are Megatron's own, in every form it knows; and where its optimizers keep states.

Experts that have moved go to their first owners before anything reads parameters by name: each
into the very slot that Megatron built for it. So what is written is what stock Megatron would
write, and can read; they stay there until new owners are due. Before anything is loaded they go to
their first owners too, and then planning begins anew: other weights may route otherwise.

Whoever asks does so on all ranks of a pipeline stage: Megatron's own saving and loading does. A
rank that asks alone for ``state_dict`` would wait for the others where experts have moved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.host_layer import Facts
from ds_moe_ext.hosts.attachment.notices import ENABLED, Refusal, refuse
from ds_moe_ext.hosts.megatron.layers import MegatronExperts
from ds_moe_ext.hosts.megatron.refusals import MOVING
from ds_moe_ext.hosts.steps.expert_moves import Group, States
from ds_moe_ext.hosts.steps.training_run import Run

ASKS = ("state_dict", "sharded_state_dict", "save_parameter_state")
LOADS = ("load_state_dict", "load_parameter_state")


_LAST_ASKED: list[weakref.ref[Run]] = []  # of this process: one or none


def _last_asked() -> Run | None:
    """The run whose weights were asked for by name last, as Megatron asks before it saves or loads
    them; None where that was none."""
    return _LAST_ASKED[0]() if _LAST_ASKED else None


def routing() -> Facts | None:
    """Of the layers that are about to be saved, which have one configuration; None without any."""
    run = _last_asked()
    return None if run is None else next(iter(run.routing.facts().values()))


def compare_routing(saved: Facts | None, folder: Any) -> None:
    """Warn where the checkpoint in a folder was saved by a model that routes otherwise than the one
    that has asked for its weights. ``saved`` is as of ``routing``; None where it does not say."""
    run = _last_asked()
    if run is not None and saved is not None:
        names = [layer.name for layer in run.layers]
        run.routing.compare(dict.fromkeys(names, saved), str(folder))


def watch(run: Run, optimizer: Any) -> None:
    """Let experts be where Megatron thinks they are, whenever it looks, from the start of a run on.
    No expert has moved yet."""
    planning, layers, mover = run.planning, run.layers, run.mover
    owners, this_run = planning.job.owners, weakref.ref(run)
    new_slots = mover.slots(owners)

    def arrive_at_owner() -> None:
        """Bring the experts to their first owners, if they are not there; also within a step.
        Collective."""
        _LAST_ASKED[:] = [this_run]
        if planning.job.owners is owners:  # as nothing has moved since, on every rank alike
            return
        planning.log(
            "experts return to their initial owners: Megatron asks for them by name, as for a "
            "checkpoint"
        )
        mover.move(planning.job.owners, owners, new_slots, main_gradient)
        planning.resume(owners, planning.remembered_ILCE)

    def begin_anew() -> None:
        """Be ready for other weights, by name. Collective."""
        arrive_at_owner()
        if len(planning.remembered_ILCE):
            planning.resume(owners, planning.remembered_ILCE[:0])

    def loaded() -> None:
        for layer in layers:
            layer.routed.start_anew()

    for layer in layers:
        assert isinstance(layer.hosted, MegatronExperts)
        layer.hosted.named = arrive_at_owner
        experts = layer.hosted.experts
        experts.register_state_dict_pre_hook(lambda *_: arrive_at_owner())
        experts.register_load_state_dict_pre_hook(lambda *_: begin_anew())
        experts.register_load_state_dict_post_hook(lambda *_: loaded())
    for name in ASKS:
        _wrap(optimizer, name, before=arrive_at_owner)
    for name in LOADS:
        _wrap(optimizer, name, before=begin_anew, after=loaded)


def _wrap(
    optimizer: Any, name: str, before: Callable[[], None], after: Callable[[], None] = lambda: None
) -> None:
    """Have something done around a method, where the optimizer has that."""
    method: Callable[..., Any] | None = getattr(optimizer, name, None)
    if method is None:
        return

    @wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        before()
        outcome = method(*args, **kwargs)
        after()
        return outcome

    setattr(optimizer, name, watched)


# States of optimizers.


def main_gradient(parameter: nn.Parameter) -> Tensor | None:
    """What Megatron accumulates of a parameter; None where it is not trained."""
    gradient: Tensor | None = getattr(parameter, "main_grad", None)
    return gradient


class OptimizerStates(States):
    """Access to the states of every parameter that Megatron's optimizer, as
    ``get_megatron_optimizer`` returns it, steps on this rank. Raises ValueError where it is of a
    kind whose states cannot be moved."""

    def __init__(self, optimizer: Any) -> None:
        refuse(UNMOVABLE, optimizer, context=f"{ENABLED}, and experts move")
        parts = _parts_of(optimizer)
        super().__init__([(part.optimizer, _groups_of(part)) for part in parts])


def _parts_of(optimizer: Any) -> list[Any]:
    """Those that step something."""
    is_chain = isinstance(optimizer, ChainedOptimizer)
    parts = optimizer.chained_optimizers if is_chain else (optimizer,)
    return [part for part in parts if not part.is_stub_optimizer]


def _groups_of(optimizer: Any) -> Iterator[Group]:
    """The tensors that one of Megatron's optimizers steps."""
    if isinstance(optimizer, DistributedOptimizer):
        for parameter, (group, order) in optimizer.model_param_group_index_map.items():
            held = optimizer.optimizer.param_groups[group]["params"][order]
            begin = optimizer._get_model_param_range_map(parameter)["param"].start
            yield Group(held, begin, (parameter,), (0,))
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        groups = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups)
        for parameters, masters in groups:
            yield from map(Group.of_one, masters, parameters)
        for parameters in optimizer.fp32_from_fp32_groups:
            yield from map(Group.of_one, parameters, parameters)
    else:
        for options in optimizer.param_groups:
            yield from map(Group.of_one, options["params"], options["params"])


def _is_unknown(optimizer: Any) -> str:
    known = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
    unknown = [type(part).__name__ for part in _parts_of(optimizer) if type(part) not in known]
    return f"the optimizer is a {unknown[0]}" if unknown else ""


def _of_config(refusal: Refusal) -> Refusal:
    """A refusal of an optimizer, by its config."""
    return replace(refusal, asked=lambda optimizer: refusal.asked(optimizer.config))


UNMOVABLE = (
    *map(_of_config, MOVING),
    Refusal(
        "an optimizer that is not one of DistributedOptimizer, FP32Optimizer and "
        "Float16OptimizerWithFloat16Params",
        _is_unknown,
        "its states cannot be moved",
        "use --optimizer adam or sgd",
    ),
)
"""Of an optimizer, where experts move."""
