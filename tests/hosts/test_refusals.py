# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused by ``deepspeed.initialize`` in one line, before any process group."""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import os
from collections.abc import Callable
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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "EP ranks do not divide native experts": lambda: native(6),
    "native model built for other EP ranks": lambda: native(4, ep_size=2),
    "native model built for EP ranks, asked for one": lambda: native(4, ep_size=2),
    "native model built for more ranks than there are": lambda: native(4, ep_size=4),
    "native layers built for different EP ranks": lambda: nn.Sequential(
        native(4, ep_size=2), native(4, ep_size=4)
    ),
    "experts whose parts do not add up": native,
    "split experts that the model has spread": lambda: native(4, ep_size=2),
    "parameters sharded at construction": sharded_at_construction,
    "experts of DeepSpeed's sharded at construction": lambda: sharded_at_construction(native()),
    "a gate in a model that was sharded at construction": sharded_at_construction,
    "pipeline of two stages a rank": folded,
    "pipeline of tensor parallel ranks": pipeline(pipe=2, data=1, model=2),
    "pipeline of strides": pipeline(data=2, pipe=2),
    "pipeline in float16": pipeline(pipe=2, data=2),
    "AutoTP of a pipeline": pipeline(pipe=2, data=2),
    "pipeline of roles that are measured": pipeline(pipe=2, data=2),
    "AutoTP and DeepSpeed's own MoE": native,
    "expert tensor parallel": lambda: native(4, enable_expert_tensor_parallelism=True),
    "native experts with buffers": lambda: native(4, expert=nn.BatchNorm1d(8)),
    "no MoE layer": lambda: nn.Linear(4, 4),
    "experts as a list of modules": lambda: nn.ModuleDict(
        {"experts": nn.ModuleList([nn.Linear(4, 4)] * 4)}
    ),
    "modules that look like experts": jet_moe,
    "adapters without elements": lambda: on_meta(adapted_elsewhere),
    "native experts without elements": lambda: on_meta(native),
    "parts of a model without elements": on_meta,
    "experts without transformers' decorator": lambda: undecorated("top_k_index", "top_k_weights"),
    "scores before ids": lambda: undecorated("routing_weights", "router_indices"),
    "experts that take rows by expert": lambda: hugging_face(
        "llama4.modeling_llama4.Llama4TextExperts"
    ),
    "experts with a norm": lambda: hugging_face("muse_spark.modeling_muse_spark.MuseSparkExperts"),
    "experts with weights of another kind": lambda: experts_with("down_proj_scale_inv"),
    "experts with adapters": adapted,
    "parametrized experts": lambda: parametrized(
        "model.layers.0.mlp.experts", "down_proj", families.build("mixtral")
    ),
    "parametrized native experts": lambda: parametrized(
        "moe.deepspeed_moe.experts.deepspeed_experts.0", "weight", native()
    ),
    "replaced before": replaced_before,
}
"""By cases of ``refused.json``; of the others it is one of transformers."""
ARGUMENTS: dict[str, Document] = {
    "pipeline stages of an mpu": {
        "mpu": SimpleNamespace(get_pipeline_model_parallel_world_size=lambda: 2)
    },
    "mesh": {"mesh_param": (1, 2)},
    "AutoTP and an mpu": {"mpu": SimpleNamespace(get_model_parallel_world_size=lambda: 1)},
    "parts of a model without elements": {
        "mpu": SimpleNamespace(
            get_tensor_model_parallel_world_size=lambda: 2,
            get_tensor_model_parallel_rank=lambda: 0,
            get_tensor_model_parallel_group=lambda: "a group",
        )
    },
}
"""Further ones of ``deepspeed.initialize``."""
REFUSED = json.loads(Path(__file__).with_name("refused.json").read_text())
"""A configuration, ranks, and parts of what is stated: value, rule, remedy. One rank stands for
what is wrong in the block itself, more for what does not fit them, the host or the model."""
CASES = [row for row in REFUSED if row["ranks"] > 1]
MALFORMED = [row for row in REFUSED if row["ranks"] == 1]


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


def stated(row: Document) -> str:
    return "; ".join(row["expected"])


def arguments_of(row: Document, block: Any) -> Document:
    """Of ``deepspeed.initialize``; without a block where that is None."""
    name, document = row.get("case", ""), document_with(block, **row["config"])
    if block is None:
        del document["ds_moe_ext"]
    model = MODELS.get(name, lambda: families.build("mixtral"))()
    return {"model": model, "config": document, **ARGUMENTS.get(name, {})}


@pytest.mark.parametrize("row", CASES, ids=stated)
def test_models_and_ranks(row: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(row, {"enabled": True, **row["config"].get("ds_moe_ext", {})})
    message = refuse(monkeypatch, row["ranks"], arguments)
    assert all(part in message for part in row["expected"]), message


@pytest.mark.parametrize("row", MALFORMED, ids=stated)
def test_malformed_blocks(row: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is checked whether it is enabled or not; code that it names is imported if it is."""
    block = row["config"]["ds_moe_ext"]
    names_code = isinstance(block, dict) and ":" in f"{block.get('strategy')}{block.get('balance')}"
    for is_enabled in (True,) if names_code else (True, False):
        given = {"enabled": is_enabled, **block} if isinstance(block, dict) else block
        arguments = {"model": nn.Linear(2, 2), "config": document_with(given)}
        message = refuse(monkeypatch, 1, arguments)
        assert all(part in message for part in row["expected"]), message


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


@pytest.mark.parametrize("row", CASES, ids=stated)
def test_nothing_is_checked_where_the_block_is_off(
    row: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = arguments_of(row, None)
    check(arguments, monkeypatch)
    for block in (None, {}, {"enabled": False}, {"strategy": "ep"}):
        arguments["config"]["ds_moe_ext"] = block
        check(arguments, monkeypatch)


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
