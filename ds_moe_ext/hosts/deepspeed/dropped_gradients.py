# SPDX-License-Identifier: Apache-2.0
"""What ``zero_grad`` drops of an accumulation: it depends on where the optimizer sums gradients."""

from __future__ import annotations

import weakref
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_moe_ext.hosts.attachment.replacement import AttachedLayer
from ds_moe_ext.hosts.deepspeed.engine_record import NOTHING, record_of
from ds_moe_ext.moe.copy_memory import Accumulation, KeptInGrad, KeptMeanwhile


class EngineAccumulation:
    """What an engine has of one layer's experts; a ``moe.copies.accumulation.Accumulation``.

    At ZeRO 0 and mostly at 1 gradients are summed in ``.grad``. At ZeRO 2 nothing drops them, and
    elsewhere ``zero_grad`` of the optimizer alone.

    Args:
        engine: it is not kept alive.
        layer: of its model.
    """

    def __init__(self, engine: Any, layer: AttachedLayer) -> None:
        alive = weakref.ref(engine)
        self._engine = alive
        self._in_grad = KeptInGrad(layer.routed.site.layer, lambda: layer.parameters)
        self._elsewhere = KeptMeanwhile(lambda: record_of(alive()).drops)

    def begin(self) -> None:
        """See ``Accumulation``."""
        self._own.begin()

    def is_kept(self) -> bool:
        """See ``Accumulation``."""
        return self._own.is_kept()

    @property
    def _own(self) -> Accumulation:
        """By the engine's optimizer, which comes after its layers."""
        return self._in_grad if _sums_in_grad(self._engine()) else self._elsewhere


def _sums_in_grad(engine: Any) -> bool:
    """Whether nothing but ``.grad`` has them. At ZeRO 0, too, there may be others: a pipeline in
    bfloat16 has DeepSpeed's BF16_Optimizer, which empties ``.grad`` in each pass."""
    optimizer = getattr(engine, "optimizer", None)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return not optimizer.partition_gradients and not optimizer.use_grad_accum_attribute
    return not isinstance(optimizer, BF16_Optimizer | DeepSpeedZeroOptimizer_Stage3)


def dropped(optimizer: Any) -> None:
    """The optimizer of an engine has dropped what it had, if it does."""
    record = record_of(optimizer)
    keeps = isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.partition_gradients
    if record is not NOTHING and not keeps:
        record.drops += 1
