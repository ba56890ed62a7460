# SPDX-License-Identifier: Apache-2.0
"""Ranks for tests: a pool of processes that stays for the session, on CPUs over gloo.

``RANKS_ON=cuda`` puts them on the GPUs that there are, over NCCL, several on one where they are
more (``launch/shared_gpus.py``). ``RANKS_ON=way`` leaves them on CPUs, and has them go the
way of a GPU there (``tests/gpu/way.py``).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ds_moe_ext.testing import Ranks

_ON = os.environ.get("RANKS_ON", "cpu")
ON_CUDA = _ON == "cuda"

_PRELOADED = ["torch", "torch._dynamo", "numpy", "ds_moe_ext.testing", "pytest", "hypothesis"]
_BY_ENGINES = "deepspeed.runtime.zero.muon.muon_optimizer"
"""Loaded by the first engine of a process, and with it all of torch's inductor: two seconds."""
os.environ.setdefault("TORCH_WARM_POOL", "0")  # which that would start, with threads, before forks


def preload(*modules: str) -> None:
    """Let the forkserver load these, which each rank would take seconds for; to be called where a
    test module is imported, as it is too late when a pool is there."""
    late = [_BY_ENGINES] if any(module.startswith("deepspeed") for module in modules) else []
    _PRELOADED.extend(module for module in (*modules, *late) if module not in _PRELOADED)


def forkserver() -> Any:
    """The context of the pools, for a process of a test's own: it has loaded all that they have."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


@contextmanager
def key_value_store() -> Iterator[dict[str, str]]:
    """Environment by which the ranks of a script meet: at a store of this process, which listens
    already, on a port that the system chose. A port that is looked up first and opened by a rank
    later may be taken in between."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield _meeting(store.port)
    del store


def _meeting(port: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as torchrun says that rank 0 is to open none
    }


_HELD = ExitStack()  # as long as a rank is there


def _environment(rank: int, world_size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        **_meeting(port),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    if ON_CUDA:
        from shared_gpus import share_gpus

        os.dup2(2, 1)  # where a kernel that fails says why, which workers of pytest throw away
        share_gpus(rank, world_size)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if _ON == "way":
        from tests.gpu.stream_order import QueuedStreams, Queues
        from tests.gpu.way import on_this_way

        _HELD.enter_context(on_this_way(QueuedStreams(Queues())))
    gc.freeze()  # what the forkserver has loaded: each look for garbage there takes 0.3 s


_KEPT = {
    "deepspeed.runtime.engine": "DeepSpeedEngine",
    "deepspeed.runtime.pipe.engine": "PipelineEngine",
    "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel",
}
"""Of hosts, whose instances stay for ever: parameters hold their hooks where gc cannot look."""
_HOLD_GROUPS = {
    "ds_moe_ext.core.layout": "ParallelLayout",
    "ds_moe_ext.moe.layer": "RoutedExperts",
}
"""Ours, that hold communicators: a graph that was never walked back may keep them."""


def _close_groups() -> None:
    """Close the process groups that a job has left, now that all ranks have ended it: each has a
    thread that wakes a hundred times a second, which ends when nobody holds the group any more.
    DeepSpeed goes on using its own. What instances that stay hold is taken from them. What is left
    then is frozen: to go through all objects of a host after every job would take a second."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    _restore_linear()
    has_host = bool(_classes(_KEPT))
    for classes in (_KEPT, _HOLD_GROUPS):
        if _classes(classes):
            _empty(classes)
            gc.collect()  # a run whose engine goes reads its layers once more, for its report
    groups = sys.modules.get("deepspeed.utils.groups")
    held = list(vars(groups).values()) if groups else []
    held += [group for value in held if isinstance(value, dict) for group in value.values()]
    used = {id(group) for group in (*held, dist.group.WORLD)}
    closed = [group for group in _world.pg_map if id(group) not in used]
    for group in closed:
        dist.destroy_process_group(group)
    _take_from_holders(closed)
    if has_host:
        gc.collect()
        gc.freeze()


def _take_from_holders(groups: Sequence[Any]) -> None:
    """The groups, from the attributes and dicts that still have them: of stages and of a graph that
    was never walked back, and of whatever else a host does not let go."""
    if not groups:
        return
    addresses = {id(group) for group in groups}
    for holder in gc.get_referrers(*groups):
        named = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        for name in [name for name, value in named.items() if id(value) in addresses]:
            named[name] = None


def _empty(names: Mapping[str, str]) -> None:
    """All instances of these classes; and take from parameters the group that ZeRO gives them."""
    from torch.nn import Parameter

    classes = _classes(names)
    for thing in gc.get_objects():
        if type(thing) in classes:
            thing.__dict__.clear()
        elif type(thing) is Parameter:
            thing.__dict__.pop("_dp_group", None)


def _restore_linear() -> None:
    """ZeRO 3 puts one of its own in the place of torch's, for all that follows."""
    import torch

    zero = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    base = None if zero is None else vars(zero.InsertPostInitMethodToModuleSubClasses)
    if base is not None and "linear_bk" in base:
        torch.nn.functional.linear = base["linear_bk"]


def _classes(names: Mapping[str, str]) -> set[type]:
    """Those whose modules are loaded."""
    return {
        vars(sys.modules[module])[name] for module, name in names.items() if module in sys.modules
    }


class Pool(Ranks):
    """``world_size`` ranks that run one function at a time, all together."""

    def __init__(self, world_size: int) -> None:
        super().__init__(
            world_size,
            begin=_environment,
            between=_close_groups,
            preload=_PRELOADED,
            backend="nccl" if ON_CUDA else "gloo",
        )


_POOLS: dict[int, Pool] = {}


def pool_of(world_size: int) -> Pool:
    """The session's pool of this size; a new one if a test killed the last."""
    pool = _POOLS.get(world_size)
    if pool is None or not pool.is_alive:
        if pool is not None:
            pool.close()
        _POOLS[world_size] = Pool(world_size)
    return _POOLS[world_size]


def refusal(rank: int, world_size: int, job: Callable[..., Any], *args: Any) -> str:
    """What a rank says that refuses a job, as all do: one that raised would take its pool along."""
    try:
        job(rank, world_size, *args)
    except Exception as error:
        return str(error)
    return ""


def close_pools() -> None:
    for pool in _POOLS.values():
        pool.close()
    _POOLS.clear()
