# SPDX-License-Identifier: Apache-2.0
"""Kernels that are launched without asking Triton anew, by stand-ins of what Triton compiles.

Beside Triton itself: ``tests/gpu/test_direct_launch.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ds_moe_ext.core.kernels import MOST, Kernel

GRID = (2, 1, 1)


class Jitted:
    """Writes down each call: how, where and with what."""

    def __init__(self, *, compiles: bool = True, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.args: list[tuple[Any, ...]] = []
        self._compiles, self._fails = compiles, fails

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def call(*args: Any, **constants: Any) -> Compiled | None:
            self.calls.append("asked")
            self.args.append((grid, *args, *constants.values()))
            return Compiled(self) if self._compiles else None

        return call

    def launched(self, *args: Any) -> None:
        if self._fails:
            raise TypeError("function takes exactly 7 arguments")
        self.calls.append("direct")
        self.args.append(args)


class Compiled:
    def __init__(self, jitted: Jitted) -> None:
        self._jitted = jitted

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args: self._jitted.launched(grid, *args)


@pytest.fixture(autouse=True)
def direct() -> Iterator[None]:
    yield
    Kernel.is_direct = True


def test_the_second_launch_is_direct_and_has_the_same_arguments() -> None:
    jitted, tensor = Jitted(), torch.zeros(8)
    kernel = Kernel(jitted)
    for _ in range(3):
        kernel.launch(GRID, (tensor, tensor), 5, WIDTH=8, IS_WIDE=True)
    assert jitted.calls == ["asked", "direct", "direct"]
    assert all(args[0] == GRID and args[3:] == (5, 8, True) for args in jitted.args)
    assert all(args[1] is args[2] is tensor for args in jitted.args)


def test_what_triton_compiles_anew_is_asked_for() -> None:
    jitted, tensor = Jitted(), torch.zeros(8)
    kernel = Kernel(jitted)
    kernel.launch(GRID, (tensor,), 5, WIDTH=8)
    kernel.launch(GRID, (tensor,), 5, WIDTH=16)
    kernel.launch(GRID, (tensor.double(),), 5, WIDTH=8)
    kernel.launch(GRID, (tensor.to("meta"),), 5, WIDTH=8)
    assert jitted.calls == ["asked"] * 4
    kernel.launch(GRID, (tensor,), 6, WIDTH=8)
    assert jitted.calls[4:] == ["direct"], "of numbers nothing is compiled anew"


@pytest.mark.parametrize("is_first", [True, False])
def test_odd_places_and_long_numbers_are_tritons(is_first: bool) -> None:
    """Before a plain call and after it: what is compiled for these is not kept for others."""
    jitted, tensor = Jitted(), torch.zeros(8)
    kernel = Kernel(jitted)
    if not is_first:
        kernel.launch(GRID, (tensor,), 5, WIDTH=8)
    jitted.calls.clear()
    for _ in range(2):
        kernel.launch(GRID, (tensor[1:],), 5, WIDTH=8)
        kernel.launch(GRID, (tensor,), MOST + 1, WIDTH=8)
    assert jitted.calls == ["asked"] * 4
    kernel.launch(GRID, (tensor,), MOST, WIDTH=8)
    assert jitted.calls[4:] == ["asked" if is_first else "direct"]


def test_an_interpreter_is_always_asked() -> None:
    jitted = Jitted(compiles=False)
    kernel = Kernel(jitted)
    for _ in range(2):
        kernel.launch(GRID, (torch.zeros(8),), WIDTH=8)
    assert jitted.calls == ["asked", "asked"]


def test_where_direct_launches_fail_triton_is_asked_from_then_on() -> None:
    failing, other = Jitted(fails=True), Jitted()
    kernels = Kernel(failing), Kernel(other)
    for _ in range(3):
        for kernel in kernels:
            kernel.launch(GRID, (torch.zeros(8),), WIDTH=8)
    assert failing.calls == ["asked"] * 3
    assert other.calls == ["asked"] * 3, "of one Triton all are alike"
