# SPDX-License-Identifier: Apache-2.0
"""Tensors written in parts by several ranks are read back in any others."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.serialization import safe_globals

from ds_moe_ext.hosts.deepspeed import dcp_folder
from ds_moe_ext.hosts.deepspeed.dcp_folder import Part, Region
from tests.ranks import pool_of

Cuts = list[int]


def whole(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def flat(tensor: Tensor, start: int, numel: int) -> Part:
    """Elements from ``start`` on of a flattened tensor of so many."""
    return Region.all_of((numel,)).part(tensor, start)


def pieces(numel: int, cuts: Cuts) -> list[range]:
    """Parts that tile a tensor, cut there and, if that is behind its end, nowhere."""
    return [range(a, b) for a, b in pairwise(sorted({0, numel, *(min(c, numel) for c in cuts)}))]


def write(
    rank: int,
    world_size: int,
    folder: str,
    numels: list[int],
    *,
    cuts: Cuts,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Each piece of each tensor by one rank; the first tensor whole by all of them."""
    parts = {"whole": flat(whole(numels[0]), 0, numels[0])}
    for number, numel in enumerate(numels):
        for index, piece in enumerate(pieces(numel, cuts)):
            if index % world_size == rank and f"t{number}" not in parts:
                tensor = whole(numel).to(dtype)[piece.start : piece.stop]
                parts[f"t{number}"] = flat(tensor, piece.start, numel)
    dcp_folder.save(Path(folder), parts, {"ours": {"rank": world_size}, f"of/{rank}": rank})


@settings(deadline=None, derandomize=True, max_examples=6)
@given(
    world_size=st.sampled_from([2, 4]),
    numels=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    written=st.integers(1, 40),
    read=st.lists(st.integers(1, 40), max_size=3),
    dtypes=st.sampled_from([(torch.float32, torch.float32), (torch.bfloat16, torch.float64)]),
)
def test_any_cuts_give_the_tensors_back(
    world_size: int,
    numels: list[int],
    written: int,
    read: Cuts,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    """In another type too."""
    with tempfile.TemporaryDirectory() as folder:
        pool_of(world_size).run(write, folder, numels, cuts=[written], dtype=dtypes[0])
        held = dcp_folder.contents(Path(folder))
        assert held.shapes == {"whole": (numels[0],)} | {
            f"t{i}": (n,) for i, n in enumerate(numels)
        }
        assert held.objects == {"ours", *(f"of/{rank}" for rank in range(world_size))}
        for number, numel in enumerate(numels):
            for piece in pieces(numel, read):
                into = torch.empty(len(piece), dtype=dtypes[1])
                objects = dcp_folder.load(
                    Path(folder), {f"t{number}": flat(into, piece.start, numel)}, ["ours", "of/1"]
                )
                expected = whole(numel).to(dtypes[0])[piece.start : piece.stop].to(dtypes[1])
                assert torch.equal(into, expected)
                assert objects == {"ours": {"rank": world_size}, "of/1": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pool_of(2).run(write, str(tmp_path), [16, 9], cuts=[5])
    return tmp_path


def test_what_all_ranks_have_is_written_once(folder: Path) -> None:
    pool_of(2).run(write, str(folder), [30_000], cuts=[15_000])
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    assert 2 * 4 * 30_000 < num_bytes < 2.2 * 4 * 30_000  # "whole" and "t0"


def test_a_folder_may_be_overwritten(folder: Path) -> None:
    pool_of(4).run(write, str(folder), [12], cuts=[5])
    into = torch.empty(12)
    dcp_folder.load(folder, {"t0": flat(into, 0, 12)})
    assert torch.equal(into, whole(12))


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_missing_or_empty_file_is_named(damage: Any, folder: Path) -> None:
    for path in folder.glob("*.distcp"):
        damage(path)
    with pytest.raises(ValueError, match=r"cannot be read .* missing or damaged"):
        dcp_folder.load(folder, {"t0": flat(torch.empty(16), 0, 16)})


def test_nothing_was_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metadata.* missing or damaged"):
        dcp_folder.contents(tmp_path)


def write_where_one_cannot(rank: int, world_size: int, folder: str) -> str:
    path = Path(folder) / "a_file"
    path.touch()
    parts = {"t": flat(torch.zeros(2), 2 * rank, 2 * world_size)}
    try:
        dcp_folder.save(path, parts, {})
    except OSError as error:
        return str(error)
    return "written"


def test_a_failure_to_write_is_one_on_all_ranks(tmp_path: Path) -> None:
    for message in pool_of(2).run(write_where_one_cannot, str(tmp_path)):
        assert "a_file could not be written" in message


class Foreign:
    """Of an optimizer's own, in the options of its groups."""


def test_what_would_not_be_read_again_is_not_written(folder: Path) -> None:
    """But where torch is notified that it is safe."""
    objects = {"options": {"mine": Foreign()}}
    with pytest.raises(OSError, match=r"options is made of .*Foreign.*add_safe_globals"):
        dcp_folder.save(folder, {}, objects)
    with safe_globals([Foreign]):
        dcp_folder.save(folder, {}, objects)
        read = dcp_folder.load(folder, {}, ["options"])
    assert isinstance(read["options"]["mine"], Foreign)
    with pytest.raises(ValueError, match=r"__0_0\.distcp .*Foreign'\], which is not run"):
        dcp_folder.load(folder, {}, ["options"])
