# SPDX-License-Identifier: Apache-2.0
"""Programs of small stages against plain autograd, float64.

Shape letters: T tokens, D width.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_moe_ext.moe.expert import Local
from ds_moe_ext.schedule.executor import InlineStreams, Mark, ScheduleStreams, ThreadStreams
from ds_moe_ext.schedule.program import Program
from ds_moe_ext.schedule.stages import LayerStages, Stage
from ds_moe_ext.schedule.task import (
    COMPUTE,
    INTER,
    PARAM,
    ChunkRange,
    Cut,
    Kind,
    Op,
    Schedule,
    Task,
    Value,
    chunk_ranges,
)

INLINE, THREADS = InlineStreams(), ThreadStreams()
BOTH = pytest.mark.parametrize("streams", [INLINE, THREADS], ids=["inline", "threads"])

T, D = 11, 3
WHOLE = ChunkRange(0, 1)
X = Kind("x", by_token=True)
A, B, Y = (Kind(name, by_token=True) for name in "aby")
W = Kind("w")  # a tuple of tensors
U = Kind("u")
COUNT = Kind("count", has_gradient=False)

DOUBLE = Op("double", COMPUTE)
SCALE = Op("scale", INTER)
JOIN = Op("join", COMPUTE)
NOTE = Op("note", PARAM)


def rand(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def task(
    op: Op, reads: Sequence[Kind], writes: Sequence[Kind], chunk_range: ChunkRange = WHOLE
) -> Task:
    def value(kind: Kind) -> Value:
        return Value(kind, 0, chunk_range if kind.by_token else None)

    return Task(op, 0, chunk_range, tuple(map(value, reads)), tuple(map(value, writes)))


def given(*kinds: Kind, num_chunks: int = 1) -> tuple[Value, ...]:
    whole = ChunkRange(0, num_chunks)
    return tuple(Value(kind, 0, whole if kind.by_token else None) for kind in kinds)


def scale(x: Tensor, w: tuple[Tensor, Tensor]) -> tuple[Tensor]:
    return (x * w[0] + w[1] ** 2,)


def join(x: Tensor, a: Tensor, b: Tensor, w: tuple[Tensor, Tensor]) -> tuple[Tensor]:
    return (x * a + b.sin() * w[0],)


def diamond(streams: ScheduleStreams, *observers: Any) -> Program:
    """x is read by three tasks and the weights by two: ``y = join(x, 2 x, scale(x, w), w)``."""
    forward = Schedule(
        (
            task(DOUBLE, [X], [A]),
            task(SCALE, [X, W], [B]),
            task(JOIN, [X, A, B, W], [Y]),
        ),
        given(X, W),
        given(Y),
    )
    stages = {DOUBLE: Local(lambda x: (x * 2,)), SCALE: Local(scale), JOIN: Local(join)}
    return Program(forward, forward.reversed(), LayerStages(stages, observers), streams)


def diamond_by_autograd(x: Tensor, w: tuple[Tensor, Tensor]) -> Tensor:
    return join(x, x * 2, scale(x, w)[0], w)[0]


def leaves() -> tuple[Tensor, Tensor, Tensor]:
    x, first, second = rand(T, D), rand(D, seed=1), rand(D, seed=2)
    return x.requires_grad_(), first.requires_grad_(), second.requires_grad_()


def close(ours: Tensor | None, reference: Tensor | None) -> bool:
    assert ours is not None
    assert reference is not None
    return torch.allclose(ours, reference, rtol=1e-12, atol=1e-12)


# Gradients.


@BOTH
def test_gradients_of_what_several_tasks_read_are_summed(streams: ScheduleStreams) -> None:
    x, *w = leaves()
    (y,) = diamond(streams)(x, tuple(w))
    x2, *w2 = leaves()
    reference = diamond_by_autograd(x2, tuple(w2))
    assert close(y, reference)
    assert y.grad_fn is not None
    grad = rand(T, D, seed=3)
    y.backward(grad)
    reference.backward(grad)
    for ours, theirs in zip((x, *w), (x2, *w2)):
        assert close(ours.grad, theirs.grad)


@BOTH
@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_only_some_inputs_want_gradients(
    streams: ScheduleStreams, wanted: tuple[bool, bool]
) -> None:
    def run(function: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]) -> list[Tensor | None]:
        x, first, second = leaves()
        x.requires_grad_(wanted[0])
        first.requires_grad_(wanted[1])
        second.requires_grad_(False)
        function(x, (first, second)).sum().backward()
        return [x.grad, first.grad, second.grad]

    ours = run(lambda x, w: diamond(streams)(x, w)[0])
    reference = run(diamond_by_autograd)
    assert [g is None for g in ours] == [not wanted[0], not wanted[1], True]
    for our, their in zip(ours, reference):
        assert (our is None and their is None) or close(our, their)


@BOTH
def test_sums_do_not_depend_on_timing(streams: ScheduleStreams) -> None:
    """``(1e16 + 1) - 1e16`` is 0 in this order and 1 in another."""
    reads = {Op("r0", PARAM): -1e16, Op("r1", INTER): 1.0, Op("r2", COMPUTE): 1e16}

    @dataclass(frozen=True)
    class Slow:
        factor: float
        pause_s: float

        def forward(
            self, chunk_range: ChunkRange, x: Tensor
        ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            return (x,), ()

        def backward(self, chunk_range: ChunkRange, saved: Any, grad: Tensor) -> tuple[Any, ...]:
            time.sleep(self.pause_s)
            return (grad * self.factor,)

        def recut(self, chunk_range: ChunkRange, pieces: Any) -> tuple[Any, ...]:
            return ()

    outputs = [Kind(f"y{i}", by_token=True) for i in range(3)]
    tasks = tuple(task(op, [X], [kind]) for op, kind in zip(reads, outputs))
    forward = Schedule(tasks, given(X), given(*outputs))
    for pauses in ((0.0, 2e-3, 4e-3), (4e-3, 2e-3, 0.0), (0.0, 4e-3, 0.0)):
        stages = {op: Slow(f, s) for (op, f), s in zip(reads.items(), pauses)}
        x = torch.ones(T, 1, dtype=torch.float64, requires_grad=True)
        sum(Program(forward, forward.reversed(), LayerStages(stages), streams)(x)).sum().backward()
        # Backward order: r2, r1, r0.
        assert x.grad is not None
        assert x.grad.unique().tolist() == [(1e16 + 1.0) - 1e16]


@BOTH
def test_inputs_that_nobody_reached_get_zeros(streams: ScheduleStreams) -> None:
    """Note reads u and writes a count, which is no output; v is read by nobody at all."""
    v = Kind("v")
    forward = Schedule(
        (task(DOUBLE, [X], [Y]), task(NOTE, [U, W], [A])), given(X, U, W, v), given(Y)
    )
    stages = {DOUBLE: Local(lambda x: (x * 2,)), NOTE: Local(lambda u, w: (u * w[0],))}
    program = Program(forward, forward.reversed(), LayerStages(stages), streams)
    x, u, *w, alone = (rand(4, 2, seed=i).requires_grad_() for i in range(5))
    w[1].requires_grad_(False)
    fired: list[str] = []
    for name, tensor in (("u", u), ("w", w[0]), ("v", alone)):
        tensor.register_hook(lambda grad, name=name: fired.append(name))
    (y,) = program(x, u, tuple(w), alone)
    y.sum().backward()
    assert close(x.grad, torch.full_like(x, 2.0))
    for tensor in (u, w[0], alone):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.zeros(4, 2, dtype=torch.float64))
    assert w[1].grad is None
    assert sorted(fired) == ["u", "v", "w"]


@BOTH
def test_an_output_that_nobody_used_has_no_part(streams: ScheduleStreams) -> None:
    """Two outputs, one of them used: the adjoint of the other's task has nothing to do."""
    forward = Schedule((task(DOUBLE, [X], [A]), task(SCALE, [X, W], [B])), given(X, W), given(A, B))
    stages = {DOUBLE: Local(lambda x: (x * 2,)), SCALE: Local(scale)}
    x, *w = leaves()
    a, _ = Program(forward, forward.reversed(), LayerStages(stages), streams)(x, tuple(w))
    a.sum().backward()
    assert close(x.grad, torch.full_like(x, 2.0))
    assert close(w[0].grad, torch.zeros_like(w[0]))


@BOTH
def test_integers_come_out_without_a_gradient(streams: ScheduleStreams) -> None:
    forward = Schedule(
        (task(DOUBLE, [X], [Y]), task(NOTE, [X], [COUNT])), given(X), given(Y, COUNT)
    )
    stages = {
        DOUBLE: Local(lambda x: (x * 2,)),
        NOTE: Local(lambda x: ((x > 0).sum(),), graded=(False,)),
    }
    x = rand(T, D).requires_grad_()
    y, count = Program(forward, forward.reversed(), LayerStages(stages), streams)(x)
    assert int(count) == int((x > 0).sum())
    assert not count.requires_grad
    y.sum().backward()
    assert close(x.grad, torch.full_like(x, 2.0))


def test_a_program_of_weights_alone() -> None:
    forward = Schedule((task(NOTE, [W], [U]),), given(W), given(U))
    layer_stages = LayerStages({NOTE: Local(lambda w: (w[0] * w[1],))})
    program = Program(forward, forward.reversed(), layer_stages, INLINE)
    first, second = (rand(5, seed=i).requires_grad_() for i in (1, 2))
    program((first, second))[0].sum().backward()
    assert close(first.grad, second)
    assert close(second.grad, first)


@BOTH
def test_a_second_backward_is_refused(streams: ScheduleStreams) -> None:
    x, *w = leaves()
    (y,) = diamond(streams)(x, tuple(w))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run one backward a forward"):
        y.sum().backward()


def test_an_op_without_a_stage_is_named() -> None:
    program = diamond(INLINE)
    stages = {op: stage for op, stage in program.layer_stages.stages.items() if op != SCALE}
    with pytest.raises(ValueError, match=r"task scale\[0,0\] has no stage; .* op 'scale'"):
        replace(program, layer_stages=LayerStages(stages))


@BOTH
def test_an_error_in_a_stage_reaches_the_caller(streams: ScheduleStreams) -> None:
    def fails(x: Tensor, w: Any) -> tuple[Tensor]:
        raise FloatingPointError("as it happens")

    program = diamond(streams)
    broken = replace(
        program, layer_stages=LayerStages({**program.layer_stages.stages, SCALE: Local(fails)})
    )
    x, *w = leaves()
    with pytest.raises(FloatingPointError, match="as it happens"):
        broken(x, tuple(w))
    assert close(program(x, tuple(w))[0], diamond_by_autograd(x, tuple(w)))


@BOTH
def test_a_task_that_the_strategy_put_between(streams: ScheduleStreams) -> None:
    """Its stage runs forward, on gradients: here it makes the weights' gradients ten times."""
    program = diamond(streams)
    partial = Value(Kind("partial"), 0)
    (weights,) = given(W)
    tasks = tuple(
        replace(t, writes=tuple(partial if value == weights else value for value in t.writes))
        for t in program.backward.tasks
    )
    between = Task(NOTE, 0, WHOLE, (partial,), (weights,))
    backward = Schedule((*tasks, between), program.backward.inputs, program.backward.outputs)
    tenfold = Local(lambda grads: (tuple(grad * 10 for grad in grads),))
    layer_stages = LayerStages({**program.layer_stages.stages, NOTE: tenfold})
    changed = replace(program, backward=backward, layer_stages=layer_stages)
    gradients = []
    for each in (program, changed):
        x, *w = leaves()
        each(x, tuple(w))[0].sum().backward()
        gradients.append([x.grad, *(part.grad for part in w)])
    (x_grad, *w_grads), (x_grad2, *w_grads2) = gradients
    assert close(x_grad2, x_grad)
    for ten, one in zip(w_grads2, w_grads):
        assert close(ten, one * 10)


# Without gradients.


@dataclass
class Remembers:
    """Squares; keeps weak references to the memory of what it saved, which numpy owns."""

    memory: list[weakref.ref[np.ndarray]] = field(default_factory=list)
    num_forwards: int = 0
    num_backwards: int = 0

    def keep(self, x: Tensor) -> Tensor:
        array = x.detach().numpy().copy()
        self.memory.append(weakref.ref(array))
        return torch.from_numpy(array)

    @property
    def num_alive(self) -> int:
        return sum(ref() is not None for ref in self.memory)

    def all_freed(self) -> bool:
        if self.num_alive:
            gc.collect()  # an autograd node may lie in a cycle
        return self.num_alive == 0

    def forward(
        self, chunk_range: ChunkRange, x: Tensor
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        self.num_forwards += 1
        return (x.detach() ** 2,), (self.keep(x), "not a tensor")

    def backward(
        self, chunk_range: ChunkRange, saved: tuple[Any, ...], grad: Tensor
    ) -> tuple[Any, ...]:
        self.num_backwards += 1
        assert saved[1] == "not a tensor"
        return (2 * saved[0] * grad,)

    def recut(self, chunk_range: ChunkRange, pieces: Any) -> tuple[Any, ...]:
        raise AssertionError("it is not cut anew")


def square(streams: ScheduleStreams) -> tuple[Program, Remembers]:
    stage = Remembers()
    forward = Schedule((task(DOUBLE, [X], [Y]),), given(X), given(Y))
    return Program(forward, forward.reversed(), LayerStages({DOUBLE: stage}), streams), stage


@BOTH
def test_nothing_is_kept_where_no_gradient_is_wanted(streams: ScheduleStreams) -> None:
    program, stage = square(streams)
    x = rand(T, D).requires_grad_()
    with torch.no_grad():
        (y,) = program(x)
    (y2,) = program(x.detach())
    for each in (y, y2):
        assert close(each, x.detach() ** 2)
        assert not each.requires_grad
    assert stage.num_forwards == 2
    assert stage.all_freed()


@BOTH
def test_what_was_saved_is_freed_by_backward(streams: ScheduleStreams) -> None:
    program, stage = square(streams)
    x = rand(T, D).requires_grad_()
    (y,) = program(x)
    assert stage.num_alive == 1
    y.sum().backward()
    assert stage.all_freed()
    assert close(x.grad, 2 * x.detach())
    # And by dropping the output.
    (y,) = program(x)
    del y
    assert stage.all_freed()


def test_a_value_is_freed_when_its_last_reader_has_run() -> None:
    """a -> b -> c: while c runs, a is gone."""
    alive: list[int] = []
    stage = Remembers()
    first, second, third = (Op(name, COMPUTE) for name in ("first", "second", "third"))

    def look(b: Tensor) -> tuple[Tensor]:
        alive.append(stage.num_alive)
        return (b * 1,)

    forward = Schedule(
        (task(first, [X], [A]), task(second, [A], [B]), task(third, [B], [Y])), given(X), given(Y)
    )
    stages: dict[Op, Stage] = {
        first: Local(lambda x: (stage.keep(x),)),
        second: Local(lambda a: (look(a)[0] + 1,)),
        third: Local(look),
    }
    with torch.no_grad():
        Program(forward, forward.reversed(), LayerStages(stages), INLINE)(rand(T, D))
    assert alive == [1, 0]


# Activation checkpointing.


@BOTH
def test_checkpointing_keeps_nothing_and_gives_the_same_gradients(streams: ScheduleStreams) -> None:
    program, stage = square(streams)
    x, x2 = (rand(T, D).requires_grad_() for _ in range(2))
    y = checkpoint(lambda x: program(x.sin())[0], x, use_reentrant=False)
    assert stage.all_freed()
    y.sum().backward()
    (x2.sin() ** 2).sum().backward()
    assert close(x.grad, x2.grad)
    assert (stage.num_forwards, stage.num_backwards) == (2, 1)
    assert stage.all_freed()


def test_checkpointing_keeps_nothing_of_local_stages() -> None:
    """What autograd saves inside of a stage goes the same way."""
    stage = Remembers()
    forward = Schedule((task(DOUBLE, [X], [Y]),), given(X), given(Y))
    weigh = Local(lambda x: (x.sin() * stage.keep(x),))
    program = Program(forward, forward.reversed(), LayerStages({DOUBLE: weigh}), INLINE)
    x, x2 = (rand(T, D).requires_grad_() for _ in range(2))
    y = checkpoint(lambda x: program(x)[0], x, use_reentrant=False)
    assert stage.all_freed()
    y.sum().backward()
    (x2.sin() * x2.detach()).sum().backward()
    assert close(x.grad, x2.grad)
    assert stage.all_freed()
    (y,) = program(x)  # without, it is kept
    assert stage.num_alive == 1


# Chunks.


@dataclass(frozen=True)
class Power:
    """Cubes each row; what it saved can be cut anew."""

    cut: Cut

    def forward(
        self, chunk_range: ChunkRange, x: Tensor
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        assert x.shape[0] == self.cut.length(chunk_range)
        return (x.detach() ** 3,), (x.detach(),)

    def backward(
        self, chunk_range: ChunkRange, saved: tuple[Any, ...], grad: Tensor
    ) -> tuple[Any, ...]:
        assert grad.shape[0] == self.cut.length(chunk_range)
        return (3 * saved[0] ** 2 * grad,)

    def recut(
        self, chunk_range: ChunkRange, pieces: Sequence[tuple[ChunkRange, tuple[Any, ...]]]
    ) -> tuple[Any, ...]:
        joined = torch.cat([saved[0] for _, saved in pieces])
        start = self.cut.first(chunk_range) - self.cut.first(pieces[0][0])
        return (joined.narrow(0, start, self.cut.length(chunk_range)),)


FIRST, SECOND = Op("first", INTER), Op("second", COMPUTE)


def powers(num_chunks: int, first: int, second: int) -> Schedule:
    """x -> a -> y, each op with a degree of its own."""
    return Schedule(
        (
            *(
                task(FIRST, [X], [A], chunk_range)
                for chunk_range in chunk_ranges(num_chunks, first)
            ),
            *(
                task(SECOND, [A], [Y], chunk_range)
                for chunk_range in chunk_ranges(num_chunks, second)
            ),
        ),
        given(X, num_chunks=num_chunks),
        given(Y, num_chunks=num_chunks),
    )


@BOTH
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 6, 23])
@pytest.mark.parametrize(
    ("forward_degrees", "backward_degrees"),
    [
        ((1, 1), (6, 6)),
        ((2, 2), (3, 3)),
        ((3, 3), (2, 2)),
        ((6, 6), (1, 1)),
        ((2, 6), (3, 2)),
        ((2, 3), (2, 3)),  # a chunk of the second op lies in two of the first
        ((3, 2), (1, 3)),
    ],
)
def test_backward_may_be_cut_otherwise(
    streams: ScheduleStreams,
    num_tokens: int,
    forward_degrees: tuple[int, int],
    backward_degrees: tuple[int, int],
) -> None:
    forward = powers(6, *forward_degrees)
    backward = forward.backward_cut_as(powers(6, *backward_degrees))
    power = Power(Cut.equal(num_tokens, 6))
    program = Program(
        forward, backward, LayerStages({FIRST: power, SECOND: power}), streams, num_chunks=6
    )
    x = rand(num_tokens, D).requires_grad_()
    (y,) = program(x)
    assert close(y, x.detach() ** 9)
    grad = rand(num_tokens, D, seed=1)
    y.backward(grad)
    assert close(x.grad, 9 * x.detach() ** 8 * grad)


@BOTH
@pytest.mark.parametrize("degrees", [(1, 2), (2, 2), (3, 2), (6, 4)])
def test_what_several_ops_read_in_chunks_is_summed_chunk_by_chunk(
    streams: ScheduleStreams, degrees: tuple[int, int]
) -> None:
    """``y = a + b`` with ``a = x ** 3`` and ``b = x ** 3``, in chunks of two sizes."""
    num_chunks = 12
    tasks = (
        *(
            task(FIRST, [X], [A], chunk_range)
            for chunk_range in chunk_ranges(num_chunks, degrees[0])
        ),
        *(
            task(SECOND, [X], [B], chunk_range)
            for chunk_range in chunk_ranges(num_chunks, degrees[1])
        ),
        task(JOIN, [A, B], [Y], ChunkRange(0, num_chunks)),
    )
    forward = Schedule(tasks, given(X, num_chunks=num_chunks), given(Y, num_chunks=num_chunks))
    power = Power(Cut.equal(T, num_chunks))
    stages = {FIRST: power, SECOND: power, JOIN: Local(lambda a, b: (a + b,))}
    x = rand(T, D).requires_grad_()
    (y,) = Program(forward, forward.reversed(), LayerStages(stages), streams, num_chunks)(x)
    assert close(y, 2 * x.detach() ** 3)
    y.sum().backward()
    assert close(x.grad, 6 * x.detach() ** 2)


@BOTH
def test_chunks_that_no_gradient_reached_are_zero(streams: ScheduleStreams) -> None:
    """Of two outputs, first half and second half, one is used."""
    halves = chunk_ranges(2, 2)
    forward = Schedule(
        tuple(task(FIRST, [X], [Y], chunk_range) for chunk_range in halves),
        given(X, num_chunks=2),
        tuple(Value(Y, 0, chunk_range) for chunk_range in halves),
    )
    power = Power(Cut.equal(T, 2))
    x = rand(T, D).requires_grad_()
    _, second = Program(forward, forward.reversed(), LayerStages({FIRST: power}), streams, 2)(x)
    second.sum().backward()
    # 11 tokens: 6 and 5.
    expected = 3 * x.detach() ** 2
    expected[:6] = 0
    assert close(x.grad, expected)


# Observers.


@dataclass
class Sees:
    is_on: bool
    seen: list[str] = field(default_factory=list)

    def saw(self, task: Task, start: Mark, end: Mark, streams: ScheduleStreams) -> None:
        assert streams.seconds_between(start, end) >= 0
        self.seen.append(str(task))

    def issued(self, task: Task, seconds: float) -> None:
        raise AssertionError("no device runs these tasks")


class CountingStreams(InlineStreams):
    """Inline streams that count how often they are asked for the time."""

    def __init__(self) -> None:
        self.num_marks = 0

    def mark(self) -> Mark:
        self.num_marks += 1
        return super().mark()


def test_observers_see_all_tasks_in_order_when_they_are_on() -> None:
    on, off = Sees(True), Sees(False)
    streams = CountingStreams()
    program = diamond(streams, on, off)
    x, *w = leaves()
    (y,) = program(x, tuple(w))
    forward = ["double[0,0]", "scale[0,0]", "join[0,0]"]
    assert on.seen == forward
    on.is_on, off.is_on = False, True
    y.sum().backward()
    assert on.seen == forward
    assert off.seen == ["join'[0,0]", "scale'[0,0]", "double'[0,0]"]
    assert streams.num_marks == 12  # begin and end of each task
    off.is_on = False
    program(x, tuple(w))
    assert streams.num_marks == 12
    assert (len(on.seen), len(off.seen)) == (3, 3)
