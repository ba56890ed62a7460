# SPDX-License-Identifier: Apache-2.0
"""Kernels of tensors on another GPU than the current one. Without a GPU, and without Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from ds_moe_ext.core.kernels import Kernel


@dataclass
class Gpus:
    """Those of a process, of which one is the current."""

    current: int
    launched: list[int]

    def __getitem__(self, grid: object) -> Gpus:
        return self

    def __call__(self, *args: object, **constants: object) -> Gpus:
        self.launched.append(self.current)
        return self

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before


class OnGpu(torch.Tensor):
    """A tensor that says that it lies on the second one."""

    device = torch.device("cuda", 1)


@pytest.mark.parametrize("current", [0, 1])
def test_launched_where_the_tensors_are(current: int) -> None:
    gpus = Gpus(current, [])
    kernel, tensor = Kernel(gpus), torch.zeros(4).as_subclass(OnGpu)
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: gpus.current),
        mock.patch.object(torch.cuda, "device", gpus.entered),
        mock.patch.object(Kernel, "is_direct", True),
    ):
        for _ in range(2):  # by Triton, then directly
            kernel.launch((1, 1, 1), (tensor,), 4, BLOCK=4)
    assert gpus.launched == [1, 1] and gpus.current == current
