"""Which ranks have attention and which have experts: the roles of zebra parallelism. Pure.

HeterMoE, section 3 (spec 2.1). A *ZP group* is M + N neighbouring ranks; it takes the place of an
expert-parallel grid, and each of its ranks is a cell. Data are parallel across the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Roles:
    """The roles in every ZP group.

    Attributes:
        attention_cells: places in the group, ascending, whose ranks have attention, gates,
            embeddings and head.
        expert_cells: those whose ranks have experts only.
    """

    attention_cells: tuple[int, ...]
    expert_cells: tuple[int, ...]

    @classmethod
    def first(cls, attention_size: int, expert_size: int) -> Roles:
        """Attention ranks first."""
        size = attention_size + expert_size
        return cls(tuple(range(attention_size)), tuple(range(attention_size, size)))

    def __str__(self) -> str:
        return f"{len(self.attention_cells)} attention + {len(self.expert_cells)} expert ranks"

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return len(self.attention_cells) + len(self.expert_cells)

    def is_attention(self, rank: int) -> bool:
        """Whether a rank of the world has attention."""
        return rank % self.size in self.attention_cells

    def ranks_like(self, rank: int, world_size: int) -> list[int]:
        """The ranks of the world that have the role of a rank."""
        role = self.is_attention(rank)
        return [other for other in range(world_size) if self.is_attention(other) == role]


@dataclass(frozen=True)
class Striping:
    """How the micro-batches of attention ranks run.

    Attributes:
        num_stripes: that the samples of an attention rank are cut into; None until it is settled.
        recomputes: expert ranks keep the rows that came in, and compute the rest again in backward.
    """

    num_stripes: int | None = None
    recomputes: bool = False


def roles_by_device(devices: Sequence[str], attention_device: str, size: int | None) -> Roles:
    """The roles that follow from the devices.

    Args:
        devices: name of each rank's.
        attention_device: part of the names of those that have attention.
        size: ranks of a ZP group; None takes all ranks for one.

    Raises:
        ValueError: no device is named so, or all are, or the groups are not whole or not alike.
    """
    size = len(devices) if size is None else size
    if len(devices) % size:
        raise ValueError(
            f"ds_moe_ext.zebra makes groups of {size} ranks, which do not divide the "
            f"{len(devices)} ranks of the run; choose attention_size and expert_size whose sum "
            f"divides {len(devices)}, or leave them out"
        )
    found = [attention_device.lower() in device.lower() for device in devices]
    patterns = sorted({tuple(found[i : i + size]) for i in range(0, len(found), size)})
    if len(patterns) > 1:
        raise ValueError(
            f"ds_moe_ext.zebra.attention_device is {attention_device!r}, but the groups of "
            f"{size} ranks differ in where such devices are: the ranks have "
            f"{', '.join(devices)}; order the hostfile so that all groups are alike"
        )
    (pattern,) = patterns
    if all(pattern) or not any(pattern):
        raise ValueError(
            f"ds_moe_ext.zebra.attention_device is {attention_device!r}, which "
            f"{'all' if all(pattern) else 'no'} ranks have: "
            f"{', '.join(sorted(set(devices)))}; name one of two kinds of device, or leave "
            "attention_device out and give attention_size and expert_size"
        )
    cells = range(size)
    return Roles(
        tuple(cell for cell in cells if pattern[cell]),
        tuple(cell for cell in cells if not pattern[cell]),
    )
