# SPDX-License-Identifier: Apache-2.0
"""How a layer routes its tokens, in values of JSON: a checkpoint keeps them beside the weights, for
these go on as another model's where they are routed otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_moe_ext.moe.gate import Gate
from ds_moe_ext.report.units import counted
from ds_moe_ext.settings import BLOCK, Settings
from ds_moe_ext.strategy import Strategy

Facts = Mapping[str, Any]
"""Values by the names that users know them by: attributes of a host, keys of the block."""

TOP_K = "top_k"
TOP_KS = (TOP_K, "k", "num_experts_per_tok", "moe_router_topk")
"""What hosts call the number of choices of a token."""

ROUTERS = ("gate", "router")
"""What blocks of a host call the module that chooses."""

NAMES = (
    *TOP_KS,
    # transformers: scoring, groups of experts, noise, capacity.
    *("norm_topk_prob", "moe_normalize_expert_weights", "scoring_func", "scoring_function"),
    *("routed_scaling_factor", "router_scaling_factor", "zero_expert_num"),
    *("topk_method", "topk_group", "n_group", "n_groups", "num_group"),
    *("jitter_noise", "input_jitter_noise", "router_jitter_noise", "moe_jitter_eps"),
    "expert_capacity",
    # deepspeed.moe.
    *("capacity_factor", "eval_capacity_factor", "min_capacity", "drop_tokens", "use_rts"),
    *("noisy_gate_policy", "top2_2nd_expert_sampling"),
    # Megatron-core.
    *("moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_limited_devices"),
    *("moe_router_enable_expert_bias", "moe_router_force_load_balancing"),
    *("moe_router_load_balancing_type", "moe_input_jitter_eps"),
    *("moe_expert_capacity_factor", "moe_token_drop_policy"),
)
"""Attributes by which routers of the hosts, their blocks and configurations say how they route."""


def stated(*things: object) -> Facts:
    """What objects of a host say, the later ones where several do."""
    found = {name: getattr(each, name) for each in things for name in NAMES if hasattr(each, name)}
    return {name: value for name, value in found.items() if _is_plain(value)}


def facts_of(host: Facts, gate: Gate | None, settings: Settings, strategy: Strategy) -> Facts:
    """How a layer routes.

    Args:
        host: what the host's router says.
        gate: that takes its place; None where it stays.
        settings: the block.
        strategy: that runs the layer.
    """
    own = {
        f"{BLOCK}.gate": None if gate is None else type(gate).__qualname__,
        f"{BLOCK}.capacity_factor": settings.capacity_factor,
        "static_capacity": strategy.static_capacity,
    }
    return {**(host if gate is None else _of_gate(gate)), **own}


def _of_gate(gate: Gate) -> Facts:
    return {
        name if name == TOP_K else f"{BLOCK}.gate.{name}": value
        for name, value in vars(gate).items()
        if _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    """Whether JSON gives it back as it is."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def differences(saved: Mapping[str, Facts], own: Mapping[str, Facts]) -> str:
    """Of facts that both know, for a person; empty if there are none.

    Args:
        saved: of each layer of a checkpoint, by its name.
        own: of the layers here.
    """
    layers: dict[str, list[str]] = {}
    for layer, facts in own.items():
        theirs = saved.get(layer, {})
        for name in facts.keys() & theirs.keys():
            if facts[name] != theirs[name]:
                told = f"{name} was {theirs[name]!r} and is {facts[name]!r}"
                layers.setdefault(told, []).append(layer)
    return "; ".join(f"{told} in {_some(names)}" for told, names in sorted(layers.items()))


def _some(names: list[str]) -> str:
    more = f" and {counted(len(names) - 1, 'more layer')}" if names[1:] else ""
    return f"{names[0]}{more}"
