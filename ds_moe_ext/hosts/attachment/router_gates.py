# SPDX-License-Identifier: Apache-2.0
"""A gate of ours in a host's router: found, checked, and put there.

The router's module stays where it is, with its name, its class (output recorders look for it) and
its weight, where the gate has one of that name and shape; what it computes is the gate's. Shape
letters: B sequences, L tokens of each, T tokens, K choices, E experts, D model width.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.host_layer import ROUTERS, Adopted, Found, keep_marks
from ds_moe_ext.moe.gate import Choice, Gate, count
from ds_moe_ext.strategies.settings import BLOCK

WEIGHT = "weight"

# From logits ``[T, E]`` and a choice to what the host's block expects of its router.
Answer = Callable[[Tensor, Choice], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Router:
    """A host's router that a gate of ours can take over."""

    gate: Gate  # that it will have, with its ``top_k``
    module: nn.Module  # that the block calls with hidden states
    holder: nn.Module  # that has the weight ``[E, D]``
    block: nn.Module  # that is called with whole sequences, ``[B, L, D]``
    answer: Answer  # what the block gets

    @property
    def weight(self) -> nn.Parameter:
        return self.holder.get_parameter(WEIGHT)


def routers_of(model: nn.Module, found: Iterable[Found], gate: Gate | None) -> tuple[Router, ...]:
    """The routers of these layers, in order; none if the host's gate stays. Changes nothing. Raises
    ValueError where one cannot take the gate."""
    return () if gate is None else tuple(_router_of(model, layer, gate) for layer in found)


def _router_of(model: nn.Module, layer: Found, gate: Gate) -> Router:
    try:
        if layer.kind == "deepspeed.moe":
            moe: Any = model.get_submodule(layer.name)
            its = moe.deepspeed_moe.gate
            router = Router(gate.with_top_k(its.k), its, its.wg, moe, _as_deepspeed)
        else:
            router = _of_hugging_face(model, layer, gate)
        _check_gate(router)
    except ValueError as error:
        raise ValueError(
            f"{BLOCK}.gate is {gate}, which {layer.name} cannot take: {error}; set {BLOCK}.gate to "
            f"null to keep the host's gate, or leave the layer out with {BLOCK}.moe_layer_pattern"
        ) from error
    return router


def _check_gate(router: Router) -> None:
    num_experts, width = router.weight.shape
    if (router.gate.top_k or 0) > num_experts:
        raise ValueError(f"top_k is {router.gate.top_k}, of {num_experts} experts")
    for weight in router.gate.weights(num_experts, width):
        if weight.name != WEIGHT and hasattr(router.holder, weight.name):
            raise ValueError(
                f"{type(router.holder).__name__} has a {weight.name!r} already: give the gate's "
                "weight another name"
            )
        if "expert" in weight.name:
            raise ValueError(
                f"its weight {weight.name!r} has 'expert' in its name, by which DeepSpeed's "
                "checkpoints know the weights of experts: give it another name"
            )


def _of_hugging_face(model: nn.Module, layer: Found, gate: Gate) -> Router:
    """Beside the experts, called as ``router(hidden)``, for logits, scores and ids."""
    experts = model.get_submodule(layer.name)
    blocks = [m for m in model.modules() if any(c is experts for c in m._modules.values())]
    if len(blocks) > 1:
        raise ValueError(f"{len(blocks)} blocks share its experts, with a router each")
    routers = [blocks[0]._modules.get(name) for name in ROUTERS]
    router = next((module for module in routers if module is not None), None)
    if router is None:
        raise ValueError(f"{type(blocks[0]).__name__} has no gate or router beside the experts")
    top_k = _check_contract(router, layer.num_experts)
    return Router(gate.with_top_k(top_k), router, router, blocks[0], _as_hugging_face)


def _check_contract(router: nn.Module, num_experts: int) -> int:
    """Refuse a router that is called otherwise, or that has more than one weight."""
    kind = type(router).__name__
    names = [name for name, _ in router.named_parameters()]
    weight = router._parameters.get(WEIGHT)
    if names != [WEIGHT] or weight is None or weight.shape[:-1] != (num_experts,):
        raise ValueError(f"its {kind} has the weights {names}, not one 'weight' of [experts, D]")
    taken = inspect.signature(router.forward).parameters.values()
    if len([p for p in taken if p.default is p.empty]) != 1:
        raise ValueError(f"its {kind} is called with more than hidden states")
    answer = _asked(router, weight)
    shapes = [tuple(part.shape) for part in answer if isinstance(part, Tensor)]
    if not (
        len(shapes) == len(answer) == 3
        and shapes[0] == (1, num_experts)
        and shapes[1] == shapes[2]
        and not answer[2].is_floating_point()
    ):
        raise ValueError(f"its {kind} does not return logits, scores and expert ids")
    return shapes[1][1]


def _asked(router: nn.Module, weight: Tensor) -> tuple[Any, ...]:
    """What it says to one token."""
    was_training = router.training
    try:
        with torch.no_grad():
            answer = router.eval()(weight.new_zeros(1, weight.shape[1]))
    except Exception as error:  # whatever a model of the user's raises
        raise ValueError(f"its {type(router).__name__} fails for one token ({error!r})") from error
    finally:
        router.train(was_training)
    return answer if isinstance(answer, tuple) else (answer,)


def _as_hugging_face(logit_TE: Tensor, choice: Choice) -> tuple[Any, ...]:
    """The model's own load-balance loss is made from the logits."""
    return logit_TE, choice.score_TK, choice.expert_TK


def _as_deepspeed(logit_TE: Tensor, choice: Choice) -> tuple[Any, ...]:
    """As ``TopKGate`` gives sparse routes; no capacity and no places in a padded buffer."""
    num_experts = logit_TE.shape[-1]
    rows_E = count(choice.expert_TK.flatten() + 1, num_experts + 1)[1:]  # not those of -1
    expert_KT, score_KT = choice.expert_TK.T, choice.score_TK.T
    return choice.losses[0], None, num_experts, expert_KT, None, score_KT, rows_E


def host(router: Router, adopted: Adopted) -> Adopted:
    """Put its gate into the router of an adopted layer: the layer with the gate's new parameters,
    whose source is the router's weight."""
    old = router.weight
    wanted = router.gate.weights(*old.shape)
    made = []
    for weight in wanted:
        if weight.name == WEIGHT and weight.shape == tuple(old.shape):
            continue
        with torch.no_grad():
            first = old.new_empty(weight.shape)
            weight.fill(first)
        parameter = nn.Parameter(first, requires_grad=old.requires_grad)
        keep_marks(parameter, old)
        router.holder.register_parameter(weight.name, parameter)
        made.append(parameter)
    names = tuple(weight.name for weight in wanted)
    if WEIGHT not in names:
        router.holder.register_parameter(WEIGHT, None)
    is_kept = router.holder._parameters[WEIGHT] is old
    router.module.forward = HostedGate(router, names)
    sequences = Sequences()
    hosted: Any = adopted.hosted
    experts, hosted.run = hosted.run, router.gate.around(hosted.run, sequences.count)
    if hosted.run is not experts:
        router.block.register_forward_pre_hook(sequences.see, with_kwargs=True)
    return replace(
        adopted,
        sources={**adopted.sources, **dict.fromkeys(made, (old,))},
        discarded=adopted.discarded if is_kept else (*adopted.discarded, old),
    )


@dataclass(frozen=True, eq=False)
class HostedGate:
    """What a router computes from now on."""

    router: Router  # whose gate, weights and mode it has
    names: tuple[str, ...]  # of its weights, in the gate's order

    def __call__(self, hidden: Tensor, used_token: Tensor | None = None, *_: Any) -> Any:
        """``[..., D]`` to the host's answer; noise in training only."""
        if used_token is not None:
            raise ValueError(
                f"used_token was passed to deepspeed.moe, which {BLOCK}.gate does not support; "
                "leave it out, or set the key to null"
            )
        router, gate = self.router, self.router.gate
        weights = tuple(router.holder.get_parameter(name) for name in self.names)
        x_TD = hidden.reshape(-1, hidden.shape[-1])
        logit_TE = gate.logits_of(x_TD, weights, is_training=router.module.training)
        return router.answer(gate.by_expert(logit_TE), gate.choose(logit_TE))


class Sequences:
    """How many sequences a block was called with; those of a flat ``[T, D]`` are one."""

    def __init__(self) -> None:
        self._count = 1

    def see(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        self._count = hidden.shape[:-2].numel()

    def count(self) -> int:
        return self._count


def warn_if_causal(gate: Gate | None, model: nn.Module) -> None:
    """Warn of a gate that looks at later tokens in a model that predicts them, by the names of its
    modules, or as Hugging Face's attention says it."""
    if gate is None or not gate.looks_ahead:
        return
    if any(
        "Causal" in type(module).__name__ or getattr(module, "is_causal", False) is True
        for module in model.modules()
    ):
        warnings.warn(
            f"{BLOCK}.gate is {gate}, which looks at future tokens, but {type(model).__name__} "
            "is causal: its training loss is too low, and generation routes differently from "
            "training; choose another gate",
            stacklevel=2,
        )
