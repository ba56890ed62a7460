# SPDX-License-Identifier: Apache-2.0
"""The built-in strategies, each with its JSON keys, its plans and its words for a person.

``settings.read_settings`` reads the JSON block and gives ``settings.Settings`` and the chosen
strategy; importing ``settings`` registers all: ``ep`` (experts stay at their owners), ``fssdp`` and
``prophet`` (copies; what they share is ``shares.Copying``), ``esp`` (a pipeline laid over one of
these), ``zebra`` (attention and experts on ranks of their own) and ``auto`` (one of the others).

May import ``planning``, ``moe``, ``schedule``, ``core``, ``files`` and ``strict``.
"""
