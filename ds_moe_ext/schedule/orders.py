# SPDX-License-Identifier: Apache-2.0
"""Issue orders: passes from a list of tasks to a list of tasks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds_moe_ext.schedule.task import Op, Task


def stage_major(tasks: Iterable[Task], ops: Sequence[Op]) -> list[Task]:
    """All tasks of the first op, chunk by chunk, then all of the second, and so on.

    The order of PipeMoE and FSMoE: a collective of the next chunk is in its lane before the
    experts of this chunk have finished, so that the lanes overlap.

    Args:
        tasks: tasks of one layer.
        ops: issue rank of each op; a task whose op is missing here is an error.
    """
    rank = {op: position for position, op in enumerate(ops)}
    return sorted(tasks, key=lambda task: (rank[task.op], task.span))


def issued_last(tasks: Iterable[Task], op: Op) -> list[Task]:
    """The tasks of one op behind all others; each part keeps its order."""
    return sorted(tasks, key=lambda task: task.op == op)
