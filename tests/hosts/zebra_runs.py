# SPDX-License-Identifier: Apache-2.0
"""Jobs of tests by strategy ``zebra``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from tests.hosts.jobs import Job
from tests.hosts.pipelines import forget_groups


class Numbers(list[int]):
    """A list in a job, whose results are remembered."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))


def zebra(job: Job, attention: int | None = 1, experts: int | None = 1, **keys: Any) -> Job:
    """The job on ZP groups of so many attention and expert ranks."""
    sizes = {"attention_size": attention, "expert_size": experts}
    lists = {key: Numbers(value) for key, value in keys.items() if isinstance(value, list)}
    return replace(job, strategy="zebra", keys=tuple((sizes | keys | lists).items()))


def by_device(
    rank: int, world_size: int, devices: Sequence[str], work: Callable[..., Any], *given: Any
) -> Any:
    """The work under DeepSpeed where ranks have these, in a process that keeps no groups."""
    from ds_moe_ext.hosts.deepspeed import startup

    forget_groups()
    with mock.patch.object(startup, "device_names", lambda _: list(devices)):
        result = work(rank, world_size, *given)
    forget_groups()
    return result
