# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are written while training goes on, where DeepSpeed's own writer is decoupled.

DeepSpeed ends such a save before the next optimizer step, on all ranks, and moves ``latest`` then
(``engine._commit_decoupled_checkpoint``). Until there no weight and no state changes, so that none
is copied: a thread writes them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from ds_moe_ext.core.layout import group_among
from ds_moe_ext.hosts.deepspeed import dcp_folder
from ds_moe_ext.hosts.deepspeed.dcp_folder import Part

_PENDING: WeakSet[Any] = WeakSet()  # engines whose save goes on
_GROUPS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""By engine, of all ranks: a thread's exchanges would come between others'. Of gloo, for what is
written is on the host."""


def begun(
    engine: Any, folder: Path, parts: Mapping[str, Part], objects: Mapping[str, Any]
) -> Callable[[], list[str]]:
    """Begin to write what ``dcp_folder.save`` takes. Collective.

    Returns:
        Waits until it is written, where it goes on meanwhile; then what ``dcp_folder.save``
        returns, or raises.
    """
    if not engine.checkpoint_engine.is_decoupled():
        names = dcp_folder.save(folder, parts, objects)
        return lambda: names
    end(engine)
    if engine not in _GROUPS:
        _GROUPS[engine] = group_among([[*range(dist.get_world_size())]], "gloo")
    pool = ThreadPoolExecutor(1, "ds_moe_ext_save")
    writing = pool.submit(dcp_folder.save, folder, parts, objects, _GROUPS[engine])
    pool.shutdown(wait=False)
    return writing.result


def when_written(engine: Any, seal: Callable[[], None]) -> None:
    """Call this when DeepSpeed's files are written: now, or before the next optimizer step.
    Collective there."""
    writer = engine.checkpoint_engine
    if not writer.is_decoupled():
        seal()
        return
    commit = writer.commit

    def commit_both(info: Any) -> Any:
        del writer.commit
        _PENDING.discard(engine)
        done = commit(info)
        seal()
        return done

    writer.commit = commit_both
    _PENDING.add(engine)


def end(engine: Any) -> None:
    """Wait for a save that goes on, and move ``latest``. Collective."""
    if engine in _PENDING:
        engine._commit_decoupled_checkpoint()
