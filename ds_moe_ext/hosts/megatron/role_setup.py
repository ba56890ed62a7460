# SPDX-License-Identifier: Apache-2.0
"""Ranks with roles in an unmodified Megatron run: from a model and its optimizer to striped steps.

See ``docs/strategies/zebra.md``. Each role trains in a world of its own (``worlds``), with what it
keeps of the model (``role_models``), by striped steps (``forward_backward``), one norm
(``role_norm``) and one mind about steps that are run again (``role_reruns``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.core.layout import Grid, group_among
from ds_moe_ext.hosts.attachment import startup_check
from ds_moe_ext.hosts.attachment.host_layer import Found
from ds_moe_ext.hosts.attachment.replacement import Around, AttachedLayer, Blueprint
from ds_moe_ext.hosts.attachment.startup_check import start_of
from ds_moe_ext.hosts.megatron.active_settings import Chosen
from ds_moe_ext.hosts.megatron.engine import (
    OPTIMIZER,
    MegatronHost,
    Told,
    check_optimizer,
    check_wrapped,
    watch_steps,
)
from ds_moe_ext.hosts.megatron.forward_backward import StripedSteps, set_steps
from ds_moe_ext.hosts.megatron.ranks import Grids
from ds_moe_ext.hosts.megatron.role_checkpoint import tell_of_both
from ds_moe_ext.hosts.megatron.role_norm import join_norm
from ds_moe_ext.hosts.megatron.role_refusals import refuse_arguments
from ds_moe_ext.hosts.megatron.role_reruns import join_reruns
from ds_moe_ext.hosts.megatron.worlds import Worlds
from ds_moe_ext.hosts.steps.host import Built, Seats, run_on
from ds_moe_ext.hosts.steps.pipeline_costs import DenseGradients
from ds_moe_ext.hosts.steps.training_run import Run, Tracer
from ds_moe_ext.hosts.zebra.both_sides import BothSides
from ds_moe_ext.hosts.zebra.passage import Here
from ds_moe_ext.hosts.zebra.stripe_model import Pausing, blocks_of, cut_at, stack_of
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.strategies.settings import Settings


def start(asked: Chosen, chunks: Sequence[nn.Module], optimizer: Any) -> Run | None:
    """Stripe a model that is ready to be trained. Collective, over the ranks of both roles, in the
    world of all.

    Args:
        asked: the settings.
        chunks: the model, wrapped for data parallelism: one part.
        optimizer: Megatron's, of what this rank keeps.

    Raises:
        ValueError: the model does not suit the settings.
    """
    assert asked.worlds is not None
    with start_of(OPTIMIZER).together():
        check_wrapped(chunks)
        check_optimizer(optimizer)
        refuse_arguments()
    host = RolesHost(chunks, optimizer, asked.worlds)
    return run_on(host, host.model, asked.settings, asked.strategy)


class RolesHost(MegatronHost):
    """A model of Megatron's whose ranks have two roles.

    Args:
        chunks: see ``start``.
        optimizer: likewise.
        worlds: of the ranks.
    """

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Any, worlds: Worlds) -> None:
        super().__init__(chunks, optimizer, Grids(Grid(worlds.size, worlds.roles.size), (), 0))
        self.micro_batch = None  # Megatron's is not cut into stripes, which are its micro-batches
        self._worlds, self._here = worlds, Here()
        self._control = group_among(self._seats.own.along("ep"), backend="gloo")

    def refuse(self, settings: Settings, strategy: Strategy) -> tuple[Settings, Strategy]:
        """All has been refused by the arguments."""
        return settings, strategy

    def sharing(self, layer: Any) -> dist.ProcessGroup:
        """Those of a ZP group."""
        return self._control

    def told_by_experts(self, told: Sequence[Told]) -> Sequence[Told]:
        """Attention ranks have left experts before anybody could freeze some."""
        return [told[cell] for cell in self._worlds.roles.expert_cells]

    def grid(self, settings: Settings, strategy: Strategy, found: Sequence[Found]) -> Seats:
        return Seats(self._seats.own, (), startup_check.layers_of(found))

    def prepare(self, blueprint: Blueprint) -> tuple[Blueprint, Around | None]:
        blueprint, _ = super().prepare(blueprint)
        return blueprint, Pausing(self._here, None)

    def mark(self, blueprint: Blueprint, built: Built) -> None:
        super().mark(blueprint, built)
        strategy, worlds, (chunk,) = blueprint.strategy, self._worlds, self._chunks
        layers = [layer for layer, _ in built]
        blocks = blocks_of(self.model, layers)
        for block in blocks if worlds.is_attention else ():
            cut_at(block, self._here)
        stack = stack_of(blueprint, layers, self.device, self._here)
        stripes, debug = strategy.striping.num_stripes, blueprint.settings.debug
        set_steps(StripedSteps(chunk, stack, self._control, stripes, debug))
        self._everyone = group_among([list(range(worlds.size))], backend="gloo")
        join_norm(self.carrier, worlds, self._everyone)
        join_reruns(self._everyone)
        tell_of_both(self.carrier, chunk, worlds, self._everyone)

    def dense_gradients(
        self, blueprint: Blueprint, layers: Sequence[AttachedLayer]
    ) -> DenseGradients:
        return DenseGradients.of(self.model, layers, self.dtype, None)

    def watch_steps(self, run: Run) -> None:
        watch_steps(self.carrier, run)
        side = dist.get_rank(self._control)
        run.recorder.beside = BothSides(self._control, side, self._worlds.roles)
        # Steps are taken in the world of a role.
        gather, tracer = partial(gather_objects, group=self._everyone), run.recorder.tracer
        assert run.recorder.ranks is not None
        run.recorder.ranks.gather = gather
        run.recorder.ranks.is_on = any(gather(run.recorder.ranks.is_on))
        if isinstance(tracer, Tracer):
            tracer.meet_by(gather)
