# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401
"""Modules and contexts, as there."""

from transformer_engine.pytorch import distributed, fp8, ops, router, tensor
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.distributed import checkpoint
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init
from transformer_engine.pytorch.module.linears import GroupedLinear, LayerNormLinear, Linear
from transformer_engine.pytorch.module.norms import Fp8Padding, Fp8Unpadding, LayerNorm, RMSNorm
