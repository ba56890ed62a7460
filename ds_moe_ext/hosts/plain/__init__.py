# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch: a training loop of the user's own.

``training_loop`` is what the loop calls (``attach``), ``plain_host`` the host's contract. It
imports ``hosts.attachment``, ``hosts.steps`` and what lies below.
"""
