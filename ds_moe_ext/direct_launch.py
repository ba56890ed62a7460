# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels, launched without what Triton works out anew in each call.

To call a jitted function, Triton binds its arguments, asks each for its type, alignment and value,
finds by all of these what it has compiled, and reads its settings from the environment: several
times what a launch takes. Here a kernel is known by the few things that tell its calls apart, and
what was compiled is launched itself, as Triton does it for kernels compiled beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

ALIGNED = 16  # bytes, to which Triton compiles kernels of their own
MOST = 2**31 - 1  # of numbers of 32 bits, for which Triton compiles likewise


class Kernel:
    """A kernel that is launched again and again.

    Args:
        jitted: a function under ``triton.jit``: tensors, then integers that it does not specialize,
            then constants.

    Attributes:
        is_direct: whether that works with this Triton; of all kernels. Else each call is Triton's,
            as on ROCm, for which it asks how large a tensor's memory is, too.
    """

    is_direct: ClassVar[bool] = torch.version.hip is None

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def launch(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        *numbers: int,
        **constants: int | bool,
    ) -> None:
        """In the current stream of the tensors' device.

        Args:
            grid: programs along each axis.
            tensors: on one device, in the order in which the function takes them.
            numbers: likewise.
            constants: likewise.
        """
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):  # Triton asks for no tensor's, but for the current one
                return self.launch(grid, tensors, *numbers, **constants)
        key = device, *[each.dtype for each in tensors], *constants.values()
        compiled = self._compiled.get(key)
        is_plain = _is_plain(tensors, numbers)
        if compiled is not None and is_plain and Kernel.is_direct:
            try:
                compiled[grid](*tensors, *numbers, *constants.values())
            except Exception:  # another Triton may want other arguments; its own way will tell
                Kernel.is_direct = False
            else:
                return
        compiled = self._jitted[grid](*tensors, *numbers, **constants)
        if is_plain and compiled is not None:  # an interpreter compiles nothing
            self._compiled[key] = compiled


def _is_plain(tensors: Sequence[Tensor], numbers: Sequence[int]) -> bool:
    """Whether the call is of the kind for which a kernel is kept."""
    places = 0
    for each in tensors:
        places |= each.data_ptr()
    return not places % ALIGNED and (not numbers or max(numbers) <= MOST)
