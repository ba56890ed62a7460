"""Ranks for tests: a pool of gloo processes that stays for the session.

Started by a forkserver that has torch loaded: a fork inherits it, and the server itself never runs
a torch operation, so that its children may.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 120.0
_PRELOADED = ["torch", "torch._dynamo", "numpy"]


def preload(*modules: str) -> None:
    """Let the forkserver load these, which each rank would take seconds for; to be called where a
    test module is imported, as it is too late when a pool is there."""
    _PRELOADED.extend(module for module in modules if module not in _PRELOADED)


@contextmanager
def meeting_place() -> Iterator[dict[str, str]]:
    """Environment by which the ranks of a script meet: at a store of this process, which listens
    already, on a port that the system chose. A port that is looked up first and opened by a rank
    later may be taken in between."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as torchrun says that rank 0 is to open none
    }
    del store


def _serve(rank: int, world_size: int, meeting: Mapping[str, str], jobs: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        **meeting,
        GLOO_SOCKET_IFNAME="lo",
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
    )
    dist.init_process_group(
        "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT_S)
    )
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            os._exit(0)
        if job is None:
            _close_groups()
            continue
        try:
            jobs.send((True, job()))
        except BaseException:
            jobs.send((False, traceback.format_exc()))


_KEPT = {
    "deepspeed.runtime.engine": "DeepSpeedEngine",
    "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel",
}
"""Of hosts, whose instances stay for ever: parameters hold their hooks where gc cannot look."""
_HOLD_GROUPS = {
    "ds_moe_ext.layout": "ParallelLayout",
    "ds_moe_ext.moe.layer": "RoutedExperts",
}
"""Ours, that hold communicators: a graph that was never walked back may keep them."""


def _close_groups() -> None:
    """Close the process groups that a job has left, now that all ranks have ended it: each has
    three threads that wake a hundred times a second. DeepSpeed goes on using its own. What
    instances that stay hold is taken from them. What is left then is frozen: to go through all
    objects of a host after every job would take a second."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    kept, holding = _classes(_KEPT), _classes(_HOLD_GROUPS)
    has_host = bool(kept)
    for thing in gc.get_objects() if has_host else ():
        if type(thing) in kept or type(thing) in holding:
            thing.__dict__.clear()
    if has_host:
        gc.collect()
    groups = sys.modules.get("deepspeed.utils.groups")
    held = list(vars(groups).values()) if groups else []
    held += [group for value in held if isinstance(value, dict) for group in value.values()]
    used = {id(group) for group in (*held, dist.group.WORLD)}
    for group in list(_world.pg_map):
        if id(group) not in used:
            dist.destroy_process_group(group)
    if has_host:
        gc.collect()
        gc.freeze()


def _classes(names: Mapping[str, str]) -> set[type]:
    """Those whose modules are loaded."""
    return {
        vars(sys.modules[module])[name] for module, name in names.items() if module in sys.modules
    }


class Pool:
    """``world_size`` ranks that run one function at a time, all together."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._resources = ExitStack()
        meeting = self._resources.enter_context(meeting_place())
        self._ends, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, meeting, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a module-level function as ``function(rank, world_size, ...)`` on every rank.

        Returns:
            What each rank returned.

        Raises:
            AssertionError: a rank raised, died or did not answer; the pool is then closed.
        """
        for rank, end in enumerate(self._ends):
            end.send(functools.partial(function, rank, self.world_size, *args, **kwargs))
        answers = [self._answer(rank, end) for rank, end in enumerate(self._ends)]
        failures = [f"rank {r}: {value}" for r, (good, value) in enumerate(answers) if not good]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        for end in self._ends:
            end.send(None)  # all have ended the job, and close what it left
        return [value for _, value in answers]

    def _answer(self, rank: int, end: Connection) -> tuple[bool, Any]:
        try:
            if end.poll(TIMEOUT_S):
                return end.recv()
        except (EOFError, ConnectionResetError):
            return False, "died"
        return False, f"did not answer within {TIMEOUT_S:.0f} s"

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._resources.close()


_POOLS: dict[int, Pool] = {}


def pool_of(world_size: int) -> Pool:
    """The session's pool of this size; a new one if a test killed the last."""
    pool = _POOLS.get(world_size)
    if pool is None or not pool.is_alive:
        if pool is not None:
            pool.close()
        _POOLS[world_size] = Pool(world_size)
    return _POOLS[world_size]


def close_pools() -> None:
    for pool in _POOLS.values():
        pool.close()
    _POOLS.clear()
