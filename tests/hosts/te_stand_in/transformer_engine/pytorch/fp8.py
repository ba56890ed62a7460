# SPDX-License-Identifier: Apache-2.0
"""The state of autocast, and quantizers that round.

A quantizer gives back a tensor of the type that it got. Its scale is that of this moment, whatever
the recipe: of the tensor, or of blocks of a row. Under delayed scaling it writes scale and amax
where the real one does, and reads neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.recipe import DelayedScaling, Format, Recipe


class FP8GlobalStateManager:
    """What autocast sets."""

    FP8_ENABLED, FP8_CALIBRATION, FP8_PARAMETERS = False, False, False
    FP8_RECIPE: Recipe | None = None
    FP8_DISTRIBUTED_GROUP: Any = None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.FP8_ENABLED

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return cls.FP8_CALIBRATION

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return cls.FP8_RECIPE or DelayedScaling()

    @classmethod
    def get_fp8_group(cls) -> Any:
        return cls.FP8_DISTRIBUTED_GROUP


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    state = FP8GlobalStateManager
    before = state.FP8_ENABLED, state.FP8_CALIBRATION, state.FP8_RECIPE, state.FP8_DISTRIBUTED_GROUP
    state.FP8_ENABLED, state.FP8_CALIBRATION = enabled, calibrating
    state.FP8_RECIPE, state.FP8_DISTRIBUTED_GROUP = fp8_recipe or DelayedScaling(), fp8_group
    try:
        yield
    finally:
        state.FP8_ENABLED, state.FP8_CALIBRATION = before[:2]
        state.FP8_RECIPE, state.FP8_DISTRIBUTED_GROUP = before[2:]


@contextmanager
def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    if enabled:
        raise NotImplementedError("no fp8 primary weights here")
    yield


class RecipeState:
    """A module's quantizers of one direction, and what delayed scaling keeps of them."""

    def __init__(self, recipe: Any, mode: str, num_quantizers: int) -> None:
        self.recipe, self.mode, self.num_quantizers = recipe, mode, num_quantizers
        if recipe.delayed():
            self.scale = torch.ones(num_quantizers)
            self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers)

    def make_quantizers(self) -> list[Quantizer]:
        return [Quantizer(self, index) for index in range(self.num_quantizers)]


class Quantizer:
    def __init__(self, state: RecipeState, index: int) -> None:
        self.state, self.index = state, index
        is_wide = state.recipe.fp8_format is Format.HYBRID and state.mode == "backward"
        self.dtype = torch.float8_e5m2 if is_wide else torch.float8_e4m3fn

    def quantize(self, tensor: Tensor) -> Tensor:
        found, block = tensor.detach(), self.state.recipe.block
        if found.numel() == 0:
            return found
        is_whole = block is None or found.shape[-1] % block != 0
        rows = found.reshape(1, -1) if is_whole else found.reshape(-1, block)
        amax, largest = rows.abs().amax(1, keepdim=True), torch.finfo(self.dtype).max
        scale = torch.where(amax > 0, largest / amax, torch.ones_like(amax))
        scale = scale if is_whole else scale.log2().floor().exp2()
        rounded = (rows * scale).clamp(-largest, largest).to(self.dtype).to(found.dtype) / scale
        if self.state.recipe.delayed():
            self.state.scale[self.index] = scale.min()
            self.state.amax_history[0, self.index] = amax.max()
        return rounded.view_as(found)
