# SPDX-License-Identifier: Apache-2.0
"""Which tasks run in which order and who waits for whom; what runs them, and what prices them.

Tasks read and write named values and have a stream each, an in-order queue. Who waits for whom
follows from these, in ``task.py`` alone: the executor obeys it and the simulator computes it.

- ``task.Schedule``: tasks in issue order; ``orders`` and ``stripes`` make them.
- ``program.Program``: two schedules and the work of each op, as one autograd node.
- ``simulator.simulate``: start and end of each task, in seconds.

It imports no other room, but ``strict``.
"""
