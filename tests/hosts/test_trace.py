# SPDX-License-Identifier: Apache-2.0
"""The Chrome trace of a run of several ranks, and the timeline of its report."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.schedule.task import HAVE_AGAIN, JOIN, START
from tests.hosts.copied_runs import varied
from tests.hosts.jobs import Job, document_of, loss_of, micro_batch, model_of
from tests.marks import slow
from tests.ranks import pool_of
from tests.trace_rules import assert_sound, of

STEPS = range(2, 4)
RANKS = 2
_ONLY_WAIT = {START.name, JOIN.name, HAVE_AGAIN.name}
NOT_OF_A_PROGRAM = {"attention", "gather", "reduction"}  # the host's; begun by tasks


class Left(NamedTuple):
    """By a run."""

    ranges: set[str]
    record: RunRecord


def left(
    rank: int, world_size: int, job: Job, path: Path, steps: range = range(STEPS.stop)
) -> Left:
    """Run a job whose steps are traced, and profiled, from the step on at which it was loaded."""
    import deepspeed

    from ds_moe_ext.hosts.steps.training_run import run_of

    model, document = model_of(job), document_of(job, world_size)
    asked = {"path": str(path), "first_step": STEPS.start, "num_steps": len(STEPS)}
    document["ds_moe_ext"] |= {
        "trace": asked,
        "report": {"enabled": False, "trace_step": STEPS.start},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=document
    )

    def run(steps: range) -> None:
        for _ in range(len(steps) * engine.gradient_accumulation_steps()):
            engine.backward(loss_of(engine, micro_batch(steps.start, rank)))
            engine.step()

    engine.global_steps = steps.start
    run(range(steps.start, STEPS.start))
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as found:
        run(range(STEPS.start, steps.stop))
    if steps.stop < STEPS.stop:
        run_of(engine).recorder.tracer.end()  # as the end of the process does
    ranges = {event.name for event in found.events() if event.name.startswith("layer ")}
    return Left(ranges, run_of(engine).recorder.record())


JOBS = {
    "ep": Job(micro_batches=2 * RANKS),
    "replicas": varied(Job(micro_batches=RANKS), layers=1.0, replicas=1.0),
}


class Traced(NamedTuple):
    """A run that went on to its end."""

    first: Left
    events: list[dict[str, Any]]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Traced]:
    """The run of one of the jobs, made once."""

    @functools.cache
    def run(name: str) -> Traced:
        path = tmp_path_factory.mktemp("traced") / "new/trace.json"
        first, _ = pool_of(RANKS).run(left, JOBS[name], path)
        return Traced(first, json.loads(path.read_text())["traceEvents"])

    return run


@pytest.mark.parametrize("name", [slow("ep"), "replicas"])
def test_all_ranks_are_in_one_trace(name: str, traced: Callable[[str], Traced]) -> None:
    job, (first, events) = JOBS[name], traced(name)
    assert_sound(events)
    names = {e["pid"]: e["args"]["name"] for e in of(events, "M") if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank} (EP rank {rank}, node 0)" for rank in range(RANKS)}
    tasks = of(events, "X")
    kinds = [[e["cat"] for e in tasks if e["pid"] == rank] for rank in range(RANKS)]
    assert set(kinds[0]) == set(kinds[1]) >= {"order", "dispatch", "expert", "combine", "restore"}
    if job == JOBS["replicas"]:
        assert set(kinds[0]) >= NOT_OF_A_PROGRAM
    # Profilers show the same names.
    labels = {e["name"] for e in tasks if e["cat"] not in NOT_OF_A_PROGRAM and e["pid"] == 0}
    assert labels <= first.ranges
    _assert_clocks_agree(tasks)
    _assert_counts(events, first.record, job)


@pytest.mark.slow
def test_a_run_that_is_loaded_within_the_traced_steps_traces_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    pool_of(RANKS).run(left, JOBS["ep"], path, STEPS)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    assert_sound(events)
    assert {e["pid"] for e in of(events, "X")} == set(range(RANKS))


@pytest.mark.slow
def test_a_run_that_ends_within_the_traced_steps_leaves_those_of_the_first_rank(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.json"
    pool_of(RANKS).run(left, JOBS["ep"], path, range(STEPS.start + 1))
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    assert_sound(events)
    assert {e["pid"] for e in of(events, "X")} == {0}


def _assert_clocks_agree(tasks: list[dict[str, Any]]) -> None:
    """No rank has all counts before the others have begun to send theirs."""
    orders = [
        [e for e in tasks if e["cat"] == "order" and e["pid"] == rank] for rank in range(RANKS)
    ]
    assert len(orders[0]) == len(orders[1])
    for ours, theirs in zip(*orders):
        assert ours["name"] == theirs["name"]
        first_end = min(each["ts"] + each["dur"] for each in (ours, theirs))
        assert first_end >= max(ours["ts"], theirs["ts"]) - 50


def _assert_counts(events: list[dict[str, Any]], record: RunRecord, job: Job) -> None:
    """What the counters say is what the layers computed."""
    num_passes = job.micro_batches // RANKS
    counts = [e for e in of(events, "C") if e["name"] == "rows"]
    assert len(counts) == RANKS * len(STEPS) * len(record.layers) * num_passes
    for rank in range(RANKS):
        computed = sum(e["args"]["computed here"] for e in counts if e["pid"] == rank)
        steps = [record.steps_I.index(step) for step in STEPS]
        assert computed == record.ep_rank_rows_ILC[steps, :, rank].sum()
    sent, arrived = (sum(e["args"][name] for e in counts) for name in ("sent", "arrived"))
    assert sent == arrived and (sent > 0) == (job == JOBS["ep"])  # else all is copied
    bytes_sent = sum(e["args"]["sent"] for e in of(events, "C") if e["name"] == "bytes")
    assert bytes_sent == sent * 32 * 4  # a row of Job's model, in float32


def test_the_timeline_knows_who_waited_and_how_long_the_step_was(
    traced: Callable[[str], Traced],
) -> None:
    record = traced("replicas").first.record
    traced_tasks = record.timeline
    assert (
        0
        <= traced_tasks[0].start_s
        <= max(traced_task.end_s for traced_task in traced_tasks)
        <= record.traced_s
    )
    by = {
        (traced_task.phase, traced_task.name): traced_tasks[traced_task.bound_by]
        for traced_task in traced_tasks
        if traced_task.bound_by is not None and traced_task.layer == record.layers[1].name
    }
    assert by["forward", "order"].name == "attention"
    assert by["forward", "dispatch"].name == "order"
    assert by["forward", "combine"].name == "expert"
    assert by["forward", "restore"].name == "combine"
    assert by["backward", "combine"].name == "restore"
    for traced_task in traced_tasks:
        if traced_task.bound_by is not None:
            by_s = traced_task.end_s if traced_task.name in _ONLY_WAIT else traced_task.start_s
            assert traced_tasks[traced_task.bound_by].end_s <= by_s + 1e-5
