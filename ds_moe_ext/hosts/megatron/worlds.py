# SPDX-License-Identifier: Apache-2.0
"""Two worlds in one launch: Megatron knows the ranks of its own role only.

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

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ds_moe_ext.core.layout import Roles
from ds_moe_ext.strategies.settings import BLOCK

TRIED = "2.13"
"""Version of torch in which what this module changes of it was tried."""

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

NUMBERS = 1_000_000
"""Of groups of a world, at most."""

_PARTS = count()  # how often this process was parted from others

_TOLD = ("RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE")
"""What a launcher tells a process that is changed."""


@dataclass(frozen=True, eq=False)
class _Slot:
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
    """The ranks of a launch, parted by role.

    Attributes:
        roles: of the ranks of every ZP group.
        rank: of this process among all.
        size: ranks of the launch.
        whole: all of them.
        told: of the environment, as the launcher had it.
    """

    roles: Roles
    rank: int
    size: int
    whole: dist.ProcessGroup
    told: dict[str, str | None]
    _whole: _Slot = field(init=False)
    _of_whole: set[dist.ProcessGroup] = field(init=False)  # whose ranks are numbered among all

    def __post_init__(self) -> None:
        self._whole = _Slot.now()
        self._of_whole = _known()

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
        for name, value in self.told.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _ranks() -> dict[dist.ProcessGroup, dict[int, int]]:
    """Of torch: of each group, the number of a rank in the world -> its place in the group."""
    world: Any = c10d._world
    ranks: dict[dist.ProcessGroup, dict[int, int]] = world.pg_group_ranks
    return ranks


def _known() -> set[dist.ProcessGroup]:
    """Groups that this rank is in; torch also keeps what stands for all others."""
    return {group for group in _ranks() if isinstance(group, dist.ProcessGroup)}


def _renumber(groups: Iterable[dist.ProcessGroup], number: Callable[[int], int]) -> None:
    """Let the members of groups go by other numbers."""
    ranks = _ranks()
    for group in groups:
        ranks[group] = {number(rank): place for rank, place in ranks[group].items()}


def check_torch() -> None:
    """Raises ValueError where this version of torch keeps its default group otherwise."""
    for path in _INTERNALS:
        try:
            attrgetter(path)(c10d)
        except AttributeError as error:
            raise ValueError(
                f"{BLOCK}.strategy gives ranks roles, which under Megatron parts them by {path} of "
                f"torch.distributed.distributed_c10d, but torch {torch.__version__} has none; it "
                f"was tried with torch {TRIED}: use that version, or another strategy"
            ) from error


def part(roles: Roles, agree: Callable[[], None] = lambda: None) -> Worlds:
    """Part the ranks of this launch. Collective, over all of them.

    Where the world has been made already, that of the role is made here; else it is left to
    Megatron, or to who calls it, as ever.

    Args:
        roles: of the ranks of every ZP group.
        agree: compares the settings of all ranks, once their world is there.

    Raises:
        ValueError: the ranks are not whole ZP groups, or torch is of an unknown version.
    """
    check_torch()
    was_made = dist.is_initialized()
    size = dist.get_world_size() if was_made else int(os.environ.get("WORLD_SIZE", "1"))
    if size % roles.size:
        raise ValueError(
            f"{BLOCK}.strategy wants {roles}, in groups of {roles.size}, which do not divide the "
            f"{size} ranks of the launch; launch a multiple of {roles.size}, as with torchrun "
            "--nproc_per_node, or choose other sizes"
        )
    if not was_made:
        _make_whole()
    agree()
    told = {name: os.environ.get(name) for name in _TOLD}
    whole = c10d._get_default_group()
    worlds = Worlds(roles, whole.rank(), size, whole, told)
    mates = worlds.mates
    os.environ["RANK"] = os.environ["GROUP_RANK"] = str(mates.index(worlds.rank))
    os.environ["WORLD_SIZE"] = str(len(mates))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)  # there is one that listens
    store: Any = c10d._get_default_store()
    _Slot(None, NUMBERS * (2 * next(_PARTS) + (1 if worlds.is_attention else 2))).enter()
    if was_made:
        dist.init_process_group(
            dist.get_backend(whole),
            store=store,
            rank=mates.index(worlds.rank),
            world_size=len(mates),
        )
    return worlds


def _make_whole() -> None:
    """Make the world of all ranks."""
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if has_cuda else "gloo")
