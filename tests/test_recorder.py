# SPDX-License-Identifier: Apache-2.0
"""What the recorder keeps of a run: which steps it times, where experts were, what a task is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner
from ds_moe_ext.moe.observation import Pass, Rows, TasksSeen, TimedTask
from ds_moe_ext.planning.strategy import Choice, Destination, Plan
from ds_moe_ext.report.page import page_of
from ds_moe_ext.report.record import LayerRecord, Move, RunRecord, TracedTask
from ds_moe_ext.report.recorder import MOST_ENTRIES, MOST_LAYERS, Recorder, in_turn, traced_tasks_of
from ds_moe_ext.schedule.task import ATTENTION, EXPERT, GATHER, GRADIENTS, JOIN, Op, Task
from ds_moe_ext.schedule.task import ChunkRange as Chunks

# Where experts were.


def plan_of(owner_E: Sequence[int], copied_EC: Sequence[Sequence[int]] | np.ndarray) -> Plan:
    copied = np.asarray(copied_EC, dtype=bool)
    owner = Placement.owned_by(np.asarray(owner_E), copied.shape[1])
    target = owner.with_replicas(copied)
    return Plan(owner, target, LocalElseOwner(owner, target))


class FakeLayer:
    """A layer with a plan."""

    def __init__(self, name: str, plan: Plan) -> None:
        self.name = name
        layout = SimpleNamespace(node_C=np.arange(plan.owner.num_ep_ranks) // 2)
        layer_context = SimpleNamespace(plan=plan, layout=layout)
        self.routed: Any = SimpleNamespace(layer_context=layer_context, tasks=TasksSeen())

    def record(self) -> LayerRecord:
        owner = self.routed.layer_context.plan.owner
        return LayerRecord(
            self.name, "fake", owner.num_experts, 2, tuple(owner.owner_E.tolist()), 0
        )


def recorded(
    steps: Sequence[Sequence[Plan]], rows_ILCE: Sequence[Sequence[np.ndarray]], **other: Any
) -> RunRecord:
    """A run by these plans, one a step and layer, with these rows."""
    layers = [FakeLayer(f"m.{index}", plan) for index, plan in enumerate(steps[0])]
    recorder = Recorder("fssdp", 2, layers, **other)
    for step, (plans, rows_LCE) in enumerate(zip(steps, rows_ILCE)):
        for layer, plan in zip(layers, plans):
            layer.routed.layer_context.plan = plan
        rows = [
            Rows(r, plan.share.computed_C(r), (Pass(r, plan.destination),))
            for r, plan in zip(rows_LCE, plans)
        ]
        recorder.after_step(step, rows)
    # What the host does at the end of a step: the plans of the next one.
    for layer, plan in zip(layers, steps[-1]):
        no_replicas = np.zeros_like(plan.owner.holds_EC)
        layer.routed.layer_context.plan = plan_of([0] * plan.owner.num_experts, no_replicas)
    return recorder.record()


def test_replicas_worked_by_hand() -> None:
    # Experts 0 and 1 are at the owner in EP rank 0, expert 2 in EP rank 1. Each sender has 4, 1 and
    # 1 rows.
    rows_CE = np.array([[4, 1, 1], [4, 1, 1]])
    plain = plan_of([0, 0, 1], [[0, 0], [0, 0], [0, 0]])
    copied = plan_of([0, 0, 1], [[0, 1], [0, 0], [1, 0]])
    run = recorded([[plain], [copied]], [[rows_CE], [rows_CE]])
    assert run.rows_ILE.tolist() == [[[8, 2, 2]]] * 2
    # With replicas each sender keeps its rows of 0 and 2; EP rank 1 sends its row of 1 to EP rank
    # 0.
    assert run.ep_rank_rows_ILC.tolist() == [[[10, 2]], [[7, 5]]]
    assert run.placements is not None
    assert run.placements.owner_ep_rank_rows_ILC.tolist() == [[[10, 2]]] * 2
    assert run.placements.replicas_ILE.tolist() == [[[0, 0, 0]], [[1, 0, 1]]]
    assert run.placements.copied_to == (((1,), (), (0,)),)
    assert (run.placements.last_step, run.placements.moves) == (1, ())
    np.testing.assert_allclose(run.owner_balance_IL(), [[10 / 6], [10 / 6]])
    np.testing.assert_allclose(run.balance_IL(), [[10 / 6], [7 / 6]])


def test_no_memory_for_more_candidates_is_a_change() -> None:
    rows_CE = np.array([[4, 1], [4, 1]])
    plain = plan_of([0, 1], [[0, 0], [0, 0]])
    both, fewer = (
        dataclasses.replace(plain, choice=Choice("ep", 1.0, reported, left_out=left_out))
        for reported, left_out in (("cheap", ()), ("cheap; prophet has no room", ("prophet",)))
    )
    run = recorded([[both], [both], [fewer], [fewer]], [[rows_CE]] * 4)
    assert [(each.step, each.reported) for each in run.choices] == [
        (0, "cheap"),
        (2, "cheap; prophet has no room"),
    ]


def test_others_are_reported_a_timed_step_without_tasks() -> None:
    """They wait for it."""
    rows_CE = np.array([[4, 1], [4, 1]])
    plain = plan_of([0, 1], [[0, 0], [0, 0]])
    given: list[list[TracedTask]] = []
    theirs = TracedTask("expert", "compute", "forward", "m.0", "0", 1.0, 3.0)

    def beside(traced_tasks: list[TracedTask]) -> list[TracedTask]:
        given.append(traced_tasks)
        return [theirs]

    run = recorded([[plain]] * 7, [[rows_CE]] * 7, beside=beside)
    assert given == [[]]  # step 5
    assert run.seconds_by_kind == {"forward:expert": 2.0}


def test_who_planned_from_when_on() -> None:
    rows_CE = np.array([[4, 1], [4, 1]])
    plain = plan_of([0, 1], [[0, 0], [0, 0]])
    ep, fssdp = (
        dataclasses.replace(
            plain, choice=Choice(name, 1.0, f"{name} is cheaper", among_s=((name, 2.0),))
        )
        for name in ("ep", "fssdp")
    )
    steps = [plain, ep, ep, fssdp, ep]
    run = recorded([[plan] for plan in steps], [[rows_CE]] * len(steps))
    assert [(each.step, each.name) for each in run.choices] == [(1, "ep"), (3, "fssdp"), (4, "ep")]
    assert [each.expected_s for each in run.choices] == [{"ep": 2.0}, {"fssdp": 2.0}, {"ep": 2.0}]
    again = RunRecord.from_json(run.to_json())
    assert again.choices == run.choices
    page = page_of(run)
    assert "Strategy chosen by auto" in page
    assert "fssdp is cheaper" in page


def test_replicas_made_after_the_gate_worked_by_hand() -> None:
    # Expert 0 is copied to EP rank 1 by the plan; then in both passes to EP rank 2, in one to EP
    # rank 3.
    owner, planned = (
        plan_of([0, 1], copied) for copied in ([[0] * 4] * 2, [[0, 1, 0, 0], [0] * 4])
    )
    plan = dataclasses.replace(
        owner, target=planned.target, revise=lambda rows_CE: plan.destination
    )
    targets = [
        planned.target.with_replicas(np.array([ep_ranks, [False] * 4]))
        for ep_ranks in ([False, False, True, False], [False, False, True, True])
    ]
    rows_CE = np.full((4, 2), 6)
    passes = tuple(
        Pass(rows_CE, Destination(target, LocalElseOwner(owner.owner, target)))
        for target in targets
    )
    computed_C = sum(one.destination.share.computed_C(rows_CE) for one in passes)
    recorder = Recorder("fssdp", 4, [FakeLayer("m.0", plan)])
    recorder.after_step(0, [Rows(2 * rows_CE, np.asarray(computed_C), passes)])
    run = recorder.record()
    assert run.placements is not None and run.placements.added is not None
    assert run.placements.replicas_ILE.tolist() == [[[1, 0]]]
    assert run.placements.copied_to == (((1,), ()),)
    assert run.placements.added.replicas_ILE.tolist() == [[[2, 0]]]
    assert run.placements.added.num_passes == 2
    assert run.placements.added.to == ((((2, 2), (3, 1)), ()),)
    assert run.placements.all_replicas_ILE.tolist() == [[[3, 0]]]
    # EP ranks 0 and 1 are a node. Senders 2 and 3 keep expert 0's rows but for the last in the
    # first pass, which goes to EP rank 0; all rows of expert 1 but the sender's own go to EP rank
    # 1.
    assert run.looks is not None and run.looks.num_nodes == 2
    assert run.looks.left_IL.tolist() == [[6 + 2 * 3 * 6]]
    assert run.looks.crossed_IL.tolist() == [[6 + 2 * 2 * 6]]
    assert np.isnan(run.looks.predicted_IL).all() and np.isnan(run.looks.by_paper_IL).all()


def test_predicted_and_reached_worked_by_hand() -> None:
    rows_CE, none_CE = np.array([[4, 1, 1], [4, 1, 1]]), np.zeros((2, 3), dtype=np.int64)
    plan = plan_of([0, 0, 1], [[0, 1], [0, 0], [1, 0]])
    plans = [
        plan,
        dataclasses.replace(plan, predicted_CE=none_CE),  # before the first step
        dataclasses.replace(plan, predicted_CE=np.array([[2, 0, 0], [6, 0, 0]])),
        dataclasses.replace(plan, by_paper=lambda target: LocalElseOwner(plan.owner, plan.owner)),
    ]
    run = recorded([[each] for each in plans], [[rows_CE]] * 4)
    looks = run.looks
    assert looks is not None and looks.num_nodes == 1
    unknown = float("nan")
    # Each EP rank keeps its rows of expert 0: 2 and 6 of a mean of 4.
    np.testing.assert_equal(looks.predicted_IL, [[unknown], [unknown], [1.5], [unknown]])
    # At the owner EP rank 0 computes 10 of 12 rows.
    np.testing.assert_equal(looks.by_paper_IL, [[unknown]] * 3 + [[10 / 6]])
    assert looks.left_IL.tolist() == [[1.0]] * 4 and not looks.crossed_IL.any()


@pytest.mark.parametrize(
    ("num_layers", "shape", "num_passes"),
    [(1, (2, 2), 1), (8, (4, 8), 2), (58, (64, 256), 1), (24, (64, 256), 4), (3, (512, 256), 1)],
)
def test_layers_take_turns(num_layers: int, shape: tuple[int, int], num_passes: int) -> None:
    """Each as often as the others, also where only every fourth step is kept."""
    rows_CE, plan = np.zeros(shape, dtype=np.int64), plan_of([0], [[0]])
    passes = (Pass(rows_CE, plan.destination),) * num_passes
    rows = [Rows(rows_CE, rows_CE.sum(axis=1), passes)] * num_layers
    rounds = in_turn(0, rows).step
    for every in (1, 4):
        seen = [in_turn(step, rows) for step in range(0, every * rounds, every)]
        assert sorted(layer for layers in seen for layer in layers) == [*range(num_layers)]
        assert max(map(len, seen)) <= MOST_LAYERS
        mean = len(rows) / rounds * num_passes * rows_CE.size
        assert mean <= MOST_ENTRIES
    assert num_layers > 1 or shape != (2, 2) or rounds == 1


def test_owners_are_those_of_the_last_step() -> None:
    rows_CE = np.ones((2, 2), dtype=np.int64)
    none = [[0, 0], [0, 0]]
    before, after = plan_of([0, 1], none), plan_of([1, 0], none)
    small = plan_of([1], [[0, 0]])
    run = recorded(
        [[before, small], [before, small], [after, small], [after, small]],
        [[rows_CE, rows_CE[:, :1]]] * 4,
    )
    assert run.placements is not None
    assert run.placements.moves == (Move(step=2, layer=0, num_experts=2),)
    assert run.layers[0].owner_E == (1, 0)  # and not those of the next step
    assert run.placements.replicas_ILE.shape == (4, 2, 2) and not run.placements.replicas_ILE.any()


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(1, 6))
def test_a_thinned_record_agrees_with_itself(seed: int, num_steps: int, max_steps: int) -> None:
    rng = np.random.default_rng(seed)
    owners_IE = rng.integers(0, 3, (num_steps, 4))
    plans = [[plan_of(owner_E, rng.random((4, 3)) < 0.2)] for owner_E in owners_IE]
    rows_ILCE = rng.poisson(3.0, (num_steps, 1, 3, 4))
    run = recorded(plans, list(rows_ILCE), max_steps=max_steps)
    steps = list(run.steps_I)
    assert len(steps) <= max_steps and steps[0] == 0
    np.testing.assert_array_equal(run.rows_ILE, rows_ILCE.sum(axis=2)[steps])
    moved = int((owners_IE[1:] != owners_IE[:-1]).sum())
    if run.placements is None:
        assert moved == 0
        return
    assert sum(move.num_experts for move in run.placements.moves) == moved
    at = [move.step for move in run.placements.moves]
    assert at == sorted(set(at)) and set(at) <= set(steps)
    np.testing.assert_array_equal(
        run.placements.owner_ep_rank_rows_ILC.sum(axis=2), run.ep_rank_rows_ILC.sum(axis=2)
    )
    for index, step in enumerate(steps):
        owner, target = plans[step][0].owner, plans[step][0].target
        replicas_E = target.holds_EC.sum(axis=1) - owner.holds_EC.sum(axis=1)
        np.testing.assert_array_equal(run.placements.replicas_ILE[index, 0], replicas_E)
    last = plans[-1][0]
    held = [
        sorted({owner, *ep_ranks})
        for owner, ep_ranks in zip(last.owner.owner_E.tolist(), run.placements.copied_to[0])
    ]
    assert held == [np.flatnonzero(holds_C).tolist() for holds_C in last.target.holds_EC]


# What a task is.


def timed(op: Op, start_s: float, end_s: float, *, is_adjoint: bool = False) -> TimedTask:
    streams: Any = SimpleNamespace(seconds_between=lambda a, b: b - a)
    task = Task(op, 0, Chunks(0, 1), (), (), (0,) if is_adjoint else ())
    return TimedTask(task, start_s, end_s, streams)


def traced_tasks(*tasks: TimedTask) -> list[TracedTask]:
    return traced_tasks_of(tasks, tasks[0], ["m.0"])


def test_the_adjoint_of_a_gather_is_a_reduction() -> None:
    found = traced_tasks(
        timed(ATTENTION, 1.0, 2.0),
        timed(GATHER, 1.1, 1.9),
        timed(EXPERT, 2.0, 3.0),
        timed(EXPERT, 3.0, 5.0, is_adjoint=True),
        timed(GATHER, 5.1, 5.5, is_adjoint=True),
        timed(ATTENTION, 5.0, 6.0, is_adjoint=True),
    )
    assert [(traced_task.name, traced_task.phase, traced_task.stream) for traced_task in found] == [
        ("attention", "forward", "compute"),
        ("gather", "forward", "param"),
        ("expert", "forward", "compute"),
        ("expert", "backward", "compute"),
        ("attention", "backward", "compute"),
        ("reduction", "backward", "param"),
    ]
    assert (found[0].start_s, found[2].end_s) == (0.0, 2.0)  # from the start of the first


def test_a_gather_for_backward_is_of_the_backward_phase() -> None:
    found = traced_tasks(
        timed(GATHER, 0.0, 1.0),  # forward
        timed(JOIN, 0.5, 1.0),
        timed(EXPERT, 1.0, 2.0),
        timed(GATHER, 2.5, 3.0),  # the same copies once more
        timed(EXPERT, 3.0, 5.0, is_adjoint=True),
        timed(GATHER, 6.0, 7.0),  # for the next micro-batch
        timed(EXPERT, 7.0, 8.0),
    )
    gathers = [traced_task.phase for traced_task in found if traced_task.name == GATHER.name]
    assert gathers == ["forward", "backward", "forward"]


def test_slices_of_dense_gradients_are_of_the_backward_phase() -> None:
    found = traced_tasks(timed(EXPERT, 0.0, 1.0), timed(GRADIENTS, 1.0, 2.0))
    assert [(traced_task.name, traced_task.phase, traced_task.stream) for traced_task in found] == [
        ("expert", "forward", "compute"),
        ("gradients", "backward", "inter"),
    ]
