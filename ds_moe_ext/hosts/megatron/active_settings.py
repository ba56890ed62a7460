# SPDX-License-Identifier: Apache-2.0
"""The settings that this process runs Megatron by; and the worlds that they part its ranks into,
where they give ranks roles.

Megatron makes its groups and sizes of torch's default process group. So that attention ranks train
as if there were no others, and expert ranks likewise, the ranks of a launch are parted before
Megatron begins: ``RANK`` and ``WORLD_SIZE`` are those within the role, and the place where torch
keeps the default group is left to the role's own. The group of all ranks stays registered, so that
collectives in it and in groups made of it go on working; ``Worlds.together`` puts it back for a
while, for what asks for the default group.

Groups are named by a running number, and the names are keys in the launch's store. Each world has
numbers of its own, or those of a role would be taken for another's, or for those of a world before.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_moe_ext.core.layout import Roles
from ds_moe_ext.hosts.attachment import startup_check
from ds_moe_ext.hosts.attachment.notices import refuse
from ds_moe_ext.hosts.attachment.startup_check import Description, Start, is_first
from ds_moe_ext.hosts.megatron import FLAG
from ds_moe_ext.hosts.megatron.refusals import SETTINGS, by_device, refuse_with_roles
from ds_moe_ext.hosts.steps.host import device_names
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.strategies.settings import BLOCK, Settings, misspelt, read_file, read_settings

USE = "ds_moe_ext.use"
NOTHING: Description = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Chosen:
    """What was asked for."""

    settings: Settings  # the block
    strategy: Strategy
    reported: Description  # what of it must be the same on all ranks
    worlds: Worlds | None = None  # where the strategy gives ranks roles and they have been parted
    start: Start = field(default_factory=lambda: Start(USE))  # in which ranks compare it

    def whole_world(self) -> AbstractContextManager[None]:
        """The world is that of all ranks, inside the block."""
        return nullcontext() if self.worlds is None else self.worlds.together()

    def agree(self, more: Description = NOTHING) -> None:
        """Compare with other ranks what was asked for, and ``more``, once. Collective, over all
        ranks. Raises ValueError on all of them where something differs."""
        version = importlib.import_module("megatron.core").__version__
        self.start.agree(
            {**self.reported, **startup_check.versions("megatron-core", version), **more}
        )

    def report(self, error: Exception) -> None:
        """Let other ranks know why this one cannot start."""
        with self.whole_world():
            Start(USE).report(error)


_CHOSEN: list[Chosen] = []  # of this process: one or none


def chosen() -> Chosen | None:
    """What this process runs by; None where nothing was asked for."""
    return _CHOSEN[0] if _CHOSEN else None


def worlds() -> Worlds | None:
    """Of the ranks of this launch; None where they have not been parted."""
    asked = chosen()
    return None if asked is None else asked.worlds


def set_chosen(asked: Chosen | None) -> None:
    """Run by this from now on."""
    _CHOSEN[:] = [] if asked is None else [asked]


def read(given: str | Path | Mapping[str, Any]) -> Chosen | None:
    """What a document, or the JSON file of one, asks for; None where its block is not enabled.
    Raises ValueError where it is malformed, or asks for what cannot be done under Megatron."""
    source, document = read_document(given)
    reported = misspelt(document)
    if BLOCK not in document:
        raise ValueError(
            f"{FLAG} names {source}, which has no block {BLOCK!r}; "
            + (reported or "add one, or leave the flag out")
        )
    if reported and is_first():
        warnings.warn(f"{FLAG} names {source}: {reported}", stacklevel=3)
    settings, strategy = read_settings(document)
    if strategy is None:
        warnings.warn(
            f"{FLAG} names {source}, whose block {BLOCK} is not enabled, so Megatron would run "
            f"its own MoE layers; set {BLOCK}.enabled to true, or leave the flag out",
            stacklevel=3,
        )
        return None
    refuse(SETTINGS, settings)
    if strategy.has_roles and not by_device(strategy):
        assert strategy.roles is not None, "which says what it lacks"
        refuse_with_roles(settings, strategy)
    return Chosen(settings, strategy, startup_check.settings_of(settings, document[BLOCK]))


def read_document(given: str | Path | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Where it is from, for a person, and what is in it."""
    if isinstance(given, Mapping):
        return "a document", given
    path = Path(given)
    document = read_file(path, f"{FLAG} is {str(path)!r}")
    if not isinstance(document, Mapping):
        raise ValueError(f"{FLAG} names {str(path)!r}, whose JSON is not an object; make it one")
    return str(path), document


# Two worlds in one launch.

TRIED = "2.13"
"""Version of torch in which what is changed of it here was tried."""

_INTERNALS = (
    "_world.default_pg",
    "_world.group_count",
    "_world.pg_group_ranks",
    "_update_default_pg",
    "_get_default_group",
    "_get_default_store",
)
"""That, in ``torch.distributed.distributed_c10d``: no other module of ours rewrites it; ``comm``
asks for the store and the groups that are there."""

NUMBERS = 1_000_000  # of groups of a world, at most
_PARTS = count()  # how often this process was parted from others

_REPORTED = ("RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE")
"""What a launcher gives a process that is changed."""


class _Slot(NamedTuple):
    """Where torch keeps the default group, and the number of the next group's name."""

    group: dist.ProcessGroup | None
    number: int

    @classmethod
    def now(cls) -> _Slot:
        world: Any = c10d._world
        return cls(world.default_pg, world.group_count)

    def enter(self) -> None:
        world: Any = c10d._world
        world.group_count = self.number
        c10d._update_default_pg(self.group)


@dataclass(eq=False)
class Worlds:
    """The ranks of a launch, parted by role."""

    roles: Roles  # of the ranks of every ZP group
    rank: int  # of this process among all
    size: int  # ranks of the launch
    whole: dist.ProcessGroup  # all of them
    reported: dict[str, str | None]  # of the environment, as the launcher had it

    def __post_init__(self) -> None:
        self._whole = _Slot.now()
        self._of_whole = _known()  # groups whose ranks are numbered among all

    @property
    def is_attention(self) -> bool:
        return self.roles.is_attention(self.rank)

    @property
    def mates(self) -> list[int]:
        """The ranks of the launch that have the role of this one."""
        return self.roles.ranks_like(self.rank, self.size)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its role."""
        return self.mates[0] == self.rank

    @contextmanager
    def together(self) -> Iterator[None]:
        """The world is that of all ranks, inside the block, for all threads. Groups of the role are
        then of ranks among all."""
        own, mates = _Slot.now(), self.mates
        of_role = _known() - self._of_whole
        _renumber(of_role, mates.__getitem__)
        self._whole.enter()
        try:
            yield
        finally:
            self._whole = _Slot.now()
            self._of_whole = _known() - of_role
            _renumber(of_role, mates.index)
            own.enter()

    def rejoin(self) -> None:
        """Undo ``part``: the world is that of all ranks again."""
        own = _Slot.now().group
        if own is not None and own is not self.whole:
            self._whole.enter()
            dist.destroy_process_group(own)
        self._whole.enter()
        for name, value in self.reported.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _known() -> set[dist.ProcessGroup]:
    """Groups that this rank is in; torch also keeps what stands for all others."""
    world: Any = c10d._world
    return {group for group in world.pg_group_ranks if isinstance(group, dist.ProcessGroup)}


def _renumber(groups: Iterable[dist.ProcessGroup], number: Callable[[int], int]) -> None:
    """Let the members of groups go by other numbers of ranks in the world."""
    world: Any = c10d._world
    for group in groups:
        ranks = world.pg_group_ranks[group]
        world.pg_group_ranks[group] = {number(rank): place for rank, place in ranks.items()}


def part(roles: Roles, agree: Callable[[], None] = lambda: None) -> Worlds:
    """Part the ranks of this launch; ``agree`` compares the settings of all, once their world is
    there. Collective, over all of them. Raises ValueError where they are not whole ZP groups, or
    torch is of an unknown version.

    Where the world has been made already, that of the role is made here; else it is left to
    Megatron, or to who calls it, as ever.
    """
    _check_torch()
    was_made = dist.is_initialized()
    size = dist.get_world_size() if was_made else int(os.environ.get("WORLD_SIZE", "1"))
    if size % roles.size:
        raise ValueError(
            f"{BLOCK}.strategy needs {roles}, in groups of {roles.size}, which do not divide "
            f"the {size} ranks of the launch; launch a multiple of {roles.size}, as with "
            "torchrun --nproc_per_node, or choose other sizes"
        )
    if not was_made:
        _make_world()
    agree()
    whole: dist.ProcessGroup = c10d._get_default_group()
    reported = {name: os.environ.get(name) for name in _REPORTED}
    worlds = Worlds(roles, whole.rank(), size, whole, reported)
    rank, num_mates = worlds.mates.index(worlds.rank), len(worlds.mates)
    os.environ["RANK"] = os.environ["GROUP_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = str(num_mates)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)  # there is one that listens
    store: Any = c10d._get_default_store()
    _Slot(None, NUMBERS * (2 * next(_PARTS) + (1 if worlds.is_attention else 2))).enter()
    if was_made:
        backend = dist.get_backend(whole)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_mates)
    return worlds


def _make_world() -> None:
    """That of all ranks, as the launcher says."""
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if has_cuda else "gloo")


def with_roles(asked: Chosen) -> Chosen:
    """The same, with roles by the names of devices where those are asked for, and its ranks parted.
    Collective, over all of them. Raises ValueError where they are not whole ZP groups."""
    if by_device(asked.strategy):
        if not dist.is_initialized():
            _make_world()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        settled = asked.strategy.settled(lambda: device_names(device), None)
        asked = replace(asked, strategy=settled)
        refuse_with_roles(asked.settings, settled)
    assert asked.strategy.roles is not None, "else nobody asks"
    return replace(asked, worlds=part(asked.strategy.roles, asked.agree))


def _check_torch() -> None:
    """Raises ValueError where this version of torch keeps its default group otherwise."""
    for path in _INTERNALS:
        try:
            attrgetter(path)(c10d)
        except AttributeError as error:
            raise ValueError(
                f"{BLOCK}.strategy gives ranks roles, which needs {path} of "
                "torch.distributed.distributed_c10d under Megatron, but torch "
                f"{torch.__version__} does not have it; it was tested with torch {TRIED}: use "
                "that version, or another strategy"
            ) from error
