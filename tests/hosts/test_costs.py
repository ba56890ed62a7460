# SPDX-License-Identifier: Apache-2.0
"""What planners know of a run's costs is the same on all ranks, and known to be there at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from ds_moe_ext.core.hardware import Device, Flops, Hardware, Link
from ds_moe_ext.hosts.steps.costs import TRIED
from tests.hosts.copied_runs import check_equal, plain
from tests.hosts.jobs import Job, train
from tests.ranks import pool_of


def _slowest(rank: int, world_size: int) -> tuple[float, float]:
    from ds_moe_ext.core.hardware import Link
    from ds_moe_ext.hosts.steps.costs import slowest

    measured = Link(bytes_per_s=10.0 * (rank + 1), latency_s=0.25 * rank, r_squared=0.5)
    link = slowest(measured, torch.device("cpu"))
    return link.bytes_per_s, link.latency_s


def test_the_places_of_an_ep_rank_reckon_with_one_link() -> None:
    found = pool_of(2).run(_slowest)
    assert found[0] == found[1] == (pytest.approx(10.0), 0.25)


class _RisingClock:
    """Does the work; says 1, 2, 3 ms in turn, whatever it took."""

    def __init__(self) -> None:
        self._num_calls = 0

    def seconds(self, ready: Callable[[], object], work: Callable[[], object]) -> float:
        ready()
        work()
        self._num_calls += 1
        return ((self._num_calls - 1) % 3 + 1) * 1e-3


def _links(rank: int, world_size: int, etp_size: int) -> tuple[float, ...]:
    from ds_moe_ext.core.layout import Grid, ParallelLayout
    from ds_moe_ext.hosts.steps import costs
    from ds_moe_ext.schedule.task import INTER, PARAM

    grid = Grid(world_size, world_size // etp_size, etp_size)
    uses = [("ep", INTER), ("ep", PARAM)]
    layout = ParallelLayout.build(grid, uses, ranks_per_node=world_size // 2)
    with mock.patch.object(costs, "clock_of", lambda device: _RisingClock()):
        links = costs.Links.measured(layout, (torch.zeros(64),), peer_bytes=4096)
    return links.inter.bytes_per_s, links.intra.bytes_per_s, links.alone.bytes_per_s, links.cards


@pytest.mark.parametrize(("etp_size", "ratio", "cards"), [(1, 4.0, 4.0), (2, 1.0, 1.0)])
def test_rows_are_priced_by_links_of_nodes_and_of_ep_ranks(
    etp_size: int, ratio: float, cards: float
) -> None:
    """Two nodes of two ranks, which exchange as long with each of two far EP ranks as with a near
    one, and alone as long with one; then each an EP rank of both, which has no other near it."""
    found = pool_of(4).run(_links, etp_size)
    assert len(set(found)) == 1, "all ranks must find the same"
    inter, intra, alone, times_alone = found[0]
    assert inter == pytest.approx(ratio * intra, rel=1e-3)
    assert alone == pytest.approx(intra, rel=1e-3)
    assert times_alone == pytest.approx(cards, rel=1e-3)
    assert intra > 0


CLUSTERS = Path(__file__).parents[2] / "configs" / "hardware"


@pytest.mark.parametrize(
    ("cluster", "dtype", "expected"),
    [
        ("proprophet_hpwnv", "float32", "does not say what .* costs; measure it"),
        ("fsmoe_a", "bfloat16", "'device.products.bf16'"),
    ],
)
def test_a_file_that_lacks_lines_is_refused_at_start(
    cluster: str, dtype: str, expected: str
) -> None:
    path = str(CLUSTERS / f"{cluster}.json")
    job = Job(strategy="esp", etp_size=2, hardware=path, dtype=dtype, steps=1)
    with pytest.raises(AssertionError, match=f"ds_moe_ext.hardware is '{path}', but .*{expected}"):
        pool_of(2).run(train, job)


def test_a_file_takes_the_place_of_measuring() -> None:
    job = Job(strategy="esp", etp_size=2, hardware=str(CLUSTERS / "fsmoe_a.json"), steps=6)
    described, plain = (pool_of(2).run(train, each)[0] for each in (job, Job(steps=6)))
    assert described.losses == pytest.approx(plain.losses, rel=1e-5)


PLACED = Job("toy", 0, dtype="float64", steps=6, etp_size=2, balance="fssdp")
"""Costs are measured in its fifth step."""


def placed(world_size: int, job: Job) -> None:
    keys = (("degree", 2), ("slice_gradients", False))
    ours = pool_of(world_size).run(train, replace(job, strategy="esp", keys=keys))[0]
    whole = replace(job, etp_size=None, balance=None, hardware=None)
    check_equal(ours, plain(world_size, whole), whole)


@pytest.mark.slow  # where nobody is to copy to, under fssdp, quick in test_run.py
def test_one_ep_rank_has_nobody_to_copy_to() -> None:
    placed(2, PLACED)


@pytest.mark.slow  # links' prices: tests/cost
def test_replicas_between_ep_ranks_meet_the_links_between_nodes(tmp_path: Path) -> None:
    """An EP rank fills a node of this file, which says nothing of links within nodes."""
    hardware = Hardware(
        name="of a test",
        source="made up",
        num_nodes=2,
        ranks_per_node=2,
        device=Device(name="CPU", flops_per_s=Flops(fp32=1e9)),
        inter=Link(bytes_per_s=1e10, latency_s=1e-5),
    )
    path = tmp_path / "hardware.json"
    path.write_text(hardware.to_json())
    placed(4, replace(PLACED, hardware=str(path)))


def _in_a_run_that_drifts(rank: int, world_size: int, job: Job) -> list[int]:
    """Steps behind which layers' corrections came."""
    from ds_moe_ext.hosts.steps.costs import Correction, Costs, Measured, StepTimes
    from ds_moe_ext.planning.strategy import Choice

    corrected, steps = Costs.corrected, 0
    came: list[int] = []

    def after_step(times: StepTimes, step: int, choice: Choice | None) -> None:
        nonlocal steps
        steps, times.has_drifted = step, step == DRIFTS

    def noted(costs: Costs, found: Correction) -> Measured:
        came.append(steps)
        return corrected(costs, found)

    with (
        mock.patch.object(StepTimes, "after_step", after_step),
        mock.patch.object(Costs, "corrected", noted),
    ):
        train(rank, world_size, job)
    return came


DRIFTS = 14  # and is looked at as the second step of a run is


def test_what_drifts_is_measured_and_corrected_again() -> None:
    job = Job("toy", 0, strategy="fssdp", steps=DRIFTS + TRIED[-1] + 2, micro_batches=2)
    job = replace(job, keys=(("overlap_degree", 2), ("replicas_per_rank", 2)))
    found = pool_of(2).run(_in_a_run_that_drifts, job)
    assert found == [[TRIED[-1], DRIFTS + TRIED[-1] - 1]] * 2
