# SPDX-License-Identifier: Apache-2.0
"""Megatron-core as a host: its MoE layers are adopted in place, and its optimizer's steps watched.

``active_settings`` has what was asked for, ``refusals`` what cannot be done; ``engine`` adopts the
``layers`` of a model and plans behind each step, with ``slices`` of dense gradients and checkpoints
(``checkpoint``, ``checkpoint_sums``); ``roles`` does so where ranks have roles.
"""

FLAG = "--ds-moe-ext-config"
"""By which Megatron's scripts name a file of settings."""
