# SPDX-License-Identifier: Apache-2.0
"""Ranks that cannot start together: all of them raise, within seconds, and say the same."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from ds_moe_ext.core import compiled, row_levels
from ds_moe_ext.hosts.attachment import startup_check
from ds_moe_ext.hosts.attachment.startup_check import Start
from ds_moe_ext.strategies.settings import read_settings
from tests.hosts.jobs import Job, document_of, model_of
from tests.hosts.megatron_jobs import train
from tests.hosts.megatron_toy import MegatronRun
from tests.hosts.processes import run_script
from tests.ranks import pool_of

JOB = Job("mixtral", num_layers=1)
SOON_S = 30.0  # far below the pool's time-out, far above what any of this takes


def fssdp(**keys: Any) -> Job:
    return replace(JOB, strategy="fssdp", keys=tuple(keys.items()))


ZEBRA = replace(
    JOB, strategy="zebra", keys=(("attention_size", 1), ("expert_size", 1)), micro_batches=2
)

UNLIKE: Mapping[str, tuple[Job, Job, str]] = {
    "strategy": (JOB, fssdp(), 'ds_moe_ext.strategy is "ep" on rank 0 and "fssdp" on rank 1'),
    "replicas": (
        fssdp(replicas_per_rank=1),
        fssdp(replicas_per_rank=2),
        "ds_moe_ext.fssdp.replicas_per_rank is 1 on rank 0 and 2 on rank 1",
    ),
    "owners": (
        fssdp(reshard_interval=2),
        fssdp(),
        "ds_moe_ext.fssdp.reshard_interval is 2 on rank 0 and null on rank 1",
    ),
    "roles": (ZEBRA, JOB, 'ds_moe_ext.strategy is "zebra" on rank 0 and "ep" on rank 1'),
    "roles of others": (JOB, ZEBRA, 'ds_moe_ext.strategy is "ep" on rank 0 and "zebra" on rank 1'),
    "gate": (
        JOB,
        replace(JOB, gate=(("type", "softmax_top_k"),)),
        'ds_moe_ext.gate is null on rank 0 and {"type": "softmax_top_k"} on rank 1',
    ),
    "layers": (
        JOB,
        replace(JOB, num_layers=2),
        "model.layers.1.mlp.experts is absent on rank 0 and 4 experts",
    ),
    "experts": (
        JOB,
        replace(JOB, num_experts=8),
        "model.layers.0.mlp.experts is 4 experts",
    ),
    "type of the gate": (
        JOB,
        replace(JOB, dtype="half a model"),
        "the weight model.layers.0.mlp.gate.weight is float32 [4, 32] on rank 0 and bfloat16 "
        "[4, 32] on rank 1",
    ),
    "absent": (replace(JOB, block=False), JOB, "ds_moe_ext is enabled on "),
    "absent elsewhere": (JOB, replace(JOB, block=False), "absent on rank 1; give all ranks one"),
}


def logged_at_start(rank: int, job: Job, world_size: int) -> str:
    """What ends this rank's ``deepspeed.initialize``; empty if nothing does."""
    import deepspeed

    model = model_of(job)
    if job.dtype == "half a model":
        model.get_submodule("model.layers.0.mlp.gate").bfloat16()
    if not job.block:
        time.sleep(0.5)  # the rank that comes first is not reported: it goes on, as it was asked to
    try:
        deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=document_of(job, world_size),
        )
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def unlike_starts(rank: int, world_size: int) -> dict[str, tuple[str, float]]:
    """Of each case what was stated, and after how many seconds."""
    found = {}
    for name, (first, second, _) in UNLIKE.items():
        began_s = time.monotonic()
        found[name] = logged_at_start(rank, (first, second)[rank], world_size), began_s
        found[name] = found[name][0], time.monotonic() - began_s
    return found


def test_ranks_that_differ() -> None:
    results = pool_of(2).run(unlike_starts)
    for name, (_, _, expected) in UNLIKE.items():
        (first, first_s), (second, second_s) = (rank[name] for rank in results)
        assert expected in first and expected in second, (name, first, second)
        assert first.startswith("Disagreement: ") and "\n" not in first
        assert first == second or "absent" in name
        assert max(first_s, second_s) < SOON_S


def test_what_may_differ_is_not_compared(tmp_path: Path) -> None:
    def reported(**block: Any) -> Mapping[str, str]:
        document = {"ds_moe_ext": {"enabled": True, "strategy": "esp", **block}}
        return startup_check.settings_of(read_settings(document)[0], document["ds_moe_ext"])

    plain = reported()
    assert reported(report={"path": "a", "enabled": False, "max_steps": 9}) == plain
    assert reported(trace={"first_step": 1}, options={}, gate=None, esp={}) == plain
    assert (
        reported(trace={"path": "a"}) == reported(trace={"path": "b"}) != plain
    )  # all ranks send tasks
    assert reported(trace={"path": "a", "first_step": 1}) != reported(trace={"path": "a"})
    assert reported(fssdp={"window": 2}) == plain  # of a strategy that is not asked for
    assert reported(report={"trace_step": 7}) != plain
    assert reported(balance="fssdp", fssdp={"window": 2}) != reported(balance="fssdp")
    (measured,) = list(Path("configs/hardware").glob("*.json"))[:1]
    (tmp_path / "other.json").write_bytes(measured.read_bytes())
    assert (
        reported(hardware=str(measured)) == reported(hardware=str(tmp_path / "other.json")) != plain
    )


# One rank fails.


FAILURES = {
    "drawing": ("ds_moe_ext.hosts.deepspeed.startup.draw", ValueError("no such layer")),
    "building": (
        "ds_moe_ext.hosts.attachment.replacement._adopted",
        torch.OutOfMemoryError("out of memory"),
    ),
    "checking the way": (
        "ds_moe_ext.hosts.attachment.replacement._check_way",
        ValueError("no such way"),
    ),
    "planning": ("ds_moe_ext.hosts.steps.host.Costs", KeyError("pool")),
    "the engine": ("deepspeed.DeepSpeedEngine._configure_python_gc", OSError("disk is full")),
}


def failing_starts(rank: int, world_size: int) -> dict[str, tuple[str, float]]:
    """With what each failure of rank 1 ends this rank's start, and after how many seconds."""
    found = {}
    for name, (target, error) in FAILURES.items():
        began_s = time.monotonic()
        with ExitStack() as stack:
            if rank == 1:
                stack.enter_context(mock.patch(target, side_effect=error))
            try:
                text = logged_at_start(rank, JOB, world_size)
            except (KeyError, OSError) as own:
                text = f"{type(own).__name__}: {own}"
        found[name] = text, time.monotonic() - began_s
    return found


def test_a_rank_that_fails_ends_the_start_of_all() -> None:
    first, second = pool_of(2).run(failing_starts)
    for name, (_, error) in FAILURES.items():
        (reported, seconds), (own, _) = first[name], second[name]
        assert own == f"{type(error).__name__}: {error}"
        assert "rank 1" in reported and str(error) in reported and "\n" not in reported, (
            name,
            reported,
        )
        assert reported.startswith(
            "ValueError" if isinstance(error, ValueError) else "RuntimeError"
        )
        assert seconds < SOON_S


def without_a_compiler(rank: int, world_size: int) -> str:
    """What ends a start where rank 1 cannot compile what its share would use."""
    lacks = mock.patch("ds_moe_ext.core.compiled.compiler", return_value=None)
    compiled.library.cache_clear()
    row_levels.is_compiled.cache_clear()
    try:
        with lacks if rank == 1 else nullcontext():
            reported = logged_at_start(rank, fssdp(share="priced"), world_size)
            assert row_levels.is_compiled() == (rank == 0)
    finally:
        compiled.library.cache_clear()
        row_levels.is_compiled.cache_clear()
    return reported


def test_a_rank_that_cannot_compile_starts_with_the_others() -> None:
    """It divides rows as they do, without the C code."""
    assert pool_of(2).run(without_a_compiler) == ["", ""]


REFUSING = """
import sys, torch.distributed as dist, deepspeed
from torch import nn
block = {"enabled": True, "strategy": "ep" if sys.argv[1:] == [] else sys.argv[1]}
import os
if os.environ["RANK"] == "1":
    block["stratgy"] = "ep"
from transformers import MixtralConfig, MixtralForCausalLM
model = MixtralForCausalLM(MixtralConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, num_local_experts=2))
try:
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1, "ds_moe_ext": block})
except ValueError as error:
    print(f"answer:{error}", flush=True)
"""


@pytest.mark.slow
def test_a_refusal_before_there_is_a_world(tmp_path: Path) -> None:
    """Rank 0, which found nothing wrong, makes the world, and then hears why rank 1 does not go
    on."""
    script = tmp_path / "refusing.py"
    script.write_text(REFUSING)
    printed = run_script(script, world_size=2)
    assert all("did you mean 'strategy'" in text for text in printed), printed
    assert "rank 1 cannot start" in printed[0]


# Megatron.


RUN = MegatronRun(steps=1, num_layers=1, experts="te_grouped")
REFUSED = (("recompute_granularity", "selective"), ("recompute_modules", ["moe_act"]))
BLOCK = {"enabled": True, "strategy": "ep", "report": {"enabled": False}}
BLOCK["megatron"] = {"layer": "program"}  # which refuses a flag
ROLES = {**BLOCK, "strategy": "zebra", "zebra": {"attention_size": 1, "expert_size": 1}}
FSSDP = {**BLOCK, "strategy": "fssdp"}


class Unlike(NamedTuple):
    """What rank 1 does otherwise than rank 0 under Megatron, and what both say."""

    expected: str
    block: dict[str, Any] = BLOCK
    run: MegatronRun = RUN


UNDER_MEGATRON = {
    "strategy": Unlike('strategy is "ep" on rank 0 and "fssdp" on rank 1', FSSDP),
    "roles": Unlike('strategy is "ep" on rank 0 and "zebra" on rank 1', ROLES),
    "off": Unlike("off on rank 1; give all ranks one", {**BLOCK, "enabled": False}),
    "layers": Unlike("layers.1.mlp is absent on rank 0 and 4 ex", run=replace(RUN, num_layers=2)),
    "flags": Unlike("--recompute-modules moe_act", run=replace(RUN, config=REFUSED)),
}


def unlike_under_megatron(rank: int, world_size: int) -> dict[str, tuple[str, float]]:
    """Of each case what was stated, and after how many seconds."""
    found = {}
    for name, unlike in UNDER_MEGATRON.items():
        began_s, reported = time.monotonic(), ""
        if rank == 1 and not unlike.block["enabled"]:
            time.sleep(0.5)  # who comes first is not reported
        run, settings = (unlike.run, unlike.block) if rank == 1 else (RUN, BLOCK)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a block that is not enabled
                train(rank, world_size, run, settings)
        except ValueError as error:
            reported = str(error)
        found[name] = reported, time.monotonic() - began_s
    return found


def test_ranks_that_differ_under_megatron() -> None:
    first, second = pool_of(2).run(unlike_under_megatron)
    for name, unlike in UNDER_MEGATRON.items():
        for reported, seconds in (first[name], second[name]):
            assert unlike.expected in reported and "\n" not in reported, (name, reported)
            assert seconds < SOON_S
    assert first["flags"][0].startswith("rank 1 cannot start, nor can the others: ds_moe_ext is")


# Ranks that do not come.


@contextmanager
def impatient() -> Iterator[None]:
    with mock.patch.object(startup_check, "PATIENCE_S", 0.5):
        yield


def wait_for_the_last(rank: int, world_size: int) -> list[str]:
    start = Start("a test")
    with start.together():
        pass
    with impatient(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with start.together():
            time.sleep(2.0 if rank == 2 else 0.0)
    return [str(warning.message) for warning in caught]


def test_a_person_is_reported_who_is_waited_for() -> None:
    results = [text for rank in pool_of(3).run(wait_for_the_last) for text in rank]
    assert len(results) == 1
    assert "waits in a test for rank 2; it will wait for 120 s" in results[0]


def wait_in_vain(rank: int, world_size: int) -> str:
    if rank == 1:
        return ""
    start = Start("a test")
    assert start.store is not None
    object.__setattr__(start.store, "timeout_s", 0.5)
    with impatient(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with start.together():
                pass
        except TimeoutError as error:
            return str(error)
    return ""


def test_nobody_waits_longer_than_the_world_does() -> None:
    results, nothing = pool_of(2).run(wait_in_vain)
    assert "for rank 1" in results and nothing == ""
    pool_of(2).close()  # its ranks have not counted one start alike


def stand_aside_first(rank: int, world_size: int) -> str:
    """Rank 1 is off, and does not wait; rank 0 comes later."""
    start = Start("a test")
    if rank == 1:
        start.stand_aside("off")
        return ""
    time.sleep(0.5)
    with mock.patch.object(startup_check, "FAREWELL_S", 0.1):  # rank 1 does not read why
        try:
            start.agree({"a": "1"})
        except ValueError as error:
            return str(error)
    return ""


def start_in_turns(rank: int, world_size: int) -> int:
    """Several starts, of which one is of nobody's."""
    num_good = 0
    for number in range(4):
        start = Start("a test")
        if number == 2:
            start.stand_aside("absent")
        else:
            start.agree({"a": str(number)})
            num_good += 1
    return num_good


def test_ranks_that_are_off_do_not_wait() -> None:
    results, nothing = pool_of(2).run(stand_aside_first)
    assert (
        results.startswith("ds_moe_ext is enabled on rank 0, but off on rank 1") and nothing == ""
    )
    assert pool_of(2).run(start_in_turns) == [3, 3]
