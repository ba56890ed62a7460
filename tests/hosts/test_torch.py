# SPDX-License-Identifier: Apache-2.0
"""A training loop of a user's own, in plain PyTorch, learns what one rank without us does.

All in float64. Every job sees the same global batch, whatever the number of ranks.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ds_moe_ext
from ds_moe_ext.testing import relative_error
from tests.hosts import jobs
from tests.hosts.processes import ROOT, run_script
from tests.marks import slow
from tests.ranks import pool_of, preload

preload("transformers")

MICRO_BATCHES = 4  # a step, over all ranks
MOVING = {
    "fssdp": {
        **{"overlap_degree": 2, "replicas_per_rank": 2},
        **{"reshard_interval": 2, "resharding": "paper"},
    }
}
STAYING = {"fssdp": {"replicas_per_rank": 2, "reshard_interval": 0}}


@dataclass(frozen=True)
class Loop:
    """A training loop."""

    family: str = "toy"
    wrap: str = ""
    is_ours: bool = True
    block: Mapping[str, Any] | None = None
    steps: int = 5
    fused: bool = False
    folder: str = ""
    save_at: int | None = None
    load_at: int = 0


class Learnt(NamedTuple):
    """Losses and norms of each step, and all weights of this rank at the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def train(rank: int, world_size: int, loop: Loop) -> Learnt:
    with jobs.float64_everywhere():
        return _train(rank, world_size, loop)


def _train(rank: int, world_size: int, loop: Loop) -> Learnt:
    torch.manual_seed(rank)  # of dense weights and experts rank 0's are meant
    model = jobs.model_of(jobs.Job(loop.family, dtype="float64")).double()
    if loop.wrap != "ddp":
        torch.manual_seed(0)
        model = jobs.model_of(jobs.Job(loop.family, dtype="float64")).double()
    block = {"enabled": loop.is_ours, "report": {"enabled": False}, "debug": True}
    accumulated = MICRO_BATCHES // world_size
    moe = ds_moe_ext.attach(model, {**block, **(loop.block or {})}, micro_batches=accumulated)
    wrapped = _wrapped(model, moe, loop.wrap)
    optimizer = _optimizer(model, moe, fused=loop.fused)
    moe.watch(optimizer)
    if loop.load_at:
        state = moe.state_dict()
        checkpoint.load(state, checkpoint_id=loop.folder)
        moe.load_state_dict(state)
    losses, norms = [], []
    for step in range(loop.load_at, loop.steps):
        if step == loop.save_at:
            checkpoint.save(moe.state_dict(), checkpoint_id=loop.folder)
        loss = torch.zeros((), dtype=torch.float64)
        own = range(rank, MICRO_BATCHES, world_size)
        for number in own:
            with ExitStack() as stack:
                if number != own[-1]:
                    stack.enter_context(moe.no_sync())
                    if loop.wrap == "ddp":
                        stack.enter_context(wrapped.no_sync())
                if loop.wrap == "fsdp":
                    wrapped.set_requires_gradient_sync(number == own[-1])
                ids = jobs.micro_batch(step, number)
                part = wrapped(input_ids=ids, labels=ids).loss / accumulated
                part.backward()
                loss += part.detach() / world_size
        dist.all_reduce(loss)
        losses.append(float(loss))
        norms.append(float(moe.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return Learnt(losses, norms, _weights(moe.state_dict()["model"]))


def _wrapped(model: nn.Module, moe: Any, wrap: str) -> Any:
    if wrap == "ddp":
        return DistributedDataParallel(model)
    if wrap == "fsdp":
        for name, module in [*model.named_modules()]:
            if re.fullmatch(r"(model\.layers|blocks)\.\d+", name):
                fully_shard(module, ignored_params=moe.expert_parameters)
        fully_shard(model, ignored_params=moe.expert_parameters)
    return model


def _optimizer(model: nn.Module, moe: Any, *, fused: bool) -> torch.optim.Optimizer:
    if not fused:
        return torch.optim.AdamW(model.parameters(), lr=3e-3)
    experts = moe.expert_parameters
    dense = [parameter for parameter in model.parameters() if parameter not in experts]
    groups = [{"params": dense}, {"params": [*experts], "weight_decay": 0.01}]
    return torch.optim.AdamW(groups, lr=3e-3, fused=True)


def _weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors; of experts one each."""
    whole = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in state.items()
    }
    stacked = [name for name in whole if re.search(r"\.experts\.\w+$", name)]
    for name in stacked:  # of a run without us
        whole.update({f"{name}.{i}": each for i, each in enumerate(whole.pop(name))})
    return whole


@functools.cache
def dense(family: str, steps: int) -> Learnt:
    """One rank without us."""
    learnt: Learnt = pool_of(1).run(train, Loop(family, is_ours=False, steps=steps))[0]
    return learnt


def assert_equal(ranks: list[Learnt], family: str, steps: int, first: int = 0) -> None:
    wanted = dense(family, steps)
    assert len({*wanted.losses}) == steps and min(wanted.norms) > 0
    weights: dict[str, Tensor] = {}
    for learnt in ranks:
        assert learnt.losses == pytest.approx(wanted.losses[first:], rel=1e-12)
        assert learnt.norms == pytest.approx(wanted.norms[first:], rel=1e-10)
        weights.update(learnt.weights)
    assert weights.keys() == wanted.weights.keys()
    errors = {n: relative_error(weights[n], wanted.weights[n]) for n in weights}
    assert max(errors.values()) <= 1e-9, max(errors, key=lambda name: errors[name])


@pytest.mark.parametrize("world_size", [slow(1), slow(2), 4])
@pytest.mark.parametrize("wrap", [slow("ddp"), "fsdp"])
@pytest.mark.parametrize(
    "block",
    [
        {"strategy": "ep"},
        slow({"strategy": "fssdp", **MOVING}),
        slow({"strategy": "esp", "esp": {"degree": 2}}),
        slow({"strategy": "prophet"}),
    ],
    ids=lambda block: block["strategy"],
)
def test_learns_what_one_rank_does(block: dict[str, Any], wrap: str, world_size: int) -> None:
    ranks = pool_of(world_size).run(train, Loop(wrap=wrap, block=block))
    assert_equal(ranks, "toy", 5)


@pytest.mark.parametrize(
    ("wrap", "strategy"),
    [("fsdp", "fssdp"), slow("ddp", "ep"), slow("ddp", "fssdp"), slow("fsdp", "ep")],
)
def test_a_model_of_hugging_face(wrap: str, strategy: str) -> None:
    loop = Loop("mixtral", wrap, block={"strategy": strategy, **MOVING})
    assert_equal(pool_of(2).run(train, loop), "mixtral", 5)


@pytest.mark.slow  # every rank owns all in tests of ep_ranks
@pytest.mark.parametrize("block", [slow({"strategy": "ep"}), {"strategy": "fssdp", **STAYING}])
@pytest.mark.parametrize("family", [slow("toy"), "toy, shared experts"])
def test_experts_with_several_owners(family: str, block: dict[str, Any]) -> None:
    """Two ranks own each expert, whose gradients they sum."""
    loop = Loop(family, "ddp", block={**block, "expert_parallel_size": 2})
    assert_equal(pool_of(4).run(train, loop), family, 5)


def by_closures(rank: int, world_size: int, ep_ranks: int) -> dict[str, Tensor]:
    """The weights where the optimizer's step calls the passes, as Lightning has it."""
    with jobs.float64_everywhere():
        model = jobs.model_of(jobs.Job("toy", dtype="float64")).double()
        block = {"enabled": True, "strategy": "ep", "expert_parallel_size": ep_ranks}
        moe = ds_moe_ext.attach(model, {**block, "report": {"enabled": False}})
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        moe.watch(optimizer)
        for step in range(4):
            ids = jobs.micro_batch(step, rank)

            def closure(ids: Tensor = ids) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = wrapped(input_ids=ids, labels=ids).loss
                loss.backward()
                return loss

            loss = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
            assert loss is not None and loss > 0
        return _weights(ds_moe_ext.full_state_dict(model))


def test_a_closure_is_averaged_over_owners() -> None:
    one_owner, two_owners = (pool_of(2).run(by_closures, ep_ranks) for ep_ranks in (2, 1))
    for each in two_owners:
        assert max(relative_error(each[n], w) for n, w in one_owner[0].items()) < 1e-12


@pytest.mark.slow  # test_defaults.py has esp in such a loop
def test_experts_in_parts() -> None:
    block = {"strategy": "esp", "expert_sharding_size": 2}
    ranks = pool_of(4).run(train, Loop(wrap="fsdp", block=block))
    assert_equal(ranks, "toy", 5)


@pytest.mark.slow  # those that go on elsewhere are fused
def test_a_fused_optimizer_has_a_group_of_experts() -> None:
    loop = Loop(wrap="fsdp", block={"strategy": "fssdp", **MOVING}, fused=True)
    assert_equal(pool_of(2).run(train, loop), "toy", 5)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ((4, "fsdp", "fssdp"), (2, "ddp", "ep")),
        slow((2, "ddp", "ep"), (4, "fsdp", "fssdp")),
        slow((2, "fsdp", "fssdp"), (1, "ddp", "ep")),
        slow((4, "ddp", "fssdp"), (4, "ddp", "fssdp")),
    ],
)
@pytest.mark.parametrize("fused", [slow(False), True])
def test_goes_on_elsewhere(saved: Any, resumed: Any, fused: bool, tmp_path: Path) -> None:
    """With other ranks, another wrapper and another strategy: experts have moved when they are
    saved, and take the optimizer's states along."""
    folder = str(tmp_path / "checkpoint")

    def loop(wrap: str, strategy: str) -> Loop:
        block = {"strategy": strategy, **MOVING}
        return Loop(wrap=wrap, block=block, fused=fused, folder=folder)

    pool_of(saved[0]).run(train, replace(loop(*saved[1:]), steps=4, save_at=3))
    ranks = pool_of(resumed[0]).run(train, replace(loop(*resumed[1:]), load_at=3))
    assert_equal(ranks, "toy", 5, first=3)


# What a user is notified.


def reported(rank: int, world_size: int) -> dict[str, str]:
    """By what was done wrong, the error."""
    block = {"enabled": True, "report": {"enabled": False}}
    model = jobs.model_of(jobs.Job("toy"))
    found = {}

    def tried(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)

    def attach(model: nn.Module, **more: Any) -> Any:
        return ds_moe_ext.attach(model, {**block, **more})

    sizes = {"attention_size": 1, "expert_size": 1}
    tried("roles", lambda: attach(model, strategy="zebra", zebra=sizes))
    tried("wrapped", lambda: attach(DistributedDataParallel(jobs.model_of(jobs.Job("toy")))))
    tried("key", lambda: attach(model, stratgy="ep"))
    tried("file", lambda: ds_moe_ext.attach(model, "missing.json"))
    unusual: Any = ds_moe_ext.attach  # as users call it who read no types
    for given in (0, -3, "2", True):
        number = functools.partial(unusual, model, block, micro_batches=given)
        tried(f"micro_batches={given!r}", number)
    tried("no model", lambda: unusual("x", "fssdp"))
    tried("unlike", lambda: attach(model, strategy=("ep", "fssdp")[rank]))
    tried("off", lambda: attach(model, enabled=rank == 0))
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    moe = attach(model, expert_parallel_size=1)
    tried("no optimizer", lambda: moe.watch(None))
    ids = torch.zeros(1, 4, dtype=torch.int64)
    tried("unwatched", model(ids, ids).loss.backward)
    tried("early", lambda: moe.watch(early))
    moe.watch(torch.optim.SGD(model.parameters(), lr=0.1))
    model.zero_grad()
    model(ids, ids).loss.backward()
    moe.clip_grad_norm_(1.0)
    tried("behind", model(ids, ids).loss.backward)
    return found


def test_what_cannot_be_done_is_reported() -> None:
    expected = {
        "roles": "strategy is 'zebra': your own loop runs the same code on every rank; use",
        "wrapped": "call ds_moe_ext.attach first",
        "key": "did you mean 'strategy'",
        "file": "was given 'missing.json', which cannot be read as JSON",
        **{f"micro_batches={n!r}": f"micro_batches={n!r}; give" for n in (0, -3, "2", True)},
        "no model": "was given 'x' as the model; give a torch.nn.Module",
        "no optimizer": "given None, which is not a torch.optim.Optimizer; give",
        "unlike": 'ds_moe_ext.strategy is "ep" on rank 0 and "fssdp" on rank 1',
        "off": "give all ranks one configuration",
        "unwatched": "call watch(optimizer)",
        "early": "create it from model.parameters() after ds_moe_ext.attach",
        "behind": "clip after the last backward pass",
    }
    first, second = pool_of(2).run(reported)
    assert first.keys() == expected.keys()
    assert expected.keys() - second.keys() <= {
        "off"
    }  # it waits for nobody, and may be gone by then
    for found in (first, second):
        assert all(expected[name] in text for name, text in found.items()), found


def left_out(rank: int, world_size: int, to_none: bool) -> float:
    """How far weights are from those of a loop that has never seen a batch whose step was left out
    behind clipping, where two ranks own each expert."""
    block = {"enabled": True, "report": {"enabled": False}, "expert_parallel_size": 1}
    found = []
    with jobs.float64_everywhere():
        for leaves_out in (False, True):
            torch.manual_seed(0)
            model = jobs.model_of(jobs.Job("toy", dtype="float64")).double()
            moe = ds_moe_ext.attach(model, block)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            moe.watch(optimizer)
            for number in range(0 if leaves_out else 1, 2):
                ids = jobs.micro_batch(number, rank)
                model(ids, ids).loss.backward()
                moe.clip_grad_norm_(0.5)
                if number == 0:
                    optimizer.zero_grad(set_to_none=to_none)
            optimizer.step()
            found.append([p.detach() for p in moe.experts.parameters])
    return max(relative_error(ours, theirs) for theirs, ours in zip(*found, strict=True))


@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_may_be_left_out_behind_clipping(to_none: bool) -> None:
    assert max(pool_of(2).run(left_out, to_none)) <= 1e-12


def test_what_was_seen(tmp_path: Path) -> None:
    (recorded,) = pool_of(1).run(seen, str(tmp_path))
    assert recorded == 2


def seen(rank: int, world_size: int, folder: str) -> int:
    """Steps that were recorded, of a block in a file."""
    path = Path(folder) / "block.json"
    path.write_text('{"ds_moe_ext": {"enabled": true, "report": {"enabled": false}}}')
    model = jobs.model_of(jobs.Job("toy"))
    moe = ds_moe_ext.attach(model, path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moe.watch(optimizer)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    for _ in range(2):
        model(ids, ids).loss.backward()
        optimizer.step()
    with ds_moe_ext.joined(moe):
        model(ids, ids)
    return len(ds_moe_ext.recorder_of(moe).record().steps_I)


@pytest.mark.slow
def test_the_script_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    script = ROOT / "launch/pretrain_torch.py"
    common = ("--model", str(ROOT / "configs/models/mixtral_tiny.json"), "--sequence_length", "16")
    common += ("--config", str(ROOT / "configs/strategies/fssdp.json"))
    common += ("--data", str(ROOT / "README.md"))
    folder = str(tmp_path / "checkpoint")
    runs = (
        (*common, "--steps", "3"),
        (*common, "--steps", "2", "--save", folder),
        (*common, "--steps", "3", "--resume", folder, "--shard"),
    )
    several = ROOT / "tests/hosts/script_runs.py"
    printed, _ = run_script(several, str(script), json.dumps(runs), world_size=2)
    whole, resumed = re.findall(r"step 3: loss ([\d.]+)", printed)
    assert float(whole) == pytest.approx(float(resumed), abs=2e-4)
