# SPDX-License-Identifier: Apache-2.0
"""A model's experts replaced and planned for, by a JSON block: as under a host, without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.hosts.attachment.block_hooks import launch_with_blocks
from ds_moe_ext.hosts.attachment.experts import HostedExperts, find_registered
from ds_moe_ext.hosts.attachment.replacement import (
    AttachedLayer,
    Finder,
    build,
    draw,
    stays_in_slots,
)
from ds_moe_ext.hosts.steps.costs import Costs
from ds_moe_ext.hosts.steps.pipeline_costs import DenseGradients, Pipelines
from ds_moe_ext.hosts.steps.planning import Checks, Planning
from ds_moe_ext.moe.observation import Rows
from ds_moe_ext.planning.strategy import Job
from ds_moe_ext.strategies.settings import BLOCK, read_settings

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class ReplacedLayers:
    """Of one model.

    Attributes:
        layers: in model order.
        planning: of their steps.
    """

    layers: Sequence[AttachedLayer]
    planning: Planning

    @classmethod
    def of(
        cls,
        model: nn.Module,
        block: Mapping[str, Any],
        *,
        finders: Iterable[Finder] = (find_registered,),
        is_early: bool = True,
        device: torch.device = CPU,
        tell: Callable[[str], None] = lambda line: None,
    ) -> ReplacedLayers:
        """Replace them. Collective.

        Args:
            model: its experts are replaced; experts never move.
            block: of the JSON.
            finders: of its layers.
            is_early: copies are launched as a block begins.
            device: where the model is.
            tell: is told what a person would be.
        """
        settings, strategy = read_settings({BLOCK: {"enabled": True, **block}})
        assert strategy is not None
        world_size = dist.get_world_size()
        if strategy.has_uneven_homes:  # one grid over all nodes: what travels between them counts
            num_cells = world_size // (settings.expert_sharding_size or 1)
            settings = replace(settings, expert_parallel_size=num_cells)
        blueprint = draw(settings, strategy, model, finders, world_size)
        layers = [layer for layer, _ in build(blueprint, device)]
        if stays_in_slots(blueprint):  # as a host does where they stay
            for layer in layers:
                assert isinstance(layer.hosted, HostedExperts)
                layer.hosted.stack()
        measures = strategy.rhythm().measures
        if is_early:
            launch_with_blocks(model, layers, measures=measures)
        pipelines = None
        if measures:
            none = DenseGradients((0,) * len(layers), 0, torch.float32, None)
            pipelines = Pipelines(layers, blueprint.pools, None, none, 1, device)
        homes = [layer.routed.site.plan.home for layer in layers]
        node_C = layers[0].routed.site.layout.node_C
        planning = Planning(
            strategy=strategy,
            layers=layers,
            job=Job.at_start(homes, node_C, blueprint.pools),
            costs=Costs(layers, blueprint.pools, blueprint.hardware, strategy.rhythm(), pipelines),
            checks=Checks(strategy, layers),
            mover=_stay,
            debug=False,
            rank=dist.get_rank(),
            tell=tell,
        )
        return cls(layers, planning)

    @property
    def node_C(self) -> np.ndarray:
        """Node of each cell."""
        return self.layers[0].routed.site.layout.node_C

    def after_step(self, number: int) -> list[Rows]:
        """Plan the next step; what each layer routed in the one of a number. Collective."""
        rows = self.planning.take_rows()
        self.planning.after_step(number, rows)
        return rows


def _stay(old: Sequence[Placement], new: Sequence[Placement]) -> None:
    raise AssertionError("reshard_interval is 0: experts do not move")
