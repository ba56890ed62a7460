# SPDX-License-Identifier: Apache-2.0
"""Experts that the ranks of an ETP group split between them are saved and loaded by any layout."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_moe_ext.core.layout import Grid
from ds_moe_ext.hosts.deepspeed import dcp_folder
from ds_moe_ext.hosts.deepspeed.dcp_folder import Fragment, Region, read_fragments
from ds_moe_ext.moe.sharding import Along, Shard
from tests.hosts import jobs
from tests.hosts.checkpoints import (
    Call,
    Held,
    Layout,
    Saved,
    as_of_format,
    assert_equal,
    ep,
    esp,
    freeze,
    held_by,
    joined,
    loaded,
    run_steps,
    saved,
)
from tests.hosts.jobs import Job
from tests.marks import slow
from tests.ranks import pool_of

pytestmark = pytest.mark.usefixtures("checkpoints_removed")


# Layouts through files, without an engine.

NUM_EXPERTS = 4
SHAPES = {"gate_up": (16, 3), "down": (5, 8), "bias": (4,), "cube": (2, 8, 3)}
ALONGS = (Along(0, 2), Along(1), Along(0), Along(1, 2))


@dataclass(frozen=True)
class EpRanks:
    """A layout of ranks, and what replicas of a part keep of it."""

    grid: Grid
    cut: int | None

    def fragments(self, rank: int, dtype: torch.dtype) -> Iterator[tuple[str, Fragment]]:
        ep_rank, place = self.grid.index("ep", rank), self.grid.index("esp", rank)
        shard = Shard(ALONGS, place, self.grid.etp_size)
        for number in range(ep_rank, NUM_EXPERTS, self.grid.num_ep_ranks):
            for index, name in enumerate(SHAPES):
                part = shard.of(index, whole(name, number))
                region = Region.of_shard(shard, index, part.shape)
                ends = self._ends(rank, part.numel())
                yield f"{name}.{number}/master", Fragment(region, *ends, dtype)

    def _ends(self, rank: int, numel: int) -> tuple[int, int]:
        copy, replicas = self.grid.index("edp", rank), len(self.grid.along("edp")[0])
        if self.cut is None or replicas == 1:
            return 0, numel
        ends = (0, numel * self.cut // 100, *[numel] * replicas)
        return ends[copy], ends[copy + 1]


def whole(name: str, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) + 10 * number)
    return torch.randn(SHAPES[name], generator=generator)


def expected(key: str, fragment: Fragment) -> Tensor:
    name, _, number = key.removesuffix("/master").partition(".")
    part = fragment.region.of(whole(name, int(number)))
    return part.reshape(-1)[fragment.start : fragment.stop].to(fragment.dtype)


def write(rank: int, world_size: int, folder: str, ep_ranks: EpRanks) -> None:
    parts = {
        key: fragment.region.part(expected(key, fragment), fragment.start)
        for key, fragment in ep_ranks.fragments(rank, torch.float32)
        if fragment.start < fragment.stop
    }
    dcp_folder.save(Path(folder), parts, {})


def check(folder: Path, ep_ranks: EpRanks, dtype: torch.dtype) -> None:
    """What each rank of the layout reads."""
    shapes = dcp_folder.contents(folder).shapes
    for rank in range(ep_ranks.grid.world_size):
        wanted = dict(ep_ranks.fragments(rank, dtype))
        for key, tensor in read_fragments(folder, shapes, wanted).items():
            assert torch.equal(tensor, expected(key, wanted[key])), key


@st.composite
def layouts(draw: st.DrawFn, world_sizes: tuple[int, ...]) -> EpRanks:
    world_size = draw(st.sampled_from(world_sizes))
    sizes = [
        (num, size) for num in (1, 2, 4) for size in (1, 2, 4) if world_size % (num * size) == 0
    ]
    num_ep_ranks, etp_size = draw(st.sampled_from(sizes))
    return EpRanks(
        Grid(world_size, num_ep_ranks, etp_size), draw(st.sampled_from([None, 0, 33, 71, 100]))
    )


@settings(deadline=None, derandomize=True, max_examples=8)
@given(
    source=layouts((2, 4)),
    goals=st.lists(layouts((1, 2, 4)), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_layout_reads_any_other(
    source: EpRanks, goals: list[EpRanks], dtype: torch.dtype
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pool_of(source.grid.world_size).run(write, folder, source)
        shapes = dcp_folder.contents(Path(folder)).shapes
        assert shapes == {
            f"{name}.{number}/master": shape
            for name, shape in SHAPES.items()
            for number in range(NUM_EXPERTS)
        }
        for goal in goals:
            check(Path(folder), goal, dtype)


def write_flat(rank: int, world_size: int, folder: str) -> None:
    """As format 2 had them."""
    parts = {}
    for number in range(rank, NUM_EXPERTS, world_size):
        for name in SHAPES:
            flat = whole(name, number).view(-1)
            parts[f"{name}.{number}/master"] = Region.all_of(flat.shape).part(flat, 0)
    dcp_folder.save(Path(folder), parts, {})


def test_any_layout_reads_flat_experts(tmp_path: Path) -> None:
    pool_of(2).run(write_flat, str(tmp_path))

    @settings(deadline=None, derandomize=True, max_examples=30)
    @given(goal=layouts((1, 2, 4)))
    def reads(goal: EpRanks) -> None:
        check(tmp_path, goal, torch.float32)

    reads()


# Engines.


@pytest.mark.slow
def test_an_engine_goes_on_from_format_2(tmp_path: Path) -> None:
    checkpoint = saved(2, Job("gpt_moe", 1))
    shutil.copytree(checkpoint.folder, tmp_path, dirs_exist_ok=True)
    as_of_format(2, tmp_path / checkpoint.tag.name)
    got = loaded(
        4, Job("gpt_moe", 2, ep_ranks=2), Saved(tmp_path, checkpoint.ranks), Call(before=1)
    )
    assert_equal(joined(got), joined(checkpoint.ranks))


def without_frozen(
    rank: int, world_size: int, job: Job, folder: str
) -> tuple[str, list[Held], list[str]]:
    """Why a checkpoint without frozen weights is refused; what an engine held when it wrote one and
    when it had gone on, trained and read it; and the names in it."""
    build = jobs.model_of
    with mock.patch.object(jobs, "model_of", lambda job: freeze(build(job))):
        engine = jobs.engine_of(job, world_size)
    run_steps(rank, world_size, engine, range(1))
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    held = [held_by(engine)]
    with pytest.raises(ValueError) as refused:
        engine.load_checkpoint(folder)
    run_steps(rank, world_size, engine, range(1, 2))
    engine.load_checkpoint(folder, load_module_strict=False)
    names = dcp_folder.contents(Path(folder) / "global_step1/ds_moe_ext").shapes
    return str(refused.value), [*held, held_by(engine)], list(names)


@pytest.mark.parametrize("layout", [slow(ep(2, 1)), esp(2, 1, 1, 2)], ids=str)
def test_frozen_experts_may_be_left_out(layout: Layout, tmp_path: Path) -> None:
    ranks = pool_of(2).run(without_frozen, layout.job, str(tmp_path))
    for message, _, names in ranks:
        assert re.search(r"has no model\.layers\.0\.mlp\.experts\.down_proj\.0", message)
        assert any(".gate_up_proj." in name for name in names)
        assert not any(".down_proj." in name for name in names)
    before, after = (joined(held[i] for _, held, _ in ranks) for i in range(2))
    assert_equal(after, before)


@pytest.mark.slow  # whole ones do above
def test_an_engine_of_split_experts_goes_on_from_format_2(tmp_path: Path) -> None:
    checkpoint = saved(2, ep(2, 1).job)
    shutil.copytree(checkpoint.folder, tmp_path, dirs_exist_ok=True)
    as_of_format(2, tmp_path / checkpoint.tag.name)
    got = loaded(4, esp(4, 2, 1, 2).job, Saved(tmp_path, checkpoint.ranks), Call(before=1))
    assert_equal(joined(got), joined(checkpoint.ranks))
