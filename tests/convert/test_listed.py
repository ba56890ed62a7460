# SPDX-License-Identifier: Apache-2.0
"""Families that only Hugging Face and DeepSpeed have: DBRX, LongCat-Flash, Switch Transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ds_moe_ext.commands.conversion import description, huggingface
from ds_moe_ext.commands.conversion.conversion import Form
from ds_moe_ext.commands.conversion.model import ListedModel, Scope, Table
from ds_moe_ext.commands.conversion.tables import cells
from tests.convert.models import assert_equal, edited
from tests.convert.test_deepspeed import converted
from tests.hosts import families, jobs
from tests.hosts.jobs import Job
from tests.marks import slow
from tests.ranks import pool_of

IDLE = 4  # of LongCat-Flash's experts here, behind 8 others


def drawn(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Every weight differs from every other, buffers too; but what nothing reads is zero."""
    model: Any = families.build(family)
    if changes:
        model = type(model)(type(model.config).from_dict(model.config.to_dict() | changes))
    torch.manual_seed(1)
    for name, weight in model.state_dict().items():
        nn.init.normal_(weight, std=0.2)
        if family == "longcat_flash" and name.endswith("gate_up_proj"):
            weight[-IDLE:] = 0
    model.to(dtype)
    return model


def saved(family: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    model: Any = drawn(family, dtype, **changes)
    model.save_pretrained(folder)
    return model


def loaded(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """By Hugging Face's own reader; it must miss nothing."""
    cls: Any = type(families.build(family))
    model, reported = cls.from_pretrained(folder, output_loading_info=True, dtype=dtype)
    assert not any(reported[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return dict(model.state_dict())


def described(folder: Path) -> ListedModel:
    model = description.model_of(description.read_document(folder))
    assert isinstance(model, ListedModel)
    return model


def shapes_of(model: ListedModel, table: Table) -> dict[str, tuple[int, ...]]:
    return {cell.name: cell.shape(model) for cell in cells(model, table)}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("dbrx", {}),
        ("longcat_flash", {}),
        ("longcat_flash", {"attention_bias": True, "tie_word_embeddings": True}),
        ("longcat_flash", {"zero_expert_num": 0}),
        ("switch_transformers", {}),
        ("switch_transformers", {"router_bias": True, "num_layers": 4, "num_decoder_layers": 3}),
        ("switch_transformers", {"tie_word_embeddings": False}),
    ],
)
def test_names_are_those_of_transformers(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """In files, and of what a run has beside experts."""
    stock = saved(family, tmp_path, **changes)
    model = described(tmp_path)
    files = load_file(tmp_path / huggingface.WHOLE)
    assert shapes_of(model, model.huggingface.files) == {
        name: tuple(tensor.shape) for name, tensor in files.items()
    }
    beside = {n: tuple(t.shape) for n, t in stock.state_dict().items() if ".experts." not in n}
    assert shapes_of(model, model.deepspeed.module) == beside
    kept = {name for name, _ in stock.named_modules()}
    assert kept.issuperset(model.deepspeed.layers)
    assert len(model.deepspeed.layers) == sum(name.endswith(".experts") for name in kept)
    assert [*model.places(Scope.ONCE)] == [(None, None)]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("dbrx", torch.bfloat16),
        ("longcat_flash", torch.float32),
        ("switch_transformers", torch.float32),
        slow("dbrx", torch.float32),
        slow("longcat_flash", torch.bfloat16),
        slow("switch_transformers", torch.bfloat16),
    ],
)
def test_there_and_back(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Files are the same to the last bit, and so is the config."""
    saved(family, tmp_path / "hf", dtype)
    there = converted(tmp_path / "hf", tmp_path / "there", Form.DEEPSPEED, None)
    back = converted(there, tmp_path / "back", Form.HUGGINGFACE, tmp_path / "hf")
    given, got = (load_file(tmp_path / each / huggingface.WHOLE) for each in ("hf", "back"))
    assert_equal(got, given)
    configs = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("hf", "back"))
    reported, again = configs
    assert reported.items() <= again.items()
    assert_equal(loaded(family, back, dtype), loaded(family, tmp_path / "hf", dtype))


def engine_run(
    rank: int, world_size: int, family: str, save: str, load: str | None
) -> dict[str, Tensor]:
    """An engine that loads or takes a step, and saves."""
    from ds_moe_ext import full_state_dict

    engine = jobs.engine_of(Job(family, 1, ep_ranks=world_size), world_size)
    if load is None:
        engine.backward(jobs.loss_of(engine, jobs.micro_batch(0, rank)))
        engine.step()
    else:
        engine.load_checkpoint(load, load_module_only=True)
    engine.save_checkpoint(save)
    state = full_state_dict(engine.module)
    return {name: tensor.detach().clone() for name, tensor in state.items()}


@pytest.mark.parametrize(
    "family", [slow("dbrx"), slow("longcat_flash"), slow("switch_transformers")]
)
def test_an_engine(family: str, tmp_path: Path) -> None:
    """Trained by two ranks with half of the experts each; and loaded from what comes back."""
    saved(family, tmp_path / "stock")  # for its config
    run = pool_of(2).run
    state, _ = run(engine_run, family, str(tmp_path / "ds"), None)
    hf = converted(tmp_path / "ds", tmp_path / "hf", Form.HUGGINGFACE, tmp_path / "stock")
    assert_equal(loaded(family, hf), state)
    back = converted(hf, tmp_path / "back", Form.DEEPSPEED, None)
    again, _ = run(engine_run, family, str(tmp_path / "again"), str(back))
    assert_equal(again, state)


def without(ends: str) -> Callable[[Path], None]:
    """A file that lacks what ends so."""

    def change(folder: Path) -> None:
        path = folder / huggingface.WHOLE
        kept = {n: t for n, t in load_file(path).items() if not n.endswith(ends)}
        save_file(kept, path)

    return change


@pytest.mark.parametrize(
    ("family", "change", "expected"),
    [
        ("dbrx", edited(n_layers=3), r"has no transformer\.blocks\.2.* and 5 more; is it a whole"),
        ("dbrx", edited(d_model=None), "config has no d_model; add it"),
        ("dbrx", without("1.ffn.experts.mlp.v1"), r"has no .*experts\.mlp\.v1; is it a whole"),
        ("longcat_flash", without("7.down_proj.weight"), r"has no .*experts\.7\.down_proj"),
        (
            "longcat_flash",
            edited(n_routed_experts=6),
            r"shape \(12, 32\), but the model needs \(10, 32\)",
        ),
        ("switch_transformers", edited(d_ff=32), r"of shape \(24, 32\), but the model needs"),
        ("switch_transformers", edited(num_decoder_layers=1), r"decoder\.block\.1.*does not have"),
    ],
)
def test_what_is_refused(
    family: str, change: Callable[[Path], None], expected: str, tmp_path: Path
) -> None:
    saved(family, tmp_path / "hf")
    change(tmp_path / "hf")
    with pytest.raises(ValueError, match=expected):
        converted(tmp_path / "hf", tmp_path / "there", Form.DEEPSPEED, None)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("family", "lacks"),
    [
        ("dbrx", "clip_qkv"),
        ("longcat_flash", "layers of two attentions"),
        ("switch_transformers", "encoder and decoder"),
    ],
)
def test_megatron_has_none_of_them(family: str, lacks: str, tmp_path: Path) -> None:
    saved(family, tmp_path / "hf")
    expected = f"a {family} model is converted between deepspeed and .* only: .*{lacks}.*; choose"
    with pytest.raises(ValueError, match=expected):
        converted(tmp_path / "hf", tmp_path / "there", Form.MEGATRON, None)
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(ValueError, match=expected):
        converted(tmp_path / "megatron", tmp_path / "there", Form.HUGGINGFACE, tmp_path / "hf")


def test_identities_need_no_weights_in_files(tmp_path: Path) -> None:
    """LongCat-Flash's files may lack what nothing reads, and have what transformers does not."""
    saved("longcat_flash", tmp_path / "hf")
    path = tmp_path / "hf" / huggingface.WHOLE
    whole = load_file(path)
    idle = {f".experts.{8 + number}." for number in range(IDLE)}
    lean = {n: t for n, t in whole.items() if not any(each in n for each in idle)}
    assert len(whole) - len(lean) == 2 * 2 * IDLE
    save_file(lean | {"model.mtp.norm.weight": torch.ones(3)}, path)
    there = converted(tmp_path / "hf", tmp_path / "there", Form.DEEPSPEED, None)
    back = converted(there, tmp_path / "back", Form.HUGGINGFACE, tmp_path / "hf")
    assert_equal(load_file(back / huggingface.WHOLE), whole)
