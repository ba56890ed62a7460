# SPDX-License-Identifier: Apache-2.0
"""How we come into a script that knows nothing of us, stay out of one that does not want us, and
break nothing where we fail."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_moe_ext.patches.patch import Patch, PatchError, apply_all
from tests.hosts.processes import ROOT, answers, run_script
from tests.marks import slow

IS_ATTACHED = """
import sys
deepspeed = sys.modules.get("deepspeed")
if deepspeed is not None:
    from deepspeed.runtime.engine import DeepSpeedEngine
    print("answer:", hasattr(deepspeed.initialize, "__wrapped__"),
          hasattr(DeepSpeedEngine._configure_expert_parallel, "__wrapped__"))
accelerate = sys.modules.get("accelerate")
if accelerate is not None:
    print("answer:", hasattr(accelerate.Accelerator.get_state_dict, "__wrapped__"))
"""
OFF_IN_TORCH = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
OFF = {"DS_MOE_EXT_AUTOLOAD": "0"}


def attached(folder: Path, code: str, **environment: str) -> list[str]:
    """Whether the hosts that the code imports are patched."""
    script = folder / "script.py"
    script.write_text(code + IS_ATTACHED)
    (printed,) = run_script(script, **environment)
    return [answer.strip() for answer in answers(printed)]


@pytest.mark.parametrize(
    "code",
    [
        "from deepspeed.runtime.engine import DeepSpeedEngine",
        "import torch, transformers, accelerate, deepspeed",
        "import torch, deepspeed",
        "import deepspeed",
        "import deepspeed, torch",
    ],
)
@pytest.mark.slow  # a quick one is at the end of this file, where nobody asks for us
def test_autoload_whatever_is_imported_first(code: str, tmp_path: Path) -> None:
    both = ["True True", "True"]
    assert attached(tmp_path, code) == both[: 1 + ("accelerate" in code)]


@pytest.mark.slow  # likewise
@pytest.mark.parametrize("switch", [OFF, OFF_IN_TORCH], ids=["ours", "torch's"])
def test_switched_off_hosts_are_left_alone(switch: dict[str, str], tmp_path: Path) -> None:
    assert attached(tmp_path, "import torch, deepspeed, accelerate", **switch) == [
        "False False",
        "False",
    ]


@pytest.mark.slow  # what the patches do is below; test_launch.py imports us in each rank
@pytest.mark.parametrize(
    "code",
    ["import ds_moe_ext, deepspeed", "import torch, deepspeed, ds_moe_ext"],
    ids=["before", "after"],
)
def test_plain_import_attaches(code: str, tmp_path: Path) -> None:
    assert attached(tmp_path, code, **OFF_IN_TORCH) == ["True True"]


@pytest.mark.slow
def test_plain_import_may_be_switched_off_too(tmp_path: Path) -> None:
    assert attached(tmp_path, "import deepspeed, ds_moe_ext", **OFF) == ["False False"]


@pytest.mark.slow
def test_run_module_runs_a_script_as_python_does(tmp_path: Path) -> None:
    """Arguments, ``__main__``, modules beside it, and its exit code are the script's own."""
    (tmp_path / "beside.py").write_text("value = 7")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside, deepspeed\n"
        "assert __name__ == '__main__' and __file__ == sys.argv[0]\n"
        "print('answer:', beside.value, *sys.argv[1:])" + IS_ATTACHED + "sys.exit(len(sys.argv))"
    )
    arguments = ("--lr", "0.1", "--ds_moe_ext")
    (printed,) = run_script(
        script, *arguments, python=("-m", "ds_moe_ext.run"), good=False, **OFF_IN_TORCH
    )
    assert [answer.strip() for answer in answers(printed)] == [
        "7 --lr 0.1 --ds_moe_ext",
        "True True",
    ]


def test_run_module_without_a_script_says_how(tmp_path: Path) -> None:
    (printed,) = run_script(Path("-m"), "ds_moe_ext.run", good=False)
    assert "usage: python -m ds_moe_ext.run SCRIPT" in printed


def test_run_module_says_that_there_is_no_script(tmp_path: Path) -> None:
    (printed,) = run_script(tmp_path / "no.py", python=("-m", "ds_moe_ext.run"), good=False)
    assert f"there is no script '{tmp_path}/no.py'; give the path of one" in printed
    assert "Traceback" not in printed


@pytest.mark.slow
def test_accelerate_goes_without_deepspeed(tmp_path: Path) -> None:
    """Ours is installed, DeepSpeed is not."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['deepspeed'] = None")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, accelerate\n"
        "accelerator = accelerate.Accelerator(cpu=True)\n"
        "print('answer:', *accelerator.get_state_dict(torch.nn.Linear(2, 2)))\n"
        "print('answer:', hasattr(accelerate.Accelerator.get_state_dict, '__wrapped__'))"
    )
    (printed,) = run_script(script, path=(tmp_path,))
    assert [answer.strip() for answer in answers(printed)] == ["weight bias", "True"]
    assert "ds_moe_ext" not in printed


# Where we are broken.

BREAKAGES = {
    "broken patches": """
        import importlib.abc, sys
        class Breaks(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name == "ds_moe_ext.patches.deepspeed":
                    raise RuntimeError("a broken installation")
        sys.meta_path.insert(0, Breaks())
        """,
    "another version": """
        import importlib.metadata
        original = importlib.metadata.version
        importlib.metadata.version = lambda name: (
            "9.0.0" if name == "deepspeed" else original(name))
        """,
    "a target that has gone": """
        import importlib.abc, sys
        class Removes(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name == "ds_moe_ext.patches.deepspeed":
                    from deepspeed.runtime.engine import DeepSpeedEngine
                    del DeepSpeedEngine.save_16bit_model
        sys.meta_path.insert(0, Removes())
        """,
}
EXPECTED = {
    "broken patches": "a broken installation",
    "another version": "patch 'check-first' is for deepspeed>=0.19.7,<0.20, but 9.0.0 is installed",
    "a target that has gone": "patch 'save-whole' wants deepspeed.runtime.engine:DeepSpeedEngine",
}
INITIALIZE = """
import torch
for enabled in (False, True):
    model = torch.nn.Linear(2, 2)
    config = {"train_micro_batch_size_per_gpu": 1,
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    for document in (config, {**config, "ds_moe_ext": {"enabled": enabled}}):
        try:
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=document)
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
            print("answer: trained", enabled, "ds_moe_ext" in document)
        except RuntimeError as error:
            print("answer:", error)
"""


BROKEN = [
    slow("broken patches", "deepspeed"),
    ("another version", "deepspeed"),
    slow("a target that has gone", "deepspeed"),  # refused where another version is
    *(slow(name, "torch") for name in BREAKAGES),
]


@pytest.mark.parametrize(("name", "first"), BROKEN)
def test_broken_we_break_nothing_and_nobody_trains_unawares(
    name: str, first: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(BREAKAGES[name]))
    script = tmp_path / "script.py"
    script.write_text(f"import {first}\nimport torch, deepspeed{IS_ATTACHED}{INITIALIZE}")
    (printed,) = run_script(script, path=(tmp_path,))
    assert "ds_moe_ext could not attach to deepspeed and is off" in printed
    assert printed.count(EXPECTED[name]) >= 2  # in the warning, and in the error
    attached, *trained, refused = [answer.strip() for answer in answers(printed)]
    assert attached == "True False"  # the guard stands before initialize; the engine is untouched
    assert trained == ["trained False False", "trained False True", "trained True False"]
    assert refused.startswith("ds_moe_ext is enabled, but could not attach to DeepSpeed: ")
    assert "ds-moe-ext doctor" in refused


# Patches.


class Host:
    def method(self) -> str:
        return "original"

    @staticmethod
    def static() -> str:
        return "original"


def wrap(original: Any) -> Any:
    def changed(*args: Any) -> str:
        return f"wrapped {original(*args)}"

    return changed


def patch(target: str = "Host.method", versions: str = ">=2", id: str = "one") -> Patch:
    return Patch(id, f"torch:{target}", versions, "for a test", wrap)


@pytest.fixture(autouse=True)
def _host_in_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A class of ours under the name of an installed distribution."""
    import torch

    monkeypatch.setattr(torch, "Host", type("Host", (), dict(vars(Host))), raising=False)
    yield


def host() -> Any:
    import torch

    return torch.Host


def test_a_patch_applies_once_and_is_undone() -> None:
    original = vars(host())["method"]
    one = patch()
    assert not one.is_applied
    one.apply()
    one.apply()
    assert one.is_applied
    assert host()().method() == "wrapped original"
    one.undo()
    one.undo()
    assert not one.is_applied
    assert vars(host())["method"] is original
    one.apply()
    assert host()().method() == "wrapped original"


def test_two_patches_of_one_target_come_off_in_turn() -> None:
    first, second = patch(id="first"), patch(id="second")
    apply_all((first, second))
    assert host()().method() == "wrapped wrapped original"
    second.undo()
    first.undo()
    assert host()().method() == "original"


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (patch(versions=">=2,<2.1"), ("torch>=2,<2.1", "is installed", "install a version")),
        (patch("Host.missing"), ("Host.missing", "not there")),
        (patch("NoHost.method"), ("NoHost.method", "not there")),
        (patch("Host.__len__"), ("Host.__len__", "not there")),  # nor is what is inherited
        (
            Patch("one", "torch.no_such_module:f", ">=2", "", wrap),
            ("torch.no_such_module:f", "not there"),
        ),
    ],
    ids=lambda value: value.target + value.versions if isinstance(value, Patch) else "",
)
def test_a_patch_that_does_not_fit_says_why(one: Patch, expected: tuple[str, ...]) -> None:
    with pytest.raises(PatchError) as caught:
        one.apply()
    assert all(part in str(caught.value) for part in ("patch 'one'", *expected))
    assert not one.is_applied


def test_all_patches_or_none() -> None:
    good, bad = patch(), patch("Host.missing")
    with pytest.raises(PatchError):
        apply_all((good, bad))
    assert not good.is_applied
    assert host()().method() == "original"


@pytest.mark.parametrize("name", ["deepspeed", "accelerate"])
def test_our_patches_leave_the_host_as_it_was(name: str) -> None:
    """Undone, every target is the very object that it was; applied again, it is wrapped."""
    from ds_moe_ext.patches import accelerate, deepspeed

    module = {"deepspeed": deepspeed, "accelerate": accelerate}[name]
    module.apply()
    for one in module.PATCHES:
        one.undo()
    try:
        before = {one.id: one._resolve()[2] for one in module.PATCHES}
        unwrapped = [getattr(x, "__func__", x) for x in before.values()]
        assert not any(hasattr(x, "__wrapped__") for x in unwrapped)
        module.apply()
        for one in module.PATCHES:
            assert one.is_applied
            assert one.reason
            now = one._resolve()[2]
            assert type(now) is type(before[one.id])
            original = getattr(before[one.id], "__func__", before[one.id])
            assert getattr(now, "__func__", now).__wrapped__ is original
            one.undo()
            assert one._resolve()[2] is before[one.id]
    finally:
        module.apply()


# Where nobody asks for us.


@pytest.mark.parametrize(
    ("world_size", "family"),
    [(1, "gpt_moe"), slow(1, "mixtral"), slow(2, "gpt_moe"), slow(2, "mixtral")],
)
def test_without_the_block_a_run_is_the_same_to_the_last_bit(
    world_size: int, family: str, tmp_path: Path
) -> None:
    plain = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    off = {**plain, "ds_moe_ext": {"enabled": False, "expert_parallel_size": 3}}
    documents = tmp_path / "documents.json"
    documents.write_text(json.dumps([plain, off]))
    script = ROOT / "tests" / "hosts" / "five_steps.py"
    results = [
        run_script(
            script,
            str(documents),
            family,
            world_size=world_size,
            path=(ROOT, ROOT / "launch"),
            **switch,
        )
        for switch in ({}, OFF)
    ]
    loaded, switched_off = ([answers(rank) for rank in ranks] for ranks in results)
    for ours, theirs in zip(loaded, switched_off):
        assert (ours.pop(), theirs.pop()) == (" attached True", " attached False")
        assert len(ours) == 2
        assert ours == theirs
        assert ours[0] == ours[1]
