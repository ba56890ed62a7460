# SPDX-License-Identifier: Apache-2.0
"""Decides which experts compute where, and what a step takes then. numpy in, plans and prices out.

``strategy.Strategy`` is what every strategy is asked, ``strategy.Job`` what it may know and
``strategy.Plan`` what it decides for a layer. The planners of the papers are in ``fssdp_planner``,
``prophet_planner``, ``layer_pipelines`` and ``zebra_planner``, what replicas divide rows by in
``priced_plans``; their models of costs are in ``prices``, ``layer_costs`` and ``exchange_costs``.
``step_price`` prices a whole step by the tasks that its layers run, ``candidates`` the ways to run
a job on a described cluster. ``loads`` are rows of a run, ``probe`` measures the ranks at hand.

May import ``core``, ``schedule``, ``files`` and ``strict``; only ``probe`` and ``bench`` use torch.
"""
