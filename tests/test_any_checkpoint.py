# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of itself, nearly right: it is read as it was written, or refused in one
line that names a file. ``damage.py`` damages whole checkpoints.

``pytest tests/test_any_checkpoint.py --hypothesis-profile long`` draws fifty times as many.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_moe_ext.commands.conversion import dcp
from ds_moe_ext.files import whole_files
from ds_moe_ext.files.unpickle import TABLE
from ds_moe_ext.hosts.deepspeed.layout_file import LAYOUT_FILE, SavedLayout
from ds_moe_ext.hosts.megatron.checkpoint_sums import LAST_FILE, SUMS_FILE, check_part
from tests.test_any_input import as_bytes, check_line, nearly, of_bytes

FILES = {"mp_rank_00_model_states.pt": b"dense weights", LAST_FILE: b"{}", "__0_0.distcp": b"more"}
EXPERTS = {"model.layers.0.mlp": 4, "model.layers.1.mlp": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With files, and both of ours that say what they are."""
    made = tmp_path_factory.mktemp("saved")
    for name, contents in FILES.items():
        (made / name).write_bytes(contents)
    sums = whole_files.sums_of(made, list(FILES))
    SavedLayout(
        strategy="fssdp",
        expert_parallel_size=2,
        expert_sharding_size=1,
        world_size=2,
        zero_stage=1,
        num_experts=EXPERTS,
        owners={name: [expert % 2 for expert in range(num)] for name, num in EXPERTS.items()},
        slots={name: [f"{name}.{slot}" for slot in range(num)] for name, num in EXPERTS.items()},
        optimizer="AdamW",
        step=7,
        save="an id",
        files=sums,
        routing={name: {"top_k": 2, "capacity_factor": None} for name in EXPERTS},
    ).write(made)
    document = {"format": 1, "files": sums, "routing": {"moe_router_topk": 2}}
    with_sum = {**document, "crc32": whole_files.sum_of_document(document)}
    whole_files.write_whole(made / SUMS_FILE, json.dumps(with_sum))
    weight = torch.arange(12.0).reshape(3, 4)
    boxes = {(0, 0): dcp.ToMake((3, 4), lambda: weight)}
    written = {"weight": dcp.ToWrite((3, 4), torch.float32, boxes)}
    dcp.write(made / "dcp", written, {"an id": "of a save"})
    return made


def spoilt(document: Mapping[str, Any]) -> st.SearchStrategy[bytes]:
    """In bytes or in values; with its checksum, or as somebody who has changed it leaves it."""
    changed = copy.deepcopy(dict(document)) | {"crc32": None}
    return (
        of_bytes(as_bytes(document))
        | nearly(document).map(as_bytes)
        | nearly(changed).map(as_bytes)
    )


def is_sealed(path: Path) -> bool:
    """Whether it has a checksum: a document that was changed has none, or another."""
    return json.loads(path.read_text()).get("crc32") is not None


@given(data=st.data())
def test_the_layout_of_a_checkpoint(folder: Path, data: st.DataObject) -> None:
    path = folder / LAYOUT_FILE
    whole = path.read_bytes()
    expected = SavedLayout.read(folder)
    try:
        path.write_bytes(data.draw(spoilt(json.loads(whole))))
        layout = SavedLayout.read(folder)
        layout.check_owners(folder)
        layout.check(folder)
        assert not is_sealed(path) or layout == expected
    except ValueError as error:
        check_line(str(error))
        assert str(folder) in str(error)
    finally:
        path.write_bytes(whole)


@given(data=st.data())
def test_the_sums_beside_megatrons_files(folder: Path, data: st.DataObject) -> None:
    path = folder / SUMS_FILE
    whole = path.read_bytes()
    expected = json.loads(whole)
    try:
        path.write_bytes(data.draw(spoilt(expected)))
        check_part(folder)
        assert not is_sealed(path) or json.loads(path.read_text()) == expected
    except ValueError as error:
        check_line(str(error))
        assert str(folder) in str(error)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("name", [TABLE, dcp.DATA])
@given(data=st.data())
def test_tables_of_tensors(name: str, folder: Path, data: st.DataObject) -> None:
    """By themselves: that a number is another one is found by their sums."""
    path = folder / "dcp" / name
    whole = path.read_bytes()
    try:
        path.write_bytes(data.draw(of_bytes(whole)))
        saved = dcp.Folder(path.parent)
        saved.object("an id")
        if "weight" in saved.tensors:
            saved.read("weight", (0, 0), (3, 4))
    except ValueError as error:
        check_line(str(error))
        assert str(path.parent) in str(error)
    finally:
        path.write_bytes(whole)
