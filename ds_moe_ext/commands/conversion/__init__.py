# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron-core, DeepSpeed and Hugging Face, each from the form of another.

``conversion.convert`` does one: it asks ``description`` which model it is, opens a ``Source``,
checks that all its pieces are there, and writes. ``model`` says what a model is made of: a
``Model`` is a decoder that all three forms know, a ``ListedModel`` a list of weights that Megatron
has no counterpart of.
``tables`` says what each form calls the pieces, ``stored`` reads and makes tensors by these tables,
and ``megatron``, ``deepspeed``, ``huggingface`` and ``dcp`` know files.

It may import ``files`` and, of ``hosts``, what names the files of a checkpoint; no host itself, no
ranks. One tensor at a time is in memory, but for DeepSpeed's own file.
"""
