"""One optimizer step of a model as one schedule, made of those that its layers run by. Pure.

Forward of all layers, then backward of all in reverse. Behind each MoE layer the host computes
what is no MoE layer: task ATTENTION, which makes the next layer's tokens of this one's. Where a
layer's program only begins a transfer of copies, the transfer is a task here, in its own lane::

    forward   expert[i]    || gather[i+1,0]      attention[i]    || gather[i+1,1]
    backward  attention'[i] || gather'[i+1,0]    expert'[i]      || gather'[i+1,1]

The span of a gather is the pieces that it moves: a layer whose copies are carried by the layer
before it has two, any other has one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ds_moe_ext.schedule.task import (
    ATTENTION,
    EXPERT,
    GATHER,
    JOIN,
    RECALL,
    Kind,
    Lane,
    Schedule,
    Span,
    Task,
    Value,
)

LOSS = Kind("loss")  # what the host makes of the last layer's tokens
COPIES = Kind("copies")  # pieces of a layer's copies, where they compute
SUMMED = Kind("summed")  # the gradients of such pieces, at home

Programs = tuple[Schedule, Schedule]  # forward and backward of one layer


def whole_step(layers: Sequence[Programs], *, freed: Collection[int] = ()) -> Schedule:
    """A step of a model, as ``simulate`` can price it.

    Values of backward have a prime to their kind's name. A task that begins work is no work itself:
    it takes no seconds. Copies that no layer launches travel while the host computes what comes
    before their layer; those of the first layer at the very start, where nothing hides them.

    Args:
        layers: forward and backward of each layer, in the order of the model, each with the number
            of its own layer in its values.
        freed: numbers of the layers whose copies are freed after forward, so that they are gathered
            again, in one piece, before their experts' backward.

    Raises:
        ValueError: two layers have the same number.
    """
    numbers = [_number(forward) for forward, _ in layers]
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"the layers of a step have the numbers {numbers}; give each layer's schedules a "
            "number of their own"
        )
    return _Step(layers, freed).schedule()


def in_lanes(schedule: Schedule, lanes: Mapping[Lane, Lane]) -> Schedule:
    """The same tasks, issued in the same order, with some lanes made one.

    What a step takes if all transfers stand in one queue, ``{PARAM: INTER}``, or if nothing runs
    beside anything. Ops keep their names, but are others.

    Args:
        schedule: tasks in issue order.
        lanes: where the tasks of a lane run instead; those of lanes not named stay.
    """
    tasks = []
    for task in schedule.tasks:
        lane = lanes.get(task.lane, task.lane)
        tasks.append(replace(task, op=replace(task.op, lane=lane, back=lane)))
    return Schedule(tuple(tasks), schedule.inputs, schedule.outputs)


class _Step:
    """The tasks of a step, added layer by layer."""

    def __init__(self, layers: Sequence[Programs], freed: Collection[int]) -> None:
        self._layers, self._freed = layers, freed
        self._tasks: list[Task] = []
        self._places: list[list[int]] = []  # of each layer's forward tasks
        self._attention: list[int] = []  # position behind each layer, in forward
        self._gathers: dict[int, list[int]] = defaultdict(list)  # positions by layer, in forward
        self._recalled: dict[int, tuple[Value, ...]] = {}  # copies gathered again, by layer

    def schedule(self) -> Schedule:
        self._gather_rest(0, after=())
        for place in range(len(self._layers)):
            self._forward(place)
        for place in reversed(range(len(self._layers))):
            self._backward(place)
        written = [value for task in self._tasks for value in task.writes]
        read = {value for task in self._tasks for value in task.reads}
        ends = [value for _, backward in self._layers for value in map(_primed, backward.outputs)]
        inputs = dict.fromkeys(value for value in read if not any(map(value.touches, written)))
        outputs = [value for value in ends if value not in read]
        outputs += [value for value in written if value.kind == SUMMED]
        return Schedule(tuple(self._tasks), tuple(inputs), tuple(outputs))

    def _forward(self, place: int) -> None:
        forward, _ = self._layers[place]
        self._places.append([])
        for task in forward.tasks:
            if task.op == JOIN:
                task = _reading(task, self._copies(task.layer))
            self._places[place].append(self._add(task))
        y, layer = _tokens(forward.outputs), _number(forward)
        self._gather_rest(place + 1, after=y)
        is_last = place + 1 == len(self._layers)
        writes = (Value(LOSS, layer),) if is_last else _tokens(self._layers[place + 1][0].inputs)
        self._attention.append(self._add(Task(ATTENTION, layer, Span(0, 1), y, writes)))

    def _backward(self, place: int) -> None:
        _, backward = self._layers[place]
        attention = self._attention[place]
        is_last = place + 1 == len(self._layers)
        given = () if is_last else _tokens(self._layers[place + 1][1].outputs)
        ...
