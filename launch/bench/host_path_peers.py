# SPDX-License-Identifier: Apache-2.0
"""What a user has beside our strategies, for host_path.py: DeepSpeed's two layers and Megatron's.

They go the way of a GPU as ours do. Their Triton kernels and the grouped GEMM's wheel are not there
without one: torch's own operations stand in for them, which cost the host no more than a launch.
Shape letters: T tokens, K choices a token, E experts, D model width, G experts of all senders, P
padded rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stdout,
)
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from host_path_contenders import WIDTH, Batch, Builder, Contender, Sizes
from layer_contenders import Problem, Shape, SwiGlu, auto_ep_layer, plain_silu_gated
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script sees its own folder alone

import megatron_on_cpu

ALIGNED = 8  # rows of an expert come in AutoEP's kernels as a multiple


def problem_of(sizes: Sizes) -> Problem:
    """Weights of a layer."""
    shape = Shape(sizes.width, sizes.expert_width, sizes.experts, sizes.top_k, sizes.tokens)
    return Problem.of(shape, sizes.tokens, skew=0.0, device=sizes.device, dtype=sizes.dtype)


class GivenChoice(nn.Module):
    """In the place of a router: hands out what was chosen beforehand.

    Args:
        told: makes of choices and their weights what the layer expects of its router.
    """

    def __init__(self, told: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self._told = told
        self.choice: tuple[Tensor, Tensor] | None = None

    def forward(self, *given: Any) -> tuple[Tensor, ...]:
        assert self.choice is not None
        return self._told(*self.choice)


class Behind(nn.Module):
    """A layer behind attention, as in a block.

    Args:
        attention: ``[T, D] -> [T, D]``.
        layer: ``[1, T, D] -> [1, T, D]``.
    """

    def __init__(self, attention: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.attention, self.layer = attention, layer

    def forward(self, x_1TD: Tensor) -> Tensor:
        x_1TD = x_1TD + self.attention(x_1TD[0])
        return x_1TD + tokens_of(self.layer(x_1TD)).view_as(x_1TD)


def tokens_of(out: Any) -> Tensor:
    """What a layer makes of tokens, which may stand before other outputs."""
    tokens: Tensor = out[0] if isinstance(out, tuple) else out
    return tokens


class Peer(Contender):
    """Layers one behind the other.

    Args:
        name: in the table.
        layers: ``[T, D] -> [T, D]``.
        gates: that hand out the choices of each layer; none where layers have their own.
    """

    def __init__(
        self, name: str, layers: Sequence[nn.Module], gates: Sequence[GivenChoice] = ()
    ) -> None:
        super().__init__(name, nn.ModuleList(layers))
        self._layers, self._gates = layers, gates

    def forward(self, batch: Batch) -> Tensor:
        for gate, choice in zip(self._gates, zip(batch.expert_LTK, batch.score_LTK)):
            gate.choice = choice
        x_TD = batch.x_TD
        for layer in self._layers:
            x_TD = tokens_of(layer(x_TD[None])).view_as(x_TD)
        return x_TD

    def attend(self, attentions: Sequence[nn.Module]) -> None:
        self._layers = [Behind(*both) for both in zip(attentions, self._layers)]
        self.model = nn.ModuleList(self._layers)


def _start_deepspeed() -> None:
    import deepspeed

    with redirect_stdout(sys.stderr):
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


class AutoEp(Peer):
    """DeepSpeed AutoEP. Collective."""

    cpu_only = ("permute_by_local_expert",)

    def __init__(self, name: str, sizes: Sizes) -> None:
        from deepspeed.moe.ep_count import count_tokens_per_expert

        def told(expert_TK: Tensor, score_TK: Tensor) -> tuple[Tensor, ...]:
            return score_TK, expert_TK, count_tokens_per_expert(expert_TK, sizes.experts)

        if sizes.tokens * sizes.top_k % ALIGNED:
            raise ValueError(f"its rows are not a multiple of {ALIGNED}; choose another --tokens")
        _start_deepspeed()
        layers, gates = [], []
        for _ in range(sizes.layers):
            layer = auto_ep_layer({}, problem_of(sizes), ep_size=dist.get_world_size())
            layer.set_deepspeed_parallelism()
            layer.router = GivenChoice(told)
            layers.append(layer)
            gates.append(layer.router)
        super().__init__(name, layers, gates)
        self._has_triton = sizes.device.type == "cuda"

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext() if self._has_triton else self._without_triton()

    @contextmanager
    def _without_triton(self) -> Iterator[None]:
        from deepspeed.moe import ep_experts, ep_kernels

        plain = replace(ep_experts.EXPERT_ACTIVATIONS["swiglu"], fused_fn=None)
        with (
            mock.patch.object(ep_kernels, "fill_indices_cpu", filled),
            mock.patch.dict(ep_experts.EXPERT_ACTIVATIONS, swiglu=plain),
        ):
            yield


def filled(rows_G: Tensor, first_G: Tensor, padded_E: Tensor, *sizes: int) -> Tensor:
    """What AutoEP's kernel writes: where each padded row comes from, -1 for none, int32 ``[P]``.

    Args:
        rows_G: by sender and expert.
        first_G: where each of those begins, as they came.
        padded_E: where each expert's begin, padded.
        sizes: experts of this rank, senders, ``P``.
    """
    num_experts, num_senders, length = sizes
    index_P = torch.full((length,), -1, dtype=torch.int32)
    row_N = torch.arange(length - num_experts * ALIGNED)
    rows_SE = rows_G.view(num_senders, num_experts)
    shift_SE = padded_E + rows_SE.cumsum(0) - rows_SE - first_G.view_as(rows_SE)
    shift_N = shift_SE.flatten().repeat_interleave(rows_G, output_size=row_N.numel())
    return index_P.scatter_(0, row_N + shift_N, row_N.int())


class DeepSpeedMoe(Peer):
    """``deepspeed.moe``, whose gate finds the places of rows: it stays in the layer. Collective."""

    def __init__(self, name: str, capacity_factor: float | None, sizes: Sizes) -> None:
        from deepspeed.moe.layer import MoE

        _start_deepspeed()
        layers = []
        for _ in range(sizes.layers):
            with redirect_stdout(sys.stderr):
                layer = MoE(
                    WIDTH,
                    SwiGlu(WIDTH, WIDTH, plain_silu_gated),
                    num_experts=sizes.experts,
                    ep_size=dist.get_world_size(),
                    k=sizes.top_k,
                    capacity_factor=capacity_factor or 1.0,
                    drop_tokens=capacity_factor is not None,
                    top2_2nd_expert_sampling=False,
                )
                layer.set_deepspeed_parallelism()
            layers.append(layer)
        super().__init__(name, layers)


class Megatron(Peer):
    """Megatron-core's layer with its all-to-all dispatcher. Collective."""

    cpu_only = ("sort_chunks_by_idxs",)  # on CUDA it is handed lengths that were fetched before

    def __init__(self, name: str, sizes: Sizes) -> None:
        def told(expert_TK: Tensor, score_TK: Tensor) -> tuple[Tensor, ...]:
            nothing = score_TK.new_zeros(sizes.tokens, sizes.experts)  # as its router's last lines
            chosen = torch.zeros_like(nothing).int().scatter(1, expert_TK, 1).bool()
            return nothing.scatter(1, expert_TK, score_TK), chosen

        megatron_on_cpu.install()
        try:
            layers = [_megatron_layer(sizes, number) for number in range(sizes.layers)]
        finally:
            megatron_on_cpu.remove()
        gates = [GivenChoice(told) for _ in layers]
        for layer, gate in zip(layers, gates):
            layer.router = gate
        super().__init__(name, layers, gates)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Without CUDA; what looks at every call of torch is not needed once a layer is made."""
        from megatron.core.transformer.moe import grouped_gemm_util

        megatron_on_cpu.install(without=("device_names",))
        grouped = SimpleNamespace(gmm=grouped_gemm)
        with ExitStack() as changed:
            changed.callback(megatron_on_cpu.remove)
            changed.enter_context(mock.patch.object(grouped_gemm_util, "ops", grouped))
            yield


def grouped_gemm(rows: Tensor, weights: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Any:
    """In the place of the wheel's."""
    weights = weights.mT if trans_b else weights
    ends = batch_sizes.cumsum(0, dtype=torch.int32)
    return torch.nn.functional.grouped_mm(rows, weights, offs=ends)


def _megatron_layer(sizes: Sizes, number: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_layer import MoELayer

    num_ranks = dist.get_world_size()
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=num_ranks, create_gloo_process_groups=False
        )
    config = TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=WIDTH,
        num_attention_heads=1,
        num_moe_experts=sizes.experts,
        moe_ffn_hidden_size=WIDTH,
        moe_router_topk=sizes.top_k,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_grouped_gemm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bf16=True,  # its grouped GEMM asks for the flag
        params_dtype=torch.float32,
        expert_model_parallel_size=num_ranks,
        use_cpu_initialization=True,
    )
    spec = get_moe_module_spec(
        use_te=False,
        num_experts=sizes.experts,
        moe_grouped_gemm=True,
        moe_use_legacy_grouped_gemm=True,
    )
    return MoELayer(config, spec.submodules, layer_number=number + 1)


PEERS: Mapping[str, Builder] = {
    "DeepSpeed AutoEP": partial(AutoEp, "DeepSpeed AutoEP"),
    "deepspeed.moe, dropless": partial(DeepSpeedMoe, "deepspeed.moe, dropless", None),
    "deepspeed.moe, capacity 1.25": partial(DeepSpeedMoe, "deepspeed.moe, capacity 1.25", 1.25),
    "Megatron, alltoall": partial(Megatron, "Megatron, alltoall"),
}
"""By name."""
