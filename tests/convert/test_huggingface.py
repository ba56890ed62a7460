# SPDX-License-Identifier: Apache-2.0
"""Hugging Face to Megatron and back: every bit, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ds_moe_ext import cli
from ds_moe_ext.commands.conversion import description, huggingface, megatron
from ds_moe_ext.commands.conversion.conversion import Asked, Form, convert, form_of
from tests.convert import models
from tests.convert.models import edited

QUIET = Console(quiet=True)


def converted(source: Path, target: Path, goal: Form, **more: Any) -> Path:
    convert(Asked(source, target, goal, **more), QUIET)
    return target


@pytest.mark.parametrize("family", models.MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    models.saved(family, tmp_path / "hf", dtype)
    there = converted(tmp_path / "hf", tmp_path / "there", Form.MEGATRON)
    back = converted(there, tmp_path / "back", Form.HUGGINGFACE)
    models.assert_equal(models.loaded(back), models.loaded(tmp_path / "hf"))
    given, got = (
        description.model_of(description.read_document(f)) for f in (tmp_path / "hf", back)
    )
    assert got == given
    assert form_of(there, None) is form_of(there / megatron.RELEASE, None) is Form.MEGATRON


def test_files_of_several_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model: an index, and files that are no larger than stated."""
    models.saved("qwen3_moe", tmp_path / "hf")
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 30_000)
    there = converted(tmp_path / "hf", tmp_path / "there", Form.MEGATRON)
    back = converted(there, tmp_path / "back", Form.HUGGINGFACE)
    files = list(back.glob("*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 40_000 for file in files)
    models.assert_equal(models.loaded(back), models.loaded(tmp_path / "hf"))
    again = converted(back, tmp_path / "again", Form.MEGATRON)
    name = "release/__0_0.distcp"
    assert (again / name).read_bytes() == (there / name).read_bytes()


def test_modules_names_are_read(tmp_path: Path) -> None:
    """What ``full_state_dict`` gives, saved as it is: experts stacked."""
    from safetensors.torch import save_file

    model = models.saved("mixtral", tmp_path / "hf")
    (tmp_path / "hf" / huggingface.WHOLE).unlink()
    save_file(model.state_dict(), tmp_path / "hf" / huggingface.WHOLE)
    there = converted(tmp_path / "hf", tmp_path / "there", Form.MEGATRON)
    back = converted(there, tmp_path / "back", Form.HUGGINGFACE)
    models.assert_equal(models.loaded(back), dict(model.state_dict()))


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models.saved("qwen3_moe", tmp_path / "hf")
    folders = [str(tmp_path / "hf"), str(tmp_path / "there")]
    options = ["--to", "megatron", "--dtype", "bfloat16"]
    monkeypatch.setattr("sys.argv", ["ds-moe-ext", "convert", *options, *folders])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    stated = capsys.readouterr().out
    assert "3 layers, 2 of them with 4 experts" in stated
    for flag in ("--qk-layernorm", "--moe-router-pre-softmax", "--moe-layer-freq [1,0,1]"):
        assert flag in stated
    assert "--untie" not in stated
    stored = megatron.open_source(
        tmp_path / "there" / "release",
        megatron.model_of_arguments(megatron.arguments(tmp_path / "there" / "release")),
    )
    assert {tensor.dtype for tensor in stored.tensors.values()} == {torch.bfloat16}


def without(name: str) -> Callable[[Path], None]:
    """A folder whose file lacks a tensor, and has one under another name."""

    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / huggingface.WHOLE)
        tensors[f"other.{name}"] = tensors.pop(name)
        save_file(tensors, folder / huggingface.WHOLE)

    return change


def with_another(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / huggingface.WHOLE)
    save_file({**tensors, "extra.weight": torch.ones(3)}, folder / huggingface.WHOLE)


def cut(folder: Path) -> None:
    path = folder / huggingface.WHOLE
    path.write_bytes(path.read_bytes()[:500])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (edited(model_type="llama"), "model_type is 'llama'; converted are mixtral, qwen3_moe"),
        (edited(sliding_window=64), "sliding_window is 64"),
        (edited(rope_parameters={"rope_type": "yarn"}), "rope_type is 'yarn'; only 'default'"),
        (edited(hidden_act="gelu"), "hidden_act is 'gelu'; only 'silu'"),
        (edited(num_local_experts=8), r"has no .*experts\.4\.w1\.weight"),
        (edited(num_local_experts=3), r"gate\.weight of shape \(4, 32\), but the model needs \(3,"),
        (edited(intermediate_size=32), r"of shape \(24, 32\), but the model needs \(32, 32\)"),
        (edited(num_key_value_heads=3), "3 heads of keys and values do not divide 4"),
        (edited(num_hidden_layers=None), "config has no num_hidden_layers; add it"),
        (without("lm_head.weight"), "has no lm_head.weight; is it a whole checkpoint"),
        (with_another, "has extra.weight, which a mixtral model does not have"),
        (cut, "model.safetensors cannot be read"),
    ],
)
def test_what_is_refused(change: Callable[[Path], None], expected: str, tmp_path: Path) -> None:
    models.saved("mixtral", tmp_path / "hf")
    change(tmp_path / "hf")
    with pytest.raises(ValueError, match=expected):
        converted(tmp_path / "hf", tmp_path / "there", Form.MEGATRON)
    assert not (tmp_path / "there").exists()


def test_which_form(tmp_path: Path) -> None:
    models.saved("mixtral", tmp_path / "hf")
    with pytest.raises(ValueError, match="already has form huggingface"):
        converted(tmp_path / "hf", tmp_path / "there", Form.HUGGINGFACE)
    with pytest.raises(ValueError, match=r"there is not a folder"):
        form_of(tmp_path / "there", None)
    with pytest.raises(ValueError, match="is no checkpoint of form megatron"):
        form_of(tmp_path / "hf", Form.MEGATRON)
    (tmp_path / "hf" / "latest").write_text("global_step1")
    with pytest.raises(ValueError, match=r"looks like deepspeed and huggingface: .* with --from"):
        form_of(tmp_path / "hf", None)
    with pytest.raises(ValueError, match="hf is not empty; name a new folder"):
        converted(tmp_path / "hf", tmp_path / "hf", Form.MEGATRON, given=Form.HUGGINGFACE)


@pytest.mark.parametrize("goal", [Form.MEGATRON, Form.DEEPSPEED])
def test_a_target_that_cannot_be_written_is_named(goal: Form, tmp_path: Path) -> None:
    models.saved("mixtral", tmp_path / "hf")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is not a folder; name a new one"):
        converted(tmp_path / "hf", tmp_path / "file", goal)
    expected = "TARGET is '/proc/nope/x', where nothing can be written .*; name another folder"
    with pytest.raises(ValueError, match=expected):
        converted(tmp_path / "hf", Path("/proc/nope/x"), goal)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"multi_latent_attention": True}, "multi_latent_attention is True"),
        ({"swiglu": False}, "belongs to no convertible family"),
        ({"moe_router_topk": None}, "have no moe_router_topk; describe it with --model"),
        ({"num_layers": 3}, r"norm\.weight of shape \(2, 32\), but the model needs \(3, 32\)"),
    ],
)
def test_what_is_refused_of_megatron(
    changes: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.saved("mixtral", tmp_path / "hf")
    there = converted(tmp_path / "hf", tmp_path / "there", Form.MEGATRON)
    path = there / megatron.RELEASE / megatron.COMMON
    common = torch.load(path, weights_only=False)
    vars(common["args"]).update(changes)
    torch.save(common, path)
    with pytest.raises(ValueError, match=expected):
        converted(there, tmp_path / "back", Form.HUGGINGFACE)
    if "num_layers" not in changes:  # a description stands in for what the checkpoint says
        back = converted(there, tmp_path / "back", Form.HUGGINGFACE, described=tmp_path / "hf")
        models.assert_equal(models.loaded(back), models.loaded(tmp_path / "hf"))


class Foreign:
    """Of a host that is not there when its pickles are read."""

    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_nothing_of_a_file_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.saved("mixtral", tmp_path / "hf")
    there = converted(tmp_path / "hf", tmp_path / "there", Form.MEGATRON)
    path = there / megatron.RELEASE / megatron.COMMON
    common = torch.load(path, weights_only=False)
    common["args"].enum = common["other"] = Foreign()
    torch.save(common, path)
    back = converted(there, tmp_path / "back", Form.HUGGINGFACE)
    assert "executed" not in capsys.readouterr().out
    models.assert_equal(models.loaded(back), models.loaded(tmp_path / "hf"))
