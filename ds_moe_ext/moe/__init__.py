# SPDX-License-Identifier: Apache-2.0
"""One MoE layer: its rows, its experts and their replicas, in torch.

A plan comes in, which says where experts compute and how rows are divided; out come outputs,
gradients and what was seen of both. Nothing here knows a host, a model or how a plan is made.

- ``layer.RoutedExperts``: a layer behind a router; ``layer.MoELayer`` has a gate of ours.
- ``route.LayerRoute``: how the rows of a pass travel.
- ``replicas.Replicas``: replicas of experts for one step, and their gradients.

It may import ``core``, ``schedule``, ``planning`` and ``strict``.
"""
