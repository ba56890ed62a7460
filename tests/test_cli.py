# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext`` as a person runs it: in a process of its own, from some folder.

What it merely says is asked in the process of the tests, which has loaded the hosts already.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from ds_moe_ext import testing
from ds_moe_ext.commands import cluster_profile
from ds_moe_ext.report.record import LayerRecord, RunRecord
from ds_moe_ext.report.report_files import ReportFiles
from tests.commands import Done, done

ROOT = Path(__file__).parents[1]
COMMAND = Path(sys.executable).parent / "ds-moe-ext"


def start(
    folder: Path, *arguments: str, given: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command; ``given`` is its standard input."""
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in ("DS_MOE_EXT_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTHONPATH")
    }
    return subprocess.run(
        [str(COMMAND), *arguments],
        cwd=folder,
        env={**clean, "DS_ACCELERATOR": "cpu", "COLUMNS": "250", **environment},
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Runs the command in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr(sys, "path", [*sys.path])

    return partial(done, monkeypatch, capsys)


@pytest.mark.slow
def test_doctor_names_every_patch_that_is_in(tmp_path: Path) -> None:
    from ds_moe_ext.patches import accelerate, deepspeed, megatron, transformers

    done = start(tmp_path, "doctor")
    assert done.returncode == 0, done.stderr
    assert "autoload: on" in done.stdout
    rows = [line for line in done.stdout.splitlines() if "│ in " in line]
    patches = (
        *accelerate.PATCHES,
        *transformers.PATCHES,
        *deepspeed.PATCHES,
        *megatron.PATCHES,
    )
    assert len(rows) == len(patches) == len({patch.id for patch in patches}) > 10
    for patch, row in zip(patches, rows):
        assert all(part in row for part in (patch.id, patch.target, patch.reason)), row


@pytest.mark.parametrize("variable", ["DS_MOE_EXT_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_doctor_says_what_switches_us_off(
    variable: str, here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "0")
    done = here("doctor")
    assert done.returncode == 0
    assert f"autoload: off, by {variable}=0" in done.stdout


def test_doctor_says_what_is_in_our_way(here: Callable[..., Done]) -> None:
    beside = Path("ds_moe_ext.py").absolute()
    beside.write_text("")
    done = here("doctor")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert f"autoload: off for scripts of this folder: {beside} has its name" in text
    beside.unlink()
    assert "autoload: on, by torch's entry points" in here("doctor").stdout


@pytest.mark.slow  # quick: where patches are broken, and in test_loading.py
def test_doctor_fails_where_a_host_has_another_version(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m; v = m.version; "
        "m.version = lambda name: '9.0.0' if name == 'deepspeed' else v(name)"
    )
    check_cannot_patch(
        start(tmp_path, "doctor", PYTHONPATH=str(tmp_path)),
        "patch 'check-first' is for deepspeed>=0.19.7,<0.20, but 9.0.0 is installed",
    )


def test_doctor_fails_where_patches_are_broken(
    here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ds_moe_ext.patches.deepspeed", None)
    check_cannot_patch(here("doctor"), "ModuleNotFoundError")


def check_cannot_patch(done: subprocess.CompletedProcess[str] | Done, expected: str) -> None:
    assert done.returncode == 1
    assert done.stdout.count(expected) == 1
    assert "│ out" in done.stdout
    assert "whole-state" in done.stdout  # of accelerate, which is well


def test_doctor_goes_without_a_host(
    here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version

    def without_accelerate(name: str) -> str:
        if name == "accelerate":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_accelerate)
    done = here("doctor")
    assert done.returncode == 0
    assert "accelerate: not installed" in done.stdout


@pytest.mark.slow  # a process that imports torch and transformers
def test_doctor_lists_layers_without_hosts_that_the_model_does_not_load(tmp_path: Path) -> None:
    """Their imports took most of its time. Patches of those that it does load are looked at."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    script = (
        "import sys\nfrom ds_moe_ext import cli\n"
        "try:\n    cli.main()\n"
        "finally:\n    print([n for n in ('megatron', 'transformers.trainer') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "doctor", "--model", "config.json"],
        cwd=tmp_path,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "COLUMNS": "250"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "model.layers.2.mlp.experts" in done.stdout and "deepspeed " in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


COMMANDS = ("", "doctor", "report", "price", "loads", "reproduce", "plan", "profile", "compare")


@pytest.mark.parametrize("command", [*COMMANDS, "verify", "convert"])
def test_help_is_plain_text(command: str, here: Callable[..., Done]) -> None:
    """Without the marks of a docstring."""
    done = here(*command.split(), "--help")
    assert done.returncode == 0 and "usage: ds-moe-ext" in done.stdout
    assert "`" not in done.stdout


def test_help_of_modules_is_plain_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["it", "--help"])
    for main in (cluster_profile.main, testing.main):
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0 and "`" not in capsys.readouterr().out


MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
}


@pytest.mark.parametrize("names", ["", "config.json"], ids=["folder", "file"])
def test_doctor_lists_the_layers_of_a_config(
    names: str, here: Callable[..., Done], tmp_path: Path
) -> None:
    """A model of 4 billion weights: built without memory."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    done = here("doctor", "--model", str(tmp_path / names))
    assert done.returncode == 0, done.stderr
    assert "layers of MixtralForCausalLM to replace" in done.stdout
    rows = [line for line in done.stdout.splitlines() if "mlp.experts" in line]
    assert [f"model.layers.{index}.mlp.experts" in row for index, row in enumerate(rows)] == [
        True
    ] * 3
    count = 8 * 3 * 4096 * 14336
    assert all("MixtralExperts" in row and f"{count:,}" in row for row in rows)


QWEN3_VL_MOE = {
    "model_type": "qwen3_vl_moe",
    "text_config": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
    },
    "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32},
}


@pytest.mark.parametrize("names_class", [True, False])
def test_doctor_lists_the_layers_of_a_model_that_sees(
    names_class: bool, here: Callable[..., Done], tmp_path: Path
) -> None:
    architectures = ["Qwen3VLMoeForConditionalGeneration"]
    named = {"architectures": architectures} if names_class else {}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_VL_MOE, **named}))
    done = here("doctor", "--model", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"layers of {architectures[0]} to replace" in done.stdout
    assert done.stdout.count("Qwen3VLMoeTextExperts") == 2


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "models").glob("*.json")), ids=str)
def test_doctor_lists_the_layers_of_our_own_files(path: Path, here: Callable[..., Done]) -> None:
    done = here("doctor", "--model", str(path))
    assert done.returncode == 0, done.stderr
    assert "none found" not in done.stdout
    assert "blocks.1.ffn" in done.stdout or "model.layers.1.mlp.experts" in done.stdout


def test_doctor_lists_the_layers_that_a_builder_makes(
    tmp_path: Path, here: Callable[..., Done]
) -> None:
    """Of a family that only the model file knows."""
    (tmp_path / "my_code.py").write_text(
        "from deepspeed.moe.layer import MoE\n"
        "from torch import nn\n"
        "def build(config):\n"
        "    return nn.Sequential(MoE(8, nn.Linear(8, 8), num_experts=config['experts']))\n"
    )
    file = tmp_path / "model.json"
    document = {"family": "mine", "builder": "my_code.py:build", "config": {"experts": 4}}
    file.write_text(json.dumps(document))
    done = here("doctor", "--model", str(file))
    assert done.returncode == 0, done.stderr
    assert any("deepspeed.moe" in line and "4" in line for line in done.stdout.splitlines())

    file.write_text(json.dumps({**document, "builder": "no_code.py:build"}))
    done = here("doctor", "--model", str(file))
    assert done.returncode == 2
    assert "names 'no_code.py:build' as its 'builder', which cannot be imported" in done.stderr

    file.write_text(json.dumps({"family": "mine", "config": {}}))
    done = here("doctor", "--model", str(file))
    assert done.returncode == 2
    assert "family 'mine', which transformers does not know; add 'builder'" in done.stderr


def with_others() -> nn.Module:
    """Layers of two kinds, of which one is known."""
    return nn.ModuleDict({"known": hosts_moe(), "lists": nn.ModuleDict({"experts": dense()})})


def hosts_moe() -> nn.Module:
    from deepspeed.moe.layer import MoE

    layer: nn.Module = MoE(8, nn.Linear(8, 8), num_experts=4)
    return layer


def test_doctor_lists_what_stays_as_it_is(here: Callable[..., Done]) -> None:
    done = here("doctor", "--model", f"{__name__}:with_others")
    (row,) = [line for line in done.stdout.splitlines() if "unknown: stays unchanged" in line]
    assert "lists.experts (Linear, 1)" in row
    assert "deepspeed.moe" in done.stdout


def dense() -> nn.Module:
    return nn.Linear(8, 8)


def nothing() -> str:
    return "a model"


def test_doctor_lists_the_layers_of_a_function(tmp_path: Path, here: Callable[..., Done]) -> None:
    """Of a module that lies where the person is."""
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "from deepspeed.moe.layer import MoE\n"
        "def build():\n"
        "    return nn.Sequential(nn.Linear(8, 8), MoE(8, nn.Linear(8, 8), num_experts=4))\n"
    )
    done = here("doctor", "--model", "mine:build")
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if "deepspeed.moe" in line and "4" in line]
    assert row.split("│")[1].strip() == "1"


def test_doctor_lists_no_layers(here: Callable[..., Done]) -> None:
    assert "none found" in here("doctor", "--model", f"{__name__}:dense").stdout
    done = here("doctor", "--model", f"{__name__}:nothing")
    assert done.returncode == 2
    assert f"'{__name__}:nothing', which gives no module" in done.stderr


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("no/such/folder", "neither a file or folder nor 'package.module:function'"),
        ("no_such_module:build", "cannot be imported: No module named 'no_such_module'"),
        ("json:no_such_function", "cannot be imported"),
        ("torch.nn:Linear", "cannot be called without arguments (missing a required argument"),
        ("math:pi", "is not a function but 3.14"),
    ],
)
def test_doctor_says_what_is_no_model(model: str, expected: str, here: Callable[..., Done]) -> None:
    done = here("doctor", "--model", model)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"ds-moe-ext: --model is {model!r}, which")
    assert expected in done.stderr


def test_report_draws_the_page_again(tmp_path: Path) -> None:
    record = RunRecord(
        strategy="ep",
        world_size=2,
        num_ep_ranks=2,
        layers=(LayerRecord("layers.0", "MixtralExperts", 4, 2, (0, 0, 1, 1), 1024),),
        steps_I=(0, 1),
        rows_ILE=np.array([[[4, 4, 4, 4]], [[10, 2, 2, 2]]]),
        ep_rank_rows_ILC=np.array([[[8, 8]], [[12, 4]]]),
        seconds_by_kind={"forward:expert": 0.1},
        versions={"torch": "2"},
    )
    ReportFiles(tmp_path).write(record)
    page = tmp_path / "report.html"
    drawn = page.read_text()
    page.unlink()
    done = start(tmp_path, "report", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stderr
    assert f"wrote {page}" in done.stdout
    assert page.read_text() == drawn
    # Its charts, and it beside another run.
    other = tmp_path / "other"
    ReportFiles(other).write(dataclasses.replace(record, strategy="fssdp", steps_I=(1, 2)))
    asked = ("report.json", "--beside", "other/report.json", "--charts", "out/charts")
    done = start(tmp_path, "report", *asked)
    assert done.returncode == 0, done.stderr
    assert "1 common step, 1 to 1" in (tmp_path / "beside.html").read_text()
    charts = list((tmp_path / "out/charts").glob("*.svg"))
    assert f"wrote {len(charts)} charts into out/charts" in done.stdout
    assert "balance-over-the-steps.svg" in {chart.name for chart in charts}
    ReportFiles(other).write(dataclasses.replace(record, steps_I=(7, 8)))
    done = start(tmp_path, "report", *asked)
    assert done.returncode == 2 and "have no recorded step in common" in done.stderr


@pytest.mark.parametrize("text", [None, "not json", "{}", "[]", '{"layers": 3}'])
def test_report_says_what_is_no_report(
    text: str | None, here: Callable[..., Done], tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    done = here("report", str(path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("ds-moe-ext: ")
    assert str(path) in line
    assert not (tmp_path / "report.html").exists()


SHARDING_JOB = {
    "load": [[50, 20, 20, 10], [30, 40, 25, 5]],
    "overlap_degree": 1,
    "num_ranks": 4,
    "ranks_per_node": 2,
}


@pytest.mark.parametrize("path", ["-", "job.json"])
def test_plan_prints_json(path: str, tmp_path: Path) -> None:
    text = json.dumps(SHARDING_JOB)
    (tmp_path / "job.json").write_text(text)
    done = start(tmp_path, "plan", "heterogeneous-sharding", "--in", path, given=text)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"home": [[1, 2, 0, 3], [0, 1, 2, 3]]}


def test_plan_needs_neither_torch_nor_a_host(tmp_path: Path) -> None:
    """So that it starts quickly, wherever a person sits."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "for name in ('torch', 'deepspeed', 'transformers'):\n"
        "    sys.modules[name] = None\n"
    )
    done = start(
        tmp_path,
        "plan",
        "heterogeneous-sharding",
        "--in",
        "-",
        given=json.dumps([SHARDING_JOB]),
        PYTHONPATH=str(tmp_path),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [{"home": [[1, 2, 0, 3], [0, 1, 2, 3]]}]


@pytest.mark.parametrize(
    ("arguments", "given", "expected"),
    [
        ("heterogeneous-sharding --in -", "not json", "cannot be read as JSON"),
        ("heterogeneous-sharding --in -", '{"load": [NaN]}', "NaN is not a number"),
        ("heterogeneous-sharding --in -", "{}", "needs the key 'load'; add it"),
        ("heterogeneous-sharding --in no.json", "", "--in is 'no.json', which cannot be read (No"),
        ("heterogeneous-sharding --in .", "", "--in is '.', which cannot be read (Is a directory)"),
        ("heterogeneous --in -", "{}", "did you mean 'heterogeneous-sharding'?"),
    ],
)
def test_plan_says_what_is_wrong(
    arguments: str,
    given: str,
    expected: str,
    here: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
    done = here("plan", *arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("ds-moe-ext: ")
    assert expected in line


@pytest.mark.parametrize("arguments", [(), ("docter",), ("report",), ("plan",)])
def test_usage(arguments: tuple[str, ...], here: Callable[..., Done]) -> None:
    done = here(*arguments)
    assert done.returncode == 2
    assert "usage: ds-moe-ext" in done.stderr
