"""Zebra parallelism in an unmodified Megatron run: from a model and its optimizer to striped steps.

See ``docs/strategies/zebra.md``. Each role trains in a world of its own (``worlds``), with what it
keeps of the model (``sides``), by striped steps (``striping``) and one norm (``joint``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ds_moe_ext.attach import agreement, replacement
from ds_moe_ext.attach.meeting import start_of
from ds_moe_ext.hosts.megatron import moe_layers
from ds_moe_ext.hosts.megatron.active_settings import Chosen
from ds_moe_ext.hosts.megatron.engine import (
    OPTIMIZER,
    begin,
    check_found,
    check_optimizer,
    check_wrapped,
    connect,
    dtype_of,
    whole,
)
from ds_moe_ext.hosts.megatron.forward_backward import StripedSteps, set_steps
from ds_moe_ext.hosts.megatron.mover import mover_of
from ds_moe_ext.hosts.megatron.role_checkpoint import tell_of_both
from ds_moe_ext.hosts.megatron.role_norm import join_norm
from ds_moe_ext.hosts.megatron.role_refusals import refuse_arguments
from ds_moe_ext.layout import Grid, group_among
from ds_moe_ext.steps.pipeline_costs import DenseGradients
from ds_moe_ext.steps.training_run import Run
from ds_moe_ext.strategies.zebra import Zebra
from ds_moe_ext.zebra.both_sides import BothSides
from ds_moe_ext.zebra.passage import Here
from ds_moe_ext.zebra.striped_model import Pausing, blocks_of, cut_at, stack_of


def start(asked: Chosen, chunks: Sequence[nn.Module], optimizer: Any) -> Run:
    """Stripe a model that is ready to be trained. Collective, over the ranks of both roles, in the
    world of all.

    Args:
        asked: the settings.
        chunks: the model, wrapped for data parallelism: one part.
        optimizer: Megatron's, of what this rank keeps.

    Raises:
        ValueError: the model does not suit the settings.
    """
    strategy, settings, worlds = asked.strategy, asked.settings, asked.worlds
    assert isinstance(strategy, Zebra) and worlds is not None
    start = start_of(OPTIMIZER)
    with start.together():
        check_wrapped(chunks)
        check_optimizer(optimizer)
        refuse_arguments()
        model = whole(chunks)
        found = list(moe_layers.find(model, replacement.wanted(settings)))
    start.agree(agreement.layers_of(found))
    with start.together():
        check_found(found, settings, chunks)
        moe_layers.started(chunks)
        grid = Grid(worlds.size, worlds.roles.size)
        blueprint = replacement.on_grid(settings, strategy, found, grid)
    device, here = next(model.parameters()).device, Here()
    layers = [layer for layer, _ in replacement.build(blueprint, device, Pausing(here, None))]
    with start.together():
        for layer in layers:
            connect(layer, chunks)
        blocks = blocks_of(model, layers)
        if worlds.is_attention:
            for block in blocks:
                cut_at(block, here)
    control = group_among(grid.along("ep"), backend="gloo")
    stack = stack_of(blueprint, layers, device, here)
    set_steps(StripedSteps(chunks[0], stack, control, strategy.num_micro_batches, settings.debug))
    everyone = group_among([list(range(worlds.size))], backend="gloo")
    join_norm(optimizer, worlds, everyone)
    tell_of_both(optimizer, chunks[0], worlds, everyone)
    gradients = DenseGradients.of(model, layers, dtype_of(model), None)
    mover = mover_of(optimizer, layers, blueprint)
    run = begin(blueprint, layers, gradients, mover, model=model, optimizer=optimizer)
    run.recorder.beside = BothSides(control, dist.get_rank(control), worlds.roles)
    return run
