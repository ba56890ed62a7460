# SPDX-License-Identifier: Apache-2.0
"""Watches a model train for ``ds-moe-ext verify``, under any host, with us or without.

Gradients are taken by hooks as autograd makes them, before a host reduces them: what all ranks
have of a parameter adds up to the gradient of all rows, wherever an expert lives. Shape letters: T
tokens, K choices, E experts.
"""

from __future__ import annotations

import atexit
import os
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext._autoload import VERIFY
from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.hosts import huggingface
from ds_moe_ext.hosts.attachment.host_layer import Found, Place
from ds_moe_ext.hosts.steps.training_run import Run
from ds_moe_ext.moe.sharding import WHOLE, Shard
from ds_moe_ext.strategies.settings import BLOCK
from ds_moe_ext.verification import Kind, LayerSeen, Precision, RankRecord, Trial, sketch, sketch_at

CASTS = {Precision.FLOAT32: nn.Module.float, Precision.FLOAT64: nn.Module.double}


def apply() -> None:
    """Seed all generators; called when torch has been imported, before the script does."""
    seed = trial_of_this_run().seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def trial_of_this_run() -> Trial:
    """Which of the two runs this is, as ``ds-moe-ext verify`` gave to this process."""
    return Trial.from_text(os.environ[VERIFY])


def undrawn() -> AbstractContextManager[None]:
    """Behind the block torch's generators are as before, whatever a start draws in it: the script
    goes on alike in both runs, by its own seeds if it sets any."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    return torch.random.fork_rng(devices)


def turned(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A configuration, given there, as this run is to have it: the block as it is, or off. Raises
    ValueError where it has no block that is enabled."""
    block = document.get(BLOCK)
    if not isinstance(block, Mapping) or not block.get("enabled"):
        raise ValueError(
            f"{where} has no enabled block {BLOCK}, so ds-moe-ext verify has nothing to "
            f"compare; set {BLOCK}.enabled to true"
        )
    return {**document, BLOCK: {**block, "enabled": trial_of_this_run().is_on}}


def cast(model: nn.Module, precision: Precision) -> None:
    """Give a model's parameters and buffers of real numbers the trial's type, in place."""
    if precision in CASTS:
        CASTS[precision](model)


class ExpertPart(NamedTuple):
    """What a parameter has of one expert."""

    name: str  # of the expert's weight, the same wherever it lives
    slot: Place = None  # in the parameter, as an index; None where it is of this expert alone
    shard: Shard = WHOLE  # the part of the expert that is here
    number: int = 0  # of the weight among those of an expert

    def sketch_of(self, gradient: Tensor) -> Tensor:
        """Of the whole expert's gradient, zero where other ranks have it."""
        part = gradient if self.slot is None else gradient[self.slot]
        if self.shard.is_whole:
            return sketch(part)
        whole = part.new_zeros(self.shard.whole_shape(self.number, part.shape))
        dim = self.shard.alongs[self.number].dim
        for start, own_start, length in self.shard.stretches(self.number, whole.shape[dim]):
            whole.narrow(dim, start, length).copy_(part.narrow(dim, own_start, length))
        return sketch(whole)


Parts = Mapping[nn.Parameter, Sequence[ExpertPart]]


def parts_of_run(run: Run) -> Parts:
    """The experts of this rank, where they are ours."""
    parts: dict[nn.Parameter, list[ExpertPart]] = {}
    ep_rank = run.layers[0].routed.layer_context.layout.index("ep")
    for layer, owner in zip(run.layers, run.planning.job.owners):
        hosted = layer.hosted
        for expert, slot in zip(owner.experts_of(ep_rank).tolist(), hosted.slots(), strict=True):
            for number, weight in enumerate(hosted.weight_names):
                name = f"{layer.name}.{weight}.{expert}"
                stacks, place = slot.stacks or slot.parameters, slot.number if slot.stacks else None
                part = ExpertPart(name, place, hosted.shard, number)
                parts.setdefault(stacks[number], []).append(part)
    return parts


def parts_of_stacks(model: nn.Module, found: Iterable[Found]) -> Parts:
    """The experts of a stock model."""
    parts: dict[nn.Parameter, list[ExpertPart]] = {}
    for layer in found:
        module = model.get_submodule(layer.name)
        for (weight, *_), stored in zip(layer.expert, layer.stored, strict=True):
            for expert in range(layer.num_experts):
                place = stored.place(module, expert)
                part = ExpertPart(f"{layer.name}.{weight}.{expert}", place)
                parts.setdefault(stored.of(module, expert), []).append(part)
    return parts


class Recording:
    """What this rank sees of the run."""

    def __init__(
        self, model: nn.Module, parts: Parts, num_experts_of: Mapping[str, int], divides: int = 1
    ) -> None:
        self._trial, self._rank = trial_of_this_run(), dist.get_rank()
        self._num_ranks = dist.get_world_size()
        self._micro_losses: list[float] = []
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._num_steps = 0
        self._weights: dict[str, Tensor] = {}
        self._gradients: dict[Kind, dict[str, Tensor]] = {kind: {} for kind in Kind}
        self._layers: dict[str, dict[str, Tensor]] = {}
        self._num_experts_of, self._divides = num_experts_of, divides
        self._handles: list[Any] = []
        for name, parameter in model.named_parameters():
            self._watch(name, parameter, parts.get(parameter))
        atexit.register(self._end)

    def _watch(
        self, name: str, parameter: nn.Parameter, experts: Sequence[ExpertPart] | None
    ) -> None:
        if experts is None:
            self._weights[name] = sketch(parameter)
        if not parameter.requires_grad:
            return

        def see(gradient: Tensor) -> None:
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            for part in experts or ():
                self._add(Kind.EXPERT, part.name, part.sketch_of(gradient) * self._divides)
            if experts is None:
                self._add(self._kind(name, gradient), name, sketch(gradient))

        self._handles.append(parameter.register_hook(see))

    def _kind(self, name: str, gradient: Tensor) -> Kind:
        """A gate has a row for each expert of a layer, and is in it or beside it."""
        for layer, num_experts in self._num_experts_of.items():
            is_near = name.startswith((f"{layer}.", f"{layer.rpartition('.')[0] or layer}."))
            if is_near and gradient.shape[:1] == (num_experts,):
                return Kind.GATE
        return Kind.DENSE

    def _add(self, kind: Kind, name: str, added: Tensor) -> None:
        seen = self._gradients[kind]
        seen[name] = seen[name] + added if name in seen else added

    # Layers: the first pass of each, in training.

    def watch_in_block(self, model: nn.Module, name: str) -> None:
        """Of experts by this name, as their block calls them."""
        block = model.get_submodule(name.rpartition(".")[0])
        if huggingface.is_llama4_block(block):
            self.watch_layer(name, block)
            self.watch_router(name, block.get_submodule("router"), has_map=False)
            return
        module = model.get_submodule(name)  # called as ``experts(rows, expert ids, scores)``

        def see(_: nn.Module, given: Any, named: dict[str, Any], output: Tensor) -> None:
            if not module.training or name in self._layers:
                return
            rows, expert_TK, score_TK = (*given, *named.values())[:3]
            if expert_TK.dim() == 3:  # Switch Transformers' own
                expert_TK = huggingface.ids_of(expert_TK)
            token_T1 = torch.arange(len(expert_TK), device=expert_TK.device)[:, None]
            # Not those of LongCat-Flash's that are the identity.
            is_chosen = (expert_TK >= 0) & (expert_TK < self._num_experts_of[name])
            place_N = (token_T1 * self._num_experts_of[name] + expert_TK)[is_chosen]
            self._layers[name] = {
                **_seen_of_choices(place_N, score_TK[is_chosen]),
                "score_sizes": sketch((score_TK * is_chosen).sort(dim=1, descending=True).values),
                "input": sketch(rows),
                "output": sketch(output),
            }

        self._handles.append(module.register_forward_hook(see, with_kwargs=True))

    def watch_layer(self, name: str, module: nn.Module) -> None:
        """Of a module that takes rows first and gives rows first."""

        def see(_: nn.Module, given: Any, named: dict[str, Any], output: Any) -> None:
            seen = self._layers.setdefault(name, {})
            if module.training and "input" not in seen:
                rows = output[0] if isinstance(output, tuple) else output
                seen["input"] = sketch((*given, *named.values())[0])
                seen["output"] = sketch(rows)

        self._handles.append(module.register_forward_hook(see, with_kwargs=True))

    def watch_router(self, name: str, router: nn.Module, *, has_map: bool = True) -> None:
        """Of a module that gives scores and a map, both ``[T, E]``; or whose scores are zero where
        an expert was not chosen."""

        def see(_: nn.Module, given: Any, output: Any) -> None:
            seen = self._layers.setdefault(name, {})
            if router.training and "choices" not in seen:
                score_TE, map_TE = output[:2] if has_map else (output[0], output[0])
                place_N = map_TE.reshape(-1).nonzero()[:, 0]
                seen.update(_seen_of_choices(place_N, score_TE.reshape(-1)[place_N]))
                seen["score_sizes"] = sketch(score_TE.sort(dim=-1, descending=True).values)

        self._handles.append(router.register_forward_hook(see, prepend=True))  # as the host made it

    # Steps.

    def loss(self, value: float) -> None:
        """Of a micro-batch."""
        self._micro_losses.append(value)

    def norm(self, value: float | None) -> None:
        """Of all gradients, reduced; the first is kept."""
        if value and not self._norms:
            self._norms.append(float(value))

    def step(self) -> None:
        """The optimizer has stepped, or is about to. Collective in the last, which ends here."""
        self._num_steps += 1
        if self._micro_losses:
            self._losses.append(float(np.mean(self._micro_losses)))
            self._micro_losses = []
        while self._handles:
            self._handles.pop().remove()
        if self._num_steps >= self._trial.num_steps:
            self._write()
            gather_objects(None, None)  # nobody leaves while others wait for it
            raise SystemExit(0)

    def _end(self) -> None:
        """The interpreter is about to end."""
        if self._num_steps < self._trial.num_steps:
            self._write()  # how far the script went
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # groups that nobody has destroyed may outlive the interpreter, and hang

    def _write(self) -> None:
        record = RankRecord(
            losses_I=np.array(self._losses),
            norms_I=np.array(self._norms),
            num_steps=self._num_steps,
            num_ranks=self._num_ranks,
            weights=_on_host(self._weights),
            layers={name: LayerSeen(**_on_host(seen)) for name, seen in self._layers.items()},
            gradients={kind: _on_host(seen) for kind, seen in self._gradients.items()},
        )
        record.write(self._trial.file_of(self._rank))


def _seen_of_choices(place_N: Tensor, score_N: Tensor) -> dict[str, Tensor]:
    """Of a map ``[T, E]``, flat."""
    return {
        "choices": sketch_at(place_N, torch.ones_like(place_N)),
        "scores": sketch_at(place_N, score_N),
        "num_choices": torch.tensor(place_N.numel()),
    }


def _on_host(sketches: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: values.cpu().numpy() for name, values in sketches.items()}
