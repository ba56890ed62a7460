# SPDX-License-Identifier: Apache-2.0
"""Configurations under DeepSpeed that learn what stock learns: plain expert parallelism on as many
ranks, or one rank without us.

A table of strategies, layouts, precisions, families and checkpointing runs in a few settings in
CI, and whole by hand. Rows behind it have what is not in every column: keys of one strategy, gates,
optimizers, shapes of roles. ``docs/testing.md`` shows how to add one. What a strategy does on the
way (when replicas travel, what is refused, what is saved) has tests of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from ds_moe_ext.core.hardware import Device, Hardware, Link
from ds_moe_ext.core.share import LevelShare, NearestReplica
from tests.hosts import families, toy
from tests.hosts.copied_runs import (
    SLOW,
    Step,
    alone,
    divides_anew,
    fssdp,
    num_copied,
    num_moved,
    plain,
    run,
    varied,
    with_rows,
    worst,
)
from tests.hosts.jobs import Job
from tests.hosts.test_gates_json import GATES, NOISY
from tests.hosts.varied import VARIED
from tests.hosts.zebra_runs import zebra
from tests.marks import by_pairs, cases, combinations, needs_compiler

Shows = Callable[[Sequence[Step]], None]


class Stock(Enum):
    """What a row's run is held against, at ZeRO 0 or 1 and without what changes nothing."""

    EP = "plain expert parallelism on as many ranks"
    ALONE = "one rank without us"
    SHARDED = "ZeRO 3 on as many ranks without us"


@dataclass(frozen=True)
class Close:
    """Largest relative errors; of what has none, nothing is held."""

    losses: float
    norms: float | None = None
    weights: float | None = None


EXACT = Close(1e-12, 1e-12, 1e-12)
BUT_KEYS = Close(1e-11, 1e-11, 1e-11)
"""Adam makes steps of the zero gradient that biases of keys have, as in gpt_moe."""
GRADIENTS = Close(2e-6, None, 2e-6)
CURVES = Close(1e-5, 1e-4)
"""In float32 a flipped choice may move a curve, but not far in some steps."""
HALVES = Close(5e-3, 5e-2)


@dataclass(frozen=True)
class Row:
    """One configuration."""

    name: str
    ranks: int
    job: Job
    close: Close = EXACT
    stock: Stock = Stock.EP
    shows: tuple[Shows, ...] = ()
    hardware: Hardware | None = None


def float64(family: str = "toy", steps: int = 4, **fields: Any) -> Job:
    """At ZeRO 0, whose masters are what the model is; under Adam."""
    return Job(family, 0, dtype="float64", steps=steps, **{"clip": 0.5, **fields})


def one_gradient(family: str, stage: int, **fields: Any) -> Job:
    """One step of SGD at a huge rate is the gradient, whatever ZeRO does with it."""
    rate = {"steps": 1, "optimizer": "object", "sgd": True, "learning_rate": 1e4}
    return Job(family, stage, **{**rate, **fields})


def sized(ranks: int, accumulates: int = 1) -> dict[str, Any]:
    """Fields of a job of so many ranks. Of eight, one alone is the stock: DeepSpeed clips by a norm
    in float32, which is another there."""
    if ranks == 8:
        return {"micro_batches": 8, "clip": 0.0}
    return {"micro_batches": max(4, accumulates * ranks)}


def close_of(family: str) -> Close:
    return BUT_KEYS if family == "gpt_moe" else EXACT


# What steps show.


def replicas(steps: Sequence[Step]) -> None:
    assert any(num_copied(steps))


def moves(steps: Sequence[Step]) -> None:
    assert num_moved(steps)


def moves_nothing(steps: Sequence[Step]) -> None:
    assert not num_moved(steps)


def draws_all_kinds(steps: Sequence[Step]) -> None:
    plans = [plan for step in steps for plan in step.plans]
    assert len(set(num_copied(steps))) > 5
    assert num_moved(steps) > 10
    assert {plan.rematerialize for plan in plans} == {True, False}
    assert {plan.revise is None for plan in plans} == {True, False}
    assert {plan.has_replicas for plan in plans} == {True, False}


def lies_on(num_nodes: int) -> Shows:
    def check(steps: Sequence[Step]) -> None:
        assert len(set(steps[0].plans[0].share.node_C.tolist())) == num_nodes

    return check


def plans_once_costs_are_known(steps: Sequence[Step]) -> None:
    assert not any(num_copied(steps[:5]))
    assert sum(map(bool, num_copied(steps[5:]))) > 2


def carries(steps: Sequence[Step]) -> None:
    assert any(plan.carried is not None for plan in _with_replicas(steps))


def carries_nothing(steps: Sequence[Step]) -> None:
    assert all(plan.carried is None for plan in _with_replicas(steps))


def exchanges_nothing(steps: Sequence[Step]) -> None:
    """In most steps: every rank has all experts."""
    plans = [plan for step in steps for plan in step.plans]
    num_apart = sum(plan.destination.all_stay for plan in plans)
    assert num_apart > len(plans) // 2 and not num_moved(steps)


def divides(steps: Sequence[Step]) -> None:
    assert divides_anew(steps)


def adds_replicas(steps: Sequence[Step]) -> None:
    """Once the rows are known."""
    assert any(
        plan.revise(rows_CE).target.holds_EC.sum() > plan.target.holds_EC.sum()
        for plan, rows_CE in with_rows(steps)
        if plan.revise is not None
    )


def shares_by_parts(steps: Sequence[Step]) -> None:
    """But where the nearest replica takes hardly longer."""
    shares = [plan.share for plan in _with_replicas(steps)]
    divided = [share for share in shares if not isinstance(share, NearestReplica)]
    assert divided
    assert all(isinstance(share, LevelShare) and not share.sweeps for share in divided)


def _with_replicas(steps: Sequence[Step]) -> list[Any]:
    return [plan for step in steps for plan in step.plans if plan.has_replicas]


# Strategy ep: nothing but other places of experts.


def ep_rows() -> Iterator[Row]:
    for family in ("mixtral", "gpt_moe"):
        for stage in (0, 1, 2):
            for ranks in (2, 4):
                name = f"ep gradients {family} zero{stage} {ranks} ranks"
                job = one_gradient(family, stage)
                yield Row(name, ranks, job, Close(1e-6, None, 1e-6), Stock.ALONE)
            if (family, stage) == ("mixtral", 0):  # of gpt_moe, stock itself leaves experts out
                job = Job(family, stage, dtype="bfloat16", steps=2, clip=0.05)
                yield Row("ep clipped bfloat16", 2, job, Close(2e-2, 5e-3), Stock.ALONE)
            if stage < 2:  # DeepSpeed itself refuses no_sync at ZeRO 2
                job = Job(family, stage, steps=3, clip=0.5, no_sync=True, evaluate=True)
                yield Row(f"ep no_sync {family} zero{stage}", 2, job, Close(1e-6))
    for stage in (0, 1, 2):  # expert gradients are reduced over ranks that hold the same experts
        job = one_gradient("mixtral", stage, ep_ranks=2)
        yield Row(f"ep two grids zero{stage}", 4, job, Close(1e-6, None, 1e-6), Stock.ALONE)
    for ep_ranks in (2, None):
        job = one_gradient("gpt_moe", 1, ep_size=2, ep_ranks=ep_ranks)
        name = f"ep native ep_size 2, {ep_ranks or 'all'} EP ranks"
        yield Row(name, 2, job, Close(1e-6, None, 1e-6), Stock.ALONE)
    for top_k in (1, 2, 3):  # what a gate of DeepSpeed's drops stays dropped
        for drops in (False, True):
            job = one_gradient("gpt_moe", 1, top_k=top_k, drop_tokens=drops)
            yield Row(f"ep top-{top_k} drops {drops}", 2, job, GRADIENTS, Stock.ALONE)


# ZeRO 3: dense weights in shards of all ranks, experts in shards of those that have the same.


def sharded_rows() -> Iterator[Row]:
    """What stages 1 and 2 prove of families and optimizers is not proved again."""
    gradients = Close(1e-6, None, 1e-6)
    for family, ranks, ep_ranks in (("mixtral", 2, None), ("mixtral", 4, 2), ("gpt_moe", 4, 2)):
        name = f"sharded gradients {family} {ranks} ranks {ep_ranks or 'all'} EP ranks"
        job = one_gradient(family, 3, ep_ranks=ep_ranks)
        yield Row(name, ranks, job, gradients, Stock.ALONE)
    for family in ("qwen3_moe", "toy, some experts frozen", "gpt_moe"):
        job = one_gradient(family, 3)
        yield Row(f"sharded gradients {family}", 2, job, gradients, Stock.ALONE)
    for use_reentrant in (True, False):
        job = one_gradient("mixtral", 3, use_reentrant=use_reentrant)
        name = f"sharded gradients reentrant {use_reentrant}"
        yield Row(name, 2, job, gradients, Stock.ALONE)
    job = Job("mixtral", 3, clip=0.5, steps=4, evaluate=True, evaluate_within=True)
    yield Row("sharded evaluates", 2, job, CURVES, Stock.SHARDED)
    job = varied(Job("gpt_moe", 3, steps=2, num_experts=8, num_layers=2), replicas=0.5)
    yield Row("varied sharded native", 2, job, CURVES, shows=(replicas,))
    for family in ("mixtral", "gpt_moe"):
        job = Job(family, 3, clip=0.5, steps=4, gate=GATES["cosine"])
        yield Row(f"gate sharded {family}", 2, job, CURVES)


# The optimizer's states in host memory.


ON_HOST: dict[str, Any] = {"offload": (("device", "cpu"),)}


def offloaded_rows() -> Iterator[Row]:
    """Where states lie changes no strategy; owners that move move them from there."""
    for stage in (1, 2, 3):
        for ranks, ep_ranks in ((2, None), (4, 2)):
            at = f"zero{stage} {ranks} ranks"
            job = one_gradient("mixtral", stage, ep_ranks=ep_ranks, **ON_HOST)
            close = Close(1e-6, None, 1e-6)
            yield Row(f"offloaded gradients {at}", ranks, job, close, Stock.ALONE)
        job = Job("mixtral", stage, clip=0.5, steps=8, num_experts=8, **ON_HOST)
        moving = {} if stage == 3 else often(2)
        copied = fssdp(job, overlap_degree=2, replicas_per_rank=2, **moving)
        shows = (replicas,) if stage == 3 else (replicas, moves)
        name = f"offloaded fssdp zero{stage}"
        yield Row(name, 2, copied, CURVES, shows=shows)
        own = replace(job, torch_adam=False)
        yield Row(f"offloaded cpu adam zero{stage}", 2, own, CURVES, Stock.ALONE)


# Plans by chance: whatever a strategy says, a run learns the same.


ALL = {"revised": 0.4, "rematerialized": 0.4, "carried": 0.5, "shard_every": 2}
ANY = {"revised": 0.3, "rematerialized": 0.3, "carried": 0.5, "shard_every": 3}
TOYS = sorted(set(toy.NAMES) - {"toy", "toy, wide", "toy, deep"})


def on_nodes(ranks_per_node: int) -> Hardware:
    return Hardware(
        name="of a test",
        source="made up",
        num_nodes=4,
        ranks_per_node=ranks_per_node,
        device=Device(name="CPU"),
        intra=Link(bytes_per_s=1e9),
        inter=Link(bytes_per_s=1e8),
    )


def varied_rows() -> Iterator[Row]:
    for ranks, nodes in ((2, 1), (4, 2), (2, 2), (4, 1), (4, 4), (8, 1), (8, 2), (8, 4)):
        yield Row(
            f"varied {ranks} ranks {nodes} nodes",
            ranks,
            varied(float64(steps=10, **sized(ranks)), **ANY, seed=nodes),
            stock=Stock.ALONE if ranks == 8 else Stock.EP,
            shows=(draws_all_kinds, lies_on(nodes)),
            hardware=on_nodes(ranks // nodes),
        )
    for family in TOYS:  # few experts, layers of other sizes or shapes, shared or frozen ones
        name, job = f"varied {family}", varied(float64(family, clip=0.0), **ALL)
        yield Row(name, 4, job, stock=Stock.ALONE, shows=(replicas,))
        job = replace(job, micro_batches=8)
        yield Row(f"{name} 8 ranks", 8, job, stock=Stock.ALONE)
    for family in ("toy, paired", "toy, shared experts", "toy, top alone"):
        job = varied(float64(family, clip=0.0, micro_batches=6), layers=1.0, shard_every=2)
        name = f"varied {family} accumulates"
        yield Row(name, 2, job, stock=Stock.ALONE)
    # Nothing of the optimizer is kept of frozen experts; some ranks have only such to move.
    job = float64("toy, some experts frozen", clip=0.0)
    job = varied(job, layers=0.0, shard_every=1, seed=1)
    yield Row("varied frozen experts move", 4, job, stock=Stock.ALONE, shows=(moves,))
    for layers in (0.0, 1.0):  # two experts a layer, on four ranks
        job = varied(float64("toy, experts alone", clip=0.0), layers=layers, shard_every=3)
        name = f"varied few experts, copies {layers}"
        yield Row(name, 4, job, stock=Stock.ALONE)
    for family in ("gpt_oss", "qwen3_moe", "deepseek_v3"):
        job = varied(float64(family, clip=0.0), layers=1.0, **ALL)
        name = f"varied {family}"
        yield Row(name, 4, job, close_of(family), shows=(replicas,))
    job = varied(float64("gpt_moe", clip=0.0, num_experts=2), **ALL)
    yield Row("varied gpt_moe fewer experts than ranks", 4, job, BUT_KEYS, Stock.ALONE)
    for family, keys in {
        "toy, uneven layers": ALL,
        "qwen2_moe": {"rematerialized": 1.0},  # saves tensors after its experts
    }.items():
        job = varied(float64(family, 3, clip=0.0, use_reentrant=True), layers=1.0, **keys)
        yield Row(f"varied {family} checkpointed", 2, job, stock=Stock.ALONE)
    for family in ("toy", "toy, uneven layers"):  # rows are dropped by experts, wherever they are
        job = varied(float64(family, clip=0.0, capacity_factor=0.8), **ALL)
        yield Row(f"varied {family} with capacity", 2, job)
    for gate, keys in {"noisy": NOISY, "expert choice": GATES["expert choice"]}.items():
        for family in ("mixtral", "gpt_moe"):  # a rank draws the same noise by any plan
            job = float64(family, gate=keys)
            job = varied(job, shard_every=2, carried=0.4, revised=0.3)
            name = f"varied {gate} gate of {family}"
            yield Row(name, 4, job, BUT_KEYS, shows=(moves,))


def static_rows() -> Iterator[Row]:
    """More room than any expert has rows: padded, and nothing dropped."""
    keys = (("static_capacity", 300),)
    for family, ranks in (("mixtral", 2), ("toy", 4), ("gpt_moe", 2)):
        job = float64(family, keys=keys, evaluate=True)
        yield Row(f"static capacity {family}", ranks, job, close_of(family))
        masked = replace(job, keys=(*keys, ("order", "one_hot")))
        yield Row(f"static capacity by masks {family}", ranks, masked, close_of(family))
    job = one_gradient("mixtral", 1, keys=keys)
    yield Row("static capacity gradients", 4, job, GRADIENTS, Stock.ALONE)


def once_rows() -> Iterator[Row]:
    """A token's row once to a rank, whole and in pipelines."""
    keys = (("send_once", True),)
    for family, ranks in (("mixtral", 2), ("toy", 4), ("gpt_moe", 4)):
        job = float64(family, keys=keys, evaluate=True)
        yield Row(f"send once {family}", ranks, job, close_of(family))
    for reentrant in (True, False):
        job = float64("mixtral", 3, keys=keys, use_reentrant=reentrant)
        name = f"send once checkpointed, reentrant {reentrant}"
        yield Row(name, 2, job)
    job = one_gradient("mixtral", 1, keys=keys)
    yield Row("send once gradients", 4, job, GRADIENTS, Stock.ALONE)
    job = Job("mixtral", 1, dtype="bfloat16", steps=6, keys=keys)
    yield Row("send once bfloat16", 4, job, Close(2e-2), Stock.ALONE)


def varied_at_zero_rows() -> Iterator[Row]:
    for stage in (0, 1, 2):
        for family in ("mixtral", "gpt_moe"):
            for freed in (0.0, 1.0):
                job = one_gradient(family, stage)
                job = varied(job, layers=1.0, replicas=0.7, rematerialized=freed)
                name = f"varied gradients {family} zero{stage} freed {freed}"
                shows = (replicas,)
                yield Row(name, 2, job, GRADIENTS, Stock.ALONE, shows)
        # The first steps overflow, and are skipped.
        job = varied(Job("gpt_moe", stage, dtype="float16", clip=0.5), **ANY)
        close = HALVES if stage else replace(HALVES, norms=None)
        yield Row(f"varied float16 zero{stage}", 2, job, close, shows=(moves,))
        for optimizer, parameters in (("object", "groups"), ("callable", "list")):
            job = Job("mixtral", stage, steps=5, optimizer=optimizer, parameters=parameters)
            name = f"varied optimizer {optimizer} of {parameters} zero{stage}"
            job, close = varied(job, shard_every=2), Close(2e-5)
            yield Row(name, 2, job, close, Stock.ALONE, (moves,))
    for stage in (1, 2):  # Adam's states go with their expert
        job = varied(Job("toy", stage, steps=6), shard_every=1)
        close = Close(1e-4, None, 1e-4)
        yield Row(f"varied owners zero{stage}", 4, job, close, shows=(moves,))
    for stage in (0, 1):
        job = Job("toy", stage, steps=5, clip=0.5, no_sync=True, evaluate=True)
        job = varied(job, revised=0.3)
        yield Row(f"varied no_sync zero{stage}", 2, job, CURVES)


# Strategies of the papers.


def often(interval: int) -> dict[str, Any]:
    """Keys of owners that change so often that it could not pay."""
    return {"reshard_interval": interval, "resharding": "paper"}


FSSDP: dict[str, tuple[dict[str, Any], Shows]] = {
    "some replicas": (
        {"overlap_degree": 3, "replicas_per_rank": 2, **often(3)},
        moves,
    ),
    "all everywhere": (
        {"overlap_degree": 8, "replicas_per_rank": 8, "reshard_interval": 0, "share": "paper"},
        exchanges_nothing,
    ),
    "rematerialized": (
        {"overlap_degree": 2, "replicas_per_rank": 2, "rematerialize": True},
        moves_nothing,
    ),
    "calibrated": (
        {"overlap_degree": 2, "replicas_per_rank": 1, "calibrate": True, **often(4)},
        moves,
    ),
    "all at once": (
        {
            **{"overlap_degree": 4, "replicas_per_rank": 3, "calibrate": True},
            **{"rematerialize": True, "window": 2, **often(5)},
        },
        moves,
    ),
    "even owners": (
        {
            **{"overlap_degree": 4, "replicas_per_rank": 2, "reshard_interval": 2},
            "heterogeneous_sharding": False,
        },
        moves_nothing,
    ),
}


def fssdp_rows() -> Iterator[Row]:
    for name, (keys, owners) in FSSDP.items():
        for ranks in (2, 4):
            # Where rows are slow copies always pay.
            job, shows = fssdp(float64(steps=8), **keys), (replicas, owners)
            yield Row(f"fssdp {name} {ranks} ranks", ranks, job, shows=shows, hardware=SLOW)
    keys = {"overlap_degree": 1, "replicas_per_rank": 1, "reshard_interval": 6}
    for ranks in (2, 4):  # where a move costs next to nothing it pays as soon as costs are known
        job = fssdp(float64(steps=14), **keys)
        name = f"fssdp by gain {ranks} ranks"
        yield Row(name, ranks, job, shows=(replicas, moves), hardware=FREE)


FREE = Hardware(
    name="of a test",
    source="made up",
    num_nodes=1,
    ranks_per_node=8,
    device=Device(name="CPU"),
    intra=Link(bytes_per_s=1e12),
)
PROPHET: dict[str, dict[str, Any]] = {
    "as it is": {"balance": 0.3},
    "halves": {"split": "half", "num_excluded": 1, "balance": 0.3, "rematerialize": True},
    "kept replicas": {"rematerialize": False, "num_excluded": None, "balance": 0.2},
    "not hidden": {"scheduler": False, "frequency": 1, "balance": 0.3},
    "shadows": {"planner": "shadow", "rematerialize": True},
    "stale": {"planner": "shadow", "frequency": 7, "balance": 1e6},
}
"""Of two ranks one excluded leaves one."""
EAGER = {"planner": "shadow", "split": "half"}  # replicas the busy, whatever that costs
FREED = {"replicas_per_rank": 2, "rematerialize": True}


def prophet(job: Job, **keys: Any) -> Job:
    return replace(job, strategy="prophet", keys=tuple(keys.items()))


def prophet_rows() -> Iterator[Row]:
    for name, keys in PROPHET.items():
        for ranks in (2, 4, 8):
            if (name, ranks) == ("halves", 2) or (ranks == 8 and name != "kept replicas"):
                continue
            way = carries_nothing if name == "not hidden" else carries
            yield Row(
                f"prophet {name} {ranks} ranks",
                ranks,
                prophet(float64(steps=12, **sized(ranks, 2)), **keys),
                stock=Stock.ALONE if ranks == 8 else Stock.EP,
                shows=(plans_once_costs_are_known, way),
                hardware=FREE,
            )


BY_TIME: dict[str, dict[str, dict[str, Any]]] = {
    "fssdp": {
        "kept": {"share": "priced", "overlap_degree": 4, "replicas_per_rank": 2, **often(5)},
        "freed": {"share": "priced", "overlap_degree": 4, "replicas_per_rank": 2},
        "calibrated": {"share": "priced", "overlap_degree": 2, "replicas_per_rank": 3},
        "by parts": {"share": "planned", "overlap_degree": 4, "replicas_per_rank": 2},
    },
    "prophet": {
        "kept": {"share": "priced", "rematerialize": False, "balance": 0.3},
        "freed": {"share": "priced", "balance": 0.3, "rematerialize": True},
        "by parts": {"share": "planned", "balance": 0.3},
    },
}
"""Shares under which layers take least time."""
for _name, _keys in BY_TIME["fssdp"].items():
    _keys.update(window=1, rematerialize=_name != "kept", calibrate=_name == "calibrated")


def by_time_rows() -> Iterator[Row]:
    """20 steps of Adam."""
    three = float64("mixtral", 20, num_experts=6, micro_batches=6, clip=0.0)
    for strategy, name in ((s, n) for s, names in BY_TIME.items() for n in names):
        shows = (replicas, *SHOWN_BY_TIME.get((strategy, name), ()))
        for ranks in (2, 3, 4, 8):
            job = three if ranks == 3 else float64(steps=20, **sized(ranks))
            job = replace(job, strategy=strategy, keys=tuple(BY_TIME[strategy][name].items()))
            stock = Stock.ALONE if ranks in (3, 8) else Stock.EP
            yield Row(
                f"{strategy} by time {name} {ranks} ranks",
                *(ranks, job, EXACT, stock, shows, SLOW),
            )


SHOWN_BY_TIME: dict[tuple[str, str], tuple[Shows, ...]] = {
    ("fssdp", "kept"): (divides,),
    ("fssdp", "freed"): (divides,),
    ("fssdp", "calibrated"): (divides, adds_replicas),
    ("fssdp", "by parts"): (shares_by_parts,),
    ("prophet", "by parts"): (shares_by_parts,),
}
"""Which experts prophet copies depends on what a machine's first steps take."""


def esp(job: Job, etp_size: int, **keys: Any) -> Job:
    """Experts split in EP ranks of so many ranks, rows in chunks."""
    given = {"degree": {"forward": 2, "backward": 3}, "slice_gradients": False, **keys}
    return replace(job, strategy="esp", keys=tuple(given.items()), etp_size=etp_size)


def over(job: Job, balance: str, **keys: Any) -> Job:
    """Over the placement of another strategy."""
    return replace(job, balance=balance, balance_keys=tuple(keys.items()))


def esp_rows() -> Iterator[Row]:
    for family in ("mixtral", "gpt_moe"):
        for ranks, size in ((1, 1), (4, 4)):
            job = esp(float64(family), size)
            name = f"esp {family} {ranks} ranks by {size}"
            yield Row(name, ranks, job, close_of(family))
    for schedule in ("tutel", "fsmoe_no_iio", "default", "tutel_improved", "pipemoe_lina"):
        degree = None if schedule == "default" else 2
        job = esp(float64("mixtral"), 2, schedule=schedule, degree=degree)
        yield Row(f"esp schedule {schedule}", 4, job)
    drawn = {"carried": 0.5, "rematerialized": 0.5, "revised": 0.5, "shard_every": 2}
    for ranks, size in ((2, 1), (4, 2)):
        job = over(esp(float64(steps=6), size), VARIED, **drawn)
        name, shows = f"esp over varied {ranks} ranks by {size}", (replicas, moves)
        yield Row(name, ranks, job, shows=shows)
    for ranks, size in ((2, 1), (4, 2)):
        keys, _ = FSSDP["all everywhere"]
        job = over(esp(float64(steps=8), size, degree=2), "fssdp", **keys)
        name = f"esp over fssdp, all everywhere {ranks} ranks by {size}"
        yield Row(name, ranks, job, shows=(exchanges_nothing,))
    job = over(esp(float64("mixtral", 8), 2), "prophet")
    yield Row("esp over prophet", 4, job)
    for strategy, name in (("fssdp", "calibrated"), ("prophet", "freed")):
        # The first gradient of one weight is -8e-9 here, 2e-6 of the largest, and its rounding
        # 1e-18: by torch's own epsilon Adam makes 1.6e-12 of that.
        job = esp(float64("mixtral", 20, epsilon=1e-6), 2)
        job = replace(job, balance=strategy, balance_keys=tuple(BY_TIME[strategy][name].items()))
        yield Row(f"esp over {strategy} by time {name}", 4, job, shows=(replicas,), hardware=SLOW)
    for stage, dtype in ((1, "float32"), (2, "float32"), (2, "bfloat16")):
        for schedule in ("fsmoe", "tutel_improved", "pipemoe_lina"):
            job = Job("mixtral", stage, dtype=dtype, clip=0.5, steps=6)
            job = esp(job, 2, slice_gradients=True, degree=2, schedule=schedule)
            close = replace(CURVES if dtype == "float32" else HALVES, norms=None)
            yield Row(f"esp sliced {schedule} {dtype} zero{stage}", 4, job, close)
    # Costs are measured in step 4; by then dense gradients are reduced in slices.
    for ranks, size, batches in ((2, 2, 4), (4, 2, 8), (2, 2, 8), (4, 2, 4), (4, 1, 4), (4, 1, 8)):
        job = float64("mixtral", 7, micro_batches=batches)
        job = esp(job, size, degree=None, slice_gradients=True)
        name = f"esp planned {ranks} ranks by {size}, {batches} micro-batches"
        # Of 8 micro-batches seven steps of Adam leave 1.8e-12 on an EPYC, and less elsewhere.
        yield Row(name, ranks, job, EXACT if batches < 8 else replace(EXACT, weights=1e-11))


def gate_rows() -> Iterator[Row]:
    gates = {**GATES, "noisy": NOISY}
    for strategy in ("fssdp", "prophet"):
        for gate in ("noisy", "expert choice", "soft"):
            job = replace(float64("mixtral", 5, gate=gates[gate]), strategy=strategy)
            yield Row(f"{strategy} {gate} gate", 2, job, BUT_KEYS)
    job = float64("mixtral", 3, gate=GATES["softmax"], clip=0.0)
    yield Row("ep mixtral's own gate, named", 2, job, BUT_KEYS)
    for family, reentrant in (("mixtral", False), ("gpt_moe", False), ("gpt_moe", True)):
        # What is computed again sees the same noise, and the same sequences.
        for gate in ("noisy", "soft"):
            job = float64(family, 3, gate=gates[gate], use_reentrant=reentrant)
            name = f"ep {gate} gate of {family} checkpointed, reentrant {reentrant}"
            yield Row(name, 2, job, Close(1e-12))


# Two roles. Where stripes cut a rank's batch, balance losses and capacities are those of the
# pieces, as they are of smaller micro-batches; the rows that do so have neither.


NUM_EXPERTS = {2: 4, 3: 6, 4: 4, 6: 12, 8: 8}
"""By ranks: a number that the ranks divide, and the expert ranks too."""


def shared(ranks: int, family: str = "mixtral", **fields: Any) -> Job:
    """A job of which each rank accumulates two micro-batches."""
    sizes = {"micro_batches": 2 * ranks, "num_experts": NUM_EXPERTS[ranks]}
    return float64(family, **{"steps": 3, **sizes, **fields})


def zebra_rows() -> Iterator[Row]:
    for attention, experts, groups, moved in (
        (1, 1, 1, None),
        (1, 1, 1, [0, 1]),
        (2, 2, 1, [0, 1]),
        (1, 1, 2, [1, 0]),
        (1, 2, 1, [1, 2]),
        (2, 1, 1, [2, 0]),
        (2, 2, 1, None),
        (2, 2, 1, [2, 0]),
        (1, 2, 1, None),
        (2, 1, 1, None),
        (1, 3, 1, None),
        (2, 4, 1, [1, 0]),
        (2, 4, 1, None),
        (4, 2, 1, [2, 0]),
        (4, 2, 1, None),
        (2, 2, 2, [1, 2]),
        (1, 1, 4, [2, 4]),
    ):
        ranks = groups * (attention + experts)
        job = shared(ranks, aux_coefficient=0.0 if attention > experts else 0.02)
        job = replace(job, num_experts=12) if experts == 3 else job
        name = f"zebra {attention}+{experts} x {groups}, moved {moved}"
        yield Row(name, ranks, zebra(job, attention, experts, moved=moved))
    for stripes in (1, 2, 3, 4):  # one that holds both batches; and some that are a part of one
        job = shared(2, aux_coefficient=0.0)
        job = zebra(job, 1, 1, num_micro_batches=stripes, moved=[0, 1])
        yield Row(f"zebra {stripes} stripes", 2, job)
    for attention, experts, stripes in (
        *((2, 1, 1), (2, 1, 2), (1, 2, 4), (2, 2, 1), (2, 2, 3), (2, 2, 4)),
    ):  # stripes end within batches, and an expert rank's batch goes to two attention ranks
        job = shared(attention + experts, aux_coefficient=0.0)
        job = zebra(job, attention, experts, num_micro_batches=stripes)
        name = f"zebra {attention}+{experts}, {stripes} stripes"
        yield Row(name, attention + experts, job)
    for family in ("mixtral", "gpt_moe", "toy"):
        for recomputes, reentrant in ((True, False), (True, None), (False, False)):
            job = shared(2, family, use_reentrant=reentrant)
            job = zebra(job, 1, 1, recompute_experts=recomputes, num_micro_batches=2)
            name = f"zebra {family} recomputes {recomputes}, reentrant {reentrant}"
            yield Row(name, 2, job, close_of(family))
    for family in families.NAMES:
        if family != "mixtral":
            moved = [1, 0][: families.MOE_LAYERS.get(family, 2)]
            job = zebra(shared(2, family), 1, 1, moved=moved)
            yield Row(f"zebra {family}", 2, job)
    job = zebra(shared(2, "gpt_moe"), 1, 1, moved=[1, 0])
    yield Row("zebra gpt_moe", 2, job, BUT_KEYS)
    for family in (
        "toy, frozen experts",  # expert ranks train nothing
        "toy, experts alone",  # attention ranks train nothing
        *("toy", "toy, uneven layers", "toy, paired", "toy, two pools"),
        *("toy, some experts frozen", "toy, top alone"),
    ):
        yield Row(f"zebra {family}", 2, zebra(shared(2, family), 1, 1))
    # With one stripe a gradient is found once; two weights have the same tensor of it.
    job = zebra(shared(2, "toy, paired"), 1, 1, num_micro_batches=1)
    yield Row("zebra weights with one gradient", 2, job)
    job = zebra(shared(2, "toy, uneven layers"), 1, 1, moved=[0, 3, 3, 1])
    yield Row("zebra experts of uneven layers move", 2, job)
    for family in ("mixtral", "gpt_moe"):
        for layers in (3, 4):
            job = zebra(shared(4, family, num_layers=layers), 2, 2, moved=[0, 1, 2, 1][:layers])
            yield Row(f"zebra {family} {layers} layers", 4, job, close_of(family))
        job = zebra(shared(2, family, capacity_factor=0.8), 1, 1, num_micro_batches=2)
        name = f"zebra {family} with capacity"  # a piece is a batch
        yield Row(name, 2, job, close_of(family))
    for attention, experts, family, keys in (
        (1, 2, "mixtral", {"revises": True}),
        (1, 1, "mixtral", {"on_attention": True}),
        (2, 2, "mixtral", {"moved": 1, "on_attention": True, "revises": True}),
        (1, 1, "gpt_moe", {"on_attention": True, "revises": True}),
        (1, 1, "toy, frozen experts", {"on_attention": True}),
        (1, 1, "toy, some experts frozen", {"on_attention": True}),
        (1, 1, "toy, experts alone", {"on_attention": True}),
    ):  # long enough that replicas are measured, and planned by that
        job = replace(
            shared(attention + experts, family, aux_coefficient=0.0, steps=7, evaluate=True),
            strategy="tests.strategies_for_tests:TwoRoles",
            keys=tuple({"attention_size": attention, "expert_size": experts, **keys}.items()),
        )
        name = f"two roles with replicas, {attention}+{experts}, {family}, {', '.join(keys)}"
        yield Row(name, attention + experts, job, close_of(family), shows=(replicas,))
    for attention, experts, moved, balance, keys in (
        (1, 2, [0] * 4, "fssdp", {"overlap_degree": 2, **FREED}),
        (2, 2, [1, 0], "prophet", EAGER),
        (2, 2, [0] * 3, "prophet", {**EAGER, "rematerialize": True}),
        (2, 2, [0, 0], "fssdp", {"overlap_degree": 1, "share": "paper", "calibrate": True}),
    ):
        sizes = {"steps": 8, "evaluate": True, "num_layers": len(moved)}
        job = shared(attention + experts, aux_coefficient=0.0, **sizes)
        job = over(zebra(job, attention, experts, moved=moved), balance, **keys)
        name = f"zebra {attention}+{experts} over {balance}, {', '.join(keys)}"
        yield Row(name, attention + experts, job, shows=(replicas,), hardware=SLOW)
    job = Job("mixtral", 1, clip=0.5, dtype="bfloat16", num_experts=4)
    own = (("attention_size", 1), ("expert_size", 1), ("on_attention", True), ("revises", True))
    job = replace(job, strategy="tests.strategies_for_tests:TwoRoles", keys=own)
    yield Row("two roles with replicas, cast after they are notified of", 2, job, HALVES)
    job = zebra(shared(2, evaluate=True, evaluate_within=True), 1, 1, moved=[0, 1])
    yield Row("zebra evaluates", 2, job)
    job = zebra(shared(2, micro_batches=2, learning_rate=1e-2), 1, 1)
    yield Row("zebra does not accumulate", 2, job)


SHAPES = {  # ranks, attention ranks and expert ranks of a group, experts moved of each layer
    "1+1": (2, 1, 1, [0, 0]),
    "1+1 moved": (2, 1, 1, [0, 2]),
    "2+2": (4, 2, 2, [1, 0]),
    "1+2": (3, 1, 2, [1, 0]),
    "2 groups": (4, 1, 1, [1, 0]),
}


def zebra_at_zero_rows() -> Iterator[Row]:
    """In stripes that cut no rank's batch."""
    for shape, (ranks, attention, experts, moved) in SHAPES.items():
        keys = {"moved": moved, "num_micro_batches": 1}
        sizes = {"num_experts": 6, "micro_batches": 6} if ranks == 3 else {}
        for stage in (0, 1, 2):
            for family in ("mixtral", "gpt_moe"):
                job = zebra(one_gradient(family, stage, **sizes), attention, experts, **keys)
                name = f"zebra gradients {shape} {family} zero{stage}"
                yield Row(name, ranks, job, GRADIENTS)
    for stage in (0, 1, 2):
        keys = {"moved": [0, 2], "num_micro_batches": 1}
        for optimizer, parameters in (
            *(("callable", "generator"), ("json", "generator"), ("object", "list")),
            *(("object", "groups"), ("callable", "groups")),
        ):
            job = Job("mixtral", stage, steps=5, optimizer=optimizer, parameters=parameters)
            name = f"zebra optimizer {optimizer} of {parameters} zero{stage}"
            yield Row(name, 2, zebra(job, 1, 1, **keys), Close(2e-5))
    for stage in (1, 2):
        for shape in ("1+1 moved", "2+2", "2 groups"):
            ranks, attention, experts, moved = SHAPES[shape]
            keys = {"moved": moved, "num_micro_batches": 1}
            job = zebra(one_gradient("mixtral", stage, **ON_HOST), attention, experts, **keys)
            yield Row(f"zebra offloaded gradients {shape} zero{stage}", ranks, job, GRADIENTS)
        job = Job("mixtral", stage, clip=0.5, steps=8, micro_batches=8, **ON_HOST)
        yield Row(f"zebra offloaded zero{stage}", 2, zebra(job, 1, 1, moved=[0, 2]), CURVES)


# The table. CI has all strategies in one setting and some in others, which have all values in
# turn and share what stock learns; the slow ring has all that there can be.


COPYING = {"overlap_degree": 2, "replicas_per_rank": 2}
STRATEGIES: dict[str, tuple[Callable[[Job], Job], tuple[Shows, ...]]] = {
    "ep": (lambda job: job, ()),
    "fssdp": (lambda job: fssdp(job, **COPYING), (replicas,)),
    "prophet": (lambda job: prophet(job, **EAGER), (replicas,)),
    "esp": (lambda job: esp(job, 2), ()),
    "esp over fssdp": (lambda job: over(esp(job, 1), "fssdp", **COPYING), (replicas,)),
    "auto": (lambda job: replace(job, strategy="auto"), ()),
    "varied": (lambda job: varied(job, **{**ALL, "shard_every": 0}), (replicas,)),
    "zebra": (lambda job: zebra(job, 1, 1, num_micro_batches=1), ()),
}
LAYOUTS = {"2 ranks": (2, None), "4 ranks": (4, None), "2 grids": (4, 2)}  # ranks, EP ranks
PRECISIONS: dict[str, dict[str, Any]] = {
    "float64 zero0": {"stage": 0, "dtype": "float64"},
    "float32 zero1 offloaded": {"stage": 1, **ON_HOST},
    "bfloat16 zero2": {"stage": 2, "dtype": "bfloat16"},
    "bfloat16 zero3": {"stage": 3, "dtype": "bfloat16"},
    "float32 zero3": {"stage": 3},
}
AXES = ("layout", "precision", "family", "reentrant")
QUICK_SETTINGS = {
    ("2 ranks", "float64 zero0", "mixtral", None): set(STRATEGIES),
    ("4 ranks", "bfloat16 zero2", "gpt_moe", False): {"varied", "zebra"},
    ("2 grids", "float32 zero1 offloaded", "toy", True): {"prophet"},
    ("2 ranks", "float32 zero3", "mixtral", None): {"auto", "fssdp"},
}
CLOSE = {"float32": replace(CURVES, norms=None), "bfloat16": replace(HALVES, norms=None)}


def is_possible(case: Mapping[str, Any]) -> bool:
    """Roles keep their weights whole, and nothing on the host; a grid is an EP rank or more."""
    if case["strategy"] == "zebra":
        has_whole = "zero3" not in case["precision"] and "offloaded" not in case["precision"]
        return has_whole and case["layout"] != "2 grids" and case["reentrant"] is not True
    return case["strategy"] != "esp" or case["layout"] != "2 grids"


@pytest.mark.parametrize(
    "case",
    cases(
        is_possible,
        quick=lambda case: case["strategy"] in QUICK_SETTINGS.get(tuple(map(case.get, AXES)), ()),
        layout=LAYOUTS,
        precision=PRECISIONS,
        strategy=STRATEGIES,
        family=("mixtral", "gpt_moe", "toy"),
        reentrant=(None, False, True),
    ),
)
def test_of_the_table_equals_stock(case: dict[str, Any], tmp_path: Path) -> None:
    of_strategy, shows = STRATEGIES[case["strategy"]]
    ranks, ep_ranks = LAYOUTS[case["layout"]]
    steps = 8 if shows else 4  # until replicas pay
    job = Job(case["family"], clip=0.5, steps=steps, num_experts=8, **PRECISIONS[case["precision"]])
    job = of_strategy(replace(job, ep_ranks=ep_ranks, use_reentrant=case["reentrant"]))
    close = CLOSE.get(job.dtype, close_of(job.family))
    hardware = FREE if job.strategy == "prophet" else None
    stock = Stock.EP
    if job.strategy == "ep":  # clipped by a norm of float32, which is another on more ranks
        stock, job = Stock.ALONE, replace(job, clip=0.0)
    check_equals_stock(Row("", ranks, job, close, stock, shows, hardware), tmp_path)


QUICK = {
    "ep gradients mixtral zero1 4 ranks",
    "ep gradients gpt_moe zero2 2 ranks",
    "ep clipped bfloat16",
    "ep no_sync mixtral zero1",
    "ep native ep_size 2, 2 EP ranks",
    "ep top-1 drops True",
    "ep top-2 drops True",
    "ep top-3 drops False",
    "ep mixtral's own gate, named",
    "sharded gradients gpt_moe 4 ranks 2 EP ranks",
    "static capacity mixtral",
    "send once mixtral",
    "varied toy, shared experts accumulates",
    "zebra 1+1 x 2, moved [1, 0]",
    "zebra mixtral recomputes True, reentrant False",
    "zebra toy, experts alone",
    "zebra mixtral with capacity",
    "zebra evaluates",
}
"""Of the rows that have more than the table; the others are slow."""

ROWS = [
    *(
        *ep_rows(),
        *sharded_rows(),
        *offloaded_rows(),
        *static_rows(),
        *once_rows(),
        *varied_rows(),
        *varied_at_zero_rows(),
    ),
    *(*fssdp_rows(), *prophet_rows()),
    *by_time_rows(),
    *(*esp_rows(), *gate_rows(), *zebra_rows(), *zebra_at_zero_rows()),
]


def of_stock(row: Row) -> Any:
    """What stock learns, once for all rows with the same job."""
    skips_steps = row.job.dtype == "float16"  # each stage its own
    job = replace(
        row.job,
        stage=row.job.stage if skips_steps else min(row.job.stage, 1),
        **{"strategy": "ep", "keys": (), "hardware": None},
        **{"etp_size": None, "balance": None, "balance_keys": ()},
        offload=() if row.job.torch_adam else row.job.offload,  # each Adam has its own decay
        **{"no_sync": False, "evaluate": False, "evaluate_within": False},
        use_reentrant=row.job.use_reentrant or None,  # transformers' balance loss is lost if it is
    )
    if row.stock is Stock.SHARDED:
        return plain(row.ranks, replace(job, stage=3, block=False, ep_ranks=None))
    if row.stock is Stock.EP:
        return plain(row.ranks, job)
    return alone(replace(job, ep_ranks=None, ep_size=1))


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=row.name,
            marks=[
                *([] if row.name in QUICK else [pytest.mark.slow]),
                *([] if row.job.torch_adam else [needs_compiler]),
            ],
        )
        for row in ROWS
    ],
)
def test_equals_stock(row: Row, tmp_path: Path) -> None:
    check_equals_stock(row, tmp_path)


def check_equals_stock(row: Row, tmp_path: Path) -> None:
    job = row.job
    if row.hardware is not None:
        path = tmp_path / "hardware.json"
        path.write_text(row.hardware.to_json())
        job = replace(job, hardware=str(path))
    ours, steps = run(row.ranks, job)
    theirs = of_stock(row)
    assert ours.losses == pytest.approx(theirs.losses, rel=row.close.losses)
    if row.close.norms is not None and job.clip and any(ours.norms) and any(theirs.norms):
        assert ours.norms == pytest.approx(theirs.norms, rel=row.close.norms)
    if row.close.weights is not None:
        assert worst(ours.state, theirs.state, job) <= row.close.weights
    for shows in row.shows:
        shows(steps)


def test_every_row_has_a_name_of_its_own() -> None:
    names = {row.name for row in ROWS}
    assert len(names) == len(ROWS) and names >= QUICK


@pytest.mark.slow
def test_capacities_of_rows_do_drop() -> None:
    with_capacity = float64(clip=0.0, capacity_factor=0.8)
    without = replace(with_capacity, capacity_factor=None)
    assert plain(2, with_capacity).losses != pytest.approx(plain(2, without).losses)


def test_every_pair_is_among_those_that_are_chosen() -> None:
    found = combinations(a=range(4), b=range(3), c=range(3))
    chosen = by_pairs(found)
    pairs = [
        {p for each in rows for p in itertools.combinations(each.items(), 2)}
        for rows in (found, chosen)
    ]
    assert pairs[0] == pairs[1] and len(chosen) < len(found) // 2
