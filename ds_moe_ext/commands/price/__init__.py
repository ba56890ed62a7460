# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext price``: what a job would take under every strategy.

``inputs`` reads the job, ``market`` prices its candidates, ``words`` and ``market_page`` show them,
``command`` is the command. It imports ``planning`` and ``report``.
"""
