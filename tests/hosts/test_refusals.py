# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused by ``deepspeed.initialize`` in one line, before any process group."""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from tests.hosts import families
from tests.hosts.test_huggingface import AnyConfig

Document = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments of ``deepspeed.initialize`` and what its error must say.

    Attributes:
        says: parts of the message: the key, the value or rule, the remedy.
        block: keys of ``ds_moe_ext`` beside ``enabled``.
        document: keys of the rest of the configuration.
        world_size: ranks.
        model: makes the model.
        arguments: of ``deepspeed.initialize``.
    """

    says: tuple[str, ...]
    block: Document = field(default_factory=dict)
    document: Document = field(default_factory=dict)
    world_size: int = 2
    model: Callable[[], nn.Module] = lambda: families.build("mixtral")
    arguments: Document = field(default_factory=dict)


def native(num_experts: int = 4, *, expert: nn.Module | None = None, **arguments: Any) -> nn.Module:
    from deepspeed.moe.layer import MoE

    expert = expert or nn.Linear(8, 8)
    return nn.ModuleDict({"moe": MoE(8, expert, num_experts=num_experts, **arguments)})


def hugging_face(path: str) -> nn.Module:
    module, _, name = f"transformers.models.{path}".rpartition(".")
    return nn.ModuleDict({"experts": getattr(importlib.import_module(module), name)(AnyConfig())})


def experts_with(name: str) -> nn.Module:
    model = hugging_face("mixtral.modeling_mixtral.MixtralExperts")
    model["experts"].register_parameter(name, nn.Parameter(torch.ones(4)))
    return model


def undecorated(*names: str) -> nn.Module:
    """Experts as ``trust_remote_code`` brings them, called with hidden states and these."""
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    stock = MixtralExperts(AnyConfig())
    given = ", ".join(("self", "hidden_states", *names))
    code: Document = {}
    exec(f"def forward({given}): pass", code)
    cls = type("Undecorated", (nn.Module,), {"forward": code["forward"]})
    cls.__module__ = "transformers_modules.somebody.modeling"
    experts = cls()
    experts.num_experts, experts.act_fn = stock.num_experts, stock.act_fn
    for name, weight in stock.named_parameters():
        experts.register_parameter(name, weight)
    return nn.ModuleDict({"experts": experts})


def jet_moe() -> nn.Module:
    from transformers import JetMoeConfig, JetMoeForCausalLM

    shape = JetMoeConfig(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=2,
        num_key_value_heads=1,
        kv_channels=4,
        intermediate_size=8,
        num_local_experts=4,
    )
    return JetMoeForCausalLM(shape)


def on_meta(make: Callable[[], nn.Module] = lambda: families.build("mixtral")) -> nn.Module:
    with torch.device("meta"):
        return make()


class Adapter(nn.Module):
    """As those of peft that stand before experts: it has the next one, or the experts."""

    def __init__(self, base_layer: nn.Module, parameter_name: str) -> None:
        super().__init__()
        self.base_layer, self.parameter_name = base_layer, parameter_name


def adapted() -> nn.Module:
    model = families.build("mixtral")
    block = model.model.layers[0].mlp
    block.experts = Adapter(Adapter(block.experts, "down_proj"), "gate_up_proj")
    return model


def adapted_elsewhere() -> nn.Module:
    """As peft does to attention."""
    model = families.build("mixtral")
    kind = type("Adapter", (Adapter,), {"__module__": "peft.tuners.lora.layer"})
    attention = model.model.layers[0].self_attn
    attention.q_proj = kind(attention.q_proj, "weight")
    return model


def parametrized(experts: str, name: str, model: nn.Module) -> nn.Module:
    register_parametrization(model.get_submodule(experts), name, nn.Tanh())
    return model


def pipeline(**axes: int) -> Callable[[], nn.Module]:
    """Stages by the sizes of a topology's axes, the first of which changes least from rank to
    rank."""

    def model() -> nn.Module:
        from deepspeed.pipe import PipelineModule
        from deepspeed.runtime.pipe.topology import ProcessTopology

        model = PipelineModule.__new__(PipelineModule)  # a whole one wants a process group
        nn.Module.__init__(model)
        model._topo = ProcessTopology(list(axes), list(axes.values()))
        return model

    return model


def folded() -> nn.Module:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

    return DualPipeVModule.__new__(DualPipeVModule)


def sharded_at_construction(model: nn.Module | None = None) -> nn.Module:
    """As ``deepspeed.zero.Init`` leaves parameters."""
    model = model or families.build("mixtral")
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number
    return model


def replaced_before() -> nn.Module:
    from ds_moe_ext.hosts.attachment.experts import HostedExperts

    model = families.build("mixtral")
    model.model.layers[0].mlp.experts = HostedExperts.__new__(HostedExperts)
    nn.Module.__init__(model.model.layers[0].mlp.experts)
    return model


def zero(**keys: Any) -> Document:
    return {"zero_optimization": keys}


ESP: Document = {"strategy": "esp"}
OWN_SCHEDULES = "tests.strategies_for_tests:Chunked"

MODELS = {
    # Sizes
    "cells do not divide the world": Case(
        ("expert_parallel_size is 3", "world size 4", "[1, 2, 4]"),
        {"expert_parallel_size": 3},
        world_size=4,
    ),
    "more cells than ranks": Case(
        ("expert_parallel_size is 4", "world size 2", "[1, 2]"), {"expert_parallel_size": 4}
    ),
    "cells do not divide the experts": Case(
        ("expert_parallel_size is 6", "8 experts of model.layers.0", "[1, 2]"),
        {"expert_parallel_size": 6},
        world_size=6,
    ),
    "cells do not divide native experts": Case(
        ("expert_parallel_size is 4", "6 experts of moe", "[1, 2]"),
        {"expert_parallel_size": 4},
        world_size=4,
        model=lambda: native(6),
    ),
    "native model built for other cells": Case(
        ("expert_parallel_size is 4", "ep_size 2", "make them equal"),
        {"expert_parallel_size": 4},
        world_size=4,
        model=lambda: native(4, ep_size=2),
    ),
    "native model built for cells, asked for one": Case(
        ("expert_parallel_size is 1", "ep_size 2", "make them equal"),
        {"expert_parallel_size": 1},
        model=lambda: native(4, ep_size=2),
    ),
    "native model built for more ranks than there are": Case(
        ("expert_parallel_size is 4", "world size 2", "[1, 2]"), model=lambda: native(4, ep_size=4)
    ),
    "native layers built for different cells": Case(
        ("expert_parallel_size", "ep_size", "make them equal"),
        world_size=4,
        model=lambda: nn.Sequential(native(4, ep_size=2), native(4, ep_size=4)),
    ),
    "sharded experts": Case(
        ("expert_sharding_size is 2", "set it to 1 or null", "use strategy 'esp'"),
        {"expert_sharding_size": 2},
    ),
    "split experts do not divide the world": Case(
        ("expert_sharding_size is 3", "world size 4", "[1, 2, 4]"),
        {**ESP, "expert_sharding_size": 3},
        world_size=4,
    ),
    "cells of several ranks do not divide the world": Case(
        ("expert_parallel_size is 4", "world size 4 in cells of 2 ranks", "[1, 2]"),
        {**ESP, "expert_sharding_size": 2, "expert_parallel_size": 4},
        world_size=4,
    ),
    "widths that do not divide": Case(
        ("expert_sharding_size is 5", "experts of model.layers.0", "a multiple of 5", "set it to"),
        {**ESP, "expert_sharding_size": 5},
        world_size=5,
    ),
    "experts whose parts do not add up": Case(
        ("expert_sharding_size is 2", "experts of moe", "(8, 8)", "moe_layer_pattern"),
        {**ESP, "expert_sharding_size": 2},
        model=native,
    ),
    "split experts that the model has spread": Case(
        ("expert_sharding_size is 2", "ep_size 2", "build it with ep_size 1"),
        {**ESP, "expert_sharding_size": 2},
        world_size=4,
        model=lambda: native(4, ep_size=2),
    ),
    "homes in a part of the world": Case(
        ("interval is 9, but", "each expert has 2 homes", "leave expert_parallel_size out"),
        {**ESP, "balance": "fssdp", "expert_parallel_size": 2, "fssdp": {"reshard_interval": 9}},
        world_size=4,
    ),
    # ZeRO
    "roles at stage 3": Case(
        ("stage is 3", "gives ranks roles", "use stage 0, 1 or 2"),
        {"strategy": "zebra", "zebra": {"attention_size": 1, "expert_size": 1}},
        document=zero(stage=3),
    ),
    "homes that move at stage 3": Case(
        ("stage is 3", "fssdp.reshard_interval is 9", "reshard_interval to 0 or null"),
        {"strategy": "fssdp", "fssdp": {"reshard_interval": 9}},
        document=zero(stage=3),
    ),
    "uneven homes at stage 3": Case(
        ("stage is 3", "3 cells have 2 to 3 of the 8 experts", "expert_parallel_size"),
        {"strategy": "fssdp", "expert_parallel_size": 3},
        document=zero(stage=3),
        world_size=3,
    ),
    "second shards": Case(
        ("stage is 3", "zero_hpz_partition_size is 2", "set it to 1"),
        document=zero(stage=3, zero_hpz_partition_size=2),
    ),
    "rounded weights": Case(
        ("stage is 3", "zero_quantized_weights is true", "set it to false"),
        document=zero(stage=3, zero_quantized_weights=True),
    ),
    "rounded weights that are not trained": Case(
        ("stage is 3", "zero_quantized_nontrainable_weights is true", "set it to false"),
        document=zero(stage=3, zero_quantized_nontrainable_weights=True),
    ),
    "rounded gradients": Case(
        ("stage is 3", "zero_quantized_gradients is true", "set it to false"),
        document=zero(stage=3, zero_quantized_gradients=True),
    ),
    "modules taken for one": Case(
        ("stage is 3", "stage3_module_granularity_threshold is 100", "leave it out"),
        document=zero(stage=3, stage3_module_granularity_threshold=100),
    ),
    "optimizer offloaded without ZeRO": Case(
        ("zero_optimization.offload_optimizer is set", "use stage 1, 2 or 3"),
        document=zero(stage=0, offload_optimizer={"device": "cpu"}),
    ),
    "optimizer offloaded to disk": Case(
        ("zero_optimization.offload_optimizer.device is 'nvme'", "use cpu"),
        document=zero(stage=3, offload_optimizer={"device": "nvme", "nvme_path": "/tmp"}),
    ),
    "gradients where they are": Case(
        ("zero_optimization.contiguous_gradients is false", "set it to true"),
        document=zero(stage=1, contiguous_gradients=False),
    ),
    "gradients summed whole": Case(
        ("zero_optimization.reduce_scatter is false", "set it to true"),
        document=zero(stage=2, reduce_scatter=False),
    ),
    "optimizer offloaded to another process": Case(
        ("zero_optimization.offload_optimizer.super_offload is true", "set it to false"),
        document=zero(stage=3, offload_optimizer={"device": "cpu", "super_offload": True}),
    ),
    "zenflow": Case(
        ("zero_optimization.zenflow is set", "remove it"),
        document=zero(stage=2, offload_optimizer={"device": "cpu"}, zenflow={"topk_ratio": 0.1}),
    ),
    "masters of 16 bits": Case(
        ("bf16.bf16_master_weights_and_grads is true", "set it to false"),
        document={
            **zero(stage=2, offload_optimizer={"device": "cpu"}),
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
        },
    ),
    "offloaded parameters": Case(
        ("zero_optimization.offload_param is set", "offload_optimizer may stay"),
        document=zero(stage=3, offload_param={"device": "cpu"}),
    ),
    "both offloaded": Case(
        ("zero_optimization.offload_param is set", "offload_optimizer may stay"),
        document=zero(
            stage=3, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"}
        ),
    ),
    "offloading, old spelling": Case(
        ("zero_optimization.cpu_offload is true", "offload_optimizer"),
        document=zero(stage=1, cpu_offload=True),
    ),
    "offloading of parameters, old spelling": Case(
        ("zero_optimization.cpu_offload_param is true", "remove it"),
        document=zero(stage=1, cpu_offload_param=True),
    ),
    "parameters sharded at construction": Case(
        ("deepspeed.zero.Init", "stage is 1", "use stage 3, or build it without"),
        model=sharded_at_construction,
        document=zero(stage=1),
    ),
    "experts of DeepSpeed's sharded at construction": Case(
        ("deepspeed.moe.layer.MoE", "deepspeed.zero.Init", "build it without"),
        model=lambda: sharded_at_construction(native()),
        document=zero(stage=3),
    ),
    "a gate in a model that was sharded at construction": Case(
        ("gate is set", "deepspeed.zero.Init", "build it without"),
        {"gate": {"type": "noisy_top_k"}},
        model=sharded_at_construction,
        document=zero(stage=3),
    ),
    # Other parallelism
    "pipeline of two stages a rank": Case(("DualPipeVModule", "use PipelineModule"), model=folded),
    "pipeline of tensor parallel ranks": Case(
        ("topology of the PipelineModule has model 2", "num_stages"),
        model=pipeline(pipe=2, data=1, model=2),
    ),
    "pipeline of strides": Case(
        ("ranks [[0, 2], [1, 3]]", "neighbours", "PipeDataParallelTopology"),
        model=pipeline(data=2, pipe=2),
    ),
    "pipeline in float16": Case(
        ("fp16.enabled is true", "use bf16"),
        document={"fp16": {"enabled": True}},
        model=pipeline(pipe=2, data=2),
    ),
    "pipeline of roles": Case(
        ("the model is a PipelineModule", "ranks of one role", "plain nn.Module"),
        {"strategy": "zebra", "zebra": {"attention_size": 1, "expert_size": 1}},
        model=pipeline(pipe=2, data=2),
    ),
    "pipeline stages of an mpu": Case(
        ("mpu", "2 pipeline stages", "use 1"),
        arguments={"mpu": SimpleNamespace(get_pipeline_model_parallel_world_size=lambda: 2)},
    ),
    "parts of sequences without an mpu": Case(
        ("ds_moe_ext.sequence_parallel is true", "no mpu", "leave sequence_parallel out"),
        {"sequence_parallel": True},
    ),
    "mesh": Case(("mesh_param was passed", "UlyssesSP"), arguments={"mesh_param": (1, 2)}),
    "mesh of the JSON": Case(
        ("data_parallel_size is set beside sequence_parallel_size", "UlyssesSP"),
        document={"sequence_parallel_size": 2, "data_parallel_size": 1},
    ),
    "sequence parallel without groups": Case(
        ("sequence_parallel_size is 2", "UlyssesSP", "set it to 1"),
        document={"sequence_parallel_size": 2},
    ),
    "AutoTP and DeepSpeed's own MoE": Case(
        ("autotp_size is 2, and the model has a deepspeed.moe", "set it to 1"),
        model=native,
        document={"tensor_parallel": {"autotp_size": 2}},
    ),
    "AutoTP and an mpu": Case(
        ("tensor_parallel.autotp_size is 2, and an mpu was passed", "leave out one"),
        document={"tensor_parallel": {"autotp_size": 2}},
        arguments={"mpu": SimpleNamespace(get_model_parallel_world_size=lambda: 1)},
    ),
    "AutoEP": Case(
        ("expert_parallel.enabled is true", "AutoEP", "set one"),
        document={"expert_parallel": {"enabled": True, "autoep_size": 2}},
    ),
    "data before experts": Case(
        ("use_data_before_expert_parallelism", "set it to false"),
        document={"use_data_before_expert_parallelism": True},
    ),
    "checkpoints in pieces": Case(
        ("checkpoint.use_node_local_storage is true", "set it to false"),
        document={"checkpoint": {"use_node_local_storage": True}},
    ),
    "DeepCompile": Case(
        ("compile.deepcompile is true", "set it to false"),
        document={"compile": {"deepcompile": True}},
    ),
    "hybrid engine": Case(
        ("hybrid_engine.enabled is true", "set it to false"),
        document={"hybrid_engine": {"enabled": True}},
    ),
    "expert tensor parallel": Case(
        ("enable_expert_tensor_parallelism", "build it without"),
        model=lambda: native(4, enable_expert_tensor_parallelism=True),
    ),
    # Layers
    "native experts with buffers": Case(
        ("an expert of moe has buffers ['running_mean'", "make them parameters"),
        model=lambda: native(4, expert=nn.BatchNorm1d(8)),
    ),
    "no MoE layer": Case(
        ("no MoE layer", "register_experts", "doctor"), model=lambda: nn.Linear(4, 4)
    ),
    "a pattern that finds nothing": Case(
        ("no MoE layer", "matches 'layer_9'", "known are"), {"moe_layer_pattern": "layer_9"}
    ),
    "experts as a list of modules": Case(
        ("no MoE layer", "register_experts"),
        model=lambda: nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4)] * 4)}),
    ),
    "modules that look like experts": Case(
        (
            "no MoE layer",
            "These look like experts: model.layers.*.mlp.input_linear (JetMoeParallelExperts, 2)",
        ),
        model=jet_moe,
    ),
    "adapters without elements": Case(
        ("an adapter of peft (Adapter) lies on the meta device", "zeros, was lost", "on the CPU"),
        model=lambda: on_meta(adapted_elsewhere),
    ),
    "native experts without elements": Case(
        ("a deepspeed.moe.layer.MoE lies on the meta device", "with an ep_size"),
        model=lambda: on_meta(native),
    ),
    "parts of a model without elements": Case(
        ("mpu passed to deepspeed.initialize has tensor parallel groups", "meta", "use AutoTP"),
        model=on_meta,
        arguments={
            "mpu": SimpleNamespace(
                get_tensor_model_parallel_world_size=lambda: 2,
                get_tensor_model_parallel_rank=lambda: 0,
                get_tensor_model_parallel_group=lambda: "a group",
            )
        },
    ),
    "roles of a model without elements": Case(
        ("strategy is 'zebra', but this MixtralForCausalLM lies on the meta device", "on the CPU"),
        {"strategy": "zebra", "zebra": {"attention_size": 1, "expert_size": 1}},
        model=on_meta,
    ),
    "experts without transformers' decorator": Case(
        ("Undecorated without _apply_gate", "use_experts_implementation", "register_experts"),
        model=lambda: undecorated("top_k_index", "top_k_weights"),
    ),
    "scores before ids": Case(
        ("experts(hidden_states, routing_weights, router_indices), not", "register_experts"),
        model=lambda: undecorated("routing_weights", "router_indices"),
    ),
    "experts that take rows by expert": Case(
        ("Llama4TextExperts", "experts(hidden_states), not", "moe_layer_pattern", "let the model"),
        model=lambda: hugging_face("llama4.modeling_llama4.Llama4TextExperts"),
    ),
    "experts with a norm": Case(
        ("MuseSparkExperts", "normalises", "moe_layer_pattern"),
        model=lambda: hugging_face("muse_spark.modeling_muse_spark.MuseSparkExperts"),
    ),
    "experts with weights of another kind": Case(
        ("down_proj_scale_inv", "moe_layer_pattern"),
        model=lambda: experts_with("down_proj_scale_inv"),
    ),
    "experts with adapters": Case(
        ("layers.0.mlp.experts has", "Adapter", "'gate_up_proj' and 'down_proj'", "target_param"),
        model=adapted,
    ),
    "parametrized experts": Case(
        ("layers.0.mlp.experts.down_proj is parametrized", "remove_parametrizations"),
        model=lambda: parametrized(
            "model.layers.0.mlp.experts", "down_proj", families.build("mixtral")
        ),
    ),
    "parametrized native experts": Case(
        ("deepspeed_experts.0.weight is parametrized", "remove_parametrizations"),
        model=lambda: parametrized(
            "moe.deepspeed_moe.experts.deepspeed_experts.0", "weight", native()
        ),
    ),
    "replaced before": Case(
        ("replaced by an earlier", "build the model anew"), model=replaced_before
    ),
}

BLOCKS = {
    # The block itself, as a whole
    "not an object": (["enabled"], ("must be an object",)),
    "a string": ("true", ("must be an object",)),
    "a number": (1, ("must be an object",)),
    "true": (True, ("must be an object",)),
    # Keys
    "a mistyped key": ({"stratgy": "ep"}, ("'stratgy'", "did you mean 'strategy'")),
    "a key of another tool": ({"autoep_size": 2}, ("'autoep_size'", "known")),
    "a mistyped key of the report": (
        {"report": {"pth": "x"}},
        ("ds_moe_ext.report", "'pth'", "did you mean 'path'"),
    ),
    "a mistyped key of the trace": (
        {"trace": {"first_stp": 1}},
        ("ds_moe_ext.trace", "did you mean 'first_step'"),
    ),
    "a key of a strategy without any": ({"ep": {"degree": 1}}, ("ds_moe_ext.ep", "'degree'")),
    # Strategies
    "an unknown strategy": ({"strategy": "pe"}, ("strategy is 'pe', which is unknown", "known: ")),
    "a strategy that is a number": ({"strategy": 1}, ("strategy is 1", "must be a string")),
    "a strategy in no module": (
        {"strategy": "no_such_module:Mine"},
        ("no_such_module:Mine", "cannot be imported", "my_package"),
    ),
    "a strategy that is not in its module": (
        {"strategy": "json:Mine"},
        ("json:Mine", "cannot be imported"),
    ),
    "a strategy that is no dataclass": (
        {"strategy": "json:JSONDecoder"},
        ("json:JSONDecoder", "not a dataclass", "make it one"),
    ),
    "options of a built-in strategy": (
        {"options": {"degree": 1}},
        ("ds_moe_ext.options", "no effect", "ds_moe_ext.ep"),
    ),
    # Pipelines, and what they are laid over
    "chunks in words": (
        {"esp": {"degree": "auto"}},
        ("ds_moe_ext.esp.degree is 'auto'", "an integer or an object or null", "write null"),
    ),
    "no chunks": ({"esp": {"degree": 0}}, ("ds_moe_ext.esp.degree is 0", "at least 1")),
    "no chunks forward": (
        {"esp": {"degree": {"forward": 0}}},
        ("ds_moe_ext.esp.degree.forward is 0", "at least 1"),
    ),
    "chunks of a mistyped direction": (
        {"esp": {"degree": {"backwards": 2}}},
        ("ds_moe_ext.esp.degree", "'backwards'", "did you mean 'backward'"),
    ),
    "no degree to try": ({"esp": {"max_degree": 0}}, ("esp.max_degree is 0", "at least 1")),
    "an unknown schedule": (
        {"esp": {"schedule": "tutl"}},
        ("ds_moe_ext.esp.schedule is 'tutl'", "did you mean 'tutel'"),
    ),
    "an unknown solver": ({"esp": {"solver": "x"}}, ("esp.solver is 'x'", "known: exact, paper")),
    "an unknown way": ({"esp": {"all_to_all": "2d"}}, ("esp.all_to_all is '2d'", "'2dh'")),
    "chunks where none are cut": (
        {"esp": {"degree": 2, "schedule": "default"}},
        ("ds_moe_ext.esp.degree is 2", "'default' cuts no tokens", "leave degree out"),
    ),
    "slices in words": (
        {"esp": {"slice_gradients": "yes"}},
        ("esp.slice_gradients is 'yes'", "true or false"),
    ),
    "balance of a strategy that balances": (
        {"strategy": "prophet", "balance": "fssdp"},
        ("balance is 'fssdp'", "'prophet' decides itself", "set strategy to 'esp'"),
    ),
    "a balance that places nothing": (
        {"strategy": "esp", "balance": "esp"},
        ("balance is 'esp'", "does not place experts", "known: ep, fssdp, prophet"),
    ),
    "a balance in no module": (
        {"strategy": "esp", "balance": "no_such_module:Mine"},
        ("ds_moe_ext.balance is 'no_such_module:Mine'", "cannot be imported", "my_package"),
    ),
    "a balance with schedules of its own": (
        {**ESP, "balance": OWN_SCHEDULES, "options": {"forward": 1, "backward": 1}},
        ("ds_moe_ext.balance is Chunked", "decides itself how rows travel", "choose another"),
    ),
    "options of a built-in balance": (
        {"strategy": "esp", "balance": "fssdp", "options": {"window": 1}},
        ("ds_moe_ext.options", "no effect", "ds_moe_ext.fssdp"),
    ),
    # Values
    "no part of an expert": (
        {"expert_sharding_size": 0},
        ("expert_sharding_size is 0", "at least 1"),
    ),
    "parts of sequences in words": (
        {"sequence_parallel": "yes"},
        ("sequence_parallel is 'yes'", "true or false"),
    ),
    "enabled in words": ({"enabled": "yes"}, ("enabled is 'yes'", "true or false")),
    "enabled as a number": ({"enabled": 1}, ("enabled is 1", "true or false")),
    "enabled as null": ({"enabled": None}, ("enabled is None", "true or false")),
    "cells as a string": (
        {"expert_parallel_size": "2"},
        ("expert_parallel_size is '2'", "an integer or null"),
    ),
    "cells automatic": (
        {"expert_parallel_size": "auto"},
        ("expert_parallel_size is 'auto'", "write null"),
    ),
    "half a cell": ({"expert_parallel_size": 0.5}, ("expert_parallel_size is 0.5", "an integer")),
    "no cells": ({"expert_parallel_size": 0}, ("expert_parallel_size is 0", "at least 1")),
    "negative cells": ({"expert_parallel_size": -2}, ("expert_parallel_size is -2", "at least 1")),
    "no room": ({"capacity_factor": 0}, ("capacity_factor is 0", "above 0", "null")),
    "room in words": ({"capacity_factor": "1.5"}, ("capacity_factor is '1.5'", "a number or null")),
    "a pattern that is none": (
        {"moe_layer_pattern": "layers.(1"},
        ("moe_layer_pattern is 'layers.(1'", "no regular expression", "mend it"),
    ),
    "a list of patterns": ({"moe_layer_pattern": ["a"]}, ("moe_layer_pattern", "a string or null")),
    "a report to a number": ({"report": {"path": 3}}, ("report.path is 3", "a string or null")),
    "a report that is a path": ({"report": "runs"}, ("report is 'runs'", "must be an object")),
    "a report of one step": ({"report": {"max_steps": 1}}, ("report.max_steps is 1", "at least 2")),
    "a trace of no steps": ({"trace": {"num_steps": 0}}, ("trace.num_steps is 0", "at least 1")),
}


def in_dict(document: Document, folder: Path) -> Document:
    return {"config": document}


def in_dict_by_its_old_name(document: Document, folder: Path) -> Document:
    return {"config_params": document}


def in_file(document: Document, folder: Path) -> Document:
    path = folder / "ds.json"
    path.write_text(json.dumps(document))
    return {"config": str(path)}


def in_file_with_comments(document: Document, folder: Path) -> Document:
    """DeepSpeed reads Hjson."""
    path = folder / "ds.json"
    path.write_text("// ours\n" + json.dumps(document))
    return {"config": str(path)}


def in_file_by_argument(document: Document, folder: Path) -> Document:
    named = in_file(document, folder)["config"]
    return {"args": argparse.Namespace(deepspeed_config=named, local_rank=0)}


def in_file_by_old_argument(document: Document, folder: Path) -> Document:
    named = in_file(document, folder)["config"]
    return {"args": argparse.Namespace(deepscale_config=named, local_rank=0)}


def in_base64(document: Document, folder: Path) -> Document:
    return {"config": base64.urlsafe_b64encode(json.dumps(document).encode()).decode()}


SPELLINGS = (
    in_dict,
    in_dict_by_its_old_name,
    in_file,
    in_file_with_comments,
    in_file_by_argument,
    in_file_by_old_argument,
    in_base64,
)


def refuse(monkeypatch: pytest.MonkeyPatch, world_size: int, arguments: Document) -> str:
    """The message with which ``deepspeed.initialize`` refuses the arguments."""
    import deepspeed

    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with pytest.raises(ValueError) as caught:
        deepspeed.initialize(**arguments)
    assert not dist.is_initialized()
    message = str(caught.value)
    assert "ds_moe_ext" in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("is_keyword", [False, True])
def test_the_block_in_a_configuration_of_inference(is_keyword: bool) -> None:
    import deepspeed

    block: Document = {"ds_moe_ext": {"enabled": True}}
    arguments = block if is_keyword else {"config": block}
    with pytest.raises(ValueError, match=r"^ds_moe_ext is in .*init_inference.*; remove it there"):
        deepspeed.init_inference(families.build("mixtral"), **arguments)


def document_with(block: Any, **keys: Any) -> Document:
    return {"train_micro_batch_size_per_gpu": 1, **keys, "ds_moe_ext": block}


@pytest.mark.parametrize("name", MODELS)
def test_models_and_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = MODELS[name]
    document = document_with({"enabled": True, **case.block}, **case.document)
    arguments = {"model": case.model(), "config": document, **case.arguments}
    message = refuse(monkeypatch, case.world_size, arguments)
    assert all(part in message for part in case.says), message


NAMES_CODE = [
    name
    for name, (block, _) in BLOCKS.items()
    if isinstance(block, dict)
    and any(
        ":" in path for key in ("strategy", "balance") if isinstance(path := block.get(key), str)
    )
]
"""Which is imported where the block is enabled alone."""


@pytest.mark.parametrize(
    ("name", "is_enabled"),
    [(name, on) for name in BLOCKS for on in (True, False) if on or name not in NAMES_CODE],
)
def test_malformed_blocks(name: str, is_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is checked whether it is enabled or not."""
    block, says = BLOCKS[name]
    if isinstance(block, dict):
        block = {"enabled": is_enabled, **block}
    arguments = {"model": nn.Linear(2, 2), "config": document_with(block)}
    message = refuse(monkeypatch, 1, arguments)
    assert all(part in message for part in says), message


@pytest.mark.parametrize("spell", SPELLINGS)
def test_wherever_the_configuration_is(
    spell: Callable[[Document, Path], Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = document_with({"enabled": True, "stratgy": "ep"})
    arguments = {"model": nn.Linear(2, 2), **spell(document, tmp_path)}
    assert "did you mean 'strategy'" in refuse(monkeypatch, 1, arguments)


def test_ranks_that_are_not_known_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under MPI: sizes are checked when the ranks are known, all else before."""
    check(
        {"config": document_with({"enabled": True, "expert_parallel_size": 4})}, monkeypatch, None
    )
    import deepspeed

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="zero_hpz_partition_size is 2"):
        deepspeed.initialize(
            model=families.build("mixtral"),
            config=document_with({"enabled": True}, **zero(stage=3, zero_hpz_partition_size=2)),
        )
    assert not dist.is_initialized()


# What is let through.


def test_a_class_of_others_that_was_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who describes it knows better than what we would ask of transformers' classes."""
    from ds_moe_ext import ExpertsDescription, FeedForwardExperts, register_experts
    from ds_moe_ext.moe.feed_forward import silu_gated

    model = undecorated("top_k_index", "top_k_weights")
    names = ("gate_up_proj", "down_proj")
    register_experts(type(model["experts"]))(
        lambda experts: ExpertsDescription(
            experts.num_experts, names, FeedForwardExperts(silu_gated)
        )
    )
    check({"model": model, "config": document_with({"enabled": True})}, monkeypatch)


def check(arguments: Document, monkeypatch: pytest.MonkeyPatch, world_size: int | None = 2) -> None:
    """The check alone: behind it DeepSpeed would make process groups."""
    import deepspeed

    from ds_moe_ext.hosts.deepspeed.startup import check_initialize

    if world_size is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
    model = arguments.get("model") or families.build("mixtral")
    check_initialize(deepspeed.initialize.__wrapped__, (), {**arguments, "model": model})
    assert not dist.is_initialized()


OFF: tuple[Any, ...] = (None, {}, {"enabled": False}, {"strategy": "ep"})


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_checked_where_the_block_is_off(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = MODELS[name]
    documents = [document_with(block, **case.document) for block in OFF]
    absent = document_with({}, **case.document)
    del absent["ds_moe_ext"]
    model = case.model()
    for document in (*documents, absent):
        check({"model": model, "config": document, **case.arguments}, monkeypatch)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"zero_optimization": True},
        zero(),
        zero(stage=0),
        zero(stage=1, overlap_comm=True),
        zero(stage=2),
        # As accelerate writes them where nothing is offloaded.
        zero(stage=2, offload_optimizer={"device": "none"}, offload_param={"device": "none"}),
        zero(stage=2, offload_optimizer={"device": "none", "nvme_path": None}),
        zero(stage=1, offload_optimizer=None, offload_param=None, cpu_offload=False),
        {"tensor_parallel": {"autotp_size": 1}},
        {"tensor_parallel": {"autotp_size": 0}},
        {"tensor_parallel": {}},
        {"sequence_parallel_size": 1},
        {"expert_parallel": {"enabled": False, "autoep_size": 2}},
        {"expert_parallel": {}},
        {"compile": {"deepcompile": False}},
        {"hybrid_engine": {"enabled": False}},
        {"checkpoint": {"use_node_local_storage": False}},
        {"use_data_before_expert_parallelism": False},
        {"bf16": {"enabled": True}, "gradient_clipping": 1.0},
    ],
    ids=json.dumps,
)
def test_what_works_is_let_through(document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    check({"config": document_with({"enabled": True}, **document)}, monkeypatch)


@pytest.mark.parametrize(
    "config",
    [None, "no-such-file.json", "!!!", 3, base64.b64encode(b"\xff\xfe").decode(), ["a"]],
    ids=repr,
)
def test_what_deepspeed_refuses_itself_is_left_to_it(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check({"config": config}, monkeypatch)


def test_pipes_and_deep_files_are_left_to_deepspeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in a pipe can be read once; of one that nobody writes to DeepSpeed shall wait."""
    pipe, deep = tmp_path / "pipe.json", tmp_path / "deep.json"
    os.mkfifo(pipe)
    deep.write_text('{"a":' * 100_000)
    for path in (pipe, deep):
        check({"config": str(path)}, monkeypatch)
