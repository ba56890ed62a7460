# SPDX-License-Identifier: Apache-2.0
"""Whole steps: what they are made of, by hand, and Pro-Prophet's formula. Pure: nothing runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import LocalElseOwner
from ds_moe_ext.planning.prophet_planner import Split
from ds_moe_ext.planning.strategy import Carried, LayerContext, Plan, Strategy, layer_tasks
from ds_moe_ext.schedule.orders import LayerTasks
from ds_moe_ext.schedule.simulator import Timeline, simulate
from ds_moe_ext.schedule.step import in_streams, whole_step
from ds_moe_ext.schedule.task import (
    ATTENTION,
    COMPUTE,
    HAVE_AGAIN,
    INTER,
    JOIN,
    PARAM,
    Schedule,
    Stream,
    Task,
)
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.fssdp import FullySharded
from ds_moe_ext.strategies.prophet import ProProphet
from tests.strategies_for_tests import Chunked, Copied

LAYOUT = ParallelLayout(Grid(world_size=2, num_ep_ranks=2), rank=0)
OWNER = Placement.block(2, 2)
EVERYWHERE = OWNER.with_replicas(np.ones((2, 2), dtype=bool))
HALVES = Carried(Split((0,), (1,)), Split((0,), (1,)))  # what moves is in the seconds of each test

AT_OWNER = Plan(OWNER, OWNER, LocalElseOwner(OWNER, OWNER))
COPIED = Plan(
    OWNER, EVERYWHERE, LocalElseOwner(OWNER, EVERYWHERE), successor=lambda rows_CE: COPIED
)
CARRIED = replace(COPIED, carried=HALVES)

ONE_QUEUE = {PARAM: INTER}  # all that is sent, in the order of issue
NOTHING_BESIDE = {PARAM: COMPUTE, INTER: COMPUTE}


def cut(plan: Plan, forward: int, backward: int) -> Plan:
    return replace(plan, forward_degree=forward, backward_degree=backward)


def freed(plans: Sequence[Plan]) -> list[Plan]:
    return [replace(plan, rematerialize=True) for plan in plans]


def programs(strategy: Strategy, plans: Sequence[Plan], *, gated: bool = False) -> list[LayerTasks]:
    return [
        layer_tasks(strategy, LayerContext(plan, LAYOUT, layer, following), gated=gated)
        for layer, (plan, following) in enumerate(zip(plans, (*plans[1:], None)))
    ]


@cache
def block_by_block(num_layers: int) -> Schedule:
    """Pro-Prophet with replicas in every layer, carried wherever there is a layer before."""
    plans = [COPIED] + [CARRIED] * (num_layers - 1)
    return whole_step(programs(ProProphet(), plans))


@dataclass(frozen=True)
class Block:
    """Seconds of a layer's tasks and of what the host computes behind it."""

    a2a: float
    fec: float
    fnec: float
    bec: float
    bnec: float
    trans: tuple[float, ...] = ()
    agg: tuple[float, ...] = ()

    def seconds(self, task: Task) -> float:
        is_adjoint = bool(task.adjoint_of)
        pieces = self.agg if is_adjoint else self.trans
        return {
            "dispatch": self.a2a,
            "combine": self.a2a,
            "plan": self.a2a,
            "expert": self.bec if is_adjoint else self.fec,
            "attention": self.bnec if is_adjoint else self.fnec,
            "gather": sum(pieces[task.chunk_range.start : task.chunk_range.stop]),
        }.get(task.op.name, 0.0)

    @property
    def computed_and_sent(self) -> float:
        """Without what moves of the replicas."""
        return 4 * self.a2a + self.fec + self.bec + self.fnec + self.bnec


def run(
    step: Schedule, blocks: Sequence[Block], *, streams: Mapping[Stream, Stream] | None = None
) -> Timeline:
    return simulate(
        in_streams(step, streams or {}), lambda rank, task: blocks[task.layer].seconds(task)
    )


def on_one_link(step: Schedule, blocks: Sequence[Block]) -> Timeline:
    """Rows and replicas have a queue each, and share a link equally."""
    return simulate(
        step,
        lambda rank, task: blocks[task.layer].seconds(task),
        link_of=lambda rank, task: "link" if task.stream in (INTER, PARAM) else None,
    )


def times(step: Schedule, timeline: Timeline) -> dict[str, tuple[float, float]]:
    """Start and end by name; what is gathered a second time is called so."""
    found: dict[str, tuple[float, float]] = {}
    for task, start, end in zip(step.tasks, timeline.start_s[0], timeline.end_s[0]):
        found[f"{task} again" if str(task) in found else str(task)] = (start, end)
    return found


# What a step is made of.


def test_a_step_of_two_layers() -> None:
    step = whole_step(programs(ExpertParallel(), [AT_OWNER, AT_OWNER]))
    assert str(step) == (
        "order[0,0] dispatch[0,0] expert[0,0] combine[0,0] restore[0,0] attention[0,0] "
        "order[1,0] dispatch[1,0] expert[1,0] combine[1,0] restore[1,0] attention[1,0] "
        "attention'[1,0] restore'[1,0] combine'[1,0] expert'[1,0] dispatch'[1,0] "
        "attention'[0,0] restore'[0,0] combine'[0,0] expert'[0,0] dispatch'[0,0]"
    )
    assert step.is_chain
    attention, back = (task for task in step.tasks if task.op == ATTENTION and task.layer == 0)
    assert [str(value) for value in attention.reads] == ["y[0,0]"]
    assert [str(value) for value in attention.writes] == [
        *("x[1,0]", "expert_ids[1,0]", "scores[1,0]"),
    ]
    assert [str(value) for value in back.reads] == ["x'[1,0]", "scores'[1,0]"]
    assert [str(value) for value in back.writes] == ["y'[0,0]"]
    assert [str(value) for value in step.inputs] == [
        *("x[0,0]", "expert_ids[0,0]", "scores[0,0]", "weights[0]", "weights[1]"),
    ]
    assert [str(value) for value in step.outputs] == [
        *("x'[0,0]", "scores'[0,0]", "weights'[0]", "weights'[1]"),
    ]


def test_what_a_program_begins_follows_it() -> None:
    """Where replicas move: layer 0 has none before it, layer 1 is carried, layer 2 not."""
    step = whole_step(programs(ProProphet(), [COPIED, CARRIED, COPIED]))
    names = [str(task) for task in step.tasks]
    for begins, move in (
        ("launch[0,0]", "gather[0,0]"),
        ("launch[2,0]", "gather[2,0]"),
        ("launch[1,0]", "gather[1,0]"),
        ("launch[1,1]", "gather[1,1]"),
        ("send_to_owner[2,0]", "gather'[2,0]"),
        ("send_to_owner[1,0]", "gather'[1,0]"),
        ("send_to_owner[1,1]", "gather'[1,1]"),
        ("send_to_owner[0,0]", "gather'[0,0]"),
    ):
        assert names.index(move) == names.index(begins) + 1
        launching, moving = step.tasks[names.index(begins)], step.tasks[names.index(move)]
        assert moving.stream == PARAM
        assert moving.reads == launching.writes
    # No layer launches those of layers 0 and 2: their own blocks do, as they begin.
    assert names[:4] == ["start[0,0]", "launch[0,0]", "gather[0,0]", "start[1,0]"]
    behind = names.index("attention[1,0]")
    assert names[behind - 3 : behind] == ["start[2,0]", "launch[2,0]", "gather[2,0]"]
    behind = names.index("attention'[1,0]")
    assert names[behind + 1] == "start'[2,0]"  # where gradients are waited for
    assert names[-2:] == ["start'[1,0]", "start'[0,0]"]
    assert sum(name.startswith("gather[") for name in names) == 4  # none is gathered again
    # All that is gathered has a reader, and all gradients come to the owner.
    assert [str(v) for v in step.outputs if v.kind.name == "summed"] == [
        *("summed[2,0]", "summed[1,0]", "summed[1,1]", "summed[0,0]"),
    ]


@pytest.mark.parametrize(
    "layers",
    [
        programs(ProProphet(), freed([COPIED, CARRIED, CARRIED]), gated=True),
        programs(FullySharded(), freed([AT_OWNER, COPIED, COPIED]), gated=True),
        programs(Chunked(forward=2, backward=3), [cut(AT_OWNER, 2, 3)] * 2),
        programs(Copied(), freed([cut(COPIED, 3, 2), cut(COPIED, 1, 2)])),
    ],
)
def test_adjoints_are_of_what_ran_in_this_step(layers: list[LayerTasks]) -> None:
    step = whole_step(layers)
    assert len(step.after) == len(step.tasks)  # nothing is read before it is written
    for position, task in enumerate(step.tasks):
        for forward in task.adjoint_of:
            assert forward < position
            of = step.tasks[forward]
            of_op = JOIN if task.op == HAVE_AGAIN else task.op  # another adjoint of the join
            assert (of.op, of.layer, of.adjoint_of) == (of_op, task.layer, ())
    adjoints = [position for task in step.tasks for position in task.adjoint_of]
    ran = {str(step.tasks[i].op.name) for i in range(len(step.tasks)) if i in adjoints}
    assert ran >= {"dispatch", "expert", "combine", "restore", "attention"}


# By hand.


def test_plain_expert_parallelism() -> None:
    blocks = [Block(1, 2, 3, 4, 5), Block(10, 20, 30, 40, 50)]
    step = whole_step(programs(ExpertParallel(), [AT_OWNER, AT_OWNER]))
    at = times(step, run(step, blocks))
    assert at["combine[0,0]"] == (3, 4)
    assert at["attention[0,0]"] == (4, 7)
    assert at["dispatch[1,0]"] == (7, 17)
    assert at["attention[1,0]"] == (47, 77)
    assert at["attention'[1,0]"] == (77, 127)
    assert at["expert'[1,0]"] == (137, 177)
    assert at["attention'[0,0]"] == (187, 192)
    assert at["dispatch'[0,0]"] == (197, 198)
    assert run(step, blocks, streams=ONE_QUEUE).makespan_s == 198


FSSDP = [Block(1, 2, 3, 4, 5, (4,), (6,)), Block(1, 2, 3, 4, 5, (5,), (7,))]


def test_fssdp_gathers_behind_attention() -> None:
    """compute  . . . . e e .  an a a . . e e  .
    rows     d . . . . . c  . . . d . . .  c
    copies   g g g g . . .  h h h h h . .  .
    """
    step = whole_step(programs(FullySharded(), [COPIED, COPIED]))
    at = times(step, run(step, FSSDP))
    assert at["gather[0,0]"] == (0, 4)  # nothing hides the first
    assert at["dispatch[0,0]"] == (0, 1)
    assert at["expert[0,0]"] == (4, 6)
    assert at["attention[0,0]"] == (7, 10)
    assert at["gather[1,0]"] == (7, 12)
    assert at["dispatch[1,0]"] == (10, 11)
    assert at["expert[1,0]"] == (12, 14)
    assert at["attention[1,0]"] == (15, 18)


def test_fssdp_in_one_queue() -> None:
    """Rows wait for what of the replicas attention does not hide."""
    step = whole_step(programs(FullySharded(), [COPIED, COPIED]))
    timeline = run(step, FSSDP, streams=ONE_QUEUE)
    at = times(step, timeline)
    assert at["gather[0,0]"] == (0, 4)
    assert at["expert[0,0]"] == (5, 7)
    assert at["gather[1,0]"] == (8, 13)
    assert at["attention[0,0]"] == (8, 11)
    assert at["dispatch[1,0]"] == (13, 14)
    assert at["attention[1,0]"] == (17, 20)
    assert at["attention'[1,0]"] == (20, 25)
    assert at["expert'[1,0]"] == (26, 30)
    assert at["dispatch'[1,0]"] == (30, 31)
    assert at["gather'[1,0]"] == (31, 38)
    assert at["attention'[0,0]"] == (31, 36)
    assert at["combine'[0,0]"] == (38, 39)
    assert at["dispatch'[0,0]"] == (43, 44)
    assert at["gather'[0,0]"] == (44, 50)
    assert timeline.makespan_s == 50


def test_replicas_are_gathered_again() -> None:
    """Trans 1 + 2 of each carried layer is 3 once more, in the queue behind the rows' gradients."""
    blocks = [
        Block(1, 2, 3, 4, 5, (3,), (2,)),
        Block(1, 2, 3, 4, 5, (1, 2), (0, 0)),
        Block(1, 2, 3, 4, 5, (1, 2), (0, 0)),
    ]
    plans = [COPIED, CARRIED, CARRIED]
    layers = programs(ProProphet(), plans)
    kept, step = whole_step(layers), whole_step(programs(ProProphet(), freed(plans)))
    assert {str(task) for task in step.tasks} - {str(task) for task in kept.tasks} == {
        "gather[1,0-1]",  # layer 0 is in one piece, as in forward; the last layer's are kept
        "have_again'[0,0]",
        "have_again'[1,0]",
    }
    assert len(step.tasks) == len(kept.tasks) + 4

    # Forward: 3 + 3 x (1 + 2 + 1 + 3) = 24.
    at = times(step, run(step, blocks, streams=ONE_QUEUE))
    assert at["attention[2,0]"] == (21, 24)
    assert at["dispatch'[2,0]"] == (34, 35)
    assert at["gather[1,0-1]"] == (35, 38)
    assert at["attention'[1,0]"] == (35, 40)  # hides it
    assert at["expert'[1,0]"] == (41, 45)
    assert at["gather[0,0] again"] == (46, 49)
    assert at["expert'[0,0]"] == (52, 56)
    assert at["gather'[0,0]"] == (57, 59)

    # 7 s are longer than the 5 of attention: the rows wait, and all that follows.
    slow = [blocks[0], replace(blocks[1], trans=(1, 6)), blocks[2]]
    at = times(step, run(step, slow, streams=ONE_QUEUE))
    assert at["dispatch'[2,0]"] == (37, 38)  # 3 of the 6 are not hidden in forward
    assert at["gather[1,0-1]"] == (38, 45)
    assert at["combine'[1,0]"] == (45, 46)
    assert run(step, slow, streams=ONE_QUEUE).makespan_s == 59 + 3 + 2


def test_experts_wait_for_replicas_gathered_again() -> None:
    """In a queue of their own, too."""
    blocks = [Block(1, 2, 3, 4, 5, (9,), (0,)), Block(0, 2, 3, 4, 5, (0,), (0,))]
    kept = whole_step(programs(FullySharded(), [COPIED, COPIED]))
    step = whole_step(programs(FullySharded(), freed([COPIED, COPIED])))
    at = times(step, run(step, blocks))
    # Forward: 9 + 2 + 1 + 3, then 2 + 3.
    assert at["expert'[1,0]"] == (25, 29)
    assert at["gather[0,0] again"] == (29, 38)
    assert at["attention'[0,0]"] == (29, 34)
    assert at["combine'[0,0]"] == (34, 35)  # rows do not wait
    assert at["expert'[0,0]"] == (38, 42)
    assert times(kept, run(kept, blocks))["expert'[0,0]"] == (35, 39)


def test_freed_replicas_that_no_layer_recalls() -> None:
    """The layer behind has none and recalls nothing: they are had when experts need them."""
    blocks = [Block(1, 2, 3, 4, 5, (3,), (2,)), Block(1, 2, 3, 4, 5)]
    kept = whole_step(programs(ProProphet(), [COPIED, AT_OWNER]))
    step = whole_step(programs(ProProphet(), freed([COPIED, AT_OWNER])))
    at = times(step, run(step, blocks))
    assert at["gather[0,0] again"][0] == at["combine'[0,0]"][1]
    assert at["expert'[0,0]"][0] == at["gather[0,0] again"][1]
    assert run(step, blocks).makespan_s == run(kept, blocks).makespan_s + 3


def test_a_backward_waits_for_gradients_of_the_pass_begun_behind_it() -> None:
    """Where nobody carries replicas, of the next layer; of carried ones, of the layer behind
    that."""
    blocks = [Block(1, 2, 3, 4, 5, (3,), (50,)), Block(1, 2, 3, 4, 5, (1, 2), (60, 70))] * 2
    for strategy, plans, behind in (
        (FullySharded(), [COPIED] * 3, 1),
        (ProProphet(), [COPIED, CARRIED, CARRIED], 2),
    ):
        step = whole_step(programs(strategy, plans))
        at = times(step, run(step, blocks))
        for layer in range(3 - behind):
            owner = [end for name, (_, end) in at.items() if f"gather'[{layer + behind}," in name]
            assert at[f"restore'[{layer},0]"][0] == max(owner)


# Pro-Prophet's formula: section 3.5 of the spec.


def equal_blocks(
    num_layers: int, *, a2a: float, fec: float, fnec: float, bnec: float, trans: float, agg: float
) -> list[Block]:
    """Backward of the experts takes twice their forward. What the time between two layers hides
    moves there; nobody carries the first layer's."""
    under_fnec, under_bnec = min(trans, fnec), min(agg, bnec)
    block = Block(
        a2a,
        fec,
        fnec,
        2 * fec,
        bnec,
        (trans - under_fnec, under_fnec),
        (under_bnec, agg - under_bnec),
    )
    return [replace(block, trans=(trans,), agg=(agg,)), *[block] * (num_layers - 1)]


def formula(blocks: Sequence[Block]) -> float:
    """Everything but what is hidden; of replicas, a piece is hidden by one computation."""
    total = sum(block.computed_and_sent for block in blocks) + blocks[0].trans[0] + blocks[0].agg[0]
    for before, block in pairwise(blocks):
        total += max(0, block.trans[0] - before.fec) + max(0, block.trans[1] - before.fnec)
        total += max(0, block.agg[0] - before.bnec) + max(0, block.agg[1] - before.bec)
    return total


def formula_of_the_spec(blocks: Sequence[Block]) -> float:
    block, trans, agg = blocks[0], blocks[0].trans[0], blocks[0].agg[0]
    shown = max(0, trans - block.fec - block.fnec) + max(0, agg - 2 * block.fec - block.bnec)
    each = 4 * block.a2a + 3 * block.fec + block.fnec + block.bnec
    return len(blocks) * each + trans + agg + (len(blocks) - 1) * shown


@pytest.mark.parametrize(
    ("trans", "agg", "scheduled", "blocking"),
    [(5, 5, 97, 117), (10, 10, 113, 147), (10, 20, 135, 177)],
)
def test_golden_p4(trans: float, agg: float, scheduled: float, blocking: float) -> None:
    blocks = equal_blocks(3, a2a=2, fec=4, fnec=3, bnec=6, trans=trans, agg=agg)
    step = block_by_block(3)
    assert run(step, blocks, streams=ONE_QUEUE).makespan_s == scheduled
    assert on_one_link(block_by_block(3), blocks).makespan_s == pytest.approx(scheduled, abs=1e-9)
    # Planning, 2 s a layer, is hidden in either.
    assert run(step, blocks, streams=NOTHING_BESIDE).makespan_s == blocking
    plain = whole_step(programs(ProProphet(scheduler=False), [COPIED] * 3))
    alone = [replace(block, trans=(trans,), agg=(agg,)) for block in blocks]
    assert run(plain, alone, streams=NOTHING_BESIDE).makespan_s == blocking


seconds = st.floats(0, 20, allow_subnormal=False)


def all_equal(max_layers: int) -> st.SearchStrategy[list[Block]]:
    kinds = ("a2a", "fec", "fnec", "bnec", "trans", "agg")
    each = dict.fromkeys(kinds, seconds)
    return st.builds(equal_blocks, st.integers(1, max_layers), **each)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(all_equal(4))
def test_equal_blocks_take_the_formula(blocks: list[Block]) -> None:
    step = block_by_block(len(blocks))
    timeline = run(step, blocks, streams=ONE_QUEUE)
    assert timeline.makespan_s == pytest.approx(formula_of_the_spec(blocks), abs=1e-9)
    assert formula(blocks) == pytest.approx(formula_of_the_spec(blocks), abs=1e-9)
    # Equation (6): nothing is hidden.
    blocking = sum(b.computed_and_sent + sum(b.trans) + sum(b.agg) for b in blocks)
    assert run(step, blocks, streams=NOTHING_BESIDE).makespan_s == pytest.approx(blocking, abs=1e-9)
    assert timeline.makespan_s <= blocking + 1e-9
    check_order(step, timeline)


@st.composite
def any_blocks(draw: st.DrawFn) -> list[Block]:
    """Each layer with seconds and a split of its own."""

    def block(num_pieces: int) -> Block:
        times = [draw(seconds) for _ in range(5 + 2 * num_pieces)]
        return Block(*times[:5], tuple(times[5 : 5 + num_pieces]), tuple(times[5 + num_pieces :]))

    return [block(1), *(block(2) for _ in range(draw(st.integers(0, 3))))]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(any_blocks())
def test_any_blocks_take_the_formula(blocks: list[Block]) -> None:
    """Whatever the split: each piece shows what its own computation does not hide."""
    step = block_by_block(len(blocks))
    timeline = run(step, blocks, streams=ONE_QUEUE)
    assert timeline.makespan_s == pytest.approx(formula(blocks), abs=1e-9)
    check_order(step, timeline)
    # With a queue each, and links that do not meet, nothing is later.
    assert run(step, blocks).makespan_s <= timeline.makespan_s + 1e-9


def check_order(step: Schedule, timeline: Timeline) -> None:
    """Properties 10 and 12, and what moves under what (spec 3.4)."""
    at = times(step, timeline)
    num_layers = max(task.layer for task in step.tasks) + 1
    for after in range(1, num_layers):
        before = after - 1
        assert at[f"gather[{after},1]"][1] <= at[f"expert[{after},0]"][0]
        for move, beside in (
            (f"gather[{after},0]", f"expert[{before},0]"),
            (f"gather[{after},1]", f"attention[{before},0]"),
            (f"gather'[{after},0]", f"attention'[{before},0]"),
            (f"gather'[{after},1]", f"expert'[{before},0]"),
        ):
            assert at[move][0] == pytest.approx(at[beside][0], abs=1e-9), move
    ends = [end for name, (_, end) in at.items() if name.startswith("gather'")]
    assert len(ends) == 2 * num_layers - 1
    assert max(ends) <= timeline.makespan_s
    assert at["gather[0,0]"][0] == 0


@settings(deadline=None, derandomize=True, max_examples=150)
@given(all_equal(3))
def test_a_shared_link_takes_the_formula(blocks: list[Block]) -> None:
    """Where rows and replicas share a link equally, what is not hidden lies elsewhere, and is as
    much: the link has work all the while. (Gradients that set out beside the rows' own would delay
    these, and leave the link idle while the host computes.)"""
    timeline = on_one_link(block_by_block(len(blocks)), blocks)
    assert timeline.makespan_s == pytest.approx(formula_of_the_spec(blocks), abs=1e-9)
