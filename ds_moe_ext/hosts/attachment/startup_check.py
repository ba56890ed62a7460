# SPDX-License-Identifier: Apache-2.0
"""The start of a run on all ranks together: what the launcher says, what ranks must have in common,
and the cluster that sizes are priced for.

Ranks meet at a key-value store (``KeyValueStore``), so that no collective hangs where one of them
cannot start: it leaves its error there, and all raise it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from ds_moe_ext.core.comm import KeyValueStore
from ds_moe_ext.core.hardware import Hardware, read_hardware, shipped_for
from ds_moe_ext.hosts.attachment.host_layer import Found
from ds_moe_ext.planning.strategy import Choosing, registered
from ds_moe_ext.strategies.settings import BLOCK, Settings
from ds_moe_ext.strict import read_record


@dataclass(frozen=True)
class Launched:
    """This process among those that were started together."""

    rank: int = 0  # among all
    world_size: int = 1  # all
    local_rank: int = 0  # among those of this node

    @classmethod
    def from_environment(cls) -> Launched:
        """Of a process that no launcher started: the only rank.

        Raises:
            ValueError: some of the variables are set and others not.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        found = [os.environ[name] for name in names if name in os.environ]
        if not found:
            return cls()
        if len(found) < len(names):
            missing = ", ".join(name for name in names if name not in os.environ)
            raise ValueError(
                f"the environment has no {missing}, which a launcher sets beside the rest of "
                f"{', '.join(names)}; start with torchrun or deepspeed, or unset them all"
            )
        return cls(*map(int, found))


def ranks_on_this_node() -> int | None:
    """As torchrun, DeepSpeed's launcher, an MPI or ``srun`` says; None where none does.

    Of SLURM's variables the step's count, where its tasks are the ranks: under ``srun torchrun`` a
    task is a launcher, and torchrun says more.
    """
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    for name in names:
        if name in os.environ:
            return int(os.environ[name])
    tasks, per_node = os.environ.get("SLURM_STEP_NUM_TASKS"), "SLURM_STEP_TASKS_PER_NODE"
    if tasks is not None and tasks == os.environ.get("WORLD_SIZE"):
        even = re.fullmatch(r"(\d+)(\(x\d+\))?", os.environ.get(per_node, ""))  # "8(x4)"
        return int(even[1]) if even else None
    return None


def is_first() -> bool:
    """Whether a launcher, or MPI's, calls this process rank 0; also where none says."""
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


PATIENCE_S = 10.0  # that a rank waits for others before a person is notified for which
FAREWELL_S = 5.0  # that rank 0, which may keep the store, stays for others to read why they end
NUM_REPORTED = 3  # differences between two ranks that an error names

# What must be the same on all ranks: what it is -> a text of it.
Description = Mapping[str, str]


class Disagreement(ValueError):
    """Ranks start with different things: reported by every rank in the same words."""


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """Of a block that all ranks are in."""

    rank: int | None = None  # of whom this is; none where all did well
    off: str = ""  # how the rank says that it does not run by us; else empty
    is_refusal: bool = False  # it found something wrong; else it failed
    is_common: bool = False  # the text is the same from whichever rank
    text: str = ""  # of the error


_GOOD = _Outcome()


@dataclass(eq=False)
class Start:
    """One start: of the engine that a ``deepspeed.initialize`` makes, or of a model of
    Megatron's."""

    of: str  # what the host calls it, for a person
    is_wanted: bool = False  # this rank runs by us
    # what was left out of defaults, a line each, for a person
    settled: list[str] = field(default_factory=list, init=False)
    _agreed: set[str] = field(default_factory=set, init=False)  # what ranks have compared
    _step: int = field(default=0, init=False)
    _has_left: bool = field(default=False, init=False)

    @cached_property
    def store(self) -> KeyValueStore | None:
        """Where ranks report to each other; None for a rank alone."""
        return KeyValueStore.of_world()

    @cached_property
    def _name(self) -> str:
        """Of this start: every rank counts its own, all in one order."""
        assert self.store is not None
        return f"{BLOCK}/start {self.store.add(f'{BLOCK}/starts of {self.store.rank}', 1)}"

    def _key(self, step: int, what: str) -> str:
        return f"{self._name}/{step}/{what}"

    def stand_aside(self, off: str) -> None:
        """Say that this rank does not run by us, as ``off`` states to a person. Waits for nobody;
        raises ValueError where another rank, which came before, does."""
        store = self.store
        if store is None:
            return
        own = _Outcome(rank=store.rank, off=off)
        store.put_first(self._key(0, "outcome"), json.dumps(asdict(own)))
        if store.add(self._key(0, "arrived"), 0):
            raise Disagreement(
                _only_some(f"enabled on other ranks, but {off} on rank {store.rank}")
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """What every rank does by itself. Collective; behind the block all have done it. Where
        another rank refused what it found this raises ValueError in its words, where it failed
        RuntimeError, and where it did not come in the time of the world's collectives
        TimeoutError."""
        try:
            yield
        except Exception as error:
            self.report(error)
            raise
        self._synchronize()

    def report(self, error: Exception) -> None:
        """Let ranks that wait for this one know why it does not come."""
        store = self.store
        if store is None or self._has_left:
            return
        is_refusal = isinstance(error, ValueError)
        text = str(error).strip().partition("\n")[0]
        own = _Outcome(
            rank=store.rank,
            is_refusal=is_refusal,
            is_common=isinstance(error, Disagreement),
            text=text if is_refusal else f"{type(error).__name__}: {text}",
        )
        try:
            store.put_first(self._key(self._step, "outcome"), json.dumps(asdict(own)))
            self._leave(store)
        except RuntimeError as gone:
            warnings.warn(f"{BLOCK}: other ranks could not be notified ({gone})", stacklevel=2)

    def agree(self, description: Description, first: int = 0) -> None:
        """Compare what ranks start with to that of the ``first``, each thing once. Collective.
        Raises ValueError, on all ranks, that names what differs and both values."""
        new = {key: text for key, text in description.items() if key not in self._agreed}
        if self.store is None or (description and not new):
            return
        store, number = self.store, self._step
        mark, reported = self._key(number, f"mark {first}"), self._key(number, f"reported {first}")
        own = json.dumps(new, sort_keys=True)
        own_mark = hashlib.sha256(own.encode()).hexdigest()
        with self.together():
            if store.rank == first:
                store.put(reported, own)
                store.put(mark, own_mark)
        with self.together():
            if store.read(mark) != own_mark:
                theirs = json.loads(store.read(reported) or "{}")
                raise Disagreement(_differences(theirs, first, new, store.rank))
        self._agreed.update(new)

    def each_different(self, what: str, text: str) -> tuple[str, ...]:
        """What ranks say, which may differ. Collective."""
        store = self.store
        if store is None:
            return (text,)
        first, other = self._key(self._step, what), self._key(self._step, f"another {what}")
        with self.together():
            if store.put_first(first, text) != text:
                store.put_first(other, text)
        return tuple(stated for key in (first, other) if (stated := store.read(key)) is not None)

    def _synchronize(self) -> None:
        """Wait until all ranks are here."""
        store = self.store
        if store is None:
            return
        try:
            key = self._key(self._step, "outcome")
            store.put(f"{self._name}/at {store.rank}", str(self._step))
            if store.add(self._key(self._step, "arrived"), 1) == store.size:
                store.put_first(key, json.dumps(asdict(_GOOD)))
            outcome = _Outcome(**json.loads(self._awaited(store, key)))
            if outcome != _GOOD:
                self._leave(store)
        except RuntimeError as gone:
            raise RuntimeError(
                f"{BLOCK}: the rendezvous store is gone while rank {store.rank} is in "
                f"{self.of} ({gone}); see why the process that runs it, such as rank 0, has "
                "ended"
            ) from gone
        if outcome.off:
            text = f"enabled on rank {store.rank}, but {outcome.off} on rank {outcome.rank}"
            raise Disagreement(_only_some(text))
        if outcome.is_common:
            raise Disagreement(outcome.text)
        if outcome.is_refusal:
            raise ValueError(
                f"rank {outcome.rank} cannot start, nor can the others: {outcome.text}"
            )
        if outcome != _GOOD:
            raise RuntimeError(
                f"{BLOCK}: rank {outcome.rank} failed in {self.of}, so that no rank can start: "
                f"{outcome.text}"
            )
        self._step += 1

    def _leave(self, store: KeyValueStore) -> None:
        """This rank knows why none can start."""
        self._has_left = True
        key = self._key(self._step, "heard")
        num_heard, end_s = store.add(key, 1), time.monotonic() + FAREWELL_S
        while store.rank == 0 and num_heard < store.size and time.monotonic() < end_s:
            time.sleep(0.05)
            num_heard = store.add(key, 0)

    def _awaited(self, store: KeyValueStore, key: str) -> str:
        end_s = time.monotonic() + store.timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            text = store.awaited(key, min(PATIENCE_S, left_s))
            if text is not None:
                return text
            reporter = store.put_first(self._key(self._step, "reporter"), str(store.rank))
            if reporter == str(store.rank) and left_s > store.timeout_s - PATIENCE_S:
                warnings.warn(
                    f"{BLOCK}: rank {store.rank} waits in {self.of} for "
                    f"{self._missing(store)}; it will wait for {store.timeout_s:.0f} s",
                    stacklevel=2,
                )
        raise TimeoutError(
            f"{BLOCK}: rank {store.rank} has waited in {self.of} for {store.timeout_s:.0f} s "
            f"for {self._missing(store)}; see what they do, and whether ds_moe_ext is "
            "installed and enabled there"
        )

    def _missing(self, store: KeyValueStore) -> str:
        """The ranks that are not where this one is, for a person."""
        places = {rank: store.read(f"{self._name}/at {rank}") for rank in range(store.size)}
        absent = [rank for rank, place in places.items() if int(place or -1) < self._step]
        some = ", ".join(map(str, absent[:8])) + (" and others" if len(absent) > 8 else "")
        return f"rank{'s' * (len(absent) > 1)} {some}"


_STARTS: ContextVar[Start | None] = ContextVar(f"{BLOCK}_start", default=None)


def start_of(what: str) -> Start:
    """The start that this rank is in; else one that begins."""
    return _STARTS.get() or Start(what)


@contextmanager
def starting(start: Start) -> Iterator[Start]:
    """This rank is in a start, inside the block; where it runs by us, all ranks leave it together,
    by the errors of ``Start.together``."""
    token = _STARTS.set(start)
    try:
        yield start
        if start.is_wanted:
            start._synchronize()
    except Exception as error:
        if start.is_wanted:
            start.report(error)
        raise
    finally:
        _STARTS.reset(token)


def _only_some(reported: str) -> str:
    return f"{BLOCK} is {reported}; give all ranks one configuration"


def _differences(theirs: Description, first: int, own: Description, rank: int) -> str:
    """Of two ranks, in one sentence; what only one of them has, where nothing else differs."""
    common = [key for key in theirs if key in own and theirs[key] != own[key]]
    keys = common or sorted({*theirs} ^ {*own}, key=[*theirs, *own].index)
    lines = [
        f"{key} is {theirs.get(key, 'absent')} on rank {first} and {own.get(key, 'absent')} on "
        f"rank {rank}"
        for key in keys[:NUM_REPORTED]
    ]
    more = f"; {len(keys) - NUM_REPORTED} more differ" if len(keys) > NUM_REPORTED else ""
    return f"ranks start with different settings: {'; '.join(lines)}{more}; give all ranks the same"


# Keys of the block whose values may be objects of the user's own: their JSON is compared.
_AS_WRITTEN = ("gate", "hooks", "options")
_APART = ("enabled", "hardware", "report", "trace")


def versions(host: str, version: str) -> Description:
    """Of what makes plans and moves data. What follows a + (as of CUDA) may differ, as on nodes of
    two kinds; of Python what follows the second number."""
    try:
        own = importlib.metadata.version("ds_moe_ext")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        own = "unknown"
    found = {
        "ds_moe_ext": own,
        host: version,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    return {f"the version of {name}": text.partition("+")[0] for name, text in found.items()}


def settings_of(settings: Settings, block: Mapping[str, Any]) -> Description:
    """What the block asks for, by key; ``settings`` was read from ``block``."""
    reported: dict[str, str] = {}
    for each in dataclasses.fields(settings):
        where = f"{BLOCK}.{each.name}"
        if each.name in _AS_WRITTEN:
            reported[where] = _text(block.get(each.name) or None)
        elif each.name not in _APART:
            reported.update(_flat(where, getattr(settings, each.name)))
    reported[f"{BLOCK}.report.trace_step"] = _text(settings.report.trace_step)
    trace = settings.trace
    steps = {"first_step": trace.first_step, "num_steps": trace.num_steps}
    reported[f"{BLOCK}.trace"] = _text(None if trace.path is None else steps)
    known = registered()
    is_choosing = issubclass(known.get(settings.strategy, object), Choosing)
    for name in known if is_choosing else (settings.strategy, settings.balance):
        if name is not None and name in known:
            where = f"{BLOCK}.{name}"
            reported.update(_flat(where, read_record(known[name], block.get(name) or {}, where)))
    hardware = None if settings.hardware is None else read_hardware(settings.hardware)
    reported.update(_flat(f"{BLOCK}.hardware", hardware))
    return reported


def layers_of(found: Iterable[Found]) -> Description:
    """The layers to be replaced, by name."""
    text = {}
    for layer in found:
        weights = ", ".join(
            f"{name} {list(shape)} {dtype.removeprefix('torch.')}{'' if is_trained else ' frozen'}"
            for name, shape, dtype, is_trained in layer.expert
        )
        text[layer.name] = f"{layer.num_experts} experts ({layer.kind}) of {weights}"
    return text


def weights_of(model: nn.Module) -> Description:
    """Types and shapes of a model's weights, by name."""
    return {
        f"the weight {name}": f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"
        + ("" if weight.requires_grad else ", frozen")
        for name, weight in model.named_parameters()
    }


def empty_of(model: nn.Module) -> Description:
    """How many of a model's weights and buffers have no elements yet: ranks make them together."""
    tensors = [*model.parameters(), *model.buffers()]
    return {"weights and buffers on the meta device": str(sum(t.is_meta for t in tensors))}


def _flat(where: str, value: Any) -> Iterator[tuple[str, str]]:
    """The fields of records, dotted."""
    if dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from _flat(f"{where}.{each.name}", getattr(value, each.name))
    else:
        yield where, _text(value)


def _text(value: Any) -> str:
    """As JSON has it; of an object of the user's own its class."""
    return json.dumps(value, sort_keys=True, default=lambda thing: type(thing).__qualname__)


REMEDY = (
    f"ds-moe-ext profile measures your cluster, and {BLOCK}.hardware names the file that it writes"
)


@dataclass(frozen=True)
class Cluster:
    """The cluster that sizes are priced for."""

    hardware: Hardware | None = None  # None where none is known
    # how it came to be that, or why there is none, for a person; empty where one is named
    reported: str = ""


UNKNOWN = Cluster()


def device_name(device: torch.device) -> str:
    """As its driver shows it; of a CPU the processor's, if that is known."""
    has_name = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if has_name else platform.processor()
    return name or device.type


def cluster_of(settings: Settings, device: torch.device, start: Start) -> Cluster:
    """The cluster of a run, in a start in which the ranks have compared settings. Collective,
    whatever these say. Raises ValueError where the file that they name cannot be read."""
    names = start.each_different("device", device_name(device))
    if settings.hardware is not None:
        return Cluster(read_hardware(settings.hardware))
    if len(names) > 1:
        unlike = " and ".join(map(repr, names))
        return Cluster(
            None, f"sizes were not priced, because ranks have different devices ({unlike})"
        )
    (name,) = names
    file = shipped_for(name)
    if file is None:
        return Cluster(
            None,
            f"sizes were not priced, because no shipped hardware file describes device {name!r}",
        )
    hardware = read_hardware(file)
    per_node = ranks_on_this_node() or hardware.ranks_per_node
    return Cluster(
        replace(hardware, ranks_per_node=per_node),
        f"the cluster is priced as configs/hardware/{file.name} with {per_node} ranks per "
        f"node, by its device name ({name})",
    )
