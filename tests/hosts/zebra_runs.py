# SPDX-License-Identifier: Apache-2.0
"""Jobs of tests by strategy ``zebra``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.hosts.jobs import Job


class Numbers(list[int]):
    """A list in a job, whose results are remembered."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))


def zebra(job: Job, attention: int | None = 1, experts: int | None = 1, **keys: Any) -> Job:
    """The job on ZP groups of so many attention and expert ranks."""
    sizes = {"attention_size": attention, "expert_size": experts}
    lists = {key: Numbers(value) for key, value in keys.items() if isinstance(value, list)}
    return replace(job, strategy="zebra", keys=tuple((sizes | keys | lists).items()))
