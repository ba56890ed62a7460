# SPDX-License-Identifier: Apache-2.0
"""Meets the hosts: DeepSpeed, Megatron-core, plain PyTorch, and models of Hugging Face.

``attachment/`` finds a model's MoE layers and replaces them, ``steps/`` starts a run and does what
is between two steps; both are the same for every host. ``deepspeed/``, ``megatron/`` and ``plain/``
are a host each (``steps.host.Host``); ``zebra/`` runs attention and experts on unlike ranks.
``huggingface.py`` knows the families of transformers, ``meta_model.py`` models without weights.

May import ``report``, ``verification``, ``strategies``, ``moe``, ``planning``, ``core``,
``schedule`` and what needs nothing of ours; hosts are imported where they are used.
"""
