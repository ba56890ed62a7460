"""Pro-Prophet's plans, kept or made anew, hidden or not, change nothing that is learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_moe_ext.hardware import Device, Hardware, Link
from tests.hosts.copied_runs import Step, check_equal, num_copied, plain, run
from tests.hosts.jobs import Job


def prophet(job: Job, folder: Path, *, links: float = 1e12, **keys: Any) -> Job:
    """The job by Pro-Prophet's plans, on links of so many bytes a second."""
    hardware = Hardware(
        name="of a test",
        source="made up",
        num_nodes=1,
        ranks_per_node=8,
        device=Device(name="CPU"),
        intra=Link(bytes_per_s=links),
    )
    path = folder / "hardware.json"
    path.write_text(hardware.to_json())
    return replace(job, strategy="prophet", keys=tuple(keys.items()), hardware=str(path))


def job_of(world_size: int, steps: int = 20) -> Job:
    """On two ranks each accumulates two micro-batches."""
    return Job("toy", 0, dtype="float64", steps=steps, clip=0.5, micro_batches=max(4, world_size))


KEYS: dict[str, dict[str, Any]] = {
    "as they are": {"balance": 0.3},
    "halves": {"split": "half", "num_excluded": 1, "balance": 0.3},
    "kept copies": {"rematerialize": False, "num_excluded": None, "balance": 0.2},
    "not hidden": {"scheduler": False, "frequency": 1, "balance": 0.3},
    "shadows": {"planner": "shadow"},
    "stale": {"planner": "shadow", "frequency": 7, "balance": 1e6},
}
CASES = [(4, name) for name in KEYS] + [(2, "as they are"), (8, "kept copies")]


@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_equals_expert_parallelism(world_size: int, name: str, tmp_path: Path) -> None:
    job = job_of(world_size)
    ours, steps = run(world_size, prophet(job, tmp_path, **KEYS[name]))
    check_equal(ours, plain(1 if world_size == 8 else world_size, job), job)
    assert not any(num_copied(steps[:5]))  # nothing before costs are known
    assert sum(map(bool, num_copied(steps[5:]))) > 5
    carried = [plan.carried is not None for plan in copied(steps)]
    assert any(carried) == (name != "not hidden")


def copied(steps: list[Step]) -> list[Any]:
    return [plan for step in steps for plan in step.plans if plan.has_copies]
