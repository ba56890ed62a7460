# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that Megatron wrote under us is whole, or refused by the name of what is wrong,
before Megatron reads it; whatever is planted in it, nothing is run."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist

from ds_moe_ext.hosts.megatron.checkpoint_sums import SUMS_FILE, check_part, save_sealed
from tests.hosts.megatron_jobs import Training, megatron
from tests.hosts.megatron_toy import MegatronRun
from tests.hosts.test_megatron_checkpoint import (
    FULLY,
    block,
    give_gloo,
    load,
    save,
    sharded,
    steps,
)
from tests.payloads import Payload, archive_of
from tests.ranks import pool_of

RUN = MegatronRun(ep=2, optimizer="distributed")


class Reported(NamedTuple):
    """Of one rank."""

    files: list[str]
    damaged: dict[tuple[str, str], str]


def damages(whole: bytes, marker: Path) -> dict[str, bytes | None]:
    """A bit, the last byte, the file, and two payloads in its place."""
    middle = len(whole) // 2
    return {
        "a bit": whole[:middle] + bytes([whole[middle] ^ 8]) + whole[middle + 1 :],
        "the end": whole[:-1],
        "all": None,
        "a payload": pickle.dumps(Payload(marker)),
        "an archive": archive_of(Payload(marker)),
    }


def refusals(rank: int, world_size: int, folder: str, marker: str) -> Reported:
    """What loading says of each file, damaged in each way."""
    reported: dict[tuple[str, str], str] = {}
    with megatron(RUN, block("ep")):
        training = Training(RUN)
        steps(training, 0, 1)
        save(training, folder, FULLY)
        dist.barrier()
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        for path in paths:
            whole = path.read_bytes()
            for name, contents in damages(whole, Path(marker)).items():
                if path.name == SUMS_FILE and contents is None:
                    continue  # it is then as stock Megatron writes it
                dist.barrier()
                if rank == 0:
                    path.unlink() if contents is None else path.write_bytes(contents)
                dist.barrier()
                with pytest.raises(ValueError, match=path.name.replace(".", r"\.")) as caught:
                    load(training, folder, FULLY)
                reported[path.name, name] = str(caught.value)
            dist.barrier()
            if rank == 0:
                path.write_bytes(whole)
            dist.barrier()
        load(training, folder, FULLY)
        if rank == 0:
            (Path(folder) / SUMS_FILE).unlink()
        dist.barrier()
        load(training, folder, FULLY)  # as Megatron loads it
    return Reported([path.name for path in paths], reported)


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    folder, marker = tmp_path / "saved", tmp_path / "marker"
    folder.mkdir()
    first, second = pool_of(2).run(refusals, str(folder), str(marker))
    assert first == second
    assert {SUMS_FILE, ".metadata", "common.pt", "metadata.json"} < set(first.files)
    assert {".distcp"} < {Path(name).suffix for name in first.files}
    assert len(first.damaged) == 5 * len(first.files) - 1
    assert not any("\n" in text for text in first.damaged.values())
    assert not marker.exists()


def sealed(rank: int, world_size: int, folder: str) -> None:
    """Two saves into one folder, as where a run was started again."""
    with megatron(RUN, block("fssdp")):
        training = Training(RUN)
        for _ in range(2):
            steps(training, 0, 1)
            save(training, folder, FULLY)


@pytest.mark.slow
def test_a_folder_that_is_written_again_has_new_sums(tmp_path: Path) -> None:
    pool_of(2).run(sealed, str(tmp_path))
    document = json.loads((tmp_path / SUMS_FILE).read_text())
    files = {str(p.relative_to(tmp_path)): p.stat().st_size for p in tmp_path.rglob("*")}
    del files[SUMS_FILE]
    assert {name: size for name, (size, _) in document["files"].items()} == files


def reported_of_routing(rank: int, world_size: int, folder: str) -> list[list[str]]:
    """What runs with other routing, and one with the same, are reported when they load; at last of
    a checkpoint that does not say."""
    other = replace(RUN, topk=3), replace(RUN, config=(("moe_router_pre_softmax", True),))
    with megatron(RUN, block("ep")):
        training = Training(RUN)
        steps(training, 0, 1)
        save(training, folder, FULLY)
    lines = [_reported(run, folder) for run in (*other, RUN)]
    if rank == 0:
        path = Path(folder) / SUMS_FILE
        document = json.loads(path.read_text())
        assert document.pop("routing")
        path.write_text(json.dumps({**document, "crc32": None}))
    dist.barrier()
    return [*lines, _reported(other[0], folder)]


def _reported(run: MegatronRun, folder: str) -> list[str]:
    with megatron(run, block("fssdp")), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        load(Training(run), folder, FULLY)
    return [text for each in seen if "routes tokens" in (text := str(each.message))]


@pytest.mark.slow  # under DeepSpeed in test_saved_routing.py
def test_a_model_that_routes_otherwise_is_reported(tmp_path: Path) -> None:
    first, second = pool_of(2).run(reported_of_routing, str(tmp_path))
    assert not any(second)
    (top_k,), (scoring,), same, silent = first
    assert top_k.startswith(f"{tmp_path} was saved by a model that routes tokens differently: ")
    assert "differently: moe_router_topk was 2 and is 3 in " in top_k
    assert "differently: moe_router_pre_softmax was False and is True in " in scoring
    assert same == silent == []


def saved_beside(rank: int, world_size: int, folder: str) -> bool:
    """A save that goes on in processes of its own while training does; whether its sums were there
    before it had ended."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async

    config = vars(multiprocessing.current_process())["_config"]
    with megatron(RUN, block("fssdp")):
        training = Training(RUN)
        steps(training, 0, 1)
        give_gloo(training)
        calls = async_utils.AsyncCallsQueue()
        with (
            mock.patch.dict(config, daemon=False),
            mock.patch.object(filesystem_async, "_results_queue", None),
        ):
            state = sharded(training, FULLY, is_loading=False)
            request = dist_checkpointing.save(state, folder, async_sharded_save=True)
            calls.schedule_async_request(request)
            was_there = (Path(folder) / SUMS_FILE).exists()
            dist.barrier()
            steps(training, 1, 2)
            calls.maybe_finalize_async_calls(blocking=True)
            calls.close()
        dist.barrier()
        load(training, folder, FULLY)
    return was_there


@pytest.mark.slow
def test_a_save_beside_training_is_sealed_when_it_ends(tmp_path: Path) -> None:
    assert pool_of(2).run(saved_beside, str(tmp_path)) == [False, False]
    check_part(tmp_path)
    sums = json.loads((tmp_path / SUMS_FILE).read_text())["files"]
    path = next(tmp_path / name for name in sums if name.endswith(".distcp"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=path.name):
        check_part(tmp_path)


class Stopped(Exception):
    """Stands for a kill."""


def stopped(state: object, folder: str) -> None:
    """A save that ends after its first file."""
    if dist.get_rank() == 0:
        assert not (Path(folder) / "metadata.json").exists()
        (Path(folder) / "common.pt").write_bytes(b"of the second save")
    raise Stopped


def loads_after_a_stop(rank: int, world_size: int, folder: str) -> str:
    """What loading says of a folder whose second save was interrupted."""
    with megatron(RUN, block("ep")):
        training = Training(RUN)
        steps(training, 0, 1)
        save(training, folder, FULLY)
        dist.barrier()
        with pytest.raises(Stopped):
            save_sealed(True, None, stopped, {}, folder)
        dist.barrier()
        with pytest.raises(ValueError) as caught:
            load(training, folder, FULLY)
        return str(caught.value)


def test_a_second_save_that_did_not_end_is_refused(tmp_path: Path) -> None:
    first, second = pool_of(2).run(loads_after_a_stop, str(tmp_path))
    assert first == second
    assert "has no metadata.json" in first
    assert "was interrupted" in first
    with pytest.raises(ValueError, match="was interrupted"):
        check_part(tmp_path)
