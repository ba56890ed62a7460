"""Pro-Prophet's plans, kept or made anew, hidden or not, change nothing that is learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_moe_ext.hardware import Device, Hardware, Link
from tests.hosts.copied_runs import Step, check_equal, num_copied, plain, run, train_watched
from tests.hosts.jobs import Job
from tests.marks import slow
from tests.ranks import pool_of


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


def job_of(world_size: int) -> Job:
    """On few ranks each accumulates two micro-batches; then it stays what links are said to do."""
    micro_batches = 8 if world_size == 8 else 2 * world_size
    return Job("toy", 0, dtype="float64", steps=20, clip=0.5, micro_batches=micro_batches)


KEYS: dict[str, dict[str, Any]] = {
    "as they are": {"balance": 0.3},
    "halves": {"split": "half", "num_excluded": 1, "balance": 0.3},
    "kept copies": {"rematerialize": False, "num_excluded": None, "balance": 0.2},
    "not hidden": {"scheduler": False, "frequency": 1, "balance": 0.3},
    "shadows": {"planner": "shadow"},
    "stale": {"planner": "shadow", "frequency": 7, "balance": 1e6},
}
WORTH_ON_TWO = [name for name in KEYS if name != "halves"]  # of two ranks one excluded leaves one
CASES = [
    *((2, name) for name in WORTH_ON_TWO),
    *((4, name) if name in ("as they are", "halves") else slow(4, name) for name in KEYS),
    slow(8, "kept copies"),
]


@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_equals_expert_parallelism(world_size: int, name: str, tmp_path: Path) -> None:
    job = job_of(world_size)
    ours, steps = run(world_size, prophet(job, tmp_path, **KEYS[name]))
    check_equal(ours, plain(1 if world_size == 8 else world_size, job), job)
    assert not any(num_copied(steps[:5]))  # nothing before costs are known
    assert sum(map(bool, num_copied(steps[5:]))) > 2
    carried = [plan.carried is not None for plan in copied(steps)]
    assert any(carried) == (name != "not hidden")


def test_all_ranks_plan_alike(tmp_path: Path) -> None:
    """Property 6; with debug they also compare all that they run by, and would raise."""
    job = replace(prophet(job_of(2), tmp_path, **EAGER), steps=8)
    ranks = [steps for _, steps in pool_of(2).run(train_watched, job)]
    for own, *others in zip(*ranks):
        for plans in zip(own.plans, *(step.plans for step in others)):
            texts = {(plan.target.describe(), plan.carried) for plan in plans}
            assert len(texts) == 1
    assert any(num_copied(ranks[0]))


def copied(steps: list[Step]) -> list[Any]:
    return [plan for step in steps for plan in step.plans if plan.has_copies]


EAGER = {"planner": "shadow", "split": "half"}


@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (2, "float32"), (2, "bfloat16")])
def test_curves_at_zero_stages(stage: int, dtype: str, tmp_path: Path) -> None:
    """A flipped choice may move a curve, but not far in ten steps."""
    job = Job("mixtral", stage, dtype=dtype, clip=0.5)
    ours, steps = run(2, prophet(job, tmp_path, **EAGER))
    assert any(plan.carried is not None for plan in copied(steps))
    rel = 1e-5 if dtype == "float32" else 5e-3
    assert ours.losses == pytest.approx(plain(2, job).losses, rel=rel)


@pytest.mark.parametrize("cells", [2, None])
def test_grids_of_some_ranks_plan_for_themselves(cells: int | None, tmp_path: Path) -> None:
    job = Job("toy", 0, dtype="float64", steps=8, cells=cells)
    ours, steps = run(4, prophet(job, tmp_path, **EAGER))
    check_equal(ours, plain(4, job), job)
    assert any(num_copied(steps))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool, tmp_path: Path) -> None:
    """A block computed again finds its copies; gradients that nobody carries travel at once."""
    job = Job("mixtral", 0, dtype="float64", steps=8, use_reentrant=use_reentrant)
    for rematerialize in (False, True):
        ours, steps = run(2, prophet(job, tmp_path, **EAGER, rematerialize=rematerialize))
        check_equal(ours, plain(2, job), job)
        assert any(num_copied(steps))
