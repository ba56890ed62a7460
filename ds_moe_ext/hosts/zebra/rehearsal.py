# SPDX-License-Identifier: Apache-2.0
"""A model run before training, on a copy, to see what its parts take: HeterMoE's profiler.

Spec rules 35 to 38. The copy has the host's device and types. Its experts give rows back as they
are, so that all but experts is measured with routing in it, but without what travels. The model
itself is only read: weights, buffers and gradients stay as they are.

Shape letters: B samples, L length, R rows, D model width.
"""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.hosts.attachment.block_hooks import block_of
from ds_moe_ext.hosts.attachment.host_layer import Found, RoutedOf
from ds_moe_ext.hosts.attachment.modules import during, unwrapped
from ds_moe_ext.hosts.attachment.replacement import Blueprint, Finder
from ds_moe_ext.hosts.attachment.router_gates import host, routers_of
from ds_moe_ext.moe.expert import ExpertFunction
from ds_moe_ext.moe.layer import LayerOptions, RoutedExperts
from ds_moe_ext.moe.sharding import WHOLE
from ds_moe_ext.moe.slot_rows import SlotRows
from ds_moe_ext.planning.bench import clock_of
from ds_moe_ext.planning.probe import expert_sweep
from ds_moe_ext.planning.strategy import Job, LayerContext
from ds_moe_ext.planning.zebra_planner import Timed
from ds_moe_ext.strategies.ep import ExpertParallel

WARM_UPS = 5  # fewer only where fewer repetitions are asked for


@dataclass(frozen=True, eq=False)
class Scene:
    """Where and as what the model will train."""

    device: torch.device  # of this rank
    dtype: torch.dtype | None  # of weights; None: as the model has them
    # in which the host calls the model, as autocast
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    # divides the dense weights of a model among ranks, in place, as the host will
    divide: Callable[[nn.Module], object] = lambda _: None

    def brought(self, weight: Tensor) -> Tensor:
        """A copy of a weight as it will be; of one on the meta device with any values."""
        dtype = self.dtype if weight.is_floating_point() else None
        if weight.is_meta:
            return torch.randn_like(weight, dtype=dtype, device=self.device)
        return weight.detach().to(self.device, dtype, copy=True)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run here; random numbers go on afterwards as if nothing had been drawn."""
        is_cuda = self.device.type == "cuda"
        with (
            torch.cuda.device(self.device) if is_cuda else nullcontext(),
            torch.random.fork_rng([self.device] if is_cuda else []),
            torch.enable_grad(),
            self.context(),
        ):
            yield

    def clear(self) -> None:
        """Give the device back what nobody uses any more."""
        gc.collect()  # copies of models may hold themselves
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def timed(self, work: Callable[[], object], num_repeats: int) -> Timed:
        """How long it takes (rule 38)."""
        clock = clock_of(self.device)
        for _ in range(min(WARM_UPS, num_repeats)):
            work()
        return Timed.of([clock.seconds(lambda: None, work) for _ in range(num_repeats)])

    def kept_bytes(self, forward: Callable[[], object], weights: Iterable[Tensor]) -> int:
        """Bytes that a forward keeps for its backward, beside weights."""
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            kept = forward()
            held = torch.cuda.memory_allocated(self.device) - before
            del kept
            return held
        storages: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            kept = forward()
        for weight in weights:
            storages.pop(weight.untyped_storage().data_ptr(), None)
        return sum(storages.values())


# All but experts.


class Parts(NamedTuple):
    """All of a model but experts, for one stripe."""

    blocks: Timed  # seconds of all of them, forward and backward
    whole: Timed  # of all of the model
    blocks_bytes: int  # that they keep for backward
    others_bytes: int  # that embeddings, head and loss keep
    num_trained: int  # weights that are trained
    num_frozen: int  # weights that are not


class Dense(NamedTuple):
    """The same, and what experts would be given."""

    parts: Parts
    top_k: int  # rows of a token
    width: int  # elements of a row
    row_dtype: torch.dtype


def rehearse_dense(
    model: nn.Module,
    blueprint: Blueprint,
    finders: Iterable[Finder],
    scene: Scene,
    *,
    tokens: tuple[int, int],
    num_repeats: int,
) -> Dense:
    """Run a model whose layers are not replaced yet without its experts, the blocks alone and all
    of it. Blocks are the elements of lists of modules in which a layer with experts is. Raises
    ValueError where it cannot be called with tokens alone."""
    with scene.entered():
        hollow, (routed, *_) = _hollow(model, blueprint, finders)
        _bring(hollow, scene)
        scene.divide(hollow)
        hollow.train()
        inputs = token_inputs(hollow, tokens, scene.device)
        blocks = blocks_of(hollow, [found.name for found in blueprint.found])
        parts = parts_of(PartCall(hollow, (), inputs), blocks, scene, num_repeats)
    return Dense(parts, routed.rows.top_k, routed.row_width, routed.row_dtype)


def parts_of(
    whole: PartCall,
    blocks: Iterable[nn.Module],
    scene: Scene,
    num_repeats: int,
    *,
    recomputes: bool = False,
) -> Parts:
    """Run a model without experts, and each block of it by itself with what it was called with;
    ``recomputes``: the host has it compute a second time in backward."""
    weights, calls = [*whole.part.parameters()], list[Callable[..., Any]]()

    def see(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = pytree.tree_map_only(
            Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), (args, kwargs)
        )
        call = PartCall(block, *leaves)
        calls.append(partial(checkpoint, call, use_reentrant=False) if recomputes else call)

    watches = [block.register_forward_pre_hook(see, with_kwargs=True) for block in blocks]
    whole_bytes = scene.kept_bytes(whole, weights)
    for watch in watches:
        watch.remove()
    blocks_bytes = scene.kept_bytes(lambda: [call() for call in calls], weights)
    trained = [weight.numel() for weight in weights if weight.requires_grad]
    return Parts(
        blocks=scene.timed(partial(_both_ways, calls), num_repeats),
        whole=scene.timed(partial(_both_ways, [whole]), num_repeats),
        blocks_bytes=blocks_bytes,
        others_bytes=max(0, whole_bytes - blocks_bytes),
        num_trained=sum(trained),
        num_frozen=sum(weight.numel() for weight in weights) - sum(trained),
    )


def _hollow(
    model: nn.Module, blueprint: Blueprint, finders: Iterable[Finder]
) -> tuple[nn.Module, list[RoutedExperts]]:
    """A copy without experts, whose weights are those of the model itself; and its layers."""
    shell, found = _shell(model, blueprint, finders)
    settings, layers = blueprint.settings, []
    nobody = torch.zeros(0, dtype=torch.int64)
    for each, router in zip_longest(found, routers_of(shell, found, settings.gate)):
        options = LayerOptions(
            capacity_factor=settings.capacity_factor,
            gate_may_drop=each.may_drop if router is None else router.gate.may_drop,
        )
        routed_of = _alone(each, lambda rows_RD, slots, weights: rows_RD.clone(), options)
        adopted = each.adopt(nobody, WHOLE, routed_of)
        layers.append(adopted.hosted.routed)
        if router is not None:
            host(router, adopted)
    return shell, layers


def _bring(shell: nn.Module, scene: Scene) -> None:
    """Give a copy weights of its own, where it will run."""
    own: dict[int, nn.Parameter] = {}
    for module in shell.modules():
        for name, weight in module._parameters.items():
            if weight is not None and id(weight) not in own:
                own[id(weight)] = nn.Parameter(scene.brought(weight), weight.requires_grad)
            module._parameters[name] = None if weight is None else own[id(weight)]
    shell.to(scene.device)


def _shell(
    model: nn.Module, blueprint: Blueprint, finders: Iterable[Finder]
) -> tuple[nn.Module, list[Found]]:
    """A copy of all modules and buffers, which has the weights of the model itself; and its
    layers."""
    same = {id(parameter): parameter for parameter in model.parameters()}
    with during(dist.ProcessGroup, __deepcopy__=lambda group, _: group):
        shell = copy.deepcopy(unwrapped(model), same)
    names = {found.name for found in blueprint.found}
    return shell, [found for finder in finders for found in finder(shell, names.__contains__)]


def _alone(found: Found, function: ExpertFunction, options: LayerOptions) -> RoutedOf:
    """Makes the program of a layer whose experts are all on one rank."""
    strategy = ExpertParallel()
    owner = Placement.owned_by(np.zeros(found.num_experts, np.int64), 1)
    (plan,) = strategy.plan(Job.at_start([owner], np.zeros(1, np.int64)))
    layer_context = LayerContext(plan, ParallelLayout(Grid(1, 1), rank=0), layer=0)
    return lambda _: RoutedExperts(strategy, layer_context, function, options=options)


def blocks_of(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """The lists that layers of these names are in, element by element; or else the model."""
    lists = {block_of(model, name).rpartition(".")[0]: None for name in names}
    elements = [model.get_submodule(name) for name in lists]
    if not all(isinstance(each, nn.ModuleList) for each in elements):
        return [model]
    return [block for each in elements for block in each.children()]


@dataclass(frozen=True, eq=False)
class PartCall:
    """A call of a model or a block, with inputs that end the graph."""

    part: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.part(*self.args, **self.kwargs)


def _both_ways(calls: Iterable[Callable[[], Any]]) -> None:
    """Forward and backward of each."""
    for call in calls:
        leaves = pytree.tree_leaves(call())
        graded = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        torch.autograd.backward(graded, [torch.ones_like(leaf) for leaf in graded])


def token_inputs(model: nn.Module, tokens: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """Arguments for a model of tokens, int64 ``[B, L]``; raises ValueError where its forward wants
    something else."""
    parameters = inspect.signature(model.forward).parameters
    embeddings = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    known = {"input_ids", "labels", "use_cache"} & parameters.keys()
    wanted = {
        name
        for name, each in parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    if "input_ids" not in known or wanted - known or not embeddings:
        raise ValueError(
            f"forward of {type(model).__name__} takes {', '.join(parameters)}, but a profile "
            "calls it with input_ids, with or without labels"
        )
    vocabulary = max(each.num_embeddings for each in embeddings)
    ids_BL = torch.randint(vocabulary, tokens, device=device)
    given = {"input_ids": ids_BL, "labels": ids_BL, "use_cache": False}
    return {name: given[name] for name in known}


# Experts.


class Experts(NamedTuple):
    """One expert, on the rows that one expert rank computes of a layer in a stripe."""

    seconds: Timed  # forward and backward
    kept_bytes: int  # for backward


def rehearse_experts(
    first: Callable[[], tuple[ExpertFunction, tuple[Tensor, ...]]],
    scene: Scene,
    rows_RD: Tensor,
    *,
    num_repeats: int,
    recomputes: bool,
) -> Experts:
    """Run the first expert of the first layer, and its weights: time depends on rows, not on whose
    they are."""
    with scene.entered():
        function, weights = first()
        rows_RD = torch.randn_like(rows_RD, device=scene.device)
        slots = SlotRows.of(np.array([rows_RD.shape[0]]), scene.device)

        def forward(given_RD: Tensor) -> Tensor:
            return function(given_RD, slots, weights)

        trained = [weight for weight in weights if weight.requires_grad]
        (both_ways,) = expert_sweep(forward, trained, rows_RD, num_steps=1).works_N

        def again() -> None:
            with torch.no_grad():
                forward(rows_RD)
            both_ways()

        seconds = scene.timed(again if recomputes else both_ways, num_repeats)
        if recomputes:
            return Experts(seconds=seconds, kept_bytes=rows_RD.nbytes)
        leaf_RD = rows_RD.requires_grad_()
        kept_bytes = scene.kept_bytes(lambda: forward(leaf_RD), weights)
    return Experts(seconds=seconds, kept_bytes=max(kept_bytes, rows_RD.nbytes))


def first_expert(
    model: nn.Module, blueprint: Blueprint, finders: Iterable[Finder], scene: Scene
) -> tuple[ExpertFunction, tuple[Tensor, ...]]:
    """Of a model whose layers are not replaced yet, on a copy."""
    _, (first, *_) = _shell(model, blueprint, finders)
    functions: list[ExpertFunction] = []

    def routed_of(function: ExpertFunction) -> RoutedExperts:
        functions.append(function)
        return _alone(first, function, LayerOptions())(function)

    hosted = first.adopt(torch.zeros(1, dtype=torch.int64), WHOLE, routed_of).hosted
    weights = hosted.weights()
    brought = (scene.brought(each).requires_grad_(each.requires_grad) for each in weights)
    return functions[0], tuple(brought)
