# SPDX-License-Identifier: Apache-2.0
"""Passes that are replayed, on a CPU: what a GPU would be reported again is computed again, into
the same memory. ``tests/gpu/test_graphs.py`` has CUDA graphs.

Shape letters: T tokens, K choices, E experts, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.moe import layer as layer_module
from ds_moe_ext.moe import slot_rows
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.hooks import Hooked, Hooks
from ds_moe_ext.moe.layer import LayerOptions, RoutedExperts
from ds_moe_ext.moe.observation import take_rows
from ds_moe_ext.planning.strategy import Job, LayerContext
from ds_moe_ext.schedule import graphs as captured_module
from ds_moe_ext.schedule.graphs import MOST_KINDS, MOST_MOVES, WARM_UPS, GraphUse, Tensors
from ds_moe_ext.schedule.task import INTER
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.esp import ExpertSharding
from tests.ranks import pool_of, refusal

E, K, D, F = 8, 2, 16, 24
CPU = torch.device("cpu")
FUNCTION = FeedForwardExperts(silu_gated)


@dataclass(eq=False)
class Again:
    """Work that is done again, into the memory of the first time."""

    work: Callable[[], Tensors]
    outputs: Tensors
    is_done: bool

    def replay(self) -> None:
        if self.is_done:
            self.is_done = False
            return
        with captured():
            found = self.work()
        for own, new in zip(self.outputs, found):
            if own is not None and new is not None:
                own.copy_(new)


@dataclass
class OnCpu:
    """Records by doing it once."""

    is_on: bool = False  # somebody records around the caller
    records: list[Again] = field(default_factory=list)

    def is_recording(self) -> bool:
        return self.is_on

    def stream(self) -> object:
        return None

    def follow(self, stream: Any) -> None:
        raise AssertionError("a CPU has one stream")

    def record(self, work: Callable[[], Tensors], after: Any = None) -> Again:
        with captured():
            outputs = tuple(t if t is None else t.clone() for t in work())
        first = Again(work, outputs, is_done=after is not None)
        self.records.append(first)
        return first


@contextmanager
def captured() -> Iterator[None]:
    """As where a stream is captured: nothing is remembered, and nothing comes from the host."""
    with mock.patch.object(captured_module, "is_captured", lambda: True):
        yield


def _is_captured() -> bool:
    """As it is stated now: who has imported that hears what was stated then."""
    return captured_module.is_captured()


@contextmanager
def recording(recorder: OnCpu) -> Iterator[None]:
    """Layers that are run inside the block record there."""
    with mock.patch.object(layer_module, "recorder_for", lambda device: recorder):
        yield


@contextmanager
def uses() -> Iterator[list[GraphUse]]:
    """Of all layers that are made inside the block."""
    made: list[GraphUse] = []

    def make() -> GraphUse:
        made.append(GraphUse())
        return made[-1]

    with mock.patch.object(layer_module, "GraphUse", make):
        yield made


def routed_by(
    strategy: ExpertParallel, options: LayerOptions | None = None, world_size: int = 1
) -> RoutedExperts:
    layout = ParallelLayout(Grid(1, 1), 0)
    if world_size > 1:
        layout = ParallelLayout.build(Grid(world_size, world_size), (("ep", INTER),))
    (plan,) = strategy.plan(Job.at_start([Placement.block(E, world_size)], layout.node_C))
    return RoutedExperts(strategy, LayerContext(plan, layout, 0), FUNCTION, options=options)


@dataclass(frozen=True)
class Like:
    """Where tensors are, and of what type."""

    device: torch.device = CPU
    dtype: torch.dtype = torch.float64

    def drawn(self, generator: torch.Generator, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(self.device, self.dtype)


ON_CPU = Like()


def weights_of(like: Like = ON_CPU) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    up, down = (like.drawn(generator, E, *shape) for shape in ((2 * F, D), (D, F)))
    return up.requires_grad_(), down.requires_grad_()


@dataclass(frozen=True)
class Batch:
    """Tokens and where they go; another number, another batch."""

    number: int
    tokens: int = 24
    like: Like = ON_CPU

    def drawn(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        generator, like = torch.Generator().manual_seed(self.number), self.like
        x_TD, grad_TD = (like.drawn(generator, self.tokens, D) for _ in range(2))
        liked_TE = torch.rand(self.tokens, E, generator=generator)
        score_TK = like.drawn(generator, self.tokens, K)
        expert_TK = liked_TE.topk(K).indices.to(like.device)
        return x_TD.requires_grad_(), expert_TK, score_TK.requires_grad_(), grad_TD


def forward(
    routed: RoutedExperts, batch: Batch, weights: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """The output, leaves, and the output's gradient."""
    x_TD, expert_TK, score_TK, grad_TD = batch.drawn()
    routed.rows.begin(is_training=True)
    return routed(x_TD, expert_TK, score_TK, weights), (x_TD, score_TK), grad_TD


def step(routed: RoutedExperts, batch: Batch, weights: tuple[Tensor, ...]) -> list[Tensor]:
    """The output, and all gradients of one pass."""
    y_TD, leaves, grad_TD = forward(routed, batch, weights)
    grads = torch.autograd.grad(y_TD, (*leaves, *weights), grad_TD)
    return [y_TD.detach(), *grads]


def alike(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


PADDED = ExpertParallel(static_capacity=5, cuda_graphs=True)
UNRECORDED = replace(PADDED, cuda_graphs=False)
ALONE = ExpertParallel(cuda_graphs=True)


def check_replays(strategy: ExpertParallel, like: Like = ON_CPU) -> None:
    """Replayed passes give what others do, bit by bit, and their rows are counted alike."""
    weights = weights_of(like)
    routed, plain = routed_by(strategy), routed_by(replace(strategy, cuda_graphs=False))
    for number in range(WARM_UPS + 3):
        batch = Batch(number, like=like)
        ours, theirs = step(routed, batch, weights), step(plain, batch, weights)
        assert alike(ours, theirs), f"pass {number}"
        sent, sent_by_program = (take_rows([each.rows])[0] for each in (routed, plain))
        assert (sent.routed_CE == sent_by_program.routed_CE).all()
    use = routed.graph_use
    assert (use.num_passes, use.num_replayed) == (WARM_UPS + 3, 3)


@pytest.mark.parametrize("strategy", [PADDED, ALONE], ids=["padded", "an EP rank"])
def test_replayed_passes_are_those_of_the_program(strategy: ExpertParallel) -> None:
    recorder = OnCpu()
    with recording(recorder):
        check_replays(strategy)
    assert len(recorder.records) == 2


def warmed(routed: RoutedExperts, weights: tuple[Tensor, ...]) -> None:
    for number in range(WARM_UPS):
        step(routed, Batch(number), weights)


def test_batches_under_way_have_a_tape_each() -> None:
    """Forward twice, then backward twice, as in a pipeline."""
    weights, recorder = weights_of(), OnCpu()
    routed, plain = routed_by(PADDED), routed_by(UNRECORDED)
    with recording(recorder):
        warmed(routed, weights)
        for number in range(2):
            first, second = (Batch(10 * number + k) for k in range(2))
            runs = [forward(routed, batch, weights) for batch in (first, second)]
            for batch, (y_TD, leaves, grad_TD) in zip((first, second), runs):
                grads = torch.autograd.grad(y_TD, (*leaves, *weights), grad_TD)
                assert alike([y_TD.detach(), *grads], step(plain, batch, weights))
    assert len(recorder.records) == 4


def test_what_a_pass_gave_is_not_written_again() -> None:
    weights = weights_of()
    routed = routed_by(PADDED)
    with recording(OnCpu()):
        warmed(routed, weights)
        kept = step(routed, Batch(7), weights)
        before = [tensor.clone() for tensor in kept]
        for weight in weights:  # their gradients are taken over as they are, if nobody holds them
            weight.grad = None
        y_TD, _, grad_TD = forward(routed, Batch(8), weights)
        y_TD.backward(grad_TD)
        own = [weight.grad.clone() for weight in weights if weight.grad is not None]
        step(routed, Batch(9), weights)
    assert alike(kept, before)
    assert alike([weight.grad for weight in weights if weight.grad is not None], own)


def test_a_pass_without_backward_gives_its_tape_back() -> None:
    weights, recorder = weights_of(), OnCpu()
    routed = routed_by(PADDED)
    with recording(recorder):
        warmed(routed, weights)
        for number in range(3):
            forward(routed, Batch(number), weights)
    assert len(recorder.records) == 1


def test_a_second_backward_is_refused() -> None:
    weights = weights_of()
    routed = routed_by(PADDED)
    with recording(OnCpu()):
        warmed(routed, weights)
        y_TD, _, grad_TD = forward(routed, Batch(0), weights)
        y_TD.backward(grad_TD, retain_graph=True)
        with pytest.raises(RuntimeError, match=r"backward ran through .* before"):
            y_TD.backward(grad_TD)


def test_other_shapes_are_recorded_for_themselves_but_not_without_end() -> None:
    weights, recorder = weights_of(), OnCpu()
    routed, plain = routed_by(PADDED), routed_by(UNRECORDED)
    with recording(recorder):
        for tokens in range(1, MOST_KINDS + 2):
            for number in range(WARM_UPS + 1):
                batch = Batch(number, tokens=tokens)
                assert alike(step(routed, batch, weights), step(plain, batch, weights))
    assert len(recorder.records) == 2 * MOST_KINDS
    assert f"more than {MOST_KINDS} shapes" in str(GraphUse.of_all([routed.graph_use]))


def test_weights_that_move_are_read_where_they_are() -> None:
    routed, plain = routed_by(PADDED), routed_by(UNRECORDED)
    recorder = OnCpu()
    with recording(recorder):
        for number in range(WARM_UPS + MOST_MOVES):
            weights = weights_of()
            for again in range(2):
                batch = Batch(2 * number + again)
                assert alike(step(routed, batch, weights), step(plain, batch, weights))
    assert len(recorder.records) > 2


def test_weights_that_move_in_every_pass_are_refused() -> None:
    routed, all_weights = routed_by(PADDED), [weights_of() for _ in range(10)]
    with (
        recording(OnCpu()),
        pytest.raises(ValueError, match=r"ep\.cuda_graphs is true.*elsewhere in every pass.*leave"),
    ):
        for number, weights in enumerate(all_weights):
            step(routed, Batch(number), weights)


@pytest.mark.parametrize(("num_steps", "moved"), [(WARM_UPS + 1, 0), (WARM_UPS, 1)])
def test_weights_that_move_before_backward_are_refused(num_steps: int, moved: int) -> None:
    """As where ZeRO 3 gathers them anew: forward may find them where they were. Before a later
    backward, and before the first that is recorded."""
    weights = weights_of()
    routed = routed_by(PADDED)
    with recording(OnCpu()):
        for number in range(num_steps):
            step(routed, Batch(number), weights)
        y_TD, _, grad_TD = forward(routed, Batch(0), weights)
        weights[moved].data = weights[moved].detach().clone()
        with pytest.raises(ValueError, match=r"ep\.cuda_graphs is true.*elsewhere"):
            y_TD.backward(grad_TD)


def test_weights_that_change_before_backward_are_refused() -> None:
    """As autograd refuses them."""
    weights = weights_of()
    routed = routed_by(PADDED)
    with recording(OnCpu()):
        warmed(routed, weights)
        y_TD, _, grad_TD = forward(routed, Batch(0), weights)
        with torch.no_grad():
            weights[0].mul_(2)
        with pytest.raises(RuntimeError, match="changed between forward and backward"):
            y_TD.backward(grad_TD)
        y_TD, _, grad_TD = forward(routed, Batch(1), weights)
        y_TD.backward(grad_TD)


def test_passes_that_wait_for_rows_run_as_ever_and_say_so() -> None:
    """As of experts that go one by one: a GPU would have to be waited for."""
    weights, recorder = weights_of(), OnCpu()
    routed, plain = routed_by(ALONE), routed_by(ExpertParallel())
    with recording(recorder):
        warmed(routed, weights)
        with (
            mock.patch.object(slot_rows, "is_captured", _is_captured),
            pytest.warns(
                UserWarning,
                match=("not replayed, because the token counts of experts must be known"),
            ),
        ):
            for number in range(2):
                batch = Batch(number)
                ours = step(routed, batch, weights)
                assert alike(ours, step(plain, batch, weights))
    assert not recorder.records and "token counts of experts" in str(routed.graph_use)


def test_nothing_is_recorded_before_backward_has_run() -> None:
    weights, recorder = weights_of(), OnCpu()
    routed = routed_by(PADDED)
    with recording(recorder):
        runs = [forward(routed, Batch(number), weights) for number in range(WARM_UPS + 2)]
        assert not recorder.records
        for y_TD, _, grad_TD in runs:
            y_TD.backward(grad_TD)
        step(routed, Batch(0), weights)
    assert len(recorder.records) == 2


def test_checkpointed_passes_are_not_replayed_and_say_so() -> None:
    weights, recorder = weights_of(), OnCpu()
    routed, plain = routed_by(PADDED), routed_by(UNRECORDED)
    with recording(recorder):
        warmed(routed, weights)
        x_TD, expert_TK, score_TK, grad_TD = Batch(3).drawn()
        routed.rows.begin(is_training=True)
        with pytest.warns(UserWarning, match="not replayed, because activation checkpointing"):
            y_TD = checkpoint(routed, x_TD, expert_TK, score_TK, weights, use_reentrant=False)
        grads = torch.autograd.grad(y_TD, (x_TD, score_TK, *weights), grad_TD)
        assert alike([y_TD.detach(), *grads], step(plain, Batch(3), weights))
    assert not recorder.records
    assert "activation checkpointing" in str(routed.graph_use)


def test_passes_that_somebody_records_are_the_programs() -> None:
    weights, recorder = weights_of(), OnCpu(is_on=True)
    routed = routed_by(PADDED)
    with recording(recorder):
        for number in range(WARM_UPS + 2):
            step(routed, Batch(number), weights)
    assert not recorder.records and routed.graph_use.num_replayed == 0


def test_tasks_that_are_timed_are_the_programs() -> None:
    weights, recorder = weights_of(), OnCpu()
    routed = routed_by(PADDED)
    with recording(recorder):
        warmed(routed, weights)
        routed.tasks.is_wanted = True
        step(routed, Batch(0), weights)
        assert not recorder.records and routed.tasks.take()
        routed.tasks.is_wanted = False
        step(routed, Batch(1), weights)
    assert len(recorder.records) == 2


def test_passes_without_gradients_and_of_evaluation_are_the_programs() -> None:
    weights, recorder = weights_of(), OnCpu()
    routed = routed_by(PADDED)
    with recording(recorder):
        for number in range(WARM_UPS + 1):
            with torch.no_grad():
                forward(routed, Batch(number), weights)
            x_TD, expert_TK, score_TK, _ = Batch(number).drawn()
            routed.rows.begin(is_training=False)
            routed(x_TD, expert_TK, score_TK, weights)
    assert not recorder.records and not str(routed.graph_use)


def test_an_error_while_recording_says_what_to_leave_out() -> None:
    class Fails(OnCpu):
        def record(self, work: Callable[[], Tensors], after: Any = None) -> Again:
            raise RuntimeError("operation not permitted when stream is capturing")

    weights = weights_of()
    routed = routed_by(PADDED)
    with recording(Fails()):
        warmed(routed, weights)
        with pytest.raises(RuntimeError, match=r"not permitted.*leave ds_moe_ext\.ep\.cuda_graphs"):
            forward(routed, Batch(0), weights)


def _route_alone(rank: int, world_size: int) -> None:
    routed_by(ALONE, world_size=world_size)


def test_graphs_are_refused_where_passes_differ() -> None:
    for stated in pool_of(2).run(refusal, _route_alone):
        assert "ep.cuda_graphs is true, but 2 ranks exchange tokens" in stated
        assert "set ds_moe_ext.expert_parallel_size to 1" in stated
    with pytest.raises(ValueError, match=r"ep\.cuda_graphs is true.*may be dropped.*set"):
        routed_by(ALONE, LayerOptions(gate_may_drop=True))
    with pytest.raises(ValueError, match=r"ep\.cuda_graphs is true, but hooks.*leave one"):
        routed_by(PADDED, LayerOptions(hooks=Hooked(observers=(Hooks(),))))
    with pytest.raises(ValueError, match=r"ep\.cuda_graphs is true, but the chunks.*leave it out"):
        ExpertSharding().over(ALONE)


def test_a_person_is_reported() -> None:
    job = Job.at_start([Placement.block(E, 1)], np.zeros(1, dtype=np.int64))
    assert any("cuda_graphs has no effect on a CPU" in line for line in PADDED.notices(job))
    reported = str(GraphUse.of_all([GraphUse(1200, 1100, "they differ"), GraphUse(100, 90)]))
    assert "of 1,300 training passes of MoE layers 1,190 were replayed; others" in reported
    assert not str(GraphUse())


def test_a_cpu_has_no_graphs() -> None:
    weights = weights_of()
    routed, plain = routed_by(PADDED), routed_by(UNRECORDED)
    for number in range(WARM_UPS + 2):
        batch = Batch(number)
        assert alike(step(routed, batch, weights), step(plain, batch, weights))
    assert not routed.graph_use.num_passes
