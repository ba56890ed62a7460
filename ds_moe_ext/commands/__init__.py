# SPDX-License-Identifier: Apache-2.0
"""The commands of ``ds-moe-ext``: what each is given, does and prints. One file has one command.

``add_doctor``, ``add_plan`` and their like add a command to the parser of ``ds_moe_ext.cli``. Of
``price`` and ``convert``, which are many files, ``cli`` has the arguments, so that others start
without them: ``price/command.py`` prices a job, ``conversion/`` turns checkpoints. ``price/inputs``
reads what is asked, ``market`` prices it, ``words`` and ``market_page`` show it.

Every room below may be imported, hosts as well; ``model_layers`` alone builds models of
transformers. A command loads torch only where it needs it. Errors of a user are a ``ValueError``
with value, rule and remedy, which ``cli`` prints.
"""
