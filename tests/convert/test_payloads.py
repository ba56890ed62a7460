# SPDX-License-Identifier: Apache-2.0
"""Whatever a file of a checkpoint has, ``convert`` runs nothing of it, and names the file."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from ds_moe_ext.commands.conversion.conversion import Asked, Form, convert
from ds_moe_ext.hosts.deepspeed.layout_file import FOLDER, LAYOUT_FILE, SAVE
from tests import payloads
from tests.convert import models
from tests.payloads import Payload, archive_of


def converted(source: Path, target: Path, goal: Form, given: Form, model: Path) -> None:
    described = model if given is Form.DEEPSPEED else None
    convert(Asked(source, target, goal, given=given, described=described), Console(quiet=True))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[Form, Path]:
    """A checkpoint of each form; that of DeepSpeed without checksums, as a stranger may make it."""
    folder = tmp_path_factory.mktemp("sources")
    here = {form: folder / form.value for form in Form}
    models.saved("mixtral", here[Form.HUGGINGFACE])
    (here[Form.HUGGINGFACE] / "generation_config.json").unlink(missing_ok=True)  # is not read
    for form in (Form.MEGATRON, Form.DEEPSPEED):
        converted(here[Form.HUGGINGFACE], here[form], form, Form.HUGGINGFACE, folder)
    layout = here[Form.DEEPSPEED] / "global_step0" / LAYOUT_FILE
    document = json.loads(layout.read_text()) | {"crc32": None, "files": None}
    layout.write_text(json.dumps(document))
    weights = {path.name for path in here[Form.HUGGINGFACE].glob("*.safetensors")}
    index = {"weight_map": {str(number): name for number, name in enumerate(weights)}}
    (here[Form.HUGGINGFACE] / "model.safetensors.index.json").write_text(json.dumps(index))
    return here


@pytest.mark.parametrize("form", Form)
def test_no_file_of_a_checkpoint_is_run(
    form: Form, sources: dict[Form, Path], tmp_path: Path
) -> None:
    """Each in turn is nothing but a payload, by both ways of pickling."""
    goal = Form.MEGATRON if form is not Form.MEGATRON else Form.DEEPSPEED
    files = [path for path in sorted(sources[form].rglob("*")) if path.is_file()]
    assert len(files) >= 3
    for number, file in enumerate(files):
        name = file.relative_to(sources[form])
        for kind, make in enumerate((pickle.dumps, archive_of)):
            case = tmp_path / f"{number}_{kind}"
            shutil.copytree(sources[form], case / "source")
            (case / "source" / name).write_bytes(make(Payload(case / "marker")))
            with pytest.raises(ValueError) as refused:
                converted(case / "source", case / "to", goal, form, sources[Form.HUGGINGFACE])
            message = str(refused.value)
            assert file.name in message and "\n" not in message, message
            assert not (case / "marker").exists()


TABLE, DATA = f"{FOLDER}/.metadata", f"{FOLDER}/__0_0.distcp"
STATES = "mp_rank_00_model_states.pt"
WITHIN: dict[str, tuple[Form, str, Callable[[Path, Path], None], str]] = {
    "table of DeepSpeed's form": (
        *(Form.DEEPSPEED, f"global_step0/{TABLE}", payloads.plant_in_table),
        r"\.metadata .*asks for \w+\.mkdir, which is not run",
    ),
    "object": (
        *(Form.DEEPSPEED, f"global_step0/{FOLDER}"),
        lambda path, marker: payloads.plant_as_object(path, SAVE, marker),
        r"__0_0\.distcp .*asks for \['\w+\.mkdir'\], which is not run",
    ),
    "DeepSpeed's file": (
        *(Form.DEEPSPEED, f"global_step0/{STATES}", payloads.plant_in_archive, ""),
    ),
    "program": (
        *(Form.DEEPSPEED, f"global_step0/{STATES}"),
        lambda path, _: payloads.program(path),
        rf"{STATES} .*program of TorchScript",
    ),
    "table of Megatron's form": (
        *(Form.MEGATRON, "release/.metadata", payloads.plant_in_table),
        r"\.metadata .*asks for \w+\.mkdir, which is not run",
    ),
    "common.pt": (Form.MEGATRON, "release/common.pt", payloads.plant_in_archive, ""),
}


@pytest.mark.parametrize("case", WITHIN)
def test_nothing_within_a_file_is_run(case: str, sources: dict[Form, Path], tmp_path: Path) -> None:
    """Beside what belongs there: it is refused, or taken for nothing where weights are read."""
    form, name, plant, expected = WITHIN[case]
    source, marker = tmp_path / "source", tmp_path / "marker"
    shutil.copytree(sources[form], source)
    plant(source / name, marker)
    goal = Form.MEGATRON if form is not Form.MEGATRON else Form.DEEPSPEED
    arguments = source, tmp_path / "to", goal, form, sources[Form.HUGGINGFACE]
    if expected:
        with pytest.raises(ValueError, match=expected):
            converted(*arguments)
    else:
        converted(*arguments)
    assert not marker.exists()


def test_a_table_of_megatron_0_15_is_read(sources: dict[Form, Path], tmp_path: Path) -> None:
    """Its class is Megatron's own."""
    source = tmp_path / "source"
    shutil.copytree(sources[Form.MEGATRON], source)
    path = source / "release" / ".metadata"
    theirs = b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"
    ours = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    table = pickle.dumps(pickle.loads(path.read_bytes()), protocol=2)
    assert ours in table
    path.write_bytes(table.replace(ours, theirs))
    converted(source, tmp_path / "to", Form.HUGGINGFACE, Form.MEGATRON, tmp_path)
    models.assert_equal(models.loaded(tmp_path / "to"), models.loaded(sources[Form.HUGGINGFACE]))


def test_a_folder_of_two_checkpoints_is_refused(sources: dict[Form, Path], tmp_path: Path) -> None:
    """Of two conversions: what differs is the id of the save."""
    converted(sources[Form.HUGGINGFACE], tmp_path / "a", Form.DEEPSPEED, Form.HUGGINGFACE, tmp_path)
    for name in (FOLDER, STATES, LAYOUT_FILE):
        source = tmp_path / name / "global_step0"
        shutil.copytree(sources[Form.DEEPSPEED], source.parent)
        theirs = tmp_path / "a" / "global_step0" / name
        if name == FOLDER:
            shutil.copytree(theirs, source / name, dirs_exist_ok=True)
        else:
            shutil.copy(theirs, source / name)
        with pytest.raises(ValueError, match="another save") as refused:
            converted(
                source.parent,
                tmp_path / "to",
                Form.MEGATRON,
                Form.DEEPSPEED,
                sources[Form.HUGGINGFACE],
            )
        assert LAYOUT_FILE in str(refused.value)


def test_a_bit_that_has_flipped_is_found(sources: dict[Form, Path], tmp_path: Path) -> None:
    """In the middle of the weights; what is converted has checksums."""
    hf, source = sources[Form.HUGGINGFACE], tmp_path / "source"
    converted(hf, source, Form.DEEPSPEED, Form.HUGGINGFACE, tmp_path)
    path = source / "global_step0" / DATA
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 4
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"__0_0\.distcp has other contents, other than"):
        converted(source, tmp_path / "to", Form.MEGATRON, Form.DEEPSPEED, hf)
    assert not (tmp_path / "to").exists()
