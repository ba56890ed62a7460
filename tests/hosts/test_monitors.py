# SPDX-License-Identifier: Apache-2.0
"""What a run shows while it goes on: scalars in monitors of hosts, and what all ranks took."""

from __future__ import annotations

import csv
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ds_moe_ext
from ds_moe_ext.report.record import DeviceRecord, RunRecord
from tests.hosts.jobs import LENGTH, ROWS, Job, document_of, loss_of, micro_batch, model_of
from tests.hosts.megatron_toy import MegatronRun
from tests.hosts.zebra_runs import zebra
from tests.marks import slow
from tests.ranks import pool_of, preload

preload("torch.utils.tensorboard")

STEPS = 23
MICRO_BATCHES = 4
FSSDP = Job(
    "toy",
    strategy="fssdp",
    keys=(("overlap_degree", 2), ("replicas_per_rank", 2), ("reshard_interval", 0)),
    micro_batches=MICRO_BATCHES,
)
TIMES = {"step_s", "tokens_per_s", "exposed_s", "exposed_share", "waited_s", "sent_s"}


class Shown(NamedTuple):
    """What a rank has seen."""

    losses: list[float]
    record: str
    balances: list[dict[str, float]]
    warned: list[str]
    printed: str


Points = Mapping[str, Sequence[tuple[int, float]]]
"""Scalars of ours, by name: where they stand, and values."""


def on_board(folder: Path) -> Points:
    """What TensorBoard reads in a folder of events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
        if name.startswith("ds_moe_ext/")
    }


def in_csv(folder: Path) -> Points:
    """What DeepSpeed wrote in files of commas."""
    found = {}
    for path in folder.glob("ds_moe_ext_*.csv"):
        with path.open() as file:
            _, *rows = csv.reader(file)
        found[path.stem] = [(int(step), float(value)) for step, value in rows]
    return found


def check_balances(points: Points, balances: Sequence[dict[str, float]], every: int) -> None:
    """Those of each layer, as they were behind every so many steps."""
    due = balances[every - 1 :: every]
    for layer in due[0]:
        values = [value for _, value in points[f"ds_moe_ext/balance/of/{layer}"]]
        assert values == pytest.approx([one[layer] for one in due], rel=1e-6)
    means = [float(np.mean([*one.values()])) for one in due]
    assert [value for _, value in points["ds_moe_ext/balance/mean"]] == pytest.approx(means)
    highest = [max(one.values()) for one in due]
    assert [value for _, value in points["ds_moe_ext/balance/busiest_layer"]] == pytest.approx(
        highest
    )


def balances_of(recorder: Any) -> dict[str, float]:
    names = [layer.name for layer in recorder.layers]
    return dict(zip(names, recorder.latest_balance_L().tolist()))


# DeepSpeed.


def trained(
    rank: int, world_size: int, job: Job, report: Mapping[str, Any], fails: bool = False
) -> Shown:
    import deepspeed

    from ds_moe_ext.hosts.steps.training_run import finish

    model, document = model_of(job), document_of(job, world_size)
    document["ds_moe_ext"]["report"] = dict(report)
    with redirect_stdout(StringIO()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=document
        )
        if fails:
            engine.monitor.write_events = mock.Mock(side_effect=ConnectionError("no network"))
        recorder = ds_moe_ext.recorder_of(engine)
        assert recorder is not None
        losses, balances = [], []
        for step in range(job.steps):
            of_step = []
            for number in range(rank, job.micro_batches, world_size):
                loss = loss_of(engine, micro_batch(step, number))
                of_step.append(float(loss))
                engine.backward(loss)
                if not fails or not engine.is_gradient_accumulation_boundary():
                    engine.step()
                else:
                    engine._take_model_step({})  # DeepSpeed's own scalars would fail behind it
                    engine.micro_steps += 1
            losses.append(float(np.mean(of_step)))
            balances.append(balances_of(recorder))
    with redirect_stdout(StringIO()) as printed:
        finish(recorder, None)
    warned = [str(one.message) for one in caught if "monitor" in str(one.message)]
    return Shown(losses, recorder.record().to_json(), balances, warned, printed.getvalue())


class Monitored(NamedTuple):
    """A run of two ranks, and the folder of what its monitors wrote."""

    ranks: list[Shown]
    folder: Path


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Monitored:
    folder = tmp_path_factory.mktemp("monitored")
    where = {"enabled": True, "output_path": str(folder)}
    job = replace(
        FSSDP,
        steps=STEPS,
        extra=(
            ("tensorboard", {**where, "job_name": "board"}),
            ("csv_monitor", {**where, "job_name": "csv"}),
            ("steps_per_print", 5),
        ),
    )
    return Monitored(pool_of(2).run(trained, job, {"path": str(folder / "report")}), folder)


def test_scalars_come_to_deepspeeds_monitors(monitored: Monitored) -> None:
    first, second = monitored.ranks
    assert first.warned == second.warned == []
    points = on_board(monitored.folder / "board")
    check_balances(points, first.balances, 5)
    samples = MICRO_BATCHES * ROWS
    where_shown = [at for at, _ in points["ds_moe_ext/balance/mean"]]
    assert where_shown == [samples * step for step in (5, 10, 15, 20)]
    for name in TIMES:  # ranks report to each other behind every tenth step
        assert [at for at, _ in points[f"ds_moe_ext/{name}"]] == [10 * samples, 20 * samples]
    placements = RunRecord.from_json(first.record).placements
    assert placements is not None
    replicas = placements.all_replicas_ILE.sum(axis=(1, 2))[4::5].tolist()
    assert [value for _, value in points["ds_moe_ext/replicas"]] == replicas and max(replicas) > 0
    tables = in_csv(monitored.folder / "csv")
    assert {name.replace("/", "_") for name in points} == set(tables)
    for name, values in points.items():
        ours = tables[name.replace("/", "_")]
        assert [at for at, _ in ours] == [at for at, _ in values]
        assert [v for _, v in ours] == pytest.approx([v for _, v in values], rel=1e-6)


@pytest.mark.slow
def test_a_monitor_that_fails_warns_once_and_changes_nothing(tmp_path: Path) -> None:
    where = {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"}
    job = Job(  # which plans by nothing that it has measured
        "toy",
        micro_batches=MICRO_BATCHES,
        steps=STEPS,
        extra=(("csv_monitor", where), ("steps_per_print", 5)),
    )
    ranks = pool_of(2).run(trained, job, {}, fails=True)
    text = "ds_moe_ext: the monitor has failed: ConnectionError('no network')"
    assert [rank.warned for rank in ranks] == [[text], []]
    quiet = pool_of(2).run(trained, replace(job, extra=()), {"enabled": False})
    for rank, without in zip(ranks, quiet):
        assert rank.losses == without.losses  # to the last bit


@pytest.mark.slow
@pytest.mark.parametrize("report", [{"monitor": False}, {"enabled": False}])
def test_nothing_is_shown_where_it_is_not_wanted(tmp_path: Path, report: dict[str, Any]) -> None:
    where = {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"}
    job = replace(FSSDP, steps=5, extra=(("csv_monitor", where), ("steps_per_print", 5)))
    pool_of(2).run(trained, job, report)
    assert in_csv(tmp_path / "csv") == {}
    assert [*(tmp_path / "csv").iterdir()]  # DeepSpeed's own


def test_all_ranks_tell_what_they_took(monitored: Monitored) -> None:
    shown = monitored.ranks
    record = RunRecord.from_json(shown[0].record)
    ranks = record.ranks
    assert ranks is not None and ranks.ranks_R == (0, 1)
    pace = ranks.pace
    assert pace.steps_G == (9, 19)
    losses_GR = np.array([one.losses for one in shown]).T[[9, 19]]
    np.testing.assert_allclose(pace.loss_G, losses_GR.mean(axis=1), rtol=1e-6)
    assert (pace.step_s_G > 0).all()
    tokens = MICRO_BATCHES * ROWS * LENGTH
    np.testing.assert_allclose(pace.tokens_per_s_G * pace.step_s_G, tokens, rtol=1e-12)
    assert (ranks.resident_R > 50 << 20).all() and not ranks.allocated_R.any()
    assert pace.resident_G[-1] == ranks.resident_R.max() and np.isnan(pace.allocated_G).all()
    assert ranks.ep_rank_R == (0, 1) and ranks.device == DeviceRecord("cpu", os.cpu_count() or 1)
    # Rank 0's are those of the steps up to the last reporting, of which two were timed.
    assert set(ranks.kinds_K) >= {"forward:dispatch", "backward:expert", "forward:expert"}
    assert ranks.seconds_KR.shape == (len(ranks.kinds_K), 2) and (ranks.seconds_KR >= 0).all()
    num_passes, both_ways = MICRO_BATCHES // 2, 4
    assert ranks.num_exchanges == 2 * len(record.layers) * num_passes * both_ways
    assert ranks.num_last_R.sum() == ranks.num_exchanges
    exchanges = [kind.endswith((":dispatch", ":combine")) for kind in ranks.kinds_K]
    np.testing.assert_allclose(
        ranks.waited_s_R + ranks.sent_s_R, ranks.seconds_KR[exchanges].sum(axis=0), rtol=1e-9
    )
    np.testing.assert_allclose(ranks.sent_s_R[0], ranks.sent_s_R[1], rtol=1e-12)
    assert (ranks.exposed_s_R > 0).all()
    assert (ranks.exposed_s_R < ranks.seconds_KR.sum(axis=0)).all()
    assert "tokens a second (median up to step 19, measured); loss" in shown[0].printed
    assert (
        "without replicas (strategy ep)" in shown[0].printed
        or ("replicas did not reduce") in shown[0].printed
    )
    assert "mean of all ranks" in shown[0].printed


@pytest.mark.parametrize(
    "job",
    [Job("toy", ep_ranks=1), slow(Job("toy", strategy="esp", etp_size=2))],
    ids=["replicas", "split"],
)
def test_tokens_of_ranks_that_do_not_exchange_rows(job: Job) -> None:
    """Each has all experts, or all of their parts are in an EP rank."""
    shown = pool_of(2).run(trained, replace(job, steps=10, micro_batches=MICRO_BATCHES), {})
    ranks = RunRecord.from_json(shown[0].record).ranks
    assert ranks is not None and ranks.ranks_R == (0, 1) and not ranks.num_last_R.any()
    tokens = MICRO_BATCHES * ROWS * LENGTH
    assert ranks.pace.tokens_per_s_G[0] * ranks.pace.step_s_G[0] == pytest.approx(tokens)


@pytest.mark.slow  # as those of one role do
def test_both_roles_tell_what_they_took() -> None:
    """Attention ranks have all the tokens; an exchange has as many ends as there are ranks."""
    job = zebra(replace(FSSDP, steps=10), 1, 1)
    record = RunRecord.from_json(pool_of(2).run(trained, job, {})[0].record)
    ranks = record.ranks
    assert ranks is not None and ranks.ranks_R == (0, 1) and ranks.pace.steps_G == (9,)
    tokens = MICRO_BATCHES * ROWS * LENGTH
    assert ranks.pace.tokens_per_s_G[0] * ranks.pace.step_s_G[0] == pytest.approx(tokens)
    row = ranks.kinds_K.index("forward:expert")
    assert ranks.seconds_KR[row, 0] == 0 < ranks.seconds_KR[row, 1]
    assert ranks.num_last_R.sum() == ranks.num_exchanges > 0


# Plain torch.


class Looped(NamedTuple):
    """What a monitor of the user's got, and what came of steps."""

    got: list[Any]
    balances: list[dict[str, float]]
    record: str
    losses: list[float]


def looped(rank: int, world_size: int, **report: Any) -> Looped:
    got: list[Any] = []
    losses = []
    model = model_of(Job("toy"))
    with redirect_stdout(StringIO()):
        moe = ds_moe_ext.attach(model, {"enabled": True, "report": report}, monitor=got.append)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        moe.watch(optimizer)
        recorder = ds_moe_ext.recorder_of(moe)
        assert recorder is not None
        balances = []
        for step in range(STEPS):
            ids = micro_batch(step, rank)
            loss = model(input_ids=ids, labels=ids).loss
            losses.append(float(loss))
            moe.saw_loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            balances.append(balances_of(recorder))
    return Looped(got, balances, recorder.record().to_json(), losses)


@pytest.mark.slow
def test_a_monitor_of_ones_own_in_a_training_loop() -> None:
    first, second = pool_of(2).run(looped)
    got, balances = first.got, first.balances
    assert len(got) == 2 and second.got == []
    points: dict[str, list[tuple[int, float]]] = {}
    for events in got:
        for name, value, at in events:
            points.setdefault(name, []).append((at, value))
    check_balances(points, balances, 10)
    assert {at for values in points.values() for at, _ in values} == {10, 20}
    assert {name.removeprefix("ds_moe_ext/") for name in points} >= TIMES
    ranks = RunRecord.from_json(first.record).ranks
    assert ranks is not None
    losses_GR = np.array([first.losses, second.losses]).T[[9, 19]]
    np.testing.assert_allclose(ranks.pace.loss_G, losses_GR.mean(axis=1), rtol=1e-6)
    assert points["ds_moe_ext/step_s"] == [
        (10, ranks.pace.step_s_G[0]),
        (20, ranks.pace.step_s_G[1]),
    ]
    quiet = pool_of(2).run(looped, enabled=False)
    assert [rank.got for rank in quiet] == [[], []]
    assert [rank.losses for rank in quiet] == [first.losses, second.losses]  # to the last bit


def given_a_word(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError) as caught:
        ds_moe_ext.attach(model_of(Job("toy")), {"enabled": True}, monitor="wandb")  # type: ignore
    return str(caught.value)


def test_a_monitor_that_cannot_be_called_is_refused() -> None:
    assert set(pool_of(2).run(given_a_word)) == {
        "ds_moe_ext.attach was given monitor='wandb', which cannot be called; give a function of a "
        "list of (name, value, step), or leave it out"
    }


# Megatron.


class Loop:
    """What Megatron-LM's training loop keeps in ``megatron.training.global_vars``: one rank has
    writers."""

    def __init__(self, folder: Path, *, writes: bool) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.reported = SimpleNamespace(curr_iteration=100, tensorboard_log_interval=5)
        self.board = SummaryWriter(log_dir=str(folder)) if writes else None
        self.wandb = mock.Mock() if writes else None

    def get_args(self) -> Any:
        return self.reported

    def get_tensorboard_writer(self) -> Any:
        return self.board

    def get_wandb_writer(self) -> Any:
        return self.wandb


@contextmanager
def loop_of(folder: Path) -> Iterator[Loop]:
    from ds_moe_ext.hosts.megatron.engine import LOOP

    loop = Loop(folder, writes=dist.get_rank() == dist.get_world_size() - 1)
    sys.modules[LOOP] = loop  # type: ignore[assignment]
    try:
        yield loop
    finally:
        del sys.modules[LOOP]
    if loop.board is not None:
        loop.board.close()


class UnderMegatron(NamedTuple):
    """What came of steps, and what the writer of W&B was given."""

    balances: list[dict[str, float]]
    logged: list[Any]
    record: str
    losses: list[float]


def under_megatron(
    rank: int, world_size: int, run: MegatronRun, folder: Path, **keys: Any
) -> UnderMegatron:
    from tests.hosts.megatron_jobs import Training, megatron

    settings = {"enabled": True, "report": {"path": str(folder / "report")}, **keys}
    with redirect_stdout(StringIO()), megatron(run, settings), loop_of(folder / "board") as loop:
        training, balances, losses = Training(run), [], []
        recorder = ds_moe_ext.recorder_of(training.optimizer)
        assert recorder is not None
        for step in range(run.steps):
            losses.append(training.compute(step))
            training.update()
            loop.reported.curr_iteration += 1
            balances.append(balances_of(recorder))
        logged = [] if loop.wandb is None else [call.args for call in loop.wandb.log.mock_calls]
    return UnderMegatron(balances, logged, recorder.record().to_json(), losses)


@pytest.mark.parametrize("run", [slow(MegatronRun(ep=2, steps=12)), MegatronRun(pp=2, steps=12)])
def test_scalars_come_to_writers_of_megatrons_loop(tmp_path: Path, run: MegatronRun) -> None:
    """Under pipelines each stage shows of its own layers, and the last one writes."""
    pytest.importorskip("megatron.core")
    first, last = pool_of(2).run(under_megatron, run, tmp_path)
    balances, logged = last.balances, last.logged
    assert first.logged == []
    points = on_board(tmp_path / "board")
    check_balances(points, balances, 5)
    assert [at for at, _ in points["ds_moe_ext/balance/mean"]] == [105, 110]
    assert [at for at, _ in points["ds_moe_ext/tokens_per_s"]] == [110]
    assert [at for _, at in logged] == [105, 110]
    for name, value in logged[1][0].items():
        assert dict(points[name])[110] == pytest.approx(value, rel=1e-6)
    ranks = RunRecord.from_json(last.record).ranks
    assert ranks is not None and ranks.pace.steps_G == (9,)
    assert ranks.ranks_R == ((1,) if run.pp == 2 else (0, 1))
    tokens = run.batch * run.length * (1 if run.pp == 2 else 2)
    assert ranks.pace.tokens_per_s_G[0] * ranks.pace.step_s_G[0] == pytest.approx(tokens)
    assert ranks.pace.loss_G[0] == pytest.approx(last.losses[9], rel=1e-6)
    quiet = pool_of(2).run(under_megatron, run, tmp_path / "quiet", report={"enabled": False})
    assert quiet[1].logged == [] and quiet[1].losses == last.losses  # to the last bit


def test_losses_are_those_that_loss_functions_tell() -> None:
    """A mean, or a sum and its tokens; of several values only Megatron-LM's own."""
    from ds_moe_ext.hosts.megatron.engine import LOSS, losses_of

    mean, of_tokens = torch.tensor(2.0), torch.tensor([12.0, 4.0])
    stored = [{LOSS: mean, "z": of_tokens}, {LOSS: of_tokens}, {"mine": mean}]
    assert [float(loss) for loss in losses_of(stored)] == [2.0, 3.0, 2.0]
    unknown = [{}, {"a": mean, "b": mean}, {LOSS: 1.0}, {LOSS: torch.ones(3)}, mean]
    assert losses_of(unknown) == losses_of([]) == losses_of(None) == []


@pytest.mark.slow
def test_both_roles_tell_under_megatron(tmp_path: Path) -> None:
    """Steps are taken in the world of a role, of which the last rank writes: one of each."""
    pytest.importorskip("megatron.core")
    keys = {"strategy": "zebra", "zebra": {"attention_size": 1, "expert_size": 1}}
    run = MegatronRun(steps=12, dtype="float64", num_microbatches=2)
    for rank in pool_of(2).run(under_megatron, run, tmp_path, **keys):
        ranks = RunRecord.from_json(rank.record).ranks
        assert ranks is not None and ranks.ranks_R == (0, 1)
        tokens = run.batch * run.length * run.num_microbatches
        assert ranks.pace.tokens_per_s_G[0] * ranks.pace.step_s_G[0] == pytest.approx(tokens)
    shown = on_board(tmp_path / "board")["ds_moe_ext/tokens_per_s"]
    assert [at for at, _ in shown] == [110, 110] and shown[0] == shown[1]
