"""What plans a run's steps, from what the host has adopted: the same for every host."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ds_moe_ext.attach.meeting import start_of
from ds_moe_ext.attach.replacement import AttachedLayer, Blueprint
from ds_moe_ext.settings import BLOCK
from ds_moe_ext.steps.cost_checks import Checks
from ds_moe_ext.steps.costs import Costs
from ds_moe_ext.steps.pipeline_costs import DenseGradients, Pipelines
from ds_moe_ext.steps.planning import Mover, Planning
from ds_moe_ext.steps.training_run import teller
from ds_moe_ext.strategy import Job


@dataclass(frozen=True)
class Steps:
    """What the host's steps are like.

    Attributes:
        micro_batches: of a step.
        dtype: in which the model computes.
        device: of this rank.
    """

    micro_batches: int
    dtype: torch.dtype
    device: torch.device


def planning_of(
    blueprint: Blueprint,
    layers: list[AttachedLayer],
    gradients: DenseGradients,
    mover: Mover,
    steps: Steps,
) -> Planning:
    """Plans a run that begins. Collective.

    Args:
        blueprint: what was asked for.
        layers: what was adopted.
        gradients: that the host reduces beside the layers.
        mover: brings experts to new homes.
        steps: of the host.

    Raises:
        ValueError: a hardware file lacks what the strategy plans by.
    """
    layout = layers[0].routed.site.layout
    with start_of("planning_of").together():
        homes = [layer.routed.site.plan.home for layer in layers]
        job = Job.at_start(homes, layout.node_C, blueprint.pools, blueprint.stacks)
        pipelines = _pipelines(blueprint, layers, gradients, steps)
        costs = Costs(layers, blueprint.pools, blueprint.hardware, pipelines)
    return Planning(
        strategy=blueprint.strategy,
        layers=layers,
        job=replace(job, accumulates=steps.micro_batches > 1),
        costs=costs,
        checks=Checks(blueprint.strategy, layers),
        mover=mover,
        debug=blueprint.settings.debug,
        rank=layout.rank,
        tell=teller(blueprint.settings, layout.place),
    )


def _pipelines(
    blueprint: Blueprint, layers: list[AttachedLayer], gradients: DenseGradients, steps: Steps
) -> Pipelines | None:
    """What measures them, where the strategy plans by it."""
    if not blueprint.strategy.rhythm().measures:
        return None
    pools, hardware = blueprint.pools, blueprint.hardware
    pipelines = Pipelines(layers, pools, hardware, gradients, steps.micro_batches, steps.device)
    try:
        pipelines.check(steps.dtype)
    except ValueError as error:
        named = blueprint.settings.hardware
        raise ValueError(f"{BLOCK}.hardware is {named!r}, but {error}") from error
    return pipelines
