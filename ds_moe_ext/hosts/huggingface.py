"""Hugging Face transformers, version 5: the experts modules of its MoE blocks.

All families keep ``gate_up_proj`` and ``down_proj`` (or ``up_proj``) with the experts as first dim,
and say by attributes how they are stored.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

from ds_moe_ext.hosts.experts import ExpertsDescription, found_experts, shell
from ds_moe_ext.hosts.found import Found
from ds_moe_ext.moe.expert import FeedForwardExperts


def find(model: nn.Module) -> Iterator[Found]:
    """The experts modules of Hugging Face's MoE blocks, in model order."""
    for name, module in model.named_modules():
        if _is_experts(module):
            yield found_experts(model, name, module, _describe(name, module))


def _is_experts(module: nn.Module) -> bool:
    if not type(module).__module__.startswith(("transformers.", "transformers_modules.")):
        return False
    down = module._parameters.get("down_proj")
    return down is not None and down.dim() == 3 and hasattr(module, "num_experts")


def _describe(name: str, module: nn.Module) -> ExpertsDescription:
    kind = type(module).__name__
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(
            f"{name} is a {kind} that normalises after each expert, which ds_moe_ext does not "
            "replace yet; leave this layer out with ds_moe_ext.moe_layer_pattern"
        )
    if len(inspect.signature(type(module).forward).parameters) < 4 and not hasattr(module, "config"):
        raise ValueError(
            f"{name} is a {kind} that is not called as experts(hidden, expert_ids, scores); leave "
            "it out with ds_moe_ext.moe_layer_pattern"
        )
    up_name = "gate_up_proj" if "gate_up_proj" in module._parameters else "up_proj"
    names = [up_name, "down_proj"]
    has_bias = f"{up_name}_bias" in module._parameters
    if has_bias:
        names = [up_name, f"{up_name}_bias", "down_proj", "down_proj_bias"]
    up, down = module.get_parameter(up_name), module.get_parameter("down_proj")
    code = shell(module)  # activation and settings, without the weights
    activation = code._apply_gate if up_name == "gate_up_proj" else code.act_fn
    return ExpertsDescription(
        num_experts=down.shape[0],
        weight_names=tuple(names),
        function=FeedForwardExperts(
            activation,  # type: ignore[arg-type]
            # Not transposed: up [E, F', D] and down [E, D, F].
            is_transposed=bool(getattr(module, "is_transposed", up.shape[2] != down.shape[1])),
            has_bias=has_bias,
        ),
    )
