# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of a model as one schedule, made of those that its layers run by. Pure.

Forward of all layers, then backward from the last to the first. Behind each MoE layer the host
computes: task ATTENTION, from the layer's tokens to the next layer's. Where a layer's program or
its block only begins to move replicas, the move is a task of its own here, GATHER. Its chunk range
is the pieces it moves: a layer whose replicas the layer before launches has two, any other has
one::

    forward     expert[i]       beside  gather[i+1,0]     attention[i]  beside  gather[i+1,1]
    backward    attention'[i]   beside  gather'[i+1,0]    expert'[i]    beside  gather'[i+1,1]

Who begins a move, and who waits for it, is stated by the tasks that the layers themselves run
(``orders.LayerTasks``): JOIN waits for what was gathered, HAVE_AGAIN for what was gathered again,
and the adjoint of START for the gradients that went to the owner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ds_moe_ext.schedule.orders import LayerTasks
from ds_moe_ext.schedule.task import (
    ATTENTION,
    GATHER,
    GRADIENTS,
    HAVE_AGAIN,
    JOIN,
    RECALL,
    START,
    ChunkRange,
    Kind,
    Op,
    Schedule,
    Stream,
    Task,
    Value,
)

LOSS = Kind("loss")  # what the host makes of the last layer's tokens
REPLICAS = Kind("replicas")  # a piece of a layer's replicas, arrived
AGAIN = Kind("replicas_again")  # all of them, in backward
SUMMED = Kind("summed")  # gradients of a piece, at the owner
ADDED = Kind("added")  # all of them, to those that were there
SLICE = Kind("slice", has_gradient=False)  # of the dense gradients, summed


def whole_step(layers: Sequence[LayerTasks], *, leads: bool = False) -> Schedule:
    """A step of a model, for ``simulate``.

    Tasks that begin a move, or wait for one, take no seconds. What a block does as it begins, it
    does when the layer before has its output; the first one at the very start. The step ends when
    all gradients are at the owner. Kinds of values of backward have a prime.

    Args:
        layers: what runs of each layer, in the order of the model. Tokens pass from one to the
            next; weights are given.
        leads: the host computes before the first layer, too, which may hide what its block does:
            task ATTENTION, numbered one below that layer. Else tokens are given to it.

    Raises:
        ValueError: there is no layer, or two have one number.
    """
    numbers = [each.layer for each in layers]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"the layers of the step have the numbers {numbers}; give one layer at least, and each "
            "a number of its own"
        )
    layers = [each._replace(backward=each.backward.once(_with_primes)) for each in layers]
    step = _Step(layers, leads)
    step.run()
    tokens = () if leads else _tokens(layers[0].forward.inputs)
    outputs = _outputs(layers, step.tasks)
    return Schedule(tuple(step.tasks), (*tokens, *_untokened(layers)), outputs, is_round_trip=True)


def in_streams(schedule: Schedule, streams: Mapping[Stream, Stream]) -> Schedule:
    """The same tasks in the same order, some in other streams: all that is sent in one queue,
    say."""
    tasks = []
    for task in schedule.tasks:
        stream = streams.get(task.stream, task.stream)
        tasks.append(replace(task, op=replace(task.op, stream=stream, back=stream)))
    return replace(schedule, tasks=tuple(tasks))


class _Ran(NamedTuple):
    """Where the tasks of a layer stand that ran in forward."""

    block: list[int]  # what its block did
    program: list[int]  # its own
    host: int  # what the host computed behind it


class _Step:
    """The tasks of a step, as they are added."""

    def __init__(self, layers: Sequence[LayerTasks], leads: bool) -> None:
        self.tasks: list[Task] = []
        self._layers, self._leads = layers, leads
        backward = (task for each in layers for task in each.backward.tasks)
        self._freed = {task.layer for task in backward if task.op == HAVE_AGAIN}
        self._gathers: dict[int, list[int]] = defaultdict(list)  # of forward, by layer
        self._recalled: set[int] = set()
        self._first = 0  # where what leads stands
        self._owner: dict[int, list[Value]] = defaultdict(list)  # gradients of replicas, by layer

    def run(self) -> None:
        """Forward of all layers, backward of all, and the end of the first block's."""
        ran = self._forward()
        grads, begun = self.tasks[-1].writes, list[int]()
        for each, (block, program, host) in zip(reversed(self._layers), reversed(ran)):
            given = _tokens(each.backward.inputs)
            self._add(Task(ATTENTION, each.layer, ChunkRange(0, 1), grads, given, (host,)))
            self._backward(each.backward, program, (*given, *self._end(begun)))
            grads, begun = _tokens(each.backward.outputs), block
        if self._leads:
            done = (Value(LOSS, self._before),)
            self._add(Task(ATTENTION, self._before, ChunkRange(0, 1), grads, done, (self._first,)))
        self._end(begun)

    @property
    def _before(self) -> int:
        """Number of what the host computes before the first layer."""
        return self._layers[0].layer - 1

    def _forward(self) -> list[_Ran]:
        ran = []
        block = self._begin(self._layers[0], ())
        if self._leads:
            tokens = _tokens(self._layers[0].forward.inputs)
            self._first = self._add(Task(ATTENTION, self._before, ChunkRange(0, 1), (), tokens))
        for each, following in zip(self._layers, (*self._layers[1:], None)):
            program = [self._add(self._with_replicas(task)) for task in each.forward.tasks]
            y, own = _tokens(each.forward.outputs), block
            passed: tuple[Value, ...] = (Value(LOSS, each.layer),)
            if following is not None:
                block, passed = self._begin(following, y), _tokens(following.forward.inputs)
            host = self._add(Task(ATTENTION, each.layer, ChunkRange(0, 1), y, passed))
            ran.append(_Ran(own, program, host))
        return ran

    def _begin(self, layer: LayerTasks, given: tuple[Value, ...]) -> list[int]:
        """What its block does, once it is given the tokens of the layer before."""
        return [self._add(replace(task, reads=(*task.reads, *given))) for task in layer.block]

    def _end(self, begun: Sequence[int]) -> tuple[Value, ...]:
        """The end of a block's backward: its starts' gradients are back, the last one's first."""
        starts = [place for place in reversed(begun) if self.tasks[place].op == START]
        for place in starts:
            task = self.tasks[place]
            reads, writes = tuple(self._owner[task.layer]), (Value(ADDED, task.layer),)
            self._add(replace(task, reads=reads, writes=writes, adjoint_of=(place,)))
        return tuple(Value(ADDED, self.tasks[place].layer) for place in starts)

    def _backward(self, program: Schedule, ran: Sequence[int], given: Sequence[Value]) -> None:
        """A layer's. It begins when all that is given is there."""
        for task in program.tasks:
            adjoint_of = tuple(ran[position] for position in task.adjoint_of)
            needs = given if set(task.reads) <= set(program.inputs) else ()
            reads = tuple(dict.fromkeys((*task.reads, *needs)))
            run = Task(task.op, task.layer, task.chunk_range, reads, task.writes, adjoint_of)
            self._add(self._with_replicas(run))

    def _with_replicas(self, task: Task) -> Task:
        """The task of a program, waiting for the replicas that it needs."""
        needs: tuple[Value, ...] = ()
        if task.op == JOIN and not task.adjoint_of:
            needs = tuple(self.tasks[place].writes[0] for place in self._gathers[task.layer])
        elif task.op == HAVE_AGAIN:
            if task.layer not in self._recalled:
                self._gather_again(GATHER, task.layer, task.reads)
            needs = (Value(AGAIN, task.layer),)
        return replace(task, reads=(*task.reads, *needs)) if needs else task

    def _add(self, task: Task) -> int:
        """Add a task, and behind it what it begins; the task's position."""
        position = len(self.tasks)
        self.tasks.append(task)
        begun = task.op.begins
        if begun is not None and begun.op is GRADIENTS:
            sums = (Value(SLICE, task.layer, task.chunk_range),)
            self.tasks.append(Task(GRADIENTS, task.layer, task.chunk_range, task.writes, sums))
        elif begun is not None and begun.is_adjoint:
            self._send_to_owner(begun.op, task)
        elif begun is not None and task.op != RECALL:
            self._gather(begun.op, task)
        elif begun is not None and task.layer in self._freed:
            self._gather_again(begun.op, task.layer, task.writes)
        return position

    def _gather(self, op: Op, by: Task) -> None:
        self._gathers[by.layer].append(len(self.tasks))
        replicas = (Value(REPLICAS, by.layer, by.chunk_range),)
        self.tasks.append(Task(op, by.layer, by.chunk_range, by.writes, replicas))

    def _gather_again(self, op: Op, layer: int, after: tuple[Value, ...]) -> None:
        self._recalled.add(layer)
        pieces = ChunkRange(0, len(self._gathers[layer]))
        self.tasks.append(Task(op, layer, pieces, after, (Value(AGAIN, layer),)))

    def _send_to_owner(self, op: Op, by: Task) -> None:
        sums = (Value(SUMMED, by.layer, by.chunk_range),)
        self._owner[by.layer] += sums
        gathers = tuple(self._gathers[by.layer])
        self.tasks.append(Task(op, by.layer, by.chunk_range, by.writes, sums, gathers))


def _tokens(values: Iterable[Value]) -> tuple[Value, ...]:
    """What passes from layer to layer."""
    return tuple(value for value in values if value.kind.by_token)


def _with_primes(backward: Schedule) -> Schedule:
    """Backward with values that are not forward's."""
    tasks = (
        Task(
            task.op,
            task.layer,
            task.chunk_range,
            tuple(map(primed, task.reads)),
            tuple(map(primed, task.writes)),
            task.adjoint_of,
        )
        for task in backward.tasks
    )
    inputs, outputs = (tuple(map(primed, ends)) for ends in (backward.inputs, backward.outputs))
    return Schedule(tuple(tasks), inputs, outputs)


def primed(value: Value) -> Value:
    """A value of backward: that of forward, with a prime."""
    return value._replace(kind=_prime(value.kind))


@cache
def _prime(kind: Kind) -> Kind:
    return replace(kind, name=f"{kind.name}'")


def _untokened(layers: Sequence[LayerTasks]) -> tuple[Value, ...]:
    """What every program takes besides tokens."""
    taken = (value for _, *programs in layers for each in programs for value in each.inputs)
    return tuple(value for value in taken if not value.kind.by_token)


def _outputs(layers: Sequence[LayerTasks], tasks: Sequence[Task]) -> tuple[Value, ...]:
    """Gradients: of the first layer's tokens, of all weights, and of their replicas."""
    given = (value for each in layers for value in each.backward.outputs)
    rest = (value for value in given if not value.kind.by_token)
    sums = (value for task in tasks for value in task.writes if value.kind == SUMMED)
    return (*_tokens(layers[0].backward.outputs), *rest, *sums)
