# SPDX-License-Identifier: Apache-2.0
"""Starts a run and does what is between two of its steps: the same for every host.

``host.py`` says what a host gives (``Host``) and starts a run on it (``run_on``);
``training_run.py`` is that run, with its report (``Run``). ``planning.py`` plans the next step
(``Planning``), by what ``costs.py`` and ``pipeline_costs.py`` measure (``Costs``, ``Pipelines``);
``expert_moves.py`` brings experts and their optimizer states to new owners (``ExpertMover``,
``States``), and ``optimizers.py`` knows which optimizers can be stepped so.

May import ``hosts/attachment`` and what that may, and no host.
"""
