# SPDX-License-Identifier: Apache-2.0
"""Which ranks have attention and which have experts: the roles of zebra parallelism. Pure.

HeterMoE, section 3 (spec 2.1). A *ZP group* is M + N neighbouring ranks; it takes the place of an
expert-parallel grid, and each of its ranks is a cell. Data are parallel across the groups.
"""

from __future__ import annotations

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
