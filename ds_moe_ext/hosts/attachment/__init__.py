# SPDX-License-Identifier: Apache-2.0
"""Finds the MoE layers of a model and replaces them: the same for every host.

``replacement.py`` is the way from settings to layers that run (``Blueprint``, ``AttachedLayer``,
``build``); ``host_layer.py`` has its records (``Found``, ``Adopted``, ``Hosted``, ``Stored``), and
``experts.py`` what stands in a layer's place (``HostedExperts``). ``grid.py`` chooses sizes,
``startup_check.py`` lets ranks compare what they start with (``Start``), ``notices.py`` refuses and
leaves defaults out (``Refusal``, ``settle``), ``block_hooks.py`` launches replicas.

May import what ``hosts`` may, and no host; it knows nothing of ``hosts/steps``.
"""
