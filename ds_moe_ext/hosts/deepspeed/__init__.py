# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: its engine, ZeRO stages, checkpoints and pipelines, with our layers in them.

``startup`` reads the block and replaces layers, ``engine`` stays with the engine, ``checkpoint``
writes and reads; ``zero_3`` and ``gradients`` go along with ZeRO's own hooks, ``refusals`` has what
cannot be. It imports ``hosts.attachment``, ``hosts.steps`` and what lies below.
"""
