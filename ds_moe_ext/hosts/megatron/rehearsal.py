# SPDX-License-Identifier: Apache-2.0
"""A model of Megatron's run before training, to choose the experts that move to attention ranks.

HeterMoE's profiler and Algorithm 1 (spec rules 28 to 38; ``hosts/zebra/profile.py``). The model has
just been built and is about to be wrapped for data parallelism, so that every rank still has all
weights of its role. It runs itself, and not a copy; what that leaves behind is undone.

Shape letters: T tokens, D model width, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor, nn

from ds_moe_ext.core.layout import Grid
from ds_moe_ext.hosts.attachment import replacement
from ds_moe_ext.hosts.attachment.modules import during
from ds_moe_ext.hosts.megatron.active_settings import Chosen
from ds_moe_ext.hosts.megatron.layers import (
    Dispatcher,
    find_layers,
    form_of,
    function_of,
    weight_names,
)
from ds_moe_ext.hosts.megatron.refusals import script_variables
from ds_moe_ext.hosts.zebra.profile import Rehearsal, Training, profiled_by
from ds_moe_ext.hosts.zebra.rehearsal import Dense, PartCall, Scene, blocks_of, parts_of
from ds_moe_ext.hosts.zebra.stage_model import moved_by
from ds_moe_ext.planning.zebra_planner import WeightBytes


def moved_of(
    asked: Chosen, model: Any, ddp_config: Any, grid: Grid, group: dist.ProcessGroup
) -> list[int]:
    """Experts that each expert rank leaves to attention ranks, of each MoE layer. Collective.

    Args:
        asked: the settings.
        model: all of what this rank has built.
        ddp_config: how Megatron is about to wrap it.
        grid: the ranks that have these layers, a grid for each ZP group.
        group: the same.

    Raises:
        ValueError: on every rank: it cannot be measured, or the model does not fit.
    """
    found = tuple(find_layers(model, replacement.wanted(asked.settings)))
    if not found:
        return []
    layers = [model.get_submodule(each.name) for each in found]
    scene, config = Scene(next(model.parameters()).device, None), model.config
    is_stated = calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None
    num_stripes = calculator.get_num_microbatches() if is_stated else 1
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        num_stripes = 2  # the fewest that overlap
    (script,) = script_variables("_GLOBAL_ARGS")
    dtype, is_half = config.params_dtype, config.params_dtype.itemsize == 2
    training = Training(
        scene=scene,
        micro_batch=int(calculator.get_micro_batch_size()) if is_stated else None,
        weight_bytes=WeightBytes(
            weight=dtype.itemsize,
            gradient=4 if ddp_config.grad_reduce_in_fp32 else dtype.itemsize,
            optimizer=4 * (2 + is_half),  # Adam's
            zero_stage=int(ddp_config.use_distributed_optimizer),
        ),
        num_stripes=asked.strategy.striping.num_stripes or int(num_stripes),
        sequence_length=getattr(script, "seq_length", None),
        group=group,
        tensor_size=config.tensor_model_parallel_size,
        sequence_size=config.context_parallel_size,
    )
    blueprint = replacement.on_grid(asked.settings, asked.strategy, found, grid)
    blocks = blocks_of(model, [each.name for each in found])
    experts = layers[0].experts
    slots = form_of("a layer", experts).slots(experts, weight_names(config))
    first = function_of(experts), tuple(slots[0].parameters)
    dense = partial(_dense, model, layers, blocks, scene)
    own = Rehearsal(dense, lambda: first, together=True)
    return moved_by(profiled_by(own, blueprint, model, training).strategy) or []


class _Through(nn.Module):
    """In the place of experts: gives back what comes in, by the scores of each token."""

    row_1D = torch.empty(0)

    def forward(self, x_TD: Tensor, routing_map: Tensor, probs_TE: Tensor) -> tuple[Tensor, None]:
        """As ``Dispatcher`` calls experts."""
        self.row_1D = x_TD[:1].detach()
        return x_TD * probs_TE.sum(1, keepdim=True).to(x_TD.dtype), None


@contextmanager
def _hollow(model: nn.Module, layers: Sequence[Any]) -> Iterator[_Through]:
    """The model without its experts inside the block; behind it, all is as it was before."""
    through, experts = _Through(), [layer.experts for layer in layers]
    tracker = get_cuda_rng_tracker()
    states, buffers = tracker.get_states(), [(each, each.clone()) for each in model.buffers()]
    with ExitStack() as stack:
        stack.enter_context(during(MoEAuxLossAutoScaler, main_loss_backward_scale=None))
        stack.enter_context(during(MTPLossLoggingHelper, tracker={}))
        for layer in layers:
            own = Dispatcher(layer.token_dispatcher.shared_experts)
            stack.enter_context(during(layer, token_dispatcher=own))
            # Megatron shows no losses of such a layer.
            stack.enter_context(during(layer.router, layer_number=None))
            layer.experts = through
        try:
            yield through
        finally:
            for layer, stock in zip(layers, experts):
                layer.experts = stock
            tracker.set_states(states)
            for parameter in model.parameters():
                parameter.grad = None
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _dense(
    model: Any,
    layers: Sequence[Any],
    blocks: Sequence[nn.Module],
    scene: Scene,
    *,
    tokens: tuple[int, int],
    num_repeats: int,
) -> Dense:
    """Of an attention rank, for samples of which it has so many tokens. A later stage is given
    random numbers in the place of the stage before."""
    config, (num_samples, length) = model.config, tokens
    with scene.entered(), _hollow(model, layers) as through:
        if not model.pre_process:
            own = length // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
            dtype = config.pipeline_dtype or config.params_dtype
            shape = own, num_samples, config.hidden_size
            x = torch.randn(shape, dtype=dtype, device=scene.device, requires_grad=True)
            model.set_input_tensor(x)
        ids = torch.randint(model.vocab_size, (num_samples, length), device=scene.device)
        position = torch.arange(length, device=scene.device).expand_as(ids)
        call = PartCall(model, (ids, position, None), {"labels": ids})
        recomputes = config.recompute_granularity == "full"
        parts = parts_of(call, blocks, scene, num_repeats, recomputes=recomputes)
        if not model.pre_process:
            model.set_input_tensor(None)
    row_1D = through.row_1D
    return Dense(parts, config.moe_router_topk, row_1D.shape[1], row_1D.dtype)
