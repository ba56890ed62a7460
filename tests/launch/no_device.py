# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels on a device that is not there: compiled, launched, and not run.

What is left of a launch is what its host does. Needs Triton, which torch's builds for CPUs lack.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock


@dataclass
class _Driver:
    """Of a Hopper, as far as Triton asks."""

    # arguments of each kernel that was launched, where they are wanted
    launches: list[tuple[Any, ...]] = field(default_factory=list)
    keeps: bool = False  # they are

    @property
    def utils(self) -> _Driver:
        return self

    def launcher_cls(self, source: object, metadata: object) -> Any:
        return self._launch

    def _launch(self, *args: Any) -> None:
        if self.keeps:
            self.launches.append(args)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # only where there is Triton

        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, *args: object) -> tuple[int, ...]:
        """Module, function, registers, spills, threads at most."""
        return 1, 2, 32, 0, 1024


@contextmanager
def nowhere(*, keeps: bool = False) -> Iterator[list[tuple[Any, ...]]]:
    """Triton compiles for a Hopper inside the block, and launches nothing; the launches' arguments,
    if they are kept."""
    from triton.runtime import driver

    own = _Driver(keeps=keeps)
    with mock.patch.object(driver, "_active", own):  # to ask which one is wants one that is there
        yield own.launches
