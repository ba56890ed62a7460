"""One optimizer step of a model as one schedule, made of those that its layers run by. Pure.

Forward of all layers, then backward from the last to the first. Behind each MoE layer the host
computes: task ATTENTION, from the layer's tokens to the next layer's. Where a layer's program only
begins to move copies, the move is a task of its own here, GATHER. Its span is the pieces it moves:
a layer whose copies the layer before launches has two, any other has one::

    forward     expert[i]       beside  gather[i+1,0]     attention[i]  beside  gather[i+1,1]
    backward    attention'[i]   beside  gather'[i+1,0]    expert'[i]    beside  gather'[i+1,1]

Where a pass waits for its copies, as the code does that moves them (``moe/copies/join.py``): task
JOIN, for what was gathered; the beginning of a layer's backward, for what is gathered again; and
where the pass began, on the way back, for the gradients that go home. It began with the block of
the layer, or, where the block before launches the copies, with that one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ds_moe_ext.schedule.task import (
    ATTENTION,
    GATHER,
    GRADIENTS,
    JOIN,
    RECALL,
    Kind,
    Lane,
    Op,
    Schedule,
    Span,
    Task,
    Value,
)

LOSS = Kind("loss")  # what the host makes of the last layer's tokens
COPIES = Kind("copies")  # a piece of a layer's copies, arrived
AGAIN = Kind("copies_again")  # all of them, in backward
SUMMED = Kind("summed")  # gradients of a piece, at home
SLICE = Kind("slice", has_gradient=False)  # of the dense gradients, summed

Programs = tuple[Schedule, Schedule]  # forward and backward of one layer


def whole_step(layers: Sequence[Programs], *, freed: Collection[int] = ()) -> Schedule:
    """A step of a model, for ``simulate``.

    Tasks that begin a move, or wait for one, take no seconds. What no layer launches or recalls,
    the host does: copies set out when the layer before has its output, the first layer's at the
    very start, where nothing hides them; freed copies, when the layer's backward begins. The step
    ends when all gradients are at home. Kinds of values of backward have a prime.

    Args:
        layers: forward and backward of each layer, in the order of the model. Tokens pass from one
            to the next; weights are given.
        freed: numbers of layers whose copies are freed after forward and gathered again, in one
            piece, before the backward of their experts. The last layer's are not: it is next.

    Raises:
        ValueError: there is no layer, or two have one number.
    """
    numbers = [forward.outputs[0].layer for forward, _ in layers]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"the layers of the step have the numbers {numbers}; give one layer at least, and each "
            "a number of its own"
        )
    programs = [(forward, _primed(backward)) for forward, backward in layers]
    step = _Step(freed=set(freed) - {numbers[-1]})
    step.launch_rest(programs[0][0], after=())
    step.run(programs)
    outputs = _outputs(programs, step.tasks)
    return Schedule(tuple(step.tasks), _inputs(programs), outputs, is_round_trip=True)


def in_lanes(schedule: Schedule, lanes: Mapping[Lane, Lane]) -> Schedule:
    """The same tasks in the same order, some in other lanes: all that is sent in one queue, say.

    Args:
        schedule: tasks in issue order.
        lanes: for a lane, the one that its tasks move to; the others stay. Ops keep their names.
    """
    tasks = []
    for task in schedule.tasks:
        lane = lanes.get(task.lane, task.lane)
        tasks.append(replace(task, op=replace(task.op, lane=lane, back=lane)))
    return replace(schedule, tasks=tuple(tasks))


class _Step:
    """The tasks of a step, as they are added.

    Args:
        freed: layers whose copies are gathered again.
    """

    def __init__(self, freed: Collection[int]) -> None:
        self.tasks: list[Task] = []
        self._freed = freed
        self._gathers: dict[int, list[int]] = defaultdict(list)  # of forward, by layer
        self._carried: set[int] = set()  # layers whose copies another layer launched
        self._recalled: set[int] = set()
        self._home: dict[int, list[Value]] = defaultdict(list)  # gradients of copies, by layer

    def run(self, layers: Sequence[Programs]) -> None:
        """Forward of the first layer, both of all layers after it, backward of the first."""
        (forward, backward), *others = layers
        places = [self._add(self._with_copies(task)) for task in forward.tasks]
        y = _tokens(forward.outputs)
        layer = y[0].layer
        passed: tuple[Value, ...] = (Value(LOSS, layer),)
        graded = passed
        if others:
            following, its_backward = others[0]
            passed, graded = _tokens(following.inputs), _tokens(its_backward.outputs)
            self.launch_rest(following, after=y)
        host = self._add(Task(ATTENTION, layer, Span(0, 1), y, passed))
        if others:
            self.run(others)
        grads = _tokens(backward.inputs)
        self._add(Task(ATTENTION, layer, Span(0, 1), graded, grads, (host,)))
        if self._is_freed(layer) and layer not in self._recalled:
            self._gather_again(GATHER, layer, after=grads)
        begun = self._begun_behind([forward.outputs[0].layer for forward, _ in others])
        waits = [*([Value(AGAIN, layer)] if self._is_freed(layer) else ()), *begun]
        for task in backward.tasks:
            adjoint_of = tuple(places[position] for position in task.adjoint_of)
            needs = waits if set(task.reads) <= set(backward.inputs) else ()
            self._add(replace(task, adjoint_of=adjoint_of, reads=(*task.reads, *needs)))

    def _begun_behind(self, following: Sequence[int]) -> list[Value]:
        """Gradients at home of the passes that began between a layer and the next one, in forward:
        its own, and that of the layer behind it, if the next one carries its copies."""
        begun = [n for n in following[:1] if n not in self._carried]
        begun += [n for n in following[1:2] if n in self._carried]
        return [value for number in begun for value in self._home[number]]

    def launch_rest(self, forward: Schedule, after: tuple[Value, ...]) -> None:
        """Gather the copies that a program waits for, if no layer has launched them."""
        for task in forward.tasks:
            if task.op == JOIN and not self._gathers[task.layer]:
                self._gather(GATHER, task.layer, Span(0, 1), after)

    def _with_copies(self, task: Task) -> Task:
        """The task of forward, waiting for the copies that it needs."""
        if task.op != JOIN:
            return task
        needs = (self.tasks[position].writes[0] for position in self._gathers[task.layer])
        return replace(task, reads=(*task.reads, *needs))

    def _is_freed(self, layer: int) -> bool:
        return layer in self._freed and bool(self._gathers[layer])

    def _add(self, task: Task) -> int:
        """Add a task, and behind it what it begins; the task's position."""
        position = len(self.tasks)
        self.tasks.append(task)
        begun = task.op.begins
        if begun is not None and begun.op is GRADIENTS:
            sums = (Value(SLICE, task.layer, task.span),)
            self.tasks.append(Task(GRADIENTS, task.layer, task.span, task.writes, sums))
        elif begun is not None and begun.is_adjoint:
            self._send_home(begun.op, task)
        elif begun is not None and task.op != RECALL:
            self._carried.add(task.layer)
            self._gather(begun.op, task.layer, task.span, task.writes)
        elif begun is not None and self._is_freed(task.layer):
            self._gather_again(begun.op, task.layer, task.writes)
        return position

    def _gather(self, op: Op, layer: int, pieces: Span, after: tuple[Value, ...]) -> None:
        self._gathers[layer].append(len(self.tasks))
        self.tasks.append(Task(op, layer, pieces, after, (Value(COPIES, layer, pieces),)))

    def _gather_again(self, op: Op, layer: int, after: tuple[Value, ...]) -> None:
        self._recalled.add(layer)
        pieces = Span(0, len(self._gathers[layer]))
        self.tasks.append(Task(op, layer, pieces, after, (Value(AGAIN, layer),)))

    def _send_home(self, op: Op, by: Task) -> None:
        sums = (Value(SUMMED, by.layer, by.span),)
        self._home[by.layer] += sums
        gathers = tuple(self._gathers[by.layer])
        self.tasks.append(Task(op, by.layer, by.span, by.writes, sums, gathers))


def _tokens(values: Iterable[Value]) -> tuple[Value, ...]:
    """What passes from layer to layer."""
    return tuple(value for value in values if value.kind.by_token)


def _primed(backward: Schedule) -> Schedule:
    """Backward with values that are not forward's."""
    tasks = (
        replace(task, reads=_with_prime(task.reads), writes=_with_prime(task.writes))
        for task in backward.tasks
    )
    return Schedule(tuple(tasks), _with_prime(backward.inputs), _with_prime(backward.outputs))


def _with_prime(values: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(
        value._replace(kind=replace(value.kind, name=f"{value.kind.name}'")) for value in values
    )


def _inputs(layers: Sequence[Programs]) -> tuple[Value, ...]:
    """The first layer's tokens, and what every program takes besides tokens."""
    taken = (value for programs in layers for program in programs for value in program.inputs)
    rest = (value for value in taken if not value.kind.by_token)
    return (*_tokens(layers[0][0].inputs), *rest)


def _outputs(layers: Sequence[Programs], tasks: Sequence[Task]) -> tuple[Value, ...]:
    """Gradients: of the first layer's tokens, of all weights, and of their copies."""
    given = (value for _, backward in layers for value in backward.outputs)
    rest = (value for value in given if not value.kind.by_token)
    sums = (value for task in tasks for value in task.writes if value.kind == SUMMED)
    return (*_tokens(layers[0][1].outputs), *rest, *sums)
