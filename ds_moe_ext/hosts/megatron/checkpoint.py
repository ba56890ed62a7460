# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are Megatron's own, in every form it knows.

Experts that have moved go home before anything is told of the parameters by name: each into the
very slot that Megatron built for it. So what is written is what stock Megatron would write, and can
read; they stay there until new homes are due. Before anything is loaded they go home too, and then
planning begins anew: other weights may route otherwise.

Whoever asks does so on all ranks of a pipeline stage: Megatron's own saving and loading does. A
rank that asks alone for ``state_dict`` would wait for the others where experts have moved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from ds_moe_ext.hosts.attachment.host_layer import Facts
from ds_moe_ext.hosts.megatron.expert_modules import HostedExperts
from ds_moe_ext.hosts.megatron.state_places import main_gradient
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
    """Warn where a checkpoint was saved by a model that routes otherwise than the one that has
    asked for its weights.

    Args:
        saved: see ``routing``; None where the checkpoint does not say.
        folder: it lies in.
    """
    run = _last_asked()
    if run is not None and saved is not None:
        names = [layer.name for layer in run.layers]
        run.routing.compare(dict.fromkeys(names, saved), str(folder))


class FirstHomes:
    """Where Megatron has put the experts of a run, and brings them back to.

    Args:
        run: that begins: no expert has moved.
    """

    def __init__(self, run: Run) -> None:
        self._planning, self._layers, self._mover = run.planning, run.layers, run.mover
        self._run = weakref.ref(run)
        self._homes = run.planning.job.homes
        self._seats = run.mover.slots(self._homes)

    def come_home(self) -> None:
        """Bring the experts home, if they are not; also within a step. Collective."""
        _LAST_ASKED[:] = [self._run]
        planning = self._planning
        if planning.job.homes is self._homes:  # as nothing has moved since, on every rank alike
            return
        planning.tell("experts go home: Megatron asks for them by name, as for a checkpoint")
        self._mover.move(planning.job.homes, self._homes, self._seats, main_gradient)
        planning.resume(self._homes, planning.remembered_ILCE)

    def begin_anew(self) -> None:
        """Be ready for other weights, by name. Collective."""
        self.come_home()
        planning = self._planning
        if len(planning.remembered_ILCE):
            planning.resume(self._homes, planning.remembered_ILCE[:0])

    def loaded(self) -> None:
        """Other weights have been put in."""
        for layer in self._layers:
            layer.routed.start_anew()


def watch(run: Run, optimizer: Any) -> None:
    """Let experts be where Megatron thinks they are, whenever it looks.

    Args:
        run: that begins.
        optimizer: Megatron's.
    """
    first = FirstHomes(run)
    for layer in run.layers:
        assert isinstance(layer.hosted, HostedExperts)
        layer.hosted.named = first.come_home
        experts = layer.hosted.experts
        experts.register_state_dict_pre_hook(lambda *_: first.come_home())
        experts.register_load_state_dict_pre_hook(lambda *_: first.begin_anew())
        experts.register_load_state_dict_post_hook(lambda *_: first.loaded())
    for name in ASKS:
        _wrap(optimizer, name, before=first.come_home)
    for name in LOADS:
        _wrap(optimizer, name, before=first.begin_anew, after=first.loaded)


def _wrap(
    optimizer: Any,
    name: str,
    before: Callable[[], None],
    after: Callable[[], None] = lambda: None,
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
