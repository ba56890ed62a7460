# SPDX-License-Identifier: Apache-2.0
"""A model and a cluster whose prices a person can add up."""

from __future__ import annotations

from typing import Any

from ds_moe_ext.core.hardware import Device, Flops, Hardware, Link
from ds_moe_ext.planning.model_shape import ModelShape, of_config

TINY = {
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def tiny(**given: Any) -> ModelShape:
    return of_config({**TINY, **given}, "tiny")


def cluster(multiply_adds_per_s: float = 1000.0, **given: Any) -> Hardware:
    """Two nodes of two ranks."""
    device = Device(
        name=f"of {multiply_adds_per_s:g}",
        memory_bytes=10**6,
        memory_bytes_per_s=1e4,
        flops_per_s=Flops(bf16=2 * multiply_adds_per_s),
    )
    kept = {"num_nodes": 2, "ranks_per_node": 2, "device": device, **given}
    links = {"intra": Link(bytes_per_s=500.0), "inter": Link(bytes_per_s=200.0)}
    return Hardware(name="two nodes", source="made up", **{**links, **kept})
