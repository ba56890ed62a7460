# SPDX-License-Identifier: Apache-2.0
"""What a described job's rows weigh on their way, by the hooks of its block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ds_moe_ext.cost.row_bytes import RowBytes
from ds_moe_ext.moe.row_weight import row_bytes
from ds_moe_ext.pricing.training_shape import Training
from ds_moe_ext.settings import read_settings

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def described_row_bytes(document: Mapping[str, Any], width: int, training: Training) -> RowBytes:
    """Of rows of the model's width.

    Args:
        document: with our block, or without.
        width: of the model.
        training: how it is trained.
    """
    settings, _ = read_settings(document)
    return row_bytes(settings.hooks, torch.zeros(1, width, dtype=DTYPES[training.number_type]))
