# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: paths are tried at start, and a report is there after SIGTERM."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from ds_moe_ext.files import whole_files
from ds_moe_ext.report.record import RunRecord
from tests.hosts.jobs import Job, document_of, loss_of, micro_batch, model_of
from tests.hosts.processes import ROOT, answers, started
from tests.marks import slow
from tests.ranks import key_value_store, pool_of


def why_unwritable(path: Path) -> str:
    return whole_files.why_unwritable(path, makes_folders=True)


def test_a_path_is_tried_without_a_trace(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("something")
    assert why_unwritable(kept) == "" and kept.read_text() == "something"
    assert why_unwritable(tmp_path / "new/folder/file") == ""
    assert list((tmp_path / "new/folder").iterdir()) == []
    missing = whole_files.why_unwritable(tmp_path / "none/file", makes_folders=False)
    assert missing == "No such file or directory"


def test_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    assert why_unwritable(tmp_path) == "Is a directory"
    assert why_unwritable(tmp_path / "file/below") in ("Not a directory", "File exists")
    assert why_unwritable(tmp_path / "pipe") == "No such device or address"
    assert why_unwritable(tmp_path / ("long" * 99)) == "File name too long"
    assert why_unwritable(tmp_path / "null\0") == "embedded null byte"


# Under a real engine.


def engine_of(world_size: int, **keys: Any) -> Any:
    """Of the toy with these keys in the block."""
    import deepspeed

    job = Job("toy", micro_batches=world_size)
    model, document = model_of(job), document_of(job, world_size)
    document["ds_moe_ext"] |= keys
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=document
    )
    return engine


def refused(rank: int, world_size: int, **keys: Any) -> str:
    with pytest.raises(ValueError) as caught:
        engine_of(world_size, **keys)
    return str(caught.value)


@pytest.mark.parametrize("key", ["report", "trace"])
def test_paths_that_cannot_be_written_are_refused_on_all_ranks(tmp_path: Path, key: str) -> None:
    path = tmp_path / "report.json"
    path.mkdir()
    given = str({"report": tmp_path, "trace": path}[key])
    for stated in pool_of(2).run(refused, **{key: {"path": given}}):
        assert stated == (
            f"ds_moe_ext.{key}.path is {given!r}, but {str(path)!r} cannot be written "
            "(Is a directory); name another, or leave it out"
        )


def spoilt(rank: int, world_size: int, folder: Path) -> list[str]:
    """Warnings of a run whose folder becomes a file, and of the report behind it."""
    from ds_moe_ext.hosts.steps.training_run import finish, recorder_of

    trace = {"path": str(folder / "trace.json"), "first_step": 1}
    engine = engine_of(world_size, trace=trace)
    if rank == 0:
        folder.rmdir()
        folder.write_text("in the way")
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(StringIO()):
        warnings.simplefilter("always")
        for step in range(3):
            engine.backward(loss_of(engine, micro_batch(step, rank)))
            engine.step()
        recorder = recorder_of(engine)
        assert recorder is not None and recorder.record().steps_I == (0, 1, 2)
        if rank == 0:
            finish(recorder, str(folder))
    return [str(each.message) for each in caught if "ds_moe_ext" in str(each.message)]


def test_files_that_cannot_be_written_later_end_no_training(tmp_path: Path) -> None:
    trace, report = pool_of(2).run(spoilt, tmp_path / "out")[0]
    assert trace.startswith(f"ds_moe_ext: the trace '{tmp_path}/out/trace.json' could not be")
    assert report.startswith(f"ds_moe_ext: the report in '{tmp_path}/out' could not be written")


def resumed(rank: int, world_size: int, folder: Path) -> str:
    """What the second of two runs shows that leave a report in one folder."""
    from ds_moe_ext.hosts.steps.training_run import finish, recorder_of

    shown = StringIO()
    for each in (StringIO(), shown):
        with redirect_stdout(each):
            engine = engine_of(world_size, report={"path": str(folder)})
            engine.backward(loss_of(engine, micro_batch(0, rank)))
            engine.step()
            recorder = recorder_of(engine)
            assert recorder is not None
            finish(recorder, f"{folder}/")
    return shown.getvalue()


def test_a_run_that_goes_on_keeps_the_earlier_report(tmp_path: Path) -> None:
    results = pool_of(1).run(resumed, tmp_path)[0]
    assert (
        f"the report of an earlier run in {str(tmp_path)!r} was renamed to report.1.json" in results
    )
    assert f"wrote {tmp_path}/report.html and {tmp_path}/report.json\n" in results
    assert {f"report{number}.json" for number in ("", ".1")} <= set(os.listdir(tmp_path))


class Owner:
    """What a run lives with."""


def ended(rank: int, world_size: int, **keys: Any) -> str:
    """What is shown as a run starts and ends that has planned by forecasts."""
    from ds_moe_ext.hosts.steps.training_run import leave_report, run_of

    shown, owner = StringIO(), Owner()
    with redirect_stdout(shown):
        engine = engine_of(world_size, strategy="fssdp", **keys)
        for step in range(3):
            engine.backward(loss_of(engine, micro_batch(step, rank)))
            engine.step()
        run = run_of(engine)
        assert run is not None
        forecasts = run.planning.forecasts
        leave_report(run.recorder, None, owner, lambda: (str(forecasts), ""))
        assert "loads were predicted" not in shown.getvalue()
        del owner
    return shown.getvalue()


def test_how_loads_were_predicted_is_reported_at_the_end() -> None:
    results = pool_of(2).run(ended)[0]
    assert re.search(
        r"ds_moe_ext: loads were predicted by .*\d % of the tokens went to other", results
    )


def test_a_run_says_what_is_expected_and_ends_on_whether_it_gained() -> None:
    """The share is named at start; three steps are too few to have timed any."""
    results = pool_of(2).run(ended, report={"enabled": True})[0].splitlines()
    (expected,) = (line for line in results if line.startswith("ds_moe_ext: fssdp: "))
    assert "by share 'priced'; expect a gain when the busiest rank has well over" in expected
    assert re.match(
        r"ds_moe_ext: (gain unknown, because|no gain from replicas, because none was)", results[-1]
    )
    assert "in 3 recorded steps: the busiest EP rank had" in results[-1]


# SIGTERM.


def document(folder: Path, **report: Any) -> Path:
    path = folder / "ds.json"
    content = document_of(Job("toy", micro_batches=1), 1)
    content["ds_moe_ext"]["report"] = {"path": str(folder / "out"), **report}
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("how", "world_size"), [slow("running", 1), slow("stuck", 2), ("waiting", 1)]
)
def test_a_report_is_there_after_sigterm(tmp_path: Path, how: str, world_size: int) -> None:
    """Also where rank 0 waits for another, and no instruction of Python comes."""
    script = ROOT / "tests/hosts/endless_run.py"
    arguments = str(document(tmp_path)), how
    with started(script, *arguments, world_size=world_size, path=(ROOT,)) as ranks:
        first = ranks[0]
        assert first.stdout is not None
        for line in first.stdout:
            if "answer: 5" in line:
                break
        time.sleep(how != "running")  # to come to the collective
        begun_s = time.monotonic()
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=10) == -signal.SIGTERM
        assert time.monotonic() - begun_s < 5
        printed = first.stdout.read()
    record = RunRecord.from_json((tmp_path / "out/report.json").read_text())
    last = max([5, *map(int, answers(printed))])  # that ended before the signal
    assert record.steps_I[:last] == tuple(range(last))
    assert "</html>" in (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert f"ds_moe_ext: wrote {tmp_path}/out/report.html and" in printed


def steps_on_disk(path: Path) -> tuple[int, ...]:
    return RunRecord.from_json(path.read_text()).steps_I if path.exists() else ()


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_what_was_written_last(tmp_path: Path) -> None:
    script, out = ROOT / "tests/hosts/endless_run.py", tmp_path / "out"
    arguments = str(document(tmp_path, write_every_s=0))
    with started(script, arguments, path=(ROOT,)) as (only,):
        assert only.stdout is not None
        for line in only.stdout:
            if "answer: 20" in line:
                break
        before = steps_on_disk(out / "report.json")
        only.kill()
        assert only.wait(timeout=10) == -signal.SIGKILL
    left = steps_on_disk(out / "report.json")
    assert left[0] == 0 and left[: len(before)] == before
    assert "</html>" in (out / "report.html").read_text(encoding="utf-8")


LAUNCHERS = {
    "torchrun": ("--standalone", "--nproc_per_node", "2"),
    "deepspeed": ("--no_local_rank", "--num_accelerators", "2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_that_are_ended_leave_a_report(tmp_path: Path, launcher: str) -> None:
    """All processes of a job get the signal, as of a scheduler; ranks from their launcher, too."""
    script = ROOT / "tests/hosts/endless_run.py"
    words = list(LAUNCHERS[launcher])
    with key_value_store() as address:
        if launcher == "deepspeed":
            words += ["--master_port", address["MASTER_PORT"]]
        process = subprocess.Popen(
            [launcher, *words, str(script), str(document(tmp_path))],
            cwd=ROOT,
            env={**os.environ, **address, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if "answer: 9" in line:
                    break
            os.killpg(process.pid, signal.SIGTERM)
            printed, _ = process.communicate(timeout=60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    record = RunRecord.from_json((tmp_path / "out/report.json").read_text())
    assert record.world_size == 2 and len(record.steps_I) >= 8, printed


OWN = """
import os, signal, sys, threading, time
from ds_moe_ext.hosts.attachment.notices import ENDINGS

def left(name):
    return lambda: print("wrote", name, flush=True)

def ended(case):
    print(case.__name__, flush=True)
    child = os.fork()
    if not child:
        case()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

def reported():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)

def theirs_before():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
    ENDINGS.add(left("a report"))
    reported()

def theirs_after():
    ENDINGS.add(left("a report"))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(4))
    reported()

def theirs_chained():
    ENDINGS.add(left("a report"))
    def end(*arguments):
        ours(*arguments)
        os._exit(5)
    ours = signal.signal(signal.SIGTERM, end)
    reported()

def ignored():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ENDINGS.add(left("a report"))
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(6)

def from_a_thread():
    thread = threading.Thread(target=ENDINGS.add, args=(left("a report"),))
    thread.start()
    thread.join()
    reported()

def forked():
    ENDINGS.add(left("a report"))
    ended(reported)
    os._exit(7)

def two_runs():
    gone = left("a run that has ended")
    for write in (left("one"), gone, left("another")):
        ENDINGS.add(write)
    ENDINGS.remove(gone)
    reported()

def all_ended():
    gone = left("a run that has ended")
    ENDINGS.add(gone)
    ENDINGS.remove(gone)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    reported()

def fails():
    ENDINGS.add(lambda: 1 / 0)
    reported()

for case in (theirs_before, theirs_after, theirs_chained, ignored, from_a_thread, forked, two_runs,
             all_ended, fails):
    ended(case)
"""

ENDED = {
    "theirs_before": ["3"],
    "theirs_after": ["4"],
    "theirs_chained": ["wrote a report", "5"],
    "ignored": ["6"],
    "from_a_thread": ["-15"],
    "forked": ["reported", "-15", "7"],
    "two_runs": ["wrote one", "wrote another", "-15"],
    "all_ended": ["-15"],
    "fails": ["-15"],
}


@pytest.mark.slow
def test_handlers_of_the_users_and_other_processes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWN],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    wanted = [line for case, lines in ENDED.items() for line in (case, *lines)]
    assert done.stdout.splitlines() == wanted, done.stderr
    assert "ds_moe_ext: nothing was written after SIGTERM: ZeroDivisionError" in done.stderr


# Keys that nobody reads.


def warned(rank: int, world_size: int, document: dict[str, Any]) -> list[str]:
    """What ``deepspeed.initialize`` says of keys."""
    import deepspeed

    model = model_of(Job("toy"))
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(StringIO()):
        warnings.simplefilter("always")
        deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config={"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}, **document},
        )
    return [str(each.message) for each in caught if "unknown key" in str(each.message)]


def test_a_block_by_nearly_our_name() -> None:
    block = {"enabled": True, "strategy": "ep", "report": {"enabled": False}}
    first, second = pool_of(2).run(warned, {"ds-moe-exts": block})
    assert first == [
        "unknown key 'ds-moe-exts' in the configuration; did you mean 'ds_moe_ext'? (to "
        "switch it off, set ds_moe_ext.enabled to false)"
    ]
    assert second == []
    assert pool_of(2).run(warned, {"ds_moe_ext": block}) == [[], []]
