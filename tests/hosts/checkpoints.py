# SPDX-License-Identifier: Apache-2.0
"""What an engine holds, saved and loaded by runs of any layout.

Jobs save and load a checkpoint by the engine's own calls; what they hold is compared by names that
say nothing of ranks or slots.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.hosts.deepspeed import dcp_folder, zero_3
from ds_moe_ext.hosts.deepspeed.dcp_folder import Region
from ds_moe_ext.hosts.deepspeed.layout_file import FOLDER, LAYOUT_FILE, SAVE
from ds_moe_ext.hosts.deepspeed.parameter_groups import OptimizerStates
from ds_moe_ext.hosts.steps.expert_moves import MASTER
from ds_moe_ext.hosts.steps.training_run import run_of
from tests.hosts import jobs
from tests.hosts.jobs import Job, loss_of, micro_batch
from tests.hosts.test_regions import in_whole
from tests.hosts.zebra_runs import zebra
from tests.ranks import pool_of

WEIGHT = "weight"
Key = tuple[str, str]  # of a parameter, and what of it

REPLICAS = (("overlap_degree", 2), ("replicas_per_rank", 2))
OFTEN = (("reshard_interval", 1), ("resharding", "paper"))
MOVING = Job(strategy="fssdp", keys=(*REPLICAS, *OFTEN))
"""Plans by rows alone in its first five steps, so that two runs plan alike."""


class Piece(NamedTuple):
    """What one rank has of something: elements of its region; a scalar has none."""

    tensor: Tensor
    start: int
    region: Region | None


class Held(NamedTuple):
    """What an engine has and does, of one rank."""

    pieces: dict[Key, Piece]
    owners: list[list[int]]
    slots: dict[str, str]  # of each parameter of the model, its name when the engine was made
    remembered: int  # steps
    steps: int
    loss: float  # of a pass, the same on all ranks
    losses: list[float]  # of the steps that follow


def regions_of(engine: Any) -> dict[nn.Parameter, tuple[str, Region]]:
    """Of each parameter its name and what this rank has of it."""
    named = {p: (name, Region.all_of(p.shape)) for name, p in engine.module.named_parameters()}
    for layer in run_of(engine).layers:
        layer_context = layer.routed.layer_context
        numbers = layer_context.plan.owner.experts_of(layer_context.layout.index("ep"))
        for number, slot in zip(numbers, layer.hosted.slots(), strict=True):
            weights = zip(layer.hosted.weight_names, slot.parameters)
            for index, (weight, parameter) in enumerate(weights):
                region = Region.of_shard(layer.hosted.shard, index, parameter.shape)
                named[parameter] = f"{layer.name}.{weight}.{number}", region
            for stack in slot.stacks:
                named.pop(stack, None)
    return named


def names_of(engine: Any) -> dict[nn.Parameter, str]:
    return {parameter: name for parameter, (name, _) in regions_of(engine).items()}


def pieces_of(engine: Any) -> dict[Key, Piece]:
    with zero_3.whole(engine.module.parameters()):
        return _pieces_of(engine)


def _pieces_of(engine: Any) -> dict[Key, Piece]:
    states, pieces = OptimizerStates(engine), {}
    for parameter, (name, region) in regions_of(engine).items():
        own = states.of(parameter).clone()
        pieces[name, WEIGHT] = Piece(parameter.detach().clone().reshape(-1), 0, region)
        if own.start < own.stop:
            for kind, tensor in own.tensors.items():
                pieces[name, kind] = Piece(tensor, own.start, region)
            for kind, scalar in own.scalars.items():
                pieces[name, kind] = Piece(torch.as_tensor(scalar).double(), 0, None)
    return pieces


def joined(ranks: Iterable[Held]) -> dict[Key, Tensor]:
    """What all ranks hold together, whole."""
    found: dict[Key, list[Piece]] = {}
    for held in ranks:
        for key, piece in held.pieces.items():
            found.setdefault(key, []).append(piece)
    return {key: join(pieces) for key, pieces in found.items()}


def join(pieces: list[Piece]) -> Tensor:
    """Pieces that tile a tensor; those of several ranks are equal where they overlap."""
    first = pieces[0]
    if first.region is None:
        assert all(torch.equal(piece.tensor, first.tensor) for piece in pieces)
        return first.tensor
    tensor = torch.full(first.region.shape, torch.nan, dtype=first.tensor.dtype)
    parts = [piece.region.part(piece.tensor, piece.start) for piece in pieces if piece.region]
    boxes = [box for part in parts for box in part.boxes]
    for box in boxes:
        in_whole(tensor, box).copy_(box.tensor)
    for box in boxes:
        assert torch.equal(in_whole(tensor, box), box.tensor)
    assert not tensor.isnan().any()
    return tensor


def assert_equal(got: dict[Key, Tensor], expected: dict[Key, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for key, tensor in got.items():
        assert torch.equal(tensor, expected[key]), key


def run_steps(rank: int, world_size: int, engine: Any, steps: Iterable[int]) -> list[float]:
    losses = []
    for step in steps:
        total = torch.zeros((), dtype=torch.float64)
        for number in range(rank, jobs.MICRO_BATCHES, world_size):
            loss = loss_of(engine, micro_batch(step, number))
            engine.backward(loss)
            engine.step()
            total += loss.detach().double()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses


def held_by(engine: Any) -> Held:
    planning = run_of(engine).planning
    return Held(
        pieces=pieces_of(engine),
        owners=[owner.owner_E.tolist() for owner in planning.job.owners],
        slots={
            name: engine.param_names[p]
            for p, name in names_of(engine).items()
            if p in engine.param_names
        },
        remembered=len(planning.remembered_ILCE),
        steps=engine.global_steps,
        loss=float(loss_of(engine, micro_batch(99, 0)).detach()),
        losses=[],
    )


@dataclass(frozen=True)
class Call:
    """One run that loads."""

    before: int = 0
    after: int = 0
    arguments: tuple[tuple[str, Any], ...] = ()


def save(rank: int, world_size: int, job: Job, folder: str, *, steps: int) -> Held:
    engine = jobs.engine_of(job, world_size)
    run_steps(rank, world_size, engine, range(steps))
    engine.save_checkpoint(folder, client_state={"mine": 7})
    held = held_by(engine)
    losses = run_steps(rank, world_size, engine, range(steps, steps + 2))
    return held._replace(losses=losses)


def load(rank: int, world_size: int, job: Job, folder: str, call: Call) -> Held:
    engine = jobs.engine_of(job, world_size)
    run_steps(rank, world_size, engine, range(50, 50 + call.before))
    loss_of(engine, micro_batch(98, rank))  # so that there are replicas of the weights that go
    path, client = engine.load_checkpoint(folder, **dict(call.arguments))
    assert path is not None and client["mine"] == 7 and "optimizer" not in client
    held = held_by(engine)
    losses = run_steps(rank, world_size, engine, range(held.steps, held.steps + call.after))
    return held._replace(losses=losses)


class Saved(NamedTuple):
    """A checkpoint, and what it was made from."""

    folder: Path
    ranks: list[Held]

    @property
    def tag(self) -> Path:
        return self.folder / f"global_step{self.ranks[0].steps}"


@functools.cache
def saved(world_size: int, job: Job, steps: int = 2) -> Saved:
    folder = tempfile.mkdtemp(prefix="ds_moe_ext_test_")
    _FOLDERS.append(folder)
    return Saved(Path(folder), pool_of(world_size).run(save, job, folder, steps=steps))


_FOLDERS: list[str] = []


def remove_saved() -> None:
    """Of this module's tests."""
    saved.cache_clear()
    while _FOLDERS:
        shutil.rmtree(_FOLDERS.pop())


def loaded(world_size: int, job: Job, checkpoint: Saved, call: Call | None = None) -> list[Held]:
    held: list[Held] = pool_of(world_size).run(load, job, str(checkpoint.folder), call or Call())
    return held


@dataclass(frozen=True)
class Layout:
    """A run of some ranks."""

    world_size: int
    job: Job

    def __str__(self) -> str:
        job = self.job
        ep_ranks = "" if job.ep_ranks is None else f"-{job.ep_ranks}ep_ranks"
        size = "" if job.etp_size is None else f"-of{job.etp_size}"
        strategy = job.strategy if job.balance is None else f"{job.strategy}-{job.balance}"
        return f"{job.family}-{strategy}-{self.world_size}ranks{ep_ranks}{size}-zero{job.stage}"


def ep(world_size: int, stage: int, ep_ranks: int | None = None) -> Layout:
    return Layout(world_size, Job(stage=stage, ep_ranks=ep_ranks))


def fssdp(world_size: int, stage: int) -> Layout:
    return Layout(world_size, replace(MOVING, stage=stage))


def prophet(world_size: int, stage: int) -> Layout:
    return Layout(world_size, Job(strategy="prophet", stage=stage))


def esp(world_size: int, stage: int, ep_ranks: int, etp_size: int) -> Layout:
    """Experts split in EP ranks of so many ranks."""
    job = Job(strategy="esp", stage=stage, ep_ranks=ep_ranks, etp_size=etp_size)
    return Layout(world_size, replace(job, keys=(("degree", 2),)))


def moving(stage: int) -> Layout:
    """Two EP ranks of two ranks; experts change EP ranks after every step."""
    layout = esp(4, stage, 2, 2)
    return replace(layout, job=replace(layout.job, balance="fssdp", balance_keys=MOVING.keys))


def striped(world_size: int, stage: int, *sizes: int, **keys: Any) -> Layout:
    """Of ZP groups of so many attention and expert ranks."""
    return Layout(world_size, zebra(Job(stage=stage), *sizes, num_micro_batches=1, **keys))


LAST = {"attention_ep_ranks": [1]}  # of two ranks the first has experts only
MOVED = striped(2, 1, moved=[0, 1])


def of(layout: Layout, family: str, dtype: str, **fields: Any) -> Layout:
    return replace(layout, job=replace(layout.job, family=family, dtype=dtype, **fields))


def check_cross(family: str, dtype: str, source: Layout, goal: Layout) -> None:
    """Into a run that has trained on other data."""
    source, goal = (of(each, family, dtype) for each in (source, goal))
    checkpoint = saved(source.world_size, source.job)
    ranks = loaded(goal.world_size, goal.job, checkpoint, Call(before=1, after=1))
    assert {held.steps for held in ranks} == {2}
    assert_equal(joined(ranks), joined(checkpoint.ranks))
    rel = 2e-2 if dtype == "bfloat16" else 1e-4
    assert ranks[0].loss == pytest.approx(checkpoint.ranks[0].loss, rel=rel)
    assert ranks[0].losses == pytest.approx(checkpoint.ranks[0].losses[:1], rel=rel)


def joined_master(contents: dict[Key, Tensor], key: Key) -> Tensor:
    return contents[key[0], MASTER].to(contents[key].dtype)


def freeze(model: nn.Module) -> nn.Module:
    """Experts' second weights, a router and an embedding."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("down_proj", "layers.0.mlp.gate", "embed_tokens")):
            parameter.requires_grad_(False)
    return model


def with_frozen(rank: int, world_size: int, job: Job, folder: str, saves: bool) -> Held:
    build = jobs.model_of
    with mock.patch.object(jobs, "model_of", lambda job: freeze(build(job))):
        if saves:
            return save(rank, world_size, job, folder, steps=2)
        engine = jobs.engine_of(job, world_size)
    for parameter in engine.module.parameters():
        parameter.data.zero_()
    engine.load_checkpoint(folder)
    return held_by(engine)


def refused(
    rank: int, world_size: int, job: Job, folders: list[str], *, width: int = 48, fails: str = ""
) -> list[str]:
    """The message for each folder; the engine is as it was."""
    from transformers import MixtralConfig

    def wide(**keys: Any) -> Any:
        return MixtralConfig(**{**keys, "intermediate_size": width})

    with mock.patch("transformers.MixtralConfig", wide):
        engine = jobs.engine_of(job, world_size)
    run_steps(rank, world_size, engine, range(1))
    before, messages = held_by(engine), []
    reads = mock.Mock(side_effect=OSError(fails)) if fails and rank == 1 else dcp_folder.load
    for folder in folders:
        with mock.patch.object(dcp_folder, "load", reads), pytest.raises(ValueError) as caught:
            engine.load_checkpoint(folder)
        messages.append(str(caught.value))
        after = held_by(engine)
        assert after[1:] == before[1:]
        assert_equal(
            {key: piece.tensor for key, piece in after.pieces.items()},
            {key: piece.tensor for key, piece in before.pieces.items()},
        )
    run_steps(rank, world_size, engine, range(1, 2))
    return messages


def assert_all_raise(messages: Iterable[str], pattern: str) -> None:
    for message in messages:
        assert re.search(pattern, message), message


# Changed by hand, or as they were.


def edit_layout(**changes: Any) -> Callable[[Path], None]:
    """As a person changes it, who then has to give its checksums up."""

    def change(tag: Path) -> None:
        path = tag / LAYOUT_FILE
        document = json.loads(path.read_text())
        path.write_text(json.dumps({**document, "crc32": None, "files": None, **changes}))

    return change


def edit_module(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Likewise DeepSpeed's file."""

    def edit(tag: Path) -> None:
        path = tag / "mp_rank_00_model_states.pt"
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)
        edit_layout()(tag)

    return edit


def as_of_format(number: int, tag: Path) -> None:
    """Write a checkpoint anew as format 2 or 3 had it: no id, no checksums, in 2 experts flat."""
    folder = tag / FOLDER
    contents = dcp_folder.contents(folder)
    tensors = {name: torch.empty(shape) for name, shape in contents.shapes.items()}
    parts = {name: Region.all_of(t.shape).part(t.view(-1), 0) for name, t in tensors.items()}
    objects = dcp_folder.load(folder, parts, contents.objects - {SAVE})
    if number == 2:
        flats = {name: tensor.view(-1) for name, tensor in tensors.items()}
        parts = {name: Region.all_of(t.shape).part(t, 0) for name, t in flats.items()}
    shutil.rmtree(folder)
    dcp_folder.save(folder, parts, objects)
    edit_module(lambda state: state.pop(SAVE))(tag)
    layout = json.loads((tag / LAYOUT_FILE).read_text())
    for key in ("crc32", "save", "files", *(("expert_sharding_size",) if number == 2 else ())):
        del layout[key]
    (tag / LAYOUT_FILE).write_text(json.dumps({**layout, "format": number}))
