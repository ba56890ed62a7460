# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in Megatron's distributed form is whole, or it is refused: lengths and checksums of
all its files lie beside them, in a file that is written last. It says how layers routed, too.

Megatron looks at no file that it does not know; a checkpoint without that file, as stock Megatron
writes it, is loaded as Megatron loads it. Megatron's own ``metadata.json``, which it writes when
all else is there, is removed before a folder is written again: what a kill leaves is not loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.files import whole_files
from ds_moe_ext.files.whole_files import FileSum
from ds_moe_ext.hosts.attachment.host_layer import Facts

SUMS_FILE = "ds_moe_ext_files.json"
LAST_FILE = "metadata.json"  # of Megatron's (``dist_checkpointing/core.py``)
FORMAT = 1


def save_sealed(
    checksums: bool,
    routing: Facts | None,
    save: Callable[..., Any],
    state: Any,
    folder: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``dist_checkpointing.save``, and write the sums when all files are there. Collective.

    Args:
        checksums: else lengths alone.
        routing: of the layers of this rank, which are alike; None where it has none.
        save: Megatron's, called with all that follows.

    Returns:
        What it returns: where it goes on in the background a request, whose end writes them.
    """
    path = Path(folder)
    if dist.get_rank() == 0:
        for name in (LAST_FILE, SUMS_FILE):  # of one that is being overwritten
            whole_files.remove(path / name)
    gather_objects(None, None)  # nobody writes before
    request = save(state, folder, *args, **kwargs)
    if request is None:
        _seal(path, checksums, routing)
    else:
        request.finalize_fns.append(lambda: _seal(path, checksums, routing))
    return request


def check(folder: Any) -> None:
    """Raises ValueError, on all ranks, where a file of a checkpoint is missing, damaged or of
    another save; each rank reads a part. Collective."""
    text = ""
    try:
        check_part(Path(folder), place=dist.get_rank(), num_places=dist.get_world_size())
    except ValueError as error:
        text = str(error)
    gathered = next(filter(None, gather_objects(text, None)), None)
    if gathered is not None:
        raise ValueError(gathered)


def check_part(folder: Path, *, place: int = 0, num_places: int = 1) -> None:
    """Likewise of the part of one reader of so many; no collective."""
    if folder.is_dir() and not (folder / LAST_FILE).exists():
        raise ValueError(
            f"{folder} has no {LAST_FILE}, which Megatron writes last: the save was "
            "interrupted, or the file is missing; copy the whole folder again, or choose "
            "another checkpoint"
        )
    sums, _ = _read(folder / SUMS_FILE)
    names = sorted(sums)[place::num_places]
    whole_files.check(folder, {name: sums[name] for name in names}, SUMS_FILE)


def routing_of(folder: Any) -> Facts | None:
    """How the layers of a checkpoint routed; None where it does not say. Raises ValueError where
    the file that says it is damaged."""
    _, routing = _read(Path(folder) / SUMS_FILE)
    return routing


def _seal(folder: Path, checksums: bool, routing: Facts | None) -> None:
    """Collective."""
    if not gather_objects(folder.is_dir(), None)[0]:  # in an object store
        return
    rank = dist.get_rank()
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    own = [name for name in names if _writer(name) == rank]
    sums = whole_files.sums_of(folder, own, checksums=checksums)
    gathered = gather_objects((sums, routing), None)
    if rank == 0:
        files = {name: each for theirs, _ in gathered for name, each in theirs.items()}
        routing = next((facts for _, facts in gathered if facts is not None), None)
        document = {"format": FORMAT, "files": files, "routing": routing}
        whole_files.write_summed(folder / SUMS_FILE, document)


def _writer(name: str) -> int:
    """The rank that has written a file, or sums it up: it need not come over the network again."""
    named = re.match(r"__(\d+)_", name)
    rank = int(named[1]) if named else 0
    return rank if rank < dist.get_world_size() else 0


def _read(path: Path) -> tuple[Mapping[str, FileSum], Facts | None]:
    """Sums by name, and ``routing_of``; nothing where the file is not there. Raises ValueError
    where it is damaged."""
    if not path.exists():
        return {}, None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        whole_files.check_summed(document)
        files = {
            name: whole_files.read_sum(reported) for name, reported in document["files"].items()
        }
        routing = document.get("routing")  # not in those of earlier versions
        return files, None if routing is None else dict(routing)
    except Exception as error:  # what is damaged may be anything
        raise ValueError(
            f"{path} cannot be read ({error}): it is damaged; copy the whole folder again, or "
            "choose another checkpoint (if you have changed the checkpoint yourself, remove it)"
        ) from error
