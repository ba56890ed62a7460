# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers, version 5: the experts modules of its MoE blocks.

Nearly all families keep ``gate_up_proj`` and ``down_proj`` (or ``up_proj``) with the experts as
first dim, and say by attributes how they are stored: these are found by that, whatever their names.
Four are known by name, for they call or keep experts otherwise.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ds_moe_ext.hosts import (
    adapted_experts,
    dbrx,
    llama4,
    longcat_flash,
    switch_transformers,
)
from ds_moe_ext.hosts.attachment.experts import (
    ExpertsDescription,
    check_not_adapted,
    check_not_parametrized,
    class_of,
    found_experts,
    is_registered,
    shell,
)
from ds_moe_ext.hosts.attachment.host_layer import Found, Wanted
from ds_moe_ext.hosts.attachment.modules import named_modules
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated


def find(model: nn.Module, wanted: Wanted) -> Iterator[Found]:
    """The experts modules of Hugging Face's MoE blocks, in model order."""
    for name, module in named_modules(model):
        if _is_experts(module) and wanted(adapted_experts.outermost(name)):
            check_not_parametrized(model, name)
            yield _found(model, name, module)


def adapted(model: nn.Module) -> Iterator[str]:
    """Names of the layers whose experts have adapters."""
    for name, module in named_modules(model):
        layer = adapted_experts.outermost(name)
        if layer != name and _is_experts(module):
            yield layer


def _found(model: nn.Module, name: str, module: nn.Module) -> Found:
    wrappers = adapted_experts.wrappers_of(model, name)
    if wrappers:
        block = model.get_submodule(adapted_experts.outermost(name).rpartition(".")[0])
        is_other = _is_of_other_family(module) or llama4.is_block(block)
        if is_other or not adapted_experts.is_known(wrappers):
            check_not_adapted(model, name)
        return adapted_experts.found(model, name, module, _describe(name, module))
    if _is_of_other_family(module):
        _check_call(name, module)  # a class of that name on the Hub may be another
    if dbrx.is_experts(module):
        return dbrx.found(model, name, module)
    if longcat_flash.is_experts(module):
        return longcat_flash.found(model, name, module, _activation(module, is_gated=True))
    if switch_transformers.is_experts(module):
        return switch_transformers.found(model, name, module)
    block = model.get_submodule(name.rpartition(".")[0])
    if llama4.is_block(block):
        return llama4.found(model, block, name, _describe_llama4(module))
    return found_experts(model, name, module, _describe(name, module))


def _is_experts(module: nn.Module) -> bool:
    if not class_of(module).__module__.startswith(("transformers.", "transformers_modules.")):
        return False
    if is_registered(module):  # who did so knows better
        return False
    if _is_of_other_family(module):
        return True
    computed = is_parametrized(module, "down_proj")
    down: Any = module.down_proj if computed else module._parameters.get("down_proj")
    return down is not None and down.dim() == 3 and hasattr(module, "num_experts")


def _is_of_other_family(module: nn.Module) -> bool:
    return any(family.is_experts(module) for family in (dbrx, longcat_flash, switch_transformers))


def _describe(name: str, module: nn.Module) -> ExpertsDescription:
    kind = type(module).__name__
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(
            f"{name} is a {kind} that normalises after each expert, which ds_moe_ext does not "
            "replace yet; leave this layer out with ds_moe_ext.moe_layer_pattern"
        )
    _check_call(name, module)
    up_name = "gate_up_proj" if "gate_up_proj" in module._parameters else "up_proj"
    names = [up_name, "down_proj"]
    has_bias = f"{up_name}_bias" in module._parameters
    if has_bias:
        names = [up_name, f"{up_name}_bias", "down_proj", "down_proj_bias"]
    unknown = sorted({key for key, _ in module.named_parameters()}.difference(names))
    if unknown:
        raise ValueError(
            f"{name} is a {kind} with weights that ds_moe_ext does not know: {', '.join(unknown)}; "
            "leave this layer out with ds_moe_ext.moe_layer_pattern"
        )
    if up_name == "gate_up_proj" and not hasattr(module, "_apply_gate"):
        raise ValueError(
            f"{name} is a {kind} without _apply_gate, which transformers' decorator "
            "use_experts_implementation gives its classes, so that ds_moe_ext cannot know how gate "
            f"and up lie in gate_up_proj; decorate {kind}, describe it with "
            "ds_moe_ext.register_experts, or leave the layer out with ds_moe_ext.moe_layer_pattern"
        )
    up, down = module.get_parameter(up_name), module.get_parameter("down_proj")
    return ExpertsDescription(
        num_experts=down.shape[0],
        weight_names=tuple(names),
        function=FeedForwardExperts(
            _activation(module, is_gated=up_name == "gate_up_proj"),
            # Not transposed: up [E, F', D] and down [E, D, F].
            is_transposed=bool(getattr(module, "is_transposed", up.shape[2] != down.shape[1])),
            has_bias=has_bias,
        ),
    )


def _describe_llama4(module: nn.Module) -> ExpertsDescription:
    """It has no decorator, but what that would say is always the same."""
    weights: Any = module
    return ExpertsDescription(
        num_experts=weights.num_experts,
        weight_names=("gate_up_proj", "down_proj"),
        function=FeedForwardExperts(_activation(module, is_gated=True), is_transposed=True),
    )


def _check_call(name: str, module: nn.Module) -> None:
    """Names tell what the arguments are: ids and scores are both ``[T, K]``.

    Raises:
        ValueError: it is not called as the experts that take its place are.
    """
    taken = list(inspect.signature(type(module).forward).parameters)[1:]
    if len(taken) >= 3 and IDS.search(taken[1]) and SCORES.search(taken[2]):
        return
    kind = type(module).__name__
    raise ValueError(
        f"{name} is a {kind} that is called as experts({', '.join(taken)}), not as "
        "experts(hidden, expert_ids, scores), by which rows find their experts; leave the layer "
        "out with ds_moe_ext.moe_layer_pattern, which keeps it as it is, or let the model call "
        "experts in this way, of a class described with ds_moe_ext.register_experts"
    )


IDS = re.compile("ind|ids|experts")
SCORES = re.compile("weight|score|prob")


def _activation(module: nn.Module, *, is_gated: bool) -> Callable[[Tensor], Tensor]:
    """What stands between the two matrices; ours where it computes the same."""
    # Not at the top: the host may be there without transformers.
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    code: Any = shell(module)  # settings and methods, without the weights
    if not is_gated:
        activation: Callable[[Tensor], Tensor] = code.act_fn
        return activation
    gated: Any = getattr(code, "_apply_gate", None) or MethodType(_default_apply_gate, code)
    is_silu = isinstance(getattr(code, "act_fn", None), (nn.SiLU, SiLUActivation))
    is_default = getattr(gated, "__func__", None) is _default_apply_gate
    return silu_gated if is_silu and is_default else gated
