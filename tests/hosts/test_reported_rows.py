# SPDX-License-Identifier: Apache-2.0
"""What real runs report of their rows, held against what each pass routed, worked out anew: by
``rows_from`` of every sender, and by replicas EP rank by EP rank.

Shape letters: C EP ranks, E experts, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

from ds_moe_ext.core.hardware import Device, Hardware, Link
from ds_moe_ext.core.share import LocalElseOwner, NearestReplica, Rule
from ds_moe_ext.hosts.steps.training_run import run_of
from ds_moe_ext.moe.observation import Rows
from ds_moe_ext.planning.loads import LoadWindow, balance_L
from ds_moe_ext.planning.strategy import Plan
from ds_moe_ext.report.record import RunRecord
from ds_moe_ext.report.recorder import Recorder
from tests.hosts.jobs import Job, engine_of, loss_of, micro_batch
from tests.marks import slow
from tests.ranks import pool_of

RANKS = 4
NODES = Hardware(
    name="of a test",
    source="made up",
    num_nodes=2,
    ranks_per_node=2,
    device=Device(name="CPU"),
    intra=Link(bytes_per_s=1e12),
    inter=Link(bytes_per_s=1e12),
)
COPYING = {"overlap_degree": 3, "replicas_per_rank": 2, "reshard_interval": 0, "window": 3}
LATE = {**COPYING, "overlap_degree": 0, "calibrate": True}
LESS = {"balance": 0.3, "num_excluded": 2}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ep": ("ep", {}),
    "fssdp": ("fssdp", {**COPYING, "share": "paper"}),
    "fssdp calibrated": ("fssdp", {**LATE, "share": "paper"}),
    "fssdp priced": ("fssdp", {**COPYING, "share": "priced"}),
    "prophet priced": ("prophet", {**LESS, "share": "priced"}),
}


class Layer(NamedTuple):
    """One layer in one step, worked out by hand."""

    routed_CE: np.ndarray
    computed_C: np.ndarray
    left: int
    crossed: int
    made_for_CE: np.ndarray | None
    predicted_C: np.ndarray | None
    by_paper_C: np.ndarray
    planned: set[tuple[int, int]]
    added: dict[tuple[int, int], int]

    @classmethod
    def of(cls, plan: Plan, rows: Rows, node_C: np.ndarray, *, is_local: bool) -> Layer:
        between = sum(between_of(one.destination.share, one.rows_CE) for one in rows.passes)
        by_paper = sum(
            between_of(
                LocalElseOwner(plan.owner, target) if is_local else NearestReplica(target, node_C),
                rows_CE,
            )
            for rows_CE, (target, _) in rows.passes
        )
        assert isinstance(between, np.ndarray) and isinstance(by_paper, np.ndarray)
        away = [(s, h) for s, h in np.ndindex(between.shape) if s != h]
        made_for_CE = plan.predicted_CE
        is_predicted = made_for_CE is not None and made_for_CE.any()
        added: dict[tuple[int, int], int] = {}
        for _, (target, _) in rows.passes:
            for pair in pairs(target.holds_EC) - pairs(plan.target.holds_EC):
                added[pair] = added.get(pair, 0) + 1
        return cls(
            rows.routed_CE,
            between.sum(axis=0),
            left=sum(int(between[pair]) for pair in away),
            crossed=sum(int(between[s, h]) for s, h in away if node_C[s] != node_C[h]),
            made_for_CE=made_for_CE,
            predicted_C=between_of(plan.share, made_for_CE).sum(axis=0) if is_predicted else None,
            by_paper_C=by_paper.sum(axis=0),
            planned=pairs(plan.target.holds_EC) - pairs(plan.owner.holds_EC),
            added=added,
        )


def pairs(holds_EC: np.ndarray) -> set[tuple[int, int]]:
    return {(int(expert), int(ep_rank)) for expert, ep_rank in np.argwhere(holds_EC)}


def between_of(rule: Rule, rows_CE: np.ndarray) -> np.ndarray:
    """Rows from each sender to each holder, int64 ``[C, C]``."""
    senders = range(len(rows_CE))
    share = rule.of_rows(rows_CE)
    return np.stack([share.rows_from(s, rows_CE[s][None]).sum(axis=(0, 1)) for s in senders])


@dataclass
class Run:
    """A job, what it reported, and its steps worked out by hand."""

    job: Job
    report: RunRecord
    steps: list[list[Layer]] = field(default_factory=list)


def trained(rank: int, world_size: int, job: Job) -> Run:
    engine = engine_of(job, world_size)
    recorder, steps, after_step = run_of(engine).recorder, [], Recorder.after_step

    def watched(recorder: Recorder, step: int, rows: list[Rows]) -> None:
        sites = [layer.routed.layer_context for layer in recorder.layers]
        is_local = job.strategy == "prophet"
        steps.append(
            [
                Layer.of(layer_context.plan, seen, layer_context.layout.node_C, is_local=is_local)
                for layer_context, seen in zip(sites, rows)
            ]
        )
        after_step(recorder, step, rows)

    with mock.patch.object(Recorder, "after_step", watched):
        for step in range(job.steps):
            for number in range(rank, job.micro_batches, world_size):
                engine.backward(loss_of(engine, micro_batch(step, number)))
                engine.step()
    return Run(job, RunRecord.from_json(recorder.record().to_json()), steps)


@pytest.fixture(
    scope="module", params=[slow("ep"), slow("fssdp"), "fssdp calibrated", slow("prophet priced")]
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    strategy, keys = RUNS[request.param]
    path: Path = tmp_path_factory.mktemp("hardware") / "hardware.json"
    path.write_text(NODES.to_json())
    job = Job("mixtral", 1, steps=7, micro_batches=2 * RANKS, num_experts=8, strategy=strategy)
    ranks = pool_of(RANKS).run(trained, replace(job, keys=tuple(keys.items()), hardware=str(path)))
    assert len({str((one.report.looks, one.report.placements)) for one in ranks}) == 1
    found: Run = ranks[0]
    return found


def test_rows_that_left_and_balances_are_those_of_the_passes(run: Run) -> None:
    report, looks = run.report, run.report.looks
    assert looks is not None and looks.num_nodes == 2
    has_rule = dict(run.job.keys).get("share") == "priced"
    for index, layers in enumerate(run.steps):
        for number, layer in enumerate(layers):
            at = index, number
            assert report.ep_rank_rows_ILC[at].tolist() == layer.computed_C.tolist()
            assert (looks.left_IL[at], looks.crossed_IL[at]) == (layer.left, layer.crossed)
            if layer.predicted_C is None:
                assert np.isnan(looks.predicted_IL[at])
            else:
                assert looks.predicted_IL[at] == balance_L(layer.predicted_C)
            if has_rule and layer.predicted_C is not None:
                assert looks.by_paper_IL[at] == balance_L(layer.by_paper_C)
    assert 0 < looks.crossed_IL.sum() < looks.left_IL.sum() < report.rows_ILE.sum()
    assert np.isnan(looks.predicted_IL).all() == (run.job.strategy == "ep")
    if has_rule:
        assert (looks.by_paper_IL != report.balance_IL()).any()
    else:
        assert np.isnan(looks.by_paper_IL).all()


def test_plans_are_made_for_the_rows_before(run: Run) -> None:
    window = LoadWindow({"prophet": 1}.get(run.job.strategy, 3))
    for layers in run.steps:
        for number, layer in enumerate(layers):
            if layer.predicted_C is not None:
                assert layer.made_for_CE is not None
                np.testing.assert_array_equal(layer.made_for_CE, window.predicted()[number])
        window.push([layer.routed_CE for layer in layers])


def test_replicas_are_those_of_the_passes(run: Run) -> None:
    placements = run.report.placements
    if placements is None:  # as where no copy pays by what this machine measured
        assert run.job.strategy in ("ep", "prophet")
        assert not any(layer.planned or layer.added for layers in run.steps for layer in layers)
        return
    for index, layers in enumerate(run.steps):
        for number, layer in enumerate(layers):
            for expert in range(8):
                planned, added = (
                    sum(pair[0] == expert for pair in found)
                    for found in (layer.planned, layer.added)
                )
                assert placements.replicas_ILE[index, number, expert] == planned
                assert placements.all_replicas_ILE[index, number, expert] == planned + added
    last = run.steps[-1]
    lines = [
        {(e, c) for e, ep_ranks in enumerate(one) for c in ep_ranks} for one in placements.copied_to
    ]
    assert lines == [layer.planned for layer in last]
    has_late = any(layer.added for layers in run.steps for layer in layers)
    assert (placements.added is not None) == has_late
    if placements.added is not None:
        assert placements.added.num_passes == 2
        assert placements.replicas_ILE.any() != ("calibrate" in dict(run.job.keys))
        late = [
            {
                (expert, ep_rank): number
                for expert, ep_ranks in enumerate(one)
                for ep_rank, number in ep_ranks
            }
            for one in placements.added.to
        ]
        assert late == [layer.added for layer in last]
    assert any(layer.planned or layer.added for layers in run.steps for layer in layers)
