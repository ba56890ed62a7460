# SPDX-License-Identifier: Apache-2.0
"""What a run did, recorded while it goes on and shown to a person.

``recorder.Recorder`` takes each step, ``rank_figures.RanksSeen`` what ranks report to each other;
both end in one ``record.RunRecord``, whose JSON is ``report.json``. ``summary`` says in words what
the run comes to; ``page.page_of`` draws it, of the sections in ``over_steps`` and ``timeline``, and
``two_runs.page_beside`` two runs. ``markup`` and ``charts`` know HTML and matplotlib and nothing of
a run; ``report_files.ReportFiles`` writes both files while training goes on.

It may import ``planning``, ``moe``, ``core``, ``schedule`` and what lies below them. It asks no
host anything: what a host knows is handed to it, and records are read without ranks or devices.
"""
